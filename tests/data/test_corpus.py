"""The corpus cache: built once, found again, never half there, and honest about what it holds."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading

import numpy as np
import pytest

from cfprm_jax.config import EncodingConfig, GranularityConfig, ReadConfig
from cfprm_jax.data import corpus_build
from cfprm_jax.data.corpus import Corpus, open_corpus
from cfprm_jax.data.corpus_report import TokenCounts, unlimited
from cfprm_jax.data.encoding import Encoder, load_tokenizer
from cfprm_jax.data.formats import read
from cfprm_jax.data.partition import shared_forest
from cfprm_jax.data.windows import merge
from cfprm_jax.errors import UserError

ENCODING = EncodingConfig(system_prompt="S", max_length=200)
COARSE = GranularityConfig(c_max=2)
# Questions a and b have two solutions each; c one of a single step.
ROWS = [
    {"prompt": "a", "completions": ["x", "y", "z"], "labels": [1, 0.5, 0], "source": "r0"},
    {"prompt": "a", "completions": ["x", "q"], "labels": [1, None], "source": "r0"},
    {"prompt": "b", "completions": ["x", "y"], "labels": [1, 1], "source": "r1"},
    {"prompt": "b", "completions": ["w", "y"], "labels": [0, 1], "source": "r1"},
    {"prompt": "c", "completions": ["x"], "labels": [0], "source": "r2"},
]


@pytest.fixture
def data(tmp_path, make_rows):
    path = make_rows(tmp_path / "rows.jsonl", ROWS)
    # Old enough that the hash of its content is kept.
    os.utime(path, (1e9, 1e9))
    return path


@pytest.fixture
def opened(data, tokenizer, tmp_path):
    """open_corpus on the rows, with what a test changes."""

    def call(path=data, read=None, granularities=COARSE, encoding=ENCODING, tokenizer=tokenizer, **more) -> Corpus:
        return open_corpus(
            path, read or ReadConfig(), granularities, encoding, tokenizer, cache_dir=tmp_path / "cache", **more
        )

    return call


def never(*args, **kwargs):
    raise AssertionError("built again")


def test_labels_that_are_there_twice_are_counted_once(opened):
    """The first step of question a is one step of two solutions; at two steps a window nothing is."""
    found = {g: opened().report["granularities"][g] for g in ("1", "2")}
    names = ("labelled_steps", "negative_steps", "distinct_labelled_steps", "distinct_negative_steps")
    assert [found["1"][name] for name in names] == [9, 4, 8, 4]
    assert [found["2"][name] for name in names] == [4, 2, 4, 2]
    assert found["1"]["conflicting_steps"] == found["2"]["conflicting_steps"] == 0


def test_records_of_one_question_have_one_number(opened):
    corpus = opened()
    assert [corpus[1].question(i) for i in range(5)] == [corpus[2].question(0)] * 2 + [corpus[2].question(1)] * 2 + [
        corpus[1].question(4)
    ]
    assert len({corpus[1].question(i) for i in range(5)}) == 3


def test_a_source_of_two_questions_is_two_records(opened, make_rows, tmp_path):
    rows = [{"prompt": q, "completions": ["x", "y"], "labels": [1, 0], "source": "s"} for q in ("a", "a", "b")]
    corpus = opened(make_rows(tmp_path / "two.jsonl", rows))
    assert corpus[1].record_starts.tolist() == [0, 2, 3]
    assert corpus[1].question(0) == corpus[1].question(1) != corpus[1].question(2)


def test_it_holds_what_the_encoder_gives(opened, data, tokenizer):
    corpus = opened()
    encoder = Encoder(tokenizer, ENCODING)
    from cfprm_jax.data import read

    trajectories = list(read(data))
    assert corpus.granularities == (1, 2)
    assert [corpus.num_trajectories(g) for g in (1, 2)] == [5, 3]
    cut = {1: trajectories, 2: [merge(trajectories[i], 2) for i in (0, 2, 3)]}
    for granularity, samples in cut.items():
        assert len(corpus[granularity]) == len(samples)
        for i, sample in enumerate(samples):
            expected, found = encoder.encode(sample.question, sample.steps, sample.labels), corpus[granularity][i]
            for name in ("tokens", "step_positions", "labels"):
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
                assert getattr(found, name).dtype == getattr(expected, name).dtype
            assert corpus.source(granularity, i) == sample.source
    assert corpus.max_steps == 3
    assert corpus.max_tokens == max(len(encoder.encode(t.question, t.steps).tokens) for t in trajectories)
    with pytest.raises(IndexError):
        corpus[1][5]
    with pytest.raises(UserError, match="granularity 3 is not in the corpus, which has 1, 2"):
        corpus[3]


def test_the_report_counts_everything(opened, tokenizer):
    report = opened().report
    assert report["files"] == {"rows.jsonl": "stepwise"}
    assert (report["rows"], report["trajectories"], report["bad_rows"]) == (5, 5, [])
    fine, coarse = (report["granularities"][g] for g in ("1", "2"))
    assert fine["labels"] == {"positive": 5, "negative": 3, "soft": 1, "unlabelled": 1}
    # The second solution of a is [1, None]: its window of two takes the label of its last step, which is none.
    assert coarse["labels"] == {"positive": 2, "negative": 1, "soft": 1, "unlabelled": 0}
    assert (fine["trajectories"], fine["records"], fine["steps"]) == (5, 3, 10)
    assert fine["skipped"] == {}
    assert coarse["skipped"] == {"no labelled step": 1, "no window at this granularity": 1}
    assert (fine["truncated"], fine["windows_cut"]) == (0, 0)

    encoder = Encoder(tokenizer, ENCODING)
    tokens = [encoder.encode(row["prompt"], row["completions"]).tokens for row in ROWS]
    lengths = sorted(map(len, tokens))
    assert fine["tokens_expanded"] == sum(lengths)
    assert fine["lengths"]["0"] == lengths[0]
    assert fine["lengths"]["50"] == lengths[2]
    assert fine["lengths"]["100"] == lengths[-1]
    distinct = sum(shared_forest([tokens[i] for i in record]).size for record in ((0, 1), (2, 3), (4,)))
    assert fine["tokens_distinct"] == distinct
    assert fine["redundant_prefix_share"] == round(1 - distinct / sum(lengths), 6)
    json.dumps(report)


def test_prepare_counts_the_same_distinct_tokens(opened, make_rows, tmp_path, tokenizer):
    """Of a corpus whose "source" names the data set: a record is what has one question, too."""
    rows = [{**row, "source": "set"} for row in ROWS]
    path = make_rows(tmp_path / "rows.jsonl", rows)
    counts = TokenCounts(Encoder(tokenizer, unlimited(ENCODING)), ENCODING.max_length)
    for trajectory in read(path):
        counts.add(trajectory)
    fine = opened(path).report["granularities"]["1"]
    assert fine["records"] > 1
    assert counts.as_dict()["distinct"] == fine["tokens_distinct"]


def test_what_is_cut_and_what_is_skipped_is_counted_with_its_reason(opened, make_rows, tmp_path, tokenizer):
    prompt = len(Encoder(tokenizer, ENCODING).encode("a", []).tokens)
    rows = [
        {"prompt": "a", "completions": ["1234", "1234", "1234"], "labels": [1, 1, 0]},  # two windows fit
        {"prompt": "a", "completions": ["1", "1", "1234567890"], "labels": [None, None, 1]},  # the label is cut
        {"prompt": "a", "completions": ["123456789012"], "labels": [1]},  # not one window fits
        {"prompt": "a" * 40, "completions": ["1"], "labels": [1]},
        {"prompt": "a", "completions": ["1"], "labels": [None]},
    ]
    path = make_rows(tmp_path / "long.jsonl", rows)
    encoding = dataclasses.replace(ENCODING, max_length=prompt + 12)
    corpus = opened(path, granularities=GranularityConfig(), encoding=encoding)
    fine = corpus.report["granularities"]["1"]
    assert fine["skipped"] == {
        "prompt longer than max_length": 1,
        "no window within max_length": 1,
        "no label left after truncation": 1,
        "no labelled step": 1,
    }
    assert (fine["trajectories"], fine["truncated"], fine["windows_cut"]) == (1, 1, 1)
    assert corpus[1][0].labels.tolist() == [1, 1]
    assert corpus[1][0].steps_cut == 1


def test_a_second_start_finds_it(opened, monkeypatch):
    first = opened()
    monkeypatch.setattr(corpus_build, "build", never)
    again = opened()
    assert (again.fingerprint, again.report) == (first.fingerprint, first.report)
    np.testing.assert_array_equal(again[1][3].tokens, first[1][3].tokens)


def test_another_path_and_another_order_of_granularities_find_it_too(opened, data, tmp_path, monkeypatch):
    first = opened()
    monkeypatch.setattr(corpus_build, "build", never)
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(data, tmp_path / "elsewhere" / "rows.jsonl")
    assert opened(copy).fingerprint == first.fingerprint
    assert opened(granularities=GranularityConfig(granularities=("1", "2"))).fingerprint == first.fingerprint


def test_whatever_the_tokens_depend_on_changes_the_fingerprint(opened, data, make_rows, make_tokenizer, tmp_path):
    other_file = make_rows(tmp_path / "other.jsonl", ROWS)
    other_vocabulary = load_tokenizer(make_tokenizer(tmp_path / "tokenizer", words=("xy",)))
    variants = [
        opened(),
        opened(other_file),
        opened([data, other_file]),
        opened(read=ReadConfig(max_bad_rows=1)),
        opened(granularities=GranularityConfig()),
        opened(granularities=GranularityConfig(c_max=2, window_tail="drop")),
        opened(granularities=GranularityConfig(c_max=2, window_stride="1")),
        opened(encoding=dataclasses.replace(ENCODING, max_length=100)),
        opened(encoding=dataclasses.replace(ENCODING, system_prompt="T")),
        opened(encoding=dataclasses.replace(ENCODING, step_separator="|")),
        opened(tokenizer=other_vocabulary),
        opened(questions="train", held_out_fraction=0.1),
    ]
    make_rows(data, [*ROWS, ROWS[0]])
    variants.append(opened())
    assert len({corpus.fingerprint for corpus in variants}) == len(variants)
    # The name of a file is in the names of sources, but nothing that a run computes depends on it.
    assert variants[0].identity == variants[1].identity
    assert len({json.dumps(corpus.identity) for corpus in variants}) == len(variants) - 1


def test_the_hash_of_a_file_is_kept_until_the_file_changes(opened, data, tmp_path, make_rows):
    first = opened()
    kept = tmp_path / "cache" / "contents.json"
    known = json.loads(kept.read_text())
    assert list(known["content"]) == [str(data.resolve())]
    # Same size, another content, another modification time.
    make_rows(data, [{**row, "prompt": row["prompt"].upper()} for row in ROWS])
    assert opened().fingerprint != first.fingerprint
    # That file is new: it could change again within the tick of its clock, so its hash is not kept.
    assert json.loads(kept.read_text()) == known
    kept.write_text("{")
    assert opened().fingerprint != first.fingerprint


def test_a_hash_that_was_kept_and_has_changed_is_not_believed(opened, tmp_path):
    first = opened()
    kept = tmp_path / "cache" / "contents.json"
    digest = first.identity["content of training file 1"]
    kept.write_text(kept.read_text().replace(digest, "0" * 64))
    assert opened().fingerprint == first.fingerprint


def test_a_build_that_fails_leaves_nothing(opened, data, tmp_path, make_rows):
    make_rows(data, [*ROWS, {"prompt": "d", "completions": ["x"], "labels": [1.7]}])
    with pytest.raises(UserError, match=r"rows.jsonl:6"):
        opened()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name != "contents.json"]


def test_builds_of_the_same_corpus_at_once_do_not_disturb_each_other(opened, tmp_path):
    found, errors = [], []

    def start():
        try:
            found.append(opened())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert {len(corpus[1]) for corpus in found} == {5}
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_the_order_of_a_record_is_depth_first(opened):
    corpus = opened(granularities=GranularityConfig())
    reader = corpus[1]
    assert reader.record_starts.tolist() == [0, 2, 4, 5]
    for begin, end in ((0, 2), (2, 4), (4, 5)):
        places = reader.order[begin:end].tolist()
        assert sorted(places) == list(range(begin, end))
        tokens = [reader[place].tokens.tolist() for place in places]
        assert tokens == sorted(tokens)


def test_a_record_without_end_is_stored_as_several(opened, make_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_build, "LARGEST_RECORD", 4)
    monkeypatch.setattr(corpus_build, "_BATCH", 3)
    rows = [{"prompt": "a", "completions": [str(i)], "labels": [1], "source": "r"} for i in range(10)]
    corpus = opened(make_rows(tmp_path / "many.jsonl", rows), granularities=GranularityConfig())
    assert corpus[1].record_starts.tolist() == [0, 4, 8, 10]
    assert {corpus.source(1, i) for i in range(10)} == {"r"}


def test_no_question_is_on_both_sides_of_a_split(opened, make_rows, tmp_path, tokenizer):
    rows = [{"prompt": f"q{i % 50}", "completions": [f"s{i}"], "labels": [1], "source": f"r{i}"} for i in range(100)]
    path = make_rows(tmp_path / "questions.jsonl", rows)
    plain = GranularityConfig()
    sides = {
        side: opened(path, granularities=plain, questions=side, held_out_fraction=0.3) for side in ("train", "held_out")
    }
    questions = {side: {int(c.source(1, i)[1:]) % 50 for i in range(len(c[1]))} for side, c in sides.items()}
    assert not questions["train"] & questions["held_out"]
    assert questions["train"] | questions["held_out"] == set(range(50))
    assert 5 <= len(questions["held_out"]) <= 25
    assert sum(len(corpus[1]) for corpus in sides.values()) == 100
    assert sides["train"].report["trajectories_of_other_questions"] == len(sides["held_out"][1])


def test_nothing_to_train_on_is_an_error_but_nothing_held_out_is_not(opened, make_rows, tmp_path):
    path = make_rows(tmp_path / "one.jsonl", [ROWS[4]])
    with pytest.raises(UserError, match=r"^one.jsonl: no trajectory to train on at granularity 2 \(no window .*: 1\)"):
        opened(path)
    with pytest.raises(UserError, match=r"1 are of questions that --eval_fraction holds out"):
        opened(path, granularities=GranularityConfig(), questions="train", held_out_fraction=1.0)
    empty = opened(path, granularities=GranularityConfig(), questions="held_out", held_out_fraction=0.0)
    assert len(empty[1]) == 0
    with pytest.raises(UserError, match="questions 'some' is not among: all, train, held_out"):
        opened(questions="some")


def test_progress_is_reported(opened, make_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_build, "_BATCH", 10)
    rows = [{"prompt": f"q{i}", "completions": ["s"], "labels": [1]} for i in range(100)]
    shares: list[float] = []
    opened(make_rows(tmp_path / "r.jsonl", rows), granularities=GranularityConfig(), progress=shares.append)
    assert len(shares) >= 9
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1


def test_bad_rows_that_are_allowed_are_listed(opened, data, make_rows):
    make_rows(data, [*ROWS, {"prompt": "d", "completions": ["x"], "labels": [1, 0]}])
    report = opened(read=ReadConfig(max_bad_rows=1)).report
    assert report["rows"] == 6
    assert len(report["bad_rows"]) == 1
    assert report["bad_rows"][0].startswith("rows.jsonl:6: ")


def test_a_question_is_on_one_side_in_all_its_spellings():
    plain = [f"What is ${n}$ + 1?" for n in range(200)]
    held_out = [corpus_build.is_held_out(question, 0.3) for question in plain]
    assert 30 < sum(held_out) < 90
    for spelling in ("{}\n", "  {}", "{}\u00a0", "{}".replace("$", "")):
        spelled = [spelling.format(question) for question in plain]
        assert [corpus_build.is_held_out(question, 0.3) for question in spelled] == held_out
    assert [corpus_build.is_held_out(q.replace(" ", "\u00a0").replace("$", ""), 0.3) for q in plain] == held_out


def test_the_cases_two_spellings_are_on_one_side(shared):
    path = shared / "cases" / "more" / "K09_question_with_trailing_newline.jsonl"
    questions = {trajectory.question for trajectory in read(path)}
    assert len({question.strip() for question in questions}) < len(questions)
    for fraction in np.linspace(0, 1, 101):
        sides = {question: corpus_build.is_held_out(question, fraction) for question in questions}
        assert all(side == sides.get(question.strip(), side) for question, side in sides.items())
