"""python -m cfprm_jax.prm_bench: detection of incorrect and redundant steps, by error class."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import collections
import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from cfprm_jax import flags
from cfprm_jax.config import (
    ATTENTION_HELP,
    ATTENTIONS,
    CACHE_FROZEN_HELP,
    CHECKPOINT_HELP,
    DTYPE_HELP,
    ENCODING_HELP,
    ENCODINGS,
    LARGEST_SEED,
    MOST_COUNT,
    MOST_TOKENS,
    STEP_SEPARATOR_HELP,
    DeviceConfig,
)
from cfprm_jax.data.questions import read_questions
from cfprm_jax.data.step_cases import CONTROL, PUBLISHED, Case, Cases, read_cases
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import diagnostics, prm_bench, reason_eval
from cfprm_jax.evaluation.case_scores import CaseScores, ScoreTable, read_scores, row_of
from cfprm_jax.evaluation.prm_bench_lines import LINES, POOLED, Settings
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.options import Options, option
from cfprm_jax.report import prm_bench as report
from cfprm_jax.runtime import atomic, config_files, output_paths
from cfprm_jax.runtime.progress import ProgressLine

SCORES, RESULTS, TABLE, LATEX, PAGE = "scores.jsonl", "results.json", "table.md", "table.tex", "report.html"
# "Step 3. " or "3. ", but not the beginning of "3.5".
_NUMBER = re.compile(r"\s*(?:step\s*)?\d+\.(?!\d)\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class PRMBenchConfig(Options):
    """Evaluate a PRM on PRMBench and ReasonEval: detection of incorrect and redundant steps, by error class.

    python -m cfprm_jax.prm_bench --checkpoint=RUN --input='PRMBench/data/*.jsonl' --output_dir=DIRECTORY

    Reads the files as published. Writes scores.jsonl (unless --scores is set), results.json, table.md, table.tex,
    report.html (a self-contained page) and the resolved flags into --output_dir.
    """

    MAIN_FLAGS: ClassVar = (
        *("checkpoint", "model", "input", "output_dir", "scores", "scores2"),
        *("exclude_questions", "threshold", "redundancy_threshold", "encoding"),
    )

    model: str = option("", "Hugging Face directory of a PRM. Exclusive with --checkpoint and --scores.")
    checkpoint: str = option("", CHECKPOINT_HELP)
    scores: tuple[str, ...] = option((), "scores.jsonl of an earlier run, in place of a model.", kind="list")
    scores2: tuple[str, ...] = option((), "scores.jsonl of a second model, for a paired comparison.", kind="list")
    input: tuple[str, ...] = option(
        (), "Files of PRMBench or ReasonEval, or globs: .jsonl, .json or parquet, plain or .gz.", kind="list"
    )
    exclude_questions: tuple[str, ...] = option(
        (),
        "Files with questions that may occur in the training data, such as the training corpus. PRMScore is also "
        "computed without the cases of these questions.",
        kind="list",
    )
    threshold: float = option(0.5, "Score above which a step is predicted correct.", lower=0.0, upper=1.0)
    redundancy_threshold: float = option(
        0.15,
        "Redundancy above which a step is predicted redundant, for PRMs with a redundancy output.",
        lower=0.0,
        upper=1.0,
    )
    strip_numbers: str = option(
        "auto",
        "Removal of numbers before steps (3. or Step 3.) from the input of the PRM. auto removes them from solutions "
        "in which every step has one.",
        choices=("auto", "always", "never"),
    )
    resamples: int = option(10000, "Bootstrap resamples of the confidence intervals.", lower=100, upper=10**6)
    seed: int = option(
        0, "Random seed of the bootstrap and of the split that tunes thresholds.", lower=0, upper=LARGEST_SEED
    )
    name: str = option("PRM", "Name of the model in tables.")
    name2: str = option("second PRM", "Name of the model of --scores2 in tables.")
    report_cases: int = option(
        20, "Maximum number of cases per class that report.html shows.", lower=0, upper=MOST_COUNT
    )
    encoding: str = option("auto", ENCODING_HELP, choices=ENCODINGS)
    step_separator: str = option("", STEP_SEPARATOR_HELP)
    dtype: str = option("auto", DTYPE_HELP, choices=("auto", "bfloat16", "float32"))
    attention: str = option("auto", ATTENTION_HELP, choices=ATTENTIONS)
    max_length: int = option(
        0,
        "Maximum length of a solution in tokens; longer ones are not scored. 0 is the maximum of training.",
        lower=8,
        upper=MOST_TOKENS,
        also=0,
    )
    shard: str = option(
        "",
        "INDEX/COUNT scores the share INDEX, from 0, of the questions into OUTPUT_DIR.INDEX-of-COUNT.jsonl and "
        "evaluates nothing; auto takes both from jax.distributed or the launcher (docs/running.md).",
    )
    merge: tuple[str, ...] = option((), "Parts that --shard wrote, or globs: evaluate them.", kind="list")
    output_dir: str = option("", "Directory of the results; must be new or empty.")
    cache_frozen: str = option("off", CACHE_FROZEN_HELP)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == self.name2:
            raise UserError(f"--name and --name2 are both {self.name!r}: expected different names")


def main(config: PRMBenchConfig) -> int:
    """Runs the command."""
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    if bool(config.model) + bool(config.checkpoint) + bool(config.scores) + bool(config.merge) != 1:
        raise UserError(
            "expected one of --model (a Hugging Face directory), --checkpoint (a run of train), --scores (of an "
            "earlier run) and --merge (of --shard)"
        )
    if config.shard and not (config.model or config.checkpoint):
        raise UserError("--shard needs --model or --checkpoint")
    directory = pathlib.Path(config.output_dir)
    output_paths.require_directory(f"--output_dir={directory}", directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"--output_dir={directory} exists and is not an empty directory: choose another one")
    config = dataclasses.replace(config, model=local_directory(config.model))
    found = read_cases(config.input)
    excluded = read_questions(config.exclude_questions) if config.exclude_questions else None
    second = read_scores(config.scores2, found.cases) if config.scores2 else None
    by_kind = collections.Counter(case.classification for case in found.cases)
    print(f"cases       {len(found.cases):,}: " + ", ".join(f"{name} {count:,}" for name, count in by_kind.items()))
    named = config.model or config.checkpoint or ", ".join(config.scores or config.merge)
    print(f"scores      {named}", flush=True)
    if config.shard:
        return score_share(found.cases, config)
    table = read_scores(config.scores, found.cases) if config.scores else None
    if config.merge:
        rows = merged(found.cases, config)
    elif table is None:
        rows, encoding = score(found.cases, config)
        config = dataclasses.replace(config, encoding=encoding)
    with atomic.new_directory(directory) as partial:
        if table is None:
            atomic.write_bytes(partial / SCORES, b"".join(map(atomic.encode_json, rows)))
            table = read_scores(partial / SCORES, found.cases)
        outcome = evaluate(found, table, config, second, excluded)
        shown, left_out = _shown(found.cases, table, config.report_cases)
        config_files.write_config(config, partial)
        atomic.write_json(partial / RESULTS, outcome, indent=1)
        atomic.write_text(partial / TABLE, report.document(outcome))
        atomic.write_text(partial / LATEX, report.latex(outcome))
        atomic.write_text(partial / PAGE, report.page(outcome, shown, left_out))
    print(f"\n{report.document(outcome)}\nresults     {directory / RESULTS}, {TABLE}, {LATEX}, {PAGE}")
    return 0


def without_number(steps: Sequence[str], how: str) -> list[str]:
    """The steps without the numbers before their texts, where --strip_numbers removes them."""
    matches = [_NUMBER.match(step) for step in steps]
    if how == "never" or (how == "auto" and not all(matches)):
        return list(steps)
    return [step[match.end() :] if match else step for step, match in zip(steps, matches, strict=True)]


def score(cases: Sequence[Case], config: PRMBenchConfig) -> tuple[list[dict[str, Any]], str]:
    """Scores the cases with the PRM of the flags; returns the rows of scores.jsonl and the name of the encoding."""
    # Imported here, because the evaluation of existing scores does not need JAX.
    from cfprm_jax.inference.benchmarks import open_scorer
    from cfprm_jax.inference.rows import ScoringCounts, score_rows
    from cfprm_jax.sharding import session

    def so_far() -> str:
        return f"{counts.rows:,} of {len(cases):,} cases, {counts.rows / progress.elapsed:,.1f} cases/s"

    with session.opened(config.device, _log) as (_, mesh):
        scorer, encoding = open_scorer(config, mesh, _log)
        given = (_row(config, case) for case in cases)
        out, counts, progress = [], ScoringCounts(), ProgressLine("scoring")
        for case, (row, _) in zip(cases, score_rows(given, scorer, counts), strict=True):
            out.append(_scored_row(case, row))
            progress.show(so_far, counts.rows / len(cases))
        progress.clear()
    return out, encoding


def score_share(cases: Sequence[Case], config: PRMBenchConfig) -> int:
    """Score the share of --shard into its part; one that was stopped resumes."""
    from cfprm_jax.inference import benchmarks

    given = functools.partial(_row, config)
    benchmarks.score_share(config, cases, lambda case: case.question, given, _scored_row, _log)
    return 0


def merged(cases: Sequence[Case], config: PRMBenchConfig) -> list[dict[str, Any]]:
    """The rows of scores.jsonl from all parts."""
    from cfprm_jax.inference import parts

    of_parts = parts.read_parts(config.merge)
    parts.require_input(of_parts, config.input)
    given = ((case.question, case.source, row_of(case, {})) for case in cases)
    return list(parts.merged(of_parts, given, parts.check_scored, lambda row: str(row.get("question"))))


def _row(config: PRMBenchConfig, case: Case) -> tuple[dict[str, Any], str]:
    """A case as a stepwise row, which score_rows takes."""
    return {"prompt": case.question, "completions": without_number(case.steps, config.strip_numbers)}, case.source


def _scored_row(case: Case, row: Mapping[str, Any]) -> dict[str, Any]:
    return row_of(case, {key: value for key, value in row.items() if key not in ("prompt", "completions")})


def _log(line: str) -> None:
    print(line, flush=True)


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


if __name__ == "__main__":
    sys.exit(flags.run(PRMBenchConfig, main))
