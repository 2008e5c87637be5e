"""The report as one HTML file that needs nothing else: tables, curves, and every candidate's steps with their scores.

The candidates are stored in the file as JSON, compressed by gzip and encoded in base64: an index, which the page reads
when it opens, and blocks of a few questions, each of which it reads when one of them is looked at. So a page of 500
questions with 64 candidates opens at once. Text from the data becomes text on the page and never markup, and the page's
own content security policy forbids every script but the one whose hash it names, and every request.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import importlib.resources
import json
import pathlib
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from cfprm_jax.data.candidates import Candidate, Question
from cfprm_jax.data.steps import split_steps
from cfprm_jax.evaluation.best_of_n import chosen, majority
from cfprm_jax.evaluation.pool import Pool, question_fields
from cfprm_jax.grading.grader import Judgement
from cfprm_jax.report import curves_svg, diagnostics, html_parts, results, tables
from cfprm_jax.report.series import columns, curves, sizes
from cfprm_jax.runtime import atomic
from cfprm_jax.runtime.progress import counted

# Questions that are unpacked together when one of them is opened.
_BLOCK = 8
# Separator of texts that are not divided into steps, unless a run has another.
_SEPARATOR = "\n\n"


class PageCollector:
    """Takes what the page shows of the questions as they pass by, so that they need not be kept."""

    def __init__(self, most: int) -> None:
        """Keeps the first `most` questions."""
        self._most = most
        self._summaries: list[dict[str, Any]] = []
        self._blocks: list[str] = []
        self._open: list[list[Any]] = []
        self._left_out = 0
        self._raw = 0

    def watch(self, judged: Iterable[tuple[Question, Judgement]]) -> Iterator[tuple[Question, Judgement]]:
        """The same questions."""
        for question, judgement in judged:
            if len(self._summaries) < self._most:
                self._add(question, judgement)
            else:
                self._left_out += 1
            yield question, judgement

    def _add(self, question: Question, judgement: Judgement) -> None:
        answers = list(dict.fromkeys(answer for answer in judgement.answers if answer is not None))
        self._summaries.append(
            {
                "id": str(question.id),
                "dataset": question.dataset or "",
                "question": question.question,
                "answer": question.answer,
                "fields": question_fields(question),
                "answers": answers,
                "gives": [-1 if answer is None else answers.index(answer) for answer in judgement.answers],
                "right": judgement.correct.astype(int).tolist(),
            }
        )
        self._open.append([_steps(candidate) for candidate in question.candidates])
        if len(self._open) == _BLOCK:
            self._close_block()

    def _close_block(self) -> None:
        packed, raw = _packed(self._open)
        self._blocks.append(packed)
        self._raw += raw
        self._open = []

    def data(self, pool: Pool, n: int) -> PageData:
        """All of it, with what was chosen from the first n.

        Args:
          pool: the same questions in the same order.
        """
        if self._open:
            self._close_block()
        best = {name: chosen(pool, name, n) for name in pool.ranks}
        vote = majority(pool, n)
        for place, summary in enumerate(self._summaries):
            count = len(summary["right"])
            summary["steps"] = pool.steps[place, :count].tolist()
            summary["characters"] = pool.characters[place, :count].tolist()
            summary["scores"] = {
                name: [
                    None if rank == -np.inf else round(float(weight), 4)
                    for rank, weight in zip(pool.ranks[name][place, :count], weights[place, :count], strict=True)
                ]
                for name, weights in pool.weights.items()
            }
            # Logits differ where scores round to 1.
            summary["order"] = {
                name: np.argsort(-ranks[place, :count], kind="stable").tolist() for name, ranks in pool.ranks.items()
            }
            summary["best"] = {name: int(indices[place]) for name, indices in best.items()}
            summary["majority"] = int(vote[place])
        return PageData(self._summaries, self._blocks, self._left_out, self._raw, n)


@dataclasses.dataclass(frozen=True, eq=False)
class PageData:
    """What the page holds of the candidates.

    Attributes:
      summaries: for each question what the list and the lines of candidates show.
      blocks: steps and their scores, packed, a few questions each.
      left_out: questions beyond those.
      raw: bytes of the blocks before they were packed.
      n: the number of candidates among which is chosen.
    """

    summaries: list[dict[str, Any]]
    blocks: list[str]
    left_out: int
    raw: int
    n: int


def _steps(candidate: Candidate) -> list[Any]:
    """The steps' texts and scores. A text that cannot be cut to fit its scores stays whole."""
    scores = None if candidate.step_scores is None else [round(float(score), 4) for score in candidate.step_scores]
    steps = candidate.steps
    if steps is None:
        text = candidate.text or ""
        steps = tuple(split_steps(text, _SEPARATOR))
        if scores is not None and len(steps) != len(scores):
            steps = (text,)
    return [list(steps), scores]


def _packed(content: Any) -> tuple[str, int]:
    """Compressed JSON in base64, and how many bytes of JSON that was."""
    raw = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    # Without a time in it the same results give the same file.
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode(), len(raw)


def write(outcome: Mapping[str, Any], data: PageData, path: str | pathlib.Path) -> None:
    """Write the page."""
    atomic.write_text(path, _page(outcome, data))


def _page(outcome: Mapping[str, Any], data: PageData) -> str:
    style = f"{_temml_style()}\n{html_parts.asset('report.css')}"
    script = "\n".join(map(html_parts.asset, ("temml/temml.min.js", "report_math.js", "report.js")))
    settings = {
        "aggregations": outcome["config"]["aggregation"],
        "n": data.n,
        "block": _BLOCK,
        "questions": data.summaries,
    }
    index, raw = _packed(settings)
    size = len(index) + sum(map(len, data.blocks))
    systems = " and ".join(outcome["systems"])
    return string.Template(html_parts.asset("report.html")).substitute(
        title=html.escape(f"Best of N: {systems}"),
        style=style,
        style_hash=html_parts.policy_hash(style),
        script=script,
        script_hash=html_parts.policy_hash(script),
        systems=html.escape(systems),
        caption=html.escape(results.caption(outcome)),
        grading=html.escape(results.grading_note(outcome)),
        equal_cost=_equal_cost(outcome),
        table=html_parts.table(tables.main_table(outcome), "Accuracy"),
        comparison=_comparison(outcome),
        plots=_plots(outcome),
        parts=_parts(outcome),
        diagnostics=_diagnostics(outcome),
        correlations=html_parts.table(tables.correlation_table(outcome), "Correlation of scores with length"),
        differing=_differing(outcome),
        shown=_shown(data),
        size=f"{(data.raw + raw) / 1e6:,.1f} MB of candidates, {size / 1e6:,.1f} MB compressed in this file",
        index=index,
        blocks="".join(
            f'<script type="application/octet-stream" id="block-{number}">{block}</script>\n'
            for number, block in enumerate(data.blocks)
        ),
    )


def _temml_style() -> str:
    """Temml's style sheet with its font in it, so that the page needs no other file."""
    font = importlib.resources.files("cfprm_jax.report").joinpath("temml/Temml.woff2").read_bytes()
    data = f"data:font/woff2;base64,{base64.b64encode(font).decode()}"
    return html_parts.asset("temml/Temml-Local.css").replace("url('Temml.woff2')", f"url('{data}')")


def _comparison(outcome: Mapping[str, Any]) -> str:
    if not outcome["comparison"]:
        return ""
    first, second = (html.escape(name) for name in outcome["systems"])
    return (
        f'<section aria-labelledby="h-comparison"><h2 id="h-comparison">{first} against {second}</h2>'
        f"{html_parts.table(tables.comparison_table(outcome), 'Comparison')}"
        f"<p>{first} minus {second} on the same questions, in percentage points; interval and two-sided p-value from a "
        "paired bootstrap over questions.</p></section>"
    )


def _equal_cost(outcome: Mapping[str, Any]) -> str:
    if not outcome["equal_cost"]:
        return ""
    return (
        '<section aria-labelledby="h-cost"><h2 id="h-cost">Accuracy at equal cost</h2>'
        f"{html_parts.table(tables.equal_cost_table(outcome), 'Accuracy at equal cost')}"
        f"<p>{html.escape(results.equal_cost_note(outcome))}</p></section>"
    )


def _plots(outcome: Mapping[str, Any]) -> str:
    if len(sizes(outcome["rows"])) < 2:
        return "<p>There is only one n.</p>"
    out = []
    for number, column in enumerate(columns(outcome)):
        lines, title = curves(outcome, column), column.title or "All questions"
        out.append(
            f"<figure><figcaption>{html.escape(title)}, {counted(column.questions, 'question')}: accuracy in %, "
            f"bands are 95 % intervals</figcaption>{curves_svg.drawing(lines, title, number)}</figure>"
        )
    legend = curves_svg.legend(curves(outcome, columns(outcome)[0]))
    return f'<div class="curves"><div class="plots">{"".join(out)}</div>{legend}</div>'


def _parts(outcome: Mapping[str, Any]) -> str:
    found = tables.part_tables(outcome)
    if not found:
        return ""
    inside = "".join(
        f"<details><summary>{html.escape(title)}</summary>{html_parts.table(grid, title)}</details>"
        for title, grid in found
    )
    return f'<section aria-labelledby="h-parts"><h2 id="h-parts">Parts of the questions</h2>{inside}</section>'


def _diagnostics(outcome: Mapping[str, Any]) -> str:
    if outcome["diagnostics"] is None:
        return ""
    grid = html_parts.table(diagnostics.table(outcome["diagnostics"]), "Diagnostics of step scores")
    return f"<details><summary>Diagnostics of step scores</summary>{grid}<p>{diagnostics.NOTE}</p></details>"


def _differing(outcome: Mapping[str, Any]) -> str:
    pairs = outcome["grading"]["pairs_that_differ"]
    if not pairs:
        return ""
    grid = [["question", "predicted", "reference", "graded", "candidates"]]
    grid += [
        [
            str(pair["id"]),
            str(pair["predicted"]),
            pair["answer"],
            "right" if pair["graded"] else "wrong",
            str(pair["candidates"]),
        ]
        for pair in pairs
    ]
    title = "Where the grader differs from the candidates' own “correct”"
    return f"<details><summary>{title}</summary>{html_parts.table(grid, 'Differences of the grader')}</details>"


def _shown(data: PageData) -> str:
    left_out = f" {data.left_out:,} further questions are counted above but not shown here." if data.left_out else ""
    return f"Chosen means chosen among the first {data.n} candidates of a question.{left_out}"
