"""Going on from a PRM: what is taken from its directory, what a flag may change, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny_runs import write_model

from cfprm_jax import flags, train
from cfprm_jax.config import EncodingConfig, ModelConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import init_params
from cfprm_jax.run.warm_start import adopt

pytestmark = pytest.mark.quick_compile

THEIRS = EncodingConfig(max_length=99, step_separator="; ", system_prompt="Judge.")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A language model, and PRMs of each form, all of one tiny network."""
    root = tmp_path_factory.mktemp("origin")
    write_model(root / "lm")
    network = loading.read_config(root / "lm")[0]
    tokenizer = load_tokenizer(root / "lm")
    for head in ("linear", "mlp"):
        config = PRMConfig(network, head=head)
        params = init_params(config, jax.random.key(0))
        for format in ("token_classification", "process_reward_model", "reward_model"):
            if head == "linear" or format != "token_classification":
                loading.export(root / f"{head}-{format}", params, config, tokenizer, THEIRS, format=format)
    weights = safetensors.numpy.load_file(root / "linear-token_classification" / "model.safetensors")
    backbone = {name: value for name, value in weights.items() if not name.startswith("score.")}
    safetensors.numpy.save_file(backbone, root / "lm" / "model.safetensors")
    return root


def test_a_language_model_leaves_the_options(directories):
    model, encoding = ModelConfig(head="mlp"), EncodingConfig(system_prompt="Mine.")
    assert adopt(directories / "lm", model, encoding, {"head"}) == (model, encoding, ())


@pytest.mark.parametrize(
    ("head", "format"),
    [
        ("linear", "token_classification"),
        ("linear", "process_reward_model"),
        ("linear", "reward_model"),
        ("mlp", "process_reward_model"),
        ("mlp", "reward_model"),
    ],
)
def test_what_no_flag_names_is_the_prms(head, format, directories):
    """A linear head is recognised in two layers, too."""
    model, encoding, lines = adopt(
        directories / f"{head}-{format}", ModelConfig(head="linear"), EncodingConfig(max_length=77), ()
    )
    assert model.head == head
    assert encoding == dataclasses.replace(THEIRS, max_length=77)
    assert lines[0] == f"a PRM with a {head} head; of its prm.json: marker, system_prompt, step_separator"
    assert "step separator '; '" in lines[1] and lines[2] == "system prompt 'Judge.'"


def test_a_text_that_a_flag_names_is_kept_and_logged(directories):
    mine = EncodingConfig(system_prompt="Mine.", step_separator="; ")
    given = {"system_prompt", "step_separator", "marker", "head"}
    _, encoding, lines = adopt(directories / "linear-reward_model", ModelConfig(), mine, given)
    assert (encoding.system_prompt, encoding.step_separator) == ("Mine.", "; ")
    assert "--system_prompt" in lines[1] and "'Judge.'" in lines[1]
    assert len(lines) == 4


def test_contradictions_are_refused_by_name(directories):
    with pytest.raises(UserError, match=r"--head=mlp, but .* is a PRM with a head of kind linear: leave --head out"):
        adopt(directories / "linear-reward_model", ModelConfig(head="mlp"), EncodingConfig(), {"head"})
    with pytest.raises(UserError, match=r"--marker=<x>, but .* was trained with the marker <extra_0>"):
        adopt(directories / "linear-reward_model", ModelConfig(), EncodingConfig(marker="<x>"), {"marker"})


def test_a_published_prm_has_no_texts(directories, tmp_path):
    """Qwen2.5-Math-PRM's own directory: class and tensors, no prm.json."""
    weights = safetensors.numpy.load_file(directories / "mlp-process_reward_model" / "model.safetensors")
    generator = np.random.default_rng(0)
    for name in ("score.2.weight", "score.2.bias"):
        weights[name] = generator.standard_normal(weights[name].shape).astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    raw = json.loads((directories / "mlp-process_reward_model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mine = EncodingConfig(system_prompt="Mine.")
    model, encoding, lines = adopt(tmp_path, ModelConfig(), mine, ())
    assert (model.head, encoding) == ("mlp", mine)
    assert lines[0].startswith("a PRM with a mlp head, without prm.json")


@pytest.mark.parametrize("adapted", [{}, {"lora_rank": 2}])
def test_a_warm_start_from_an_export(adapted, directories, tiny, tmp_path, capsys):
    """The head is the PRM's own before the first step, and the run keeps its form and texts."""
    source = directories / "mlp-process_reward_model"
    given = tiny.arguments("unused", model=source, init="pretrained", max_steps=1, learning_rate=0, **adapted)
    given = [flag for flag in given if not flag.startswith(("--system_prompt", "--output_dir"))]
    given += [f"--output_dir={tmp_path / 'run'}", "--compile_cache_dir="]
    assert train.main(flags.parse(train.TrainConfig, ["train", *given])) == 0
    assert "warm start  a PRM with a mlp head" in capsys.readouterr().out
    run = loaded_prm.load_for_inference(tmp_path / "run", "float32")
    assert run.encoding == dataclasses.replace(THEIRS, max_length=128)
    assert {"--head=mlp", "--system_prompt=Judge."} <= set((tmp_path / "run" / "run.flags").read_text().splitlines())
    before, _ = loading.load_params(source, run.config)
    jax.tree.map(np.testing.assert_array_equal, run.params, before)


def test_a_name_on_the_hub_is_an_error_with_the_download_command(tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    given = tiny.arguments("unused", model="Qwen/Qwen2.5-Math-7B", init="pretrained", output_dir=tmp_path / "run")
    with pytest.raises(UserError, match=r"hf download Qwen/Qwen2.5-Math-7B --local-dir models/Qwen2.5-Math-7B"):
        train.main(flags.parse(train.TrainConfig, ["train", *given, "--compile_cache_dir="]))
