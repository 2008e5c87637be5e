"""PRM800K: the published counts, and every shape that a record can have."""

from __future__ import annotations

import json
import pathlib

import pytest

from cfprm_jax.data import Trajectory, read
from cfprm_jax.data.formats import ReadReport
from cfprm_jax.errors import UserError

INPUT = pathlib.Path(__file__).parent / "inputs" / "prm800k.jsonl"
X = None  # Unlabelled, in the tables below.


def listed(trajectories) -> list[tuple[str, tuple[str, ...], list]]:
    def labels(t: Trajectory) -> list:
        return [None if label != label else label for label in t.labels.tolist()]

    return [(t.source.split(":")[1], t.steps, labels(t)) for t in trajectories]


def test_every_shape() -> None:
    expected = [
        ("1", ("2 + 3 = 6.",), [0]),
        ("1", ("Let us add.",), [1]),
        ("1", ("2 + 3 = 5.", "5 + 4 = 8."), [1, 0]),
        ("1", ("2 + 3 = 5.", "So 8."), [1, 0]),
        ("1", ("2 + 3 = 5.", "5 + 4 = 9.", "We look at the sum again."), [1, 1, 1]),
        ("1", ("2 + 3 = 5.", "5 + 4 = 9.", "Nine.\n\n# Answer\n\n9"), [1, 1, 1]),
        ("2", ("Divide 6 by 2.", "6 / 2 = 2."), [1, 0]),
        ("2", ("Divide 6 by 2.", "6 / 2 = 3."), [1, 1]),
        ("2", ("Divide 6 by 2.",), [1]),
        ("3", ("7 is less than 9.",), [1]),
        # A chosen completion without a rating continues the path unlabelled; the human one beside it is not used.
        ("5", ("1 + 1 = 2.",), [1]),
        ("5", ("One and one.",), [X]),
        ("6", ("8 * 2 = 16.",), [1]),
    ]
    report = ReadReport()
    assert listed(read(INPUT, report=report)) == expected
    assert dict(report.left_out) == {
        "PRM800K completions without a rating, not chosen": 2,
        "PRM800K records without a rated or chosen step": 1,
        "PRM800K steps after a step with nothing chosen": 1,
    }
    assert report.rows == 6
    assert report.trajectories == len(expected)
    assert report.files == {"prm800k.jsonl": "prm800k"}


def test_the_path_alone_ends_with_the_error_that_was_found() -> None:
    assert listed(read(INPUT, alternatives=False)) == [
        ("1", ("2 + 3 = 5.", "5 + 4 = 9.", "Nine.\n\n# Answer\n\n9"), [1, 1, 1]),
        ("2", ("Divide 6 by 2.", "6 / 2 = 2."), [1, 0]),
        ("3", ("7 is less than 9.",), [1]),
        ("5", ("One and one.",), [X]),
        # Nothing chosen, but no error found either: there is no path.
    ]


def test_neutral_ratings() -> None:
    def of(neutral: str) -> list:
        return [entry for entry in listed(read(INPUT, neutral=neutral)) if entry[0] in "13"]

    negative = of("negative")
    assert ("1", ("Let us add.",), [0]) in negative
    assert ("1", ("2 + 3 = 5.", "5 + 4 = 9.", "We look at the sum again."), [1, 1, 0]) in negative
    assert ("3", ("7 is less than 9.",), [0]) in negative
    # drop: a neutral alternative is left out, a neutral step on the path stays without a label.
    dropped = of("drop")
    assert [entry for entry in negative if entry not in dropped and len(entry[1]) != 3] == [
        ("1", ("Let us add.",), [0]),
        ("3", ("7 is less than 9.",), [0]),
    ]
    assert ("3", ("7 is less than 9.",), [X]) in dropped
    report = ReadReport()
    list(read(INPUT, neutral="drop", report=report))
    assert report.left_out["PRM800K neutral alternatives (--neutral=drop)"] == 2


def test_answers_are_text() -> None:
    answers = {t.source.split(":")[1]: t.answer for t in read(INPUT)}
    assert answers == {"1": "9", "2": "3", "3": None, "5": "2", "6": None}


@pytest.mark.parametrize(
    ("name", "options", "trajectories", "steps", "negative"),
    [
        ("phase1_train", {}, 36_642, 622_860, 19_656),
        ("phase1_train", {"neutral": "negative"}, 36_642, 622_860, 29_890),
        ("phase1_test", {}, 3_582, 53_734, 1_970),
        ("original_samples", {}, 37, 220, 15),
        ("original_samples", {"alternatives": False}, 6, 45, 1),
    ],
)
def test_published_counts(shared, name: str, options: dict, trajectories: int, steps: int, negative: int) -> None:
    found = [(len(t.steps), int((t.labels == 0).sum())) for t in read(shared / f"data/prm800k/{name}.jsonl", **options)]
    assert len(found) == trajectories
    assert sum(count for count, _ in found) == steps
    assert sum(count for _, count in found) == negative


def recursive_expansion(steps: list[dict], prefix: tuple = ()) -> set[tuple]:
    """The expansion written a second time, over the tree instead of along the path: (text, label) by trajectory."""
    if not steps:
        return {prefix} if prefix else set()
    step, value = steps[0], {-1: 0, 0: 1, 1: 1, None: None}
    options = [(c["text"], value[c["rating"]]) for c in step["completions"] or ()]
    chosen, human = step["chosen_completion"], step["human_completion"]
    ends = {(*prefix, option) for i, option in enumerate(options) if i != chosen and option[1] is not None}
    if chosen is not None:
        return ends | recursive_expansion(steps[1:], (*prefix, options[chosen]))
    if human is not None:
        return ends | recursive_expansion(steps[1:], (*prefix, (human["text"], 1)))
    return ends | recursive_expansion([], prefix)


@pytest.mark.parametrize("name", ["original_samples", "phase1_test"])
def test_content_agrees_with_an_independent_expansion(shared, name: str) -> None:
    path = shared / f"data/prm800k/{name}.jsonl"
    found: dict[str, set[tuple]] = {}
    for source, steps, labels in listed(read(path)):
        found.setdefault(source, set()).add(tuple(zip(steps, labels, strict=True)))
    for line, record in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assert found.get(str(line), set()) == recursive_expansion(json.loads(record)["label"]["steps"])


def record(**step) -> dict:
    step = {"completions": [{"text": "a", "rating": 1}], "human_completion": None, "chosen_completion": 0} | step
    return {"question": {"problem": "q"}, "label": {"steps": [step]}}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (record(chosen_completion=1), "step 1: chosen_completion 1 is not an index of its 1 completions"),
        (record(chosen_completion=-1), "step 1: chosen_completion -1 is not an index"),
        (record(chosen_completion=True), "step 1: chosen_completion True is not an index"),
        (record(completions=None), "step 1: chosen_completion 0 is not an index of its 0 completions"),
        (record(completions=[{"text": "a", "rating": 2}]), "step 1: rating 2 is not -1, 0, 1 or null"),
        (record(completions=[{"text": "a", "rating": True}]), "step 1: rating True is not -1, 0, 1 or null"),
        (record(completions=[{"text": None, "rating": 1}]), "step 1: field 'text': expected a string, found None"),
        (record(completions=3), "step 1: field 'completions': expected a list, found 3"),
        (record(completions=["a"]), "step 1: completion: expected an object"),
        (record(human_completion=3), "step 1: human_completion: expected an object or null"),
        ({"question": {}, "label": {"steps": []}}, "missing field 'problem'"),
        ({"question": {"problem": "q"}, "label": {"steps": None}}, "field 'steps': expected a list"),
        ({"question": {"problem": "q"}, "label": {"steps": [None]}}, "step 1: expected an object"),
    ],
)
def test_malformed_records(tmp_path: pathlib.Path, row: dict, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError) as error:
        list(read(tmp_path / "x.jsonl"))
    assert str(error.value).startswith(f"x.jsonl:1: {message}")
