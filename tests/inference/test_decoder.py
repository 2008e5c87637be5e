"""Decoding token by token against the whole forward pass, and against transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.inference import decoder
from cfprm_jax.inference.decoder import BLOCK, STRIDE, Place
from cfprm_jax.inference.policy import open_policy
from cfprm_jax.models.backbone import Backbone
from cfprm_jax.models.rope_scaling import Llama3Scaling


def prefilled(policy, tokens):
    """Keys and values of a sequence, in blocks of a cache that has one more."""
    blocks = -(-max(len(tokens), 1) // BLOCK)
    padded = np.full(blocks * BLOCK, 7, np.int32)
    padded[: len(tokens)] = tokens
    sequence = decoder.empty(policy.config.backbone, blocks + 1, 1, BLOCK, jnp.dtype(policy.config.dtype))
    fill = jax.jit(lambda *arguments: decoder.prefill_block(policy.config, policy.params, *arguments))
    for block in range(blocks):
        sequence = fill(sequence, padded[block * BLOCK : (block + 1) * BLOCK], block)
    return sequence


def decode(policy, prompts, following, blocks=1, rows=None):
    """Logits [steps, prompts, vocab] of the given tokens after prompts of several lengths, in eight rows."""
    config, params = policy.config, policy.params
    rows = list(range(len(prompts))) if rows is None else rows
    dtype = jnp.dtype(config.dtype)
    cache = decoder.empty(config.backbone, blocks, 8, BLOCK, dtype)
    token, prompt_columns = np.zeros(8, np.int32), np.zeros(8, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        cache = jax.jit(decoder.insert)(cache, prefilled(policy, prompt[:-1]), np.array([row, 8]))
        token[row], prompt_columns[row] = prompt[-1], len(prompt) - 1
    place = Place(prompt_columns, prompt_columns.copy())

    @jax.jit
    def step(tokens, place, offset, cache, tail):
        return decoder.step(config, params, tokens, place, offset, cache=cache, tail=tail)

    extend = jax.jit(decoder.extend)
    out = []
    tail = decoder.empty(config.backbone, 1, 8, STRIDE, dtype)
    for number, tokens in enumerate([None, *following]):
        if tokens is not None:
            token[rows] = tokens
        if number and number % STRIDE == 0:
            cache = extend(cache, tail, place)
            place = place._replace(position=place.position + STRIDE)
        logits, tail = step(token, place, number % STRIDE, cache, tail)
        out.append(np.asarray(logits).T[rows])
    return np.stack(out)


@pytest.fixture(scope="module")
def case():
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 19, size).astype(np.int32) for size in (1, 5, 29)]
    return prompts, generator.integers(0, 19, (20, 3)).astype(np.int32)


def test_logits_are_those_of_transformers(make_language_model, one_device):
    torch = pytest.importorskip("torch")
    for tied in (True, False):
        directory, model = make_language_model(tied)
        policy = open_policy(directory, "float32", one_device)
        vocab = policy.config.backbone.vocab_size
        generator = np.random.default_rng(0)
        prompts = [generator.integers(0, vocab, size).astype(np.int32) for size in (1, 5, 29)]
        following = generator.integers(0, vocab, (20, 3)).astype(np.int32)
        found = decode(policy, prompts, following)
        for number, prompt in enumerate(prompts):
            whole = np.concatenate([prompt, following[:, number]])
            with torch.no_grad():
                expected = model(torch.tensor(whole[None]).long()).logits[0, len(prompt) - 1 :].numpy()
            np.testing.assert_allclose(found[:, number], expected, rtol=2e-4, atol=2e-4)


FAMILIES = {
    "qwen2": {},
    "qwen3": {"attention_bias": True, "head_dim": 16},
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 32)},
    "mistral": {"sliding_window": 64},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_are_those_of_the_forward_pass_of_training(model_type, make_policy, case):
    policy, (prompts, following) = make_policy(model_type=model_type, **FAMILIES[model_type]), case
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *policy.params.layers)
    params = {"embedding": policy.params.embedding, "layers": stacked, "final_norm": policy.params.final_norm}
    backbone = jax.jit(lambda *rows: Backbone(policy.config, params)(*rows))
    found = decode(policy, prompts, following)
    whole = np.zeros((3, 49), np.int32)
    for number, prompt in enumerate(prompts):
        whole[number, : len(prompt) + 20] = np.concatenate([prompt, following[:, number]])
    positions, end = np.tile(np.arange(49, dtype=np.int32), (3, 1)), np.full((3, 49), 49, np.int32)
    expected = np.asarray(backbone(whole, positions, end) @ policy.params.lm_head.T)
    for number, prompt in enumerate(prompts):
        logits = expected[number, len(prompt) - 1 : len(prompt) + 20]
        np.testing.assert_allclose(found[:, number], logits, atol=1e-5 * np.abs(expected).max())


def test_a_row_does_not_depend_on_its_place_nor_its_company_nor_the_room(make_policy, case):
    """To the bit: what is resumed in other company must come out the same."""
    policy, (prompts, following) = make_policy(), case
    found = decode(policy, prompts, following, rows=[0, 1, 2])
    moved = decode(policy, prompts[::-1], following[:, ::-1], rows=[1, 4, 7])
    np.testing.assert_array_equal(moved[:, ::-1], found)
    for blocks in (2, 4):
        np.testing.assert_array_equal(decode(policy, prompts, following, blocks), found)


def test_prompts_and_solutions_over_several_blocks(make_language_model, one_device):
    torch = pytest.importorskip("torch")
    directory, model = make_language_model(True)
    policy = open_policy(directory, "float32", one_device)
    tokens = np.random.default_rng(1).integers(0, policy.config.backbone.vocab_size, 150).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None]).long()).logits[0].numpy()
    for size in (3, 122, 131):
        found = decode(policy, [tokens[:size]], tokens[size:, None], blocks=2)
        np.testing.assert_allclose(found[:, 0], expected[size - 1 :], rtol=2e-4, atol=2e-4)


def test_a_sequence_is_continued_from_any_block_to_the_bit(make_policy):
    """What a token's keys and values are depends on the tokens before it alone, and not on the room."""
    policy = make_policy()
    tokens = np.random.default_rng(2).integers(0, 19, 3 * BLOCK).astype(np.int32)
    whole = prefilled(policy, tokens)
    fill = jax.jit(lambda *arguments: decoder.prefill_block(policy.config, policy.params, *arguments))
    other = tokens[BLOCK : 2 * BLOCK].copy()
    other[40:] = 3
    branch = fill(whole, other, 1)
    again = fill(branch, tokens[BLOCK : 2 * BLOCK], 1)
    for kept, changed, back in zip(*map(jax.tree.leaves, (whole, branch, again)), strict=True):
        np.testing.assert_array_equal(back, kept)
        np.testing.assert_array_equal(changed[0], kept[0])
        assert (np.asarray(changed[1]) != np.asarray(kept[1])).any()
    for values, changed in zip(whole.values, branch.values, strict=True):
        np.testing.assert_array_equal(changed[1, :, :, :40], values[1, :, :, :40])
    for one, wider in zip(*map(jax.tree.leaves, (prefilled(policy, tokens[:BLOCK]), whole)), strict=True):
        np.testing.assert_array_equal(one[0], wider[0])


def test_blocks_can_be_added_and_taken_away(make_policy, case):
    policy, (prompts, _) = make_policy(), case
    sequence = prefilled(policy, prompts[2])
    cache = decoder.insert(decoder.empty(policy.config.backbone, 1, 2, BLOCK, jnp.float32), sequence, np.array([1]))
    grown = decoder.resize(cache, 3)
    assert grown.blocks == 3 and not any(np.asarray(array[1:]).any() for array in jax.tree.leaves(grown))
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(decoder.resize(grown, 1)), strict=True):
        np.testing.assert_array_equal(before, after)


def test_bfloat16_logits_are_float32_and_near(make_policy, case):
    prompts, following = case
    exact = decode(make_policy(), prompts, following)
    half = decode(make_policy(dtype="bfloat16"), prompts, following)
    assert half.dtype == np.float32
    assert 0 < np.abs(half - exact).max() < 0.1 * np.abs(exact).max()
