"""A tokenised corpus on disk: one directory, written once and never changed.

    corpus.json                what it was made from, its report, and for each granularity its counts
    <granularity>/data.bin     of each trajectory: tokens (int32), step positions (int32), labels and redundancies
                               (float32), end to end
    <granularity>/index.bin    int64 [trajectories, 4]: where it begins in data.bin (in units of 4 bytes), its tokens,
                               its steps, the windows cut from it
    <granularity>/order.bin    int64 [trajectories, 2]: trajectories with those of each record in depth-first order, and
                               the tokens that each shares with the one before it in its record
    <granularity>/records.bin  int64 [records + 1, 3]: first trajectory, where the source's name begins in sources.bin,
                               a hash of the question
    <granularity>/sources.bin  UTF-8 names of the records' sources, end to end

corpus.json has a checksum of itself, and of every other file the CRC-32 of each 64 MiB. Opening a corpus reads and
compares all of it, on all processor cores: about a second a GiB on two.

All little-endian. Trajectories stand in the order of the corpus, those of a record together. Reading maps the small
files and fetches a trajectory from data.bin by one positioned read, so memory does not grow with the corpus (mapping
data.bin would count what was read as the process's memory), and any number of threads may read.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int64

from cfprm_jax.config import Granularity
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.partition import shared_forest
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import atomic, digests

# Changes with this layout and with anything that encodes the same text differently.
FORMAT = 1
# Changes with the files alone; a corpus of another layout is rebuilt, and a run can resume with it.
LAYOUT = 4
_INDEX_FILES = {"index": 4, "order": 2, "records": 3}
_DESCRIPTION = "corpus.json"
_PIECE = 1 << 26
_READ = 1 << 22


class DamagedCorpusError(UserError):
    """A file of a tokenised corpus is missing, unreadable, or not what was written."""


class _ChecksummedFile:
    """An append-only file with a CRC-32 of each of its pieces."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._crcs: list[int] = [0]
        self.size = 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        view = memoryview(content)
        while view:
            if self.size == _PIECE * len(self._crcs):
                self._crcs.append(0)
            part = view[: _PIECE * len(self._crcs) - self.size]
            self._crcs[-1] = zlib.crc32(part, self._crcs[-1])
            self.size += len(part)
            view = view[len(part) :]

    def close(self) -> None:
        if not self._file.closed:
            atomic.sync(self._file)
            self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def description(self) -> dict[str, Any]:
        return {"bytes": self.size, "crc32": self._crcs}


class GranularityWriter:
    """Appends records at one granularity; close() completes the files."""

    def __init__(self, directory: pathlib.Path) -> None:
        directory.mkdir()
        self._files = {name: _ChecksummedFile(directory / f"{name}.bin") for name in (*_INDEX_FILES, "data", "sources")}
        self.trajectories = 0
        self.records = 0
        self.max_steps = 0
        self.max_tokens = 0
        self._words = 0
        self._source_bytes = 0

    def add(self, source: str, question: str, encoded: Sequence[Encoded]) -> None:
        """Append one record's trajectories, in the order of the corpus."""
        forest = shared_forest([solution.tokens for solution in encoded])
        self._write("order", np.stack([forest.order + self.trajectories, forest.shared], axis=1).astype("<i8"))
        digest = int.from_bytes(digests.raw(question)[:8], "little", signed=True)
        self._write("records", np.array([self.trajectories, self._source_bytes, digest], "<i8"))
        name = source.encode()
        self._files["sources"].write(name)
        self._source_bytes += len(name)
        index = np.empty((len(encoded), 4), "<i8")
        for row, solution in zip(index, encoded, strict=True):
            tokens, steps = len(solution.tokens), len(solution.step_positions)
            row[:] = self._words, tokens, steps, solution.steps_cut
            self._write("data", solution.tokens.astype("<i4", copy=False))
            self._write("data", solution.step_positions.astype("<i4", copy=False))
            self._write("data", solution.labels.astype("<f4", copy=False))
            redundancy = solution.redundancy
            self._write("data", np.full(steps, np.nan, "<f4") if redundancy is None else redundancy.astype("<f4"))
            self._words += tokens + 3 * steps
            self.max_steps = max(self.max_steps, steps)
            self.max_tokens = max(self.max_tokens, tokens)
        self._write("index", index)
        self.trajectories += len(encoded)
        self.records += 1

    def close(self) -> None:
        """Write what is left to disk."""
        if not self._files["data"].closed:
            self._write("records", np.array([self.trajectories, self._source_bytes, 0], "<i8"))
        for file in self._files.values():
            file.close()

    def counts(self) -> dict[str, Any]:
        """The entry of the granularity in corpus.json."""
        return {
            "trajectories": self.trajectories,
            "records": self.records,
            "max_steps": self.max_steps,
            "max_tokens": self.max_tokens,
            "files": {name: file.description() for name, file in self._files.items()},
        }

    def _write(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(array.tobytes())


class GranularityReader:
    """The trajectories of a corpus at one granularity: a sequence of Encoded, and their records."""

    def __init__(self, directory: pathlib.Path, granularity: Granularity, counts: dict[str, Any]) -> None:
        """The files must have been compared with their checksums; see :func:`verify`."""
        self.granularity = granularity
        self.max_steps = counts["max_steps"]
        self.max_tokens = counts["max_tokens"]
        self._length = counts["trajectories"]
        self._index = _mapped(directory / "index.bin", (self._length, 4))
        self._records = _mapped(directory / "records.bin", (counts["records"] + 1, 3))
        self._sources = (directory / "sources.bin").open("rb")
        self._data = (directory / "data.bin").open("rb")
        self._order = _mapped(directory / "order.bin", (self._length, 2))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, trajectory: int) -> Encoded:
        if not -self._length <= trajectory < self._length:
            raise IndexError(f"trajectory {trajectory} of {self._length}")
        begin, tokens, steps, cut = (int(value) for value in self._index[trajectory])
        words = np.frombuffer(os.pread(self._data.fileno(), 4 * (tokens + 3 * steps), 4 * begin), "<i4")
        return Encoded(
            tokens=words[:tokens],
            step_positions=words[tokens : tokens + steps],
            labels=words[tokens + steps : tokens + 2 * steps].view("<f4"),
            steps_cut=cut,
            redundancy=words[tokens + 2 * steps :].view("<f4"),
        )

    @property
    def record_starts(self) -> Int64[np.ndarray, " records+1"]:
        """First trajectory of each record, and the number of trajectories."""
        return self._records[:, 0]

    @property
    def order(self) -> Int64[np.ndarray, " trajectories"]:
        """Trajectories with those of each record in depth-first order of their common tree."""
        return self._order[:, 0]

    @property
    def shared(self) -> Int64[np.ndarray, " trajectories"]:
        """Tokens that each trajectory, in that order, shares with the one before it; 0 for a record's first."""
        return self._order[:, 1]

    @property
    def lengths(self) -> Int64[np.ndarray, " trajectories"]:
        """Tokens of each trajectory, in the order of the corpus."""
        return self._index[:, 1]

    def question(self, trajectory: int) -> int:
        """A hash of the question that a trajectory answers."""
        return int(self._records[self._record(trajectory), 2])

    def source(self, trajectory: int) -> str:
        """Name of the record that a trajectory comes from."""
        record = self._record(trajectory)
        begin, end = int(self._records[record, 1]), int(self._records[record + 1, 1])
        return os.pread(self._sources.fileno(), end - begin, begin).decode()

    def _record(self, trajectory: int) -> int:
        return int(np.searchsorted(self.record_starts, trajectory, side="right")) - 1


def write_description(directory: pathlib.Path, description: dict[str, Any]) -> None:
    """Write corpus.json, which is the last file and makes the directory a corpus."""
    atomic.write_json(directory / _DESCRIPTION, digests.sealed({"layout": LAYOUT, **description}), indent=1)


def read_description(directory: pathlib.Path) -> dict[str, Any]:
    """The content of corpus.json.

    Raises:
      DamagedCorpusError: it cannot be read, or is not what was written.
    """
    file = directory / _DESCRIPTION
    try:
        description = digests.unsealed(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DamagedCorpusError(f"{file}: {error}") from error
    if description["layout"] != LAYOUT:
        raise DamagedCorpusError(f"{file} is of layout {description['layout']}, expected {LAYOUT}")
    return description


def verify(directory: pathlib.Path, description: dict[str, Any]) -> None:
    """Read every file of a corpus, and compare it with its checksums.

    Raises:
      DamagedCorpusError: naming a file that is missing, cannot be read, or is not what was written.
    """
    pieces = []
    for granularity, counts in description["granularities"].items():
        for name, described in counts["files"].items():
            file = directory / granularity / f"{name}.bin"
            size = file.stat().st_size if file.is_file() else None
            if size != described["bytes"]:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise DamagedCorpusError(f"{file} {found}, expected {described['bytes']:,} bytes")
            pieces += [(file, _PIECE * number, crc) for number, crc in enumerate(described["crc32"])]
    # zlib lets other threads run.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for (file, _, _), fault in zip(pieces, threads.map(_fault, pieces), strict=True):
            if fault:
                raise DamagedCorpusError(f"{file} {fault}")


def _fault(piece: tuple[pathlib.Path, int, int]) -> str:
    path, begin, expected = piece
    crc, end = 0, begin + _PIECE
    try:
        with path.open("rb", buffering=0) as file:
            while begin < end and (content := os.pread(file.fileno(), min(_READ, end - begin), begin)):
                crc, begin = zlib.crc32(content, crc), begin + len(content)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if crc == expected else "has changed: it does not fit its checksum"


def _mapped(file: pathlib.Path, shape: tuple[int, ...]) -> np.ndarray:
    # A file without bytes cannot be mapped.
    return np.memmap(file, "<i8", "r", shape=shape) if shape[0] else np.empty(shape, "<i8")
