"""What a run opens before its first step."""

from __future__ import annotations

import json
import pathlib

import jax

from cfprm_jax import flags
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.run import data, inputs
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.sharding import rules


def test_held_out_solutions_of_one_step_are_no_error_for_a_coarse_to_fine_run(tiny, tmp_path) -> None:
    """Evaluation is at the finest granularity, so what has no coarser sample is evaluated all the same."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "q", "completions": ["a"], "labels": [1]}))
    config = flags.parse(TrainConfig, ["train", *tiny.arguments("nothing"), f"--eval_data={held_out}"])
    mesh = rules.make_mesh(config.device, jax.devices()[:1])
    tokenizer = load_tokenizer(tiny.directory / "model")
    logged: list[str] = []
    splits = data.open_splits(config, inputs.materialise(config, tmp_path), tokenizer, mesh, log=logged.append)
    assert [batch.trajectories for batch in splits.held_out] == [1]
    assert "held out    1 trajectories" in logged


def test_synthetic_names_files_generated_from_the_seed(tmp_path) -> None:
    """The embedded default needs no file: model without weights, own held-out problems, candidates."""
    config = flags.parse(TrainConfig, ["train", "--bon_candidates=synthetic"])
    sources = inputs.materialise(config, tmp_path)
    assert sources.init == "random"
    assert (sources.model / "config.json").is_file()
    files = [*sources.train, *sources.held_out, sources.candidates]
    assert len(set(files)) == 3
    assert all(pathlib.Path(file).parent == tmp_path / "synthetic" for file in files)
    named = flags.parse(TrainConfig, ["train", "--model=m", "--train_data=a,b", "--eval_data=c"])
    assert inputs.materialise(named, tmp_path) == inputs.Sources(
        pathlib.Path("m"), "pretrained", ("a", "b"), ("c",), ""
    )
