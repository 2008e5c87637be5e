"""Hidden states after frozen layers, computed once and kept on disk: one directory, which only grows.

    cache.json     what the states depend on: weights, frozen layers, type, tokenizer
    hidden.bin     hidden states [width] in bfloat16 or float32, little-endian, end to end
    index.json     units: key -> [first token in hidden.bin, tokens, CRC-32 of their bytes]

A unit is a set of solutions whose distinct tokens are stored together (:mod:`.prefix_places`): a record of a corpus, or
the solutions of a question that are scored. Its key is a hash of its tokens, so corpora and candidates that share
records or questions share their states, and a unit that is found is that of these tokens.

A unit counts once its bytes are on the disk and index.json, which is replaced atomically, names it. After a kill the
bytes beyond the last unit are overwritten, and what was not named is computed again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int64

from cfprm_jax.errors import UserError
from cfprm_jax.runtime import atomic, digests, disk, locks

FORMAT = 2
_DESCRIPTION, _DATA, _INDEX = "cache.json", "hidden.bin", "index.json"
_REMEDY = "delete the directory, and it is computed again"
# NumPy copies a type that is not its own, as bfloat16, element by element; so the file is mapped as integers.
_TYPES: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {
    "bfloat16": (np.dtype("<u2"), np.dtype(ml_dtypes.bfloat16)),
    "float32": (np.dtype("<u4"), np.dtype("<f4")),
}


class TrunkCache:
    """The states in one directory. Any number of threads may read; processes that append do so one at a time."""

    def __init__(self, directory: str | pathlib.Path, identity: Mapping[str, Any], width: int, dtype: str) -> None:
        """Opens a cache, or begins one in a directory that is not there or is empty.

        Args:
          identity: what the states depend on, name by name.
          width: of the hidden states.
          dtype: "bfloat16" or "float32".

        Raises:
          UserError: the directory is the cache of something else, with every difference named, or is damaged.
        """
        self.directory = pathlib.Path(directory)
        self.width = width
        self._stored, self._type = _TYPES[dtype]
        self._mapped: np.ndarray | None = None
        self._units: dict[str, tuple[int, int, int]] = {}
        expected = {"format": FORMAT, **identity, "width": width, "dtype": dtype}
        path = self.directory / _DESCRIPTION
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not path.exists() and not (self.directory / _INDEX).exists():
                atomic.write_json(path, digests.sealed(expected), indent=1)
        except OSError as error:
            raise UserError(f"--cache_frozen: cannot make {self.directory}: {error.strerror}") from error
        found = _read(path)
        different = [
            f"{name.replace('_', ' ')} was {_shown(found.get(name, 'nothing'))} and is {_shown(value)}"
            for name, value in expected.items()
            if found.get(name) != value
        ]
        if different:
            raise UserError(
                f"--cache_frozen: {self.directory} holds hidden states of something else: {'; '.join(different)}; "
                "choose another directory"
            )
        self._reload()

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys that are not there yet, each once, in their order."""
        return [key for key in dict.fromkeys(keys) if key not in self._units]

    def begin(self, key: str) -> int:
        """First token of a unit."""
        return self._units[key][0]

    def verify(self, keys: Iterable[str]) -> None:
        """Read the units of these keys that are there, and compare them with their checksums.

        Raises:
          UserError: naming the file whose bytes have changed.
        """
        found = [self._units[key] for key in dict.fromkeys(keys) if key in self._units]
        # zlib lets other threads run.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            if not all(threads.map(self._whole, found)):
                raise UserError(f"{self.directory / _DATA} has changed: it does not fit its checksums; {_REMEDY}")

    def take(self, places: Int64[np.ndarray, " tokens"]) -> Float[np.ndarray, "tokens width"]:
        """The states at these places of hidden.bin, which alone are read."""
        if self._mapped is None or (len(places) and int(places.max()) >= len(self._mapped)):
            self._mapped = np.memmap(self.directory / _DATA, self._stored, "r", shape=(self._end, self.width))
        return np.asarray(self._mapped[places]).view(self._type)

    def append(self, units: Sequence[tuple[str, Float[np.ndarray, "tokens width"]]]) -> None:
        """Store units; those that another process has stored meanwhile are left alone.

        Raises:
          UserError: there is no room for them, in the system's words; the cache is as it was.
        """
        path = self.directory / _DATA
        with locks.held(self.directory / ".lock", wait=True):
            self._reload()
            added, end = {}, self._end
            start = end * self._row
            try:
                with path.open("r+b" if path.exists() else "w+b") as file:
                    file.seek(start)
                    for key, states in units:
                        if key in self._units or key in added:
                            continue
                        content = np.ascontiguousarray(states, self._type).view(self._stored).tobytes()
                        file.write(content)
                        added[key] = (end, len(states), zlib.crc32(content))
                        end += len(states)
                    file.truncate()
                    atomic.sync(file)
                kept = self._units | added
                atomic.write_json(self.directory / _INDEX, digests.sealed(kept), indent=None)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.truncate(path, start)
                size = disk.size(sum(len(states) for _, states in units) * self._row)
                raise UserError(
                    f"--cache_frozen: cannot write {size} to {path}: {error.strerror}, {disk.free(self.directory)} are "
                    "free; what was stored before stays, make room or choose another directory"
                ) from error
            self._units = kept

    def require_room(self, tokens: int) -> None:
        """UserError unless the disk has room for the states of this number of further tokens."""
        needed = tokens * self._row
        if needed > os.statvfs(self.directory).f_bavail * os.statvfs(self.directory).f_frsize:
            raise UserError(
                f"--cache_frozen: {tokens:,} tokens need {disk.size(needed)}, and {self.directory} has "
                f"{disk.free(self.directory)} free; make room, or choose another directory"
            )

    @property
    def _row(self) -> int:
        return self.width * self._stored.itemsize

    @property
    def _end(self) -> int:
        return max((first + tokens for first, tokens, _ in self._units.values()), default=0)

    def _reload(self) -> None:
        """The units that index.json names now."""
        path = self.directory / _INDEX
        if not path.exists():
            return
        self._units = {key: tuple(unit) for key, unit in _read(path).items()}
        data, expected = self.directory / _DATA, self._end * self._row
        size = data.stat().st_size if data.is_file() else None
        if size is None or size < expected:
            found = "is missing" if size is None else f"is truncated: it has {size:,} bytes"
            raise UserError(f"--cache_frozen: {data} {found}, expected {expected:,}; {_REMEDY}")

    def _whole(self, unit: tuple[int, int, int]) -> bool:
        first, tokens, expected = unit
        crc, place, left = 0, first * self._row, tokens * self._row
        with (self.directory / _DATA).open("rb", buffering=0) as file:
            while left and (content := os.pread(file.fileno(), min(left, 1 << 22), place)):
                crc, place, left = zlib.crc32(content, crc), place + len(content), left - len(content)
        return not left and crc == expected


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return digests.unsealed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        what = f"{error.strerror}" if isinstance(error, OSError) else str(error)
        raise UserError(f"--cache_frozen: {path} is damaged: {what}; {_REMEDY}") from error


def _shown(value: Any) -> str:
    # The first digits distinguish two hashes.
    text = str(value)
    return text if len(text) <= 40 else f"{text[:16]}..."
