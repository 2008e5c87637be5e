"""Published rows of formats other than PRM800K train, too, with the tokenizer of Qwen2.5."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

from cfprm_jax import flags, train

pytestmark = pytest.mark.quick_compile

# A vocabulary of full size, as ids are those of the real tokenizer, and little else.
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("data", "c_max", "fraction", "trajectories"),
    [("prm800k/labelled_solutions.jsonl", 1, 0.02, 8), ("math_shepherd/samples.jsonl", 2, 0.0, 4)],
)
def test_two_steps(
    shared: pathlib.Path, tmp_path: pathlib.Path, data: str, c_max: int, fraction: float, trajectories: int
) -> None:
    """From the file to metrics and a checkpoint; the second granularity is reached where the corpus is small."""
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    for file in (shared / "data/tokenizers/qwen2.5").iterdir():
        (model / file.name).symlink_to(file)
    options = {
        "model": model,
        "init": "random",
        "train_data": shared / "data" / data,
        "c_max": c_max,
        "eval_fraction": fraction,
        **({"eval_max_trajectories": 8} if fraction else {}),
        "batch_size": trajectories,
        "max_length": 512,
        "row_length": 512,
        "dtype": "float32",
        "learning_rate": 1e-3,
        "max_steps": 2,
        "output_dir": run,
        "data_cache_dir": tmp_path / "cache",
        "compile_cache_dir": "",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    assert train.main(flags.parse(train.TrainConfig, ["train", *given])) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(math.isfinite(row["loss"]) and row["count"] > 0 and row["grad_norm"] > 0 for row in steps)
    assert steps[0]["trajectories"] == trajectories
    assert ("eval_loss" in rows[-1]) == bool(fraction)
    assert (run / "checkpoints" / "2").is_dir()
