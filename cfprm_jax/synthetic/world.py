"""The arithmetic world: problems, the kinds of steps of a solution, and the exact label of every step.

A problem is a day of the week, zero to six, and some moves by days, such as "start=three+two-four": days are counted
modulo 7, so here +two gives five and -four gives one. No move occurs twice in a problem, unless the world repeats
moves. A solution is a list of steps, one text each:

    three+two=five          work a move out: the day before, the move as read, the day after
    three+two=five again    the same, going back to a move that was worked out before
    so=five                 restate the day, which adds nothing
    three+two               a move split into two steps: the day before and the move as read,
    =five                   and then the day after
    so                      an empty step
    answer=one              the last step

A step is positive iff everything that it states is true of the problem, and then the day that it leaves is true as
well: a worked move starts from the true day before that move, reads the move as the problem has it, and gets the day
after right; a restated day is the true one where the solution stands; the answer is the true last day and no move is
left. An empty step has the label of the step before it, and is positive as the first. So what follows a
mistake is negative until a step goes back and works the move out from the true day, from where steps are positive
again. Since moves can be undone, a wrong day never becomes right by itself: only a second mistake can make it so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from cfprm_jax.errors import UserError

DAYS = ("zero", "one", "two", "three", "four", "five", "six")
MODULUS = len(DAYS)

MOVES = tuple(sign * size for size in (1, 2, 3, 4) for sign in (1, -1))
"""What a problem can move by."""

MISTAKES = ("before", "move", "result")
"""A wrong day carried over from the step before, a misread move that the problem lacks, a wrong day as the result."""


@dataclasses.dataclass(frozen=True)
class WorldConfig:
    """How large and how hard the synthetic data is; every rate is a probability."""

    train_problems: int = 5000
    held_out_problems: int = 250
    solutions_per_problem: int = 4
    candidates_per_problem: int = 64
    min_moves: int = 4
    max_moves: int = 5
    repeat_moves: bool = False
    """A move may occur again in a problem, which may then have any number of them. For solvers that never go back: what
    is worked out "again" is found by its move."""
    slip_rate: float = 0.05
    """A worked move is spoiled by a mistake of the moment."""
    train_slip_rate: float = 0.2
    """The same for the solutions to train and evaluate on, which are sampled more wildly than the candidates."""
    slips: tuple[str, ...] = ("before", "before", "before", "move", "result")
    """The kinds of slips, each entry equally likely."""
    bias_rate: float = 0.7
    """A problem has one move that its solver tends to get wrong, always in the same way."""
    biases: tuple[str, ...] = ("before",)
    """The kinds of such mistakes, each entry equally likely."""
    min_bias: float = 0.5
    max_bias: float = 0.95
    """How often a solution of such a problem makes that mistake: drawn for each problem between these."""
    redundancy_rate: float = 0.2
    """A step is followed by one that restates the day."""
    split_rate: float = 0.0
    """A worked move is split into two steps."""
    idle_rate: float = 0.0
    """A step is followed by an empty one."""
    review_rate: float = 0.1
    """Before its next step a solution goes back, at most once: to its first mistake, or else to its last move."""
    stop_rate: float = 0.7
    """A solution to train on ends at its first mistake, as where annotators stop there."""

    def __post_init__(self) -> None:
        for name in ("train_problems", "held_out_problems", "solutions_per_problem", "candidates_per_problem"):
            if getattr(self, name) < 1:
                raise UserError(f"synthetic world: {name} is {getattr(self, name)}, expected at least 1")
        rates = ("slip_rate", "train_slip_rate", "bias_rate", "min_bias", "max_bias", "redundancy_rate", "split_rate")
        for name in (*rates, "idle_rate", "review_rate", "stop_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"synthetic world: {name} is {getattr(self, name)}, expected a probability in [0, 1]")
        if self.repeat_moves and (self.review_rate or "move" in (*self.slips, *self.biases)):
            raise UserError("synthetic world: repeat_moves goes with a review_rate of 0 and without mistakes of a move")
        most = self.max_moves if self.repeat_moves else len(MOVES) - 1
        if not 1 <= self.min_moves <= self.max_moves <= most:
            raise UserError(
                f"synthetic world: {self.min_moves} to {self.max_moves} moves, "
                f"expected 1 <= min_moves <= max_moves < {len(MOVES)}"
            )
        for name in ("slips", "biases"):
            kinds = getattr(self, name)
            if not kinds or not set(kinds) <= set(MISTAKES):
                raise UserError(f"synthetic world: {name} is {kinds}, expected some of {', '.join(MISTAKES)}")
        if self.min_bias > self.max_bias:
            raise UserError(f"synthetic world: min_bias {self.min_bias} is above max_bias {self.max_bias}")


def signed(move: int) -> str:
    """+2 -> "+two"."""
    return ("+" if move > 0 else "-") + DAYS[abs(move)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A first day and the moves from it."""

    start: int
    moves: tuple[int, ...]

    @property
    def question(self) -> str:
        """The problem as the models read it."""
        return f"start={DAYS[self.start]}" + "".join(map(signed, self.moves))

    @property
    def days(self) -> tuple[int, ...]:
        """The true day before any move, after the first, ..., after the last."""
        days = [self.start]
        for move in self.moves:
            days.append((days[-1] + move) % MODULUS)
        return tuple(days)

    @property
    def answer(self) -> int:
        """The true last day."""
        return self.days[-1]


@dataclasses.dataclass(frozen=True)
class WorldStep:
    """One step of a solution.

    Attributes:
      kind: "work", "again" (a move worked out, for the first time or later), "take", "get" (the halves of one),
        "restate", "idle" or "answer".
      day: the day that it states; of no meaning for "take" and "idle".
      index: the move that a worked one is meant to be, from 0.
      before, move: the day before and the move, as a worked move or its first half states them.
    """

    kind: str
    day: int
    index: int = -1
    before: int = -1
    move: int = 0

    @property
    def text(self) -> str:
        """The step as the models read it."""
        if self.kind == "restate":
            return f"so={DAYS[self.day]}"
        if self.kind == "answer":
            return f"answer={DAYS[self.day]}"
        if self.kind == "get":
            return f"={DAYS[self.day]}"
        if self.kind == "idle":
            return "so"
        taken = f"{DAYS[self.before]}{signed(self.move)}"
        if self.kind == "take":
            return taken
        return f"{taken}={DAYS[self.day]}" + (" again" if self.kind == "again" else "")


def labels(problem: Problem, steps: Sequence[WorldStep]) -> tuple[int, ...]:
    """The exact label of each step, 1 positive and 0 negative, by the rule in the module's docstring."""
    days, done, true, out = problem.days, 0, True, list[int]()
    for step in steps:
        if step.kind in ("work", "again", "take"):
            done = step.index + 1
            # A policy's solution may have more moves than the problem.
            true = (
                done <= len(problem.moves)
                and step.before == days[step.index]
                and step.move == problem.moves[step.index]
                and (step.kind == "take" or step.day == days[done])
            )
        elif step.kind == "get":
            # The second half goes with the first, but a slip may also put a wrong half right by chance.
            true = 1 <= done <= len(problem.moves) and step.day == days[done]
        elif step.kind == "idle":
            pass
        elif step.kind == "restate":
            true = done <= len(problem.moves) and step.day == days[done]
        else:
            true = done == len(problem.moves) and step.day == problem.answer
        out.append(int(true))
    return tuple(out)


def sample_problem(config: WorldConfig, rng: np.random.Generator) -> Problem:
    """A problem with uniform length, first day and moves."""
    count = int(rng.integers(config.min_moves, config.max_moves + 1))
    moves = rng.choice(np.asarray(MOVES), count, replace=config.repeat_moves)
    return Problem(int(rng.integers(MODULUS)), tuple(int(move) for move in moves))


def distinct_problems(config: WorldConfig, count: int, rng: np.random.Generator, taken: set[Problem]) -> list[Problem]:
    """count problems that are neither in taken nor equal to each other; taken is extended by them."""
    problems: list[Problem] = []
    for _ in range(100 * count):
        problem = sample_problem(config, rng)
        if problem not in taken:
            taken.add(problem)
            problems.append(problem)
        if len(problems) == count:
            return problems
    raise UserError(
        f"synthetic world: {count} more distinct problems requested, but problems of {config.min_moves} to "
        f"{config.max_moves} moves are too few: use more moves"
    )
