"""From a corpus file to the loss of a pass: the same under every packing, batch size and number of row shards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax import losses
from cfprm_jax.config import EncodingConfig, GranularityConfig, PackingConfig, ReadConfig
from cfprm_jax.data.corpus import open_corpus
from cfprm_jax.data.loader import Loader, evaluation_batches
from cfprm_jax.models import prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import init_params
from cfprm_jax.training import step

ENCODING = EncodingConfig(system_prompt="S", max_length=128)
STAGES = GranularityConfig(granularities=("2", "1"))
CONFIG = PRMConfig(BackboneConfig(512, 16, 24, 1, 2, 1, 8, initializer_range=0.3))
SOLUTIONS = 40


def rows() -> list[dict]:
    """Ten records of four solutions that leave a common path; hard, soft and missing labels."""
    rng = np.random.default_rng(0)
    out = []
    for record in range(SOLUTIONS // 4):
        path = [f"{record}+{i}" for i in range(5)]
        for end in range(1, 5):
            labels = [*[1.0, 0.7, None, 1.0, 1.0][:end], float(rng.integers(2))]
            steps = [*path[:end], f"no {end}"]
            out.append({"prompt": f"q{record}", "completions": steps, "labels": labels, "source": f"r{record}"})
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, make_rows, tokenizer):
    directory = tmp_path_factory.mktemp("corpus")
    path = make_rows(directory / "rows.jsonl", rows())
    return open_corpus(path, ReadConfig(), STAGES, ENCODING, tokenizer, cache_dir=directory / "cache")


@jax.jit
def sums(params, batch):
    """(total, count) of every loss."""
    z = step.step_logits(functools.partial(prm.apply, CONFIG), params, batch)
    labels = jnp.asarray(batch.labels)
    return jnp.array([losses.bce(z, labels), losses.mse(z, labels), losses.q_ranking(z, labels)])


def losses_by_granularity(batches) -> dict:
    """Total / count of every loss, over all batches of a granularity."""
    params, found = init_params(CONFIG, jax.random.key(1)), {}
    for batch in batches:
        part = np.asarray(sums(params, batch.packed), np.float64)
        found[batch.granularity] = found.get(batch.granularity, 0) + part
    return {granularity: part[:, 0] / part[:, 1] for granularity, part in found.items()}


def run(corpus, packing: str, batch_size: int = 64, row_multiple: int = 1) -> dict:
    options = PackingConfig(packing=packing, row_length=128, row_shapes=1, batch_size=batch_size)
    loader = Loader(corpus, STAGES, options, ENCODING, seed=0, row_multiple=row_multiple)
    assert loader.num_steps == 2 * -(-SOLUTIONS // batch_size)
    return losses_by_granularity(loader.batch(k) for k in range(loader.num_steps))


def test_a_pass_has_one_loss(corpus) -> None:
    expected = run(corpus, "none")
    assert expected.keys() == {1, 2}
    assert (expected[1] > 0).all()
    assert np.abs(expected[1] / expected[2] - 1).min() > 1e-3
    for options in (
        {"packing": "tree"},
        {"packing": "sequence"},
        {"packing": "tree", "batch_size": 7},
        {"packing": "sequence", "batch_size": 7},
        {"packing": "tree", "row_multiple": 8},
    ):
        found = run(corpus, **options)
        for granularity in (1, 2):
            np.testing.assert_allclose(found[granularity], expected[granularity], rtol=1e-5)


def test_evaluation_has_the_loss_of_a_pass(corpus) -> None:
    expected = run(corpus, "none")[1]
    packing = PackingConfig(packing="tree", row_length=128, row_shapes=1, batch_size=64)
    found = losses_by_granularity(evaluation_batches(corpus, packing, ENCODING))
    np.testing.assert_allclose(found[1], expected, rtol=1e-5)
