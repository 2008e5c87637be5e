"""What results are known by stays the same when tables are reworded."""

from __future__ import annotations

import dataclasses

import pytest

from cfprm_jax.experiments import frontier, oracle, real, rolled, treatment
from cfprm_jax.experiments.grid import TREATMENTS, Cell
from cfprm_jax.experiments.treatment import Treatment

TITLES = {
    "plain": "plain",
    "plain_matched": "plain, steps of C=2",
    "c2": "C=2, then 1",
    "c3": "C=3, then 1",
    "c4": "C=4, then 1",
    "shuffled": "C=2 and 1, shuffled",
    "fine_to_coarse": "1, then C=2",
    "grouped": "plain, records kept together",
    "grouped_4": "plain, 4 of a record kept together",
    "plain_compute": "plain, compute of records kept together",
    "plain_compute_4": "plain, compute of 4 kept together",
    "plain_once": "plain, steps of C=2",
    "c2_once": "C=2, then 1",
    "oracle": "windows of redundant steps, then 1",
    "random": "windows of random steps, then 1",
    "anti": "windows of steps that are not redundant, then 1",
    "exact": "exact",
    "hard": "hard",
    "soft": "soft",
    "relative": "relative",
    "self_denoised": "self-denoised",
    "consensus": "hard, where a judge agrees",
    "orm plain": "plain",
    "orm c2": "whole, C=2, then 1",
    "real expanded": "expanded, shuffled",
    "real each_once": "each label once",
    "real c2": "C=2, then 1",
    "real plain_matched": "each label once, steps of C=2 then 1",
    "real orm expanded": "expanded, shuffled",
    "real orm each_once": "each label once",
    "real orm c2": "whole, C=2, then 1",
}


def test_titles_of_stored_results() -> None:
    """One that is reworded is a key of treatment.FIRST_TITLES from then on, and what is here its value."""
    found: dict[str, Treatment] = {**TREATMENTS, **oracle.TREATMENTS, **rolled.TREATMENTS}
    found |= {f"orm {name}": Cell("some", "orm", name, 0).what for name in ("plain", "c2")}
    found |= {f"real {name}": what for name, what in real.TREATMENTS.items()}
    found |= {f"real orm {name}": what for name, what in real.ORM_TREATMENTS.items()}
    new = {name: what.title for name, what in found.items() if name not in TITLES}
    assert not new, "add new treatments to TITLES"
    assert {name: what.identity()["title"] for name, what in found.items()} == TITLES
    name = "together0.node.negatives1.step1000.train400000.rate0.002"
    assert frontier.treatment(name).identity()["title"] == name


@pytest.mark.parametrize("what", [TREATMENTS["c2"], rolled.TREATMENTS["hard"]], ids=["c2", "hard"])
def test_rewording_changes_no_identity(what, monkeypatch: pytest.MonkeyPatch) -> None:
    before, reworded = dataclasses.asdict(what), dataclasses.replace(what, title="other words")
    assert what.identity() == before != reworded.identity()
    monkeypatch.setitem(treatment.FIRST_TITLES, "other words", what.title)
    assert reworded.identity() == what.identity() == before
