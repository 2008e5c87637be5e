"""Grouping of a file's rows into records, and of rows into solutions.

A format module may have GROUPING, a subclass of :class:`Grouping`; without one it has this class. The reader makes one
object per record and uses no other member.
"""

from __future__ import annotations

from collections.abc import Sequence

from cfprm_jax.data.formats.fields import Solution


class Grouping:
    """Consecutive rows of one question are a record, and every row's solutions are given as they come."""

    def __init__(self) -> None:
        self._question: str | None = None

    def continues(self, row: Sequence[Solution]) -> bool:
        """Whether a row belongs to the record that the rows before it began. Not called for a record's first row."""
        return [solution.question for solution in row] == [self._question]

    def add(self, row: Sequence[Solution]) -> Sequence[Solution]:
        """Take a row into the record; the solutions that are whole now."""
        self._question = row[0].question if row else None
        return row

    def finish(self) -> Sequence[Solution]:
        """The solutions that waited for the end of the record."""
        return ()


class RowIsRecord(Grouping):
    """Every row is a record of its own."""

    def continues(self, row: Sequence[Solution]) -> bool:
        del row
        return False
