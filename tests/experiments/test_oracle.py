"""Windows from exact redundancy: which steps are redundant, the sizes, the controls, and the cells of the grid."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.experiments import contrast_report, oracle
from cfprm_jax.experiments.contrasts import Results
from cfprm_jax.experiments.grid import Cell, oracle_cells
from cfprm_jax.experiments.runner import CellResult
from cfprm_jax.synthetic import judge
from cfprm_jax.synthetic.world import DAYS, Problem

QUESTION = "start=three+two-four"


def test_redundant_steps() -> None:
    steps = ["so=three", "three+two=five", "so=five", "so", "five-four", "=one", "five-four=one again", "answer=one"]
    assert oracle.redundant(QUESTION, steps) == [True, False, True, True, False, True, True, False]
    # A restated day that is wrong is a mistake, and so is what follows it.
    wrong = ["three+two=five", "so=six", "so", "answer=one"]
    assert oracle.redundant(QUESTION, wrong) == [False, False, False, False]
    with pytest.raises(UserError, match="is not a question of the laboratory"):
        oracle.redundant("What is 1 + 1?", steps)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("001101", (1, 3, 2)),
        ("1100", (3, 1)),
        ("111", (3,)),
        ("000", (1, 1, 1)),
        ("1", (1,)),
        ("0111", (4,)),
        ("1010", (3, 1)),
    ],
)
def test_sizes(marks, expected) -> None:
    assert oracle.sizes([mark == "1" for mark in marks]) == expected


def _write_rows(path, count: int) -> None:
    """Solutions that share prefixes; half of the steps are redundant."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(count):
            problem = Problem(number % 7, (1, -2) * 10)
            question, length = problem.question, int(rng.integers(2, 40))
            steps: list[str] = []
            while len(steps) < length:
                steps += [judge.true_step(problem, steps), f"so={DAYS[problem.days[len(steps) // 2 + 1]]}"]
            steps = steps[:length]
            row = {"prompt": question, "completions": steps, "labels": [1] * length, "source": question}
            file.write(json.dumps(row) + "\n")


def test_controls_merge_as_many_distinct_steps(tmp_path) -> None:
    source = tmp_path / "train.jsonl"
    _write_rows(source, 400)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    found = {}
    for kind in oracle.KINDS:
        target = tmp_path / f"{kind}.jsonl"
        oracle.write(source, target, kind, seed=3)
        found[kind] = [json.loads(line) for line in target.read_text().splitlines()]
        assert [{k: v for k, v in row.items() if k != "windows"} for row in found[kind]] == rows
        assert all(sum(row["windows"]) == len(row["completions"]) for row in found[kind])
        # Of two solutions with a common prefix, all windows but the last of the shorter are windows of the longer.
        by_question: dict[str, list[tuple[int, ...]]] = {}
        for row in found[kind]:
            by_question.setdefault(row["prompt"], []).append(tuple(row["windows"]))
        for sizes in by_question.values():
            longest = max(sizes, key=sum)
            assert all(one[:-1] == longest[: len(one) - 1] for one in sizes)
    longest = [
        max((r for r in found[k] if r["prompt"].startswith("start=zero")), key=lambda r: len(r["labels"]))
        for k in found
    ]
    assert len({tuple(row["windows"]) for row in longest}) == 3
    windows = {kind: len(one["windows"]) for kind, one in zip(found, longest, strict=True)}
    assert windows["oracle"] == -(-len(longest[0]["labels"]) // 2)
    assert all(abs(windows[kind] - windows["oracle"]) <= 6 for kind in ("anti", "random"))
    again = tmp_path / "again.jsonl"
    oracle.write(source, again, "random", seed=4)
    assert again.read_bytes() != (tmp_path / "random.jsonl").read_bytes()


def test_the_grid() -> None:
    grid = oracle_cells(("bce",), ("some", "none"), (0, 1))
    assert [cell.treatment for cell in grid if cell.level == "none" and cell.seed == 0] == ["plain_once", "c2_once"]
    assert {cell.treatment for cell in grid if cell.level == "some"} == set(oracle.TREATMENTS)
    what = Cell("some", "bce", "oracle", 0).what
    assert (what.granularities, what.label_weight, what.training_rows) == (("given", "1"), "node", "oracle")
    with pytest.raises(UserError, match="--rows"):
        oracle_cells(("orm",), ("some",), (0,))


def test_differences_are_paired(tmp_path) -> None:
    rng = np.random.default_rng(1)
    share = {"plain_once": 0.5, "c2_once": 0.5, "oracle": 0.6, "random": 0.55, "anti": 0.4}
    done = []
    for seed in (0, 1, 2):
        noise = rng.random((40, 2)) / 10
        for cell in oracle_cells(("bce",), ("some", "none"), (seed,)):
            right = {
                f"{test}/{aggregation}/all": share[cell.treatment] + noise
                for test in ("short", "long")
                for aggregation in ("min", "last")
            }
            done.append(CellResult(cell, {"n": [4, 8], "steps": 10, "tokens": 100}, right))
    what = contrast_report.COMPARISONS["oracle"]
    found = contrast_report.contrasts(what, Results(done, "all"))
    of = {(c.level, c.treatment, c.baseline, c.test): c.estimate for c in found}
    assert of["some", "oracle", "random", "all"].mean == pytest.approx(0.05)
    assert of["some", "oracle", "plain_once", "short"].low == pytest.approx(0.1)
    assert {level for level, *_ in of} == {"some", "none"} and ("none", "oracle", "random", "all") not in of
    text = contrast_report.write(tmp_path, what, done, "all", {})
    assert "+10.0 [10.0, 10.0]" in text and {p.name for p in tmp_path.iterdir()} == set(what.files)
