"""The formats whose rows are single solutions, or prefixes of one: what each row becomes, and what is refused."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from cfprm_jax.data import Trajectory, read
from cfprm_jax.errors import UserError

INPUTS = pathlib.Path(__file__).parent / "inputs"


def given(name: str, **options) -> list[Trajectory]:
    return list(read(INPUTS / f"{name}.jsonl", **options))


def one(tmp_path: pathlib.Path, row: dict, **options) -> Trajectory:
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    (trajectory,) = read(tmp_path / "x.jsonl", **options)
    return trajectory


def test_stepwise() -> None:
    q4, x = "What is 4 + 4?", None
    five = ("a", "b", "c", "d", "e")
    assert given("stepwise") == [
        Trajectory(q4, ("Add.", "4 + 4 = 8."), [1, 0], "stepwise.jsonl:1"),
        Trajectory(q4, ("4 + 4 = 9.",), [0], "stepwise.jsonl:1"),
        Trajectory("What is 5 + 5?", five, [np.float32(0.7), x, x, 1, 0], "book:3", "7", "10"),
        Trajectory(q4, ("Again.",), [x], "stepwise.jsonl:4"),
    ]


def test_soft_labels_keep_their_float32(tmp_path: pathlib.Path) -> None:
    labels = [0.7, 0.1, 1e-30, 0.33333334, 1, 0]
    row = {"prompt": "q", "completions": ["s"] * len(labels), "labels": labels}
    np.testing.assert_array_equal(one(tmp_path, row).labels, np.array(labels, np.float32))


@pytest.mark.parametrize("value", [None, -100, -100.0, float("nan")])
def test_encodings_of_unlabelled(tmp_path: pathlib.Path, value: float | None) -> None:
    assert np.isnan(one(tmp_path, {"prompt": "q", "completions": ["s"], "labels": [value]}).labels[0])


def test_math_shepherd() -> None:
    question = "Tom has 2 apples and buys 3 - 1 more. How many?"
    first = ("Step 1: He buys 3 - 1 = 2.", "Step 2: 2 + 2 = 5.", "The answer is: 5")
    assert given("math_shepherd") == [
        Trajectory(question, first, [1, 0, 0], "math_shepherd.jsonl:1"),
        Trajectory(question, ("Step 1: 2 + 2 = 4.", "Step 2: So"), [1, None], "math_shepherd.jsonl:1"),
    ]


def test_published_math_shepherd_rows(shared: pathlib.Path) -> None:
    found = list(read(shared / "data/math_shepherd/samples.jsonl"))
    labels = [[1, 1, 1, 1, 0], [0, 0, 0], [0, 0], [0] * 5, [1, 0, 0, 0, 0], [0, 0], [0, 0, 0]]
    assert [t.labels.tolist() for t in found] == labels
    assert found[0].steps[4].startswith("Step 5: She spends 260 * 52")
    assert found[0].steps[4].endswith("The answer is: 13520")
    assert all(t.question.endswith("?") and t.steps[0].startswith("Step 1: ") for t in found)


def test_rlhflow() -> None:
    eggs = "A box holds 6 eggs. How many eggs do 2 boxes hold?"
    assert given("rlhflow") == [
        Trajectory(eggs, ("Step 1: 6 * 2 = 12.", "Step 2: The answer is 13."), [1, 0], "rlhflow.jsonl:1"),
        Trajectory(eggs, ("We multiply. Is it 12? Yes.",), [1], "rlhflow.jsonl:1"),
        Trajectory(
            "Simplify the expression.\n\n\\[ 2x + 3x \\]\n\nGive one term.",
            ("Both terms have x.", "So 5x."),
            [1, 1],
            "rlhflow.jsonl:3",
        ),
        Trajectory("Name a prime.", ("Step 1: 4 is prime.",), [0], "rlhflow.jsonl:4"),
    ]


def test_rest_mcts() -> None:
    question, nine, x = "What is 3 * 3 - 1?", "Step 1: 3 * 3 = 9.", None
    half, tenth, third = np.float32(0.5), np.float32(0.1), np.float32(1 / 3)
    assert given("rest_mcts") == [
        Trajectory(question, (nine, "Step 2: 9 - 1 = 8."), [half, 1], "rest_mcts.jsonl:1"),
        # Its second step has no row, hence no value.
        Trajectory(question, (nine, "Step 2: 9 - 1 = 7.", "Step 3: It is\n7."), [half, x, tenth], "rest_mcts.jsonl:1"),
        Trajectory(question, ("Step 1: 3 * 3 = 6.",), [0], "rest_mcts.jsonl:1"),
        # A prefix that comes again is of another search, and of another record.
        Trajectory(question, (nine,), [np.float32(0.7)], "rest_mcts.jsonl:5"),
        Trajectory("What is 9 / 3?", ("Step 1: 3.",), [third], "rest_mcts.jsonl:6"),
    ]


def test_ratings() -> None:
    steps = ("Double 2.", "It is 4.", "It is 5.", "Done.")

    def labelled(*labels) -> list[Trajectory]:
        redundancy = np.array([0, 1, np.nan, np.nan])
        return [Trajectory("What is 2 * 2?", steps, labels, "ratings.jsonl:1", redundancy=redundancy)]

    assert given("ratings") == labelled(1, 1, 0, None)
    assert given("ratings", neutral="negative") == labelled(1, 0, 0, None)
    assert given("ratings", neutral="drop") == labelled(1, None, 0, None)


def test_published_rated_solutions(shared: pathlib.Path) -> None:
    found = list(read(shared / "data/prm800k/labelled_solutions.jsonl"))
    assert len(found) == 1200
    assert sum(int((t.labels == 0).sum()) for t in found) == 987
    assert sum(len(t.steps) for t in found) == 987 + 6743 + 564


def conversation(*turns: tuple[str, str]) -> dict:
    return {"conversations": [{"role": role, "content": text} for role, text in turns]}


STEPWISE = {"prompt": "q", "completions": ["a", "b", "c"], "labels": [1, 0, 1]}
SHEPHERD = {"input": "Q? Step 1: a ки\nStep 2: b ки", "label": "Q? Step 1: a +\nStep 2: b -"}
TAG = SHEPHERD["input"].split()[4]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (STEPWISE | {"labels": [1, 0]}, "row with 3 steps and 2 labels"),
        (STEPWISE | {"labels": [1, 0, 1.7]}, "label 1.7 is outside [0, 1]"),
        (STEPWISE | {"labels": [1, 0, -1]}, "label -1 is outside [0, 1]"),
        (STEPWISE | {"labels": [1, 0, 10**400]}, "label inf is outside [0, 1]"),
        (STEPWISE | {"labels": [1, 0, "+"]}, "label '+' is not a number, true, false or null"),
        (STEPWISE | {"labels": 1}, "field 'labels': expected a list, found 1"),
        (STEPWISE | {"completions": [], "labels": []}, "row without steps"),
        (STEPWISE | {"completions": ["a", None, "c"]}, "field 'completions': entry 2: expected a string, found None"),
        (STEPWISE | {"completions": "abc"}, "field 'completions': expected a list, found 'abc'"),
        (STEPWISE | {"prompt": None}, "field 'prompt': expected a string, found None"),
        (STEPWISE | {"answer": {}}, "field 'answer': expected a string, found {}"),
        (SHEPHERD | {"label": "Q? Step 1: a +\nStep 2: b"}, "field 'label': after step 2: expected + or -, found ''"),
        (SHEPHERD | {"label": "Q? Step 1: a +\nStep 2: c -"}, "step 2 of 'input' is not in 'label' where it should be"),
        (SHEPHERD | {"label": "Q? Step 1: a +\nStep 2: b -\nStep 3: c -"}, "row with 2 steps in 'input' and more"),
        (SHEPHERD | {"input": "Q? Step 1: a"}, "field 'input': no step ends with the tag"),
        # The tag is Cyrillic; the Latin look-alike is text.
        (SHEPHERD | {"input": "Q? Step 1: a ku"}, "field 'input': no step ends with the tag"),
        ({"input": f"Q? a {TAG}", "label": "Q? a +"}, "field 'input': no 'Step 1:'"),
        (conversation(("user", "Q? a"), ("user", "b")), "expected a turn of the assistant, found one of the user"),
        (conversation(("user", "Q? a"), ("assistant", "yes")), "step 1: expected + or -, found 'yes'"),
        (conversation(("user", "Q? a"), ("assistant", "+"), ("user", "b")), "row with 2 steps and 1 labels"),
        (conversation(), "row with 0 steps and 0 labels"),
        (conversation(("tool", "Q?")), "turn 1: unknown role 'tool'"),
        (conversation(("user", "Only a question?"), ("assistant", "+")), "field 'conversations': the first turn"),
        ({"conversations": [1]}, "turn 1: expected an object, found 1"),
        ({"prompt_answer": "Problem: q\nSolution:\nStep 1: a", "label": 1.2}, "label 1.2 is outside [0, 1]"),
        ({"prompt_answer": "Problem: q\nSolution:\n", "label": 1}, "no step after 'Solution:'"),
        ({"prompt_answer": "q", "label": 1}, "expected 'Problem: ...' and, on a line of its own, 'Solution:'"),
        ({"problem": "q", "steps": ["a"], "ratings": [0.5]}, "rating 0.5 is not -1, 0, 1 or null"),
        ({"problem": "q", "steps": ["a"], "ratings": [1, 1]}, "row with 1 step and 2 labels"),
    ],
)
def test_malformed_rows(tmp_path: pathlib.Path, row: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        one(tmp_path, row)
    assert str(error.value).startswith("x.jsonl:1: ")
    assert message in str(error.value)


def test_stepwise_rows_have_their_granularity(tmp_path):
    row = {"prompt": "q", "completions": ["a\n\nb"], "labels": [1]}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "granularity": g}) + "\n" for g in (2, "whole")))
    assert [trajectory.granularity for trajectory in read(path)] == [2, "whole"]
    # Columns of tables that were joined, of which one has no granularity.
    path.write_text("".join(json.dumps({**row, "granularity": g}) + "\n" for g in (None, 2.0)))
    assert [trajectory.granularity for trajectory in read(path)] == [1, 2]
    path.write_text(json.dumps({**row, "granularity": 0}) + "\n")
    with pytest.raises(UserError, match=r'rows.jsonl:1: "granularity" is 0'):
        list(read(path))
