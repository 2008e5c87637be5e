"""Activations of a step: residuals that the forward pass keeps of every layer for the backward pass.

They are the residuals of the objective's vector-Jacobian product as JAX traces it, for one device: its rows, and
its share of the heads and of the MLP. What --remat recomputes is not among them. Nor is what only the end of the
network keeps, or the layer at hand: that is gone when memory is fullest, at the end of the backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cfprm_jax import losses
from cfprm_jax.config import LossConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.models import parameters, prm
from cfprm_jax.models.partition import Partition
from cfprm_jax.training import step


def saved_bytes(
    partition: Partition,
    loss: LossConfig,
    params: Any,
    batch: PackedBatch,
    *,
    mesh: Mapping[str, int],
    accumulation: int,
) -> int:
    """Bytes that a device keeps of all layers between the forward and the backward pass of one microbatch.

    Parameters are not counted, nor copies of them in another type: neither are activations.

    Args:
      params: abstract arrays of what is trained, of the types that the network computes with.
      batch: abstract arrays of a whole batch.
      mesh: devices along each axis.
    """
    network, tensor = partition.network, mesh["tensor"]
    net = network.backbone
    local = dataclasses.replace(
        network,
        backbone=dataclasses.replace(
            net,
            num_attention_heads=-(-net.num_attention_heads // tensor),
            num_key_value_heads=-(-net.num_key_value_heads // tensor),
            intermediate_size=net.intermediate_size // tensor,
        ),
    )
    rows = max(batch.tokens.shape[0] // (mesh["data"] * mesh["fsdp"] * accumulation), 1)
    parts = dataclasses.replace(partition, network=local)
    weights = jax.tree.map(
        lambda p, own: jax.ShapeDtypeStruct(own.shape, p.dtype), params, parameters.abstract_tree(parts.trainable)
    )
    frozen = parameters.abstract_tree(parts.frozen, network.dtype)
    own_rows: Any = jax.ShapeDtypeStruct((rows, batch.tokens.shape[1]), jnp.int32)
    part = batch._replace(tokens=own_rows, positions=own_rows, subtree_end=own_rows)
    if batch.hidden is not None:
        own: Any = jax.ShapeDtypeStruct((*own_rows.shape, net.hidden_size), batch.hidden.dtype)
        part = part._replace(hidden=own)
    forward, loss_function = functools.partial(prm.apply, local), losses.loss_function(loss)

    def kept(weights: Any, part: PackedBatch, frozen: Any) -> Any:
        own = step.bound(forward, parts.join, frozen)

        def objective(weights: Any) -> jax.Array:
            z, _ = step.outputs(step.step_logits(own, weights, part))
            return loss_function(z, jnp.asarray(part.labels), part.distinct)[0]

        return jax.tree.leaves(jax.vjp(objective, weights)[1])

    program = jax.make_jaxpr(kept)(weights, part, frozen).jaxpr
    # The layers are one scan, whose outputs beside the carry are stacked over layers, and so have a dimension more than
    # within it. (Where the carry ends is written differently in each version of JAX.)
    scans = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    stacked = {
        id(outside)
        for scan in scans
        for outside, inside in zip(scan.outvars, scan.params["jaxpr"].out_avals, strict=True)
        if outside.aval.ndim > inside.ndim
    }
    residuals = {id(v): v.aval for v in program.outvars if id(v) in stacked}
    weight_shapes = {x.shape for x in jax.tree.leaves((weights, frozen))}
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in residuals.values() if x.shape not in weight_shapes)
