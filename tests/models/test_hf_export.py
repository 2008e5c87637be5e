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
from cfprm_jax.errors import UserError
from cfprm_jax.models import hf, hf_export
from cfprm_jax.models.config import PRMConfig, Qwen2Config
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
CONFIG = PRMConfig(Qwen2Config.from_hf(RAW))
ENCODING = EncodingConfig(max_length=64)
forward = jax.jit(apply, static_argnums=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_it_and_scores_the_same(
    tied, dtype, random_params, make_rows, tiny_tokenizer, tmp_path, caplog
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = PRMConfig(Qwen2Config.from_hf({**RAW, "tie_word_embeddings": tied}))
    params = random_params(config)
    out = tmp_path / "model"
    report = hf.export(out, params, config, tiny_tokenizer, ENCODING, dtype=dtype, max_shard_bytes=30_000)
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
    report = hf.export(
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


@pytest.mark.parametrize("held", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", ["one device", "eight devices"])
def test_round_trip_is_bit_equal_in_bfloat16(held, tied, sharded, random_params, tiny_tokenizer, tmp_path):
    config = PRMConfig(Qwen2Config.from_hf({**RAW, "tie_word_embeddings": tied}))
    hf.export(tmp_path / "first", random_params(config), config, tiny_tokenizer, ENCODING, max_shard_bytes=40_000)
    shardings = None
    if sharded == "eight devices":
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
        rules = {"embed": "y", "mlp": "x", "heads": "x", "kv_heads": "x", "vocab": "x"}
        shardings = map_specs(
            lambda _, spec: NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in spec.axes))), config
        )
    again = PRMConfig(hf.read_config(tmp_path / "first")[0], head=hf.head_of(tmp_path / "first"))
    assert again == config
    params, _ = hf.load_params(tmp_path / "first", again, dtype=held, shardings=shardings)
    hf.export(tmp_path / "second", params, again, tiny_tokenizer, ENCODING, max_shard_bytes=40_000)
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "second").iterdir())
    assert sum(name.endswith(".safetensors") for name in names) > 1
    for name in names:
        if name.endswith(".safetensors"):
            assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "head", "message"),
    [
        ({"format": "gguf"}, "linear", "--format: 'gguf' is not among: token_classification"),
        ({"dtype": "float16"}, "linear", "--dtype: 'float16' is not among: bfloat16, float32"),
        ({}, "mlp", "--format=token_classification holds a linear head only, and this model's head is 'mlp'"),
    ],
)
def test_refusals(arguments, head, message, random_params, tiny_tokenizer, tmp_path):
    config = dataclasses.replace(CONFIG, head=head)
    with pytest.raises(UserError, match=message):
        hf.export(tmp_path / "out", random_params(config), config, tiny_tokenizer, ENCODING, **arguments)
    assert not list(tmp_path.iterdir())


def test_output_directory_must_be_free(random_params, tiny_tokenizer, tmp_path):
    (tmp_path / "empty").mkdir()
    hf.export(tmp_path / "empty", random_params(CONFIG), CONFIG, tiny_tokenizer, ENCODING)
    with pytest.raises(UserError, match=r"--output_dir=.*empty is not empty; choose a new directory"):
        hf.export(tmp_path / "empty", random_params(CONFIG), CONFIG, tiny_tokenizer, ENCODING)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output_dir=.*file is a file"):
        hf.export(tmp_path / "file", random_params(CONFIG), CONFIG, tiny_tokenizer, ENCODING)


def test_a_failure_leaves_nothing_behind(random_params, tmp_path):
    class Broken:
        def save_pretrained(self, *_, **__):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hf.export(tmp_path / "out", random_params(CONFIG), CONFIG, Broken(), ENCODING)
    assert not list(tmp_path.iterdir())


def test_a_layer_is_fetched_and_cast_by_itself(random_params, monkeypatch):
    sizes = []
    original = np.asarray

    def recording(value, *rest, **named):
        if isinstance(value, jax.Array):
            sizes.append((value.shape, value.dtype))
        return original(value, *rest, **named)

    params = random_params(CONFIG)
    plan = list(hf_export._plan(params, CONFIG, "BF16"))
    monkeypatch.setattr(hf_export.np, "asarray", recording)
    for tensor in plan:
        assert tensor.fetch().shape == tensor.shape
    assert max(len(shape) for shape, _ in sizes) == 2  # never the three dimensions of a stacked kernel
    assert {dtype for _, dtype in sizes} == {jnp.dtype(jnp.bfloat16)}
