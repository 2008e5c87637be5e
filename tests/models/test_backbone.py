"""The backbone against transformers, module by module and whole, and against itself: scan, remat, packing, types."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cfprm_jax.huggingface import loading
from cfprm_jax.models.attention import attention
from cfprm_jax.models.backbone import Backbone
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.layers import MLP, DecoderLayer, RMSNorm, SelfAttention
from cfprm_jax.models.placement import Placement
from cfprm_jax.models.rotary import rotary_angles, rotary_frequencies, rotate


def relative(got, expected):
    """Largest difference as a share of the largest value."""
    expected = np.asarray(expected, np.float32)
    return np.abs(np.asarray(got, np.float32) - expected).max() / np.abs(expected).max()


def hidden_states(config, params, rows, constrain=None):
    def run(backbone, tokens, positions, subtree_end):
        extra = () if constrain is None else (constrain,)
        return Backbone(config, backbone)(tokens, positions, subtree_end, *extra)

    return jax.jit(run)(params["backbone"], *rows)


def mixed_by(config, subtree_end, q, k, v):
    return attention(q, k, v, jnp.asarray(subtree_end), config.attention)


def load(model, directory):
    model.save_pretrained(directory)
    config = PRMConfig(loading.read_config(directory)[0])
    return config, loading.load_params(directory, config, head_key=jax.random.key(0))[0]


VARIANTS = {
    "7 to 1": {},
    "1 to 1": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "2 groups": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112},
    "eps": {"rms_norm_eps": 1e-5},
    "theta": {"rope_theta": 1e6},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 16},
    "one layer": {"num_hidden_layers": 1},
}


# Qwen2Model saves its tensors without the prefix "model.".
@pytest.mark.parametrize(("class_name", "name"), [*(("Qwen2ForCausalLM", v) for v in VARIANTS), ("Qwen2Model", "tied")])
def test_hidden_states_equal_transformers(class_name, name, make_reference, make_rows, tmp_path):
    torch = pytest.importorskip("torch")
    model = make_reference(class_name, **VARIANTS[name])
    config, params = load(model, tmp_path)
    rows = make_rows(np.random.default_rng(0).integers(0, 97, (2, 45)))
    with torch.no_grad():
        backbone = getattr(model, "model", model)
        expected = backbone(torch.tensor(rows.tokens.astype(np.int64))).last_hidden_state
    assert relative(hidden_states(config, params, rows), expected) < 2e-5


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("first", [4000, 32768 - 40])
def test_hidden_states_at_long_positions(theta, first, make_reference, make_rows, tmp_path):
    torch = pytest.importorskip("torch")
    model = make_reference(
        "Qwen2ForCausalLM", rope_theta=theta, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    config, params = load(model, tmp_path)
    rows = make_rows(np.random.default_rng(1).integers(0, 97, (1, 40)), first)
    # Far tokens that see near ones and the other way round: positions are not only relative within 40.
    positions = np.concatenate([np.arange(20), np.arange(first + 20, first + 40)]).astype(np.int32)[None]
    rows = rows._replace(positions=positions)
    with torch.no_grad():
        expected = model.model(
            torch.tensor(rows.tokens.astype(np.int64)), position_ids=torch.tensor(positions.astype(np.int64))
        ).last_hidden_state
    assert relative(hidden_states(config, params, rows), expected) < 2e-5


def test_rms_norm_equals_its_formula():
    generator = np.random.default_rng(0)
    x, scale = generator.standard_normal((3, 5, 16)) * 1e-3, generator.standard_normal(16)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    got = RMSNorm({"scale": jnp.asarray(scale, jnp.float32)}, 1e-5)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=2e-6)


def test_rms_norm_sums_in_float32():
    # In bfloat16 the mean of 2048 squares would stop growing near 256.
    x = jnp.full((1, 1, 2048), 3.0, jnp.bfloat16)
    got = RMSNorm({"scale": jnp.ones(2048)}, 1e-6)(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), 1.0)


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rotary_frequencies_are_torchs_to_the_last_bit(head_dim, theta):
    torch = pytest.importorskip("torch")
    theirs = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)).numpy()
    ours = rotary_frequencies(BackboneConfig(61, 48, 72, 4, 6, 2, head_dim, rope_theta=theta))
    assert ours.dtype == np.float32
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)
    assert (ours != theirs).sum() <= 1


def test_rotation_turns_pairs_by_position_times_frequency():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, 4, 2, 8))
    positions = np.array([[0, 1, 500, 32767]])
    angles = positions[..., None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    turn = np.exp(1j * angles)[:, :, None]
    turned = (x[..., :4] + 1j * x[..., 4:]) * turn
    expected = np.concatenate([turned.real, turned.imag], -1)
    got = rotate(jnp.asarray(x, jnp.float32), *rotary_angles(jnp.asarray(positions), SMALL.backbone))
    np.testing.assert_allclose(got, expected, atol=5e-3)  # float32 angles near 32767 are good to 2e-3 radians
    np.testing.assert_allclose(got[:, :2], expected[:, :2], atol=1e-6)


def test_sub_modules_equal_transformers(make_reference, make_rows, tmp_path):
    torch = pytest.importorskip("torch")
    model = make_reference("Qwen2ForCausalLM", num_hidden_layers=1)
    config, params = load(model, tmp_path)
    rows = make_rows(np.zeros((2, 30), np.int64))
    x = np.random.default_rng(2).standard_normal((2, 30, 56)).astype(np.float32)
    weights = jax.tree.map(lambda leaf: leaf[0], params["backbone"]["layers"])
    cosine, sine = rotary_angles(jnp.asarray(rows.positions), config.backbone)
    theirs = model.model.layers[0]
    with torch.no_grad():
        tx, positions = torch.tensor(x), torch.arange(30)[None]
        angles = model.model.rotary_emb(tx, positions)
        mask = torch.full((30, 30), -torch.inf).triu(1)[None, None]
        mixed = theirs.self_attn(tx, position_embeddings=angles, attention_mask=mask)[0]
        out = theirs(tx, position_embeddings=angles, attention_mask=mask)
        out = out[0] if isinstance(out, tuple) else out
        inner = theirs.mlp(tx)
    assert relative(MLP(weights["mlp"])(x), inner) < 5e-6
    mix = functools.partial(mixed_by, config, rows.subtree_end)
    got = SelfAttention(config, weights["attention"])(jnp.asarray(x), cosine, sine, mix)
    assert relative(got, mixed) < 5e-6
    got = DecoderLayer(config, weights)(jnp.asarray(x), cosine, sine, mix)
    assert relative(got, out) < 5e-6


SMALL = PRMConfig(BackboneConfig(61, 48, 72, 4, 6, 2, 8, 1e-6, 1e4))


def test_scan_equals_a_loop_over_layers(random_params, make_rows):
    params = random_params(SMALL)
    rows = make_rows(np.random.default_rng(0).integers(0, 61, (2, 25)))
    net = SMALL.backbone

    def unrolled(backbone, tokens, positions, subtree_end):
        x = backbone["embedding"][tokens]
        cosine, sine = rotary_angles(positions, net)
        mix = functools.partial(mixed_by, SMALL, subtree_end)
        for i in range(net.num_hidden_layers):
            layer = DecoderLayer(SMALL, jax.tree.map(lambda leaf: leaf[i], backbone["layers"]))  # noqa: B023
            x = layer(x, cosine, sine, mix)
        return RMSNorm(backbone["final_norm"], net.rms_norm_eps)(x)

    expected = jax.jit(unrolled)(params["backbone"], *rows)
    assert relative(hidden_states(SMALL, params, rows), expected) < 1e-6


def test_remat_gives_the_same_gradient_and_saves_less(random_params, make_rows):
    params = random_params(SMALL)
    rows = make_rows(np.random.default_rng(0).integers(0, 61, (4, 64)))

    def gradient(remat):
        config = dataclasses.replace(SMALL, remat=remat)
        loss = lambda backbone: jnp.square(Backbone(config, backbone)(*rows)).mean()  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(params["backbone"]).compile()
        return compiled(params["backbone"]), compiled.memory_analysis().temp_size_in_bytes

    (plain, plain_bytes), (layer, layer_bytes), (mlp, mlp_bytes) = map(gradient, ("none", "layer", "mlp"))
    for remat in (layer, mlp):
        for a, b in zip(jax.tree.leaves(remat), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max())
    assert layer_bytes < 0.7 * plain_bytes
    assert layer_bytes < mlp_bytes < plain_bytes


def test_bfloat16_is_close_to_float32(random_params, make_rows):
    params = random_params(SMALL)
    rows = make_rows(np.random.default_rng(0).integers(0, 61, (2, 40)))
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    wide, narrow = hidden_states(SMALL, params, rows), hidden_states(config, params, rows)
    assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    error = np.linalg.norm(np.asarray(narrow, np.float32) - wide) / np.linalg.norm(wide)
    assert 1e-4 < error < 0.03
    # Weights are cast where they are used: bfloat16 parameters compute the same as float32 ones of the same values.
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)
    np.testing.assert_array_equal(hidden_states(config, rounded, rows), hidden_states(config, widened, rows))


def test_tree_equals_its_sequences(random_params, make_rows):
    params = random_params(SMALL)
    generator = np.random.default_rng(5)
    prefix, stem, left, right, other = (generator.integers(0, 61, n) for n in (7, 4, 5, 6, 9))
    # One row: prefix -> (stem -> (left, right)), then another tree, then padding.
    tokens = np.concatenate([prefix, stem, left, right, other, np.zeros(5, np.int64)])
    positions = np.concatenate(
        [np.arange(11), np.arange(11, 16), np.arange(11, 17), np.arange(9), np.zeros(5, np.int64)]
    )
    ends = np.concatenate([np.full(11, 22), np.full(5, 16), np.full(6, 22), np.full(9, 31), np.arange(32, 37)])
    packed = hidden_states(SMALL, params, [x[None].astype(np.int32) for x in (tokens, positions, ends)])[0]
    assert np.isfinite(packed).all()
    alone = lambda *parts: hidden_states(SMALL, params, make_rows(np.concatenate(parts)[None]))[0]  # noqa: E731
    whole = alone(prefix, stem, left)
    assert relative(packed[:16], whole) < 2e-6
    whole = alone(prefix, stem, right)
    assert relative(np.concatenate([packed[:11], packed[16:22]]), whole) < 2e-6
    assert relative(packed[22:31], alone(other)) < 2e-6


def test_activations_are_offered_with_their_axes(random_params, make_rows):
    seen = []

    class Recording(Placement):
        def __call__(self, activation, axes):
            seen.append((activation.shape, axes))
            return activation

    rows = make_rows(np.zeros((2, 10), np.int64))
    hidden_states(SMALL, random_params(SMALL), rows, Recording())
    assert set(seen) == {((2, 10, 48), ("rows", "length", "embed"))}


def test_modules_split_like_any_other(random_params, make_rows):
    params = random_params(SMALL)
    rows = make_rows(np.random.default_rng(0).integers(0, 61, (1, 12)))
    graphdef, state = nnx.split(Backbone(SMALL, params["backbone"]))
    got = jax.jit(lambda state: nnx.merge(graphdef, state)(*rows))(state)
    np.testing.assert_array_equal(got, hidden_states(SMALL, params, rows))
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(params["backbone"]))


def test_depth_does_not_lengthen_the_program(random_params, make_rows):
    rows = make_rows(np.zeros((1, 8), np.int64))

    def lines(layers):
        config = dataclasses.replace(SMALL, backbone=dataclasses.replace(SMALL.backbone, num_hidden_layers=layers))
        run = functools.partial(lambda backbone, config: Backbone(config, backbone)(*rows), config=config)
        return len(jax.jit(run).lower(random_params(config)["backbone"]).as_text().splitlines())

    assert lines(2) == lines(6)


def test_config_json_is_the_tiny_models_own(make_reference, tmp_path):
    make_reference().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in raw  # the parity tests read what transformers 5 writes
