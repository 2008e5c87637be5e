"""The table of accelerators: topologies, memory, and the error where the compiler is missing."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.planning import accelerators
from cfprm_jax.planning.accelerators import ACCELERATORS, GIB, Gpu, Tpu
from cfprm_jax.training.flops import peak_flops


@pytest.mark.parametrize(("number", "shape"), [(1, "1x1x1"), (4, "1x1x4"), (8, "1x1x8"), (64, "1x8x8")])
def test_gpus_stand_eight_to_a_host(number: int, shape: str) -> None:
    assert ACCELERATORS["h100-80gb"].topology(number)["topology"] == shape


def test_numbers_that_are_not_sold() -> None:
    with pytest.raises(UserError, match="--num_devices=12: hosts have 8 GPUs"):
        ACCELERATORS["h200"].topology(12)
    with pytest.raises(UserError, match="--num_devices=3: slices of v5p have 4, 8, 16"):
        ACCELERATORS["v5p"].topology(3)


@pytest.mark.parametrize("name", [n for n, a in ACCELERATORS.items() if isinstance(a, Tpu)])
def test_slices_have_the_number_of_chips_of_their_names(name: str) -> None:
    for number in ACCELERATORS[name].slices:
        shape = ACCELERATORS[name].topology(number)["topology_name"].removeprefix(f"{name}:")
        product = 1
        for side in shape.split("x"):
            product *= int(side)
        assert product == number


@pytest.mark.parametrize("name", [n for n, a in ACCELERATORS.items() if isinstance(a, Gpu)])
def test_the_target_agrees_with_the_table(name: str) -> None:
    gpu = ACCELERATORS[name]
    text = gpu.target_config()
    assert f"core_count: {gpu.multiprocessors} " in text
    assert f"device_memory_size: {gpu.memory} " in text
    assert f'device_description_str: "{gpu.name}"' in text
    assert peak_flops(gpu.name)  # so that MFU is known there


def test_an_h800_is_an_h100_and_an_h200_one_with_more_memory() -> None:
    """So that what is compiled for one holds for the others."""
    h100 = ACCELERATORS["h100-80gb"]
    for name in ("h800-80gb", "h200"):
        other = ACCELERATORS[name]
        assert dataclasses.replace(other, name=h100.name, memory=h100.memory, bandwidth=h100.bandwidth) == h100
    assert ACCELERATORS["h800-80gb"].memory == h100.memory


def test_usable() -> None:
    gpu = ACCELERATORS["h100-80gb"]
    assert accelerators.usable(gpu, -1.0) == gpu.memory - 4 * GIB
    assert accelerators.usable(gpu, 0.0) == gpu.memory
    assert accelerators.usable(gpu, 2.5) == gpu.memory - round(2.5 * GIB)


def test_larger() -> None:
    assert accelerators.larger(ACCELERATORS["h100-80gb"], 2)[:3] == [4, 8, 16]
    assert accelerators.larger(ACCELERATORS["v5p"], 4)[0] == 8


def test_a_missing_compiler_is_an_error_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs its XLA compiler.*pip install '\.\[aot\]'"):
        accelerators.require_plugin(ACCELERATORS["v6e"])
