"""The small fixed set of batch shapes (rows, length) that a run may use, so that a step compiles once a shape.

How many tokens a batch holds varies (a batch of 32 PRM800K trajectories has 1,000 to 3,000 distinct ones), and whatever
its shape has beyond them is wasted. The set is therefore fitted to the data once, from a sample of the run's batches:
out of all shapes with lengths that are multiples of 128, the handful that together waste least, and a few large ones
that hold any batch whatever the sample missed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from cfprm_jax.config import PackingConfig
from cfprm_jax.data.partition import Forest, divide
from cfprm_jax.errors import UserError

# cuDNN's kernels and ours for TPUs require row lengths that are multiples of this.
QUANTUM = 128
# Below that length no accelerator kernel is at stake, and rounding up to 128 would mostly be padding.
_SMALL_QUANTUM = 16
# The longest row, in longest solutions. Trees of several records in rows of 3 x 2,048 need few cuts: on PRM800K phase 1
# rows of 2,048 repeat a quarter of the distinct tokens, these 1 %. Sequences fill rows that are a little longer than
# the longest of them better: 97 % instead of 95 % at 32 trajectories a batch.
_LONGEST_ROW = {"tree": 3.0, "sequence": 1.25, "none": 1.0}
# A batch of more sequences than this fills rows of any one length so well that other lengths are not worth trying.
_MANY_SEQUENCES = 512
# Row length at which attention costs as much as everything else: 6 FLOPs a parameter and token, against 12 FLOPs a
# layer, unit of width and visible key, of which a causal row has half its length on average. For the 7B Qwen2.5
# without its embeddings 6.53e9 / (28 * 3584) = 65 thousand. Narrower models pay more where attention computes the whole
# square (cudnn, xla); what skips blocks (pallas, blockwise) pays for the depth of trees, hardly for the rows' length.
_ATTENTION_LENGTH = 65536


@dataclasses.dataclass(frozen=True)
class RowShapes:
    """The (rows, length) that a run may use, cheapest first."""

    shapes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.shapes or min(min(shape) for shape in self.shapes) < 1:
            raise ValueError(f"row shapes are pairs of positive row counts and lengths, not {self.shapes}")
        object.__setattr__(self, "shapes", tuple(sorted(set(self.shapes), key=lambda shape: (cost(*shape), shape))))

    def all(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, length), cheapest first."""
        return self.shapes

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(length for _, length in self.shapes)

    @classmethod
    def covering(cls, lengths: Sequence[int], trajectories: int, row_multiple: int = 1) -> RowShapes:
        """Shapes for batches that nothing is known of: each length, row counts doubling up to one a trajectory."""
        most = _round_up(trajectories, row_multiple)
        counts = [row_multiple]
        while counts[-1] < most:
            counts.append(min(2 * counts[-1], most))
        return cls(tuple((rows, length) for length in lengths for rows in counts))


def cost(rows: int, length: int) -> float:
    """The cost of a step of this shape, in tokens: every token, and the square of the length for attention."""
    return rows * length * (1 + length / _ATTENTION_LENGTH)


def row_lengths(packing: PackingConfig, longest: int) -> tuple[int, ...]:
    """The row lengths that may be used for sequences of up to `longest` tokens, ascending.

    --row_length alone when that is given; otherwise multiples of 128 (16 below 128 tokens) up to the longest sequence,
    for trees up to three times that, for packed sequences up to a quarter more.

    Raises:
      UserError: the longest sequence does not fit into --row_length.
    """
    if packing.row_length:
        if packing.row_length < longest:
            raise UserError(f"--row_length={packing.row_length} is shorter than the longest solution, {longest} tokens")
        return (packing.row_length,)
    quantum = QUANTUM if longest >= QUANTUM else _SMALL_QUANTUM
    last = _round_up(int(_LONGEST_ROW[packing.packing] * longest), quantum)
    # Rows much shorter than the longest sequence are of use only where every sequence is short; 64 lengths are plenty.
    step = _round_up(-(-last // 64), quantum)
    return tuple(sorted({*range(step, last + 1, step), last}))


def fit_shapes(
    forests: Sequence[Forest], packing: PackingConfig, longest: int, trajectories: int, row_multiple: int = 1
) -> RowShapes:
    """The set of shapes with least padding on these forests that holds every batch of `trajectories`.

    Args:
      forests: a sample of the batches; a sequence of its own in each tree for --packing=sequence and none.
      packing: which packing, and whether --row_length fixes the length.
      longest: tokens of the longest sequence that any batch can hold.
      trajectories: most sequences a batch can hold.
      row_multiple: row counts are multiples of this: the devices that rows are sharded over.
    """
    lengths = row_lengths(packing, longest)
    if packing.packing == "sequence" and trajectories > _MANY_SEQUENCES:
        lengths = lengths[-1:]
    if packing.packing == "none":
        rows = _round_up(trajectories, row_multiple)
        need = np.array([[rows if forest.longest <= length else np.inf for length in lengths] for forest in forests])
    else:
        need = np.array([_rows_needed(forest, lengths, row_multiple) for forest in forests])
    fallback = _fallback(need, lengths, trajectories, row_multiple, packing)
    # A division into rows of one length is also one into longer rows.
    need = np.minimum.accumulate(need, axis=1)
    fitted = _least_waste(need, lengths, fallback, packing.row_shapes)
    return RowShapes((*fitted, *fallback))


def _rows_needed(forest: Forest, lengths: Sequence[int], row_multiple: int) -> Float64[np.ndarray, " lengths"]:
    """Fewest rows (a multiple of row_multiple) of each length into which the forest divides; inf where unknown."""
    need = np.full(len(lengths), np.inf)
    for index, length in enumerate(lengths):
        if length < forest.longest:
            continue
        fewest = _round_up(-(-forest.size // length), row_multiple)
        # Some other length wastes less than this one, if there is a choice.
        if len(lengths) > 1 and length > forest.longest + QUANTUM and fewest * length > 1.5 * forest.size:
            continue
        for rows in range(fewest, fewest + 6 * row_multiple, row_multiple):
            if divide(forest, rows, length) is not None:
                need[index] = rows
                break
    if not np.isfinite(need).any():
        # Rows hardly longer than the trees: each cut repeats a prefix, so that all together need far more rows.
        rows = _round_up(-(-forest.size // lengths[-1]), row_multiple)
        while rows < len(forest.order) and divide(forest, rows, lengths[-1]) is None:
            rows += _round_up(rows // 16, row_multiple)
        need[-1] = rows
    return need


def _fallback(
    need: Float64[np.ndarray, "batches lengths"],
    lengths: Sequence[int],
    trajectories: int,
    row_multiple: int,
    packing: PackingConfig,
) -> list[tuple[int, int]]:
    """Shapes with the longest rows: one row count half again above the sample's, then four times as many each."""
    last = lengths[-1]
    most = _round_up(trajectories, row_multiple)
    if packing.packing == "none":
        return [(most, last)]
    tokens = np.min(np.where(np.isfinite(need), need * np.asarray(lengths), np.inf), axis=1, initial=np.inf)
    largest = max(tokens[np.isfinite(tokens)].max(initial=0.0), 1.0)
    counts = [min(most, _round_up(int(np.ceil(1.5 * largest / last)), row_multiple))]
    while counts[-1] < most:
        counts.append(min(4 * counts[-1], most))
    return [(rows, last) for rows in counts]


def _least_waste(
    need: Float64[np.ndarray, "batches lengths"],
    lengths: Sequence[int],
    fallback: Sequence[tuple[int, int]],
    most: int,
) -> list[tuple[int, int]]:
    """At most `most` shapes, chosen greedily and then exchanged one by one while that helps."""
    finite = np.isfinite(need)
    found = {(int(need[b, i]), lengths[i]) for b, i in zip(*np.nonzero(finite), strict=True)}
    candidates = sorted(found - set(fallback))
    if not candidates:
        return []
    place = {length: index for index, length in enumerate(lengths)}
    holds = np.stack([need[:, place[length]] <= rows for rows, length in candidates], axis=1)
    costs = np.where(holds, [cost(*shape) for shape in candidates], np.inf)
    base = np.full(len(need), max(cost(*shape) for shape in fallback))
    for rows, length in fallback:
        base = np.where(need[:, place[length]] <= rows, np.minimum(base, cost(rows, length)), base)
    chosen: list[int] = []
    current = base
    while len(chosen) < most:
        best, now = _best_addition(costs, current)
        if now >= current.sum():
            break
        chosen.append(best)
        current = np.minimum(current, costs[:, best])
    for _ in range(2):
        for index in range(len(chosen)):
            others = [c for c in chosen if c != chosen[index]]
            without = np.minimum(base, costs[:, others].min(axis=1, initial=np.inf))
            chosen[index] = _best_addition(costs, without)[0]
    return [candidates[c] for c in sorted(set(chosen))]


def _best_addition(
    costs: Float64[np.ndarray, "batches candidates"], current: Float64[np.ndarray, " batches"]
) -> tuple[int, float]:
    totals = np.minimum(current[:, None], costs).sum(axis=0)
    best = int(totals.argmin())
    return best, float(totals[best])


def _round_up(value: int, multiple: int) -> int:
    return -(-max(value, 1) // multiple) * multiple


def place_rows(forest: Forest, shapes: RowShapes) -> tuple[tuple[int, int], list[Int64[np.ndarray, " sequences"]]]:
    """The cheapest shape that the forest divides into, and its rows (see :func:`~cfprm_jax.data.partition.divide`).

    Raises:
      UserError: a sequence is longer than every row, or there are more sequences than the largest shape holds.
    """
    if forest.longest > shapes.longest:
        raise UserError(
            f"a sequence of {forest.longest} tokens does not fit into rows of {shapes.longest} (--row_length)"
        )
    for rows, length in shapes.shapes:
        division = divide(forest, rows, length)
        if division is not None:
            return (rows, length), division
        # As many rows as sequences always suffice, however badly they divide.
        if rows >= len(forest.order) and length >= forest.longest:
            return (rows, length), [np.array([place]) for place in range(len(forest.order))]
    raise UserError(
        f"{len(forest.order)} sequences with {forest.size} tokens divide into none of the row shapes {shapes.all()}"
    )
