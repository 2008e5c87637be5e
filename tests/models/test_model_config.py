"""config.json: every real one is read, both generations of rope keys, and what is not supported is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.loading import read_config
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.families import FAMILIES
from cfprm_jax.models.parameters import count, param_specs, walk
from cfprm_jax.models.rope_scaling import Llama3Scaling

BASE = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 70,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_reads_its_fields():
    config = BackboneConfig.from_hf(BASE)
    assert config == BackboneConfig(97, 32, 48, 2, 4, 2, 8, 1e-5, 10000.0, 512, True)


@pytest.mark.parametrize(("model_type", "classes"), [(name, family.classes) for name, family in FAMILIES.items()])
def test_defaults_are_those_of_transformers(model_type, classes):
    transformers = pytest.importorskip("transformers")
    required = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    shape = {**{key: BASE[key] for key in required[1:]}, "num_attention_heads": 32}
    # Qwen2's own default, 32, is that of no size; an absent key is every head its own.
    shape |= {"num_key_value_heads": None} if model_type == "qwen2" else {}
    config = BackboneConfig.from_hf({"model_type": model_type, **shape, "head_dim": 128})
    theirs = getattr(transformers, f"{classes}Config")(**shape, head_dim=128)
    for name in (
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "initializer_range",
        "num_key_value_heads",
    ):
        assert getattr(config, name) == getattr(theirs, name)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    if model_type != "llama":
        windowed = BackboneConfig.from_hf({"model_type": model_type, **shape, "head_dim": 128, **WINDOWED})
        assert windowed.sliding_window == getattr(transformers, f"{classes}Config")(**shape, **WINDOWED).sliding_window
        assert windowed.longest == (4096, "sliding_window")
        with pytest.raises(UserError, match="--max_length=4097 is beyond the model's sliding_window=4096"):
            windowed.check_length(4097)
        windowed.check_length(4096)
        assert BackboneConfig.from_hf(windowed.to_hf()) == windowed
        # Layers below max_window_layers see everything.
        if model_type != "mistral":
            full = {**BASE, "model_type": model_type, **WINDOWED, "max_window_layers": 2}
            assert BackboneConfig.from_hf(full).sliding_window is None


# Parameters of the backbone without a language-model head, from the shapes in the papers' tables.
BACKBONES = {
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 64, 151936),
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 128, 151936),
    "Qwen2.5-3B": (36, 2048, 11008, 16, 2, 128, 151936),
    "Qwen2.5-7B": (28, 3584, 18944, 28, 4, 128, 152064),
    "Qwen2.5-14B": (48, 5120, 13824, 40, 8, 128, 152064),
    "Qwen2.5-32B": (64, 5120, 27648, 40, 8, 128, 152064),
    "Qwen2.5-72B": (80, 8192, 29568, 64, 8, 128, 152064),
}


def test_every_real_configuration(shared):
    files = sorted(p for p in (shared / "data/configs").glob("Qwen*.json"))
    assert len(files) >= 20
    for file in files:
        raw = json.loads(file.read_text())
        config = BackboneConfig.from_hf(raw)
        size = next(part for part in file.stem.split("-") if part.endswith("B"))
        layers, hidden, inner, heads, kv_heads, head_dim, vocab = BACKBONES[f"Qwen2.5-{size}"]
        assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (layers, hidden, inner), file
        assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads), file
        assert (config.head_dim, config.vocab_size) == (head_dim, vocab), file
        assert config.rope_theta == (1e4 if "Math" in file.stem else 1e6), file
        assert (config.rms_norm_eps, config.tie_word_embeddings) == (raw["rms_norm_eps"], raw["tie_word_embeddings"])
        layer = (
            hidden * (heads + 2 * kv_heads) * head_dim
            + (heads + 2 * kv_heads) * head_dim
            + heads * head_dim * hidden
            + 3 * hidden * inner
            + 2 * hidden
        )
        assert count(PRMConfig(config)) == vocab * hidden + layers * layer + hidden + (hidden + 1), file
        written = config.to_hf()
        assert {key: written[key] for key in raw} == raw, file
        assert BackboneConfig.from_hf(written) == config


def test_specs_hold_exactly_the_published_names(shared):
    published = json.loads((shared / "data/configs/weight_names.json").read_text())
    config = BackboneConfig.from_hf(BASE)
    for head, classes in (("linear", "Qwen2ForTokenClassification"), ("mlp", "Qwen2ForProcessRewardModel")):
        (names,) = (names for title, names in published.items() if title.startswith(classes))
        expected = {n.replace("{i}", str(i)) for n in names if not n.startswith("_") for i in range(2)}
        specs = [spec for _, spec in walk(param_specs(PRMConfig(config, head=head)))]
        assert {name for spec in specs for name in spec.hf_names()} == expected
        assert all(len(spec.axes) == len(spec.shape) for spec in specs)


def test_transformers_reads_what_is_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = BackboneConfig.from_hf(BASE)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    theirs.save_pretrained(tmp_path / "again")
    again, raw = read_config(tmp_path / "again")
    assert "rope_theta" not in raw  # their newer form has it inside rope_parameters alone
    assert again == config


def test_a_configuration_made_here_writes_itself():
    config = BackboneConfig(97, 30, 48, 2, 4, 2, 8)
    written = config.to_hf()
    assert written["head_dim"] == 8
    assert BackboneConfig.from_hf(written) == config
    llama = dataclasses.replace(
        config, model_type="llama", attention_bias=True, mlp_bias=True, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)
    )
    written = llama.to_hf()
    assert written["rope_parameters"] == {**LLAMA3, "rope_theta": 1e6} and written["rope_scaling"] == LLAMA3
    assert BackboneConfig.from_hf(written) == llama
    with pytest.raises(UserError, match="attention_bias true is not an option of model_type 'mistral'"):
        dataclasses.replace(llama, model_type="mistral")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported; supported: 'qwen2', 'qwen3', 'llama', 'mis"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"use_mrope": True}, "use_mrope true is not supported"),
        ({"attention_bias": False}, "attention_bias false is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types .* is not supported"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types .* beside use_sliding_window false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling .*yarn.* is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling .*linear"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2}}, "rope_parameters .*factor"),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta 5.0, beside rope_theta 10000.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: missing low_freq_factor, high_freq"),
        ({"rope_scaling": {**LLAMA3, "factor": 0}}, "rope_scaling.factor: expected a positive number .*, found 0"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "rope_scaling.high_freq_factor 4.0 is not above low"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "another scaling than rope_scaling"),
        ({"num_experts": 8}, r"num_experts 8 is not supported; supported: null \(no mixture of experts\)"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"mlp_bias": True}, "mlp_bias true is not supported; supported: false"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias true is not supported; supported: false"),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window: expected a positive whole number .*, found 0",
        ),
        ({"model_type": "qwen3", "use_qk_norm": False}, "use_qk_norm false is not supported; supported: true"),
        ({"rope_scaling": "yarn"}, "rope_scaling: expected an object, found 'yarn'"),
        ({"hidden_size": None}, "hidden_size: expected a positive whole number up to 131,072, found null"),
        ({"hidden_size": "large"}, "hidden_size: expected a positive whole number up to 131,072, found 'large'"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a positive whole number up to 1,024, found 0"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 36}, "head_dim 9 is odd"),
        ({"vocab_size": "97"}, "vocab_size: expected a positive whole number up to 16,777,216, found '97'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a positive number up to 1, found 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: expected a positive number up to 1, found Infinity"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive number up to 1, found NaN"),
        ({"rms_norm_eps": True}, "rms_norm_eps: expected a positive number up to 1, found true"),
        ({"rope_theta": [1]}, r"rope_theta: expected a positive number up to 1e\+12, found \[1\]"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: expected a positive .* up to 1,024, found 10000000"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: expected a positive whole number up to 1,024, found 2.0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, found 'no'"),
        ({"layer_types": 3}, "layer_types: expected a list .*, found 3"),
        ({"layer_types": [["full_attention"]]}, r"layer_types\[0\]: expected a text, .*, found"),
        ({"attention_dropout": {}}, "attention_dropout: expected a number from 0 up to 1, found {}"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta: expected a positive number"),
        ({"eos_token_id": ["a"]}, r"eos_token_id\[0\]: expected a whole number"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings: expected .* up to 16,777,216"),
    ],
)
def test_refusals(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **change}))
    with pytest.raises(UserError, match=message) as error:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("value", [None, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling_is_accepted(value):
    assert BackboneConfig.from_hf({**BASE, "rope_scaling": value}).rope_theta == 10000.0


def test_unreadable_files(tmp_path):
    with pytest.raises(UserError, match="no such file; expected a Hugging Face directory"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object, found a list"):
        read_config(tmp_path)


@pytest.mark.parametrize("field", ["head", "dtype", "remat"])
def test_prm_choices(field):
    with pytest.raises(UserError, match=f"{field}: 'other' is not among"):
        PRMConfig(BackboneConfig.from_hf(BASE), **{field: "other"})


def test_configurations_are_static_arguments():
    one, two = BackboneConfig.from_hf(BASE), BackboneConfig.from_hf({**BASE, "_name_or_path": "elsewhere"})
    assert one == two and hash(PRMConfig(one)) == hash(PRMConfig(two))
    assert math.prod(walk(param_specs(PRMConfig(one))).__next__()[1].shape) == 97 * 32
