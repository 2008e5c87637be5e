"""Annotated paths, as PRM800K has them: a correct path, and the policy's alternatives at every step.

At every step the policy samples some next steps from the path so far, each is judged, and the first correct one, in the
order of the samples, becomes the path's next step. So the policy chooses the path among what is right. Where nothing
is, the true step is written in its place, as PRM800K's annotators did. All other distinct texts are alternatives: each
ends a solution that begins as the path does. The path ends with the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import transformers

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.inference.sampler import Prompt
from cfprm_jax.synthetic import judge
from cfprm_jax.synthetic.world import Problem

Draw = Callable[[Sequence[Prompt]], Iterator[Sequence[np.ndarray]]]
"""Prompts to the sampled next steps of each, as tokens without the one that ended them."""


@dataclasses.dataclass
class Path:
    """The path of one problem, as far as it goes.

    Attributes:
      steps: texts, all correct.
      alternatives: (length of the path before it, text, label).
      complete: whether nothing is to be added.
    """

    problem: Problem
    steps: list[str] = dataclasses.field(default_factory=list)
    alternatives: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
    complete: bool = False

    def take(self, texts: Sequence[str]) -> None:
        """Judge sampled next steps, and add them."""
        chosen: str | None = None
        for text in dict.fromkeys(text for text in texts if text.strip()):
            label = judge.judge(self.problem, [*self.steps, text]).labels[-1]
            if label and chosen is None:
                chosen = text
            else:
                self.alternatives.append((len(self.steps), text, label))
        self.steps.append(chosen or judge.true_step(self.problem, self.steps))
        self.complete = self.steps[-1].startswith("answer")

    def rows(self, name: str, answer: str) -> Iterator[dict[str, Any]]:
        """Stepwise rows, which share a source: every alternative after the path to it, and the path."""
        solutions = [([*self.steps[:n], text], [*[1] * n, label]) for n, text, label in self.alternatives]
        for number, (steps, labels) in enumerate([*solutions, (self.steps, [1] * len(self.steps))]):
            if steps:
                yield {
                    "id": f"{name}_{number}",
                    "prompt": self.problem.question,
                    "completions": steps,
                    "labels": [bool(label) for label in labels],
                    "answer": answer,
                    "source": name,
                }


def annotate(
    problems: Sequence[Problem],
    draw: Draw,
    tokenizer: transformers.PreTrainedTokenizerBase,
    encoding: EncodingConfig,
    longest: int,
) -> list[Path]:
    """The paths of all problems, one step of each at a time.

    Args:
      draw: samples next steps.
      longest: most steps of a path.
    """
    encoder = Encoder(tokenizer, encoding)
    starts = [one.tokens for one in encoder.encode_many([(problem.question, (), None) for problem in problems])]
    paths = [Path(problem) for problem in problems]
    for step in range(longest):
        open_paths = [number for number, path in enumerate(paths) if not path.complete]
        if not open_paths:
            break
        texts = ["".join(text + encoding.separator for text in paths[number].steps) for number in open_paths]
        tokenised = tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = [
            Prompt(f"{number}/{step}", np.concatenate([starts[number], np.asarray(ids, np.int32)]))
            for number, ids in zip(open_paths, tokenised, strict=True)
        ]
        for number, samples in zip(open_paths, draw(prompts), strict=True):
            paths[number].take(tokenizer.batch_decode([one.tolist() for one in samples]))
    return paths
