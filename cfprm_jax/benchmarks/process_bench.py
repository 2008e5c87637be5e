"""ProcessBench: accuracy of locating the first incorrect step, and F1."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cfprm_jax.benchmarks.options import ProcessBenchConfig
from cfprm_jax.data.formats.files import expand, require, rows
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import diagnostics
from cfprm_jax.evaluation.first_error import NO_ERROR, Accuracies, LabelledSolution, accuracies, predict, tune
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.report import process_bench as report
from cfprm_jax.runtime import atomic, config_files, output_paths

_NUMBERED = re.compile(r"(?P<subset>.+)-\d+")
RESULTS, TABLE, PREDICTIONS = "results.json", "table.md", "predictions.jsonl"
Log = Callable[[str], None]


def run(config: ProcessBenchConfig, log: Log) -> dict[str, Any] | None:
    """Scores config.input if a PRM is named, evaluates the scores, and writes config.output_dir.

    Args:
      log: receives lines about input, devices and PRM.

    Returns:
      The content of results.json; None with --shard, which only scores.

    Raises:
      UserError: invalid options or input.
    """
    named = config.model or config.checkpoint
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    if config.model and config.checkpoint:
        raise UserError("expected either --model (a Hugging Face directory) or --checkpoint (a run of train)")
    if config.merge and (named or config.shard):
        raise UserError("--merge scores nothing: leave out --model, --checkpoint and --shard")
    if config.shard and not named:
        raise UserError("--shard needs --model or --checkpoint")
    config.refuse_unused()
    output_paths.require_new_directory("--output_dir", config.output_dir)
    require(input=config.input, merge=config.merge)
    config = dataclasses.replace(config, model=local_directory(config.model))
    found = list(read(config.input))
    subsets = list(dict.fromkeys(row["subset"] for row in found))
    if config.tune_on and config.tune_on not in subsets:
        raise UserError(f"--tune_on={config.tune_on} is not among the subsets: {', '.join(subsets)}")
    kinds = {row["label"] == NO_ERROR for row in found if row["subset"] == config.tune_on}
    if config.tune_on and len(kinds) < 2:
        what = "solutions with an error" if kinds == {True} else "correct solutions"
        raise UserError(
            f"--tune_on={config.tune_on} has no {what}, without which there is no F1 to tune the threshold by"
        )
    log(f"solutions   {len(found):,} in {', '.join(subsets)}")
    source = ", ".join(config.merge) or "none: scores of the rows"
    log(f"model       {config.model or config.checkpoint or source}")
    if config.shard:
        from cfprm_jax.benchmarks import scoring

        scoring.score_share(
            config, found, question=_question, given=_given, scored=_part_row, log=log, unit="solutions"
        )
        return None
    evaluated = config
    if config.merge:
        found, evaluated = merged(found, config)
    elif named:
        found, encoding = score(found, config, log)
        evaluated = config = dataclasses.replace(config, encoding=encoding)
    else:
        check_scored(found)
    outcome = evaluate(found, evaluated)
    write(pathlib.Path(config.output_dir), config, found, outcome)
    return outcome


def files(output_dir: str) -> list[pathlib.Path]:
    """The files of results in a directory that :func:`run` wrote."""
    return [pathlib.Path(output_dir) / name for name in (RESULTS, TABLE, PREDICTIONS)]


def write(
    directory: pathlib.Path,
    config: ProcessBenchConfig,
    found: Iterable[dict[str, Any]],
    outcome: dict[str, Any],
) -> None:
    """Writes the directory of results atomically."""
    with atomic.new_directory(directory) as partial:
        config_files.write_config(config, partial)
        atomic.write_json(partial / RESULTS, outcome, indent=1)
        atomic.write_text(partial / TABLE, report.document(outcome))
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


def check_scored(found: Iterable[dict[str, Any]]) -> None:
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


def score(found: Sequence[dict[str, Any]], config: ProcessBenchConfig, log: Log) -> tuple[list[dict[str, Any]], str]:
    """The rows with "step_scores" and "step_logits", null if a row is too long; and the name of the encoding."""
    # Imported here, because the evaluation of existing scores does not need JAX.
    from cfprm_jax.benchmarks import scoring

    # Solutions of one problem share the tokens of the problem.
    order = sorted(range(len(found)), key=lambda place: (found[place]["problem"], place))
    ordered = [found[place] for place in order]
    rows_of, encoding = scoring.score_cases(
        config, ordered, given=_given, scored=_scored_row, log=log, unit="solutions"
    )
    by_place = dict(zip(order, rows_of, strict=True))
    return [by_place[place] for place in range(len(found))], encoding


def merged(
    found: Sequence[dict[str, Any]], config: ProcessBenchConfig
) -> tuple[list[dict[str, Any]], ProcessBenchConfig]:
    """The rows with the scores of all parts, and the options with those of the scoring."""
    from cfprm_jax.benchmarks import scoring
    from cfprm_jax.inference import parts

    of_parts, config = scoring.merged_parts(config)
    given = [(row["problem"], row["source"], {k: v for k, v in row.items() if k != "source"}) for row in found]
    scored = parts.merged(of_parts, given, parts.check_scored, _question)
    return [{**row, "source": source} for row, (_, source, _) in zip(scored, given, strict=True)], config


def _question(row: Mapping[str, Any]) -> str:
    return str(row.get("problem"))


def _given(row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A row as a stepwise row, which score_rows takes."""
    return {"prompt": row["problem"], "completions": row["steps"]}, row["source"]


def _scored_row(row: Mapping[str, Any], scored: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, **{key: scored[key] for key in ("step_scores", "step_logits")}}


def _part_row(row: Mapping[str, Any], scored: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _scored_row(row, scored).items() if key != "source"}


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
