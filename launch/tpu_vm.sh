#!/usr/bin/env bash
# One TPU VM (a v5e-8, v6e-8 or v5p-8 host). Usage, on the VM:
#   pip install 'cfprm-jax[tpu]'
#   launch/tpu_vm.sh --flagfile=configs/paper/math_q_ranking_c2.flags
set -euo pipefail

exec python -m cfprm_jax.train --platform=tpu --mesh=data=1,fsdp=-1,tensor=1 "$@"
