"""Every file of a model directory, mutated at random with a fixed seed: a UserError or a right result, nothing else.

A result is right if independent readers of the same files agree with it: the safetensors library on every bit of every
weight, the tokenizers library and transformers' own rendering on the tokens, plain JSON on everything else. What the
scores depend on is then that of the files.
"""

from __future__ import annotations

import json
import math
import random
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from cfprm_jax import synthetic
from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder, load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading, peft
from cfprm_jax.inference.load import open_prm
from cfprm_jax.inference.policy import stop_ids
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.parameters import init_params, lookup, param_specs, walk

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=1, candidates_per_problem=1)
QUESTION, STEPS = "start=three+two", ["three+two=five", "so answer=five 7"]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
VALUES = [
    None, True, False, 0, 1, -1, 2, 7, 3.5, -0.0, 1e308, math.inf, -math.inf, math.nan, 2**31, 2**53, 10**30, 10**7,
    "", "x", "0", "null", "/etc/passwd", "../x", "a\x00b", "é", "<extra_0>", "<|endoftext|>", "qwen2", "F64",
    [], {}, [[]], [None], [1, 2, 3], ["a"], {"a": 1}, {"content": 3}, [[["a"]]],
]  # fmt: skip
FRAGMENTS = [
    "{% for a in range(99999) %}", "{% endfor %}", "{{ 1 / 0 }}", "{{ x.y.z }}", "{% include 'x' %}", "{% if %}", "{{",
    "{{ 'a' * 99999999999 }}", "{{ messages }}", "{% set messages = [] %}", "{{ raise_exception('no') }}", "<|system|>",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{# x #}", "{{ messages[0].content }}", "{{ 9 ** 9 ** 9 }}",
]  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A PRM in one file of weights, the same in shards, and adapters of it."""
    root = tmp_path_factory.mktemp("directories")
    world = synthetic.materialise(root / "world", 0, WORLD)
    raw = json.loads((world.model / "config.json").read_text()) | {"num_hidden_layers": 2, "hidden_size": 32}
    raw |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 0}
    raw.pop("head_dim", None)
    config = PRMConfig(BackboneConfig.from_hf(raw))
    params, tokenizer = init_params(config, jax.random.key(0)), load_tokenizer(world.model)
    encoding = EncodingConfig(max_length=96, system_prompt="Be brief.")
    for name, most in (("single", 10**9), ("shards", 30_000)):
        loading.export(root / name, params, config, tokenizer, encoding, dtype="float32", max_shard_bytes=most)
    template = json.loads((root / "single/tokenizer_config.json").read_text())["chat_template"]
    (root / "single/chat_template.jinja").write_text(template)
    (root / "adapters").mkdir()
    (root / "adapters/adapter_config.json").write_text(json.dumps(peft.adapter_config(Lora(2, 4.0, ("query",)), "x")))
    shutil.copy(root / "single/model.safetensors", root / "adapters/adapter_model.safetensors")
    assert check(root / "single") == check(root / "shards") == "right"
    return root


def mutated_json(value, draw):
    """A JSON value with one change somewhere: top-level fields first, so that a large vocabulary is no more likely."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.15:
            return {key: inner for key, inner in value.items() if key != name}
        if kind < 0.25:
            return {(f"{key}x" if key == name else key): inner for key, inner in value.items()}
        return {key: mutated_json(inner, draw) if key == name else inner for key, inner in value.items()}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at, kind = draw.randrange(len(value)), draw.random()
        if kind < 0.2:
            return value[:at] + value[at + 1 :]
        if kind < 0.3:
            return [*value, value[at]]
        return [mutated_json(inner, draw) if i == at else inner for i, inner in enumerate(value)]
    if type(value) in (int, float) and draw.random() < 0.5:
        return draw.choice([-value, value + 1, value * 2, value * 1000, value / 2, str(value), [value]])
    return draw.choice(VALUES)


def mutated_bytes(data, draw):
    """A file with bytes changed, cut, added, or nested a thousand deep."""
    kind, at = draw.random(), draw.randrange(len(data))
    if kind < 0.35:
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if kind < 0.5:
        return data[:at]
    if kind < 0.6:
        return data[:at] + data[at + draw.randrange(1, 20) :]
    if kind < 0.7:
        return data + draw.randbytes(draw.randrange(1, 50))
    if kind < 0.75:
        return b""
    if kind < 0.85:
        return data[:at] + b"[" * 2000 + data[at:]
    return data[:at] + data[at : at + 40] + data[at:]


def mutate(path, draw):
    data = path.read_bytes()
    if draw.random() < 0.04:
        path.unlink()
        if draw.random() < 0.5:
            path.mkdir()
    elif path.suffix == ".jinja":
        at = draw.randrange(len(data))
        piece = draw.choice(FRAGMENTS).encode() * draw.choice([1, 1, 3])
        path.write_bytes(data[:at] + piece + data[at:] if draw.random() < 0.7 else mutated_bytes(data, draw))
    elif path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        if draw.random() < 0.7:
            header = json.dumps(mutated_json(json.loads(data[8 : 8 + length]), draw)).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        else:
            where = draw.choice([8, 8 + length, len(data)])
            path.write_bytes(mutated_bytes(data[:where], draw) + data[where:])
    elif draw.random() < 0.8:
        path.write_text(json.dumps(mutated_json(json.loads(data), draw)))
    else:
        path.write_bytes(mutated_bytes(data, draw))


def check(directory):
    """ "refused" for a UserError that names the directory, "right" for what all independent readers agree on."""
    try:
        loaded = open_prm(directory, "float32")
        encoded = Encoder(loaded.tokenizer, loaded.encoding).encode(QUESTION, STEPS)
        raw = json.loads((directory / "config.json").read_text())
        stops = stop_ids(directory, raw, loaded.tokenizer)
    except UserError as error:
        assert str(directory) in str(error), error
        return "refused"
    for name, value in raw.items():
        if value is not None and hasattr(loaded.config.backbone, name) and name != "rope_theta":
            assert getattr(loaded.config.backbone, name) == value
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    for where, spec in walk(param_specs(loaded.config)):
        found = np.asarray(lookup(loaded.params, where))
        if where.startswith("head."):
            theirs = [tensors.get(name, np.zeros((2, *spec.shape[1:]), np.float32)) for name in spec.hf_names()]
            theirs = [value[1:] - value[:1] if len(value) == 2 else value for value in theirs]
        else:
            theirs = [tensors[name if name in tensors else name.removeprefix("model.")] for name in spec.hf_names()]
        expected = np.stack(theirs) if spec.stacked else theirs[0]
        assert expected.astype(np.float32).tobytes() == found.tobytes(), where
    assert encoded.tokens.tolist() == tokens_by_others(directory, loaded.encoding)
    assert encoded.tokens.max(initial=0) < loaded.config.backbone.vocab_size
    if (directory / "prm.json").exists():
        described = json.loads((directory / "prm.json").read_text())["encoding"]
        assert {name: getattr(loaded.encoding, name) for name in described} == described
    generation = directory / "generation_config.json"
    own = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    named = raw.get("eos_token_id") if own is None else own
    assert set(named if isinstance(named, list) else [named]) - {None} <= set(stops)
    return "right"


def tokens_by_others(directory, encoding):
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import render_jinja_template

    whole = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    wrapped = PreTrainedTokenizerFast.from_pretrained(str(directory))
    messages = [{"role": "system", "content": encoding.system_prompt}] if encoding.system_prompt else []
    messages.append({"role": "user", "content": QUESTION})
    (prompt,), _ = render_jinja_template(
        [messages],
        chat_template=wrapped.get_chat_template(),
        add_generation_prompt=True,
        **wrapped.special_tokens_map,
    )
    whole = wrapped.backend_tokenizer if wrapped.backend_tokenizer.get_vocab() != whole.get_vocab() else whole
    whole.no_padding()
    whole.no_truncation()
    pieces = [whole.encode(prompt, add_special_tokens=False).ids]
    marker = whole.token_to_id(encoding.marker)
    pieces += [[*whole.encode(step, add_special_tokens=False).ids, marker] for step in STEPS]
    kept = []
    for piece in pieces:
        if len(kept) + len(piece) > encoding.max_length:
            break
        kept += piece
    return kept


@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        ("single", "config.json", 60),
        ("single", "tokenizer.json", 60),
        ("single", "tokenizer_config.json", 50),
        ("single", "chat_template.jinja", 50),
        ("single", "generation_config.json", 25),
        ("single", "prm.json", 50),
        ("single", SINGLE, 60),
        ("shards", INDEX, 50),
        ("shards", "model-00002-of-", 25),
        ("adapters", "adapter_config.json", 15),
        ("adapters", "adapter_model.safetensors", 10),
    ],
)
def test_a_mutated_file_is_refused_or_read_as_others_read_it(kind, name, count, parts, tmp_path):
    draw = random.Random(f"{kind}/{name}")
    faults, outcomes = [], {"refused": 0, "right": 0}
    for number in range(count):
        directory = tmp_path / f"{number}"
        directory.mkdir()
        for path in (parts / kind).iterdir():
            target = directory / path.name
            if path.name.startswith(name):
                shutil.copy(path, target)
                mutate(target, draw)
            else:
                target.symlink_to(path)
        try:
            outcomes[check(directory)] += 1
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            faults.append(f"{directory}: {type(error).__name__}: {str(error)[:300]}")
    assert not faults, "\n".join(faults)
    assert outcomes["refused"] > 0
    if kind == "adapters":
        assert outcomes["right"] == 0
