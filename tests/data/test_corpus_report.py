"""Counts of a corpus: classes of labels, lengths, cuts and shared prefixes against plain re-counting."""

from __future__ import annotations

import collections
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cfprm_jax.data.corpus_report as corpus_report
from cfprm_jax.config import EncodingConfig
from cfprm_jax.data import Trajectory, read
from cfprm_jax.data.corpus_report import DistinctCounts, LabelCounts, TokenCounts, distinct_prefix_tokens, unlimited


class Characters:
    """Stands for the encoder where only lengths matter: a token a character, 0 the marker."""

    def encode_many(self, items):
        return [self._encode(*item) for item in items]

    def _encode(self, question, steps, labels):
        tokens = list(map(ord, question))
        positions = []
        for step in steps:
            tokens += [*map(ord, step), 0]
            positions.append(len(tokens) - 1)
        encoded = type("Encoded", (), {})()
        encoded.tokens, encoded.step_positions = np.array(tokens, np.int32), np.array(positions, np.int32)
        encoded.labels = np.asarray(labels, np.float32)
        return encoded


def counted(trajectories, max_length: int) -> dict:
    counts = TokenCounts(Characters(), max_length)
    for trajectory in trajectories:
        counts.add(trajectory)
    return counts.as_dict()


def test_labels_by_class() -> None:
    counts = LabelCounts()
    counts.add(Trajectory("q", ("a", "b", "c"), [1, 0, None], "f:1"))
    counts.add(Trajectory("q", ("a", "b"), [0.999, 1e-9], "f:2"))
    assert counts.as_dict() == {
        "trajectories": 2,
        "steps": 5,
        "labels": {"positive": 1, "negative": 1, "soft": 2, "unlabelled": 1},
    }


def distinct_counts(trajectories) -> dict:
    counts = DistinctCounts()
    for trajectory in trajectories:
        counts.add(trajectory)
    return counts.as_dict()


@given(st.data(), st.sampled_from([1, 3, 1 << 20]))
def test_distinct_steps_are_those_of_the_prefixes(data: st.DataObject, waiting: int) -> None:
    """By dictionaries of whole texts, however often what waits is joined with what was found."""
    text, label = st.sampled_from(["a", "b", "ab"]), st.sampled_from([0.0, 1.0, 0.5, 0.7, None])
    made, seen = [], collections.defaultdict(list)
    for _ in range(data.draw(st.integers(0, 8))):
        question, steps = data.draw(st.sampled_from(["q", "qa"])), data.draw(st.lists(text, min_size=1, max_size=4))
        labels = data.draw(st.lists(label, min_size=len(steps), max_size=len(steps)))
        made.append(Trajectory(question, tuple(steps), labels, f"f:{len(made) // 3}"))
        for end, value in enumerate(labels, 1):
            if value is not None:
                seen[question, tuple(steps[:end])].append(float(np.float32(value)))
    before, corpus_report._KEYS = corpus_report._KEYS, waiting
    try:
        found = distinct_counts(made)
    finally:
        corpus_report._KEYS = before
    assert found == {
        "labelled_steps": sum(map(len, seen.values())),
        "negative_steps": sum(value <= 0.5 for values in seen.values() for value in values),
        "distinct_labelled_steps": len(seen),
        "distinct_negative_steps": sum(np.mean(values) <= 0.5 for values in seen.values()),
        "conflicting_steps": sum(min(values) < max(values) for values in seen.values()),
    }


def test_distinct_steps_of_prm800k(shared: pathlib.Path) -> None:
    """Each label of the expanded corpus, and each once. 26 steps have labels that differ."""
    names = ("labelled", "negative", "distinct_labelled", "distinct_negative")
    expected = {"phase1_train": (622_860, 19_656, 44_947, 16_881, 26), "phase1_test": (53_734, 1_970, 4_825, 1_698, 0)}
    for part, numbers in expected.items():
        found = distinct_counts(read(shared / "data" / "prm800k" / f"{part}.jsonl"))
        assert (*(found[f"{name}_steps"] for name in names), found["conflicting_steps"]) == numbers


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_distinct_tokens_are_the_nodes_of_the_prefix_tree(sequences: list[list[int]]) -> None:
    nodes = {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert distinct_prefix_tokens([np.array(sequence, np.int32) for sequence in sequences]) == len(nodes)


def test_lengths_cuts_and_sharing() -> None:
    solutions = [
        Trajectory("qq", ("aa", "bb"), [1, 0], "f:1"),  # qqaa_bb_: 8 tokens
        Trajectory("qq", ("aa", "ccc"), [1, 0], "f:1"),  # qqaa_ccc_: 9, the second window is one over 8
        Trajectory("qq", ("ddddddd",), [1], "f:1"),  # 10: no window fits
        Trajectory("qq", ("aa", "eeee"), [None, 1], "f:2"),  # 10: the window that fits has no label
        Trajectory("qq", ("aa",), [1], "f:3"),  # 5, shared with f:1, but another record
    ]
    assert counted(solutions, 8) == {
        "max_length": 8,
        "lengths": {"0": 5, "5": 5, "25": 8, "50": 9, "75": 10, "90": 10, "95": 10, "99": 10, "100": 10},
        "truncated": 3,
        "windows_cut": 3,
        "skipped": {"no window fits": 1, "no label left": 1},
        "expanded": 8 + 5 + 5,
        "distinct": 8 + 5,
        "redundant_prefix_share": pytest.approx(1 - 13 / 18, abs=1e-6),
    }
    assert counted([], 8)["lengths"]["50"] == 0


@pytest.mark.parametrize(("batch", "largest"), [(1, 4096), (3, 4096), (256, 4096)])
def test_batches_do_not_change_the_counts(monkeypatch, batch: int, largest: int) -> None:
    solutions = [
        Trajectory("q" * (1 + record), ("ab"[: 1 + row % 2], "c"), [1, 0], f"f:{record}")
        for record in range(5)
        for row in range(1 + record)
    ]
    whole = counted(solutions, 100)
    monkeypatch.setattr(corpus_report, "_BATCH", batch)
    assert counted(solutions, 100) == whole


def test_a_record_without_end_is_counted_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(corpus_report, "LARGEST_RECORD", 2)
    monkeypatch.setattr(corpus_report, "_BATCH", 2)
    same = [Trajectory("q", ("a",), [1], "f:1")] * 6
    assert counted(same, 100)["distinct"] == 3 * 3


def test_agreement_with_what_the_encoder_cuts(shared: pathlib.Path) -> None:
    from cfprm_jax.data import encoding

    tokenizer = encoding.load_tokenizer(shared / "data/tokenizers/qwen2.5")
    config = EncodingConfig(max_length=200)
    counts = TokenCounts(encoding.Encoder(tokenizer, unlimited(config)), config.max_length)
    solutions = list(read(shared / "data/prm800k/original_samples.jsonl"))
    for solution in solutions:
        counts.add(solution)
    cut = encoding.Encoder(tokenizer, config).encode_many([(t.question, t.steps, t.labels) for t in solutions])
    found = counts.as_dict()
    assert found["windows_cut"] == sum(encoded.steps_cut for encoded in cut) > 0
    assert found["truncated"] == sum(encoded.steps_cut > 0 for encoded in cut)
    kept = [encoded for encoded in cut if len(encoded.step_positions)]
    assert found["skipped"] == {"no window fits": len(cut) - len(kept), "no label left": 0}
    assert found["expanded"] == sum(len(encoded.tokens) for encoded in kept)
    # The records are of different questions, so one tree over all of them shares the template's head besides.
    shared_head = found["distinct"] - distinct_prefix_tokens([encoded.tokens for encoded in kept])
    assert 0 <= shared_head < 5 * 40


def test_the_sharing_that_was_measured_on_real_data(shared: pathlib.Path) -> None:
    from cfprm_jax.data import encoding

    tokenizer = encoding.load_tokenizer(shared / "data/tokenizers/qwen2.5")
    counts = TokenCounts(encoding.Encoder(tokenizer, unlimited(EncodingConfig())), 2048)
    for solution in read(shared / "data/prm800k/phase1_test.jsonl"):
        counts.add(solution)
    found = counts.as_dict()
    assert found["expanded"] / found["distinct"] == pytest.approx(12.2, abs=0.1)
