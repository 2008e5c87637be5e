"""Memory that is not enough: XLA's own error, raised on the CPU by what no machine holds, as one line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import finish

from cfprm_jax.config import FrozenConfig, LoraConfig, ModelConfig, OptimizerConfig, PackingConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.runtime.out_of_memory import Watch

BATCH = PackedBatch(*(np.zeros((3, 6144), np.int32),) * 3, np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32))


def too_large(state, batch):
    return jax.jit(lambda: jnp.ones((1 << 45,), jnp.float32))().block_until_ready()  # 128 TiB


def watch(**options) -> Watch:
    """A watch of a run with these options: single ones of the model, whole groups of the others."""
    groups = {
        "optimizer": OptimizerConfig(accumulation=2),
        "packing": PackingConfig(batch_size=64),
        "lora": LoraConfig(),
        "frozen": FrozenConfig(),
    }
    groups |= {name: options.pop(name) for name in groups.keys() & options}
    return Watch(ModelConfig(**options), **groups)


def advice(one: Watch) -> str:
    with pytest.raises(UserError) as raised, one.explained():
        too_large(None, None)
    return str(raised.value)


def test_the_shape_and_what_to_change() -> None:
    one = watch(remat="none")
    step = one.watched(too_large, "a training step")
    with pytest.raises(UserError) as raised, one.explained():
        step(None, BATCH)
    text = str(raised.value)
    assert text.startswith("out of device memory: a training step on 3 rows of 6,144 tokens did not fit (Out of memory")
    for part in ("--remat=layer, --optimizer=adamw_compact, a larger --accumulation than 2", "--batch_size than 64"):
        assert part in text
    assert "--row_length (fitted to the data)" in text and "python -m cfprm_jax.plan" in text
    assert "\n" not in text
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def test_before_the_first_step_it_is_the_state() -> None:
    with pytest.raises(UserError, match="the weights and the optimizer's state did not fit"), watch().explained():
        too_large(None, None)


def test_what_is_thrifty_already_is_not_advised() -> None:
    thrifty = watch(optimizer=OptimizerConfig(optimizer="adamw_compact"), packing=PackingConfig(row_length=4096))
    text = advice(thrifty)
    assert "--remat" not in text and "adamw_compact" not in text and "--row_length (4096)" in text
    assert "--cache_frozen=auto" in advice(watch(frozen=FrozenConfig(2)))
    assert "--cache_frozen" not in advice(watch(frozen=FrozenConfig(2, "states")))


def test_what_train_refuses_is_not_advised() -> None:
    """The compact optimizer, with adapters or in float32."""
    assert "adamw_compact" in advice(watch())
    assert "adamw_compact" not in advice(watch(lora=LoraConfig(8)))
    assert "adamw_compact" not in advice(watch(dtype="float32"))


def test_outside_a_step_it_says_what_was_done_and_what_helps_there() -> None:
    with pytest.raises(UserError) as raised, watch().explained("the scoring", "more devices"):
        too_large(None, None)
    text = str(raised.value)
    assert text.startswith("out of device memory: the scoring did not fit (") and text.endswith("Choose more devices")


def test_results_pass_through_and_other_errors_stay_what_they_are() -> None:
    one = watch()
    assert one.watched(lambda state, batch, frozen: (state, frozen), "a step")(1, BATCH, 2) == (1, 2)
    with pytest.raises(jax.errors.JaxRuntimeError), one.explained():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(KeyError), one.explained():
        raise KeyError("x")


def test_a_run_ends_with_one_line(tiny) -> None:
    """Rows whose attention logits no address space holds."""
    options = {"row_length": 1 << 22, "attention": "xla", "batch_size": 1, "eval_fraction": 0.0, "remat": "layer"}
    text = finish(tiny.start(tiny.arguments("too_large", **options)), status=2)
    assert "Traceback" not in text
    last = text.strip().splitlines()[-1]
    assert "out of device memory: a training step on 1 row of 4,194,304 tokens did not fit" in last
    assert "--row_length (4194304)" in last and "--remat" not in last
