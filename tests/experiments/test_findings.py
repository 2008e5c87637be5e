"""The findings follow the numbers, whichever way these fall."""

from __future__ import annotations

import pytest

from cfprm_jax.experiments import findings, table2
from cfprm_jax.experiments.contrasts import Results, families

ENTRY = {"questions": 200, "pass_at_1": 0.445, "majority": {"8": 0.5}, "oracle": {"8": 0.985}}


def rows(results):
    found = Results(results, "all")
    text = findings.document(found.seeds, (8,), {"some": {"short": ENTRY}}, families(found))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return text, {line[0]: line[1:] for line in lines}


@pytest.mark.parametrize(("coarse", "conclusion"), [(0.6, "yes"), (0.5, "not shown"), (0.4, "no")])
def test_the_conclusion_follows_the_sign(make_results, coarse, conclusion):
    _, lines = rows(make_results(levels=("some",), accuracy={"plain": 0.5, "c2": coarse}))
    hypothesis, _, found, _, shown = next(cells for name, cells in lines.items() if "The paper's comparison" in name)
    assert (hypothesis, found) == ("coarse-to-fine is better than plain training", conclusion)
    assert ("ORM on short" in shown) == (coarse != 0.5) and (shown == "none") == (coarse == 0.5)


def test_candidates_and_number_of_comparisons(make_results):
    text, lines = rows(make_results())
    assert lines["some"] == ["short", "200", "44.5 %", "50.0 %", "98.5 %"]
    assert "paired by seed (3) and question" in text and "With one seed" not in text
    assert "of 26 differences" in text and "about 1 of the intervals" in text


def test_one_seed_is_marked(make_results):
    assert "With one seed the intervals are over questions only." in rows(make_results(levels=("some",), seeds=(0,)))[0]


def test_a_grid_without_two_treatments_to_compare_has_no_findings(make_results):
    """One line in place of an empty table with a note on intervals; the candidates stay."""
    text, lines = rows(make_results(levels=("some",), accuracy={"plain": 0.5}, seeds=(0,)))
    assert text.endswith(f"\n\n{findings.NOTHING}\n") and list(lines)[-1] == "some"
    assert "Bonferroni" not in text and "# Findings" not in text and "seed" not in text


def test_tables(make_results):
    results = Results(make_results(), "all")
    found = families(results)
    lines = table2.markdown(results, found).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:4]] == ["redundancy", "model", "short @8"]
    rows = [line for line in lines if line.startswith("| some")]
    assert [row.split("|")[2].strip() for row in rows] == [
        *("ORM", "ORM + CFPRM", "BCE", "BCE + CFPRM", "Q-ranking", "Q-ranking + CFPRM"),
    ]
    assert "(+" in rows[1] and "[" in rows[1] and "(" not in rows[0]
    assert all(line.count("|") == lines[0].count("|") for line in lines if line.startswith("|"))
    latex = table2.latex(results, found)
    body = [line for line in latex.splitlines() if line.endswith(r"\\") and "CFPRM" in line]
    assert len(body) == 9 and all(line.count("&") == 1 + 2 * 3 for line in body)
    assert r"\multicolumn{3}{c}{short}" in latex and latex.count(r"\midrule") == 3
