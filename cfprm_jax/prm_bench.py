"""python -m cfprm_jax.prm_bench: how well a PRM tells wrong and redundant steps from right ones, by kind of error."""

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cfprm_jax import flags
from cfprm_jax.config import ATTENTIONS, ENCODINGS, LARGEST_SEED, MOST_COUNT, MOST_TOKENS, DeviceConfig, Options, option
from cfprm_jax.data.questions import read_questions
from cfprm_jax.data.step_cases import CONTROL, PUBLISHED, Case, Cases, read_cases
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import diagnostics, prm_bench, reason_eval
from cfprm_jax.evaluation.case_scores import CaseScores, ScoreTable, read_scores, row_of
from cfprm_jax.evaluation.prm_bench_lines import LINES, POOLED, Settings
from cfprm_jax.report import prm_bench as report
from cfprm_jax.runtime import atomic, config_files, output_paths
from cfprm_jax.runtime.progress import ProgressLine

SCORES, RESULTS, TABLE, LATEX, PAGE = "scores.jsonl", "results.json", "table.md", "table.tex", "report.html"
# "Step 3. " or "3. ", but not the beginning of "3.5".
_NUMBER = re.compile(r"\s*(?:step\s*)?\d+\.(?!\d)\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class PRMBenchConfig(Options):
    """How well a PRM tells wrong steps from right ones, by kind of error: PRMBench and ReasonEval.

    python -m cfprm_jax.prm_bench --checkpoint=RUN --input='PRMBench/data/*.jsonl' --output_dir=DIRECTORY

    Reads the files as published. Writes scores.jsonl (unless --scores names one), results.json, table.md, table.tex,
    report.html (open it in a browser: it needs nothing else) and the resolved flags into --output_dir.
    """

    model: str = option("", "Hugging Face directory of a PRM. One of this, --checkpoint and --scores.")
    checkpoint: str = option("", "Run directory of train (its newest checkpoint), or one of its checkpoints/STEP.")
    scores: tuple[str, ...] = option((), "scores.jsonl of an earlier run, instead of a model.", kind="list")
    scores2: tuple[str, ...] = option(
        (), "scores.jsonl of a second model, which the first one is compared with.", kind="list"
    )
    input: tuple[str, ...] = option(
        (), "Files of PRMBench or ReasonEval, or globs: .jsonl, .json or parquet, plain or .gz.", kind="list"
    )
    exclude_questions: tuple[str, ...] = option(
        (),
        "Files with questions that may have been seen in training, such as the training corpus: PRMScore is also given "
        "over the cases with other questions.",
        kind="list",
    )
    threshold: float = option(0.5, "A step is right where its score is above it.", lower=0.0, upper=1.0)
    redundancy_threshold: float = option(
        0.15, "A step is redundant where its redundancy, if the PRM gives one, is above it.", lower=0.0, upper=1.0
    )
    strip_numbers: str = option(
        "auto",
        "Numbers before steps (3. or Step 3.) that the PRM does not see: auto removes them where all steps of a "
        "solution have one, always wherever there is one.",
        choices=("auto", "always", "never"),
    )
    resamples: int = option(10000, "Resamples of the bootstrap behind the intervals.", lower=100, upper=10**6)
    seed: int = option(
        0, "Seed of the bootstrap and of the halves for the best threshold.", lower=0, upper=LARGEST_SEED
    )
    name: str = option("PRM", "What tables call the model.")
    name2: str = option("second PRM", "What tables call the model of --scores2.")
    report_cases: int = option(20, "Most cases of each class whose steps report.html shows.", lower=0, upper=MOST_COUNT)
    encoding: str = option(
        "auto",
        "How the PRM reads solutions (docs/encodings.md); auto goes by the files of its directory, and refuses "
        "one that they do not tell.",
        choices=ENCODINGS,
    )
    step_separator: str = option(
        "",
        "Text that follows each step in training with TRL, with escapes. Empty is the encoding's own.",
    )
    dtype: str = option(
        "auto",
        "Type of activations and matrix products; auto is what a run was trained in, or a directory's weights are.",
        choices=("auto", "bfloat16", "float32"),
    )
    attention: str = option("auto", "Attention kernel.", choices=ATTENTIONS)
    max_length: int = option(
        0,
        "Longest solution in tokens; a longer one is not scored. 0 is the model's own.",
        lower=8,
        upper=MOST_TOKENS,
        also=0,
    )
    output_dir: str = option("", "Directory of the results; one that exists and is not empty is refused.")
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == self.name2:
            raise UserError(f"--name and --name2 are both {self.name!r}: two models need two names")


def main(config: PRMBenchConfig) -> int:
    """The command."""
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    if bool(config.model) + bool(config.checkpoint) + bool(config.scores) != 1:
        raise UserError(
            "name one of --model (a Hugging Face directory), --checkpoint (a run of train) and --scores (of an earlier "
            "run)"
        )
    directory = pathlib.Path(config.output_dir)
    output_paths.require_directory(f"--output_dir={directory}", directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"--output_dir={directory} exists and is not an empty directory: name another one")
    found = read_cases(config.input)
    excluded = read_questions(config.exclude_questions) if config.exclude_questions else None
    second = read_scores(config.scores2, found.cases) if config.scores2 else None
    by_kind = collections.Counter(case.classification for case in found.cases)
    print(f"cases       {len(found.cases):,}: " + ", ".join(f"{name} {count:,}" for name, count in by_kind.items()))
    print(f"scores      {config.model or config.checkpoint or ', '.join(config.scores)}", flush=True)
    table = read_scores(config.scores, found.cases) if config.scores else None
    if table is None:
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
    """The steps as the PRM reads them: with no number before the text, as --strip_numbers has it."""
    matches = [_NUMBER.match(step) for step in steps]
    if how == "never" or (how == "auto" and not all(matches)):
        return list(steps)
    return [step[match.end() :] if match else step for step, match in zip(steps, matches, strict=True)]


def score(cases: Sequence[Case], config: PRMBenchConfig) -> tuple[list[dict[str, Any]], str]:
    """The rows of scores.jsonl by the PRM that the flags name, and the name of its encoding."""
    # JAX is for this only: scores of an earlier run are evaluated without it.
    from cfprm_jax.inference.load import encoding_of, limited, open_prm
    from cfprm_jax.inference.rows import Counts, SourcedRow, score_rows
    from cfprm_jax.inference.scorer import Scorer
    from cfprm_jax.sharding import session

    def rows() -> Iterator[SourcedRow]:
        for case in cases:
            yield (
                {"prompt": case.question, "completions": without_number(case.steps, config.strip_numbers)},
                case.source,
            )

    def so_far() -> str:
        return f"{counts.rows:,} of {len(cases):,} cases, {counts.rows / progress.elapsed:,.1f} cases/s"

    say = functools.partial(print, flush=True)
    model = config.model or config.checkpoint
    with session.opened(config.device, say) as (_, mesh):
        encoding = encoding_of(model, config.encoding, config.step_separator)
        say(f"encoding    {encoding.name} ({encoding.reason})")
        loaded = open_prm(
            model,
            config.dtype,
            config.attention,
            mesh,
            encoding.name,
            config.step_separator,
            say=lambda line: say(f"checkpoint  {line}"),
        )
        scorer = Scorer(limited(loaded, config.max_length), mesh=mesh)
        out, counts, progress = [], Counts(), ProgressLine("scoring")
        for case, (row, _) in zip(cases, score_rows(rows(), scorer, counts), strict=True):
            out.append(row_of(case, {key: value for key, value in row.items() if key not in ("prompt", "completions")}))
            progress.show(so_far, counts.rows / len(cases))
        progress.clear()
    return out, encoding.name


def evaluate(
    found: Cases,
    table: ScoreTable,
    config: PRMBenchConfig,
    second: ScoreTable | None = None,
    excluded: frozenset[str] | None = None,
) -> dict[str, Any]:
    """The object of results.json.

    Args:
      second: scores of a model to compare with.
      excluded: normal forms of questions that may have been seen in training; None where none were named.
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
    """The first cases of each class, and how many others there are."""
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
