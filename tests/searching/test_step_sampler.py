"""Steps with branched and pruned caches against a sampler that decodes each solution from its prompt."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np
import pytest

from cfprm_jax.inference.decoder import DecoderParams
from cfprm_jax.inference.policy import Policy, unstacked
from cfprm_jax.inference.sampler import Prompt, Sampler, Sampling
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import map_specs
from cfprm_jax.searching.step_sampler import StepSampler


class Letters:
    """A tokenizer whose token i is the letter i."""

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A random policy of two layers over 19 letters, which b ends."""
    backbone = BackboneConfig(
        vocab_size=19,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rope_theta=1e4,
        tie_word_embeddings=True,
    )
    config = PRMConfig(backbone, dtype="float32", attention="xla")
    generator = np.random.default_rng(0)

    def one(path: str, spec: Any) -> jax.Array:
        noise = generator.standard_normal(spec.shape).astype(np.float32)
        return jax.numpy.asarray({"norm": 1 + 0.3 * noise, "embedding": 0.4 * noise}.get(spec.kind, 0.3 * noise))

    params = map_specs(one, config)["backbone"]
    embedding = params["embedding"]
    layers = unstacked(params["layers"])
    return Policy(config, DecoderParams(embedding, layers, params["final_norm"], embedding), Letters(), (1,))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    generator = np.random.default_rng(0)
    return [Prompt(f"q{i}", generator.integers(2, 19, 9 + 7 * i).astype(np.int32)) for i in range(3)]


@pytest.fixture(scope="module")
def greedy(policy, prompts):
    """The most probable 60 tokens of each prompt."""
    return [
        found[0].tokens.tolist() for found in Sampler(policy, Sampling(0.0, max_new_tokens=60), 8).sample(prompts, 1)
    ]


@pytest.fixture(scope="module")
def separator(policy, prompts) -> str:
    """A letter that the policy writes often, but not always."""
    found = next(Sampler(policy, Sampling(1.0, max_new_tokens=60), 8).sample(prompts[:1], 8))
    counted = collections.Counter(policy.tokenizer.decode([t for own in found for t in own.tokens.tolist() if t != 1]))
    return counted.most_common(3)[-1][0]


def ids(sampler, row: int) -> list[int]:
    return list(sampler._rows[row].tokens)


def test_step_by_step_is_the_greedy_solution(policy, prompts, greedy, separator) -> None:
    """Rows are shuffled and dropped on the way, so that caches are gathered."""
    sampler = StepSampler(policy, Sampling(0.0, max_new_tokens=60), 8, separator)
    taken: list[int] = []
    for prompt, expected in zip(prompts, greedy, strict=True):
        sampler.begin(prompt)
        sampler.branch([0] * 8)
        steps = 0
        while any(row.finish is None for row in sampler.rows):
            sampler.advance()
            steps += 1
            sampler.branch([7, 3, 0, 0, 5, 1, 2, 6])
        taken.append(steps)
        for row in range(8):
            assert ids(sampler, row) == expected
            assert sampler.rows[row].tokens == len(expected)
            assert len(sampler.rows[row].steps) <= steps
    assert max(taken) > 3


def test_rows_at_different_places(policy, prompts, greedy, separator) -> None:
    """A row that is behind, and one that has been marked and restored, give what they would have given alone."""
    sampler = StepSampler(policy, Sampling(0.0, max_new_tokens=60), 8, separator)
    sampler.begin(prompts[1])
    sampler.branch([0, 0])
    sampler.advance()
    mark = sampler.mark()
    before = sampler.rows
    sampler.advance(greedy=True)
    sampler.advance(greedy=True)
    sampler.restore(mark)
    assert sampler.rows == before
    sampler.advance(to_end=True)
    assert ids(sampler, 0) == ids(sampler, 1) == greedy[1]


def test_branches_differ_and_depend_on_the_seed_alone(policy, prompts, separator) -> None:
    def sampled(seed: int) -> list[list[int]]:
        sampler = StepSampler(policy, Sampling(1.0, max_new_tokens=24, seed=seed), 8, separator)
        sampler.begin(prompts[0])
        sampler.branch([0] * 4)
        sampler.advance()
        parent = next(i for i, row in enumerate(sampler.rows) if row.finish is None)
        sampler.branch([parent] * 8)
        sampler.advance(to_end=True)
        first = sampler.rows[0].segments[0]
        assert all(row.segments[0] == first for row in sampler.rows)
        return [ids(sampler, row) for row in range(8)]

    one = sampled(1)
    assert len({tuple(tokens) for tokens in one}) > 4
    assert one == sampled(1) != sampled(2)


def test_a_step_ends_with_its_separator(policy, prompts, separator) -> None:
    sampler = StepSampler(policy, Sampling(1.0, max_new_tokens=40, seed=5), 8, separator)
    sampler.begin(prompts[2])
    sampler.branch([0] * 8)
    sampler.advance()
    for row, partial in enumerate(sampler.rows):
        text = policy.tokenizer.decode(ids(sampler, row))
        if partial.finish is None:
            assert separator in text and text.split(separator)[0].strip() in partial.steps[0]
            last = policy.tokenizer.decode(ids(sampler, row)[:-1])
            assert separator not in last.lstrip()


def test_a_second_question_compiles_nothing(policy, prompts, separator, caplog) -> None:
    def compiled(prompt: Prompt) -> list[str]:
        caplog.clear()
        with jax.log_compiles():
            sampler.begin(prompt)
            sampler.advance()
            sampler.branch([0] * 4)
            sampler.advance()
            sampler.branch([2, 2, 1])
            sampler.advance(to_end=True)
        return [text for record in caplog.records if "XLA compilation" in (text := record.getMessage())]

    sampler = StepSampler(policy, Sampling(1.0, max_new_tokens=40, seed=3), 13, separator)
    assert compiled(prompts[0])
    for prompt in prompts[1:]:
        assert not compiled(prompt)
    # Nor does a sampler of as many rows, as another setting of the laboratory has.
    sampler = StepSampler(policy, Sampling(1.0, max_new_tokens=40, seed=3), 12, separator)
    assert not compiled(prompts[1])
