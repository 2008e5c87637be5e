"""Does a redundancy output know which of two next steps is of no use? After the same prefix, beside text features.

    python -m cfprm_jax.prepare --input=phase1_test.jsonl --output=held_out.jsonl
    python -m cfprm_jax.score --checkpoint=RUN --input=held_out.jsonl --output=scored.jsonl
    python bench/redundancy_pairs.py --scores=scored.jsonl --train=prepared_train.jsonl --output=pairs.json

Rows are stepwise ones with "redundancy", as prepare writes them for rated steps. A pair is a redundant and a useful
step after the same prefix of the same question: what the two share, such as the position, can then not tell them apart.
The figure of a score is the share of pairs in which the redundant step has the higher one, a tie being a half, with an
interval by a bootstrap over records; the difference is that of the same samples. Scores are

- redundancy: "step_redundancy"; and lowness: 1 - "step_scores", what a PRM without the output has;
- features of the text alone: its length, the share of its words that occurred before, whether it has no number, whether
  it has no number that did not occur before, and the length that it adds to the compressed prefix, per character
  (lower is more redundant);
- text: logistic regression on those features, fitted to the distinct rated steps of --train.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import zlib
from typing import Any, NamedTuple

import numpy as np
from common import write_json
from jaxtyping import Float

from cfprm_jax import flags
from cfprm_jax.config import LARGEST_SEED
from cfprm_jax.data.formats.files import Paths, expand, rows
from cfprm_jax.errors import UserError
from cfprm_jax.options import Options, option

FEATURES = ("length", "old words", "no number", "no new number", "compression")
_WORD, _NUMBER = re.compile(r"[^\W\d_]+"), re.compile(r"\d+(?:\.\d+)?")
_PENALTY = 1e-3


@dataclasses.dataclass(frozen=True)
class PairsConfig(Options):
    """Redundant against useful steps after the same prefix."""

    scores: tuple[str, ...] = option((), 'Stepwise rows with "redundancy", scored by score.', kind="list")
    train: tuple[str, ...] = option((), 'Other stepwise rows with "redundancy", for text features.', kind="list")
    resamples: int = option(10_000, "Number of bootstrap samples.", lower=100, upper=10**6)
    seed: int = option(0, "Random seed.", lower=0, upper=LARGEST_SEED)
    output: str = option("", "JSON file for the figures, besides standard output; empty is none.")


class Step(NamedTuple):
    """A distinct rated step.

    Attributes:
      scores: of a PRM, by name; empty without.
    """

    record: str
    prefix: tuple[str, ...]
    text: str
    redundant: bool
    scores: dict[str, float]


def read(paths: Paths) -> list[Step]:
    """The distinct rated steps of stepwise rows; the first occurrence counts.

    Raises:
      UserError: a damaged row, or no rated step.
    """
    found: dict[tuple[str, ...], Step] = {}
    for file in expand(paths):
        for row in rows(file):
            if row.data is None:
                raise UserError(f"{file.name}:{row.line}: {row.reason}")
            data: dict[str, Any] = row.data
            steps, rated = data.get("completions"), data.get("redundancy") or []
            if "prompt" not in data or not isinstance(steps, list) or len(rated) not in (0, len(steps)):
                raise UserError(
                    f'{file.name}:{row.line}: expected "prompt", "completions" and as many numbers of "redundancy"'
                )
            scored = {"redundancy": data.get("step_redundancy"), "lowness": data.get("step_scores")}
            for place, target in enumerate(rated):
                own = (data["prompt"], *steps[: place + 1])
                if target in (0, 1) and own not in found:
                    values = {name: column[place] for name, column in scored.items() if column}
                    if "lowness" in values:
                        values["lowness"] = 1 - values["lowness"]
                    record = str(data.get("source") or data["prompt"])
                    found[own] = Step(record, own[:-1], own[-1], target == 1, values)
    if not found:
        raise UserError(f"{', '.join(map(str, paths))}: no step with a redundancy of 0 or 1")
    return list(found.values())


def features(step: Step) -> list[float]:
    """FEATURES of a step: higher is meant to be more redundant."""
    before = "\n".join(step.prefix)
    known, words = set(_words(before)), _words(step.text)
    numbers, old = _NUMBER.findall(step.text), set(_NUMBER.findall(before))
    added = len(zlib.compress(f"{before}\n{step.text}".encode(), 9)) - len(zlib.compress(before.encode(), 9))
    return [
        float(len(step.text)),
        sum(word in known for word in words) / max(len(words), 1),
        float(not numbers),
        float(all(number in old for number in numbers)),
        -added / max(len(step.text.encode()), 1),
    ]


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def text_model(train: list[Step], held_out: list[Step]) -> Float[np.ndarray, " steps"]:
    """Logits of redundancy of held-out steps, by logistic regression on the standardised features."""
    x, y = np.array([features(one) for one in train]), np.array([one.redundant for one in train], float)
    mean, spread = x.mean(0), x.std(0) + 1e-9
    x = np.column_stack([(x - mean) / spread, np.ones(len(x))])
    w = np.zeros(x.shape[1])
    for _ in range(50):  # Newton's method, which has converged long before
        p = 1 / (1 + np.exp(-x @ w))
        gradient = x.T @ (p - y) / len(y) + _PENALTY * w
        w -= np.linalg.solve((x.T * (p * (1 - p))) @ x / len(y) + _PENALTY * np.eye(len(w)), gradient)
    z = (np.array([features(one) for one in held_out]) - mean) / spread
    return np.column_stack([z, np.ones(len(z))]) @ w


def pairs(steps: list[Step]) -> list[tuple[str, int, int]]:
    """(record, place of a redundant step, place of a useful one) after the same prefix."""
    by_prefix: dict[tuple[str, ...], list[int]] = {}
    for place, step in enumerate(steps):
        by_prefix.setdefault(step.prefix, []).append(place)
    return [
        (steps[i].record, i, j)
        for places in by_prefix.values()
        for i in places
        if steps[i].redundant
        for j in places
        if not steps[j].redundant
    ]


def higher(
    values: Float[np.ndarray, " steps"], found: list[tuple[str, int, int]], resamples: int, seed: int
) -> Float[np.ndarray, " resamples+1"]:
    """The share of pairs whose redundant step has the higher value, then those of bootstrap samples of the records.

    Samples of one seed are of the same records, whatever the values.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(record for record, _, _ in found))}
    wins, sizes = np.zeros(len(names)), np.zeros(len(names))
    for record, i, j in found:
        wins[names[record]] += (values[i] > values[j]) + 0.5 * (values[i] == values[j])
        sizes[names[record]] += 1
    drawn = np.random.default_rng(seed).integers(len(names), size=(resamples, len(names)))
    return np.append(wins.sum() / sizes.sum(), wins[drawn].sum(1) / sizes[drawn].sum(1))


def main(config: PairsConfig) -> None:
    """Runs the bench."""
    if not config.scores or not config.train:
        raise UserError("--scores and --train are required")
    train, held_out = read(config.train), read(config.scores)
    found = pairs(held_out)
    if not found:
        raise UserError(f"{', '.join(config.scores)}: no prefix is followed by a redundant and by a useful step")
    names = held_out[0].scores.keys()
    if any(one.scores.keys() != names for one in held_out):
        raise UserError(f"{', '.join(config.scores)}: not all rows have the same scores: expected those of one PRM")
    columns = {name: np.array([one.scores[name] for one in held_out]) for name in names}
    own = np.array([features(one) for one in held_out])
    columns |= {name: own[:, place] for place, name in enumerate(FEATURES)}
    columns["text"] = text_model(train, held_out)
    prefixes, records = len({held_out[i].prefix for _, i, _ in found}), len({record for record, _, _ in found})
    rated = sum(one.redundant for one in train)
    print(f"train       {len(train):,} distinct rated steps, {rated:,} of them redundant")
    print(f"pairs       {len(found):,} after {prefixes:,} prefixes of {records:,} records")
    shares = {name: higher(values, found, config.resamples, config.seed) for name, values in columns.items()}
    if "redundancy" in shares:
        shares["redundancy - text"] = shares["redundancy"] - shares["text"]
    figures = {}
    for name, (share, *resampled) in shares.items():
        low, high = np.percentile(resampled, [2.5, 97.5])
        print(f"{name:<20}{100 * share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
        figures[name] = {"share": share, "ci95": [low, high]}
    write_json(config.output, "numpy", pairs=len(found), prefixes=prefixes, records=records, figures=figures)


if __name__ == "__main__":
    sys.exit(flags.run(PairsConfig, main))
