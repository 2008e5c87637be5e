"""The sampler: what each candidate is, in whatever company; and how often anything is compiled."""

from __future__ import annotations

import dataclasses
import itertools
import os

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.errors import UserError
from cfprm_jax.inference import sampler as sampler_module
from cfprm_jax.inference.decoder import DecoderParams
from cfprm_jax.inference.policy import open_policy
from cfprm_jax.inference.sampler import Prompt, Sampler, Sampling
from cfprm_jax.models.backbone import Backbone
from cfprm_jax.models.parameters import param_specs
from cfprm_jax.sharding import rules


def prompts_of(sizes, vocab=19, seed=0):
    generator = np.random.default_rng(seed)
    return [Prompt(f"q{i}", generator.integers(2, vocab, size).astype(np.int32)) for i, size in enumerate(sizes)]


def sampled(policy, prompts, candidates, rows=8, mesh=None, **options):
    """Each candidate's (tokens, finish), question by question."""
    sampler = Sampler(policy, Sampling(**options), rows, mesh)
    questions = list(sampler.sample(prompts, candidates))
    assert sampler.counts.candidates == len(prompts) * candidates
    assert sampler.counts.tokens == sum(len(g.tokens) for q in questions for g in q)
    return [[(g.tokens.tolist(), g.finish) for g in question] for question in questions]


@pytest.mark.parametrize("tied", [True, False])
def test_greedy_is_generate_token_for_token(make_language_model, one_device, tied):
    torch = pytest.importorskip("torch")
    directory, model = make_language_model(tied, eos=[7, 11])
    policy = open_policy(directory, "float32", one_device)
    assert {7, 11} <= set(policy.stops)
    model.generation_config.eos_token_id = list(policy.stops)
    prompts = prompts_of([3, 1, 20, 9, 33], policy.config.backbone.vocab_size)
    found = sampled(policy, prompts, 1, temperature=0.0, max_new_tokens=40)
    ends = set()
    for prompt, ((tokens, finish),) in zip(prompts, found, strict=True):
        ids = torch.tensor(prompt.tokens[None]).long()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        assert tokens == out[0, ids.shape[1] :].tolist()
        assert finish == ("stop" if tokens[-1] in policy.stops else "length")
        ends.add(finish)
    assert "stop" in ends or tied


def test_a_candidate_is_the_same_in_any_company(make_policy):
    policy = make_policy()
    prompts = prompts_of([3, 40, 9, 17])
    options = {"max_new_tokens": 30, "seed": 5, "temperature": 1.3}
    expected = sampled(policy, prompts, 6, **options)
    lengths = [len(tokens) for question in expected for tokens, _ in question]
    assert len(set(lengths)) > 5 and {finish for q in expected for _, finish in q} == {"stop", "length"}
    assert len({tuple(tokens) for q in expected for tokens, _ in q}) > 20
    assert sampled(policy, prompts, 6, rows=24, **options) == expected
    assert sampled(policy, prompts[::-1], 6, **options)[::-1] == expected
    assert [q[:2] for q in expected] == sampled(policy, prompts, 2, rows=16, **options)
    assert sampled(policy, prompts[2:3], 6, **options) == expected[2:3]
    assert sampled(policy, prompts, 6, **{**options, "seed": 6}) != expected


def test_prefixes_of_one_solution_are_computed_once(make_policy):
    """In depth-first order, longest first, every block of the tree is computed once; the candidates stay the same."""
    policy = make_policy()
    long, other = (prompt.tokens for prompt in prompts_of([300, 290]))
    other = np.concatenate([long[:150], other[150:]])
    prompts = [Prompt(f"p{size}", long[:size]) for size in (300, 200, 130, 40)] + [Prompt("o", other)]
    options = {"max_new_tokens": 6, "seed": 2}
    alone = [sampled(policy, [prompt], 3, **options)[0] for prompt in prompts]
    sampler = Sampler(policy, Sampling(**options), 8)
    together = list(sampler.sample(prompts, 3))
    assert [[(g.tokens.tolist(), g.finish) for g in question] for question in together] == alone
    # Three blocks of the first, and the second and third of the one that branches off in the second.
    # The last token of a prompt is left for the first decode step; padding fills the third block of both.
    assert (sampler.counts.prefilled, sampler.counts.padding) == (299 + (289 - 128), 5 * 128 - 299 - (289 - 128))
    sampler = Sampler(policy, Sampling(**options), 8)
    list(sampler.sample(prompts[:4], 3))
    assert (sampler.counts.prefilled, sampler.counts.padding) == (299, 3 * 128 - 299)


def test_rows_over_eight_devices_give_the_same(make_policy):
    policy = make_policy(vocab_size=20)
    mesh = rules.make_mesh(DeviceConfig(mesh="data=2,fsdp=2,tensor=2"), jax.devices()[:8])
    where = rules.param_shardings(mesh, param_specs(policy.config)["backbone"])
    of_layer = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(*s.spec[1:])), where["layers"])
    split = DecoderParams(
        jax.device_put(policy.params.embedding, where["embedding"]),
        tuple(jax.device_put(layer, of_layer) for layer in policy.params.layers),
        jax.device_put(policy.params.final_norm, where["final_norm"]),
        jax.device_put(policy.params.lm_head, where["embedding"]),
    )
    prompts = prompts_of([5, 12, 3])
    options = {"max_new_tokens": 20, "top_p": 0.9}
    expected = sampled(policy, prompts, 12, rows=32, **options)
    found = sampled(dataclasses.replace(policy, params=split), prompts, 12, 32, mesh, **options)
    assert found == expected


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7)])
def test_sequences_have_their_exact_probability(make_policy, top_k, top_p):
    """All sequences of up to three tokens out of five, against the products of exact conditional probabilities."""
    policy = make_policy(seed=4, vocab_size=5, stops=(1,), scale=0.3)
    (prompt,) = prompts_of([4], 5)

    pairs = np.array(list(itertools.product(range(5), repeat=2)), np.int32)
    contexts = np.concatenate([np.tile(prompt.tokens, (25, 1)), pairs], axis=1)
    conditional = filtered(logits_of(policy, contexts)[:, 3:], top_k, top_p)  # [pair, tokens known, next]
    expected = {}
    for sequence in itertools.product(range(5), repeat=3):
        end = sequence.index(1) + 1 if 1 in sequence else 3
        rows = conditional[5 * sequence[0] + sequence[1]]
        expected[sequence[:end]] = float(np.prod([rows[known, sequence[known]] for known in range(end)]))
    assert abs(sum(expected.values()) - 1) < 1e-6
    number = 6000
    (found,) = sampled(policy, [prompt], number, rows=512, max_new_tokens=3, top_k=top_k, top_p=top_p)
    counts = dict.fromkeys(expected, 0)
    for tokens, _ in found:
        counts[tuple(tokens)] += 1
    assert not any(counts[sequence] for sequence, p in expected.items() if p == 0)
    often = [sequence for sequence, p in expected.items() if p * number >= 5]
    rest = sum(p for sequence, p in expected.items() if sequence not in often) * number
    statistic = sum((counts[s] - expected[s] * number) ** 2 / (expected[s] * number) for s in often)
    found_rest = number - sum(counts[s] for s in often)
    statistic += (found_rest - rest) ** 2 / rest if rest > 1 else 0
    degrees = len(often)
    assert degrees > 3 and statistic < degrees + 4 * np.sqrt(2 * degrees)


def logits_of(policy, tokens):
    """The logits at every position of rows, by the forward pass of training."""
    stacked = jax.tree.map(lambda *layers: jax.numpy.stack(layers), *policy.params.layers)
    params = {"embedding": policy.params.embedding, "layers": stacked, "final_norm": policy.params.final_norm}
    size = tokens.shape[1]
    positions, end = np.tile(np.arange(size), (len(tokens), 1)), np.full(tokens.shape, size)
    hidden = jax.jit(lambda *rows: Backbone(policy.config, params)(*rows))(tokens, positions, end)
    return np.asarray(hidden @ policy.params.lm_head.T, np.float64)


def filtered(logits, top_k, top_p):
    """Probabilities under top-k and top-p, by sorting."""
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    if top_k:
        p[p < np.sort(p, axis=-1)[..., -top_k, None]] = 0
    p /= p.sum(axis=-1, keepdims=True)
    before = (p[..., None, :] * (p[..., None, :] > p[..., :, None])).sum(axis=-1)
    p[before >= top_p] = 0
    return p / p.sum(axis=-1, keepdims=True)


def test_compilations_are_few_and_not_made_again(make_policy):
    policy = make_policy(hidden_size=40, stops=())
    step, before = sampler_module._decode, sampler_module._decode._cache_size()
    options = {"max_new_tokens": 150}
    first = sampled(policy, prompts_of([3, 70, 20]), 5, temperature=0.9, **options)
    made = step._cache_size() - before
    assert 2 <= made <= 3  # caches of one and two blocks
    again = sampled(policy, prompts_of([3, 70, 20]), 5, temperature=0.9, **options)
    assert again == first
    sampled(policy, prompts_of([9, 5, 33, 21], seed=3), 3, temperature=1.7, seed=9, max_new_tokens=99)
    assert step._cache_size() - before == made


def test_questions_come_in_order_and_before_all_are_done(make_policy):
    policy = make_policy()
    sampler = Sampler(policy, Sampling(max_new_tokens=40), 8)
    stream = sampler.sample(prompts_of([4] * 12), 3)
    first = next(stream)
    assert len(first) == 3 and sampler.counts.candidates < 36
    assert 1 + len(list(stream)) == 12


def test_logits_that_are_not_finite_are_an_error(make_policy):
    policy = make_policy()
    bad = policy.params._replace(lm_head=policy.params.lm_head.at[3].set(np.nan))
    with pytest.raises(UserError, match="not finite, for candidate 0 of question q0"):
        sampled(dataclasses.replace(policy, params=bad), prompts_of([4]), 2, max_new_tokens=20)


@pytest.mark.skipif("CFPRM_JAX_QWEN_05B" not in os.environ, reason="CFPRM_JAX_QWEN_05B names no checkpoint")
def test_a_real_model_is_greedy_as_generate_and_the_same_in_any_company(one_device):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = os.environ["CFPRM_JAX_QWEN_05B"]
    policy = open_policy(directory, "float32", one_device)
    encoder = Encoder(policy.tokenizer, EncodingConfig(max_length=4096))
    questions = ["What is 17 + 25?", "Simplify $\\frac{12}{18}$ and explain every step that you take in doing so."]
    prompts = [Prompt(q, encoder.encode(q, []).tokens) for q in questions]
    found = sampled(policy, prompts, 1, temperature=0.0, max_new_tokens=24)
    together = sampled(policy, prompts, 8, rows=16, max_new_tokens=24)
    assert together[1:] == sampled(policy, prompts[1:], 8, rows=16, max_new_tokens=24)
    del policy
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, ((tokens, _),) in zip(prompts, found, strict=True):
        ids = torch.tensor(prompt.tokens[None]).long()
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, repetition_penalty=1.0, max_new_tokens=24
            )
        assert tokens == out[0, ids.shape[1] :].tolist()
