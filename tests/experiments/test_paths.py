"""Annotated paths: what becomes the path, what an alternative, and where a path ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cfprm_jax.config import EncodingConfig
from cfprm_jax.experiments import paths
from cfprm_jax.synthetic import judge
from cfprm_jax.synthetic.tokenizer import make_tokenizer
from cfprm_jax.synthetic.world import Problem

ENCODING = EncodingConfig(system_prompt="")
# start=three+two-four: five, one
PROBLEM = Problem(3, (2, -4))


class Script:
    """Samples that were written down, one list a round and prompt; remembers the prompts."""

    def __init__(self, rounds: Sequence[dict[str, list[str]]]) -> None:
        self.tokenizer = make_tokenizer()
        self.rounds, self.prompts = list(rounds), []

    def __call__(self, prompts: Sequence[paths.Prompt]) -> Iterator[Sequence[np.ndarray]]:
        texts = self.rounds.pop(0)
        self.prompts.append([self.tokenizer.decode(prompt.tokens.tolist()) for prompt in prompts])
        for prompt in prompts:
            samples = texts[prompt.name.split("/")[0]]
            yield [np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in samples]


def test_the_first_correct_sample_continues_the_path() -> None:
    other = Problem(0, (1,))
    script = Script(
        [
            {"0": ["three+two=six", "three+two=five", "so=three", "three+two=five"], "1": ["zero+one=two", " "]},
            {"0": ["five-four=two", "so", "five-four=one"], "1": ["answer=one"]},
            {"0": ["five-four=one", "nonsense"]},
            {"0": ["answer=two", "answer=one"]},
        ]
    )
    first, second = paths.annotate([PROBLEM, other], script, script.tokenizer, ENCODING, 10)
    assert first.steps == ["three+two=five", "so", "five-four=one", "answer=one"]
    assert first.alternatives == [
        (0, "three+two=six", 0),
        (0, "so=three", 1),
        (1, "five-four=two", 0),
        (1, "five-four=one", 1),
        (2, "nonsense", 0),
        (3, "answer=two", 0),
    ]
    assert first.complete and second.complete
    # Nothing was right, so that the true step was written.
    assert (second.steps, second.alternatives) == (["zero+one=one", "answer=one"], [(0, "zero+one=two", 0)])
    assert [len(prompts) for prompts in script.prompts] == [2, 2, 1, 1]
    assert script.prompts[2][0].endswith("three+two=five\n\nso\n\n")
    rows = list(first.rows("r", "one"))
    assert len(rows) == 7 and {row["source"] for row in rows} == {"r"}
    assert rows[2]["completions"] == ["three+two=five", "five-four=two"] and rows[2]["labels"] == [True, False]
    assert rows[-1]["completions"] == first.steps and rows[-1]["labels"] == [True] * 4
    assert [row["labels"] for row in second.rows("s", "one")] == [[False], [True, True]]


def test_a_path_without_an_end_is_cut() -> None:
    script = Script([{"0": ["so"]}] * 5)
    (path,) = paths.annotate([PROBLEM], script, script.tokenizer, ENCODING, 5)
    assert path.steps == ["so"] * 5 and not path.complete


def test_the_true_step_is_right_wherever_it_is_written() -> None:
    """Also between the halves of a step that is split in two, and after idle steps."""
    steps = ["so", "three+two"]
    for expected in ("=five", "five-four=one", "answer=one"):
        assert judge.true_step(PROBLEM, steps) == expected
        steps.append(expected)
        assert set(judge.judge(PROBLEM, steps).labels) == {1}
