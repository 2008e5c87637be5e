"""Profile of a compiled step by the purpose of its operations: JAX's profiler and the frames in XLA's text.

XLA keeps for most operations the Python functions that they were traced from; what the compiler put in by itself counts
as the loop that it is in. An operation is of the first kind that any of these functions stands for; a fusion, which may
hold operations of several kinds, is of the one that XLA names it by.
"""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

# Part of a file's path, part of a function's name -> what it is for. The first that fits any frame of an operation.
KINDS = (
    ("/models/attention/", "", "attention"),
    ("/models/embedding.py", "", "embedding"),
    ("/split_embedding.py", "", "embedding"),
    ("/losses/", "", "loss and metrics"),
    ("/training/step.py", "batch_sums", "loss and metrics"),
    ("/models/reward_head.py", "", "head"),
    ("/training/optimizer.py", "global_norm", "clipping"),
    ("/training/optimizer.py", "", "optimizer"),
    ("/training/slots.py", "", "optimizer"),
    ("/models/products.py", "", "products with weights"),
    ("/models/rotary.py", "", "rotary positions"),
    ("/models/layers.py", "RMSNorm", "norms"),
    ("/models/layers.py", "", "rest of the layers"),
    ("/models/backbone.py", "", "rest of the layers"),
)
OTHER = "put in by the compiler"

_ROW = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)")


class Frames:
    """The Python functions behind each instruction of a program's text."""

    def __init__(self, text: str) -> None:
        tables: dict[str, dict[int, Any]] = {}
        current: dict[int, Any] | None = None
        self._frame_of: dict[str, int] = {}
        self._home: dict[str, str] = {}  # instruction -> the computation that it is in
        self._caller: dict[str, str] = {}  # computation -> the instruction that runs it
        computation = ""
        for line in text.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                current = tables.setdefault(line, {})
            elif current is not None and (row := _ROW.match(line)):
                numbered = {name: int(value) for name, value in _FIELD.findall(row[3] or "")}
                current[int(row[1])] = row[2] if row[3] is None else numbered
            elif opened := _COMPUTATION.match(line):
                current, computation = None, opened[1]
            elif named := _INSTRUCTION.match(line):
                self._home[named[1]] = computation
                if frame := _FRAME.search(line):
                    self._frame_of[named[1]] = int(frame[1])
                for called in _CALLED.findall(line):
                    self._caller[called] = named[1]
        self._tables = tables

    def of(self, instruction: str) -> Iterator[tuple[str, str]]:
        """(file, function) from the innermost frame to the outermost."""
        while instruction and instruction not in self._frame_of:
            instruction = self._caller.get(self._home.get(instruction, ""), "")
        frame = self._frame_of.get(instruction, 0)
        while known := self._tables.get("StackFrames", {}).get(frame):
            place = self._tables["FileLocations"].get(known["file_location_id"], {})
            yield (
                self._tables["FileNames"].get(place.get("file_name_id"), ""),
                self._tables["FunctionNames"].get(place.get("function_name_id"), ""),
            )
            # Frames are counted from 1 and parents from 0, none being 0.
            frame = known["parent_frame_id"] - 1


def kind_of(frames: Iterable[tuple[str, str]]) -> str:
    """The purpose of an operation with these frames."""
    known = list(frames)
    for path, function, kind in KINDS:
        if any(path in file.replace("\\", "/") and function in name for file, name in known):
            return kind
    return OTHER


def self_times(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Name -> time of (name, start, duration) events of one thread, without that of the events inside them."""
    total: dict[str, float] = collections.defaultdict(float)
    around: list[tuple[str, float]] = []  # events that have begun: name, end
    for name, start, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while around and around[-1][1] <= start:
            around.pop()
        if around:
            total[around[-1][0]] -= duration
        total[name] += duration
        around.append((name, start + duration))
    return dict(total)


def seconds_by_kind(call: Callable[[], Any], times: int, text: str) -> dict[str, float]:
    """Kind -> seconds of a call, added up over the threads that compute, largest first.

    Args:
      text: the compiled program that call runs.
    """
    with tempfile.TemporaryDirectory() as scratch:
        with jax.profiler.trace(scratch):
            for _ in range(times):
                call()
        (file,) = pathlib.Path(scratch).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        seconds: dict[str, float] = collections.defaultdict(float)
        frames = Frames(text)
        for plane in data.planes:
            for line in plane.lines:
                events = []
                for event in line.events:
                    operation = dict(event.stats).get("hlo_op")
                    if operation is not None:
                        events.append((str(operation), event.start_ns, event.duration_ns))
                for name, nanoseconds in self_times(events).items():
                    seconds[kind_of(frames.of(name))] += nanoseconds / 1e9 / times
    return dict(sorted(seconds.items(), key=lambda one: -one[1]))
