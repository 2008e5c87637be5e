"""The model card: what it claims about a run, and that its code and commands are those that work."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import sys

import numpy as np
import pytest

import cfprm_jax
from cfprm_jax import synthetic, train
from cfprm_jax.checkpoints.saving import Checkpoints
from cfprm_jax.config import EncodingConfig, GranularityConfig, ReadConfig
from cfprm_jax.data.corpus import open_corpus
from cfprm_jax.data.encoding import Encoder, load_tokenizer, marker_id
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.huggingface.export import FORMATS
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.run import model_card, summary, training_record
from cfprm_jax.run.directory import write_corpus
from cfprm_jax.runtime import config_files

QUESTION, STEPS = "What is 2 + 3 * 4?", ["First, 3 * 4 = 12.", "Then 2 + 12 = 14. The answer is \\boxed{14}."]
ROW = {"n": 8, "method": "best_of_n", "aggregation": "min", "accuracy": 0.75, "ci95": [0.7, 0.8]}
RESULTS = {
    "config": {"draws": 0, "grader": "none", "seed": 0},
    "questions": 250,
    "pool": 8,
    "unscored": 0,
    "rows": [{**ROW, "draws": 0, "draw_std": None}],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The files of a small arithmetic world."""
    sizes = synthetic.WorldConfig(
        train_problems=2, held_out_problems=2, solutions_per_problem=2, candidates_per_problem=2
    )
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 0, sizes)


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """A run directory with two checkpoints, as far as a card looks at it."""
    from cfprm_jax import flags

    directory = tmp_path_factory.mktemp("run")
    options = config_files.as_dict(flags.parse(train.TrainConfig, ["train", "--c_max=2", "--train_data=a/b.jsonl"]))
    options["model"] = "/cache/models--Qwen--Qwen2.5-Math-7B/snapshots/0a1b"
    corpus = open_corpus(
        (str(world.train),),
        ReadConfig(),
        GranularityConfig(c_max=2),
        EncodingConfig(max_length=64, system_prompt=""),
        load_tokenizer(world.model),
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    write_corpus(directory, corpus.report)
    meta = {"config": options, "fingerprint": {"steps of the run": 4}}
    checkpoints = Checkpoints(directory, keep=2)
    for step in (2, 4):
        checkpoints.save(step, {"params": np.zeros(1)}, {}, meta)
    checkpoints.close()
    lines = [
        *({"step": step, "granularity": 2 if step < 3 else 1, "trajectories": 10 * step} for step in (1, 2, 3, 4)),
        {"step": 2, "eval_loss": 0.5, "eval_auroc": None, "eval_positives": 1000.0},
        {"step": 4, "eval_loss": 0.25, "eval_auroc": 0.75, "eval_positives": 1000.0},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "l')
    (directory / "best_of_n").mkdir()
    (directory / "best_of_n" / "results.json").write_text(json.dumps(RESULTS))
    return directory


def exported(format="token_classification", encoding=None, marker_id=151651, model_type="qwen2"):
    return model_card.ExportedPRM(
        name="prm",
        format=format,
        dtype="float32",
        encoding=encoding or EncodingConfig(),
        marker_id=marker_id,
        model_type=model_type,
    )


def card_of(training, format="token_classification", encoding=None, base_model=""):
    return model_card.render(exported(format, encoding), training, base_model)


def test_the_family_of_the_backbone_is_named():
    text = model_card.render(exported(model_type="llama"), training_record.Training(1))
    assert "LlamaForTokenClassification" in text and "Qwen2For" not in text and "\n- llama\n" in text


def test_the_newest_checkpoint_with_everything(run):
    training = training_record.read_training(run)
    assert training.trained == {"2": 30, "1": 70}
    base_model = training_record.hub_name(training.options["model"], {})
    assert base_model == "Qwen/Qwen2.5-Math-7B"
    text = card_of(training, base_model=base_model)
    for line in (
        "| checkpoint | after step 4 of 4 |",
        "| backbone | Qwen/Qwen2.5-Math-7B |",
        "| windows | C = 2, 1 (coarse_to_fine), one pass over the data at each |",
        "| loss | q_ranking, margin 4.0 |",
        "| data | `b.jsonl` |",
        "| batch | 32 trajectories of at most 2,048 tokens |",
        "| trajectories trained on | 30 at C = 2, 70 at C = 1 |",
        *(f"* {line}" for line in summary.corpus(dict(training.data))),
        "| loss | 0.2500 |",
        "| auroc | 0.7500 |",
        "| positives | 1,000 |",
        "best of n, min",
    ):
        assert line in text, line


def test_passes_of_a_run_with_one_granularity(run):
    training = training_record.read_training(run)
    options = {**training.options, "granularities": ["1"], "epochs_per_granularity": 3}
    assert "| windows | C = 1, 3 passes over the data |" in card_of(dataclasses.replace(training, options=options))


def test_a_run_in_another_dtype_is_compared_in_that_of_the_export(run):
    training = training_record.read_training(run)
    for dtype, noted in (("bfloat16", True), ("float32", False)):
        text = card_of(dataclasses.replace(training, options={**training.options, "dtype": dtype}))
        assert ("score --checkpoint=RUN --dtype=float32" in text) is noted


def test_an_older_checkpoint_does_not_boast_of_the_newest(run):
    training = training_record.read_training(run / "checkpoints" / "2")
    assert (training.step, training.trained) == (2, {"2": 30})
    text = card_of(training)
    assert "after step 2 of 4" in text and "| loss | 0.5000 |" in text and "| auroc | none |" in text
    assert "Best-of-N" not in text and "base_model" not in text
    assert "| backbone | 0a1b |" in text


@pytest.mark.parametrize(
    ("options", "backbone"),
    [
        ({"model": "synthetic", "init": "random"}, "synthetic, from random weights"),
        ({"model": "synthetic", "init": "pretrained"}, "synthetic, from random weights"),
        ({"model": "models/Qwen2.5-0.5B", "init": "random"}, "Qwen2.5-0.5B, from random weights"),
        ({"model": "models/Qwen2.5-0.5B", "init": "pretrained"}, "Qwen2.5-0.5B"),
    ],
)
def test_random_weights_at_the_start_are_named(run, options, backbone):
    training = training_record.read_training(run)
    training = dataclasses.replace(training, options={**training.options, **options})
    assert f"| backbone | {backbone} |" in card_of(training)
    random = backbone.endswith("random weights")
    base_model = training_record.base_model(training, {"_name_or_path": "Qwen/Qwen2.5-0.5B"})
    assert (training.random_start, base_model) == (random, "" if random else "Qwen/Qwen2.5-0.5B")


def test_a_checkpoint_that_was_not_evaluated(run):
    """The card has a line in place of metrics; not where it has any, nor where it has no description of the run."""
    training = training_record.read_training(run)
    note = "\n## Evaluation\n\nThis checkpoint was not evaluated: its training run has no metrics of held-out questions"
    for held_out, best_of_n, noted in (({}, {}, True), (training.held_out, {}, False), ({}, RESULTS, False)):
        text = card_of(dataclasses.replace(training, held_out=held_out, best_of_n=best_of_n))
        assert (note in text) is noted and ("Held-out" in text) is bool(held_out)
    assert note not in card_of(training_record.Training(step=7))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.json", '{"rows": 3, "fil', "not readable as JSON"),
        ("corpus.json", "[1]", "expected a JSON object, found"),
        ("corpus.json", "{}", "damaged, or written by another program: KeyError"),
        ("best_of_n/results.json", "", "not readable as JSON"),
        ("best_of_n/results.json", '{"config": 3, "pool": 4}', "damaged, or written by another program: TypeError"),
    ],
)
def test_a_damaged_file_beside_a_run_is_named(run, tmp_path, file, content, message):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / file).write_text(content)
    with pytest.raises(UserError, match=f"{copy / file}: {message}"):
        training_record.read_training(copy)


def test_lines_of_metrics_that_are_damaged_are_passed_over(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "metrics.jsonl"
    path.write_text('[1]\n{"loss": 1}\nnull\n{"step": 1, "trajectories": 5}\n' + path.read_text())
    assert training_record.read_training(copy) == training_record.read_training(run)


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"loss": "bce", "negative_weight": 0.25}, "bce, steps labelled 0.5 or less weighted 0.25"),
        ({"loss": "mse"}, "mse"),
        ({"label_weight": "node"}, "q_ranking, margin 4.0, by node"),
        (
            {"label_weight": "node", "ranking_negatives": "question"},
            "q_ranking, margin 4.0, by node, against all negative steps of the question",
        ),
    ],
)
def test_all_that_changes_the_loss_is_named(run, options, loss):
    training = training_record.read_training(run)
    assert f"| loss | {loss} |" in card_of(dataclasses.replace(training, options={**training.options, **options}))


def test_batches_of_several_granularities_are_named(run):
    training = dataclasses.replace(training_record.read_training(run), trained={"mixed": 1200})
    assert "| trajectories trained on | 1,200 of all C, mixed in each batch |" in card_of(training)


def test_a_run_without_a_description():
    text = card_of(training_record.Training(step=7))
    assert "| checkpoint | after step 7 |" in text
    assert "Held-out" not in text and "Best-of-N" not in text and text.endswith("\n")


@pytest.mark.parametrize("format", FORMATS)
def test_front_matter_is_yaml_without_a_licence(format):
    yaml = pytest.importorskip("yaml")
    _, front, _ = card_of(training_record.Training(1), format, base_model="Qwen/Qwen2.5-7B").split("---\n", 2)
    found = yaml.safe_load(front)
    assert found.keys() == {"base_model", "library_name", "pipeline_tag", "tags"}
    assert found["library_name"] == ("transformers" if format == "token_classification" else "vllm")
    assert "process-reward-model" in found["tags"]


@pytest.mark.parametrize(
    ("backbone", "raw", "expected"),
    [
        ("models/Qwen2.5-7B", {}, ""),
        ("x", {"_name_or_path": "Qwen/Qwen2.5-7B"}, "Qwen/Qwen2.5-7B"),
        ("x", {"_name_or_path": "/home/me/Qwen2.5-7B"}, ""),
        ("x", {"_name_or_path": "runs/mine"}, ""),
        ("", {}, ""),
    ],
)
def test_only_a_certain_name_is_a_base_model(backbone, raw, expected):
    assert training_record.hub_name(backbone, raw) == expected


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def small(world):
    """Configuration, random parameters, tokenizer and encoding over the arithmetic world's tokenizer."""
    import jax

    from cfprm_jax.models.parameters import init_params

    config = PRMConfig(loading.read_config(world.model)[0])
    encoding = EncodingConfig(max_length=400, system_prompt='Be "exact"\\, be quick.')
    return config, init_params(config, jax.random.key(0)), load_tokenizer(world.model), encoding


@pytest.mark.parametrize(
    ("format", "pooled"), [*((format, True) for format in FORMATS), ("token_classification", False)]
)
def test_the_code_of_the_card_runs(format, pooled, small, tmp_path, monkeypatch):
    """pooled: whether vLLM applies step pooling to the class."""
    config, params, tokenizer, encoding = small
    marker = marker_id(tokenizer, encoding.marker)
    card = model_card.render(exported(format, encoding, marker), training_record.Training(1))
    loading.export(
        tmp_path / "prm", params, config, tokenizer, encoding, format=format, dtype="float32", texts={"README.md": card}
    )
    monkeypatch.chdir(tmp_path)
    text = (tmp_path / "prm" / "README.md").read_text()
    first, *second, served = blocks(text, "python")
    space = {}
    exec(first, space)
    encoded = Encoder(tokenizer, encoding).encode(QUESTION, STEPS)
    assert space["ids"] == encoded.tokens.tolist() and space["marker"] == marker
    expected = cfprm_jax.load(tmp_path / "prm").score(QUESTION, STEPS)
    if format == "token_classification":
        pytest.importorskip("torch")
        exec(second[0], space)
        np.testing.assert_allclose(space["scores"], expected, atol=1e-5)
    (command,) = blocks(text, "bash")
    vllm, serve, directory, *options = shlex.split(command)
    assert [vllm, serve, directory, *options[:4]] == [
        "vllm",
        "serve",
        "prm",
        "--runner",
        "pooling",
        "--dtype",
        "float32",
    ]
    pooler = json.loads(options[5])
    z = np.log(expected) - np.log1p(-np.asarray(expected))
    if format != "reward_model":
        assert pooler == {"pooling_type": "STEP", "step_tag_id": marker}
        answer = [[1 - score, score] for score in expected]
        if not pooled:
            answer = [[0.5, 0.5] for _ in space["ids"]]
            for position, score in zip(encoded.step_positions, expected, strict=True):
                answer[position] = [1 - score, score]
    else:
        assert pooler == {"pooling_type": "ALL"}
        answer = [[9.0] for _ in space["ids"]]
        for position, value in zip(encoded.step_positions, z, strict=True):
            answer[position] = [value]

    class Requests:
        """Answers as vLLM's /pooling does."""

        @staticmethod
        def post(url, json):
            assert url.endswith("/pooling")
            assert (json["model"], json["task"], json["input"]) == ("prm", "token_classify", encoded.tokens.tolist())
            return Requests

        @staticmethod
        def json():
            return {"data": [{"data": answer}]}

    monkeypatch.setitem(sys.modules, "requests", Requests)
    exec(served, space)
    np.testing.assert_allclose(space["scores"], expected, rtol=1e-5)
