"""Public step-label corpora, one format a module, all read as trajectories.

A format module has NAME, FIELDS (those that every row has), matches(row), which tells its rows by content,
parse(row, options), which gives the row's solutions, and, where consecutive rows of one question are no record or do
not give their solutions one by one, GROUPING (see :mod:`cfprm_jax.data.formats.grouping`). It is listed in
:mod:`cfprm_jax.data.formats.registry`, and its name in config.DATA_FORMATS. It knows nothing of files and
lines: see :mod:`cfprm_jax.data.formats.reading`.
"""

from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.formats.reading import BadRow, ReadReport, read, write_bad_rows

__all__ = ["BadRow", "ReadReport", "expand", "read", "write_bad_rows"]
