"""cfprm_jax.load: a PRM from a Hugging Face directory, a run of train, or one of its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfprm_jax
from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig
from cfprm_jax.errors import UserError
from cfprm_jax.inference.load import open_prm
from cfprm_jax.inference.rows import sigmoid
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models import hf
from cfprm_jax.training.checkpoint import Checkpoints
from cfprm_jax.training.run_directory import write_model
from cfprm_jax.training.step import TrainState

QUESTION = "start=three+two-four"
STEPS = ["three+two=five", "five-four=one", "answer=one"]


@pytest.fixture(scope="module")
def exported(loaded, tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "prm"
    hf.export(directory, loaded.params, loaded.config, loaded.tokenizer, loaded.encoding, dtype="float32")
    return directory


@pytest.fixture(scope="module")
def run(loaded, world, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    raw = loaded.config.backbone.to_hf()
    write_model(directory, raw, loaded.tokenizer, "linear", loaded.encoding, LossConfig(), GranularityConfig())
    checkpoints = Checkpoints(directory, keep=2)
    for step, scale in ((1, 0.0), (2, 1.0)):
        params = {**loaded.params, "head": jax.tree.map(lambda v, scale=scale: scale * v, loaded.params["head"])}
        checkpoints.save(step, TrainState(params=params, opt_state={}, step=jnp.int32(step)), {}, {})
    checkpoints.close()
    return directory


@pytest.fixture(scope="module")
def expected(loaded):
    (logits,) = Scorer(loaded, batch_rows=1).score([(QUESTION, STEPS)])
    return sigmoid(logits)


def test_an_export_a_run_and_a_checkpoint_score_alike(exported, run, expected):
    for directory in (exported, run, run / "checkpoints" / "2", str(run)):
        scores = cfprm_jax.load(directory).score(QUESTION, STEPS)
        assert isinstance(scores, list) and all(type(score) is float for score in scores)
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
    assert cfprm_jax.load(run / "checkpoints" / "1").score(QUESTION, STEPS) == [0.5] * 3


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


def test_the_directorys_own_encoding_is_used(exported, loaded):
    found = open_prm(exported, "float32", encoding=EncodingConfig(max_length=8))
    assert found.encoding == loaded.encoding
    assert found.config.backbone.num_hidden_layers == 2


def test_a_directory_that_does_not_say_takes_the_encoding_given(exported, tmp_path):
    for path in exported.iterdir():
        if path.name != "prm.json":
            (tmp_path / path.name).symlink_to(path)
    chosen = EncodingConfig(max_length=50)
    assert open_prm(tmp_path, "float32", encoding=chosen).encoding == chosen
    assert open_prm(tmp_path, "float32").encoding == EncodingConfig()


def test_what_cannot_be_scored_is_said(exported):
    prm = cfprm_jax.load(exported)
    with pytest.raises(UserError, match="without steps"):
        prm.score(QUESTION, [])
    with pytest.raises(UserError, match="longer than 96 tokens"):
        prm.score(QUESTION, STEPS * 20)


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
