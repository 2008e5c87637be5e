"""Windows from the exact redundancy of the laboratory's steps, and their controls.

A step is redundant if it restates the day, is empty or works a move out again, and is right; or if it is the second
half of a split move. Windows merge marked steps: a marked step joins the window before it, and marked steps at the
beginning join the first that is not marked. A window is labelled by its last step, as all windows are. The kinds of
marks:

* oracle: the redundant steps.
* anti: as large a share of the steps that are not redundant.
* random: as large a share of all steps.

The last two draw each mark from a hash of the question and the steps up to it. So solutions that share a prefix share
its windows, as they do with the oracle, and packing shares the same prefixes. Shares are those of the distinct steps of
the whole training set.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence

from cfprm_jax.errors import UserError
from cfprm_jax.experiments.treatment import MATCHED, Treatment
from cfprm_jax.runtime import atomic
from cfprm_jax.synthetic import judge

KINDS = ("oracle", "anti", "random")

Prefix = tuple[str, ...]
"""A question, and the steps up to and with one."""


def _treatment(title: str, granularities: tuple[str, ...], windows: str = "", passes: int = 1) -> Treatment:
    return Treatment(
        title, granularities, passes, packing="tree", steps=MATCHED, label_weight="node", training_rows=windows
    )


TREATMENTS = {
    "plain_once": _treatment("plain, steps of C=2", ("1",), passes=2),
    "c2_once": _treatment("C=2, then 1", ("2", "1")),
    "oracle": _treatment("windows of redundant steps, then 1", ("given", "1"), "oracle"),
    "random": _treatment("windows of random steps, then 1", ("given", "1"), "random"),
    "anti": _treatment("windows of steps that are not redundant, then 1", ("given", "1"), "anti"),
}
"""Whole records, each label once, and as many steps as C=2 and then 1 take."""

CONTRASTS = (
    ("oracle", "random"),
    ("oracle", "plain_once"),
    ("oracle", "c2_once"),
    ("oracle", "anti"),
    ("random", "plain_once"),
    ("c2_once", "plain_once"),
)


def redundant(question: str, steps: Sequence[str]) -> list[bool]:
    """Which steps of a solution are redundant.

    Raises:
      UserError: the question is not one of the laboratory.
    """
    problem = judge.parse_problem(question)
    if problem is None:
        raise UserError(f"{question!r:.80} is not a question of the laboratory")
    labels, marks, done = judge.judge(problem, steps).labels, [], 0
    for text, label in zip(steps, labels, strict=True):
        step = judge.parse(text, problem, done)
        kind = None if step is None else step.kind
        marks.append(kind == "get" or (kind in ("restate", "idle", "again") and label == 1))
        if step is not None and step.index >= 0:
            done = step.index + 1
    return marks


def sizes(marks: Sequence[bool]) -> tuple[int, ...]:
    """Sizes of the windows in which marked steps join the window before them; leading ones the first not marked."""
    out: list[int] = []
    open_window = False  # whether all steps of the last window are marked, so that the next one joins it
    for mark in marks:
        if out and (mark or open_window):
            out[-1] += 1
            open_window = open_window and mark
        else:
            out.append(1)
            open_window = mark
    return tuple(out)


def write(source: pathlib.Path, target: pathlib.Path, kind: str, seed: int) -> None:
    """Write the stepwise rows of a file with "windows" of a kind."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    exact: dict[Prefix, bool] = {}
    for row in rows:
        marks = redundant(row["prompt"], row["completions"])
        exact.update(zip(_prefixes(row["prompt"], row["completions"]), marks, strict=True))
    share = sum(exact.values()) / len(exact)
    if kind == "anti":
        share /= max(1 - share, share)
    chosen = {
        prefix: mark if kind == "oracle" else _uniform(prefix, kind, seed) < share and not (kind == "anti" and mark)
        for prefix, mark in exact.items()
    }
    with atomic.writing(target) as file:
        for row in rows:
            own = [chosen[prefix] for prefix in _prefixes(row["prompt"], row["completions"])]
            file.write(atomic.encode_json({**row, "windows": sizes(own)}))


def _prefixes(question: str, steps: Sequence[str]) -> Iterator[Prefix]:
    return ((question, *steps[: end + 1]) for end in range(len(steps)))


def _uniform(prefix: Prefix, kind: str, seed: int) -> float:
    """A number in [0, 1) from a hash."""
    found = hashlib.blake2b(json.dumps([kind, seed, *prefix]).encode(), digest_size=8).digest()
    return int.from_bytes(found, "big") / 2**64
