#!/usr/bin/env bash
#SBATCH --job-name=cfprm
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=128G
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --output=%x-%j.out
# One node of a Slurm cluster, all its GPUs in one process. Usage:
#   sbatch --gpus-per-node=8 launch/slurm.sh --flagfile=configs/paper/math_q_ranking_c2.flags --mesh=data=1,fsdp=-1,tensor=1
# Slurm sends SIGTERM ten minutes before the limit; training then saves and exits, and the same command with --resume=auto goes on.
set -euo pipefail

export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.95}"
export JAX_OPTIMIZATION_LEVEL="${JAX_OPTIMIZATION_LEVEL:-O1}"

# Since Slurm 22.05 srun does not take the number of CPUs over from sbatch.
exec srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-16}" --kill-on-bad-exit=1 python -m cfprm_jax.train --platform=gpu "$@"
