"""A real `vllm serve` on 127.0.0.1, from the program that CFPRM_JAX_VLLM names or that is on PATH."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import pytest
from tiny_runs import free_port

_START_SECONDS = 600
# Small models need neither compiled kernels nor most of the memory, which vLLM takes for its cache, of the CPU's, too.
_SMALL = ("--enforce-eager", "--gpu-memory-utilization=0.1")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # leave the cores to the system, which other tests use as well
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process fewer, each of which imports torch for itself
}


def program() -> str:
    """The path of `vllm`; skips the test where there is none."""
    found = shutil.which(os.environ.get("CFPRM_JAX_VLLM", "vllm"))
    if found is None:
        pytest.skip("needs vLLM: CFPRM_JAX_VLLM=/path/to/bin/vllm, or vllm on PATH")
    return found


@contextlib.contextmanager
def serving(arguments: Sequence[str], directory: pathlib.Path) -> Iterator[int]:
    """Runs `vllm` with arguments in a directory until the end of the block; the port.

    Args:
      arguments: after the name of the program: serve, the model, and its options.
    """
    port = free_port()
    command = [program(), *arguments, "--host=127.0.0.1", f"--port={port}", *_SMALL]
    log = directory / "vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=os.environ | _ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _wait(process, port, log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen, port: int, log: pathlib.Path) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"vllm serve did not start:\n{log.read_text()[-6000:]}")
