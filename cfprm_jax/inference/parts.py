"""Parts that shares of a command wrote (--shard), put together as one process would have written them.

Nothing is put together that does not belong together: all parts must be there, each once and complete, of the same
flags, model and input, and every row must be the one that the input has at its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from cfprm_jax.checkpoints.model_files import MODEL
from cfprm_jax.checkpoints.retention import CHECKPOINTS
from cfprm_jax.checkpoints.saving import is_run, locate, require_prm_directory
from cfprm_jax.data.formats.files import InputFile, expand, rows
from cfprm_jax.errors import UserError
from cfprm_jax.inference.row_file import FREE_FLAGS, RESOLVED, RowFile, open_rows
from cfprm_jax.inference.rows import SCORES, question_of
from cfprm_jax.options import Options
from cfprm_jax.runtime import config_files, digests
from cfprm_jax.runtime.shards import Shard, parse

# Flags of a process, which one that merges may have, too.
_OF_ONE_RUN = frozenset({"shard", "merge", "platform", "mesh"})


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of one output.

    Attributes:
      files: by index of the share.
      config: the resolved flags that they have in common, "shard" left out, with "fingerprint" and "resolved"; flags
        that no row depends on, of the first part.
      configs: the flags of each part.
    """

    files: tuple[InputFile, ...]
    config: dict[str, Any]
    configs: tuple[dict[str, Any], ...]

    @property
    def fingerprint(self) -> dict[str, str]:
        """What identifies model and input."""
        return self.config["fingerprint"]

    def largest(self, flag: str) -> Any:
        """The largest value of a flag that no row depends on, so that parts may have others of it."""
        return max(config[flag] for config in self.configs)


def read_parts(paths: Sequence[str], free: Set[str] = FREE_FLAGS) -> Parts:
    """The parts that paths and patterns name.

    Args:
      free: flags that no row depends on, which may differ.

    Raises:
      UserError: naming a part that is missing, there twice, not complete, or of other flags, model or input.
    """
    found: dict[int, tuple[InputFile, dict[str, Any]]] = {}
    count = 0
    for file in expand(paths):
        config = _config(file.path)
        shard = parse(config.get("shard", ""))
        if shard is None:
            raise UserError(f"{file.path} is no part: it was written without --shard")
        if found and shard.count != count:
            other = next(iter(found.values()))[0].path
            raise UserError(f"{file.path} is part {shard}, but {other} is one of {count}: parts of two sets")
        count = shard.count
        if shard.index in found:
            raise UserError(f"{found[shard.index][0].path} and {file.path} are both part {shard}")
        found[shard.index] = file, config
    missing = [index for index in range(count) if index not in found]
    if missing:
        known = next(iter(found.values()))[0].path
        shown = ", ".join(str(Shard(index, count)) for index in missing[:5]) + (", ..." if len(missing) > 5 else "")
        begun = [name for index in missing if (name := _partial(known, Shard(index, count))).exists()]
        hint = f"; {begun[0]} is not finished: run that share again with --resume=auto" if begun else ""
        raise UserError(f"{len(missing)} of {count} parts are missing: {shown}{hint}")
    first_file, first = found[0]
    for file, config in found.values():
        for flag in sorted({*first, *config} - free - {"shard"} | {RESOLVED}):
            if config.get(flag) != first.get(flag):
                raise UserError(
                    f"{file.path} and {first_file.path} differ in {_difference(flag, config, first)}: they are no "
                    "parts of one output"
                )
    common = {name: value for name, value in first.items() if name != "shard"}
    in_order = [found[index] for index in range(count)]
    return Parts(tuple(file for file, _ in in_order), common, tuple(config for _, config in in_order))


def without_unused_sharing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved flags without --shard and --merge where they are empty, so that what was begun before them resumes."""
    return {name: value for name, value in config.items() if value or name not in ("shard", "merge")}


def merged(
    parts: Parts,
    given: Iterable[tuple[str, str, Mapping[str, Any] | None]],
    check: Callable[..., None] | None = None,
    question_in: Callable[[Mapping[str, Any]], str] = question_of,
) -> Iterator[dict[str, Any]]:
    """The rows of all parts in the order of the input.

    Args:
      given: of each row of the input its question, its "file:line", and the row.
      question_in: the question of a part's row.
      check: called with the row of a part, that of the input, and their places; raises UserError if one is not the
        other's.

    Raises:
      UserError: a part lacks a row, has one too many, or has another than the input.
    """
    readers = [rows_of(file) for file in parts.files]
    for question, source, row in given:
        index = Shard.of(question, len(readers))
        name = parts.files[index].path
        found = next(readers[index], None)
        if found is None:
            raise UserError(f"{name} ends before the row of {source}: it is not whole")
        if question_in(found) != question:
            raise UserError(f"{name} has the question {question_in(found)!r:.80} where {source} has {question!r:.80}")
        if check is not None:
            check(found, row, name, source)
        yield found
    for file, reader in zip(parts.files, readers, strict=True):
        if next(reader, None) is not None:
            raise UserError(f"{file.path} has more rows than its share of the input")


@contextlib.contextmanager
def opened_part(config: Any, path: pathlib.Path, free: Set[str]) -> Iterator[tuple[Shard, RowFile]]:
    """A benchmark's part of --shard, which resumes where it was stopped.

    Args:
      config: the resolved options, with model, checkpoint, input and shard.
      path: of the part.
      free: flags that no score depends on.
    """
    shard = parse(config.shard)
    assert shard is not None
    fingerprint = {
        "model": model_fingerprint(config.model or config.checkpoint),
        "input": digests.of_paths([file.path for file in expand(config.input)]),
    }
    flags = without_unused_sharing(config_files.as_dict(config))
    with open_rows(path, "auto", flags, fingerprint, free) as output:
        yield shard, output


def require_same_flags(parts: Parts, config: Options, free: Set[str] = FREE_FLAGS) -> None:
    """UserError for a flag that is set to something else than the parts were written with: they decide.

    Args:
      config: the options of --merge.
      free: flags that no row depends on.
    """
    own, default = config_files.as_dict(config), config_files.as_dict(type(config)())
    for name in own.keys() & parts.config.keys() - free - _OF_ONE_RUN:
        given, written = json.loads(json.dumps([own[name], parts.config[name]]))
        if own[name] != default[name] and given != written:
            raise UserError(f"--{name} is {given!r:.80}, but the parts of --merge were written with {written!r:.80}")


def require_input(parts: Parts, paths: Sequence[str]) -> None:
    """UserError unless the parts are of these files' contents."""
    files = expand(paths)
    if digests.of_paths([file.path for file in files]) != parts.fingerprint["input"]:
        raise UserError(
            f"the parts were scored from other contents than those of {', '.join(str(file.path) for file in files)}: "
            "--input names the files"
        )


def model_fingerprint(model: str) -> str:
    """Digest that identifies a PRM; of a run, that of the loaded checkpoint.

    Raises:
      UserError: there is no such directory.
    """
    path = pathlib.Path(model)
    require_prm_directory(path)
    if not is_run(path):
        return digests.of_paths([path])
    run, step = locate(path)
    return digests.of_paths([run / MODEL, run / CHECKPOINTS / str(step)])


def check_scored(found: Mapping[str, Any], row: Mapping[str, Any], name: pathlib.Path, source: str) -> None:
    """UserError unless a scored row is the input's with scores added."""
    if _without_scores(found) != _without_scores(row):
        raise UserError(f"{name}: the row of {source} has other contents there than in the input")


def check_id(found: Mapping[str, Any], row: Mapping[str, Any], name: pathlib.Path, source: str) -> None:
    """UserError unless a row of candidates is that of the question with this id."""
    if found.get("id") != row["id"]:
        raise UserError(f"{name} has the id {found.get('id')!r:.80} where {source} has {row['id']!r:.80}")


def _without_scores(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_scores(entry) for key, entry in value.items() if key not in SCORES}
    return [_without_scores(entry) for entry in value] if isinstance(value, list) else value


def rows_of(file: InputFile) -> Iterator[dict[str, Any]]:
    """The rows of a part, which may have none.

    Raises:
      UserError: a damaged row.
    """
    with (gzip.open if file.path.suffix == ".gz" else open)(file.path, "rb") as content:
        if not content.read(1):
            return
    for row in rows(file):
        if row.data is None:
            raise UserError(f"{file.path}:{row.line}: {row.reason}")
        yield row.data


def _config(path: pathlib.Path) -> dict[str, Any]:
    beside = path.with_name(f"{path.name}.config.json")
    try:
        config = json.loads(beside.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config["fingerprint"], dict):
            raise ValueError("no flags and fingerprint")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is no part of --shard: {beside.name} is missing or damaged ({error})") from error
    return config


def _partial(known: pathlib.Path, shard: Shard) -> pathlib.Path:
    """Where a share that has not ended keeps its rows, going by the name of another's part."""
    path = shard.beside(known)
    return path.with_name(f"{path.name}.partial")


def _difference(name: str, config: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    one, other = config.get(name), first.get(name)
    if isinstance(one, dict) and isinstance(other, dict):
        return ", ".join(sorted(key for key in {*one, *other} if one.get(key) != other.get(key)))
    return f"--{name} ({one!r:.60} and {other!r:.60})"
