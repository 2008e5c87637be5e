"""Public step-label corpora, one format a module, all read as trajectories.

A format module has NAME, FIELDS (those that every row has), matches(row), which tells its rows by content, and
parse(row, options), which gives the row's solutions. It knows nothing of files, lines or records: see
:mod:`cfprm_jax.data.formats.reading`.
"""

from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.formats.reading import BadRow, ReadReport, read, write_bad_rows

__all__ = ["BadRow", "ReadReport", "expand", "read", "write_bad_rows"]
