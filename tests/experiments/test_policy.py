"""The policy: its objective against torch, and a directory that others load."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.config import MARKER, EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.experiments.policy import PolicyConfig, encode, train_policy, write_backbone
from cfprm_jax.synthetic.model import make_config
from cfprm_jax.synthetic.tokenizer import make_tokenizer

ENCODING = EncodingConfig(max_length=128, system_prompt="")
DEMONSTRATIONS = [
    ("start=three+two", ("three+two=five", "answer=five")),
    ("start=one-two+three", ("one-two=six", "six+three=two", "answer=two")),
] * 48


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def policy(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy") / "policy"
    config = PolicyConfig(batch_size=16)
    loss = train_policy(
        directory, DEMONSTRATIONS, tokenizer, make_config(len(tokenizer)), encoding=ENCODING, config=config, seed=0
    )
    assert 0 < loss < 4
    return directory


def test_every_token_of_the_solution_and_its_end_is_predicted(tokenizer):
    (one,) = encode([("start=three+two", ("three+two=five", "answer=five"))], tokenizer, ENCODING)
    text = tokenizer.decode(one.tokens)
    assert text == "<|user|>start=three+two<|solution|>three+two=five\n\nanswer=five"
    predicted = [int(label) for label in one.labels]
    assert tokenizer.decode(predicted) == "three+two=five\n\nanswer=five<|endoftext|>"
    places = one.step_positions.tolist()
    assert predicted[:-1] == one.tokens[places[0] + 1 :].tolist() and places[-1] == len(one.tokens) - 1


def test_transformers_loads_what_was_learned(policy, tokenizer):
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(policy)
    fresh = transformers.AutoModelForCausalLM.from_config(model.config)
    losses = []
    for network in (model, fresh):
        total = count = 0
        for one in encode(DEMONSTRATIONS[:2], tokenizer, ENCODING):
            with torch.no_grad():
                logits = network(torch.tensor([one.tokens.tolist()])).logits[0]
            targets = torch.tensor(one.labels.astype(np.int64).tolist())
            chosen = torch.log_softmax(logits[one.step_positions.tolist()], -1).gather(1, targets[:, None])
            total, count = total - float(chosen.sum()), count + len(targets)
        losses.append(total / count)
    assert losses[0] < 0.75 * losses[1]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_same_seed_gives_the_same_policy(policy, tokenizer, tmp_path):
    for seed, same in ((0, True), (1, False)):
        again = tmp_path / str(seed)
        train_policy(
            again,
            DEMONSTRATIONS,
            tokenizer,
            make_config(len(tokenizer)),
            encoding=ENCODING,
            config=PolicyConfig(batch_size=16),
            seed=seed,
        )
        equal = (again / "model.safetensors").read_bytes() == (policy / "model.safetensors").read_bytes()
        assert equal == same


def test_the_backbone_reads_the_marker_as_the_separator(policy, tokenizer, tmp_path):
    from safetensors.numpy import load_file

    write_backbone(policy, tmp_path / "backbone", ENCODING)
    before, after = (load_file(d / "model.safetensors") for d in (policy, tmp_path / "backbone"))
    (separator,) = tokenizer("\n\n")["input_ids"]
    marker = tokenizer.convert_tokens_to_ids(MARKER)
    embedding = after.pop("model.embed_tokens.weight")
    expected = before.pop("model.embed_tokens.weight")
    assert not np.array_equal(expected[marker], expected[separator])
    expected[marker] = expected[separator]
    np.testing.assert_array_equal(embedding, expected)
    assert all(np.array_equal(before[name], after[name]) for name in before) and set(before) == set(after)


def test_a_demonstration_longer_than_a_row(tokenizer, tmp_path):
    config = PolicyConfig(batch_size=1, row_length=8)
    with pytest.raises(UserError, match="is longer than the policy's rows, 8"):
        train_policy(
            tmp_path / "p",
            DEMONSTRATIONS[:2],
            tokenizer,
            make_config(len(tokenizer)),
            encoding=ENCODING,
            config=config,
            seed=0,
        )
