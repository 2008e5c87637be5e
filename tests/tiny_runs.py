"""Real runs of train, of a tiny model, in processes of their own: started, waited for, read back."""

from __future__ import annotations

import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import safetensors.numpy
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from cfprm_jax.huggingface import loading
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.models import parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.run.metrics import MEASURED

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Compilation is most of what a tiny run computes.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(directory: pathlib.Path) -> None:
    """config.json of a tiny Qwen2 and a byte-level tokenizer, no weights."""
    directory.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.save_pretrained(directory)
    config = {
        "model_type": "qwen2",
        "vocab_size": 264,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))


def write_weights(directory: pathlib.Path) -> None:
    """Random float32 weights that bfloat16 does not hold."""
    config = PRMConfig(loading.read_config(directory)[0])
    generator = np.random.default_rng(0)
    tensors = {}
    for path, spec in parameters.walk(parameters.param_specs(config)):
        if path.startswith("head."):
            continue
        for name in spec.hf_names():
            noise = generator.standard_normal(spec.shape[1:] if spec.stacked else spec.shape, np.float32)
            tensors[name] = 1 + 0.2 * noise if spec.kind == "norm" else 0.3 * noise
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def write_corpus(path: pathlib.Path, questions: int) -> None:
    """Stepwise rows, three solutions of each question, with soft, missing and hard labels."""
    rng = random.Random(7)
    with path.open("w") as file:
        for q in range(questions):
            steps = [f"{rng.randint(1, 99)}+{q}" for _ in range(4)]
            for _ in range(3):
                labels = [rng.choice([1.0, 1.0, 0.0, 0.7, None]) for _ in steps[:3]] + [1.0]
                row = {"prompt": f"What is {q}?", "completions": [*steps[:3], str(rng.random())], "labels": labels}
                file.write(json.dumps(row) + "\n")


# The real command, with something that happens at certain moments of it.
PATCHED = """
import os, runpy, signal, sys, time
from cfprm_jax.checkpoints import saving
from cfprm_jax.run import best_of_n, evaluation, loop

def before(owner, name, call, act):
    whole, calls = getattr(owner, name), [0]
    def counted(*arguments, **named):
        calls[0] += 1
        if calls[0] == call:
            act()
        return whole(*arguments, **named)
    setattr(owner, name, counted)

def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.1)

def wait():
    while not os.path.exists(f"{directory}/{{os.getpid()}}.released"):
        time.sleep(0.001)

{patch}
runpy.run_module("cfprm_jax.train", run_name="__main__", alter_sys=True)
"""


# A run that a test sends a signal to could be over before, as the test may wait for a processor. So it waits at a place
# of these until it is killed or released.
BEFORE_BEST_OF_N = 'before(best_of_n, "score", 1, wait)'


def before_step(step: int) -> str:
    """The patch that waits before a step is computed; the one before the last is not logged then."""
    return f'before(loop._Loop, "dispatch", {step}, wait)'


class TinyRuns:
    """Runs of one model on one corpus, each in a directory of its own.

    Attributes:
      directory: where model, corpus, tokenised corpora and runs are.
      compiled: where compiled programs are kept.
    """

    def __init__(self, directory: pathlib.Path, compiled: pathlib.Path) -> None:
        self.directory, self.compiled = directory, compiled
        write_model(directory / "model")
        write_corpus(directory / "train.jsonl", 32)

    def arguments(self, run: str, **options) -> list[str]:
        """Two granularities of 96 trajectories in batches of 6 less the held-out ones; one batch shape."""
        values = {
            "model": self.directory / "model",
            "init": "random",
            "train_data": self.directory / "train.jsonl",
            "eval_fraction": 0.2,
            "c_max": 2,
            "dtype": "float32",
            "learning_rate": 0.01,
            "system_prompt": "Score.",
            "max_length": 128,
            "row_length": 128,
            "packing": "none",
            "batch_size": 6,
            "checkpoint_every": 3,
            "log_every": 5,
            "output_dir": self.directory / run,
            "data_cache_dir": self.directory / "cache",
            "logger": "",  # tensorboardX imports torch where that is installed, which takes seconds
            **options,
        }
        return [f"--{name}={value}" for name, value in values.items()]

    def start(self, arguments: list[str], devices: int = 1, *, patch: str = "", **environment: str) -> subprocess.Popen:
        """One process of train.

        Args:
          patch: code of PATCHED that runs before the command.
        """
        command = ["-m", "cfprm_jax.train"]
        if patch:
            command = ["-c", PATCHED.format(directory=self.directory, patch=patch)]
        return subprocess.Popen(
            [sys.executable, *command, *arguments, f"--compile_cache_dir={self.compiled}"],
            env=self.environment(devices) | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def release(self, process: subprocess.Popen) -> None:
        """Let a process that waits go on."""
        (self.directory / f"{process.pid}.released").touch()

    def environment(self, devices: int = 1) -> dict[str, str]:
        """The environment of a process with the given number of CPU devices."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start_two(
        self, arguments: list[str], *only_second: str, devices: int = 1, patch: str = ""
    ) -> list[subprocess.Popen]:
        """Two processes of one run; only_second are more flags of the second, which alone is patched."""
        given = [*arguments, f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--heartbeat_timeout=10"]
        return [
            self.start([*given, f"--process_id={i}", *(only_second if i else ())], devices, patch=patch if i else "")
            for i in range(2)
        ]

    def straight(self) -> tuple[pathlib.Path, str]:
        """An undisturbed run and what it printed; made once."""
        run, text = self.directory / "straight", self.directory / "straight.txt"
        if not text.exists():
            text.write_text(finish(self.start(self.arguments("straight", logger="tensorboard"))))
        return run, text.read_text()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def finish(process: subprocess.Popen, status: int = 0) -> str:
    """Wait for a process to end with this status; what it printed."""
    try:
        text, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == status, f"ended with {process.returncode}, expected {status}:\n{text}"
    return text


def rows(run: pathlib.Path) -> list[dict]:
    """metrics.jsonl without times and figures of the machine."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]


def wait_for_step(process: subprocess.Popen, run: pathlib.Path, step: int) -> None:
    """Until metrics.jsonl has a line of this step."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.002)
    process.kill()
    raise AssertionError(f"step {step} did not come: {process.communicate()[0]}")


def params(run: pathlib.Path, step: int | None = None):
    """Of the newest checkpoint of a run, or of another one."""
    path = run if step is None else run / "checkpoints" / str(step)
    return loaded_prm.load_for_inference(path, "float32").params


def same_result(a: pathlib.Path, b: pathlib.Path) -> None:
    """Two runs have the same metrics, checkpoint and description of it, to the bit."""
    assert rows(a) == rows(b)
    first, second = (loaded_prm.load_for_inference(run, "float32") for run in (a, b))
    assert first.meta == second.meta
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
