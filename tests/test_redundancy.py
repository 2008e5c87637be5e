"""The redundancy output: its targets from ratings to batches, its loss, its scores, and its exports."""

from __future__ import annotations

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import cfprm_jax
from cfprm_jax import flags, prepare, synthetic
from cfprm_jax.config import EncodingConfig, LossConfig, ModelConfig
from cfprm_jax.data import formats
from cfprm_jax.data.corpus_files import GranularityReader, GranularityWriter
from cfprm_jax.data.distinct import distinct_redundancy, distinct_steps, padded
from cfprm_jax.data.encoding import Encoded, Encoder, load_tokenizer
from cfprm_jax.data.packing import pack
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.data.windows import merge, samples
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.load import open_prm
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.rows import ScoringCounts, score_rows
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.losses import bce, loss_function
from cfprm_jax.models import prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import init_params
from cfprm_jax.run import model_card, training_record, warm_start
from cfprm_jax.run.data import refuse_without_redundancy
from cfprm_jax.run.export import without_redundancy
from cfprm_jax.training import step

pytestmark = pytest.mark.quick_compile

NAN = float("nan")
NETWORK = PRMConfig(BackboneConfig(64, 16, 24, 2, 4, 2, 4, rope_theta=100.0, initializer_range=0.3), redundancy=True)


def assert_targets(found, expected):
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def completion(text, rating):
    return {"text": text, "rating": rating}


RECORD = {
    "question": {"problem": "q", "ground_truth_answer": "1"},
    "label": {
        "steps": [
            {
                "completions": [completion("a", 1), completion("again", 0), completion("wrong", -1)],
                "human_completion": None,
                "chosen_completion": 0,
            },
            {"completions": [completion("useless", 0)], "human_completion": {"text": "b"}, "chosen_completion": None},
            {"completions": [completion("c", None), completion("d", 0)], "chosen_completion": 0},
        ],
        "finish_reason": "solution",
    },
}


def test_ratings_become_targets(tmp_path):
    found = {t.steps[-1]: t for t in formats.read(write(tmp_path / "p.jsonl", [RECORD]))}
    assert_targets(found["again"].redundancy, [1])
    assert_targets(found["wrong"].redundancy, [NAN])
    assert_targets(found["useless"].redundancy, [0, 1])
    # A completion written by a human has no rating, and neither has an unrated completion.
    assert_targets(found["d"].redundancy, [0, NAN, 1])
    assert_targets(found["c"].redundancy, [0, NAN, NAN])
    rows = [{"problem": "q", "steps": ["a", "b", "c", "d"], "ratings": [1, 0, -1, None]}]
    (rated,) = formats.read(write(tmp_path / "r.jsonl", rows), neutral="negative")
    assert_targets(rated.redundancy, [0, 1, NAN, NAN])
    assert_targets(rated.labels, [1, 0, 0, NAN])


def test_prepare_keeps_them(tmp_path):
    source, out = write(tmp_path / "p.jsonl", [RECORD]), tmp_path / "out.jsonl"
    arguments = ["prepare", f"--input={source}", f"--output={out}", "--granularities=1,2"]
    assert flags.run(prepare.PrepareConfig, prepare.main, arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert next(row for row in rows if row["completions"][-1] == "d")["redundancy"] == [0, None, 1]
    # A row without any target does not have the field.
    assert "redundancy" not in next(row for row in rows if row["completions"] == ["wrong"])
    for row in rows:
        (again,) = formats.read(write(tmp_path / "one.jsonl", [row]))
        assert_targets(
            again.redundancy, [NAN if v is None else v for v in row.get("redundancy", [None] * len(again.steps))]
        )


@pytest.mark.parametrize(
    ("value", "message"),
    [([1], "row with 2 steps and 1 of redundancy"), ([1, 2], "redundancy 2 is outside"), (1, "expected a list")],
)
def test_bad_targets_are_named(tmp_path, value, message):
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0], "redundancy": value}
    with pytest.raises(UserError, match=message):
        list(formats.read(write(tmp_path / "bad.jsonl", [row])))


def test_a_window_is_redundant_where_all_of_it_is():
    trajectory = Trajectory("q", tuple("abcdefgh"), [1] * 8, "s", redundancy=[1, 1, 1, 0, 1, NAN, NAN, 0])
    assert_targets(merge(trajectory, 2).redundancy, [1, 0, NAN, 0])
    assert_targets(merge(trajectory, 1).redundancy, trajectory.redundancy)
    assert_targets(merge(trajectory, "whole").redundancy, [0])
    (_, shifted) = samples(trajectory, 2, stride="1")
    assert_targets(shifted.redundancy, [1, 1, 0, NAN, 0])
    assert_targets(merge(dataclasses.replace(trajectory, redundancy=[0.25, 0.5] * 4), 2).redundancy, [0.25] * 4)
    assert trajectory != dataclasses.replace(trajectory, redundancy=[0] * 8)
    assert_targets(Trajectory("q", ("a",), [1], "s").redundancy, [NAN])


def encoded(tokens, labels, redundancy):
    markers = [i for i, token in enumerate(tokens) if token == 9]
    arrays = (np.array(tokens, np.int32), np.array(markers, np.int32), np.array(labels, np.float32))
    return Encoded(*arrays, 0, None if redundancy is None else np.array(redundancy, np.float32))


FAMILY = [
    encoded([1, 2, 3, 9, 4, 9], [1, 1], [0, 1]),
    encoded([1, 2, 3, 9, 5, 9], [1, 0], [0, NAN]),
    encoded([1, 2, 3, 9, 4, 9, 6, 9], [1, 1, 1], [NAN, 0, NAN]),
    encoded([1, 7, 9], [NAN], None),
]


def test_files_keep_them(tmp_path):
    writer = GranularityWriter(tmp_path / "1")
    writer.add("s", "q", FAMILY)
    writer.close()
    reader = GranularityReader(tmp_path / "1", 1, writer.counts())
    for place, one in enumerate(FAMILY):
        assert_targets(reader[place].labels, one.labels)
        assert_targets(reader[place].redundancy, [NAN] if one.redundancy is None else one.redundancy)


def test_distinct_steps_have_the_mean_of_their_targets_once():
    nodes = np.asarray(distinct_steps(FAMILY, [0] * 4, 4, 3).nodes)
    assert_targets(
        distinct_redundancy(FAMILY, nodes), [[0, 0.5, NAN], [NAN, NAN, NAN], [NAN, NAN, NAN], [NAN, NAN, NAN]]
    )


def batch(once=False, packing="tree"):
    made = pack(FAMILY, packing, RowShapes(((4, 16),)), 4, 3)
    distinct = distinct_steps(FAMILY, [0] * 4, 4, 3)
    raw = padded([one.redundancy for one in FAMILY], 4, 3)
    second = distinct_redundancy(FAMILY, np.asarray(distinct.nodes)) if once else raw
    return made._replace(distinct=distinct, redundancy=second)


def forward(params, tokens, positions, ends):
    return prm.apply(NETWORK, params, tokens, positions, ends)


@pytest.fixture(scope="module")
def params():
    return init_params(NETWORK, jax.random.key(0))


@pytest.mark.parametrize("label_weight", ["trajectory", "node"])
@pytest.mark.parametrize("loss", ["bce", "mse", "q_ranking"])
def test_the_loss_is_that_of_the_steps_and_the_weighted_one_of_redundancy(params, loss, label_weight):
    config = LossConfig(loss=loss, label_weight=label_weight, redundancy_weight=0.25)
    data = batch(label_weight == "node")
    chosen = loss_function(config)
    outputs = step.step_logits(forward, params, data)
    assert outputs.shape == (4, 3, 2)
    value, sums = step.batch_loss(chosen, outputs, data, step.counts_of(chosen, data))
    total, count = chosen(outputs[..., 0], jnp.asarray(data.labels), data.distinct)
    known = ~np.isnan(data.redundancy)
    u, y = np.asarray(outputs[..., 1], np.float64)[known], data.redundancy[known].astype(np.float64)
    second = np.mean(y * np.logaddexp(0, -u) + (1 - y) * np.logaddexp(0, u))
    assert float(sums["redundancy_loss"]) == pytest.approx(second, rel=1e-6)
    assert float(value) == pytest.approx(float(total / count) + 0.25 * second, rel=1e-6)


@pytest.mark.parametrize("loss", ["bce", "q_ranking"])
@pytest.mark.parametrize("label_weight", ["trajectory", "node"])
def test_gradients_of_parts_are_those_of_the_whole(params, loss, label_weight):
    config = LossConfig(loss=loss, label_weight=label_weight, redundancy_weight=0.5)
    chosen, data = loss_function(config), batch(label_weight == "node", "none")
    state = step.TrainState(params, None, jnp.zeros((), jnp.int32))
    value, sums, whole = step._whole_gradients(state, data, forward, chosen)
    for gradients in (step._summed_gradients, step._joint_gradients):
        if chosen.joint and gradients is step._summed_gradients:
            continue
        again, other, parts = gradients(state, data, forward, chosen, 2)
        np.testing.assert_allclose(again, value, rtol=1e-6)
        np.testing.assert_allclose(other["redundancy_loss"], sums["redundancy_loss"], rtol=1e-6)
        for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
            # Sums in another order: eps of float32 on the scale of the largest entries that are added. Those of a bias,
            # a single number, are residuals of both signs over the number of steps, so up to 1/12.
            largest = float(jnp.abs(b).max()) if b.size > 1 else 1 / 12
            np.testing.assert_allclose(a, b, atol=2e-6 * largest)
    assert float(jnp.abs(whole["head"]["redundancy"]["kernel"]).max()) > 0


def test_a_batch_without_targets_adds_nothing(params):
    chosen = loss_function(LossConfig(loss="bce", redundancy_weight=1.0))
    data = batch()._replace(redundancy=np.full((4, 3), NAN, np.float32))
    outputs = step.step_logits(forward, params, data)
    value, sums = step.batch_loss(chosen, outputs, data, step.counts_of(chosen, data))
    total, count = bce(outputs[..., 0], jnp.asarray(data.labels))
    assert float(sums["redundancy_loss"]) == 0 and float(value) == pytest.approx(float(total / count))


def test_the_first_output_is_that_of_the_network_without_the_second(params):
    data = batch()
    plain = dataclasses.replace(NETWORK, redundancy=False)
    rows = (data.tokens, data.positions, data.subtree_end)
    np.testing.assert_array_equal(prm.apply(NETWORK, params, *rows)[..., 0], prm.apply(plain, params, *rows))
    # And a fresh network has the same weights with it and without.
    for a, b in zip(
        jax.tree.leaves(init_params(plain, jax.random.key(0))),
        jax.tree.leaves({**params, "head": {"output": params["head"]["output"]}}),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def report(redundant, useful):
    return {
        "files": {"p.jsonl": "prm800k"},
        "granularities": {"1": {"redundant_steps": redundant, "useful_steps": useful}},
    }


def test_a_corpus_without_such_ratings_is_refused_with_the_counts():
    refuse_without_redundancy(report(1, 1))
    for redundant, useful in ((0, 12960), (3, 0)):
        with pytest.raises(
            UserError, match=rf"p.jsonl has none of one kind \(C=1: {redundant:,} redundant, {useful:,}"
        ):
            refuse_without_redundancy(report(redundant, useful))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A small PRM with a redundancy output as a Hugging Face directory, and what it was made of."""
    folder = tmp_path_factory.mktemp("redundancy")
    world = synthetic.materialise(
        folder / "world",
        0,
        synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=2, candidates_per_problem=2),
    )
    config = PRMConfig(loading.read_config(world.model)[0], redundancy=True)
    params = init_params(config, jax.random.key(1))
    for name in ("output", "redundancy"):
        params["head"][name]["bias"] = jnp.full((1,), 0.5 if name == "output" else -0.25)
    tokenizer, encoding = load_tokenizer(world.model), EncodingConfig(max_length=96, system_prompt="")
    loading.export(folder / "prm", params, config, tokenizer, encoding, dtype="float32")
    return folder, world, config, params, tokenizer, encoding


def test_an_export_has_a_third_label_and_comes_back(exported):
    folder, _, config, params, *_ = exported
    raw = json.loads((folder / "prm" / "config.json").read_text())
    assert raw["num_labels"] == 3 and raw["id2label"] == {"0": "incorrect", "1": "correct", "2": "redundant"}
    assert json.loads((folder / "prm" / "prm.json").read_text())["redundancy"] is True
    again, _ = loading.load_params(folder / "prm", config)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    # What does not know of the output does not take the third label for anything else.
    with pytest.raises(UserError, match=r"score.*shape \[3"):
        loading.load_params(folder / "prm", dataclasses.replace(config, redundancy=False))


def test_transformers_gives_the_same_scores_and_redundancies(exported):
    folder, world, *_ = exported
    question = json.loads(world.candidates.read_text().splitlines()[0])
    steps = question["candidates"][0]["steps"]
    ours = cfprm_jax.load(folder / "prm")
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder / "prm", dtype=torch.float32).eval()
    solution = Encoder(*exported[4:]).encode(question["question"], steps)
    with torch.no_grad():
        logits = model(torch.tensor(solution.tokens[None].astype(np.int64))).logits[0, solution.step_positions.tolist()]
    scores, redundancy = logits[:, :2].softmax(-1)[:, 1], logits[:, 2].sigmoid()
    np.testing.assert_allclose(ours.score(question["question"], steps), scores, rtol=1e-5)
    np.testing.assert_allclose(ours.redundancy(question["question"], steps), redundancy, rtol=1e-5)


def test_score_writes_it_and_removes_another_models(exported):
    folder, world, config, params, tokenizer, encoding = exported
    rows = [json.loads(line) for line in world.candidates.read_text().splitlines()]
    rows[0]["candidates"].append({"steps": []})
    both, plain = (
        Scorer(open_prm(folder / "prm", "float32")),
        LoadedPRM(
            dataclasses.replace(config, redundancy=False),
            {**params, "head": {"output": params["head"]["output"]}},
            tokenizer,
            encoding,
            {},
        ),
    )
    found = [row for row, _ in score_rows([(copy.deepcopy(row), "s") for row in rows], both, ScoringCounts())]
    ours = cfprm_jax.load(folder / "prm")
    for row in found:
        for candidate in row["candidates"]:
            if not candidate["steps"]:
                assert candidate["step_redundancy"] is None and candidate["step_scores"] is None
                continue
            expected = ours.redundancy(row["question"], candidate["steps"])
            np.testing.assert_allclose(candidate["step_redundancy"], expected, rtol=1e-5)
    again = [row for row, _ in score_rows([(copy.deepcopy(row), "s") for row in found], Scorer(plain), ScoringCounts())]
    for row, other in zip(again, found, strict=True):
        for candidate, before in zip(row["candidates"], other["candidates"], strict=True):
            assert "step_redundancy" not in candidate
            if candidate["steps"]:
                np.testing.assert_allclose(candidate["step_scores"], before["step_scores"], rtol=1e-6)


def test_formats_without_room_are_refused_unless_it_is_left_out(exported, tmp_path):
    folder, _, config, params, tokenizer, encoding = exported
    for name in ("process_reward_model", "reward_model"):
        with pytest.raises(UserError, match=r"has no room for the redundancy output.*--drop_redundancy"):
            loading.export(tmp_path / name, params, config, tokenizer, encoding, format=name)
    without = without_redundancy(open_prm(folder / "prm", "float32"))
    loading.export(
        tmp_path / "out",
        without.params,
        without.config,
        tokenizer,
        encoding,
        format="process_reward_model",
        dtype="float32",
    )
    assert "redundancy" not in json.loads((tmp_path / "out" / "prm.json").read_text())
    question, steps = "1 + 1 =", ["2", "3"]
    np.testing.assert_allclose(
        cfprm_jax.load(tmp_path / "out").score(question, steps),
        cfprm_jax.load(folder / "prm").score(question, steps),
        rtol=1e-5,
    )
    with pytest.raises(UserError, match="this model has no redundancy output"):
        cfprm_jax.load(tmp_path / "out").redundancy(question, steps)


def test_a_warm_start_from_a_prm_with_or_without_it(exported, tmp_path):
    folder, _, config, params, tokenizer, encoding = exported
    with pytest.raises(UserError, match="has a redundancy output, which a run without --redundancy_weight would lose"):
        warm_start.adopt(folder / "prm", ModelConfig(), encoding, ())
    warm_start.adopt(folder / "prm", ModelConfig(), encoding, (), redundancy=True)
    plain = without_redundancy(open_prm(folder / "prm", "float32"))
    loading.export(tmp_path / "plain", plain.params, plain.config, tokenizer, encoding, dtype="float32")
    loaded, _ = loading.load_params(tmp_path / "plain", config, head_key=jax.random.key(3))
    np.testing.assert_array_equal(loaded["head"]["output"]["kernel"], params["head"]["output"]["kernel"])
    fresh = init_params(config, jax.random.key(3))["head"]["redundancy"]
    # The same draw, compiled by itself: the last bit may differ.
    np.testing.assert_allclose(loaded["head"]["redundancy"]["kernel"], fresh["kernel"], rtol=1e-6)
    with pytest.raises(UserError, match="no third label, which is the redundancy output"):
        loading.load_params(tmp_path / "plain", config)


def test_the_card_describes_how_to_read_it(exported):
    *_, encoding = exported
    training = training_record.Training(3)
    exported = model_card.ExportedPRM(
        name="x",
        format="token_classification",
        dtype="float32",
        encoding=encoding,
        marker_id=5,
        model_type="qwen2",
        redundancy=True,
    )
    card = model_card.render(exported, training)
    assert "A third label, `redundant`" in card and "redundancy = logits[:, 2].sigmoid().tolist()" in card
    assert "softmax(-1)[..., 1]" not in card
    plain = model_card.render(dataclasses.replace(exported, redundancy=False), training)
    assert "redundan" not in plain
