"""cfprm_jax.load: a PRM from a Hugging Face directory, a run of train, or one of its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfprm_jax
from cfprm_jax.checkpoints import saving
from cfprm_jax.checkpoints.model_files import write_model
from cfprm_jax.checkpoints.saving import Checkpoints
from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig, OptimizerConfig
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.load import open_prm
from cfprm_jax.inference.parts import model_fingerprint
from cfprm_jax.inference.rows import sigmoid
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models.parameters import init_params, param_specs
from cfprm_jax.training.optimizer import AdamW
from cfprm_jax.training.step import TrainState

QUESTION = "start=three+two-four"
STEPS = ["three+two=five", "five-four=one", "answer=one"]


@pytest.fixture(scope="module")
def exported(loaded, tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "prm"
    loading.export(directory, loaded.params, loaded.config, loaded.tokenizer, loaded.encoding, dtype="float32")
    return directory


@pytest.fixture(scope="module")
def run(loaded, world, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    raw = loaded.config.backbone.to_hf()
    write_model(
        directory,
        raw,
        loaded.tokenizer,
        model=ModelConfig(dtype="float32"),
        encoding=loaded.encoding,
        loss=LossConfig(),
        granularity=GranularityConfig(),
    )
    checkpoints = Checkpoints(directory, keep=2)
    optimizer = AdamW(OptimizerConfig(), lambda step: 0.0, param_specs(loaded.config))
    for step, scale in ((1, 0.0), (2, 1.0)):
        params = {**loaded.params, "head": jax.tree.map(lambda v, scale=scale: scale * v, loaded.params["head"])}
        checkpoints.save(step, TrainState(*optimizer.init(params), jnp.int32(step)), {}, {})
    checkpoints.close()
    return directory


@pytest.fixture(scope="module")
def expected(loaded):
    (logits,) = Scorer(loaded, batch_rows=1).score([(QUESTION, STEPS)])
    return sigmoid(logits)


def test_an_export_a_run_and_a_checkpoint_score_alike(exported, run, expected):
    (run / "best").symlink_to("checkpoints/2")
    for directory in (exported, run, run / "checkpoints" / "2", run / "best", str(run)):
        scores = cfprm_jax.load(directory).score(QUESTION, STEPS)
        assert isinstance(scores, list) and all(type(score) is float for score in scores)
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
    assert cfprm_jax.load(run / "checkpoints" / "1").score(QUESTION, STEPS) == [0.5] * 3


def test_a_folder_called_checkpoints_makes_no_run_of_an_export(exported, run, expected, tmp_path):
    directory = tmp_path / "checkpoints" / "prm"
    shutil.copytree(exported, directory)
    np.testing.assert_allclose(cfprm_jax.load(directory).score(QUESTION, STEPS), expected, rtol=1e-5, atol=1e-6)
    assert model_fingerprint(str(directory)) == model_fingerprint(str(exported))
    assert [saving.is_run(run / name) for name in ("", "checkpoints", "checkpoints/1", "model")] == [True] * 3 + [False]


def test_the_best_checkpoint_is_the_one_that_it_links_to(run, tmp_path):
    for name in ("checkpoints", "model"):
        (tmp_path / name).symlink_to(run / name)
    (tmp_path / "best").symlink_to("checkpoints/1")
    prints = [model_fingerprint(f"{tmp_path}/{name}") for name in ("best", "checkpoints/1", "checkpoints/2")]
    assert prints[0] == prints[1] != prints[2]
    # Events and outputs that come into a run's directory are no part of its PRM.
    (tmp_path / "events.out.tfevents.1").write_text("new")
    assert model_fingerprint(str(tmp_path)) == prints[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_scores_as_its_run_does_in_the_same_dtype(run, loaded, tmp_path, dtype):
    """And in another one otherwise: a run is scored in the dtype of its training unless dtype says otherwise."""
    params, other = loaded.params, "float32" if dtype == "bfloat16" else "bfloat16"
    loading.export(tmp_path / "prm", params, loaded.config, loaded.tokenizer, loaded.encoding, dtype=dtype)
    scores = {name: cfprm_jax.load(run, name).score(QUESTION, STEPS) for name in (dtype, other)}
    own = cfprm_jax.load(tmp_path / "prm").score(QUESTION, STEPS)
    head = 1e-6 if dtype == "float32" else 5e-4  # which is bfloat16 in such an export, and float32 in the run
    np.testing.assert_allclose(own, scores[dtype], rtol=0, atol=head)
    assert np.abs(np.subtract(own, scores[other])).max() > 2 * head


def test_a_run_without_a_best_checkpoint_names_the_reason(run, tmp_path):
    for name in ("checkpoints", "model"):
        (tmp_path / name).symlink_to(run / name)
    for opened in (cfprm_jax.load, saving.locate, model_fingerprint):
        with pytest.raises(UserError, match=r"best: this run has no best checkpoint: .*--keep_best=loss\|.*auroc"):
            opened(tmp_path / "best")
    with pytest.raises(UserError, match="is not a directory"):
        cfprm_jax.load(tmp_path / "other" / "best")


def test_a_run_is_no_backbone(run):
    with pytest.raises(UserError, match=r"is a run of train, .*cfprm_jax.export --checkpoint=") as error:
        loading.read_config(run)
    assert str(run) in str(error.value)


def test_scores_agree_with_transformers(exported, expected):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForTokenClassification.from_pretrained(str(exported), dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(exported))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    marker = tokenizer.convert_tokens_to_ids("<extra_0>")
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    for step in STEPS:
        ids += [*tokenizer(step, add_special_tokens=False)["input_ids"], marker]
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
    np.testing.assert_allclose(scores[torch.tensor(ids) == marker].numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("stored", "named", "expected"),
    [
        ("float32", None, "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_dtype_auto_is_the_type_of_the_weights_and_not_of_config_json(stored, named, expected, loaded, tmp_path):
    directory = tmp_path / "prm"
    loading.export(directory, loaded.params, loaded.config, loaded.tokenizer, loaded.encoding, dtype=stored)
    raw = json.loads((directory / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        del raw[key]
        if named:
            raw[key] = named
    (directory / "config.json").write_text(json.dumps(raw))
    assert open_prm(directory).config.dtype == expected


def test_the_directorys_own_encoding_is_used(exported, loaded):
    for encoding in ("auto", "cfprm"):
        found = open_prm(exported, "float32", encoding=encoding)
        assert (found.encoding, found.encoding_name) == (loaded.encoding, "cfprm")
    assert found.config.backbone.num_hidden_layers == 2


def test_a_flag_does_not_overrule_a_directory(exported, run):
    for directory in (exported, run, run / "checkpoints" / "2"):
        with pytest.raises(UserError, match=r"--encoding=trl, but "):
            cfprm_jax.load(directory, encoding="trl")
        with pytest.raises(UserError, match=r"--step_separator=ab, but .* cfprm"):
            cfprm_jax.load(directory, step_separator="ab")


def test_an_encoding_that_is_not_recorded_must_be_named(exported, tmp_path):
    for path in exported.iterdir():
        if path.name != "prm.json":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(UserError, match="does not record its encoding") as refused:
        open_prm(tmp_path, "float32")
    assert "\n" not in str(refused.value)
    for name in ("cfprm", "qwen_prm"):
        found = open_prm(tmp_path, "float32", encoding=name)
        longest = min(4096, found.config.backbone.max_position_embeddings)
        assert (found.encoding, found.encoding_name) == (EncodingConfig(max_length=longest), name)
    with pytest.raises(UserError, match="'orm' is not among: auto, cfprm"):
        open_prm(tmp_path, encoding="orm")


def published(loaded, directory):
    """A directory as Qwen2.5-Math-PRM's: both classes of the last layer count, code is named, and no prm.json."""
    import safetensors.numpy

    config = dataclasses.replace(loaded.config, head="mlp")
    params = init_params(config, jax.random.key(1))
    loading.export(
        directory, params, config, loaded.tokenizer, loaded.encoding, format="process_reward_model", dtype="float32"
    )
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    generator = np.random.default_rng(0)
    tensors["score.2.weight"] = generator.standard_normal((2, 64)).astype(np.float32)
    tensors["score.2.bias"] = generator.standard_normal(2).astype(np.float32)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    raw["auto_map"] = {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}
    for name in ("num_labels", "id2label", "label2id"):
        del raw[name]
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "prm.json").unlink()
    return tensors


def torch_scores(directory, tensors, marker, system):
    """The probability of the second class at each marker, by transformers' Qwen2Model and two written-out layers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    raw = {k: v for k, v in json.loads((directory / "config.json").read_text()).items() if k != "auto_map"}
    model = transformers.Qwen2Model(transformers.Qwen2Config(**raw)).eval()
    weights = {name: torch.tensor(value) for name, value in tensors.items()}
    model.load_state_dict({name.removeprefix("model."): v for name, v in weights.items() if name.startswith("model.")})
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": QUESTION})
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]
    for step in STEPS:
        ids += tokenizer(step + marker, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        x = model(torch.tensor([ids])).last_hidden_state[0]
        x = (x @ weights["score.0.weight"].T + weights["score.0.bias"]).relu()
        scores = (x @ weights["score.2.weight"].T + weights["score.2.bias"]).softmax(-1)[:, 1]
    return scores[torch.tensor(ids) == tokenizer.convert_tokens_to_ids(marker)].numpy()


def test_a_published_prm_without_prm_json_is_scored_at_extra_0(loaded, tmp_path):
    tensors = published(loaded, tmp_path / "prm")
    theirs = torch_scores(tmp_path / "prm", tensors, "<extra_0>", EncodingConfig().system_prompt)
    assert len(theirs) == 3 and theirs.std() > 0.01
    found = open_prm(tmp_path / "prm")
    assert (found.config.head, found.encoding_name) == ("mlp", "qwen_prm")
    np.testing.assert_allclose(cfprm_jax.load(tmp_path / "prm").score(QUESTION, STEPS), theirs, atol=1e-5)


def test_a_prm_with_another_marker_and_template_is_scored_with_its_own(loaded, tmp_path):
    tensors = published(loaded, tmp_path / "prm")
    plain = torch_scores(tmp_path / "prm", tensors, "<extra_0>", "")
    for path in (tmp_path / "prm").glob("tokenizer*.json"):
        text = path.read_text().replace("<extra_0>", "<|judge|>")
        path.write_text(text.replace("{{ message['content'] }}", "{{ message['content'] }} again"))
    encoding = dataclasses.replace(loaded.encoding, marker="<|judge|>")
    described = {"head": "mlp", "encoding": dataclasses.asdict(encoding)}
    (tmp_path / "prm" / "prm.json").write_text(json.dumps(described))
    theirs = torch_scores(tmp_path / "prm", tensors, "<|judge|>", "")
    assert len(theirs) == 3 and np.abs(theirs - plain).max() > 1e-3
    np.testing.assert_allclose(cfprm_jax.load(tmp_path / "prm").score(QUESTION, STEPS), theirs, atol=1e-5)
    (tmp_path / "prm" / "prm.json").unlink()
    with pytest.raises(UserError, match="does not record its encoding"):
        cfprm_jax.load(tmp_path / "prm")
    with pytest.raises(UserError, match="'<extra_0>' is not exactly one token"):
        cfprm_jax.load(tmp_path / "prm", encoding="qwen_prm")


@pytest.mark.parametrize("format", ["process_reward_model", "reward_model"])
def test_two_layer_exports_of_a_linear_head_score_alike(format, loaded, expected, tmp_path):
    loading.export(
        tmp_path / "out",
        loaded.params,
        loaded.config,
        loaded.tokenizer,
        loaded.encoding,
        format=format,
        dtype="float32",
    )
    found = open_prm(tmp_path / "out", "float32")
    assert (found.config.head, found.encoding) == ("linear", loaded.encoding)
    np.testing.assert_allclose(cfprm_jax.load(tmp_path / "out").score(QUESTION, STEPS), expected, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_scored_is_an_error(exported):
    prm = cfprm_jax.load(exported)
    with pytest.raises(UserError, match="without steps"):
        prm.score(QUESTION, [])
    with pytest.raises(UserError, match="steps is one text"):
        prm.score(QUESTION, STEPS[0])
    with pytest.raises(UserError, match="longer than 96 tokens"):
        prm.score(QUESTION, STEPS * 20)
    with pytest.raises(UserError, match=r"solutions\[1\] is one text"):
        prm.score_many([QUESTION] * 2, [["\n\n".join(STEPS)], "\n\n".join(STEPS)])


def test_what_holds_no_prm_is_refused(exported, tmp_path, world):
    with pytest.raises(UserError, match="is not a directory"):
        cfprm_jax.load(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no safetensors|model\.safetensors"):
        cfprm_jax.load(world.model)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="neither a run directory"):
        cfprm_jax.load(tmp_path / "run")


def test_a_language_model_is_refused(tmp_path, world):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(str(world.model))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="it is a language model, not a process reward model"):
        cfprm_jax.load(tmp_path)


def test_importing_the_package_is_cheap():
    code = (
        "import sys, cfprm_jax; assert not {'jax', 'transformers', 'numpy'} & set(sys.modules);"
        "assert 'load' in cfprm_jax.__all__; import cfprm_jax.config"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        cfprm_jax.nothing  # noqa: B018


def test_prm_json_is_plain(exported, loaded):
    assert json.loads((exported / "prm.json").read_text())["encoding"] == dataclasses.asdict(loaded.encoding)
