#!/usr/bin/env bash
# A TPU VM (such as v6e-8), or every host of a pod slice (such as v5p-32). Usage, in a clone on the VM:
#   pip install '.[tpu]'
#   launch/tpu_vm.sh --flagfile=configs/paper/math_q_ranking_c2.flags
# and for a slice, the same on all hosts at once; model, corpora and --output_dir on a file system that all of them see:
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \
#     --command='cd cfprm_jax && launch/tpu_vm.sh --flagfile=configs/paper/math_q_ranking_c2.flags'
# The hosts find each other by the TPU's own metadata. The same command resumes a run that was stopped or killed.
set -euo pipefail

# The gradients' sums over the data axis overlap with the backward pass, also where they differ in size; both are off by
# default. libtpu stops at a flag that it does not know; these were tried with libtpu 0.0.52.
export LIBTPU_INIT_ARGS="--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true ${LIBTPU_INIT_ARGS:-}"

# Weights and optimizer are split over all chips of a slice, which are close to each other. Flags given by hand win.
exec python -m cfprm_jax.train --platform=tpu --mesh=data=1,fsdp=-1,tensor=1 --resume=auto "$@"
