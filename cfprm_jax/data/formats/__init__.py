"""Public step-label corpora, one format a module, all read as trajectories.

A format module defines NAME, FIELDS (those that every row has), matches(row), which recognises its rows by content,
and parse(row, options), which returns the row's solutions. It defines GROUPING (see
:mod:`cfprm_jax.data.formats.grouping`) where consecutive rows of one question are not one record, or do not give their
solutions one by one. It is listed in :mod:`cfprm_jax.data.formats.registry`, and its name in config.DATA_FORMATS.
Files and lines are the subject of :mod:`cfprm_jax.data.formats.reading` alone.
"""

from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.formats.reading import BadRow, ReadReport, read, read_as, write_bad_rows

__all__ = ["BadRow", "ReadReport", "expand", "read", "read_as", "write_bad_rows"]
