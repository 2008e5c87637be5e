"""Rows of columnar files, parquet and Arrow, with the values that JSON has.

JSON has no timestamps, bytes, decimals or NaN. A time is its ISO text; bytes are their UTF-8 text, or else an object
{"base64": text}; a decimal is the float that has its exact decimal digits, or else its text; NaN, which is what pandas
makes of null, is null. One small batch of rows is in memory at a time.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from cfprm_jax.errors import UserError

_BATCH_ROWS = 256
# How a stream of record batches ends, unless it was cut.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"


def is_table(head: bytes) -> bool:
    """Whether a file that begins so is parquet, an Arrow file, or an Arrow stream, as datasets.save_to_disk writes."""
    return head.startswith((PARQUET, ARROW_FILE, ARROW_STREAM))


def table_rows(raw: BinaryIO, head: bytes, name: str) -> Iterator[tuple[dict[str, Any], float]]:
    """The rows of a table with the share of the rows up to each.

    Args:
      raw: the file, from its beginning.
      name: what messages call it.

    Raises:
      UserError: pyarrow is missing, the table has no rows, two columns of one name or a value that has no text, or it
        is damaged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{name}: reading {_kind(head)} needs pyarrow: pip install pyarrow") from error
    line = 0
    try:
        schema, total, batches = _open(raw, head, name)
        twice = {column for column in schema.names if schema.names.count(column) > 1}
        if twice:
            raise UserError(f"{name}: two columns are called {sorted(twice)[0]!r}")
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                columns = {
                    column: _values(values, f"{name}:{line + 1}: column {column!r}")
                    for column, values in zip(schema.names, batch.slice(start, _BATCH_ROWS).columns, strict=True)
                }
                for row in range(min(_BATCH_ROWS, batch.num_rows - start)):
                    line += 1
                    share = line / total if total else 0.0
                    yield {column: values[row] for column, values in columns.items()}, share
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name}: damaged {_kind(head)} file: {reason}") from error
    if not line:
        raise UserError(f"{name}: empty file: no rows")


def _kind(head: bytes) -> str:
    return "parquet" if head.startswith(PARQUET) else "Arrow"


def _open(raw: BinaryIO, head: bytes, name: str) -> tuple[Any, int, Iterator[Any]]:
    """Schema, number of rows (0 where it is not known before reading) and record batches."""
    import pyarrow
    import pyarrow.parquet

    if head.startswith(PARQUET):
        table = pyarrow.parquet.ParquetFile(raw)
        return table.schema_arrow, table.metadata.num_rows, table.iter_batches(batch_size=_BATCH_ROWS)
    if head.startswith(ARROW_FILE):
        reader = pyarrow.ipc.open_file(raw)
        return reader.schema, 0, (reader.get_batch(number) for number in range(reader.num_record_batches))
    raw.seek(-8, 2)
    if raw.read() != _END_OF_STREAM:
        raise UserError(f"{name}: damaged Arrow file: its end is missing")
    raw.seek(0)
    stream = pyarrow.ipc.open_stream(raw)
    return stream.schema, 0, iter(stream)


def _values(array: Any, where: str) -> list[Any]:
    """The values of a column as JSON has them."""
    import pyarrow

    kind = array.type
    try:
        # Python's own times are narrower than Arrow's: no nanoseconds, no year beyond 9999.
        if pyarrow.types.is_timestamp(kind) or pyarrow.types.is_date(kind) or pyarrow.types.is_time(kind):
            array = array.cast(pyarrow.string())
        values = array.to_pylist()
        plain = _plain_type(kind)
        return values if plain else [_json(value) for value in values]
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{where}: a value of type {kind} has no text: {reason}") from error


def _plain_type(kind: Any) -> bool:
    """Whether every value of a type is a JSON value."""
    import pyarrow

    types = pyarrow.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _plain_type(kind.value_type)
    if types.is_struct(kind):
        return all(_plain_type(kind.field(index).type) for index in range(kind.num_fields))
    known: tuple[Callable[[Any], bool], ...] = (
        types.is_string,
        types.is_large_string,
        types.is_integer,
        types.is_boolean,
        types.is_null,
    )
    return any(is_kind(kind) for is_kind in known)


def _json(value: Any) -> Any:
    """The JSON value of a value. TypeError where there is none."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_json(item) for item in value]
    if isinstance(value, decimal.Decimal):
        if value == value.to_integral_value() and value.as_tuple().exponent == 0:
            return int(value)
        near = float(value)
        return near if decimal.Decimal(repr(near)) == value else str(value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)  # durations, intervals, identifiers
    return None if math.isnan(number) else number
