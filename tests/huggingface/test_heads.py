"""Reward heads as tensors: a linear head in two layers is recognised exactly, and only it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from cfprm_jax.huggingface import heads
from cfprm_jax.huggingface.safetensors_files import read_header

WIDTH = 6


def folded(labels, dtype=np.float32):
    """The tensors of a linear head, w and b, in two layers."""
    generator = np.random.default_rng(0)
    weight, bias = np.zeros((WIDTH, WIDTH)), np.zeros(WIDTH)
    weight[0] = generator.standard_normal(WIDTH)
    weight[0, 3] = 0
    bias[0] = 0.3
    weight[1], bias[1] = -weight[0], -bias[0]
    output = np.zeros((labels, WIDTH))
    output[-1, :2] = 1, -1
    tensors = {
        "score.0.weight": weight,
        "score.0.bias": bias,
        "score.2.weight": output,
        "score.2.bias": np.zeros(labels),
    }
    return {name: value.astype(dtype) for name, value in tensors.items()}


def stored(tensors, directory):
    path = directory / "model.safetensors"
    safetensors.numpy.save_file(tensors, path)
    return {tensor.name: tensor for tensor in read_header(path)}


def test_kinds_by_names():
    assert heads.kind_by_names(["model.norm.weight"]) is None
    assert heads.kind_by_names(["score.weight", "score.bias"]) == "linear"
    assert heads.kind_by_names(["score.0.weight"]) == "mlp"


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_a_linear_head_in_two_layers(labels, dtype, tmp_path):
    tensors = folded(labels, dtype)
    found = stored(tensors, tmp_path)
    assert heads.is_folded(found)
    for name in ("score.0.weight", "score.0.bias"):
        np.testing.assert_array_equal(heads.unfolded_row(found[name]), tensors[name][:1].astype(np.float32))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("score.0.weight", (0, 2)),
        ("score.0.weight", (1, 3)),
        ("score.0.weight", (5, 5)),
        ("score.0.bias", (1,)),
        ("score.0.bias", (4,)),
        ("score.2.weight", (1, 0)),
        ("score.2.weight", (1, 5)),
        ("score.2.weight", (0, 1)),
        ("score.2.bias", (0,)),
        ("score.2.bias", (1,)),
    ],
)
def test_one_number_off_and_it_is_an_mlp(name, place, tmp_path):
    tensors = folded(2)
    tensors[name][place] += 2**-20
    assert not heads.is_folded(stored(tensors, tmp_path))


@pytest.mark.parametrize("change", ["missing", "integers", "narrow", "labels"])
def test_what_could_not_be_one_is_not_read(change, tmp_path, monkeypatch):
    tensors = folded(2)
    if change == "missing":
        del tensors["score.0.bias"]
    elif change == "integers":
        tensors["score.2.bias"] = np.zeros(2, np.int32)
    elif change == "narrow":
        tensors["score.0.weight"] = np.zeros((4, WIDTH), np.float32)
    else:
        tensors |= {"score.2.weight": np.zeros((3, WIDTH), np.float32), "score.2.bias": np.zeros(3, np.float32)}
    found = stored(tensors, tmp_path)
    monkeypatch.setattr(heads, "_values", lambda _: pytest.fail("values were read"))
    assert not heads.is_folded(found)


def test_a_trained_second_layer_costs_no_reading_of_the_first(tmp_path, monkeypatch):
    tensors = folded(2)
    tensors["score.2.weight"] += 1
    found = stored(tensors, tmp_path)
    read, original = [], heads._values
    monkeypatch.setattr(heads, "_values", lambda tensor: read.append(tensor.name) or original(tensor))
    assert not heads.is_folded(found)
    assert "score.0.weight" not in read


@pytest.mark.parametrize("labels", [1, 2])
def test_the_row_that_gives_z(labels, tmp_path):
    weight = np.random.default_rng(0).standard_normal((labels, WIDTH)).astype(ml_dtypes.bfloat16)
    (tensor,) = stored({"score.weight": weight}, tmp_path).values()
    wide = weight.astype(np.float32)
    expected = wide if labels == 1 else wide[1:] - wide[:1]
    np.testing.assert_array_equal(heads.output_row(tensor), expected)
