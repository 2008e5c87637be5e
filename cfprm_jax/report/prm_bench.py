"""What prm_bench found, as Markdown, LaTeX and one HTML file that needs nothing else."""

from __future__ import annotations

import html
import string
from collections.abc import Mapping, Sequence
from typing import Any

from cfprm_jax.data.step_cases import PUBLISHED, Case
from cfprm_jax.evaluation.case_scores import CaseScores
from cfprm_jax.evaluation.prm_bench_lines import AREAS, BASELINES, POOLED
from cfprm_jax.report import diagnostics, html_parts
from cfprm_jax.report.tables import Grid, escaped, markdown

LABELS = {
    "redundency": "NR",
    "circular": "NCL",
    "counterfactual": "ES",
    "step_contradiction": "SC",
    "domain_inconsistency": "DC",
    "confidence": "CI",
    "missing_condition": "PS",
    "deception": "DR",
    "multi_solutions": "MS",
}
"""What the paper's table calls the classes."""

_BASELINE_NAMES = {"length": "length alone", "position": "position alone", "all_valid": "all steps right"}
_SMALL_P = 0.001


def main_table(outcome: Mapping[str, Any]) -> Grid:
    """A line for each area and its classes, and one for all of it."""
    found = outcome["prm_bench"]
    lines = {line["name"]: line for line in found["lines"]}
    new = outcome["excluded"] is not None
    head = ["class", "cases", "PRMScore", "best threshold", *(_BASELINE_NAMES[name] for name in BASELINES)]
    grid = [head + (["new questions", "PRMScore, new questions"] if new else [])]
    for name in line_order():
        line = lines[name]
        if not line["cases"]:
            continue
        row = [
            _name(name, found),
            _cases(line),
            _score(line["prm_score"] if line["defined"] else None, line["ci95"]),
            _percent(line["cross_fitted"]),
            *(_percent(line["baselines"][each]) for each in BASELINES),
        ]
        grid.append(row + ([f"{line['new_cases']:,}", _score(line["new_prm_score"], line["new_ci95"])] if new else []))
    return grid


def line_order() -> list[str]:
    """The pooled line, and each area before its classes."""
    return [POOLED, *(name for area, classes in AREAS.items() for name in (area, *classes))]


def _name(name: str, found: Mapping[str, Any]) -> str:
    if name == POOLED:
        return "Overall" if found["complete"] else "all cases here"
    return f"{LABELS[name]} {name}" if name in LABELS else name.capitalize()


def _cases(line: Mapping[str, Any]) -> str:
    missing = line["scored"] < line["cases"]
    return f"{line['scored']:,} of {line['cases']:,}" if missing else f"{line['cases']:,}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f}"


def _score(value: float | None, ci95: Sequence[float] | None) -> str:
    if value is None:
        return "n/a"
    return _percent(value) + (f" [{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]" if ci95 else "")


def accuracy_table(outcome: Mapping[str, Any]) -> Grid:
    """The shares of steps called what they are, and how far a case is from its control."""
    head = [
        "class",
        "steps",
        "wrong steps",
        "right steps",
        "wrong steps found",
        "all steps",
        "first errors",
        "similarity",
    ]
    grid = [head]
    for name in line_order():
        line = next(each for each in outcome["prm_bench"]["lines"] if each["name"] == name)
        if line["scored"]:
            grid.append(
                [
                    _name(name, outcome["prm_bench"]),
                    f"{line['steps']:,}",
                    f"{line['wrong_steps']:,}",
                    _percent(line["accuracy_correct"]),
                    _percent(line["accuracy_wrong"]),
                    _percent(line["accuracy"]),
                    _percent(line["accuracy_first_error"]),
                    _percent(line["similarity"]),
                ]
            )
    return grid


def comparison_table(outcome: Mapping[str, Any]) -> Grid:
    """The differences of the two models in points of PRMScore."""
    first, second = outcome["systems"]
    grid = [["class", first, second, "difference", "95 % interval", "p"]]
    found = {entry["name"]: entry for entry in outcome["comparison"]}
    for name in line_order():
        if name in found:
            entry = found[name]
            low, high = entry["ci95"]
            p = f"{entry['p_value']:.3f}" if entry["p_value"] >= _SMALL_P else f"< {_SMALL_P}"
            grid.append(
                [
                    _name(name, outcome["prm_bench"]),
                    _percent(entry["prm_score"]),
                    _percent(entry["prm_score2"]),
                    f"{100 * entry['difference']:+.1f}",
                    f"[{100 * low:+.1f}, {100 * high:+.1f}]",
                    p,
                ]
            )
    return grid


def reason_eval_table(outcome: Mapping[str, Any]) -> Grid:
    """A line for each file of ReasonEval and each level."""
    grid = [["file", "found by", "level", "right", "wrong", "macro-F1", "best threshold", "AUC"]]
    for line in outcome["reason_eval"]:
        for level in ("step", "solution"):
            found = line[level]
            grid.append(
                [
                    line["name"],
                    line["signal"],
                    level,
                    f"{found['right']:,}",
                    f"{found['wrong']:,}",
                    _score(found["macro_f1"], found["macro_f1_ci95"]),
                    _percent(found["cross_fitted"]),
                    _score(found["auc"], found["auc_ci95"]),
                ]
            )
    return grid


def excluded_table(outcome: Mapping[str, Any]) -> Grid:
    """How many cases of each file have a question of --exclude_questions."""
    grid = [["file", "cases", "question in --exclude_questions"]]
    files = outcome["excluded"]["files"]
    return grid + [[name, f"{entry['cases']:,}", f"{entry['excluded']:,}"] for name, entry in files.items()]


def caption(outcome: Mapping[str, Any]) -> str:
    """What the main table's numbers are."""
    config = outcome["config"]
    redundant = f"{LABELS['redundency']} and {LABELS['circular']}"
    return (
        "PRMScore in %, with a 95 % bootstrap interval over questions. A step is right where its score is above "
        f"{config['threshold']:g}; in {redundant}, where there is a redundancy, unless that is above "
        f"{config['redundancy_threshold']:g}. Best threshold: chosen on the other half of the questions, for each "
        "class, the mean of ten halvings. Length, position: judges that see only the length of a step or its place, "
        f"by thresholds chosen likewise. n/a: an F1 of it is 0 / 0, or cases are missing. Seed: {config['seed']}."
    )


def notes(outcome: Mapping[str, Any]) -> list[str]:
    """What is missing, doubled, or of no effect."""
    counts, out = outcome["counts"], []
    found = outcome["prm_bench"]
    if found is not None and not found["complete"]:
        out.append(
            f"Incomplete: {found['scored']:,} of the {sum(PUBLISHED.values()):,} published cases have scores, so there "
            "is no overall score."
        )
    if counts["missing"]:
        out.append(
            f"{counts['missing']:,} of {counts['cases']:,} cases have no scores, such as {counts['first_missing']}."
        )
    if counts.get("missing2"):  # results of earlier versions have none
        out.append(
            f"{counts['missing2']:,} cases have no scores of {outcome['systems'][1]}; the comparison is without them."
        )
    if counts["doubled"]:
        source, first = counts["first_doubled"]
        out.append(f"{counts['doubled']:,} doubled cases were left out, such as {source}, the case of {first}.")
    if counts["doubled_scores"]:
        out.append(f"{counts['doubled_scores']:,} doubled rows of scores were left out.")
    if counts["beyond"]:
        out.append(
            f"{counts['beyond']:,} cases name an error step beyond their last step, such as {counts['first_beyond']}; "
            "it has no effect, as in PRMBench's own program."
        )
    return out


def sections(outcome: Mapping[str, Any]) -> list[tuple[str, Grid, str]]:
    """Title, table and text of every part of the results."""
    out: list[tuple[str, Grid, str]] = []
    if outcome["prm_bench"] is not None:
        out.append(("PRMBench", main_table(outcome), caption(outcome)))
        if outcome["comparison"]:
            first, second = outcome["systems"]
            text = (
                f"{first} minus {second} on the cases that both have scored; interval and two-sided p-value from a "
                "paired bootstrap over questions."
            )
            out.append((f"{first} against {second}", comparison_table(outcome), text))
        text = (
            "In %. Similarity is the mean distance between the share of steps called right in a case and in its "
            "unmodified solution."
        )
        out.append(("Accuracies of steps", accuracy_table(outcome), text))
    if outcome["reason_eval"]:
        text = "In %, with 95 % bootstrap intervals over questions. Steps after the first error are neither."
        out.append(("ReasonEval", reason_eval_table(outcome), text))
    if outcome["excluded"] is not None:
        text = f"{outcome['excluded']['questions']:,} questions in --exclude_questions."
        out.append(("Questions that may have been seen", excluded_table(outcome), text))
    out.append(("Diagnostics", diagnostics.table(outcome["diagnostics"]), diagnostics.NOTE))
    return out


def document(outcome: Mapping[str, Any]) -> str:
    """The text of table.md."""
    parts = [f"## {title}\n\n{markdown(grid)}\n{text}\n" for title, grid, text in sections(outcome)]
    return "\n".join([*parts, *(f"{note}\n" for note in notes(outcome))])


def latex(outcome: Mapping[str, Any]) -> str:
    """Tables for LaTeX, with booktabs: PRMBench's in the columns of its paper, a row a model, and ReasonEval's."""
    out = []
    if outcome["prm_bench"] is not None:
        out += _prm_bench_latex(outcome)
    if outcome["reason_eval"]:
        grid = reason_eval_table(outcome)
        out += [
            r"\begin{table*}[h]",
            r"\caption{ReasonEval in \%.}",
            r"\begin{tabular}{@{}" + "l" * len(grid[0]) + "@{}}",
            r"\toprule",
            " & ".join(map(escaped, grid[0])) + r" \\ \midrule",
            *(" & ".join(map(escaped, line)) + r" \\" for line in grid[1:]),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table*}",
        ]
    return "\n".join([*out, ""])


def _prm_bench_latex(outcome: Mapping[str, Any]) -> list[str]:
    lines = {line["name"]: line for line in outcome["prm_bench"]["lines"]}
    order = [POOLED, *(name for area, classes in AREAS.items() for name in (*classes, area))]
    names = [
        "Overall"
        if name == POOLED and outcome["prm_bench"]["complete"]
        else LABELS.get(name, "Avg.")
        if name != POOLED
        else "All here"
        for name in order
    ]
    rows = [(outcome["systems"][0], [lines[name]["prm_score"] if lines[name]["defined"] else None for name in order])]
    if outcome["comparison"]:
        second = {entry["name"]: entry["prm_score2"] for entry in outcome["comparison"]}
        rows.append((outcome["systems"][1], [second.get(name) for name in order]))
    rows += [(_BASELINE_NAMES[each], [lines[name]["baselines"][each] for name in order]) for each in BASELINES]
    spans = "".join(rf" & \multicolumn{{{len(AREAS[area]) + 1}}}{{c}}{{{area.capitalize()}}}" for area in AREAS)
    return [
        r"\begin{table*}[h]",
        rf"\caption{{PRMScore in \%. {outcome['prm_bench']['scored']:,} of {outcome['prm_bench']['cases']:,} cases.}}",
        r"\resizebox{\linewidth}{!}{",
        r"\begin{tabular}{@{}l|c|" + "|".join("c" * (len(classes) + 1) for classes in AREAS.values()) + "@{}}",
        r"\toprule",
        "Models & " + spans + r" \\",
        " & " + " & ".join(names) + r" \\ \midrule",
        *(
            f"{escaped(name)} & " + " & ".join("-" if v is None else f"{100 * v:.1f}" for v in row) + r" \\"
            for name, row in rows
        ),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table*}",
    ]


def page(outcome: Mapping[str, Any], cases: Sequence[tuple[Case, CaseScores]], left_out: int) -> str:
    """The text of report.html.

    Args:
      cases: those to show step by step.
      left_out: how many there are beside them.
    """
    style = html_parts.asset("report.css")
    body = [
        f"<section><h2>{html.escape(title)}</h2>{html_parts.table(grid, title)}<p>{html.escape(text)}</p></section>"
        for title, grid, text in sections(outcome)
    ]
    body += [f"<p>{html.escape(note)}</p>" for note in notes(outcome)]
    if cases:
        inside = "".join(_case(case, scores) for case, scores in cases)
        more = f"<p>{left_out:,} further cases are counted above but not shown here.</p>" if left_out else ""
        body.append(f"<section><h2>Cases</h2>{inside}{more}</section>")
    systems = html.escape(" and ".join(outcome["systems"]))
    return string.Template(html_parts.asset("prm_bench.html")).substitute(
        title=f"PRMBench: {systems}",
        systems=systems,
        style=style,
        style_hash=html_parts.policy_hash(style),
        body="\n".join(body),
    )


def _case(case: Case, scores: CaseScores) -> str:
    """A case that opens: its steps with their scores and what is wrong."""
    pieces = case.pieces or (1,) * len(case.steps)
    step_of = [step for step, size in enumerate(pieces, 1) for _ in range(size)]
    items = []
    for place, (text, step) in enumerate(zip(case.steps, step_of, strict=True)):
        parts = [f"{scores.validity[place]:.3f}"]
        if scores.redundancy is not None:
            parts.append(f"redundancy {scores.redundancy[place]:.3f}")
        if step in case.error_steps:
            parts.append("wrong")
        items.append(f'<li value="{step}"><strong>{", ".join(parts)}</strong> {html.escape(text)}</li>')
    title = html.escape(f"{case.classification} {case.idx}")
    return f"<details><summary>{title}</summary><p>{html.escape(case.question)}</p><ol>{''.join(items)}</ol></details>"
