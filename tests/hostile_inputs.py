"""Damaged and extreme inputs, the same ones for the same seed: rows, files and flag values."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import Any


class Literal(str):
    """Text that stands in the JSON as it is, such as NaN."""


NESTED = Literal("[" * 2_000 + "]" * 2_000)
DEEP = Literal("[" * 300 + "]" * 300)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    7,
    0.5,
    -0.1,
    10**12,
    10**400,
    1e300,
    Literal("NaN"),
    Literal("Infinity"),
    Literal("-Infinity"),
    Literal("1e999"),
    Literal("9" * 5_000),
    Literal('"\\ud800"'),
    Literal('{"a": 1, "a": 2}'),
    NESTED,
    DEEP,
    "",
    " \n",
    "\x00",
    "x\x00y",
    "\ufeff",
    "\u2028",
    "</script>",
    "Step 1: ки",
    "+",
    "text " * 2_000,
    [],
    {},
    [None],
    [[]],
    [{}],
    {"": None},
)


def encode(value: Any) -> str:
    """JSON, with every Literal as it is."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {encode(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(encode, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a value."""
    for key, item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def mutate_row(row: dict[str, Any], rng: random.Random) -> str:
    """A row as a line in which one thing, or two, are not as they should be."""
    row = copy.deepcopy(row)
    for _ in range(rng.choice((1, 1, 1, 2))):
        places = list(_places(row))
        if not places:
            break
        container, key = rng.choice(places)
        action = rng.random()
        if action < 0.75:
            container[key] = rng.choice(VALUES)
        elif action < 0.85:
            del container[key]
        elif isinstance(container, list):
            container.insert(key, rng.choice((container[key], *VALUES)))
        else:
            container[rng.choice(("extra", "id", "source", "granularity", "dataset", "level"))] = rng.choice(VALUES)
    line = encode(row)
    if rng.random() < 0.05 and row:
        name = rng.choice(list(row))
        line = f"{line[:-1]}, {json.dumps(name)}: {encode(rng.choice(VALUES))}}}"
    return line


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 20))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return (
        data[:place] + rng.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"[", b"\xed\xa0\x80")) + data[place:]
    )


FILE_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _cut,
    _flip,
    _insert,
    lambda data, rng: _cut(gzip.compress(data, mtime=0), rng),
    lambda data, rng: _flip(gzip.compress(data, mtime=0), rng),
    lambda data, rng: gzip.compress(data, mtime=0) + b"trailing",
    lambda data, rng: data.decode().encode("utf-16"),
    lambda data, rng: b"\xef\xbb\xbf\xef\xbb\xbf" + data,
    lambda data, rng: b"[" + b",".join(data.splitlines()) + rng.choice((b"", b",]", b"]]", b"] x")),
    lambda data, rng: b"\n \n" + data.replace(b"\n", b"\r\n"),
    lambda data, rng: rng.choice((b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"\x28\xb5\x2f\xfd", b"PK\3\4")) + data,
    lambda data, rng: rng.choice((b"", b"\n", b"[]", b"[", b"null", b"{}", b"\0" * 100)),
)


def flag_values(kind: str) -> tuple[str, ...]:
    """Texts for a flag of a kind, most of which mean nothing."""
    numbers = ("", " ", "x", "-1", "0", "-0.0", "1e9", "1e20", "1e-320", "nan", "inf", "-inf", "0x10", "1.5", "-7.5")
    large = (str(10**9), str(2**31), str(2**63), str(10**30), "1e30", "1e39", "1e308", "9" * 5_000, "-" + "9" * 5_000)
    texts = (
        "",
        " ",
        "\x00",
        "a\x00b",
        "\ud800",
        "x" * 100_000,
        "\n",
        "../../..",
        "%s{}",
        "/dev/zero",
        "-1",
        "9" * 5_000,
    )
    lists = (",", "a,,b", "a,a", '"', '"a', "\x00,\x00", "1,\ud800", "1," * 500 + "1", "9" * 5_000, "1e9", str(10**9))
    return {
        "int": numbers + large,
        "float": numbers + large,
        "bool": ("", "2", "yes", "\x00", "tru"),
        "string": texts,
        "list": texts + lists,
    }[kind]
