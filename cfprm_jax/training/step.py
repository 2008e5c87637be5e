"""The train step: one pure function of (state, batch), and its jitted form.

The loss of a batch is total / count over the *global* batch, so neither the number of devices nor gradient accumulation
changes it: every trajectory lies wholly in one row, a part of the rows therefore holds whole trajectories, and the
count is known from the labels before anything is computed. A loss that reads several trajectories at once (Loss.joint)
may need trajectories of several parts. There, with accumulation, a forward pass over all parts comes first, the loss
and its gradient by every step logit are those of the whole batch, and the backward pass of each part starts from those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from cfprm_jax.config import OptimizerConfig
from cfprm_jax.data.distinct import DistinctSteps
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.losses import Loss, bce
from cfprm_jax.models import parameters
from cfprm_jax.sharding import rules
from cfprm_jax.training import optimizer
from cfprm_jax.training.optimizer import Optimizer, Schedule

Forward = Callable[..., Float[Array, "rows length"]]
"""(params, tokens, positions, subtree_end) -> the output at every token: z, or in a last axis (z, redundancy).

With hidden=..., the trunk's output, for batches that contain it."""

Join = Callable[[Any, Any], Any]
"""(frozen, trainable) -> the parameters of a Forward: :meth:`cfprm_jax.models.partition.Partition.join`."""


class TrainState(NamedTuple):
    """All that a step changes, and with the data's state all that a checkpoint holds."""

    params: Any  # what the network computes with: float32, or bfloat16 as the optimizer holds them; nested dict
    opt_state: Any
    step: Any  # int32 scalar, optimizer steps done


def step_logits(forward: Forward, params: Any, batch: PackedBatch) -> Float[Array, "trajectories steps *outputs"]:
    """The outputs at the marker of every step of every trajectory; at padded steps they have no meaning."""
    cached = {} if batch.hidden is None else {"hidden": batch.hidden}
    z = forward(params, batch.tokens, batch.positions, batch.subtree_end, **cached)
    return z.reshape(-1, *z.shape[2:])[batch.step_positions]


def outputs(step_logits: Any) -> tuple[Any, Any]:
    """z, and the logit of redundancy where the head has one."""
    return (step_logits, None) if step_logits.ndim == 2 else (step_logits[..., 0], step_logits[..., 1])


def split_rows(batch: PackedBatch, parts: int) -> PackedBatch:
    """The batch as `parts` smaller ones, stacked on a new first axis; labels are left only in a trajectory's own part.

    Row r goes to part r mod parts, which keeps each part spread evenly over the devices that the rows are split over.
    """
    rows, length = batch.tokens.shape
    if rows % parts:
        raise UserError(f"--accumulation={parts} does not divide the {rows} rows of a batch")

    def deal(x: Any) -> jax.Array:
        return x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    def keep(labels: Any) -> jax.Array:
        return jnp.where(mine, labels, jnp.nan)

    row, column = jnp.divmod(batch.step_positions, length)
    mine = row % parts == jnp.arange(parts)[:, None, None]
    step_positions = jnp.broadcast_to(row // parts * length + column, mine.shape)
    distinct = batch.distinct
    if distinct is not None:
        nodes = jnp.broadcast_to(distinct.nodes, mine.shape)
        questions = jnp.broadcast_to(distinct.questions, (parts, *distinct.questions.shape))
        distinct = DistinctSteps(nodes, keep(distinct.labels), questions)
    rows_of_parts = (deal(batch.tokens), deal(batch.positions), deal(batch.subtree_end))
    redundancy = None if batch.redundancy is None else keep(batch.redundancy)
    hidden = None if batch.hidden is None else deal(batch.hidden)
    return PackedBatch(*rows_of_parts, step_positions, keep(batch.labels), distinct, redundancy, hidden)


def batch_sums(
    z: Float[Array, "trajectories steps"], labels: Float[Array, "trajectories steps"]
) -> dict[str, jax.Array]:
    """Sums over labelled steps from which accuracy and mean scores follow; parts of a batch add up."""
    positive, negative, score = labels > 0.5, labels <= 0.5, jax.nn.sigmoid(z)
    return {
        "right": jnp.sum((positive & (z > 0)) | (negative & (z <= 0)), dtype=jnp.float32),
        "positives": jnp.sum(positive, dtype=jnp.float32),
        "negatives": jnp.sum(negative, dtype=jnp.float32),
        "positive_score": jnp.sum(jnp.where(positive, score, 0.0)),
        "negative_score": jnp.sum(jnp.where(negative, score, 0.0)),
    }


Gradients = tuple[Float[Array, ""], dict[str, jax.Array], Any]
"""Loss of the batch, its sums for metrics, gradients of the parameters."""


class Counts(NamedTuple):
    """What the sums of a batch are divided by."""

    labels: Float[Array, ""]
    redundancy: Float[Array, ""] | None  # None without second targets


def counts_of(loss: Loss, whole: PackedBatch) -> Counts:
    """The counts of a whole batch, which its labels alone determine."""
    _, count = loss(jnp.zeros_like(whole.labels), jnp.asarray(whole.labels), whole.distinct)
    if whole.redundancy is None:
        return Counts(count, None)
    return Counts(count, bce(jnp.zeros_like(whole.redundancy), jnp.asarray(whole.redundancy))[1])


def batch_loss(
    loss: Loss, step_logits: Float[Array, "trajectories steps *outputs"], batch: PackedBatch, counts: Counts
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """The loss of a batch or what a part adds to it, and sums for metrics.

    It is the loss of the steps, and that of the redundancy output by its weight, each a mean of its own.

    Args:
      counts: of the whole batch.
    """
    (z, redundancy), labels = outputs(step_logits), jnp.asarray(batch.labels)
    total, _ = loss(z, labels, batch.distinct)
    value, sums = _mean(total, counts.labels), batch_sums(z, loss.labels(labels, batch.distinct))
    if redundancy is not None and counts.redundancy is not None:
        total, _ = bce(redundancy, jnp.asarray(batch.redundancy))
        sums["redundancy_loss"] = _mean(total, counts.redundancy)
        value += loss.redundancy_weight * sums["redundancy_loss"]
    return value, sums


def _mean(total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """0 without a label. A count is a sum of weights, which may lie below 1."""
    return total / jnp.where(count > 0, count, 1.0)


def _objective(
    forward: Forward, loss: Loss, whole: PackedBatch
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """(params, part of the whole batch) -> what the part adds to loss and sums."""
    counts = counts_of(loss, whole)

    def objective(params: Any, part: PackedBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        return batch_loss(loss, step_logits(forward, params, part), part, counts)

    return objective


def _whole_gradients(state: TrainState, batch: PackedBatch, forward: Forward, loss: Loss) -> Gradients:
    """All rows at once."""
    (value, sums), grads = jax.value_and_grad(_objective(forward, loss, batch), has_aux=True)(state.params, batch)
    return value, sums, grads


def _summed_gradients(state: TrainState, batch: PackedBatch, forward: Forward, loss: Loss, parts: int) -> Gradients:
    """One part of the rows after another, whose losses add up."""
    value_and_grad = jax.value_and_grad(_objective(forward, loss, batch), has_aux=True)

    def add(carry: Any, numbered: tuple[jax.Array, PackedBatch]) -> tuple[Any, None]:
        (values, grads), (number, part) = carry, numbered
        new_values, new_grads = value_and_grad(state.params, part)
        grads = optimizer.add_gradients(grads, new_grads, state.step * parts + number)
        return (jax.tree.map(jnp.add, values, new_values), grads), None

    split = split_rows(batch, parts)
    shapes = jax.eval_shape(value_and_grad, state.params, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    ((value, sums), grads), _ = jax.lax.scan(add, zeros, (jnp.arange(parts), split))
    return value, sums, grads


def _joint_gradients(state: TrainState, batch: PackedBatch, forward: Forward, loss: Loss, parts: int) -> Gradients:
    """One part of the rows after another, for a loss of all step logits together: forward, and forward and backward."""
    split, counts = split_rows(batch, parts), counts_of(loss, batch)
    part_of_step = batch.step_positions // batch.tokens.shape[1] % parts

    def only(number: jax.Array, own: jax.Array, other: Any) -> jax.Array:
        """Values of this part's steps, and others elsewhere."""
        mine = part_of_step == number
        return jnp.where(mine.reshape(*mine.shape, *(1,) * (own.ndim - 2)), own, other)

    def read(z: jax.Array, numbered: tuple[jax.Array, PackedBatch]) -> tuple[jax.Array, None]:
        number, part = numbered
        return only(number, step_logits(forward, state.params, part), z), None

    numbered = (jnp.arange(parts), split)
    one = jax.tree.map(lambda x: x[0], split)
    z = jax.eval_shape(lambda: step_logits(forward, state.params, one))
    z, _ = jax.lax.scan(read, jnp.zeros(z.shape, jnp.float32), numbered)
    (value, sums), slopes = jax.value_and_grad(lambda z: batch_loss(loss, z, batch, counts), has_aux=True)(z)

    def pulled(params: Any, number: jax.Array, part: PackedBatch) -> jax.Array:
        return jnp.sum(only(number, slopes * step_logits(forward, params, part), 0.0))

    def add(grads: Any, numbered: tuple[jax.Array, PackedBatch]) -> tuple[Any, None]:
        number, part = numbered
        new_grads = jax.grad(pulled)(state.params, number, part)
        return optimizer.add_gradients(grads, new_grads, state.step * parts + number), None

    grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), numbered)
    return value, sums, grads


def train_step(
    state: TrainState,
    batch: PackedBatch,
    *,
    forward: Forward,
    loss: Loss,
    config: OptimizerConfig,
    tx: Optimizer,
    schedule: Schedule,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """One optimizer step. Metrics are float32 scalars, over the labels that count; a mean over nothing is NaN."""
    if config.accumulation == 1:
        value, sums, grads = _whole_gradients(state, batch, forward, loss)
    elif loss.joint:
        value, sums, grads = _joint_gradients(state, batch, forward, loss, config.accumulation)
    else:
        value, sums, grads = _summed_gradients(state, batch, forward, loss, config.accumulation)
    grad_norm = optimizer.global_norm(grads)
    scale = optimizer.clip_scale(grad_norm, config.max_grad_norm)
    params, opt_state = tx.update(grads, scale, state.params, state.opt_state, state.step)

    metrics = {
        "loss": value,
        "grad_norm": grad_norm,
        "learning_rate": schedule(state.step),
        "count": counts_of(loss, batch).labels,
        "step_accuracy": sums["right"] / (sums["positives"] + sums["negatives"]),
        "positive_score": sums["positive_score"] / sums["positives"],
        "negative_score": sums["negative_score"] / sums["negatives"],
    }
    if "redundancy_loss" in sums:
        metrics["redundancy_loss"] = sums["redundancy_loss"]
    return TrainState(params, opt_state, state.step + 1), metrics


def init_state(masters: Any, tx: Optimizer, shardings: TrainState) -> TrainState:
    """The state before the first step, of float32 parameters; it is born sharded."""
    init = jax.jit(tx.init, out_shardings=(shardings.params, shardings.opt_state))
    params, opt_state = init(masters)
    return TrainState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), shardings.step))


def state_shardings(tx: Optimizer, param_shardings: Any, mesh: Mesh) -> TrainState:
    """The sharding of every leaf of a state.

    Given to jit for init and step: without it XLA replicates the optimizer's state, and compiles the step twice.
    """
    return TrainState(param_shardings, tx.shardings(param_shardings), rules.replicated(mesh))


def abstract_state(tx: Optimizer, specs: Any, shardings: TrainState) -> TrainState:
    """Shapes, types and shardings of a state of parameters with these specs: what a checkpoint is restored onto."""
    masters = parameters.abstract_tree(specs)
    params, opt_state = jax.eval_shape(tx.init, masters)
    shapes = TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


@dataclasses.dataclass(frozen=True)
class Step:
    """A jitted step of (state or params, batch, frozen), and the frozen parameters that it takes each time.

    Attributes:
      jitted: the step.
      frozen: nested dict, empty where everything is trained; abstract arrays until :meth:`bind` replaces them.
    """

    jitted: Any
    frozen: Any

    def __call__(self, first: Any, batch: PackedBatch) -> Any:
        """The step of a state, or of the trained parameters in an evaluation."""
        return self.jitted(first, batch, self.frozen)

    def bind(self, frozen: Any) -> Step:
        """The step with these frozen parameters, which are never donated."""
        return dataclasses.replace(self, frozen=frozen)

    def lower(self, first: Any, batch: Any) -> Any:
        """Lowered for these arguments, arrays or abstract ones."""
        return self.jitted.lower(first, batch, self.frozen)


def bound(forward: Forward, join: Join, frozen: Any) -> Forward:
    """forward of the trained parameters, beside these frozen ones."""

    def own(trainable: Any, *inputs: Any, **cached: Any) -> Any:
        return forward(join(frozen, trainable), *inputs, **cached)

    return own


def jit_train_step(
    step: Callable[..., tuple[TrainState, dict[str, jax.Array]]],
    shardings: TrainState,
    mesh: Mesh,
    frozen: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> Step:
    """The step compiled once for each shape of a batch; the state's memory is used again for the new state.

    Args:
      step: (state, batch, frozen), a pure function.
      frozen: abstract arrays, with shardings, of the parameters that are not trained; none by default.
      compiler_options: as in jax.jit.
    """
    jitted = jax.jit(
        step,
        in_shardings=(shardings, rules.batch_shardings(mesh), _shardings_of(frozen)),
        out_shardings=(shardings, rules.replicated(mesh)),
        donate_argnums=0,
        compiler_options=compiler_options,
    )
    return Step(jitted, frozen or {})


def jit_eval_step(
    forward: Forward,
    loss: Loss,
    param_shardings: Any,
    mesh: Mesh,
    *,
    frozen: Any = None,
    compiler_options: dict[str, Any] | None = None,
    join: Join = lambda _, trainable: trainable,
) -> Step:
    """(params, batch) -> (step logits [trajectories, steps], with redundancy [trajectories, steps, 2], total, count).

    Args:
      frozen: as of :func:`jit_train_step`.
      join: what makes frozen and params the parameters of forward.
    """

    def step(params: Any, batch: PackedBatch, frozen: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        z = step_logits(bound(forward, join, frozen), params, batch)
        return z, *loss(outputs(z)[0], jnp.asarray(batch.labels), batch.distinct)

    jitted = jax.jit(
        step,
        in_shardings=(param_shardings, rules.batch_shardings(mesh), _shardings_of(frozen)),
        out_shardings=rules.replicated(mesh),
        compiler_options=compiler_options,
    )
    return Step(jitted, frozen or {})


def _shardings_of(frozen: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, frozen or {})
