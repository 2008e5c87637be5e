#!/usr/bin/env bash
# Train on one machine with one or several GPUs (or on its CPU). Usage:
#   launch/workstation.sh --flagfile=configs/paper/math_q_ranking_c2.flags [more flags]
set -euo pipefail

# JAX takes 75 % of a GPU's memory unless told otherwise; a 7B full fine-tune needs the rest too.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.95}"
# XLA's effort level 1: latency-hiding scheduling and pipelined collectives, chosen by XLA instead of by single flags.
export JAX_OPTIMIZATION_LEVEL="${JAX_OPTIMIZATION_LEVEL:-O1}"

exec python -m cfprm_jax.train "$@"
