"""A run before its first step: what is built, and what is logged about it."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import pytest

from cfprm_jax import flags
from cfprm_jax.config import OptimizerConfig
from cfprm_jax.errors import UserError
from cfprm_jax.run import assembly, inputs, summary
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.setup import Setup, setup
from cfprm_jax.sharding import rules

RESERVED = "<|reserved_special_token_0|>"


def built(arguments: list[str], tmp_path: pathlib.Path, lines: list[str]) -> Setup:
    config = flags.parse(TrainConfig, ["train", *arguments])
    mesh = rules.make_mesh(config.device, jax.devices()[:1])
    return setup(config, mesh, inputs.materialise(config, tmp_path), log=lines.append)


def test_the_reserved_token_that_becomes_the_marker_is_logged(tiny, tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.directory / "model", model)
    for file in model.glob("tokenizer*.json"):
        file.write_text(file.read_text().replace("<extra_0>", RESERVED))
    renamed: list[str] = []
    made = built([*tiny.arguments("unused", model=model), "--marker=auto"], tmp_path, renamed)
    assert f"marker      the reserved token {RESERVED} is renamed to <extra_0>" in renamed
    assert made.tokenizer.convert_tokens_to_ids("<extra_0>") == 259
    plain: list[str] = []
    built([*tiny.arguments("unused"), "--marker=auto"], tmp_path, plain)
    assert not [line for line in plain if line.startswith("marker")]


def test_a_program_without_data_is_that_of_the_run(tiny, tmp_path: pathlib.Path) -> None:
    """plan and benches build it from the shape of the backbone alone."""
    lines: list[str] = []
    made = built(tiny.arguments("unused", head="mlp", optimizer="adamw", weight_decay=0.1), tmp_path, lines)
    network = assembly.define_network(made.config, made.network.config.backbone, made.program.mesh)
    assert network == made.network.config and network.head == "mlp" and network.dtype == "float32"
    alone = assembly.build_program(made.config, network, made.num_steps, made.program.mesh)
    assert jax.tree.map(str, alone.abstract_state()) == jax.tree.map(str, made.program.abstract_state())
    assert made.num_steps == made.data.loader.num_steps > 0
    assert [line.split()[0] for line in lines if line.startswith(("model", "steps"))] == ["model", "steps"]


def test_a_run_that_can_move_no_weight_is_noted(tiny, tmp_path: pathlib.Path) -> None:
    """Two steps at 2e-6 move nothing; a hundred of the same rate, or two of a large one, may."""
    few = OptimizerConfig(decay="linear", warmup_fraction=0.0)
    note = summary.little_movement(few, 2)
    assert note is not None and note.startswith(
        "2 steps at learning rates of at most 2e-06 move a weight by about 3e-06"
    )
    assert summary.little_movement(few, 200) is None
    assert summary.little_movement(OptimizerConfig(learning_rate=1e-2), 2) is None
    assert summary.little_movement(OptimizerConfig(learning_rate=0.0), 2) is None
    assert summary.little_movement(OptimizerConfig(learning_rate=1e-15), 2**31 - 1) is not None
    lines: list[str] = []
    built(tiny.arguments("unused", learning_rate=1e-6), tmp_path, lines)
    assert [line for line in lines if line.startswith("note  ") and "--learning_rate" in line]


def test_a_corpus_of_repeated_labels_is_noted(tiny, tmp_path: pathlib.Path) -> None:
    """Eight solutions share four steps: 40 labels of 12 distinct steps. Batches of the note have as many tokens."""
    rows = [{"prompt": "1+1", "completions": [*"abcd", f"x{k}"], "labels": [True] * 4 + [False]} for k in range(8)]
    data = tmp_path / "repeated.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines: list[str] = []
    arguments = tiny.arguments("unused", train_data=data, batch_size=4, learning_rate=1e-3)
    made = built(arguments, tmp_path, lines)
    (note,) = [line for line in lines if line.startswith("note  ")]
    assert "occurs 3.3 times on average" in note
    expanded = made.data.report["granularities"]["1"]["tokens_expanded"]
    assert expanded % 8 == 0 and f"--label_weight=node --batch_tokens={expanded // 2} " in note
    lines.clear()
    remedy = [word for word in note.split() if word.startswith("--")]
    built([*arguments, *remedy], tmp_path, lines)
    assert not [line for line in lines if line.startswith("note  ")]


@pytest.mark.parametrize(
    ("granularities", "times"),
    # The steps of the finest granularity over the distinct ones: 8 trajectories share 4 steps, or 2 windows of 2.
    [("given,1", 40 / 12), ("10,2", 24 / 10), ("given", 24 / 10), ("whole,given", 24 / 10), ("whole", 1.0)],
)
def test_repeated_labels_are_those_of_the_finest_granularity(
    tiny, tmp_path: pathlib.Path, granularities: str, times: float
) -> None:
    """Also where that is of windows without a size."""
    rows = [
        {"prompt": "1+1", "completions": [*"abcd", f"x{k}"], "labels": [True] * 4 + [False], "windows": [2, 2, 1]}
        for k in range(8)
    ]
    data = tmp_path / "windows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = tiny.arguments("unused", train_data=data, batch_size=4, granularities=granularities, learning_rate=1e-3)
    made = built(arguments, tmp_path, [])
    packing, loss = made.config.packing, made.config.loss
    note = summary.repeated_labels(made.data.report, packing, loss)
    assert note is None if times < 3 else f"occurs {times:.1f} times" in note
    counts = made.data.report["granularities"][granularities.split(",")[-1]]
    assert counts["labelled_steps"] / counts["distinct_labelled_steps"] == pytest.approx(times)


def test_a_length_beyond_the_positions_of_the_backbone_is_refused(tiny, tmp_path: pathlib.Path) -> None:
    raw = json.loads((tiny.directory / "model" / "config.json").read_text())
    longer = raw["max_position_embeddings"] + 1
    with pytest.raises(UserError, match="max_position_embeddings"):
        built(tiny.arguments("unused", max_length=longer, row_length=1024), tmp_path, [])
