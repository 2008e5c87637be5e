"""The labelled solution, which readers produce and all later stages consume."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from cfprm_jax.config import Granularity
from cfprm_jax.errors import UserError
from cfprm_jax.runtime.progress import counted

LARGEST_RECORD = 4096
"""Most trajectories of a record; a larger one is taken as several, so that one without end cannot fill the memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """A question, the steps of one solution and a label for each step.

    Attributes:
      question: text of the problem.
      steps: texts of the steps, at least one.
      labels: float32 [steps], read-only; in [0, 1] (1 is right, values between are soft), NaN where unlabelled. Given
        as any sequence of numbers, None standing for unlabelled; the range is checked before rounding to float32.
      source: the record it comes from, "file:line". Consecutive trajectories of equal source and question are one
        record: they may share prefixes. A source may name a whole data set.
      id: the publisher's name for the row, if it has one.
      answer: the reference answer, if known.
      granularity: steps in the windows that `steps` are already merged into; 1 for single steps.
      windows: sizes in steps of the windows at granularity "given", which add up to the number of steps; None if the
        row has none.
      redundancy: a second target a step, of the same form: 1 for a step that is right but of no use, 0 for one that is
        of use, NaN where that is not known; all NaN unless given.

    Raises:
      UserError: no step, another number of labels or redundancies than of steps, one of them outside [0, 1], or windows
        that are not of positive sizes that add up to the steps.
    """

    question: str
    steps: tuple[str, ...]
    labels: Float[np.ndarray, " steps"]
    source: str
    id: str | None = None
    answer: str | None = None
    granularity: Granularity = 1
    redundancy: Float[np.ndarray, " steps"] = None  # type: ignore[assignment]
    windows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        steps = tuple(self.steps)
        if not steps:
            raise UserError("row without steps")
        if len(steps) != len(self.labels):
            raise UserError(f"row with {counted(len(steps), 'step')} and {counted(len(self.labels), 'label')}")
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "labels", _targets(self.labels, "label"))
        redundancy = np.full(len(steps), np.nan) if self.redundancy is None else self.redundancy
        if len(steps) != len(redundancy):
            raise UserError(f"row with {counted(len(steps), 'step')} and {len(redundancy)} of redundancy")
        object.__setattr__(self, "redundancy", _targets(redundancy, "redundancy"))
        if self.windows is not None:
            object.__setattr__(self, "windows", tuple(self.windows))
            if min(self.windows, default=0) < 1 or sum(self.windows) != len(steps):
                raise UserError(
                    f"row with {counted(len(steps), 'step')} and windows of "
                    f"{', '.join(map(str, self.windows)) or 'none'}: expected positive sizes that add "
                    f"up to {len(steps)}"
                )

    def __eq__(self, other: object) -> bool:
        """Equal content, an unlabelled step being equal to an unlabelled step."""
        if not isinstance(other, Trajectory):
            return NotImplemented
        arrays = ("labels", "redundancy")
        names = [field.name for field in dataclasses.fields(self) if field.name not in arrays]
        return all(getattr(self, name) == getattr(other, name) for name in names) and all(
            np.array_equal(getattr(self, name), getattr(other, name), equal_nan=True) for name in arrays
        )

    def __hash__(self) -> int:
        return hash((self.question, self.steps, self.source))

    def follows(self, other: Trajectory) -> bool:
        """Whether it is of the same record as the trajectory before it."""
        return (self.source, self.question) == (other.source, other.question)


def _targets(values: Any, name: str) -> Float[np.ndarray, " steps"]:
    """Check targets in their own precision and freeze them as float32."""
    exact = np.asarray(values, dtype=np.float64)
    outside = exact[~(np.isnan(exact) | ((exact >= 0.0) & (exact <= 1.0)))]
    if outside.size:
        raise UserError(f"{name} {outside[0]:g} is outside [0, 1]")
    frozen = exact.astype(np.float32)
    frozen.flags.writeable = False
    return frozen
