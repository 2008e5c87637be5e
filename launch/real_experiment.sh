#!/usr/bin/env bash
# The paper's rows on real weights and data, in ten minutes of one H100 by estimate: 17 runs, each trained on the first RECORDS
# records of PRM800K phase 1 and judged on a MATH500 pool. docs/experiments.md has the estimate behind that.
#   MODEL=models/Qwen2.5-0.5B-Instruct PRM800K=data/prm800k/phase1_train.jsonl POOL=data/math500_pool.jsonl.gz launch/real_experiment.sh
# More flags may follow, such as --seeds=0,1,2 or --platform=cpu. What was done is not done again.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${MODEL:?a Hugging Face directory}" "${PRM800K:?the file phase1_train.jsonl}" "${POOL:?candidates with "correct"}"
OUT=${OUT:-runs/real_experiment}
RECORDS=${RECORDS:-50}

mkdir -p "$OUT"
head -n "$RECORDS" "$PRM800K" > "$OUT/train.jsonl"
exec "${PYTHON:-python}" -m cfprm_jax.experiment --flagfile=configs/real/phase1.flags \
  --model="$MODEL" --train_data="$OUT/train.jsonl" --tests="MATH500=$POOL" --output_dir="$OUT" "$@"
