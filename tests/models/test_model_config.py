"""config.json: every real one is read, both generations of rope keys, and what is not supported is refused by name."""

from __future__ import annotations

import json
import math

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.loading import read_config
from cfprm_jax.models.config import PRMConfig, Qwen2Config
from cfprm_jax.models.parameters import count, param_specs, walk

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


def test_reads_its_fields():
    config = Qwen2Config.from_hf(BASE)
    assert config == Qwen2Config(97, 32, 48, 2, 4, 2, 8, 1e-5, 10000.0, 512, True)


def test_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    required = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    config = Qwen2Config.from_hf({key: BASE[key] for key in required})
    theirs = transformers.Qwen2Config(**{key: BASE[key] for key in required[1:]}, num_key_value_heads=None)
    for name in (
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "initializer_range",
        "num_key_value_heads",
    ):
        assert getattr(config, name) == getattr(theirs, name)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]


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
        config = Qwen2Config.from_hf(raw)
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
        assert Qwen2Config.from_hf(written) == config


def test_specs_hold_exactly_the_published_names(shared):
    published = json.loads((shared / "data/configs/weight_names.json").read_text())
    config = Qwen2Config.from_hf(BASE)
    for head, classes in (("linear", "Qwen2ForTokenClassification"), ("mlp", "Qwen2ForProcessRewardModel")):
        (names,) = (names for title, names in published.items() if title.startswith(classes))
        expected = {n.replace("{i}", str(i)) for n in names if not n.startswith("_") for i in range(2)}
        specs = [spec for _, spec in walk(param_specs(PRMConfig(config, head=head)))]
        assert {name for spec in specs for name in spec.hf_names()} == expected
        assert all(len(spec.axes) == len(spec.shape) for spec in specs)


def test_transformers_reads_what_is_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = Qwen2Config.from_hf(BASE)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    theirs.save_pretrained(tmp_path / "again")
    again, raw = read_config(tmp_path / "again")
    assert "rope_theta" not in raw  # their newer form has it inside rope_parameters alone
    assert again == config


def test_a_configuration_made_here_writes_itself():
    config = Qwen2Config(97, 30, 48, 2, 4, 2, 8)
    written = config.to_hf()
    assert written["head_dim"] == 8
    assert Qwen2Config.from_hf(written) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported: 'qwen2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"use_sliding_window": True}, "use_sliding_window true is not supported"),
        ({"use_mrope": True}, "use_mrope true is not supported"),
        ({"attention_bias": False}, "attention_bias false is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .* is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling .*yarn.* is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling .*linear"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2}}, "rope_parameters .*factor"),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta 5.0, beside rope_theta 10000.0"),
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
    assert Qwen2Config.from_hf({**BASE, "rope_scaling": value}).rope_theta == 10000.0


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
        PRMConfig(Qwen2Config.from_hf(BASE), **{field: "other"})


def test_configurations_are_static_arguments():
    one, two = Qwen2Config.from_hf(BASE), Qwen2Config.from_hf({**BASE, "_name_or_path": "elsewhere"})
    assert one == two and hash(PRMConfig(one)) == hash(PRMConfig(two))
    assert math.prod(walk(param_specs(PRMConfig(one))).__next__()[1].shape) == 97 * 32
