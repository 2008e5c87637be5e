"""--deterministic: the options of XLA and NCCL, and the code of XLA's GPU compiler, which then has no atomics."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from cfprm_jax.config import LossConfig, OptimizerConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.planning import ahead
from cfprm_jax.planning.accelerators import ACCELERATORS
from cfprm_jax.runtime import determinism
from cfprm_jax.training import program


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_platforms_need_nothing(platform: str) -> None:
    assert determinism.compiler_options(True, platform) == {}
    assert determinism.compiler_options(False, "gpu") == {}


def test_nccl_keeps_an_order() -> None:
    environment = {"NCCL_DEBUG": "WARN"}
    determinism.fix_collectives(environment)
    assert environment == {"NCCL_DEBUG": "WARN", "NCCL_NVLS_ENABLE": "0"}
    determinism.fix_collectives(environment)
    with pytest.raises(UserError, match=r"--deterministic: NCCL_NVLS_ENABLE=1 .*unset it"):
        determinism.fix_collectives({"NCCL_NVLS_ENABLE": "1"})


def abstract_batch(shardings: PackedBatch) -> PackedBatch:
    rows, steps = (4, 256), (8, 4)
    shapes = {"tokens": rows, "positions": rows, "subtree_end": rows, "step_positions": steps, "labels": steps}
    return PackedBatch(
        **{
            name: jax.ShapeDtypeStruct(
                shape, jnp.float32 if name == "labels" else jnp.int32, sharding=getattr(shardings, name)
            )
            for name, shape in shapes.items()
        }
    )


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="no XLA compiler for GPUs: pip install '.[aot]'",
)
@pytest.mark.parametrize(("deterministic", "mesh"), [(False, "data=1"), (True, "data=1"), (True, "fsdp=4")])
def test_an_h100_adds_in_order(tmp_path: pathlib.Path, deterministic: bool, mesh: str) -> None:
    """A train step: no scatter to places that may be equal, no atomic in any kernel in NVIDIA's assembler, and cuDNN,
    whose kernels are made on the device, gets the same by an option of the module."""
    place = ahead.open_mesh(ACCELERATORS["h100-80gb"], 4 if "4" in mesh else 1, mesh)
    network = PRMConfig(BackboneConfig(1024, 128, 128, 2, 4, 4, 64), dtype="bfloat16", attention="cudnn")
    built = program.build(network, LossConfig(), OptimizerConfig(), 10, place, deterministic=deterministic)
    lowered = built.train_step.lower(built.abstract_state(), abstract_batch(built.batch_shardings))
    text = lowered.compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}).as_text()

    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text
    (options,) = tmp_path.glob("*train_step*.config.pbtxt")
    assert ("xla_gpu_deterministic_ops: true" in options.read_text()) == deterministic
    scatters = re.findall(r"^.* scatter\(.*$", text, re.MULTILINE)
    assert len(scatters) >= 2  # the gradients of the embedding and of the scores at the markers
    unordered = [line for line in scatters if "unique_indices=true" not in line]
    kernels = list(tmp_path.glob("*.ptx"))
    assert len(kernels) > 50
    atomic = [path.name for path in kernels if re.search(r"\b(atom|red)\.", path.read_text())]
    # Without the flag there is one, or this test would be vacuous.
    expected = 0 if deterministic else 1
    assert (len(unordered), len(atomic)) == (expected, expected)
