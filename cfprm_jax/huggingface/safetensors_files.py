"""Safetensors files: the tensors of a directory, from headers alone; rows of a tensor; a streaming writer.

Layout (https://github.com/huggingface/safetensors): 8 bytes with the length of the header, little-endian; the header, a
JSON object of name -> {dtype, shape, data_offsets}; then the data. Reading goes into memory that the caller has, or
through one buffer of a few MiB, and never through a memory map, so that what is read does not add to resident memory.
Writing takes one piece of a tensor at a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cfprm_jax.errors import UserError
from cfprm_jax.model_directory import file_schemas, json_files, schema
from cfprm_jax.runtime import atomic, digests

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Bits of a value of every type that the format has; a file may hold tensors that nothing here reads.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_CHUNK_BYTES = 8 << 20
# The limit of the reference implementation; a larger length is noise read as a header.
_MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A stored tensor: its file, dtype as in the header ("BF16"), shape, and offset of its first byte."""

    name: str
    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Rows start..stop of axis 0 in pieces of a few MiB: (index of its first row, the rows)."""
        dtype = DTYPES[self.dtype]
        row_bytes = dtype.itemsize * math.prod(self.shape[1:])
        rows_each = max(1, _CHUNK_BYTES // row_bytes)
        buffer = bytearray(min(rows_each, stop - start) * row_bytes)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset + start * row_bytes)
            for first in range(start, stop, rows_each):
                rows = min(rows_each, stop - first)
                _read_exactly(file, memoryview(buffer)[: rows * row_bytes], self.file)
                yield (
                    first,
                    np.frombuffer(buffer, dtype, rows * math.prod(self.shape[1:])).reshape(rows, *self.shape[1:]),
                )

    def read_into(self, start: int, target: np.ndarray) -> None:
        """Rows start and on, as many as target has, into a contiguous array of the stored dtype."""
        row_bytes = DTYPES[self.dtype].itemsize * math.prod(self.shape[1:])
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset + start * row_bytes)
            _read_exactly(file, target.reshape(-1).view(np.uint8).data, self.file)

    def read(self) -> np.ndarray:
        """The whole tensor, in its stored dtype."""
        values = np.empty(self.shape, DTYPES[self.dtype])
        self.read_into(0, values)
        return values


def _read_exactly(file: io.FileIO, view: memoryview, path: pathlib.Path) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise UserError(f"{path}: ended while being read; it has become shorter since its header was checked")
        done += count


def read_header(path: pathlib.Path) -> list[StoredTensor]:
    """The tensors that a file's header lists.

    Raises:
      UserError: the file is truncated or is no safetensors file; the message states which, with the sizes.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: not readable: {error}") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8:
            raise UserError(f"{path}: truncated: {size} bytes, less than the 8 that every safetensors file begins with")
        if length > _MAX_HEADER_BYTES:
            raise UserError(f"{path}: not a safetensors file: its first 8 bytes give a header of {length} bytes")
        if 8 + length > size:
            raise UserError(f"{path}: truncated: {size} bytes, but the header alone ends at byte {8 + length}")
        described = file.read(length)
    header = json_files.as_object(json_files.parse(described, f"{path}: its header"), f"{path}: its header")
    return _described_tensors(path, header, 8 + length, size)


def _described_tensors(path: pathlib.Path, header: Mapping[str, Any], data: int, size: int) -> list[StoredTensor]:
    """The tensors of a header that describes every byte of a file from data to size once, and no others."""
    tensors, ends = [], []
    for name, entry in header.items():
        kind = file_schemas.HEADER_METADATA if name == "__metadata__" else file_schemas.TENSOR
        if (fault := kind.fault(entry, f"its header: {name[:200]}")) is not None:
            raise UserError(f"{path}: {fault}")
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in _BITS:
            raise UserError(f"{path}: its header: {name}.dtype: expected {', '.join(_BITS)}, found {dtype!r}")
        if begin > end:
            raise UserError(
                f"{path}: its header: {name}.data_offsets: expected a begin and an end, found {begin}, {end}"
            )
        if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
            raise UserError(f"{path}: damaged: {name} has {end - begin} bytes for shape {list(shape)} of {dtype}")
        tensors.append(StoredTensor(name, path, dtype, shape, data + begin))
        ends.append((data + begin, data + end, name))
    last = max((end for _, end, _ in ends), default=data)
    if size != last:
        damage = "truncated" if size < last else "damaged"
        raise UserError(f"{path}: {damage}: {size} bytes, but its header describes {last}")
    place, before = data, "the header"
    for begin, end, name in sorted(ends):
        if begin != place:
            what = "overlaps" if begin < place else f"is {begin - place} bytes behind"
            raise UserError(f"{path}: damaged: its header: {name} {what} {before}; expected one after the other")
        place, before = end, name
    return tensors


@dataclasses.dataclass(frozen=True)
class Listing:
    """The headers of a directory.

    Attributes:
      tensors: every tensor of every readable file; a name twice if two shards hold it.
      problems: what is wrong with files and index, a line each.
      unreadable: whether some file could not be read, so that tensors may be absent from the list for that reason;
      lost: the names that the index puts in such a file (all that is known of them).
    """

    tensors: tuple[StoredTensor, ...]
    problems: tuple[str, ...] = ()
    unreadable: bool = False
    lost: frozenset[str] = frozenset()


def list_directory(directory: pathlib.Path) -> Listing:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json names; reads headers only.

    Raises:
      UserError: the directory holds neither, or both, or the index is not readable.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file() and index.is_file():
        raise UserError(f"{directory}: holds both {SINGLE} and {INDEX}; which of them counts is unclear: remove one")
    if single.is_file():
        try:
            return Listing(tuple(read_header(single)))
        except UserError as error:
            return Listing((), (str(error),), unreadable=True)
    if index.is_file():
        return _list_shards(directory, index)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    if (directory / "adapter_config.json").is_file():
        raise UserError(f"{directory}: holds adapters of PEFT alone; merge them into their backbone first")
    if any(directory.glob("*.safetensors")):
        raise UserError(f"{directory}: holds safetensors shards but no {INDEX}, which lists the tensors of each shard")
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in directory.glob(pattern))
    found = f"; found {', '.join(others)}, which is not read" if others else ""
    raise UserError(f"{directory}: expected {SINGLE} or {INDEX}{found}")


def _list_shards(directory: pathlib.Path, index: pathlib.Path) -> Listing:
    described = json_files.read_object(index, _MAX_HEADER_BYTES)
    schema.check(described, file_schemas.INDEX, str(index))
    weight_map: dict[str, str] = described["weight_map"]
    tensors: list[StoredTensor] = []
    problems: list[str] = []
    broken: set[str] = set()
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        try:
            if not path.is_file():
                named = sum(file == shard for file in weight_map.values())
                raise UserError(f"{path}: missing shard: {index.name} puts {named} tensors in it")
            tensors += read_header(path)
        except UserError as error:
            problems.append(str(error))
            broken.add(shard)
    where: dict[str, list[str]] = {}
    for tensor in tensors:
        where.setdefault(tensor.name, []).append(tensor.file.name)
    for name, shard in weight_map.items():
        if shard not in broken and shard not in where.get(name, []):
            actual = f"it is in {', '.join(where[name])}" if name in where else "no shard holds it"
            problems.append(f"{index}: wrong index: puts {name} in {shard}, but {actual}")
    for name, files in where.items():
        if name not in weight_map:
            problems.append(f"{index}: wrong index: does not name {name}, which {', '.join(files)} holds")
    lost = frozenset(name for name, shard in weight_map.items() if shard in broken)
    return Listing(tuple(tensors), tuple(problems), unreadable=bool(broken), lost=lost)


def fingerprint(tensors: Iterable[StoredTensor]) -> str:
    """A hash that identifies a checkpoint: of the names, types, shapes and values of its tensors.

    Which shard a tensor is in does not matter. All bytes are read, a tensor a thread: two models may differ in one row
    of their embedding alone, such as that of the marker.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        return digests.of_parts(threads.map(_identity, sorted(tensors, key=lambda tensor: tensor.name)))


def _identity(tensor: StoredTensor) -> bytes:
    digest = digests.of_span(tensor.file, tensor.offset, math.prod(tensor.shape) * _BITS[tensor.dtype] // 8)
    return json.dumps([tensor.name, tensor.dtype, tensor.shape, digest]).encode()


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: its description, and what gives its rows, in order, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]


def write_shards(
    directory: pathlib.Path,
    tensors: Sequence[PlannedTensor],
    dtype: str,
    max_shard_bytes: int,
    written: Callable[[int], None] | None = None,
) -> list[str]:
    """Write tensors, all of one dtype ("BF16"), in their order into as few shards as fit, with an index if several.

    Each piece of a tensor is fetched, written and dropped before the next one. A tensor larger than max_shard_bytes has
    a shard of its own.

    Args:
      written: called with the number of bytes after each piece.

    Returns: the names of the files of weights.
    """
    itemsize = DTYPES[dtype].itemsize
    shards: list[list[PlannedTensor]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        size = math.prod(tensor.shape) * itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= size
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, dtype, written)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(math.prod(tensor.shape) for tensor in tensors) * itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        atomic.write_json(directory / INDEX, index)
    return names


def write_file(
    path: pathlib.Path,
    tensors: Sequence[PlannedTensor],
    dtype: str,
    written: Callable[[int], None] | None = None,
) -> None:
    """Write tensors into one file; see :func:`write_shards`."""
    itemsize = DTYPES[dtype].itemsize
    header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + math.prod(tensor.shape) * itemsize
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Tensors then begin at a multiple of 8, as readers that map the file expect.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            rows = 0
            for values in tensor.pieces():
                if values.shape[1:] != tensor.shape[1:] or values.dtype != DTYPES[dtype]:
                    raise ValueError(f"{tensor.name}: {values.dtype} {values.shape}, planned {dtype} {tensor.shape}")
                file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                rows += len(values)
                if written is not None:
                    written(values.nbytes)
            if rows != tensor.shape[0]:
                raise ValueError(f"{tensor.name}: {rows} rows, planned {tensor.shape}")
        atomic.sync(file)
