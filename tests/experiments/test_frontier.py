"""The frontier: names of treatments, what they train, and which learning rate is reported."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from cfprm_jax.config import (
    AGGREGATIONS,
    DeviceConfig,
    EncodingConfig,
    GranularityConfig,
    LossConfig,
    PackingConfig,
    ReadConfig,
)
from cfprm_jax.data.corpus import open_corpus
from cfprm_jax.data.loader import Loader
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import frontier, frontier_report
from cfprm_jax.experiments.cell import labelled_steps
from cfprm_jax.experiments.frontier import FrontierConfig
from cfprm_jax.experiments.grid import Cell, frontier_cells
from cfprm_jax.experiments.runner import CellResult, _frontier_config
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.sharding import rules


def test_every_combination_and_controls_where_they_mean_something() -> None:
    axes = FrontierConfig(
        together=("1", "0"),
        label_weights=("trajectory", "node", "question"),
        negative_weights=("1", "2.5", "match"),
        step_tokens=("250", "1000"),
        train_tokens=("100000",),
        learning_rates=("1e-3", "0.002"),
    )
    grid = frontier_cells(("bce", "q_ranking"), ("some",), (0, 1), axes)
    assert len({cell.name for cell in grid}) == len(grid) == 2 * (2 * 2 * 2 * (3 + 1) + 2 * 2 * 2 * 3)
    assert [cell.seed for cell in grid] == sorted(cell.seed for cell in grid)
    found = [cell.what for cell in grid if cell.row == "bce" and cell.what.negative_weight == 2.5]
    assert found and all(what.label_weight == "trajectory" for what in found)
    one = grid[0].what
    assert (one.packing, one.record_chunk, one.label_weight) == ("sequence", 1, "trajectory")
    assert (one.batch_tokens, one.train_tokens, one.learning_rate, one.negative_weight) == (250, 100_000, 1e-3, 1.0)
    whole = frontier.treatment("together0.node.negativesmatch.step1000.train400000.rate1e-05")
    assert (whole.packing, whole.record_chunk, whole.negative_weight, whole.learning_rate) == ("tree", 0, 0.0, 1e-5)
    with pytest.raises(KeyError):
        Cell("some", "bce", "plainly", 0).what  # noqa: B018


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"step_tokens": ("0",)}, "--step_tokens: '0' is not a whole number from 1"),
        ({"together": ("1", "1")}, "--together is empty or names something twice"),
        ({"learning_rates": ("fast",)}, "--learning_rates: 'fast' is not a number"),
        ({"negative_weights": ("-1",)}, "--negative_weights: '-1' is not a positive number"),
        ({"label_weights": ()}, "must not be empty"),
    ],
)
def test_bad_axes(axes, message) -> None:
    with pytest.raises(UserError, match=message):
        frontier_cells(("bce",), ("some",), (0,), FrontierConfig(**axes))


def test_a_run_has_its_tokens(tmp_path) -> None:
    """Steps for as many computed tokens, in as many passes as that takes; negatives as among the distinct steps."""
    from cfprm_jax.synthetic.tokenizer import make_tokenizer

    rows = [
        {"prompt": "start=one+two", "completions": [*["so"] * n, "so=six"], "labels": [1] * n + [0], "source": f"r{r}"}
        for r in range(6)
        for n in range(8)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoding, granularity = EncodingConfig(system_prompt="", max_length=64), GranularityConfig()
    corpus = open_corpus(path, ReadConfig(), granularity, encoding, make_tokenizer(), cache_dir=tmp_path / "cache")
    base = TrainConfig(
        loss=LossConfig(loss="bce"),
        encoding=encoding,
        packing=PackingConfig(packing="tree", record_chunk=0, row_length=64),
    )
    mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    name = "together0.trajectory.negativesmatch.step100.train5000.rate0.003"
    config = _frontier_config(base, frontier.treatment(name), corpus, mesh)
    assert config.packing.batch_tokens == 100 and config.optimizer.learning_rate == 0.003
    loader = Loader(corpus, config.granularity, config.packing, encoding, seed=0)
    tokens = sum(loader.batch(k).tokens_computed for k in range(config.run.max_steps))
    assert config.run.max_steps <= loader.num_steps and tokens == pytest.approx(5000, rel=0.06)
    # By trajectory 8 negatives to 28 positives a record, distinct 8 to 7.
    assert config.loss.negative_weight == pytest.approx((8 / 7) / (48 / 168))
    found = _frontier_config(base, frontier.treatment(name.replace("match", "2")), corpus, mesh).loss
    assert found == LossConfig(loss="bce", negative_weight=2.0)


def test_the_rate_is_chosen_on_the_validation_set(tmp_path) -> None:
    """Which has another best rate than the test set; differences are to shuffled trajectories with every label."""
    rng = np.random.default_rng(0)
    values = {
        ("1.trajectory", "0.001"): (0.5, 0.6),
        ("1.trajectory", "0.002"): (0.6, 0.5),
        ("0.node", "0.001"): (0.7, 0.8),
    }
    done = []
    for seed in (0, 1):
        for (kind, rate), (validation, short) in values.items():
            name = f"together{kind}.negatives1.step1000.train100000.rate{rate}"
            right = {
                f"{test}/{aggregation}/all": np.full((50, 2), share) + 0.01 * rng.random((50, 2))
                for test, share in (("short", short), ("validation", validation))
                for aggregation in AGGREGATIONS
            }
            auroc = {test: {"all": 0.8, "distinct": 0.9} for test in ("short", "validation")}
            done.append(
                CellResult(
                    Cell("some", "bce", name, seed),
                    {"tokens": 99_000, "steps": 100, "auroc": auroc, "n": [8, 16]},
                    right,
                )
            )
    shuffled, whole = frontier_report.chosen(done, "all")
    assert shuffled.treatment.endswith("rate0.002") and not shuffled.difference
    assert shuffled.rates == {"0.001": pytest.approx(0.505, abs=2e-3), "0.002": pytest.approx(0.605, abs=2e-3)}
    assert whole.difference["short"].mean == pytest.approx(0.3, abs=1e-2)
    text = frontier_report.write(tmp_path, done, "all", {})
    assert "| whole records | node" in text and "0.9000" in text and "best on validation" in text
    assert json.loads((tmp_path / "frontier.json").read_text())["points"][1]["options"]["record_chunk"] == 0
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"


def test_auroc_by_distinct_step() -> None:
    """A right step that three candidates share counts once; what follows a mistake is no part of it."""
    items = [("q", ("a", "b")), ("q", ("a", "c", "d")), ("q", ("a",)), ("r", ("a",))]
    steps = labelled_steps(items, [[1, 0], [1, 0, 1], [1], [0]])
    assert steps is not None
    assert steps.item.tolist() == [0, 0, 1, 1, 2, 3] and steps.first.tolist() == [True, True, False, True, False, True]
    found = steps.auroc([np.array([1.0, 2.0]), np.array([1.0, 0.0, 9.0]), np.array([1.0]), None])
    assert found == {"all": 0.5, "distinct": 0.5}
    found = steps.auroc([np.array([3.0, 2.0]), np.array([1.0, 0.0, 9.0]), np.array([1.0]), np.array([4.0])])
    assert found == {"all": pytest.approx((2 + 1 + 1) / 9), "distinct": pytest.approx(2 / 3)}
    assert labelled_steps(items[:1], [None]) is None and labelled_steps(items[:1], [[]]) is None
    partly = labelled_steps(items[:2], [[None, 1], [1, None, 0]])
    assert partly is not None and list(zip(partly.item, partly.step, partly.label, strict=True)) == [
        (0, 1, True), (1, 0, True), (1, 2, False),
    ]  # fmt: skip
