"""PRMBench and ReasonEval: detection of incorrect and redundant steps, by error class."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cfprm_jax.benchmarks.options import PRMBenchConfig
from cfprm_jax.data.formats.files import require
from cfprm_jax.data.questions import read_questions
from cfprm_jax.data.step_cases import CONTROL, PUBLISHED, Case, Cases, read_cases
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import diagnostics, prm_bench, reason_eval
from cfprm_jax.evaluation.case_scores import CaseScores, ScoreTable, read_scores, row_of
from cfprm_jax.evaluation.prm_bench_lines import LINES, POOLED, Settings
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.report import prm_bench as report
from cfprm_jax.runtime import atomic, config_files, output_paths

SCORES, RESULTS, TABLE, LATEX, PAGE = "scores.jsonl", "results.json", "table.md", "table.tex", "report.html"
# "Step 3. " or "3. ", but not the beginning of "3.5".
_NUMBER = re.compile(r"\s*(?:step\s*)?\d+\.(?!\d)\s*", re.IGNORECASE)
Log = Callable[[str], None]


def run(config: PRMBenchConfig, log: Log) -> dict[str, Any] | None:
    """Scores config.input if a PRM is named, evaluates the scores, and writes config.output_dir.

    Args:
      log: receives lines about input, devices and PRM.

    Returns:
      The content of results.json; None with --shard, which only scores.

    Raises:
      UserError: invalid options or input.
    """
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    if bool(config.model) + bool(config.checkpoint) + bool(config.scores) + bool(config.merge) != 1:
        raise UserError(
            "expected one of --model (a Hugging Face directory), --checkpoint (a run of train), --scores (of an "
            "earlier run) and --merge (of --shard)"
        )
    if config.shard and not (config.model or config.checkpoint):
        raise UserError("--shard needs --model or --checkpoint")
    config.refuse_unused("strip_numbers")
    directory = output_paths.require_new_directory("--output_dir", config.output_dir)
    require(**{flag: getattr(config, flag) for flag in ("input", "exclude_questions", "scores", "scores2", "merge")})
    config = dataclasses.replace(config, model=local_directory(config.model))
    found = read_cases(config.input)
    excluded = read_questions(config.exclude_questions) if config.exclude_questions else None
    if config.scores2 and not any(case.kind == "prm_bench" for case in found.cases):
        raise UserError("--scores2 is compared on cases of PRMBench, and --input has none")
    second = read_scores(config.scores2, found.cases) if config.scores2 else None
    by_kind = collections.Counter(case.classification for case in found.cases)
    log(f"cases       {len(found.cases):,}: " + ", ".join(f"{name} {count:,}" for name, count in by_kind.items()))
    log(f"scores      {config.model or config.checkpoint or ', '.join(config.scores or config.merge)}")
    given = functools.partial(_given, config.strip_numbers)
    if config.shard:
        from cfprm_jax.benchmarks import scoring

        scoring.score_share(
            config, found.cases, question=_question, given=given, scored=_scored_row, log=log, unit="cases"
        )
        return None
    table = read_scores(config.scores, found.cases) if config.scores else None
    evaluated = config
    if config.merge:
        rows, evaluated = merged(found.cases, config)
    elif table is None:
        # Imported here, because the evaluation of existing scores does not need JAX.
        from cfprm_jax.benchmarks import scoring

        rows, encoding = scoring.score_cases(
            config, found.cases, given=given, scored=_scored_row, log=log, unit="cases"
        )
        evaluated = config = dataclasses.replace(config, encoding=encoding)
    with atomic.new_directory(directory) as partial:
        if table is None:
            atomic.write_bytes(partial / SCORES, b"".join(map(atomic.encode_json, rows)))
            table = read_scores(partial / SCORES, found.cases)
        outcome = evaluate(found, table, evaluated, second, excluded)
        shown, left_out = _shown(found.cases, table, config.report_cases)
        config_files.write_config(config, partial)
        atomic.write_json(partial / RESULTS, outcome, indent=1)
        atomic.write_text(partial / TABLE, report.document(outcome))
        atomic.write_text(partial / LATEX, report.latex(outcome))
        atomic.write_text(partial / PAGE, report.page(outcome, shown, left_out))
    return outcome


def files(output_dir: str) -> list[pathlib.Path]:
    """The files of results in a directory that :func:`run` wrote."""
    return [pathlib.Path(output_dir) / name for name in (RESULTS, TABLE, LATEX, PAGE)]


def without_number(steps: Sequence[str], how: str) -> list[str]:
    """The steps without the numbers before their texts, where --strip_numbers removes them."""
    matches = [_NUMBER.match(step) for step in steps]
    if how == "never" or (how == "auto" and not all(matches)):
        return list(steps)
    return [step[match.end() :] if match else step for step, match in zip(steps, matches, strict=True)]


def merged(cases: Sequence[Case], config: PRMBenchConfig) -> tuple[list[dict[str, Any]], PRMBenchConfig]:
    """The rows of scores.jsonl from all parts, and the options with those of the scoring."""
    from cfprm_jax.benchmarks import scoring
    from cfprm_jax.inference import parts

    of_parts, config = scoring.merged_parts(config)
    given = ((case.question, case.source, row_of(case, {})) for case in cases)
    rows = list(parts.merged(of_parts, given, parts.check_scored, lambda row: str(row.get("question"))))
    return rows, config


def _question(case: Case) -> str:
    return case.question


def _given(strip_numbers: str, case: Case) -> tuple[dict[str, Any], str]:
    """A case as a stepwise row, which score_rows takes."""
    return {"prompt": case.question, "completions": without_number(case.steps, strip_numbers)}, case.source


def _scored_row(case: Case, row: Mapping[str, Any]) -> dict[str, Any]:
    return row_of(case, {key: value for key, value in row.items() if key not in ("prompt", "completions")})


def evaluate(
    found: Cases,
    table: ScoreTable,
    config: PRMBenchConfig,
    second: ScoreTable | None = None,
    excluded: frozenset[str] | None = None,
) -> dict[str, Any]:
    """The content of results.json.

    Args:
      second: scores of a second model, for the comparison.
      excluded: normal forms of questions that may occur in the training data; None without --exclude_questions.
    """
    settings = Settings(
        config.threshold, config.redundancy_threshold, excluded or frozenset(), config.resamples, config.seed
    )
    published = [case for case in found.cases if case.kind == "prm_bench"]
    counted = [case for case in found.cases if case.classification != CONTROL]
    missing = [case for case in counted if case.key not in table.scores]
    missing2 = [] if second is None else [case for case in published if case.key not in second.scores]
    beyond = [case for case in counted if case.beyond]
    comparison = [] if second is None else prm_bench.compare(published, table.scores, second.scores, settings)
    return {
        "config": config_files.as_dict(config),
        "systems": [config.name] + ([config.name2] if second is not None else []),
        "counts": {
            "cases": len(counted),
            "controls": len(found.cases) - len(counted),
            "missing": len(missing),
            "first_missing": f"{missing[0].classification} {missing[0].idx}" if missing else None,
            "missing2": None if second is None else len(missing2),
            "unscored": table.unscored,
            "doubled": len(found.doubled),
            "first_doubled": list(found.doubled[0]) if found.doubled else None,
            "doubled_scores": len(table.doubled),
            "beyond": len(beyond),
            "first_beyond": f"{beyond[0].source} ({beyond[0].beyond[0]} of {len(beyond[0].steps)})" if beyond else None,
        },
        "prm_bench": _prm_bench(published, table.scores, settings) if published else None,
        "reason_eval": [dataclasses.asdict(line) for line in reason_eval.measure(found.cases, table.scores, settings)],
        "comparison": [dataclasses.asdict(entry) for entry in comparison],
        "excluded": None if excluded is None else _excluded(counted, excluded),
        "diagnostics": dataclasses.asdict(_diagnostics(counted, table.scores, config.threshold)),
    }


def _prm_bench(
    cases: Sequence[Case], scores: Mapping[tuple[str, str], CaseScores], settings: Settings
) -> dict[str, Any]:
    lines = prm_bench.measure(cases, scores, settings)
    pooled = lines[LINES.index(POOLED)]
    complete = all(line.scored == PUBLISHED.get(line.name, line.scored) for line in lines)
    return {
        "cases": pooled.cases,
        "scored": pooled.scored,
        "published": sum(PUBLISHED.values()),
        "complete": complete,
        "overall": pooled.prm_score if complete and pooled.defined else None,
        "lines": [dataclasses.asdict(line) for line in lines],
    }


def _excluded(cases: Sequence[Case], excluded: frozenset[str]) -> dict[str, Any]:
    files: dict[str, dict[str, int]] = {}
    for case in cases:
        entry = files.setdefault(case.file, {"cases": 0, "excluded": 0})
        entry["cases"] += 1
        entry["excluded"] += bool(case.forms & excluded)
    return {"questions": len(excluded), "files": files}


def _diagnostics(
    cases: Sequence[Case], scores: Mapping[tuple[str, str], CaseScores], threshold: float
) -> diagnostics.Diagnostics:
    collector = diagnostics.Collector()
    for case in cases:
        if case.key in scores:
            validity = scores[case.key].validity
            collector.add(validity, case.steps)
            if case.right_answer and case.kind == "invalid" and case.error_steps:
                collector.add_wrong_process(bool(np.min(validity) < threshold))
    return collector.result()


def _shown(cases: Sequence[Case], table: ScoreTable, most: int) -> tuple[list[tuple[Case, CaseScores]], int]:
    """The first cases of each class, and the number of the others."""
    shown: dict[str, list[tuple[Case, CaseScores]]] = {}
    left_out = 0
    for case in cases:
        if case.key in table.scores and case.classification != CONTROL:
            of_class = shown.setdefault(case.classification, [])
            if len(of_class) < most:
                of_class.append((case, table.scores[case.key]))
            else:
                left_out += 1
    return [pair for of_class in shown.values() for pair in of_class], left_out
