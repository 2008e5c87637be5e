#!/usr/bin/env bash
#SBATCH --job-name=cfprm-score
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out
# Scores, samples or labels on many GPUs: one job per share of the questions, each with one GPU, started as GPUs become free.
# Usage, from a clone that all nodes see:
#   sbatch launch/slurm_array.sh score --checkpoint=runs/prm --input=candidates.jsonl --output=scored.jsonl
#   sbatch --array=0-63 launch/slurm_array.sh sample --model=models/policy --questions=test.jsonl --output=candidates.jsonl
# and when all have ended:
#   python -m cfprm_jax.score --merge='scored.*-of-*.jsonl' --output=scored.jsonl
# The array must begin at 0. A share that was preempted or failed resumes when its task runs again:
#   sbatch --array=3 --export=ALL,CFPRM_SHARDS=8 launch/slurm_array.sh score ...
set -euo pipefail

# Slurm runs a copy of this file, so its folder is not where the others are.
# shellcheck source=launch/gpu_environment.sh
source "${CFPRM_HOME:-${SLURM_SUBMIT_DIR:-.}}/launch/gpu_environment.sh"

command="$1"
shift
shares="${CFPRM_SHARDS:-$((SLURM_ARRAY_TASK_MAX + 1))}"
exec python -m "cfprm_jax.$command" --platform=gpu --resume=auto "--shard=$SLURM_ARRAY_TASK_ID/$shares" "$@"
