"""A small policy: a Qwen2 language model that imitates demonstrations, so that its mistakes are its own.

Next-token cross entropy over the solution and the token that ends it, on the same backbone, rows and optimizer as the
reward models; the output layer is the embedding ("tied"), as in small Qwen2.5 models. The result is a Hugging Face
directory of a Qwen2ForCausalLM.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from safetensors.numpy import load_file, save_file

from cfprm_jax.config import EncodingConfig, OptimizerConfig
from cfprm_jax.data.batching import shuffled
from cfprm_jax.data.encoding import Encoded, Encoder, load_tokenizer, marker_id, save_tokenizer
from cfprm_jax.data.packing import PackedBatch, pack
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.errors import UserError
from cfprm_jax.models import parameters
from cfprm_jax.models.backbone import Backbone
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.runtime import atomic
from cfprm_jax.training import optimizer

_WEIGHTS = "model.safetensors"

Demonstration = tuple[str, Sequence[str]]
"""A question, and the steps of a solution to it."""


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """How the policy is trained.

    Attributes:
      batch_size: demonstrations a step.
      row_length: tokens of the rows that they are packed into; none may be longer.
      optimizer: learning rate and schedule.
    """

    batch_size: int = 32
    row_length: int = 128
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=3e-3, warmup_fraction=0.1, adam_b2=0.99)
    )


def encode(
    demonstrations: Sequence[Demonstration], tokenizer: transformers.PreTrainedTokenizerBase, encoding: EncodingConfig
) -> list[Encoded]:
    """Demonstrations as packing takes them: a "step" at every token that predicts one, its "label" the predicted id.

    Ids are exact in float32 below 2^24.
    """
    encoder = Encoder(tokenizer, encoding)
    texts = [encoding.separator.join(steps) for _, steps in demonstrations]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    out = []
    for (question, _), solution in zip(demonstrations, ids, strict=True):
        prompt = encoder.encode(question, ()).tokens
        tokens = np.concatenate([prompt, np.asarray(solution, np.int32)])
        targets = np.asarray([*solution, tokenizer.eos_token_id], np.float32)
        out.append(Encoded(tokens, np.arange(len(prompt) - 1, len(tokens), dtype=np.int32), targets, 0))
    return out


def train_policy(
    directory: str | pathlib.Path,
    demonstrations: Sequence[Demonstration],
    tokenizer: transformers.PreTrainedTokenizerBase,
    raw: dict[str, Any],
    *,
    encoding: EncodingConfig,
    config: PolicyConfig,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """One pass over the demonstrations from random weights, written as a Hugging Face directory.

    Args:
      directory: is created.
      raw: config.json of the network, with tied embeddings.
      seed: of the weights and the order.
      progress: called with (completed steps, total steps).

    Returns:
      The mean loss (nats a token) over the last tenth of the steps.

    Raises:
      UserError: a demonstration is longer than a row.
    """
    network = PRMConfig(BackboneConfig.from_hf(raw), "linear", "float32", "xla", "none")
    encoded = encode(demonstrations, tokenizer, encoding)
    longest = max(len(one.tokens) for one in encoded)
    if longest > config.row_length:
        raise UserError(f"a demonstration of {longest} tokens is longer than the policy's rows, {config.row_length}")
    steps = len(encoded) // config.batch_size
    step, tx = _compiled(network, config.optimizer, steps)
    params = jax.jit(lambda key: parameters.init_params(network, key)["backbone"])(jax.random.key(seed))
    state = (params, jax.jit(tx.init)(params))
    shapes = _shapes(encoded, config)
    # Seeds that differ by a token shall not compile again.
    most = -(-max(len(one.step_positions) for one in encoded) // 16) * 16
    order = shuffled(len(encoded), seed)
    values = []
    for k in range(steps):
        members = [encoded[i] for i in order[k * config.batch_size : (k + 1) * config.batch_size]]
        batch = pack(members, "sequence", shapes, config.batch_size, most)
        state, loss = step(state, batch)
        values.append(loss)
        if progress is not None:
            progress(k + 1, steps)
    _write(pathlib.Path(directory), state[0], network, raw, tokenizer)
    return float(np.mean(jax.device_get(values[-max(steps // 10, 1) :])))


@functools.lru_cache(maxsize=8)
def _compiled(network: PRMConfig, config: OptimizerConfig, steps: int) -> tuple[Any, optax.GradientTransformation]:
    """The jitted step of a run of num_steps, cached for runs with other seeds."""
    schedule = optimizer.learning_rate_schedule(config, steps)
    tx = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adam(schedule, b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps),
    )
    return jax.jit(functools.partial(_step, network=network, tx=tx), donate_argnums=0), tx


def _step(state: Any, batch: PackedBatch, *, network: PRMConfig, tx: Any) -> tuple[Any, jax.Array]:
    """(params, optimizer state) after one step, and its loss."""
    params, opt_state = state

    def objective(params: Any) -> jax.Array:
        tokens, positions, subtree_end = map(jnp.asarray, batch[:3])
        hidden = Backbone(network, params)(tokens, positions, subtree_end)
        hidden = hidden.reshape(-1, hidden.shape[-1])[batch.step_positions]
        embedding = params["embedding"]
        logits = jnp.einsum("tsd,vd->tsv", hidden, embedding, precision=jax.lax.Precision.HIGHEST)
        labels = jnp.asarray(batch.labels)
        known = ~jnp.isnan(labels)
        targets = jnp.where(known, labels, 0).astype(jnp.int32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
        return jnp.sum(jnp.where(known, losses, 0.0)) / jnp.sum(known)

    loss, grads = jax.value_and_grad(objective)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def _shapes(encoded: Sequence[Encoded], config: PolicyConfig) -> RowShapes:
    """Rows for a batch of usual size, and more for those that are larger."""
    mean = sum(len(one.tokens) for one in encoded) / len(encoded)
    usual = math.ceil(1.2 * mean * config.batch_size / config.row_length) + 1
    usual = min(usual, config.batch_size)
    return RowShapes(((usual, config.row_length), (config.batch_size, config.row_length)))


def _write(directory: pathlib.Path, params: Any, network: PRMConfig, raw: dict[str, Any], tokenizer: Any) -> None:
    """The Hugging Face directory; the output layer is tied, so that the backbone is all there is."""
    directory.mkdir(parents=True, exist_ok=True)
    host = jax.device_get(params)
    tensors: dict[str, np.ndarray] = {}
    for path, spec in parameters.walk(parameters.param_specs(network)["backbone"]):
        value = np.asarray(parameters.lookup(host, path))
        layers = value if spec.stacked else [value]
        tensors |= {name: np.ascontiguousarray(one) for name, one in zip(spec.hf_names(), layers, strict=True)}
    save_file(tensors, directory / _WEIGHTS, {"format": "pt"})
    end = tokenizer.eos_token_id
    files = {
        "config.json": {**raw, "eos_token_id": end},
        "generation_config.json": {"eos_token_id": end, "pad_token_id": tokenizer.pad_token_id},
    }
    for name, content in files.items():
        atomic.write_json(directory / name, content)
    save_tokenizer(tokenizer, directory)


def write_backbone(policy: pathlib.Path, directory: pathlib.Path, encoding: EncodingConfig) -> None:
    """A copy of a policy for reward models to start from, in which the marker's embedding is the separator's.

    The policy's texts never hold the marker, which stands in the separator's place: reward models then begin with what
    the policy has learned to read. The policy itself keeps its own, as its output layer is the embedding.
    """
    shutil.copytree(policy, directory, dirs_exist_ok=True)
    tokenizer = load_tokenizer(directory, encoding.marker)
    separator = tokenizer(encoding.separator, add_special_tokens=False)["input_ids"]
    tensors = load_file(directory / _WEIGHTS)
    embedding = np.array(tensors["model.embed_tokens.weight"])
    embedding[marker_id(tokenizer, encoding.marker)] = embedding[separator].mean(axis=0)
    save_file({**tensors, "model.embed_tokens.weight": embedding}, directory / _WEIGHTS, {"format": "pt"})
