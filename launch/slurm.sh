#!/usr/bin/env bash
#SBATCH --job-name=cfprm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# Nodes with eight H800 (or H100) on a Slurm cluster, one process per GPU. Usage, from a clone that all nodes see:
#   sbatch launch/slurm.sh --flagfile=configs/paper/math_q_ranking_c2.flags
#   sbatch --nodes=4 launch/slurm.sh --flagfile=...                             32 GPUs
#   sbatch --ntasks-per-node=1 --cpus-per-task=64 launch/slurm.sh --flagfile=...     one process per node instead
#   sbatch --ntasks-per-node=1 --gpus-per-node=1 --mem=120G launch/slurm.sh ...      one GPU
# The processes find each other by Slurm's variables. Ten minutes before the time limit, and before another job takes
# the nodes, Slurm sends SIGTERM: all save at one step. The same command resumes from there; with
# CFPRM_REQUEUE=1 (sbatch --export=ALL,CFPRM_REQUEUE=1) the job puts itself into the queue again.
set -euo pipefail

# Slurm runs a copy of this file, so its folder is not where the others are.
# shellcheck source=launch/gpu_environment.sh
source "${CFPRM_HOME:-${SLURM_SUBMIT_DIR:-.}}/launch/gpu_environment.sh"

# The exit status of a run that was stopped and has saved; no error of Python or Slurm has it.
readonly stopped=75
# Within a node weights are split (fsdp), over its NVLink; between nodes each has its own rows (data).
mesh="data=-1,fsdp=${SLURM_GPUS_ON_NODE:-1},tensor=1"

# Since Slurm 22.05 srun does not take the number of CPUs over from sbatch. When one process fails, all must end.
status=0
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}" --kill-on-bad-exit=1 \
  python -m cfprm_jax.train --platform=gpu --mesh="$mesh" --resume=auto --preemption_exit_code="$stopped" "$@" || status=$?

if [[ $status -eq $stopped ]]; then
  if [[ ${CFPRM_REQUEUE:-0} == 1 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit 0
fi
exit "$status"
