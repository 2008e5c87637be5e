"""The rows of corpus files, in order, for every container and compression.

JSON lines, one JSON array of rows, parquet, and Arrow (a file, a stream, or a folder that datasets.save_to_disk wrote);
each of the two JSON forms plain or gzip-compressed. A file's kind is detected from its content, not its name. Reading
is lazy, and at most one row (of parquet and Arrow: one small batch) is held, so memory does not grow with the file; a
row has at most MOST_ROW_BYTES.
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

from cfprm_jax.data.formats import json_rows, tables
from cfprm_jax.errors import UserError
from cfprm_jax.runtime.regular_files import check_input

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_EXCERPT = 200

MOST_ROW_BYTES = 1 << 27
"""Bytes of a row, unpacked: 128 MiB hold a question with 30,000 candidates of 4,000 characters."""

_TOO_LONG = f"a row of more than {MOST_ROW_BYTES >> 20} MiB"

# Other compressed and archive formats, which would otherwise be reported as text with a fault.
_FOREIGN = {
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


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


def expand(paths: Paths, flag: str = "") -> list[InputFile]:
    """The files that paths and glob patterns name, in the order given, a pattern's matches sorted.

    A file is called by its last name, or by the whole path where two of them share that. A file named twice is read
    once.

    Args:
      flag: the flag that names them, for errors.

    Raises:
      UserError: nothing matches, or a path is no regular file (a pipe, a device, a directory without saved rows).
    """
    given = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not given:
        raise UserError("no input file was named")
    flag = f"--{flag}=" if flag else ""
    found: dict[pathlib.Path, None] = {}
    for name in given:
        # A name that exists is taken as it is, even where it holds the characters of a pattern.
        matches = [name] if pathlib.Path(name).exists() else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        if not matches:
            raise UserError(f"{flag}{name}: no such file" + (" matches" if glob.has_magic(name) else ""))
        found.update(dict.fromkeys(map(pathlib.Path, matches)))
    files: dict[pathlib.Path, None] = {}
    for path in found:
        parts = _saved_dataset(path, flag) if path.is_dir() else [path]
        for part in parts:
            check_input(part, f"{flag}{part}")
        files.update(dict.fromkeys(parts))
    found = files
    names = [path.name for path in found]
    return [
        InputFile(path, _shown(path.name if names.count(path.name) == 1 else str(path)), path.stat().st_size)
        for path in found
    ]


def require(**named: Paths) -> None:
    """UserError, naming the flag, unless the files of each flag are there; a flag that is empty names none.

    A command calls this before it computes or writes anything.
    """
    for flag, paths in named.items():
        if paths:
            expand(paths, flag)


def _saved_dataset(folder: pathlib.Path, flag: str) -> list[pathlib.Path]:
    """The Arrow files of a folder that datasets.save_to_disk wrote, in their order; flag begins the errors."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        known = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise UserError(
            f"{flag}{folder} holds the splits {', '.join(known) or 'of a data set'}: name one, {folder}/SPLIT"
        )
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(f"{flag}{folder} is a directory; name files, or a pattern such as {folder}/*.jsonl")
    try:
        description = json.loads(state.read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in description["_data_files"]]
        if not names or not all(isinstance(name, str) and pathlib.Path(name).name == name for name in names):
            raise ValueError("no file names in it")
        moved = bool(description.get("_indices_files"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{flag}{state}: not what datasets.save_to_disk writes: {error!r:.200}") from error
    if moved:
        raise UserError(f"{flag}{folder} keeps its rows in an order of their own; write it with Dataset.to_json")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{flag}{folder / missing[0]}: no such file, and {state.name} names it")
    return [folder / name for name in names]


def _shown(name: str) -> str:
    """A file's name as text, which goes into messages and records; bytes that are no UTF-8 as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def rows(file: InputFile) -> Iterator[Row]:
    """The rows of one file. A line that is not a JSON object is yielded with a reason in place of its data.

    Raises:
      UserError: the file cannot be opened, is empty, or is damaged in such a way that no row after the damage can be
        recovered (a cut gzip or parquet file, a syntax error inside a JSON array).
    """
    try:
        with file.path.open("rb") as raw:
            head = raw.peek(8)[:8]
            foreign = next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), None)
            if tables.is_table(head):
                yield from _table_rows(raw, head, file)
            elif foreign is not None:
                raise UserError(f"{file.name}: {foreign}; expected UTF-8 text, plain or .gz, parquet or Arrow")
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
    if not start.endswith(b"\n"):
        start += stream.readline(MOST_ROW_BYTES)
    # One more byte than a row may have: what is longer is known without reading it to its end.
    rest = iter(lambda: stream.readline(MOST_ROW_BYTES + 1), b"")
    for line, text in enumerate(itertools.chain((start,), rest), first):
        if len(text) > MOST_ROW_BYTES:
            raise UserError(f"{file.name}:{line}: {_TOO_LONG}")
        if not text.isspace():
            yield _line_row(line, text, _fraction(raw, file))


def _line_row(line: int, text: bytes, fraction: float) -> Row:
    """One line of JSON lines."""
    try:
        # Without the end of the line: an error after it would be one of a second line's first column.
        data = json_rows.DECODER.decode(text.rstrip(b"\r\n").decode("utf-8"))
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
    reason = json_rows.reason_against(data)
    if reason is None:
        return Row(line, data, fraction=fraction)
    try:
        excerpt = _excerpt(json.dumps(data))
    except RecursionError:
        excerpt = ""
    return Row(line, None, reason, excerpt, fraction)


def _array_rows(first: bytes, line: int, stream: BinaryIO, raw: BinaryIO, file: InputFile) -> Iterator[Row]:
    """The elements of a JSON array, decoded one at a time from a buffer that holds little more than one element."""
    scanner, decode = json_rows.DECODER, _utf8_decoder(file)
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
                    # An error at the end of a cut file is one of its last row, not of blank lines behind that.
                    at = line + text.count("\n", position, min(error.pos, len(text.rstrip())))
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
        if len(text) - position > MOST_ROW_BYTES:
            raise UserError(f"{file.name}:{line}: {_TOO_LONG}")
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


def _table_rows(raw: BinaryIO, head: bytes, file: InputFile) -> Iterator[Row]:
    """The rows of a parquet or Arrow file."""
    for line, (data, fraction) in enumerate(tables.table_rows(raw, head, file.name), 1):
        yield _object_row(line, data, fraction or _fraction(raw, file))


def _fraction(raw: BinaryIO, file: InputFile) -> float:
    """The share of the file that has been read; 0 for a pipe, which has no size."""
    return min(raw.tell() / file.size, 1.0) if file.size else 0.0


def _excerpt(text: str) -> str:
    return text.strip()[:_EXCERPT]
