"""The words follow the numbers, whichever way these fall."""

from __future__ import annotations

import pytest

from cfprm_jax.experiments import table2, text
from cfprm_jax.experiments.contrasts import Results, families


def page(results):
    found = Results(results, "all")
    return " ".join(text.page(found, families(found), ["Candidates (some)."]).split())


@pytest.mark.parametrize(
    ("coarse", "verdict"),
    [
        (0.6, "it supports that coarse-to-fine is better than plain training"),
        (0.5, "it does not support that coarse-to-fine is better than plain training, nor the opposite"),
        (0.4, 'it speaks against it: the opposite of "coarse-to-fine is better than plain training" holds'),
    ],
)
def test_the_verdict_follows_the_sign(make_results, coarse, verdict):
    rendered = page(make_results(levels=("some",), accuracy={"plain": 0.5, "c2": coarse}))
    assert verdict in rendered
    assert ("Shown: ORM on short" in rendered) == (coarse != 0.5)
    assert ("No single one is shown." in rendered) == (coarse == 0.5)


def test_the_number_of_comparisons_is_printed(make_results):
    rendered = page(make_results())
    assert "What 72 runs with 3 seeds support" in rendered  # 3 levels x (2 + 2 x 3) x 3 seeds
    assert "There are 26 differences in 6 families here" in rendered
    assert "about 1 would exclude 0 if nothing mattered" in rendered


def test_one_seed_is_marked(make_results):
    rendered = page(make_results(levels=("some",), seeds=(0,)))
    assert "with 1 seed support" in rendered and "With one seed the intervals are about questions alone." in rendered


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
