#!/usr/bin/env bash
# One TPU VM (a v6e-8 or v5p-8 host; a v5e-8 is too small for float32 AdamW on 7B). Usage, in a clone on the VM:
#   pip install '.[tpu]'
#   launch/tpu_vm.sh --flagfile=configs/paper/math_q_ranking_c2.flags
set -euo pipefail

exec python -m cfprm_jax.train --platform=tpu --mesh=data=1,fsdp=-1,tensor=1 "$@"
