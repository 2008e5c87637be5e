"""python -m cfprm_jax.process_bench: accuracy and F1 of a PRM on ProcessBench."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

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
    MOST_TOKENS,
    STEP_SEPARATOR_HELP,
    DeviceConfig,
)
from cfprm_jax.data.formats.files import expand, rows
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import diagnostics
from cfprm_jax.evaluation.first_error import NO_ERROR, Accuracies, LabelledSolution, accuracies, predict, tune
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.options import Options, option
from cfprm_jax.report import diagnostics as diagnostics_report
from cfprm_jax.report.tables import markdown
from cfprm_jax.runtime import atomic, config_files, output_paths
from cfprm_jax.runtime.progress import ProgressLine

if TYPE_CHECKING:
    from jax.sharding import Mesh


# Solutions scored per call: enough to fill batches, few enough for frequent progress.
_CHUNK = 128
_NUMBERED = re.compile(r"(?P<subset>.+)-\d+")
RESULTS, TABLE, PREDICTIONS = "results.json", "table.md", "predictions.jsonl"


@dataclasses.dataclass(frozen=True)
class ProcessBenchConfig(Options):
    """Evaluate a PRM on ProcessBench: accuracy of locating the first incorrect step, and F1.

    python -m cfprm_jax.process_bench --checkpoint=RUN --input=gsm8k.json,math.json --output_dir=DIRECTORY

    Reads the files as published: {"id", "problem", "steps", "label"}, where the label is the index of the first
    incorrect step, or -1. Rows with "step_scores", such as the predictions of an earlier run, need no model. Writes
    results.json, table.md, predictions.jsonl and the resolved flags into --output_dir.
    """

    MAIN_FLAGS: ClassVar = (
        *("checkpoint", "model", "input", "output_dir", "threshold", "tune_on"),
        *("encoding", "step_separator", "max_length", "platform"),
    )

    model: str = option("", "Hugging Face directory of a PRM. Exclusive with --checkpoint; scored rows need neither.")
    checkpoint: str = option("", CHECKPOINT_HELP)
    input: tuple[str, ...] = option((), "ProcessBench files or globs: .json or .jsonl, plain or .gz.", kind="list")
    threshold: float = option(
        0.5, "Score threshold: steps with lower scores are predicted as errors.", lower=0.0, upper=1.0
    )
    tune_on: str = option(
        "", "Subset on which the threshold is tuned, by its F1; overrides --threshold. Example: gsm8k.", kind="string"
    )
    encoding: str = option("auto", ENCODING_HELP, choices=ENCODINGS)
    step_separator: str = option("", STEP_SEPARATOR_HELP)
    dtype: str = option("auto", DTYPE_HELP, choices=("auto", "bfloat16", "float32"))
    attention: str = option("auto", ATTENTION_HELP, choices=ATTENTIONS)
    max_length: int = option(
        0,
        "Maximum length of a solution in tokens; longer ones are not scored and count as misses. 0 is the maximum of "
        "training.",
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


def main(config: ProcessBenchConfig) -> int:
    """Runs the command."""
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    if config.model and config.checkpoint:
        raise UserError("expected either --model (a Hugging Face directory) or --checkpoint (a run of train)")
    if config.merge and (config.model or config.checkpoint or config.shard):
        raise UserError("--merge scores nothing: leave out --model, --checkpoint and --shard")
    if config.shard and not (config.model or config.checkpoint):
        raise UserError("--shard needs --model or --checkpoint")
    directory = pathlib.Path(config.output_dir)
    output_paths.require_directory(f"--output_dir={directory}", directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"--output_dir={directory} exists and is not an empty directory: choose another one")
    config = dataclasses.replace(config, model=local_directory(config.model))
    found = list(read(config.input))
    subsets = list(dict.fromkeys(row["subset"] for row in found))
    if config.tune_on and config.tune_on not in subsets:
        raise UserError(f"--tune_on={config.tune_on} is not among the subsets: {', '.join(subsets)}")
    named = config.model or config.checkpoint
    print(
        f"solutions   {len(found):,} in {', '.join(subsets)}\nmodel       {named or 'none: scores of the rows'}",
        flush=True,
    )
    if config.shard:
        return score_share(found, config)
    if config.merge:
        found = merged(found, config)
    elif named:
        config = dataclasses.replace(config, encoding=score(found, config))
    else:
        refuse_unscored(found)
    outcome = evaluate(found, config)
    text = table(outcome)
    write(directory, config, found, outcome, text)
    print(f"\n{text}\nresults     {directory / RESULTS}, {TABLE}, {PREDICTIONS}")
    return 0


def write(
    directory: pathlib.Path,
    config: ProcessBenchConfig,
    found: Iterable[dict[str, Any]],
    outcome: dict[str, Any],
    text: str,
) -> None:
    """Writes the directory of results atomically."""
    with atomic.new_directory(directory) as partial:
        config_files.write_config(config, partial)
        atomic.write_json(partial / RESULTS, outcome, indent=1)
        atomic.write_text(partial / TABLE, text)
        with atomic.writing(partial / PREDICTIONS) as file:
            for row in found:
                shown = {key: value for key, value in row.items() if key != "source"}
                scores = row["step_scores"]
                prediction = predict(None if scores is None else np.array(scores), outcome["threshold"])
                file.write(atomic.encode_json({**shown, "prediction": prediction}))


def read(inputs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of ProcessBench files, each with its "subset" and its "source" ("file:line").

    A row's subset is its own "subset", or its id without the number ("gsm8k-12"), or its file's name.

    Raises:
      UserError: a row does not match the format; the message contains file, line and field.
    """
    for file in expand(inputs):
        for row in rows(file):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{source}: {row.reason}")
            data = row.data
            steps, label = data.get("steps"), data.get("label")
            if not isinstance(data.get("problem"), str):
                raise UserError(f'{source}: "problem" is missing or not a string')
            if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
                raise UserError(f'{source}: "steps" is missing, empty, or not a list of strings')
            if type(label) is not int or not -1 <= label < len(steps):
                raise UserError(
                    f'{source}: "label" is {label!r}, expected the index of one of {len(steps)} steps, or -1'
                )
            numbered = _NUMBERED.fullmatch(str(data.get("id", "")))
            subset = data.get("subset") or (numbered["subset"] if numbered else file.path.name.partition(".")[0])
            yield {**data, "subset": str(subset), "source": source}


def refuse_unscored(found: Iterable[dict[str, Any]]) -> None:
    """UserError unless every row has one score in [0, 1] per step, or null if it could not be scored."""
    for row in found:
        if "step_scores" not in row:
            raise UserError(f'{row["source"]}: no "step_scores": set --model or --checkpoint to score the rows')
        scores = row["step_scores"]
        if scores is None:
            continue
        if not isinstance(scores, list) or len(scores) != len(row["steps"]):
            raise UserError(
                f'{row["source"]}: "step_scores" is not a list of {len(row["steps"])} numbers, one per step'
            )
        if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores):
            raise UserError(f'{row["source"]}: "step_scores" contains a value that is not a number in [0, 1]')


def score_share(found: list[dict[str, Any]], config: ProcessBenchConfig) -> int:
    """Score the share of --shard into its part; one that was stopped resumes."""
    from cfprm_jax.inference import benchmarks

    def scored(row: dict[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
        shown = {key: value for key, value in row.items() if key != "source"}
        return {**shown, **{key: of[key] for key in ("step_scores", "step_logits")}}

    benchmarks.score_share(
        config,
        found,
        lambda row: row["problem"],
        lambda row: ({"prompt": row["problem"], "completions": row["steps"]}, row["source"]),
        scored,
        _log,
    )
    return 0


def merged(found: Sequence[dict[str, Any]], config: ProcessBenchConfig) -> list[dict[str, Any]]:
    """The rows with the scores of all parts."""
    from cfprm_jax.inference import parts

    of_parts = parts.read_parts(config.merge)
    parts.require_input(of_parts, config.input)
    given = [(row["problem"], row["source"], {k: v for k, v in row.items() if k != "source"}) for row in found]
    scored = parts.merged(of_parts, given, parts.check_scored, lambda row: str(row.get("problem")))
    return [{**row, "source": source} for row, (_, source, _) in zip(scored, given, strict=True)]


def score(found: list[dict[str, Any]], config: ProcessBenchConfig) -> str:
    """Adds "step_scores" and "step_logits" to every row, null if it is too long; returns the name of the encoding."""
    # Imported here, because the evaluation of scored rows does not need JAX.
    from cfprm_jax.sharding import session

    with session.opened(config.device, _log) as (_, mesh):
        return _score(found, config, mesh)


def _log(line: str) -> None:
    print(line, flush=True)


def _score(found: list[dict[str, Any]], config: ProcessBenchConfig, mesh: Mesh) -> str:
    from cfprm_jax.inference.benchmarks import open_scorer
    from cfprm_jax.inference.rows import decimals, sigmoid

    scorer, encoding = open_scorer(config, mesh, _log)
    progress = ProgressLine("scoring")
    # Solutions of one problem share the tokens of the problem.
    order = sorted(range(len(found)), key=lambda place: (found[place]["problem"], place))
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        logits = scorer.score([(found[place]["problem"], found[place]["steps"]) for place in chunk])
        for place, z in zip(chunk, logits, strict=True):
            if z is not None and not np.isfinite(z).all():
                raise UserError(f"{found[place]['source']}: the model computes a score that is not finite")
            found[place]["step_scores"] = None if z is None else sigmoid(z).tolist()
            found[place]["step_logits"] = None if z is None else decimals(z)
        progress.show(
            functools.partial(_so_far, start + len(chunk), len(order), progress),
            min(start + _CHUNK, len(order)) / len(order),
        )
    progress.clear()
    return encoding


def _so_far(done: int, total: int, progress: ProgressLine) -> str:
    return f"{done:,} of {total:,} solutions, {done / progress.elapsed:,.1f} solutions/s"


def evaluate(found: Sequence[dict[str, Any]], config: ProcessBenchConfig) -> dict[str, Any]:
    """The content of results.json. The average F1 is the unweighted mean over subsets, as published."""
    subsets: dict[str, list[LabelledSolution]] = {}
    for row in found:
        scores = row["step_scores"]
        labelled = LabelledSolution(None if scores is None else np.array(scores, np.float64), row["label"])
        subsets.setdefault(row["subset"], []).append(labelled)
    threshold = tune(subsets[config.tune_on]) if config.tune_on else config.threshold
    measured = {name: accuracies(solutions, threshold) for name, solutions in subsets.items()}
    others = {name: found for name, found in measured.items() if name != config.tune_on}
    return {
        "config": config_files.as_dict(config),
        "threshold": threshold,
        "tuned_on": config.tune_on or None,
        "subsets": {name: dataclasses.asdict(found) for name, found in measured.items()},
        "average_f1": _mean(measured.values()),
        "average_f1_without_tuned": _mean(others.values()) if config.tune_on else None,
        "diagnostics": dataclasses.asdict(diagnose(found, threshold)),
    }


def diagnose(found: Iterable[dict[str, Any]], threshold: float) -> diagnostics.Diagnostics:
    """The diagnostics of all rows. A row with an error whose "final_answer_correct" is true has a wrong process."""
    collector = diagnostics.Collector()
    for row in found:
        scores = None if row["step_scores"] is None else np.array(row["step_scores"], np.float64)
        collector.add(scores, row["steps"])
        if row["label"] != NO_ERROR and row.get("final_answer_correct") is True:
            collector.add_wrong_process(predict(scores, threshold) == row["label"])
    return collector.result()


def _mean(measured: Iterable[Accuracies]) -> float | None:
    values = [found.f1 for found in measured if found.f1 is not None]
    return float(np.mean(values)) if values else None


def table(outcome: dict[str, Any]) -> str:
    """The results as Markdown, with threshold and counts."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    grid = [["subset", "erroneous", "correct", "accuracy on erroneous", "accuracy on correct", "F1"]]
    for name, found in outcome["subsets"].items():
        grid.append(
            [
                f"{name} (tuned on)" if name == outcome["tuned_on"] else name,
                f"{found['erroneous']:,}",
                f"{found['correct']:,}",
                percent(found["accuracy_erroneous"]),
                percent(found["accuracy_correct"]),
                percent(found["f1"]),
            ]
        )
    grid.append(["average", "", "", "", "", percent(outcome["average_f1"])])
    if outcome["tuned_on"]:
        grid.append([f"average without {outcome['tuned_on']}", *[""] * 4, percent(outcome["average_f1_without_tuned"])])
    how = f"tuned on {outcome['tuned_on']}" if outcome["tuned_on"] else "given"
    unscored = sum(found["unscored"] for found in outcome["subsets"].values())
    return (
        f"{markdown(grid)}\nIn %. The predicted error is the first step whose score is below "
        f"{outcome['threshold']:.4g} ({how}). {unscored:,} solutions could not be scored and count as misses.\n\n"
        f"{markdown(diagnostics_report.table(outcome['diagnostics']))}\n{diagnostics_report.NOTE}\n"
    )


if __name__ == "__main__":
    sys.exit(flags.run(ProcessBenchConfig, main))
