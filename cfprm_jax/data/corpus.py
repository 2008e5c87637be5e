"""The cache of tokenised corpora: opened by fingerprint, built where it is missing.

The fingerprint is a hash of everything that the corpus depends on: the content and names of the input files, how they
are read, the granularities and their windows, the encoding, the tokenizer and this package's format. It names the
directory under cache_dir, so runs with the same data share a corpus, whatever path they read it from. File names are
part of it because sources refer to them ("file:line"). The tokens do not depend on file names, so the identity, by
which a run is resumed, has none.

A corpus in the cache is verified by its checksums. If it is damaged or incomplete, it is rebuilt.

Hashing a large input at every start would take longer than starting does, so the hash of a file's content is kept
(cache_dir/contents.json) for as long as the file's path, size, inode and modification time stay what they were. A file
modified less than two seconds before it was hashed could change again without any of these changing: its hash is not
kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import secrets
import shutil
import time
from collections.abc import Callable
from typing import Any

import transformers

from cfprm_jax.config import EncodingConfig, Granularity, GranularityConfig, ReadConfig, finest_first, parse_granularity
from cfprm_jax.data import corpus_build
from cfprm_jax.data.corpus_files import (
    FORMAT,
    LAYOUT,
    DamagedCorpusError,
    GranularityReader,
    read_description,
    verify,
    write_description,
)
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.data.formats import expand
from cfprm_jax.data.formats.files import InputFile, Paths
from cfprm_jax.data.questions import NORMAL_FORM
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import atomic, digests, locks

CONTENT = "content of training file {}"
"""Key of the identity of a corpus for the digest of a file, numbered from 1 in the order given."""
QUESTIONS = ("all", "train", "held_out")
# A file younger than this when it was hashed may be written again within the same tick of its modification time.
_SETTLED_NS = 2_000_000_000


class Corpus:
    """Encoded trajectories at each granularity, in the order of the input, records together.

    Attributes:
      fingerprint: hash of all that the corpus depends on.
      identity: what the tokens and labels depend on, option by option; content of files, not their names.
      report: counts from when it was built (see :func:`open_corpus`).
    """

    def __init__(self, directory: pathlib.Path) -> None:
        """Raises DamagedCorpusError for a directory that is not what was written."""
        description = read_description(directory)
        verify(directory, description)
        self.fingerprint: str = description["fingerprint"]
        self.identity: dict[str, Any] = description["identity"]
        self.report: dict[str, Any] = description["report"]
        self._readers: dict[Granularity, GranularityReader] = {}
        for name, counts in description["granularities"].items():
            granularity = parse_granularity(name)
            self._readers[granularity] = GranularityReader(directory / name, granularity, counts)

    @property
    def granularities(self) -> tuple[Granularity, ...]:
        """The granularities of the corpus: sizes, finest first, then "given", then "whole"."""
        return tuple(sorted(self._readers, key=finest_first))

    def __getitem__(self, granularity: Granularity) -> GranularityReader:
        """The trajectories at one granularity, a sequence of Encoded."""
        if granularity not in self._readers:
            have = ", ".join(map(str, self.granularities))
            raise UserError(f"granularity {granularity} is not in the corpus, which has {have}")
        return self._readers[granularity]

    def num_trajectories(self, granularity: Granularity) -> int:
        """Trajectories with a label at one granularity."""
        return len(self[granularity])

    def source(self, granularity: Granularity, trajectory: int) -> str:
        """The record, "file:line", that a trajectory comes from."""
        return self[granularity].source(trajectory)

    @property
    def max_steps(self) -> int:
        """Most steps of any trajectory at any granularity."""
        return max(reader.max_steps for reader in self._readers.values())

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest trajectory at any granularity."""
        return max(reader.max_tokens for reader in self._readers.values())


def open_corpus(
    paths: Paths,
    read: ReadConfig,
    granularities: GranularityConfig,
    encoding: EncodingConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    cache_dir: str | pathlib.Path,
    questions: str = "all",
    held_out_fraction: float = 0.0,
    progress: Callable[[float], None] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """The tokenised corpus, from cache_dir if it is there and whole, and built into it otherwise.

    It is built in a directory of its own that is renamed when complete: what is found is always whole, and processes
    that build the same corpus at once do not disturb each other.

    The report of a corpus: "files" (format of each), "rows", "bad_rows", "left_out" (by rules of a format),
    "trajectories" read, "questions", "trajectories_of_other_questions", and under "granularities" for each:
    "trajectories" and "records" kept, "steps", "labels" by class, "labelled_steps" and "negative_steps" (label at most
    0.5), "distinct_labelled_steps" and "distinct_negative_steps" (same question, same steps before, same text; the mean
    of the labels at most 0.5), "redundant_steps" and "useful_steps" (with a redundancy, above 0.5 or not),
    "conflicting_steps" (distinct ones with different labels), "truncated"
    trajectories and "windows_cut" from them, "skipped" (reason to count), "tokens_expanded", "tokens_distinct" (as
    prefixes, within a record), "redundant_prefix_share", "lengths" (percentile to tokens).

    Args:
      paths: files and glob patterns, as for :func:`cfprm_jax.data.read`.
      questions: "all", or the "train" or "held_out" side of a split by question.
      held_out_fraction: share of the questions that is held out, for the latter two.
      progress: called with the share of the input that has been read, while the corpus is built.
      log: called with a line about a corpus in the cache that is damaged and therefore rebuilt.

    Raises:
      UserError: anything wrong with the input, or a granularity at which nothing is left to train on (for the held-out
        side, a corpus may be empty).
    """
    if questions not in QUESTIONS:
        raise UserError(f"questions {questions!r} is not among: {', '.join(QUESTIONS)}")
    cache = pathlib.Path(cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    inputs = expand(paths)
    identity = _identity(inputs, read, granularities, encoding=encoding, tokenizer=tokenizer, cache=cache)
    identity |= {"questions": questions, "held_out_fraction": held_out_fraction if questions != "all" else 0.0}
    if questions != "all":
        identity["held_out_by"] = NORMAL_FORM
    fingerprint = digests.of_json({"layout": LAYOUT, "files": [file.name for file in inputs], **identity})
    directory = cache / fingerprint[:32]
    if directory.is_dir():
        try:
            return Corpus(directory)
        except DamagedCorpusError as error:
            log(f"the tokenised corpus in the cache is damaged and is rebuilt: {error}")
        _remove(directory)
    if not directory.is_dir():
        scratch = cache / f".building-{fingerprint[:16]}-{secrets.token_hex(4)}"
        scratch.mkdir()
        try:
            built = corpus_build.build(
                scratch,
                paths,
                read,
                granularities=granularities,
                encoding=encoding,
                encoder=Encoder(tokenizer, encoding),
                side=questions,
                held_out_fraction=held_out_fraction,
                progress=progress,
            )
            if questions != "held_out":
                _check_not_empty(built["report"])
            write_description(scratch, {"fingerprint": fingerprint, "identity": identity, **built})
            # Another process may have been faster; both directories hold the same.
            with contextlib.suppress(OSError):
                atomic.rename(scratch, directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return Corpus(directory)


def _remove(directory: pathlib.Path) -> None:
    """Remove a damaged corpus, unless another process has made it again meanwhile."""
    with locks.held(directory.with_name(f".{directory.name}.lock"), wait=True, remove=True):
        with contextlib.suppress(DamagedCorpusError):
            Corpus(directory)
            return
        # Renamed first, so that a process that dies here leaves nothing that looks like a corpus.
        gone = directory.with_name(f".damaged-{directory.name[:16]}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            atomic.rename(directory, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _check_not_empty(report: dict[str, Any]) -> None:
    for granularity, entry in report["granularities"].items():
        if not entry["trajectories"]:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in entry["skipped"].items()) or "none was read"
            other = report["trajectories_of_other_questions"]
            held_out = f"; {other} are of questions that --eval_fraction holds out" if other else ""
            names = ", ".join(report["files"])
            raise UserError(f"{names}: no trajectory to train on at granularity {granularity} ({reasons}{held_out})")


def _identity(
    files: list[InputFile],
    read: ReadConfig,
    granularities: GranularityConfig,
    *,
    encoding: EncodingConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    cache: pathlib.Path,
) -> dict[str, Any]:
    """All that the tokens depend on, each part under the name of its option."""
    reading = dataclasses.asdict(read)
    vocabulary = tokenizer.backend_tokenizer.to_str() + json.dumps(tokenizer.chat_template, sort_keys=True)
    return {
        "corpus_format": FORMAT,
        **{CONTENT.format(number): digest for number, digest in enumerate(_digests(files, cache), 1)},
        **reading.pop("estimates"),
        **reading,
        "granularities_tokenised": sorted(map(str, granularities.stages)),
        "window_tail": granularities.window_tail,
        "window_stride": granularities.window_stride,
        **dataclasses.asdict(encoding),
        "step_separator": encoding.separator,
        "tokenizer": digests.of_text(vocabulary),
    }


def _digests(files: list[InputFile], cache: pathlib.Path) -> list[str]:
    """SHA-256 of each file's content, from contents.json where the file has not changed since."""
    store = cache / "contents.json"
    try:
        known = digests.unsealed(json.loads(store.read_text(encoding="utf-8")))
    # Missing, or damaged: it only saves time.
    except (OSError, ValueError):
        known = {}
    found, changed = [], False
    for file in files:
        path, status, now = str(file.path.resolve()), file.path.stat(), time.time_ns()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
        entry = known.get(path)
        if entry is None or entry[:3] != stamp:
            entry = [*stamp, digests.of_file(file.path)]
            if now - status.st_mtime_ns > _SETTLED_NS:
                known[path], changed = entry, True
        found.append(entry[3])
    if changed:
        atomic.write_json(store, digests.sealed(known), indent=1)
    return found
