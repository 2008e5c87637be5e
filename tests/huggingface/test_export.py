"""Exports: bit-equal round trips, transformers loads them and scores the same, and nothing is half written."""

from __future__ import annotations

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import map_specs
from cfprm_jax.models.prm import apply

RAW = {
    "architectures": ["Qwen2ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_other.Other"},
    "model_type": "qwen2",
    "hidden_act": "silu",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "bos_token_id": 3,
    "eos_token_id": 4,
    "use_mrope": False,
}
CONFIG = PRMConfig(BackboneConfig.from_hf(RAW))
ENCODING = EncodingConfig(max_length=64)
forward = jax.jit(apply, static_argnums=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_it_and_scores_the_same(
    tied, dtype, random_params, make_rows, tiny_tokenizer, tmp_path, caplog
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = PRMConfig(BackboneConfig.from_hf({**RAW, "tie_word_embeddings": tied}))
    params = random_params(config)
    out = tmp_path / "model"
    report = loading.export(out, params, config, tiny_tokenizer, ENCODING, dtype=dtype, max_shard_bytes=30_000)
    assert len(report.files) > 1
    with caplog.at_level(logging.WARNING):
        model, info = transformers.AutoModelForTokenClassification.from_pretrained(
            out, output_loading_info=True, dtype=torch.float32
        )
    assert not caplog.records
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen2ForTokenClassification"
    assert model.config.id2label == {0: "incorrect", 1: "correct"}
    rows = make_rows(np.random.default_rng(0).integers(0, 258, (2, 30)))
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(rows.tokens.astype(np.int64))).logits.softmax(-1)[..., 1].numpy()
    ours = np.asarray(jax.nn.sigmoid(forward(config, params, *rows)))
    assert ours.std() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-5 if dtype == "float32" else 2e-2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert len(tokenizer.encode("<extra_0>", add_special_tokens=False)) == 1
    assert tokenizer.chat_template == tiny_tokenizer.chat_template


def test_files_and_config(random_params, tiny_tokenizer, tmp_path):
    seen = []
    out = tmp_path / "deep" / "model"
    report = loading.export(
        out, random_params(CONFIG), CONFIG, tiny_tokenizer, ENCODING, progress=lambda *sizes: seen.append(sizes)
    )
    written = json.loads((out / "config.json").read_text())
    kept = {key: value for key, value in RAW.items() if key not in ("architectures", "auto_map")}
    assert {key: written[key] for key in kept} == kept
    assert "auto_map" not in written
    assert written["architectures"] == ["Qwen2ForTokenClassification"]
    assert (written["dtype"], written["num_labels"]) == ("bfloat16", 2)
    assert written["rope_parameters"] == {"rope_theta": 1e4, "rope_type": "default"}
    assert json.loads((out / "prm.json").read_text()) == {"head": "linear", "encoding": dataclasses.asdict(ENCODING)}
    tensors = safetensors.numpy.load_file(out / "model.safetensors")
    assert report.files == ("model.safetensors",)
    assert report.stored_bytes == 2 * report.parameters == sum(v.nbytes for v in tensors.values())
    assert seen[-1] == (report.stored_bytes, report.stored_bytes) and len(seen) == len(tensors)
    assert {v.dtype for v in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert (tensors["score.weight"][0] == 0).all() and tensors["score.bias"][0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in out.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("named", [{}, {"torch_dtype": "float16"}, {"dtype": "float16", "torch_dtype": "float16"}])
def test_the_type_is_named_for_every_version_of_every_reader(dtype, named, random_params, tiny_tokenizer, tmp_path):
    """Both keys, whatever the backbone's config.json had: transformers 4 and vLLM read torch_dtype, 5 reads dtype."""
    raw = {key: value for key, value in RAW.items() if key not in ("dtype", "torch_dtype")} | named
    config = dataclasses.replace(CONFIG, backbone=BackboneConfig.from_hf(raw))
    loading.export(tmp_path / "out", random_params(config), config, tiny_tokenizer, ENCODING, dtype=dtype)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["dtype"], written["torch_dtype"]) == (dtype, dtype)


def classifier_of(directory, dtype):
    """Hidden states to logits, by torch alone from the tensors and the config.json of a two-layer export."""
    import safetensors.torch
    import torch
    import transformers

    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    backbone = transformers.Qwen2Model(transformers.AutoConfig.from_pretrained(directory))
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, labels_of(directory)))
    model = torch.nn.ModuleDict({"model": backbone, "score": head})
    model.load_state_dict(tensors, strict=True)
    model = model.to(dtype).eval()
    return model["score"], lambda ids: model["model"](torch.tensor(ids.astype(np.int64))).last_hidden_state


def labels_of(directory):
    return json.loads((directory / "config.json").read_text())["num_labels"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("format", ["process_reward_model", "reward_model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_layer_formats_in_torch(format, head, dtype, tied, random_params, make_rows, tiny_tokenizer, tmp_path):
    """transformers' Qwen2Model with a written-out Linear, ReLU, Linear gives the scores, as vLLM's classes compute."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = PRMConfig(BackboneConfig.from_hf({**RAW, "tie_word_embeddings": tied}), head=head)
    params = random_params(config)
    loading.export(
        tmp_path / "out", params, config, tiny_tokenizer, ENCODING, format=format, dtype=dtype, max_shard_bytes=30_000
    )
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    architecture, labels = {
        "process_reward_model": ("Qwen2ForProcessRewardModel", 2),
        "reward_model": ("Qwen2ForRewardModel", 1),
    }[format]
    assert (written["architectures"], written["num_labels"]) == ([architecture], labels)
    assert len(written["id2label"]) == labels
    assert (written["tie_word_embeddings"], written["vocab_size"], written["dtype"]) == (tied, 300, dtype)
    assert "auto_map" not in written
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "bos_token_id": 3,
        "eos_token_id": 4,
    }
    classifier, hidden_of = classifier_of(tmp_path / "out", torch.float32)
    rows = make_rows(np.random.default_rng(0).integers(0, 258, (2, 30)))
    with torch.no_grad():
        logits = classifier(hidden_of(rows.tokens))
    theirs = logits.softmax(-1)[..., 1] if labels == 2 else logits[..., 0].sigmoid()
    ours = np.asarray(jax.nn.sigmoid(forward(config, params, *rows)))
    assert ours.std() > 0.05
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5 if dtype == "float32" else 2e-2)
    # And so does this package, from the same files.
    again = PRMConfig(loading.read_config(tmp_path / "out")[0], head=loading.head_of(tmp_path / "out"))
    assert again == config
    loaded, report = loading.load_params(tmp_path / "out", again)
    assert report.labels == labels
    np.testing.assert_allclose(jax.nn.sigmoid(forward(again, loaded, *rows)), theirs.numpy(), atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("<extra_0>", add_special_tokens=False) == [257]
    assert tokenizer.chat_template == tiny_tokenizer.chat_template


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_layer_of_a_linear_head_rounds_nothing(dtype, random_params, tiny_tokenizer, tmp_path):
    """In the type of the files, z is bit for bit what the first row of the first layer gives, which is wx + b."""
    torch = pytest.importorskip("torch")
    params = random_params(CONFIG)
    loading.export(
        tmp_path / "out", params, CONFIG, tiny_tokenizer, ENCODING, format="process_reward_model", dtype=dtype
    )
    (first, relu, second), _ = classifier_of(tmp_path / "out", getattr(torch, dtype))
    x = 3 * torch.randn((500, 32), generator=torch.Generator().manual_seed(0)).to(first.weight.dtype)
    with torch.no_grad():
        inner = first(x)
        logits = second(relu(inner))
    assert torch.equal(inner[:, 1], -inner[:, 0]) and not inner[:, 2:].any()
    assert torch.equal(logits[:, 1], inner[:, 0]) and not logits[:, 0].any()
    for mine, theirs in ((first.weight[:1], "kernel"), (first.bias[:1], "bias")):
        ours = np.asarray(params["head"]["output"][theirs].astype(dtype).astype(np.float32))
        np.testing.assert_array_equal(mine.detach().float().numpy(), ours)


@pytest.mark.parametrize("held", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", ["one device", "eight devices"])
@pytest.mark.parametrize(
    ("format", "head"),
    [("token_classification", "linear"), ("process_reward_model", "mlp"), ("reward_model", "linear")],
)
def test_round_trip_is_bit_equal_in_bfloat16(
    format, head, held, tied, sharded, random_params, tiny_tokenizer, tmp_path
):
    config = PRMConfig(BackboneConfig.from_hf({**RAW, "tie_word_embeddings": tied}), head=head)
    params = random_params(config)
    loading.export(tmp_path / "first", params, config, tiny_tokenizer, ENCODING, format=format, max_shard_bytes=40_000)
    again = PRMConfig(loading.read_config(tmp_path / "first")[0], head=loading.head_of(tmp_path / "first"))
    assert again == config  # a linear head, too, that two layers hold
    shardings = None
    if sharded == "eight devices":
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
        rules = {"embed": "y", "mlp": "x", "heads": "x", "kv_heads": "x", "vocab": "x"}
        shardings = map_specs(
            lambda _, spec: NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in spec.axes))), again
        )
    params, _ = loading.load_params(tmp_path / "first", again, dtype=held, shardings=shardings)
    loading.export(tmp_path / "second", params, again, tiny_tokenizer, ENCODING, format=format, max_shard_bytes=40_000)
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "second").iterdir())
    assert sum(name.endswith(".safetensors") for name in names) > 1
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


@pytest.mark.parametrize("sharded", ["one device", "eight devices"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_published_head_comes_back_as_the_difference_of_its_classes(
    tied, sharded, random_params, tiny_tokenizer, tmp_path
):
    """All but the last layer bit for bit; of that, only z counts: its rows become 0 and the classes' difference."""
    config = PRMConfig(BackboneConfig.from_hf({**RAW, "tie_word_embeddings": tied}), head="mlp")
    form = "process_reward_model"
    loading.export(tmp_path / "first", random_params(config), config, tiny_tokenizer, ENCODING, format=form)
    path = tmp_path / "first" / "model.safetensors"
    published = safetensors.numpy.load_file(path)
    generator = np.random.default_rng(3)
    for name in ("score.2.weight", "score.2.bias"):
        published[name] = generator.standard_normal(published[name].shape).astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file(published, path)
    shardings = None
    if sharded == "eight devices":
        mesh = Mesh(np.array(jax.devices()), ("x",))
        shardings = map_specs(
            lambda _, spec: NamedSharding(mesh, PartitionSpec(*({"embed": "x"}.get(axis) for axis in spec.axes))),
            config,
        )
    params, _ = loading.load_params(tmp_path / "first", config, dtype=jnp.bfloat16, shardings=shardings)
    loading.export(tmp_path / "second", params, config, tiny_tokenizer, ENCODING, format=form)
    again = safetensors.numpy.load_file(tmp_path / "second" / "model.safetensors")
    assert again.keys() == published.keys()
    for name, value in published.items():
        if name.startswith("score.2."):
            negative, positive = value.astype(np.float32)
            value = np.stack([np.zeros_like(positive), positive - negative]).astype(value.dtype)
        np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("arguments", "head", "message"),
    [
        (
            {"format": "gguf"},
            "linear",
            "--format: 'gguf' is not among: token_classification, process_reward_model, reward_model",
        ),
        ({"dtype": "float16"}, "linear", "--dtype: 'float16' is not among: bfloat16, float32"),
        ({}, "mlp", "--format=token_classification holds a linear head only, and this model's head is 'mlp'"),
    ],
)
def test_refusals(arguments, head, message, random_params, tiny_tokenizer, tmp_path):
    config = dataclasses.replace(CONFIG, head=head)
    with pytest.raises(UserError, match=message):
        loading.export(tmp_path / "out", random_params(config), config, tiny_tokenizer, ENCODING, **arguments)
    assert not list(tmp_path.iterdir())


def test_output_directory_must_be_free(random_params, tiny_tokenizer, tmp_path):
    (tmp_path / "empty").mkdir()
    loading.export(tmp_path / "empty", random_params(CONFIG), CONFIG, tiny_tokenizer, ENCODING)
    with pytest.raises(UserError, match=r"--output_dir=.*empty is not empty: choose a new directory"):
        loading.export(tmp_path / "empty", random_params(CONFIG), CONFIG, tiny_tokenizer, ENCODING)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output_dir=.*file is a file"):
        loading.export(tmp_path / "file", random_params(CONFIG), CONFIG, tiny_tokenizer, ENCODING)


def test_a_failure_leaves_nothing_behind(random_params, tmp_path):
    class Broken:
        init_kwargs = {}  # noqa: RUF012

        def save_pretrained(self, *_, **__):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        loading.export(tmp_path / "out", random_params(CONFIG), CONFIG, Broken(), ENCODING)
    assert not list(tmp_path.iterdir())


def test_the_exported_qwen_tokenizer_has_the_marker_and_is_unchanged_otherwise(shared, random_params, tmp_path):
    """The stock tokenizer of Qwen2.5, exported: <extra_0> is one id, and every other text keeps its ids."""
    transformers = pytest.importorskip("transformers")
    stock_directory = shared / "data" / "tokenizers" / "qwen2.5"
    tokenizer = load_tokenizer(stock_directory)
    loading.export(tmp_path / "out", random_params(CONFIG), CONFIG, tokenizer, ENCODING)
    stock, exported = (transformers.AutoTokenizer.from_pretrained(path) for path in (stock_directory, tmp_path / "out"))
    assert exported.encode("a<extra_0><extra_0>b") == [*stock.encode("a"), 151651, 151651, *stock.encode("b")]
    lines = (shared / "data" / "math500" / "test.jsonl").read_text().splitlines()
    special = "<|im_start|>user\nx<|im_end|>\n<|endoftext|><tool_call> \u043a\u0438 .\n\n\t  $\n\n"
    for text in [*lines, special, "\u4f60\u597d 1234567"]:
        assert exported.encode(text) == stock.encode(text)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    first, second = (t.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for t in (stock, exported))
    assert first == second
