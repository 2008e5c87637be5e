"""Which stored results are taken."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from cfprm_jax.experiments.cell_runs import StoredResult, read_result, write_result
from cfprm_jax.run.options import RunConfig, TrainConfig


def config(max_steps: int) -> TrainConfig:
    return TrainConfig(run=dataclasses.replace(RunConfig(), max_steps=max_steps))


def test_a_result_with_the_options_of_its_run(tmp_path):
    path, result = tmp_path / "result.npz", StoredResult({"fingerprint": "a", "steps": 7}, {"right": np.eye(2)})
    assert read_result(path, lambda: "a") is None
    write_result(path, result, config(0))
    assert "--max_steps=0" in (tmp_path / "train.flags").read_text().splitlines()
    found = read_result(path, lambda: "a")
    assert found is not None and found.summary == result.summary
    np.testing.assert_array_equal(found.arrays["right"], np.eye(2))
    assert read_result(path, lambda: "b") is None
    content = path.read_bytes()
    write_result(path, StoredResult(json.loads(json.dumps(result.summary)), result.arrays), config(0))
    assert path.read_bytes() == content


@pytest.mark.parametrize(("asked", "taken"), [(6, True), (7, True), (8, False)])
def test_a_run_that_was_cut_short_is_repeated(tmp_path, asked, taken):
    """Its passes had fewer steps than its options ask for."""
    path = tmp_path / "result.npz"
    write_result(path, StoredResult({"fingerprint": "a", "steps": 7}, {}), config(asked))
    assert (read_result(path, lambda: "a") is not None) == taken
    (tmp_path / "train.flags").unlink()
    assert read_result(path, lambda: "a") is not None
