"""Algorithm 1 of the paper: adjacent steps merged into windows that take the label of their last step.

At granularity C the steps 1..T are cut into [1..C], [C+1..2C], ...; the last window may be shorter. The text of a
window is its steps joined by the step separator, so the text of the whole solution never changes. Granularity "whole"
is one window over all steps, labelled like the last one: alone, that is outcome reward modelling. Granularity "given"
cuts the steps into the windows that the row names.

A window is redundant where all of its steps are, so its redundancy is the least of theirs. Where that of a step is not
known the window's is not either, unless another step is known to be of use (0).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from cfprm_jax.config import NAMED_GRANULARITIES, Granularity
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.errors import UserError
from cfprm_jax.runtime.progress import counted

SEPARATOR = "\n\n"


def merge(
    trajectory: Trajectory, granularity: Granularity, tail: str = "keep", separator: str = SEPARATOR
) -> Trajectory:
    """The trajectory at one granularity, in windows that do not overlap.

    Args:
      trajectory: the solution in single steps.
      granularity: steps a window, "whole" or "given".
      tail: what becomes of a last window shorter than the others: "keep" or "drop".
      separator: text put between the steps of one window.

    Returns:
      A Trajectory whose steps are the windows; everything else is kept. Granularity 1 changes nothing.

    Raises:
      UserError: tail="drop" leaves no window.
    """
    if granularity == "given":
        return _cut(trajectory, _given(trajectory), 0, separator, granularity)
    size = _size(trajectory, granularity)
    ends = _ends(len(trajectory.steps), size, 0, tail if granularity != "whole" else "keep")
    if not ends:
        steps = len(trajectory.steps)
        raise UserError(f"{trajectory.source}: a solution of {steps} steps has no whole window of {granularity}")
    return _cut(trajectory, ends, 0, separator, granularity)


def samples(
    trajectory: Trajectory,
    granularity: Granularity,
    tail: str = "keep",
    stride: str = "window",
    separator: str = SEPARATOR,
) -> list[Trajectory]:
    """The training samples of one trajectory at one granularity.

    stride="window" gives the one sample of :func:`merge`. stride="1" gives the shifted segmentations: offsets 0 to
    C - 1, where the first `offset` steps are a leading window that is unlabelled because it is shorter than C. A
    segmentation that is all leading window (an offset of T or more) or whose other windows tail="drop" takes has no
    label and is left out.

    Returns:
      Nothing for a one-step solution at an int granularity above 1, which would only repeat granularity 1.
    """
    if trajectory.granularity != 1 and granularity != 1:
        raise UserError(
            f"{trajectory.source}: its steps are merged already (granularity {trajectory.granularity}, as prepare "
            "writes them), but training merges by itself: give it the corpus, or what prepare writes at granularity 1"
        )
    if stride not in ("window", "1"):
        raise UserError(f"window stride {stride!r} is neither 'window' nor '1'")
    steps = len(trajectory.steps)
    if steps == 1 and granularity not in (1, *NAMED_GRANULARITIES):
        return []
    if granularity in NAMED_GRANULARITIES:
        return [merge(trajectory, granularity, tail, separator)]
    size = _size(trajectory, granularity)
    offsets = range(min(size, steps)) if stride == "1" else range(1)
    cuts = [(_ends(steps, size, offset, tail), offset) for offset in offsets]
    return [_cut(trajectory, ends, offset, separator, granularity) for ends, offset in cuts if ends]


def _given(trajectory: Trajectory) -> list[int]:
    """One past the last step of each window that the row names."""
    if trajectory.windows is None:
        raise UserError(
            f'{trajectory.source}: --granularities=given, and the row has no "windows"; expected sizes that add up to '
            f"its {counted(len(trajectory.steps), 'step')}"
        )
    return list(itertools.accumulate(trajectory.windows))


def _size(trajectory: Trajectory, granularity: Granularity) -> int:
    """Steps in a window."""
    if granularity == "whole":
        return len(trajectory.steps)
    if isinstance(granularity, int) and granularity >= 1:
        return granularity
    raise UserError(
        f"granularity {granularity!r} is neither a positive whole number nor one of {', '.join(NAMED_GRANULARITIES)}"
    )


def _ends(steps: int, size: int, offset: int, tail: str) -> list[int]:
    """One past the last step of each labelled window, when the first window begins after `offset` steps."""
    if tail not in ("keep", "drop"):
        raise UserError(f"window tail {tail!r} is neither 'keep' nor 'drop'")
    ends = list(range(offset + size, steps + 1, size))
    if tail == "keep" and (not ends or ends[-1] < steps):
        ends.append(steps)
    return ends


def _cut(
    trajectory: Trajectory, ends: Sequence[int], offset: int, separator: str, granularity: Granularity
) -> Trajectory:
    """Windows that end at `ends`, after an unlabelled leading window of `offset` steps."""
    if granularity == 1:
        return trajectory
    labels = trajectory.labels[np.array(ends) - 1]
    starts = [offset, *ends[:-1]]
    windows = [separator.join(trajectory.steps[start:end]) for start, end in zip(starts, ends, strict=True)]
    if offset:
        labels = np.append(np.float32(np.nan), labels)
        windows.insert(0, separator.join(trajectory.steps[:offset]))
    spans = [(0, offset)] * bool(offset) + list(zip(starts, ends, strict=True))
    redundancy = np.array([_redundancy(trajectory.redundancy[start:end]) for start, end in spans], np.float32)
    before = trajectory.granularity
    merged = before * granularity if isinstance(before, int) and isinstance(granularity, int) else granularity
    if isinstance(before, str):
        merged = before
    return dataclasses.replace(
        trajectory, steps=tuple(windows), labels=labels, granularity=merged, redundancy=redundancy, windows=None
    )


def _redundancy(steps: np.ndarray) -> float:
    """The redundancy of a window."""
    known = steps[~np.isnan(steps)]
    least = float(known.min(initial=1.0))
    return least if len(known) == len(steps) or least == 0 else float("nan")
