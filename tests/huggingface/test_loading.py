"""Loading: every head, sharded and not, every type; each fault of a checkpoint is reported by name."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading, safetensors_files
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import lookup, map_specs, param_specs, walk
from cfprm_jax.models.reward_head import RewardHead

CONFIG = PRMConfig(BackboneConfig(96, 32, 48, 3, 4, 2, 8, 1e-5, 1e4))
KEY = jax.random.key(7)


def tensors_of(config, dtype=np.float32, labels=0, seed=0):
    """Random tensors of a checkpoint, by name; a reward head with `labels` rows, or none and an lm_head."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for path, spec in walk(param_specs(config)):
        if path.startswith("head.") and not labels:
            continue
        shape = spec.shape[1:] if spec.stacked else spec.shape
        if spec.hf_form == "class_difference":
            shape = (labels, *shape[1:])
        for name in spec.hf_names():
            tensors[name] = generator.standard_normal(shape).astype(dtype)
    if not labels:
        tensors["lm_head.weight"] = generator.standard_normal((96, 32)).astype(dtype)
    return tensors


def write(directory, tensors, shards=1, config=CONFIG):
    """A checkpoint directory; with shards, tensors are dealt out to them in turn."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.backbone.to_hf()))
    if shards == 1:
        safetensors.numpy.save_file(tensors, directory / "model.safetensors")
        return directory
    parts = [dict(list(tensors.items())[i::shards]) for i in range(shards)]
    weight_map = {}
    for i, part in enumerate(parts):
        safetensors.numpy.save_file(part, directory / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def expected_leaf(tensors, spec):
    stacked = [tensors[name].astype(np.float32) for name in spec.hf_names()]
    return np.stack(stacked) if spec.stacked else stacked[0]


def mesh_shardings(config, rules, shape=(2, 4)):
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("x", "y"))
    return map_specs(
        lambda path, spec: NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in spec.axes))), config
    )


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_language_model_gets_a_fresh_head(shards, stored, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "_CHUNK_BYTES", 1000)
    tensors = tensors_of(CONFIG, stored)
    params, report = loading.load_params(write(tmp_path, tensors, shards), CONFIG, dtype=dtype, head_key=KEY)
    for path, spec in walk(param_specs(CONFIG)):
        leaf = lookup(params, path)
        assert leaf.shape == spec.shape
        if path.startswith("head."):
            assert leaf.dtype == jnp.float32
            continue
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(leaf, expected_leaf(tensors, spec).astype(dtype), err_msg=path)
    assert np.asarray(params["head"]["output"]["kernel"]).std() > 0
    assert report.head == "fresh" and report.labels == 0 and report.files == shards
    assert report.ignored == ("lm_head.weight",)
    assert report.stored_bytes == sum(v.nbytes for name, v in tensors.items() if name != "lm_head.weight")
    assert "a fresh head; not used: lm_head.weight" in str(report)
    assert loading.head_of(tmp_path) is None


@pytest.mark.parametrize("name", ["score.weight", "score.bias"])
def test_a_head_without_any_dimension_is_a_wrong_shape(name, tmp_path):
    write(tmp_path, {**tensors_of(CONFIG, labels=2), name: np.array(1.0, np.float32)})
    with pytest.raises(UserError, match=rf"{name}: shape \[\], expected \[1") as error:
        loading.load_params(tmp_path, CONFIG)
    assert "\n" not in str(error.value)


def test_fresh_head_depends_on_its_key(tmp_path):
    write(tmp_path, tensors_of(CONFIG))
    one, same, other = (
        loading.load_params(tmp_path, CONFIG, head_key=jax.random.key(seed))[0]["head"]["output"]["kernel"]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).all()


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_published_heads(kind, labels, tmp_path):
    """z is the difference of the two classes' logits, or the one logit, of Linear or Linear-ReLU-Linear."""
    config = dataclasses.replace(CONFIG, head=kind)
    tensors = tensors_of(config, labels=labels)
    write(tmp_path, tensors)
    assert loading.head_of(tmp_path) == kind
    params, report = loading.load_params(tmp_path, config)
    assert (report.head, report.labels, report.ignored) == ("loaded", labels, ())
    x = np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float32)
    hidden = x
    name = "score"
    if kind == "mlp":
        hidden = np.maximum(x @ tensors["score.0.weight"].T + tensors["score.0.bias"], 0)
        name = "score.2"
    logits = hidden @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
    expected = logits[..., 1] - logits[..., 0] if labels == 2 else logits[..., 0]
    np.testing.assert_allclose(RewardHead(config, params["head"])(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


def test_class_difference_is_taken_in_float32(tmp_path):
    tensors = tensors_of(CONFIG, ml_dtypes.bfloat16, labels=2)
    params, _ = loading.load_params(write(tmp_path, tensors), CONFIG, dtype=jnp.bfloat16)
    negative, positive = tensors["score.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["head"]["output"]["kernel"], (positive - negative)[None])


@pytest.mark.parametrize(
    "rules",
    [
        {"embed": "y", "mlp": "x", "heads": "x", "kv_heads": "x", "vocab": "x"},
        {"embed": "x", "vocab": "y", "mlp": "y"},
        {"mlp": ("x", "y"), "heads": ("x", "y"), "vocab": ("x", "y")},
        {"layers": "y", "embed": "x"},
        {},
    ],
)
def test_sharded_equals_unsharded(rules, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "_CHUNK_BYTES", 700)
    config = PRMConfig(dataclasses.replace(CONFIG.backbone, num_hidden_layers=4))
    write(tmp_path, tensors_of(config, ml_dtypes.bfloat16, labels=2), shards=2, config=config)
    shardings = mesh_shardings(config, rules)
    plain, _ = loading.load_params(tmp_path, config)
    sharded, _ = loading.load_params(tmp_path, config, shardings=shardings)
    for (path, a), (_, b) in zip(walk(plain), walk(sharded), strict=True):
        assert b.sharding == lookup(shardings, path)
        np.testing.assert_array_equal(a, b, err_msg=path)
        for shard in b.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(a)[shard.index], err_msg=path)


def test_each_byte_is_read_once_whatever_the_mesh(tmp_path, monkeypatch):
    write(tmp_path, tensors_of(CONFIG, labels=2))
    count = 0
    original = safetensors_files._read_exactly

    def counting(file, view, path):
        nonlocal count
        count += len(view)
        original(file, view, path)

    monkeypatch.setattr(safetensors_files, "_read_exactly", counting)
    shardings = mesh_shardings(CONFIG, {"embed": "y", "mlp": "x", "heads": "x"})
    _, report = loading.load_params(tmp_path, CONFIG, shardings=shardings)
    assert count == report.stored_bytes


def test_unsharded_parameters_are_uncommitted_and_donatable(tmp_path):
    write(tmp_path, tensors_of(CONFIG))
    params, _ = loading.load_params(tmp_path, CONFIG, head_key=KEY)
    assert not any(leaf.committed for leaf in jax.tree.leaves(params))
    expected = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, params)
    moved = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(params)
    jax.tree.map(np.testing.assert_array_equal, moved, expected)


def problems_of(directory, config=CONFIG, **arguments):
    with pytest.raises(UserError) as error:
        loading.load_params(directory, config, **{"head_key": KEY, **arguments})
    head, text = f"{directory}: the checkpoint does not fit this model:", str(error.value)
    assert text.startswith(head)
    # A single problem stands on the line of the directory.
    return text.removeprefix(head).split("\n  ")[1:] or [text.removeprefix(f"{head} ")]


def test_everything_wrong_is_listed_in_one_error_before_a_byte_is_read(tmp_path, monkeypatch):
    tensors = tensors_of(CONFIG)
    del tensors["model.norm.weight"]
    for layer in range(3):
        del tensors[f"model.layers.{layer}.self_attn.q_proj.bias"]
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["visual.patch.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["model.embed_tokens.weight"] = np.zeros((96, 32), np.int8)
    write(tmp_path, tensors)
    monkeypatch.setattr(safetensors_files, "_read_exactly", lambda *_: pytest.fail("weights were read"))
    assert problems_of(tmp_path) == [
        "model.embed_tokens.weight: type I8, expected one of F32, BF16, F16 (in model.safetensors)",
        "model.layers.[0-1].mlp.down_proj.weight: shape [48, 32], expected [32, 48] (in model.safetensors)",
        "model.layers.[0-2].self_attn.q_proj.bias: missing",
        "model.layers.2.mlp.up_proj.weight: missing",
        "model.norm.weight: missing",
        "model.layers.3.mlp.up_proj.weight: unknown (in model.safetensors)",
        "visual.patch.weight: unknown (in model.safetensors)",
    ]


def test_held_by_two_shards(tmp_path):
    tensors = tensors_of(CONFIG)
    write(tmp_path, tensors, shards=2)
    again = safetensors.numpy.load_file(tmp_path / "part-1.safetensors")
    again["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    safetensors.numpy.save_file(again, tmp_path / "part-1.safetensors")
    (problem,) = problems_of(tmp_path)
    assert problem == "model.embed_tokens.weight: held twice, by part-0.safetensors and part-1.safetensors"


def test_missing_shard_truncated_shard_and_wrong_index_have_their_own_errors(tmp_path):
    tensors = tensors_of(CONFIG)
    write(tmp_path, tensors, shards=3)
    (tmp_path / "part-0.safetensors").unlink()
    path = tmp_path / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    moved = next(name for name, file in weight_map.items() if file == "part-2.safetensors")
    del weight_map[moved]
    index.write_text(json.dumps({"weight_map": weight_map}))
    problems = problems_of(tmp_path)
    assert len(problems) == 3
    assert re.search(r"part-0.safetensors: missing shard: .* puts \d+ tensors in it", problems[0])
    assert re.search(r"part-1.safetensors: truncated: \d+ bytes, but its header describes \d+", problems[1])
    assert problems[2] == f"{index}: wrong index: does not name {moved}, which part-2.safetensors holds"


def test_truncated_single_file(tmp_path):
    write(tmp_path, tensors_of(CONFIG))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = problems_of(tmp_path)
    assert "truncated" in problem
    with pytest.raises(UserError, match="truncated"):
        loading.head_of(tmp_path)


def test_no_head_to_score_with(tmp_path):
    write(tmp_path, tensors_of(CONFIG))
    assert problems_of(tmp_path, head_key=None) == [
        "score.bias: missing (the directory has no reward head)",
        "score.weight: missing (the directory has no reward head)",
    ]


def test_head_of_another_kind(tmp_path):
    write(tmp_path, tensors_of(dataclasses.replace(CONFIG, head="mlp"), labels=2))
    assert problems_of(tmp_path) == ["score: a head of kind mlp; expected linear"]


def test_heads_that_are_not_whole_or_not_binary(tmp_path):
    tensors = tensors_of(CONFIG, labels=2)
    weight = tensors.pop("score.weight")
    assert problems_of(write(tmp_path / "a", tensors)) == ["score.weight: missing"]
    tensors |= {"score.weight": weight, "score.bias": tensors["score.bias"][:1]}
    assert problems_of(write(tmp_path / "b", tensors)) == [
        "score: weight and bias disagree on the number of labels, 1 or 2"
    ]
    three = tensors_of(CONFIG, labels=3)
    assert problems_of(write(tmp_path / "c", three)) == [
        "score.bias: shape [3], expected [1] or [2] (in model.safetensors)",
        "score.weight: shape [3, 32], expected [1, 32] or [2, 32] (in model.safetensors)",
    ]


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_linear_head_without_a_bias_has_bias_0(labels, shards, tmp_path):
    """torch.nn.Linear(bias=False), as in Qwen2ForSequenceClassification."""
    tensors = tensors_of(CONFIG, labels=labels)
    del tensors["score.bias"]
    params, report = loading.load_params(write(tmp_path, tensors, shards), CONFIG)
    assert loading.head_of(tmp_path) == "linear"
    np.testing.assert_array_equal(params["head"]["output"]["bias"], np.zeros(1, np.float32))
    rows = tensors["score.weight"]
    np.testing.assert_array_equal(params["head"]["output"]["kernel"], rows if labels == 1 else rows[1:] - rows[:1])
    assert (report.head, report.labels, report.absent) == ("loaded", labels, ("score.bias",))
    assert "no score.bias, which is 0" in str(report)


def test_a_bias_that_is_lost_with_its_shard_is_not_0(tmp_path):
    tensors = tensors_of(CONFIG, labels=2)
    write(tmp_path, tensors, shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["score.bias"] != index["score.weight"]
    (tmp_path / index["score.bias"]).unlink()
    (problem,) = problems_of(tmp_path)
    assert "missing shard" in problem


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(np.float32, "float32"), (np.float16, "float32"), (ml_dtypes.bfloat16, "bfloat16")],
)
def test_the_type_of_the_weights(stored, expected, tmp_path):
    """Whatever config.json has; the head is float32 in many a bfloat16 model."""
    tensors = tensors_of(CONFIG, stored, labels=2)
    tensors |= {name: tensors[name].astype(np.float32) for name in ("score.weight", "score.bias")}
    write(tmp_path, tensors)
    for named in (None, "float32", "bfloat16", "float16"):
        raw = CONFIG.backbone.to_hf() | {"torch_dtype": named}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert loading.stored_dtype(tmp_path) == expected
    if expected == "bfloat16":  # one tensor that bfloat16 would round
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
        assert loading.stored_dtype(write(tmp_path, tensors)) == "float32"


def test_buffers_of_old_versions_are_known(tmp_path):
    tensors = tensors_of(CONFIG)
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    _, report = loading.load_params(write(tmp_path, tensors), CONFIG, head_key=KEY)
    assert "not used: lm_head.weight, model.layers.[0-2].self_attn.rotary_emb.inv_freq" in str(report)


def test_host_memory_stays_near_what_the_parameters_need(tmp_path):
    """A fresh process: on CPU the parameters are host memory themselves, and beyond them there is little."""
    config = PRMConfig(BackboneConfig(40_000, 512, 1024, 6, 8, 2, 64))
    write(tmp_path, tensors_of(config, ml_dtypes.bfloat16, labels=2), config=config)
    program = f"""
import resource, jax
from cfprm_jax.huggingface import loading
from cfprm_jax.models.config import PRMConfig
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
config = PRMConfig(loading.read_config({str(tmp_path)!r})[0])
jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(3)))
before = peak()
params, _ = loading.load_params({str(tmp_path)!r}, config)
jax.block_until_ready(params)
print(peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown, needed = map(int, done.stdout.split())
    assert needed > 120e6
    assert grown < needed + 50e6
