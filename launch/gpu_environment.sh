# shellcheck shell=bash
# Environment of JAX and XLA on NVIDIA GPUs; the other files source this. Variables that are set already are kept.

# JAX takes 75 % of a GPU's memory by default; a 7B full fine-tune needs the rest too. CUDA, cuDNN and NCCL
# live in the last 5 %.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.95}"

# XLA's effort level 1: latency-hiding scheduling, pipelined collectives and double-buffered loops, so that the next
# layer's weights are gathered while this one computes. XLA chooses, instead of single flags that come and go.
export JAX_OPTIMIZATION_LEVEL="${JAX_OPTIMIZATION_LEVEL:-O1}"

# With weights split over GPUs (fsdp), each layer's are gathered, and its gradients scattered, in as few messages as
# possible: up to 512 MiB, a layer of 7B in bfloat16. On one GPU there are none. XLA stops at a flag that it does not
# know, so this holds only flags that JAX 0.10 to 0.12 have.
readonly message_bytes=536870912
export XLA_FLAGS="--xla_gpu_all_gather_combine_threshold_bytes=$message_bytes --xla_gpu_reduce_scatter_combine_threshold_bytes=$message_bytes ${XLA_FLAGS:-}"
