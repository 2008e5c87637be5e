#!/usr/bin/env bash
# Train on one machine: all its GPUs, in one process. Usage, in a clone with the project installed:
#   launch/workstation.sh --flagfile=configs/paper/math_q_ranking_c2.flags [more flags]
# CUDA_VISIBLE_DEVICES=0,1 takes two of the GPUs. The same command resumes a run that was stopped or killed.
set -euo pipefail
# shellcheck source=launch/gpu_environment.sh
source "$(dirname "$0")/gpu_environment.sh"

# Weights and optimizer are split over all GPUs (fsdp); on one that changes nothing. Flags given by hand come last and win.
exec python -m cfprm_jax.train --platform=gpu --mesh=data=1,fsdp=-1,tensor=1 --resume=auto "$@"
