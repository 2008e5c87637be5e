"""Kinds of labels from the same rollouts: the counts of rows, the judge, and the cells of the grid."""

from __future__ import annotations

import json

import jax
import pytest
from tiny_policies import write_language_model

from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import rolled
from cfprm_jax.experiments.grid import Cell, label_cells
from cfprm_jax.sharding import rules
from cfprm_jax.synthetic import judge
from cfprm_jax.synthetic.world import Problem

ROWS = [
    (Problem(3, (2, -4)), ["three+two=five", "five-four=one", "answer=one"]),
    (Problem(3, (2, -4)), ["three+two=five", "five-four=two"]),
    (Problem(3, (2, -4)), ["three+two=six"]),
    (Problem(0, (1,)), ["zero+one=one", "answer=two"]),
]


def _read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_counts(tmp_path) -> None:
    """Of scripted completions, of which a known number reaches the right answer."""
    source, target = tmp_path / "train.jsonl", tmp_path / "rolled.jsonl"
    rows = []
    for problem, steps in ROWS:
        labels = list(judge.judge(problem, steps).labels)
        rows.append({"prompt": problem.question, "completions": steps, "labels": labels})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = []

    def complete(prefixes, rollouts):
        asked.extend(prefixes)
        for question, *steps in prefixes:
            problem = judge.parse_problem(question)
            right = list(steps)
            while not right or not right[-1].startswith("answer"):
                right.append(judge.true_step(problem, right))
            wins = rollouts - 2 * len(steps)  # the rest stops short of an answer
            texts = ["".join(f"{step}\n\n" for step in right[len(steps) :])] * wins
            yield texts + ["so"] * (rollouts - wins)

    rolled.write(source, target, complete, 6, "\n\n")
    found = _read(target)
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    assert [row["rollouts"] for row in found] == [[6] * len(row["completions"]) for row in rows]
    assert all((row["question_successes"], row["question_rollouts"]) == (6, 6) for row in found)
    # A stated answer leaves nothing to sample, and each distinct prefix is sampled once.
    assert [row["successes"] for row in found] == [[4, 2, 6], [4, 2], [4], [4, 0]]
    assert [row["correct"] for row in found] == [True, False, False, False]
    assert len(asked) == len(set(asked)) == 7 and not any(prefix[-1].startswith("answer") for prefix in asked)


def test_samples_depend_on_their_own_prefix_alone(tmp_path) -> None:
    """Fewer rollouts are the first ones, whatever else is sampled."""
    pytest.importorskip("torch")
    directory, _ = write_language_model(tmp_path, tied=True)
    encoding, mesh = EncodingConfig(system_prompt="", max_length=24), rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    complete = rolled.sampled(directory, encoding, mesh, temperature=1.0, seed=1)
    prefixes = [(ROWS[0][0].question, *ROWS[0][1][:end]) for end in range(3)]
    many, few = complete(prefixes, 6), complete(prefixes[::-1][:2], 3)
    assert [texts[:3] for texts in many[:0:-1]] == few
    assert len({text for texts in many for text in texts}) == 18
    # All rollouts at a temperature of 0 are the most probable text.
    (greedy,) = rolled.sampled(directory, encoding, mesh, temperature=0.0, seed=1)(prefixes[:1], 6)
    assert len(greedy) == 6 and len(set(greedy)) == 1


def test_the_judge(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stay where both name the same first error; a judge who is wrong by chance loses some."""
    rows = [
        {"labels": [1, 0], "successes": [3, 0]},
        {"labels": [1, 0], "successes": [3, 1]},
        {"labels": [1, 1], "successes": [3, 2]},
        {"labels": [1, 1], "successes": [0, 3]},
    ]
    source, target = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows * 500))
    monkeypatch.setattr(rolled, "JUDGE_ERROR", 0.0)
    rolled.keep_consensus(source, target, 0)
    assert _read(target) == [rows[0], rows[2]] * 500
    monkeypatch.undo()
    rolled.keep_consensus(source, target, 0)
    kept = _read(target)
    assert 860 < sum(row in (rows[0], rows[2]) for row in kept) < 940
    # The wrong judge may agree with the wrong count: one of the two other verdicts.
    assert 20 < sum(row in (rows[1], rows[3]) for row in kept) < 80


def test_the_grid() -> None:
    grid = label_cells(("bce", "mse"), ("some",), (0, 1))
    assert [cell.treatment for cell in grid[: len(rolled.TREATMENTS)]] == list(rolled.TREATMENTS)
    what = Cell("some", "bce", "self_denoised", 0).what
    assert (what.estimate, what.training_rows, what.label_weight) == ("self_denoised", "rolled", "node")
    assert Cell("some", "bce", "consensus", 0).what.training_rows == "consensus"
    with pytest.raises(UserError, match="--rows"):
        label_cells(("orm",), ("some",), (0,))
