"""Everything that bon found: results.json, and the tables made of it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from cfprm_jax.evaluation.best_of_n import AccuracyRow
from cfprm_jax.evaluation.breakdown import AccuracyDifference, LengthCorrelation, Part
from cfprm_jax.evaluation.diagnostics import Diagnostics
from cfprm_jax.evaluation.equal_cost import EqualCost
from cfprm_jax.evaluation.pool import Pool
from cfprm_jax.report import diagnostics, tables
from cfprm_jax.runtime import atomic
from cfprm_jax.runtime.progress import counted

RESULTS, TABLE, LATEX, PLOT, PAGE = "results.json", "table.md", "table.tex", "plot.png", "report.html"


@dataclasses.dataclass(frozen=True)
class PartRows:
    """A part of the questions and its accuracies; the first part is all of them."""

    part: Part
    questions: int
    rows: Sequence[AccuracyRow]
    rows2: Sequence[AccuracyRow] = ()


def results(
    config: Mapping[str, Any],
    systems: Sequence[str],
    pool: Pool,
    parts: Sequence[PartRows],
    *,
    grading: Mapping[str, Any],
    correlations: Sequence[LengthCorrelation],
    comparison: Sequence[AccuracyDifference] = (),
    diagnosed: Diagnostics | None = None,
    at_cost: Sequence[EqualCost] = (),
    left_out: Sequence[int] = (),
) -> dict[str, Any]:
    """The JSON object of results.json.

    "rows" are the accuracies over all questions, "rows2" those of the second system; "pool" is the number of candidates
    a question, or the least and the most; "n_left_out" are the n of --n=auto that are more than that.
    """
    smallest, largest = int(pool.sizes.min()), int(pool.sizes.max())
    everything, *others = parts
    return {
        "config": dict(config),
        "systems": list(systems),
        "questions": len(pool.ids),
        "datasets": list(dict.fromkeys(pool.datasets)),
        "pool": smallest if smallest == largest else [smallest, largest],
        "n_left_out": list(left_out),
        "unscored": pool.unscored,
        "unsplit": pool.split.unsplit,
        "rows": [_row(row) for row in everything.rows],
        "rows2": [_row(row) for row in everything.rows2],
        "comparison": [
            {
                **dict(zip(("n", "method", "aggregation"), entry.key, strict=True)),
                "accuracy": entry.accuracy,
                "accuracy2": entry.accuracy2,
                "difference": entry.difference,
                "ci95": list(entry.ci95),
                "p_value": entry.p_value,
            }
            for entry in comparison
        ],
        "parts": [
            {
                "by": entry.part.by,
                "value": entry.part.value,
                "questions": entry.questions,
                "rows": [_row(row) for row in entry.rows],
                "rows2": [_row(row) for row in entry.rows2],
            }
            for entry in others
        ],
        "correlations": [dataclasses.asdict(entry) for entry in correlations],
        "equal_cost": [dataclasses.asdict(entry) for entry in at_cost],
        "diagnostics": None if diagnosed is None else dataclasses.asdict(diagnosed),
        "grading": dict(grading),
    }


def _row(row: AccuracyRow) -> dict[str, Any]:
    return {
        "n": row.n,
        "method": row.method,
        "aggregation": row.aggregation,
        "accuracy": row.accuracy,
        "ci95": list(row.ci95),
        "draws": row.draws,
        "draw_std": row.draw_std,
    }


def caption(outcome: Mapping[str, Any]) -> str:
    """The caption of the main table."""
    config, pool = outcome["config"], outcome["pool"]
    size = f"{pool}" if isinstance(pool, int) else f"{pool[0]} to {pool[1]}"
    chosen = (
        f"mean ± standard deviation over {counted(config['draws'], 'random subset')} of n"
        if config["draws"]
        else "first n"
    )
    unscored = f", {outcome['unscored']:,} of them without scores" if outcome["unscored"] else ""
    if outcome.get("unsplit"):  # results of earlier versions have none
        unscored += f", {outcome['unsplit']:,} with a text of several lines that was scored as one step"
    return (
        f"Accuracy in %, with a 95 % bootstrap interval over {counted(outcome['questions'], 'question')}. "
        f"{size} candidates a question{unscored}; {chosen}. Grader: {config['grader']}. Seed: {config['seed']}. "
        "pass@1 is the mean over all candidates, and the first candidate that of the file, whatever n is."
        f"{_left_out(outcome)}"
    )


def _left_out(outcome: Mapping[str, Any]) -> str:
    numbers = ", ".join(map(str, outcome.get("n_left_out", ())))
    return f" n = {numbers} left out: not every question has that many candidates." if numbers else ""


def grading_note(outcome: Mapping[str, Any]) -> str:
    """A note on grading: answers not found, pairs without a verdict, and disagreements with "correct"."""
    grading = outcome["grading"]
    if grading["grader"] == "none":
        return f'{counted(grading["candidates"], "candidate")}, right or wrong by their own "correct".'
    parts = [f"{counted(grading['candidates'], 'candidate')} graded by {grading['grader']}"]
    if grading["without_answer"]:
        parts.append(f"{grading['without_answer']:,} give no answer")
    if grading["without_verdict"]:
        parts.append(
            f"{grading['without_verdict']:,} of {grading['pairs_compared']:,} pairs of answers took longer than "
            f"{grading['seconds_a_pair']:g} s or could not be read, and count as different"
        )
    if grading["with_own_correct"]:
        differ = f"{grading['differs_from_own_correct']:,} of {grading['with_own_correct']:,}"
        parts.append(f'{differ} differ from their own "correct"')
    return "; ".join(parts) + "."


def summary(outcome: Mapping[str, Any]) -> str:
    """What a command prints: the main table, the comparison, and what they rest on."""
    compared = f"\n{_comparison(outcome)}" if outcome["comparison"] else ""
    at_cost = ""
    if outcome["equal_cost"]:
        at_cost = (
            f"## Accuracy at equal cost\n\n{tables.markdown(tables.equal_cost_table(outcome))}\n"
            f"{equal_cost_note(outcome)}\n\n## Accuracy\n\n"
        )
    main = f"{tables.markdown(tables.main_table(outcome))}\n{caption(outcome)}\n"
    return f"{at_cost}{main}{compared}\n{grading_note(outcome)}\n"


def _comparison(outcome: Mapping[str, Any]) -> str:
    first, second = outcome["systems"]
    return (
        f"{tables.markdown(tables.comparison_table(outcome))}\n{first} minus {second} on the same questions, in "
        "percentage points; interval and two-sided p-value from a paired bootstrap over questions.\n"
    )


def equal_cost_note(outcome: Mapping[str, Any]) -> str:
    """A note on the comparison at equal cost."""
    first, second = outcome["systems"]
    entry = outcome["equal_cost"][0]
    return (
        f"{first}: the best of all its solutions. {second}: the expected best of n, for the largest n whose cost is "
        f"not above that of {first}; here {entry['flops2'] / entry['flops']:.0%} of it. A question costs 2 FLOPs a "
        "parameter and processed token, of policy and PRM. Difference in percentage points, paired by question."
    )


def document(outcome: Mapping[str, Any]) -> str:
    """The text of table.md."""
    sections = [summary(outcome)]
    sections += [f"## {title}\n\n{tables.markdown(grid)}" for title, grid in tables.part_tables(outcome)]
    sections.append(
        f"## Correlation of scores with length\n\n{tables.markdown(tables.correlation_table(outcome))}\n"
        "Spearman's rank correlation with the number of characters and of steps: over all candidates, the mean within "
        "questions, and over the chosen candidates.\n"
    )
    if outcome["diagnostics"] is not None:
        grid = diagnostics.table(outcome["diagnostics"])
        sections.append(f"## Diagnostics of step scores\n\n{tables.markdown(grid)}\n{diagnostics.NOTE}\n")
    differing = outcome["grading"]["pairs_that_differ"]
    if differing:
        grid = [["question", "predicted", "reference", "graded", "candidates"]]
        grid += [
            [
                str(pair["id"]),
                f"`{pair['predicted']}`",
                f"`{pair['answer']}`",
                "right" if pair["graded"] else "wrong",
                str(pair["candidates"]),
            ]
            for pair in differing
        ]
        sections.append(f'## Where the grader differs from the candidates\' own "correct"\n\n{tables.markdown(grid)}')
    return "\n".join(sections)


def write(outcome: Mapping[str, Any], directory: str | pathlib.Path) -> None:
    """Write results.json, table.md and table.tex into a directory that exists."""
    directory = pathlib.Path(directory)
    atomic.write_json(directory / RESULTS, outcome, indent=1)
    atomic.write_text(directory / TABLE, document(outcome))
    atomic.write_text(directory / LATEX, tables.latex(outcome))
