"""The tables: Markdown and LaTeX."""

from __future__ import annotations

import re

import pytest

from cfprm_jax.report import tables
from cfprm_jax.report.series import columns, curves


def test_a_cell_has_the_spread_only_with_draws():
    row = {"accuracy": 0.5, "ci95": [0.25, 0.75], "draw_std": None}
    assert tables.cell(row) == "50.0 [25.0, 75.0]"
    assert tables.cell({**row, "draw_std": 0.0123}) == "50.0 ± 1.2 [25.0, 75.0]"


def test_the_columns_of_a_markdown_table_are_padded():
    grid = [["a", "method"], ["long name", "1|2"]]
    assert tables.markdown(grid) == "| a         | method |\n|-----------|--------|\n| long name | 1\\|2   |\n"


def test_data_sets_stand_in_one_table(result):
    grid = tables.main_table(result.outcome)
    assert grid[0] == ["data set", "method", "n = 2", "n = 4"]
    assert [line[0] for line in grid[1:]] == ["MATH500"] * 8 + ["GSM-Plus"] * 8
    # The third candidate's 0.1 x number is below the first one's 0.25 for numbers 1 and 2 only; the second has 0.5.
    assert grid[1][:2] == ["MATH500", "best of n, min"] and grid[1][2].startswith("100.0 [")


def test_parts_are_tables_at_the_largest_n(result, compared):
    found = dict(tables.part_tables(result.outcome))
    assert list(found) == ["By level, n = 4", "By perturbation type, n = 4", "By critical thinking, n = 4"]
    assert [line[:2] for line in found["By critical thinking, n = 4"][1:]] == [["with", "2"], ["without", "1"]]
    parts = [
        {**part, "rows2": [{**row, "accuracy": 0.25} for row in part["rows2"]]} for part in compared.outcome["parts"]
    ]
    (level, *_) = (grid for _, grid in tables.part_tables({**compared.outcome, "parts": parts}))
    assert level[0][2:5] == ["A_1: best of n, min", "B: best of n, min", "A_1: weighted vote, min"]
    assert level[1][2].startswith("100.0 [") and level[1][3].startswith("25.0 [")


def test_two_systems_share_what_does_not_depend_on_scores(compared):
    methods = [line[1] for line in tables.main_table(compared.outcome)[1:9]]
    assert methods == [
        "A_1: best of n, min",
        "A_1: weighted vote, min",
        "majority vote",
        "pass@1",
        "first candidate",
        "oracle",
        "B: best of n, min",
        "B: weighted vote, min",
    ]
    grid = tables.comparison_table(compared.outcome)
    assert grid[0] == ["method", "n", "A_1", "B", "difference", "95 % interval", "p"]
    assert [line[:2] for line in grid[1:]] == [
        ["best of n, min", "2"],
        ["weighted vote, min", "2"],
        ["best of n, min", "4"],
        ["weighted vote, min", "4"],
    ]


def test_latex_has_the_columns_of_the_papers_table(compared):
    text = tables.latex(compared.outcome)
    assert r"\begin{tabular}{@{}c|c|ccc|ccc@{}}" in text
    assert (
        r"Version} & \multirow{2}{*}{Models} & \multicolumn{2}{c}{MATH500} & & \multicolumn{2}{c}{GSM-Plus} & \\"
        in text
    )
    assert " &  & @2 & @4 & Avg. & @2 & @4 & Avg. \\\\ \\midrule" in text
    assert r"\multirow{5}{*}{7B} & A\_1 & 100.0 & 100.0 & 100.0 & 100.0" in text
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0]
    lines = [line for line in body.strip().splitlines() if line]
    assert len(lines) == 5
    assert all(len(re.findall(r"(?<!\\)&", line)) == 7 for line in lines)
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    ("text", "written"), [("a_b & 5%", r"a\_b \& 5\%"), (r"\x^2", r"\textbackslash{}x\textasciicircum{}2")]
)
def test_names_are_escaped_for_latex(text, written):
    assert tables.escaped(text) == written


def test_a_plot_shows_every_aggregation_of_one_system_and_the_first_of_two(result, compared):
    names = [curve.name for curve in curves(result.outcome, columns(result.outcome)[0])]
    assert names == [
        "oracle",
        "weighted vote, min",
        "best of n, min",
        "best of n, last",
        "majority vote",
        "pass@1",
    ]
    both = curves(compared.outcome, columns(compared.outcome)[1])
    assert [curve.name for curve in both[1:5]] == [
        "A_1: weighted vote, min",
        "A_1: best of n, min",
        "B: best of n, min",
        "B: weighted vote, min",
    ]
    assert [point[0] for point in both[0].points] == [2, 4]
