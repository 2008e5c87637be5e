"""Aggregations of step scores: what candidates are ranked by.

min and last rank by logits where these are known, and product sums log sigmoid(z), since scores that round to 1 would
be ties. All is computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.data.candidates import Candidate
from cfprm_jax.errors import UserError

Logits = Float[np.ndarray, " steps"]

# Below every sum of logarithms: the logarithm of 0 would be the rank of a candidate without scores.
_LOG_OF_ZERO = -np.finfo(np.float64).max


def log_sigmoid(z: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """log sigmoid(z) in float64, finite for every finite z."""
    return -np.logaddexp(0.0, -np.asarray(z, np.float64))


def rank(logits: Sequence[Logits | None], aggregation: str) -> Float[np.ndarray, " candidates"]:
    """What candidates are ranked by, from their step logits; -inf without any.

    Raises:
      UserError: an aggregation that is none of AGGREGATIONS.
    """
    _check([aggregation])
    out = np.full(len(logits), -np.inf)
    scored = np.array([z is not None and len(z) > 0 for z in logits], bool)
    if scored.any():
        z = np.concatenate([np.asarray(one, np.float64) for one in logits if one is not None and len(one)])
        log_p = log_sigmoid(z)
        lengths = np.array([len(one) for one in logits if one is not None and len(one)])
        out[scored] = _Steps(z, np.exp(log_p), log_p, lengths).aggregated(aggregation)
    return out


def aggregate(
    candidates: Sequence[Candidate], aggregations: Sequence[str], where: str
) -> dict[str, tuple[Float[np.ndarray, " candidates"], Float[np.ndarray, " candidates"]]]:
    """What each aggregation makes of a question's candidates: (what they are ranked by, the score in [0, 1]).

    Without scores that is -inf and 0.

    Args:
      where: file and line of the question, for messages.

    Raises:
      UserError: some scored candidates have logits and some have none, so that they cannot be compared; or an
        aggregation that is none of AGGREGATIONS.
    """
    _check(aggregations)
    scored = np.array([c.step_scores is not None and len(c.step_scores) > 0 for c in candidates])
    logits = np.array([c.step_logits is not None for c in candidates]) & scored
    if logits.any() and not logits[scored].all():
        missing, other = np.flatnonzero(scored & ~logits)[0], np.flatnonzero(logits)[0]
        raise UserError(f'{where}: candidate {missing} has no "step_logits", but candidate {other} has')
    out = {name: (np.full(len(candidates), -np.inf), np.zeros(len(candidates))) for name in aggregations}
    if not scored.any():
        return out
    scores = [c.step_scores for c, has in zip(candidates, scored, strict=True) if has and c.step_scores is not None]
    p, lengths = np.concatenate(scores), np.array([len(s) for s in scores])
    if logits.any():
        z = np.concatenate([c.step_logits for c in candidates if c.step_logits is not None and len(c.step_logits)])
        steps = _Steps(z, p, log_sigmoid(z), lengths)
    else:
        steps = _Steps(p, p, np.log(np.where(p > 0, p, 1.0)), lengths)
    zero = np.logical_or.reduceat(p <= 0, steps.starts) & ~logits.any()
    for name, (ranks, weights) in out.items():
        found = steps.aggregated(name)
        if name == "product":
            found = np.where(zero, _LOG_OF_ZERO, found)
        ranks[scored] = found
        if name == "product" or (logits.any() and name != "mean"):
            weights[scored] = np.exp(found if name == "product" else log_sigmoid(found))
        else:
            weights[scored] = found
    return out


class _Steps(NamedTuple):
    """The steps of candidates, one candidate after another.

    Attributes:
      order: float64, by which single steps are compared: logits, or scores.
      scores, log_scores: in [0, 1], and their logarithms.
      lengths: number of steps of each candidate, at least one.
    """

    order: Float[np.ndarray, " steps"]
    scores: Float[np.ndarray, " steps"]
    log_scores: Float[np.ndarray, " steps"]
    lengths: Int[np.ndarray, " candidates"]

    @property
    def starts(self) -> Int[np.ndarray, " candidates"]:
        """Index of the first step of each candidate."""
        return np.cumsum(self.lengths) - self.lengths

    def aggregated(self, name: str) -> Float[np.ndarray, " candidates"]:
        """By an aggregation; product is the logarithm of it."""
        if name == "min":
            return np.minimum.reduceat(self.order, self.starts)
        if name == "last":
            return self.order[self.starts + self.lengths - 1]
        if name == "product":
            return np.add.reduceat(self.log_scores, self.starts)
        return np.add.reduceat(self.scores, self.starts) / self.lengths


def _check(aggregations: Sequence[str]) -> None:
    if unknown := sorted(set(aggregations) - set(AGGREGATIONS)):
        raise UserError(f"aggregation {unknown[0]!r} is none of {', '.join(AGGREGATIONS)}")
