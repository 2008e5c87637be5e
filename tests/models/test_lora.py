"""Adapters: their specs, the forward pass, merging, gradients, and PEFT as the independent implementation."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading, peft
from cfprm_jax.models import lora, parameters
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.prm import apply

CONFIG = PRMConfig(BackboneConfig(300, 32, 48, 3, 4, 2, 8, 1e-6, 1e4))
SOME = Lora(4, 8.0, ("query", "value", "down"))
ALL = Lora(3, 5.0, tuple(lora.TARGETS))


def parts(config, adapters, random_params, dtype=jnp.float32):
    """(frozen, trainable), with adapters in which neither A nor B is small."""
    params = random_params(config, dtype=dtype)
    generator = np.random.default_rng(5)

    def one(path, spec):
        return jnp.asarray(0.2 * generator.standard_normal(spec.shape), jnp.float32)

    specs = lora.trainable_specs(config, adapters)
    trainable = {"backbone": parameters.map_tree(one, specs["backbone"]), "head": params["head"]}
    return {"backbone": params["backbone"]}, trainable


def scores(config, params, rows):
    return jax.jit(apply, static_argnums=0)(config, params, rows.tokens, rows.positions, rows.subtree_end)


@pytest.fixture(scope="module")
def rows(make_rows):
    return make_rows(np.random.default_rng(1).integers(0, 256, (2, 24)))


def test_names_of_targets():
    assert lora.parse(0, 1.0, ("nothing",)) is None
    own = lora.parse(8, 16.0, ("down", "query"))
    assert own == lora.parse(8, 16.0, ("q_proj", "down_proj")) == Lora(8, 16.0, ("query", "down"))
    assert own.scale == 2.0
    with pytest.raises(UserError, match=r"--lora_targets: qkv is not among: query \(q_proj\), "):
        lora.parse(8, 16.0, ("query", "qkv"))
    with pytest.raises(UserError, match="nothing is not among"):
        lora.parse(8, 16.0, ())
    with pytest.raises(UserError, match="names one target twice"):
        lora.parse(8, 16.0, ("query", "q_proj"))
    with pytest.raises(UserError, match="must be positive"):
        lora.parse(8, 0.0, ("query",))


def test_specs_are_the_targets_and_the_head():
    specs = dict(parameters.walk(lora.trainable_specs(CONFIG, SOME)))
    assert list(specs) == [
        *(
            f"backbone.layers.{place}.{part}"
            for place in ("attention.query", "attention.value", "mlp.down")
            for part in ("lora_a", "lora_b")
        ),
        "head.output.kernel",
        "head.output.bias",
    ]
    down = specs["backbone.layers.mlp.down.lora_a"]
    assert (down.shape, down.axes) == ((3, 4, 48), ("layers", None, "mlp"))
    assert specs["backbone.layers.attention.value.lora_b"].axes == ("layers", "kv_heads", None)


def test_fresh_adapters_change_nothing(random_params, rows):
    """A is uniform in +-1 / sqrt(in), as PEFT's; B is 0."""
    params = random_params(CONFIG)
    adapters = lora.init_adapters(lora.trainable_specs(CONFIG, ALL), jax.random.key(3))
    for path, leaf in parameters.walk(adapters):
        if path.endswith("lora_b"):
            assert not leaf.any()
        else:
            bound = leaf.shape[-1] ** -0.5
            assert 0.9 * bound < np.abs(leaf).max() <= bound and abs(np.mean(leaf)) < 0.2 * bound
    both = lora.combine({"backbone": params["backbone"]}, {**adapters, "head": params["head"]}, ALL.scale)
    # A compiler may fuse the two programs differently, which is the only allowed difference.
    np.testing.assert_allclose(scores(CONFIG, both, rows), scores(CONFIG, params, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adapters", [SOME, ALL])
def test_merged_equals_unmerged(adapters, random_params, rows):
    frozen, trainable = parts(CONFIG, adapters, random_params)
    plain = scores(CONFIG, {**frozen, "head": trainable["head"]}, rows)
    unmerged = scores(CONFIG, lora.combine(frozen, trainable, adapters.scale), rows)
    merged = lora.merge(CONFIG, frozen, trainable, adapters, jnp.float32)
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, parameters.init_params(CONFIG, jax.random.key(0)))
    np.testing.assert_allclose(scores(CONFIG, merged, rows), unmerged, rtol=1e-5, atol=1e-5)
    assert np.abs(plain - unmerged).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_merging_rounds_once_and_leaves_the_rest(dtype, random_params):
    """Against float64, in the written-out form; untouched parameters keep their bits."""
    frozen, trainable = parts(CONFIG, SOME, random_params, jnp.bfloat16)
    before = jax.tree.map(np.array, frozen)
    merged = lora.merge(CONFIG, frozen, trainable, SOME, dtype)
    for path, leaf in parameters.walk(merged["backbone"]):
        assert leaf.dtype == dtype
        old = parameters.lookup(before["backbone"], path).astype(np.float64)
        *above, name = path.split(".")
        if name == "kernel" and above[-1] in SOME.targets:
            pair = parameters.lookup(trainable["backbone"], ".".join(above))
            old = old + SOME.scale * np.einsum("lor,lri->loi", *(np.float64(pair[k]) for k in ("lora_b", "lora_a")))
            np.testing.assert_allclose(leaf, old, rtol=2**-8 if dtype == jnp.bfloat16 else 1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(leaf, old.astype(np.float32), err_msg=path)
    assert merged["head"]["output"]["kernel"].dtype == jnp.float32


def test_sharded_equals_unsharded(random_params, rows):
    rules = {"embed": "y", "mlp": "x", "heads": "x", "kv_heads": "x", "vocab": "x"}
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))

    def put(specs, tree):
        def one(path, spec):
            where = NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in spec.axes)))
            return jax.device_put(parameters.lookup(tree, path), where)

        return parameters.map_tree(one, specs)

    frozen, trainable = parts(CONFIG, ALL, random_params)
    expected = scores(CONFIG, lora.combine(frozen, trainable, ALL.scale), rows)
    frozen = put({"backbone": parameters.param_specs(CONFIG)["backbone"]}, frozen)
    trainable = put(lora.trainable_specs(CONFIG, ALL), trainable)
    sharded = scores(CONFIG, lora.combine(frozen, trainable, ALL.scale), rows)
    np.testing.assert_allclose(sharded, expected, rtol=1e-4, atol=1e-5)
    kernel = frozen["backbone"]["layers"]["mlp"]["up"]["kernel"].sharding
    merged = lora.merge(CONFIG, frozen, trainable, ALL, jnp.float32)
    assert merged["backbone"]["layers"]["mlp"]["up"]["kernel"].sharding == kernel
    np.testing.assert_allclose(scores(CONFIG, merged, rows), expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_product(random_params, rows):
    """dL/dA = s B^T G and dL/dB = s G A^T for the merged kernel's gradient G."""
    frozen, trainable = parts(CONFIG, SOME, random_params)
    inputs = (rows.tokens, rows.positions, rows.subtree_end)

    def unmerged(trainable):
        return jnp.sum(jnp.sin(apply(CONFIG, lora.combine(frozen, trainable, SOME.scale), *inputs)))

    found = jax.jit(jax.grad(unmerged))(trainable)
    copied = jax.tree.map(jnp.array, frozen)
    merged = lora.merge(CONFIG, copied, trainable, SOME, jnp.float32)
    whole = jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(apply(CONFIG, params, *inputs)))))(merged)
    for place in ("attention.query", "attention.value", "mlp.down"):
        gradient = parameters.lookup(whole["backbone"]["layers"], f"{place}.kernel")
        pair = parameters.lookup(trainable["backbone"]["layers"], place)
        got = parameters.lookup(found["backbone"]["layers"], place)
        expected_a = SOME.scale * np.einsum("lor,loi->lri", pair["lora_b"], gradient)
        expected_b = SOME.scale * np.einsum("loi,lri->lor", gradient, pair["lora_a"])
        np.testing.assert_allclose(got["lora_a"], expected_a, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(got["lora_b"], expected_b, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found["head"]["output"]["kernel"], whole["head"]["output"]["kernel"], rtol=1e-4)


@pytest.mark.parametrize("adapters", [SOME, ALL])
def test_peft_loads_them_and_scores_the_same(adapters, random_params, rows, tiny_tokenizer, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("peft")
    config = dataclasses.replace(
        CONFIG, backbone=BackboneConfig.from_hf({**CONFIG.backbone.to_hf(), "vocab_size": 300, "eos_token_id": 256})
    )
    frozen, trainable = parts(config, adapters, random_params)
    base, out = tmp_path / "base", tmp_path / "adapters"
    other_head = jax.tree.map(lambda leaf: leaf + 1, trainable["head"])
    loading.export(base, {**frozen, "head": other_head}, config, tiny_tokenizer, EncodingConfig(), dtype="float32")
    report = peft.export_adapters(
        out,
        trainable,
        config,
        adapters,
        backbone=str(base),
        tokenizer=tiny_tokenizer,
        encoding=EncodingConfig(),
        dtype="float32",
    )
    assert report.files == ("adapter_model.safetensors",)
    assert {path.name for path in out.iterdir()} >= {"adapter_config.json", "prm.json", "tokenizer.json"}

    model = transformers.AutoModelForTokenClassification.from_pretrained(base, num_labels=2)
    # What PEFT would itself save for such a model is what was written, name by name.
    made = library.get_peft_model(
        transformers.AutoModelForTokenClassification.from_pretrained(base, num_labels=2),
        library.LoraConfig(
            task_type="TOKEN_CLS",
            r=adapters.rank,
            lora_alpha=adapters.alpha,
            target_modules=[lora.TARGETS[t] for t in adapters.targets],
        ),
    )
    made.save_pretrained(tmp_path / "theirs")
    ours = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    theirs = safetensors.numpy.load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}

    with torch.no_grad():
        tokens = torch.tensor(rows.tokens, dtype=torch.long)
        loaded = library.PeftModel.from_pretrained(model, out).eval()
        logits = loaded(tokens).logits
        merged = loaded.merge_and_unload()(tokens).logits
    expected = jax.nn.sigmoid(scores(config, lora.combine(frozen, trainable, adapters.scale), rows))
    np.testing.assert_allclose(logits.softmax(-1)[..., 1], expected, atol=1e-5)
    np.testing.assert_allclose(merged.softmax(-1)[..., 1], expected, atol=1e-5)


def test_adapters_need_a_linear_head(random_params, tiny_tokenizer, tmp_path):
    config = dataclasses.replace(CONFIG, head="mlp")
    _, trainable = parts(config, SOME, random_params)
    with pytest.raises(UserError, match="--format=peft_adapter holds a linear head only"):
        peft.export_adapters(
            tmp_path / "out",
            trainable,
            config,
            SOME,
            backbone="base",
            tokenizer=tiny_tokenizer,
            encoding=EncodingConfig(),
            dtype="float32",
        )
    assert not (tmp_path / "out").exists()


def test_only_what_is_trainable_is_differentiated(random_params, rows):
    """The compiled gradient has no result of the size of a frozen kernel."""
    frozen, trainable = parts(CONFIG, SOME, random_params)
    inputs = (rows.tokens, rows.positions, rows.subtree_end)

    def loss(trainable, frozen):
        return jnp.sum(apply(CONFIG, lora.combine(frozen, trainable, SOME.scale), *inputs))

    shapes = jax.eval_shape(jax.grad(loss), trainable, frozen)
    assert functools.reduce(max, (leaf.size for leaf in jax.tree.leaves(shapes))) <= 3 * 4 * 48
