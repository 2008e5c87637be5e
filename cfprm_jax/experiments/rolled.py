"""Kinds of step labels from the same rollouts, in the laboratory, where exact labels are known.

Every distinct prefix of a training set is completed --rollouts times by the policy that wrote the solutions, and a
completion succeeds if it reaches the right answer. The counts are fields of the rows, as those of the label command,
and each treatment derives other labels from them (:mod:`cfprm_jax.data.estimates`). So all kinds of labels have the
same solutions and the same rollouts.

"consensus" keeps the solutions for which hard labels and a judge name the same first error, or none (Qwen2.5-Math-PRM,
arXiv 2501.07301). The judge names the exact first error, but for a share of the solutions another step or none, at
random.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.data.steps import split_steps
from cfprm_jax.experiments.oracle import Prefix
from cfprm_jax.experiments.treatment import EXACT, Treatment
from cfprm_jax.runtime import atomic
from cfprm_jax.synthetic import judge
from cfprm_jax.synthetic.world import Problem

ROLLED, CONSENSUS = "rolled", "consensus"
FILES = (ROLLED, CONSENSUS)
"""Kinds of training files."""

JUDGE_ERROR = 0.1
"""Share of the solutions whose first error the judge names wrongly."""

_BATCH_ROWS = 256

Complete = Callable[[Sequence[Prefix], int], Iterable[list[str]]]
"""Prefixes and a number of rollouts to the texts that follow each prefix."""


def _treatment(title: str, estimate: str, rows: str = ROLLED) -> Treatment:
    return Treatment(
        title, ("1",), packing="tree", steps=EXACT, label_weight="node", training_rows=rows, estimate=estimate
    )


TREATMENTS = {
    "exact": _treatment("exact", "labels"),
    "hard": _treatment("hard", "hard"),
    "soft": _treatment("soft", "soft"),
    "relative": _treatment("relative", "relative"),
    "self_denoised": _treatment("self-denoised", "self_denoised"),
    "consensus": _treatment("hard, where a judge agrees", "hard", CONSENSUS),
}
"""Whole records, each label once, and as many steps for all."""

CONTRASTS = (
    *(("exact", name) for name in ("hard", "soft")),
    *((name, "hard") for name in ("soft", "relative", "self_denoised", "consensus")),
)


def suffix(rollouts: int, temperature: float) -> str:
    """What the name of a training file has for its rollouts; of a temperature of 1, the default, nothing."""
    return f"{rollouts}" if temperature == 1 else f"{rollouts}.temperature{temperature:g}"


def write(source: pathlib.Path, target: pathlib.Path, complete: Complete, rollouts: int, separator: str) -> None:
    """Write the rows of a training set with "successes", "rollouts", "correct" and the question's own counts."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    problems = {row["prompt"]: judge.parse_problem(row["prompt"]) for row in rows}
    wanted = list(dict.fromkeys(prefix for row in rows for prefix in _prefixes(row)))
    counts = {}
    open_prefixes = []
    for question, *steps in wanted:
        if steps and steps[-1].startswith("answer"):
            counts[question, *steps] = rollouts * _right(problems[question], steps)  # there is nothing left to sample
        else:
            open_prefixes.append((question, *steps))
    for prefix, texts in zip(open_prefixes, complete(open_prefixes, rollouts), strict=True):
        question, *steps = prefix
        ended = [[*steps, *split_steps(text, separator)] for text in texts]
        counts[prefix] = sum(_right(problems[question], one) for one in ended)
    with atomic.writing(target) as file:
        for row in rows:
            of_question, *found = [counts[prefix] for prefix in _prefixes(row)]
            file.write(
                atomic.encode_json(
                    {
                        **row,
                        "successes": found,
                        "rollouts": [rollouts] * len(found),
                        "correct": bool(_right(problems[row["prompt"]], row["completions"])),
                        "question_successes": of_question,
                        "question_rollouts": rollouts,
                        "policy": "laboratory",
                    }
                )
            )


def describe(path: pathlib.Path) -> str:
    """Rates of success after right and after wrong steps of a rolled file, in one line."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    labels = np.concatenate([row["labels"] for row in rows]).astype(bool)
    rates = np.concatenate([np.divide(row["successes"], row["rollouts"]) for row in rows])
    return (
        f"{len(rows):,} solutions, {rates[labels].mean():.1%} of the rollouts after right steps succeed, "
        f"{rates[~labels].mean():.1%} of those after wrong ones"
    )


def keep_consensus(source: pathlib.Path, target: pathlib.Path, seed: int) -> None:
    """Write the rolled rows for which the counts and the judge name the same first error, or both none."""
    rng = np.random.default_rng((seed, 1))
    with atomic.writing(target) as file:
        for line in source.read_text().splitlines():
            row = json.loads(line)
            exact = _first(row["labels"])
            if rng.random() < JUDGE_ERROR:
                others = [place for place in (*range(len(row["labels"])), None) if place != exact]
                exact = others[int(rng.integers(len(others)))]
            if _first(row["successes"]) == exact:
                file.write(atomic.encode_json(row))


def _first(values: Sequence[float]) -> int | None:
    return next((place for place, value in enumerate(values) if not value), None)


def _prefixes(row: dict[str, Any]) -> Iterator[Prefix]:
    """The question, and it with the first steps of the row, in their order."""
    return ((row["prompt"], *row["completions"][:end]) for end in range(len(row["completions"]) + 1))


def _right(problem: Problem | None, steps: Sequence[str]) -> int:
    assert problem is not None
    return int(judge.judge(problem, steps).answer == problem.answer)


def sampled(
    policy_directory: pathlib.Path, encoding: EncodingConfig, mesh: Mesh, *, temperature: float, seed: int
) -> Complete:
    """Samples from a policy; the first texts of a prefix are the same for more rollouts, and in any company."""
    # transformers takes seconds to import.
    from cfprm_jax.inference.policy import open_policy
    from cfprm_jax.inference.sampler import Prompt, Sampler, Sampling

    policy = open_policy(policy_directory, "float32", mesh)
    encoder, stops = Encoder(policy.tokenizer, encoding), set(policy.stops)

    def complete(prefixes: Sequence[Prefix], rollouts: int) -> list[list[str]]:
        encoded = encoder.encode_many([(question, (), None) for question, *_ in prefixes])
        texts = ["".join(text + encoding.separator for text in steps) for _, *steps in prefixes]
        tokenised = policy.tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = [
            Prompt("\x1f".join(prefix), np.concatenate([start.tokens, np.asarray(ids, np.int32)]))
            for prefix, start, ids in zip(prefixes, encoded, tokenised, strict=True)
        ]
        room = policy.config.backbone.longest[0] - max(len(prompt.tokens) for prompt in prompts)
        sampling = Sampling(temperature, max_new_tokens=min(encoding.max_length, room), seed=seed)
        sampler = Sampler(policy, sampling, min(_BATCH_ROWS, rollouts * len(prompts)), mesh)
        # Depth first, a longer prompt before its own prefixes, is the order in which the sampler shares them.
        order = sorted(range(len(prompts)), key=lambda place: tuple(prompts[place].tokens.tolist()), reverse=True)
        found: dict[int, list[str]] = {}
        for place, samples in zip(order, sampler.sample([prompts[place] for place in order], rollouts), strict=True):
            kept = [[token for token in one.tokens.tolist() if token not in stops] for one in samples]
            found[place] = policy.tokenizer.batch_decode(kept)
        return [found[place] for place in range(len(prompts))]

    return complete
