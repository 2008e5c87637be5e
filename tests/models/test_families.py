"""Each family against transformers: hidden states of random small networks, long positions, packed rows, adapters."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from cfprm_jax.huggingface import loading
from cfprm_jax.models import lora
from cfprm_jax.models.backbone import Backbone
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import param_specs, walk
from cfprm_jax.models.rope_scaling import Llama3Scaling
from cfprm_jax.models.rotary import rotary_frequencies

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48, "rms_norm_eps": 1e-5}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED = {"rope_parameters": {**SCALING, "rope_theta": 5e5}, "max_position_embeddings": 131072, "head_dim": 64}
VARIANTS = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama scaled": ("Llama", SCALED),
    "llama with a window, which has no effect": ("Llama", {"sliding_window": 8, "use_sliding_window": True}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral with a window": ("Mistral", {"sliding_window": 45}),
}


def worst_token(got, expected):
    """The largest distance of a token's hidden state, as a share of its length."""
    expected = np.asarray(expected, np.float64)
    return (np.linalg.norm(np.asarray(got) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max()


def run(config, params, rows):
    return jax.jit(lambda backbone, *rows: Backbone(config, backbone)(*rows))(params["backbone"], *rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_equal_transformers(name, make_reference, make_rows, tmp_path):
    torch = pytest.importorskip("torch")
    classes, changes = VARIANTS[name]
    model = make_reference(f"{classes}ForCausalLM", **{**SHAPE, **changes})
    model.save_pretrained(tmp_path)
    config = PRMConfig(loading.read_config(tmp_path)[0])
    params = loading.load_params(tmp_path, config, head_key=jax.random.key(0))[0]
    rows = make_rows(np.random.default_rng(0).integers(0, 97, (2, 45)))
    if "rope_parameters" in changes:
        # Far tokens that see near ones: positions are not only relative within 45.
        far = np.concatenate([np.arange(20), np.arange(9000, 9010), np.arange(131057, 131072)])
        rows = rows._replace(positions=np.tile(far.astype(np.int32), (2, 1)))
    with torch.no_grad():
        expected = model.model(
            torch.tensor(rows.tokens.astype(np.int64)), position_ids=torch.tensor(rows.positions.astype(np.int64))
        ).last_hidden_state
    assert worst_token(run(config, params, rows), expected) < 1e-5


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_frequencies_are_those_of_transformers(head_dim, factor):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(
        head_dim=head_dim, rope_parameters={**SCALED["rope_parameters"], "factor": factor}
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
    net = BackboneConfig(97, 48, 72, 1, 4, 2, head_dim, rope_theta=5e5, rope_scaling=scaling, model_type="llama")
    ours = rotary_frequencies(net)
    assert ours.dtype == np.float32
    np.testing.assert_array_max_ulp(ours, rotary.inv_freq.numpy(), maxulp=2)


SWITCHES = {
    "qwen3": {"attention_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)},
    "mistral": {"sliding_window": 64},
}


@pytest.mark.parametrize("model_type", SWITCHES)
@pytest.mark.parametrize("attention", ["xla", "blockwise"])
def test_packed_equals_unpacked(model_type, attention, random_params, make_rows):
    net = BackboneConfig(61, 48, 72, 2, 4, 2, 8, 1e-6, 1e4, model_type=model_type, **SWITCHES[model_type])
    config = PRMConfig(net, attention=attention)
    params = random_params(config)
    generator = np.random.default_rng(5)
    prefix, left, right, other = (generator.integers(0, 61, n) for n in (11, 5, 6, 9))
    # One row: prefix -> (left, right), then another tree, then padding.
    tokens = np.concatenate([prefix, left, right, other, np.zeros(5, np.int64)])
    positions = np.concatenate([np.arange(16), np.arange(11, 17), np.arange(9), np.zeros(5, np.int64)])
    ends = np.concatenate([np.full(11, 22), np.full(5, 16), np.full(6, 22), np.full(9, 31), np.arange(32, 37)])
    packed = run(config, params, [x[None].astype(np.int32) for x in (tokens, positions, ends)])[0]
    for places, parts in (
        (np.r_[0:16], (prefix, left)),
        (np.r_[0:11, 16:22], (prefix, right)),
        (np.r_[22:31], (other,)),
    ):
        alone = run(config, params, make_rows(np.concatenate(parts)[None]))[0]
        assert worst_token(packed[places], alone) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "llama with biases", "mistral"])
def test_adapters_have_the_names_of_peft(name, make_reference, tmp_path):
    peft = pytest.importorskip("peft")
    classes, changes = VARIANTS[name]
    model = make_reference(f"{classes}ForTokenClassification", **{**SHAPE, **changes})
    model.save_pretrained(tmp_path)
    config = PRMConfig(loading.read_config(tmp_path)[0])
    adapters = lora.parse(2, 4.0, list(lora.TARGETS.values()))
    theirs = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=list(lora.TARGETS.values()), task_type="TOKEN_CLS")
    )
    expected = {name: tuple(value.shape) for name, value in peft.get_peft_model_state_dict(theirs).items()}
    specs = [spec for _, spec in walk(lora.trainable_specs(config, adapters)["backbone"])]
    ours = {name: spec.shape[1:] for spec in specs for name in spec.hf_names()}
    assert ours == {name: shape for name, shape in expected.items() if "lora_" in name}


def test_specs_hold_exactly_the_tensors_of_each_class(make_reference, tmp_path):
    pytest.importorskip("torch")
    for name, (classes, changes) in VARIANTS.items():
        model = make_reference(f"{classes}ForTokenClassification", **{**SHAPE, **changes})
        model.config.save_pretrained(tmp_path / name)
        config = PRMConfig(loading.read_config(tmp_path / name)[0])
        names = {n for _, spec in walk(param_specs(config)) for n in spec.hf_names()}
        assert names == set(model.state_dict()), name
