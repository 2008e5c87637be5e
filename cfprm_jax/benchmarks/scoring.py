"""Scoring of a benchmark's cases, all of them or the share of --shard, with the PRM of its options."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from cfprm_jax.benchmarks.options import BenchmarkConfig, PRMBenchConfig, ProcessBenchConfig
from cfprm_jax.errors import UserError
from cfprm_jax.inference import parts, trunk
from cfprm_jax.inference.load import encoding_of, limited, open_configured
from cfprm_jax.inference.row_file import FREE_FLAGS, RESOLVED
from cfprm_jax.inference.rows import ScoringCounts, SourcedRow, score_rows
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.runtime import config_files, shards
from cfprm_jax.runtime.progress import ProgressLine
from cfprm_jax.sharding import session

_T = TypeVar("_T")
_Config = TypeVar("_Config", ProcessBenchConfig, PRMBenchConfig)
Log = Callable[[str], None]


def open_scorer(config: BenchmarkConfig, mesh: Mesh, log: Log) -> tuple[Scorer, str]:
    """The scorer of the PRM that the flags name, and the name of its encoding.

    Args:
      config: the options of the PRM.
      log: receives lines about the encoding and the checkpoint.
    """
    model = config.model or config.checkpoint
    encoding = encoding_of(model, config.encoding, config.step_separator)
    log(f"encoding    {encoding.name} ({encoding.reason})")
    loaded = open_configured(model, config, mesh, log=lambda line: log(f"checkpoint  {line}"))
    if "step" in loaded.meta:
        log(f"step        {loaded.meta['step']:,}")
    cached = trunk.for_scoring(config.cache_frozen, loaded, model, mesh)
    return Scorer(limited(loaded, config.max_length), mesh=mesh, trunk=cached), encoding.name


def score_cases(
    config: BenchmarkConfig,
    cases: Sequence[_T],
    *,
    given: Callable[[_T], SourcedRow],
    scored: Callable[[_T, Mapping[str, Any]], dict[str, Any]],
    log: Log,
    unit: str,
) -> tuple[list[dict[str, Any]], str]:
    """The rows of all cases with scores, in the order of the cases, and the name of the encoding.

    Args:
      config: the options of the PRM.
      cases: adjacent cases of one question share its tokens.
      given: a case as a stepwise row, and its source.
      scored: the row of a case and of its stepwise row with scores.
      log: receives the lines about devices and PRM.
      unit: plural of a case, for the progress line.
    """
    with session.opened(config.device, log) as (_, mesh):
        scorer, encoding = open_scorer(config, mesh, log)
        out, counts, progress = [], ScoringCounts(), ProgressLine("scoring")
        for case, (row, _) in zip(cases, score_rows(map(given, cases), scorer, counts), strict=True):
            out.append(scored(case, row))
            _show(progress, counts, len(cases), unit)
        progress.clear()
    return out, encoding


def score_share(
    config: BenchmarkConfig,
    cases: Sequence[_T],
    *,
    question: Callable[[_T], str],
    given: Callable[[_T], SourcedRow],
    scored: Callable[[_T, Mapping[str, Any]], Mapping[str, Any]],
    log: Log,
    unit: str,
) -> None:
    """Score the share of --shard into its part, beside --output_dir; one that was stopped resumes.

    Args:
      config: the options of the PRM, and --shard and --output_dir.
      cases: all cases of the input.
      question: of a case, which decides the share that it belongs to.
      given: a case as a stepwise row, and its source.
      scored: the row of the part, of a case and of its stepwise row with scores.
      log: receives the lines about devices, PRM and part.
      unit: plural of a case, for the progress line.
    """
    config = dataclasses.replace(config, shard=shards.resolve(config.shard, os.environ))
    path = _part_path(config)
    with (
        session.opened(config.device, log) as (_, mesh),
        parts.opened_part(config, path, FREE_FLAGS | config.EVALUATION) as (shard, output),
    ):
        if not output.complete:
            scorer, encoding = open_scorer(config, mesh, log)
            output.require("encoding", encoding)
            own = [case for case in cases if shard.owns(question(case))][output.done :]
            counts, progress = ScoringCounts(), ProgressLine("scoring")
            rows = score_rows(map(given, cases), scorer, counts, output.done, shard)
            for case, (row, _) in zip(own, rows, strict=True):
                output.write(scored(case, row))
                _show(progress, counts, len(own), unit)
            progress.clear()
    log(f"part        {path}")


def merged_parts(config: _Config) -> tuple[parts.Parts, _Config]:
    """The parts of --merge, and the options with those of their scores, by which results name the PRM.

    Raises:
      UserError: parts that do not belong together, or of another input.
    """
    free = FREE_FLAGS | config.EVALUATION
    found = parts.read_parts(config.merge, free)
    parts.require_same_flags(found, config, free)
    parts.require_input(found, config.input)
    own = config_files.as_dict(config)
    scoring = own.keys() - config.EVALUATION - {"input", "shard"}
    given = {name: value for name, value in found.config.items() if name in scoring}
    resolved = found.config.get(RESOLVED, {})
    if "encoding" in resolved:
        given["encoding"] = resolved["encoding"]
    return found, config_files.from_dict(type(config), {**own, **given})


def _part_path(config: BenchmarkConfig) -> pathlib.Path:
    """Where the part of --shard goes: beside --output_dir, which may be written with a slash at its end.

    Raises:
      UserError: --output_dir has no name of its own, as "." and "..".
    """
    shard, directory = shards.parse(config.shard), pathlib.Path(config.output_dir)
    assert shard is not None
    if directory.name in ("", ".."):
        raise UserError(
            f"--output_dir={config.output_dir} has no name, expected that of a directory, which parts of --shard are "
            "called by"
        )
    return shard.path(directory.with_name(f"{directory.name}.jsonl"))


def _show(progress: ProgressLine, counts: ScoringCounts, cases: int, unit: str) -> None:
    """A line of how many cases were scored, where no scored ones wait."""
    if not counts.ready:
        rate = counts.rows / progress.elapsed
        progress.show(lambda: f"{counts.rows:,} of {cases:,} {unit}, {rate:,.1f} {unit}/s", counts.rows / cases)
