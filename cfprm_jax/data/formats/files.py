"""The rows of corpus files, one after another, whatever the file is wrapped in.

JSON lines, one JSON array of rows, and parquet; each of the two JSON forms plain or gzip-compressed. Which one a file
is tells its content, not its name. Nothing is read before it is asked for, and no more than one row (of parquet: one
small batch) is held, so memory does not grow with the file.
"""

from __future__ import annotations

import codecs
import dataclasses
import glob
import gzip
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

from cfprm_jax.errors import UserError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_PARQUET_ROWS = 256
_EXCERPT = 200


class Row(NamedTuple):
    """One row of a file.

    Attributes:
      line: its line, from 1 (in parquet: the number of the row).
      data: the JSON object, or None if there is none to be had.
      reason: why there is none.
      excerpt: how the unreadable row begins.
      fraction: how much of the file lies before the next row, 0 to 1.
    """

    line: int
    data: dict[str, Any] | None
    reason: str = ""
    excerpt: str = ""
    fraction: float = 0.0


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file to read, and what messages and records call it."""

    path: pathlib.Path
    name: str
    size: int


def expand(paths: Paths) -> list[InputFile]:
    """The files that paths and glob patterns name, in the order given, a pattern's matches sorted.

    A file is called by its last name, or by the whole path where two of them share that. A file named twice is read
    once.

    Raises:
      UserError: nothing matches, or a directory was named.
    """
    given = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not given:
        raise UserError("no input file was named")
    found: dict[pathlib.Path, None] = {}
    for name in given:
        # A name that exists is taken as it is, even where it holds the characters of a pattern.
        matches = [name] if pathlib.Path(name).exists() else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        if not matches:
            raise UserError(f"{name}: no such file" + (" matches" if glob.has_magic(name) else ""))
        found.update(dict.fromkeys(map(pathlib.Path, matches)))
    for path in found:
        if path.is_dir():
            raise UserError(f"{path} is a directory; name files, or a pattern such as {path}/*.jsonl")
    names = [path.name for path in found]
    return [
        InputFile(path, path.name if names.count(path.name) == 1 else str(path), path.stat().st_size) for path in found
    ]


def rows(file: InputFile) -> Iterator[Row]:
    """The rows of one file. A line that is no JSON object comes out with a reason in place of its data.

    Raises:
      UserError: the file cannot be opened, is empty, or is damaged in such a way that nothing after the damage can be
        told apart (a cut gzip or parquet file, a syntax error inside a JSON array).
    """
    try:
        with file.path.open("rb") as raw:
            head = raw.peek(4)[:4]
            if head[:4] == b"PAR1":
                yield from _parquet_rows(raw, file)
            elif head[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield from _json_rows(cast(BinaryIO, unpacked), raw, file)
            else:
                yield from _json_rows(raw, raw, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{file.name}: damaged gzip file: {error}") from error
    except OSError as error:
        raise UserError(f"{file.name}: {error.strerror or error}") from error


def _json_rows(stream: BinaryIO, raw: BinaryIO, file: InputFile) -> Iterator[Row]:
    """The rows of a JSON lines file or of one JSON array."""
    # An array may be one line as long as the file, so no line is read to its end before it is known to be a row.
    first, start = 1, stream.readline(_CHUNK).removeprefix(codecs.BOM_UTF8)
    while start.isspace():
        first, start = first + start.count(b"\n"), stream.readline(_CHUNK)
    if not start:
        raise UserError(f"{file.name}: empty file")
    if start.lstrip()[:1] == b"[":
        yield from _array_rows(start, first, stream, raw, file)
        return
    start = start if start.endswith(b"\n") else start + stream.readline()
    for line, text in enumerate(itertools.chain((start,), stream), first):
        if not text.isspace():
            yield _line_row(line, text, _fraction(raw, file))


def _line_row(line: int, text: bytes, fraction: float) -> Row:
    """One line of JSON lines."""
    try:
        data = json.loads(text.decode("utf-8"))
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: {error.reason} at byte {error.start + 1}"
    except (ValueError, RecursionError) as error:
        reason = f"not JSON that can be read: {error}"
    else:
        return _object_row(line, data, fraction)
    return Row(line, None, reason, _excerpt(text.decode("utf-8", "replace")), fraction)


def _object_row(line: int, data: Any, fraction: float) -> Row:
    """A row from a decoded value, which ought to be an object of valid text."""
    if not isinstance(data, dict):
        reason = f"expected a JSON object, found {_kind(data)}"
        return Row(line, None, reason, _excerpt(json.dumps(data)), fraction)
    try:
        # JSON can escape half a character; no tokenizer and no UTF-8 file takes that.
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return Row(line, None, f"not Unicode: {error.reason}", _excerpt(json.dumps(data)), fraction)
    return Row(line, data, fraction=fraction)


def _array_rows(first: bytes, line: int, stream: BinaryIO, raw: BinaryIO, file: InputFile) -> Iterator[Row]:
    """The elements of a JSON array, decoded one at a time from a buffer that holds little more than one element."""
    scanner, decode = json.JSONDecoder(), _utf8_decoder(file)
    text, position, expect, ended, elements = decode(first), 0, "[", False, 0
    while True:
        start = cast(re.Match[str], _SPACE.match(text, position)).end()
        line, position = line + text.count("\n", position, start), start
        if position < len(text):
            if expect in "[,":
                # After an element: the comma or the end. "[" is the one opening bracket.
                if text[position] == "]" and expect == ",":
                    break
                if text[position] != expect:
                    raise UserError(f"{file.name}:{line}: not JSON: expected {expect!r}, found {text[position]!r}")
                position, expect = position + 1, "element or end" if expect == "[" else "element"
                continue
            if text[position] == "]" and expect == "element or end":
                break
            try:
                data, end = scanner.raw_decode(text, position)
            except json.JSONDecodeError as error:
                if ended:
                    at = line + text.count("\n", position, error.pos)
                    raise UserError(f"{file.name}:{at}: not JSON: {error.msg}") from error
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file.name}:{line}: not JSON that can be read: {error}") from error
            else:
                elements += 1
                yield _object_row(line, data, _fraction(raw, file))
                line += text.count("\n", position, end)
                position, expect = end, ","
                continue
        if ended:
            raise UserError(f"{file.name}:{line}: not JSON: the array does not end")
        # Doubling keeps the number of attempts at an element larger than the buffer logarithmic.
        more = stream.read(max(_CHUNK, len(text) - position))
        ended = not more
        text, position = text[position:] + decode(more, ended), 0
    rest = text[position + 1 :]
    while not (after := rest.lstrip()) and (more := stream.read(_CHUNK)):
        line, rest = line + rest.count("\n"), decode(more)
    if after:
        line += rest.count("\n", 0, len(rest) - len(after))
        raise UserError(f"{file.name}:{line}: not JSON: text after the end of the array")
    if not elements:
        raise UserError(f"{file.name}: empty file: an array without rows")


def _utf8_decoder(file: InputFile) -> Any:
    """Bytes to text across chunk borders."""
    decoder = codecs.getincrementaldecoder("utf-8")()

    def decode(data: bytes, final: bool = False) -> str:
        try:
            return decoder.decode(data, final)
        except UnicodeDecodeError as error:
            raise UserError(f"{file.name}: not UTF-8: {error.reason}") from error

    return decode


def _parquet_rows(raw: BinaryIO, file: InputFile) -> Iterator[Row]:
    """The rows of a parquet file, a batch at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{file.name}: reading parquet needs pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(raw)
        total, line = table.metadata.num_rows, 0
        if not total:
            raise UserError(f"{file.name}: empty file: no rows")
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
            for data in batch.to_pylist():
                line += 1
                yield Row(line, data, fraction=line / total)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file.name}: damaged parquet file: {error}") from error


def _fraction(raw: BinaryIO, file: InputFile) -> float:
    """How much of the file has been taken from the disk; a pipe has no size."""
    return min(raw.tell() / file.size, 1.0) if file.size else 0.0


def _excerpt(text: str) -> str:
    return text.strip()[:_EXCERPT]


def _kind(value: Any) -> str:
    """What JSON calls a value's type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
