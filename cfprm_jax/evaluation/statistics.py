"""How sure an accuracy is: a bootstrap over questions.

Questions are the independent draws here (the candidates of one question are not), so they are what is resampled. All
systems that are evaluated together see the same resamples.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

_CHUNK = 1024


def bootstrap_interval(
    outcomes: Float[np.ndarray, "questions systems"], resamples: int, seed: int, level: float = 0.95
) -> Float[np.ndarray, "systems 2"]:
    """The percentile interval of each system's mean over questions.

    Args:
      outcomes: what each question contributes to each mean: 0 or 1, or a mean over draws.
      resamples: how many times as many questions are drawn with replacement.
      seed: of the resampling.
      level: probability that the interval is meant to cover.

    Returns:
      low and high for each system.
    """
    questions = len(outcomes)
    rng = np.random.default_rng(seed)
    even = np.full(questions, 1 / questions)
    means = [
        # How often each question is drawn is all that a mean needs, which makes resampling a matrix product.
        rng.multinomial(questions, even, min(_CHUNK, resamples - done)) @ outcomes / questions
        for done in range(0, resamples, _CHUNK)
    ]
    tail = (1 - level) / 2
    return np.quantile(np.concatenate(means), (tail, 1 - tail), axis=0).T
