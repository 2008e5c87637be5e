"""A language model to sample from: a Hugging Face directory of one, its parameters laid out for decoding."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.checkpoints.model_files import GENERATION
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.huggingface.safetensors_files import StoredTensor, list_directory
from cfprm_jax.inference.compute_dtype import compute_dtype
from cfprm_jax.inference.decoder import DecoderParams
from cfprm_jax.model_directory import file_schemas, schema
from cfprm_jax.model_directory.json_files import read_object
from cfprm_jax.model_directory.tokenizer_files import check_chat_template
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import param_specs
from cfprm_jax.sharding import rules

_LM_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """What :class:`~cfprm_jax.inference.sampler.Sampler` samples from.

    Attributes:
      config: backbone and compute type (its reward head means nothing here).
      stops: ids that end a candidate.
    """

    config: PRMConfig
    params: DecoderParams
    tokenizer: transformers.PreTrainedTokenizerBase
    stops: tuple[int, ...]


def open_policy(directory: str | pathlib.Path, dtype: str, mesh: Mesh) -> Policy:
    """The language model of a Hugging Face directory.

    Args:
      dtype: "float32", "bfloat16", or "auto" for that of the weights.
      mesh: where the parameters go.

    Raises:
      UserError: the directory is not a supported language model, has no weights, or no end-of-turn token.
    """
    directory = pathlib.Path(directory)
    backbone, raw = loading.read_config(directory)
    if loading.head_of(directory) is not None:
        raise UserError(f"{directory} has a reward head (score.*): it is a process reward model, not a language model")
    dtype = compute_dtype(dtype, {}, directory)
    # One prompt is short, and is computed once for all its candidates: no kernel is worth its limits here.
    config = PRMConfig(backbone=backbone, dtype=dtype, attention="xla")
    head = None if backbone.tie_word_embeddings else _lm_head(directory, (backbone.vocab_size, backbone.hidden_size))
    tokenizer = load_tokenizer(directory, None, backbone.vocab_size)  # a policy needs no marker
    check_chat_template(tokenizer)
    stops = stop_ids(directory, raw, tokenizer)
    specs = param_specs(config)
    shardings = rules.param_shardings(mesh, specs)
    # load_params always creates a reward head; it is dropped.
    params, _ = loading.load_params(
        directory, config, shardings=shardings, dtype=jnp.dtype(dtype), head_key=jax.random.key(0)
    )
    backbone_params = params.pop("backbone")
    embedding = backbone_params["embedding"]
    if head is not None:
        spec = shardings["backbone"]["embedding"]
        embedding_of_head = jax.device_put(head.read().astype(jnp.dtype(dtype)), spec)
    else:
        embedding_of_head = embedding
    return Policy(
        config,
        DecoderParams(
            embedding, unstacked(backbone_params.pop("layers")), backbone_params["final_norm"], embedding_of_head
        ),
        tokenizer,
        stops,
    )


def unstacked(stacked: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The parameters of every layer, from those with the layer on axis 0; stacked is emptied, to hold them but once."""
    layers: list[dict[str, Any]] = []
    for name in list(stacked):
        value = stacked[name]
        if isinstance(value, Mapping):
            parts: Any = unstacked(value)
        else:
            parts = _rows(value)
        del stacked[name]  # type: ignore[attr-defined]
        layers = layers or [{} for _ in parts]
        for layer, part in zip(layers, parts, strict=True):
            layer[name] = part
    return tuple(layers)


def _rows(array: jax.Array) -> tuple[jax.Array, ...]:
    placed = array.sharding
    if isinstance(placed, NamedSharding):
        placed = NamedSharding(placed.mesh, PartitionSpec(*placed.spec[1:]))
    return jax.jit(tuple, out_shardings=placed)(array)


def _lm_head(directory: pathlib.Path, shape: tuple[int, int]) -> StoredTensor:
    """The tensor of an output head that is not the embedding."""
    held = [tensor for tensor in list_directory(directory).tensors if tensor.name == _LM_HEAD]
    if len(held) != 1:
        found = "no" if not held else "more than one"
        raise UserError(f"{directory}: {found} {_LM_HEAD}, and config.json does not tie it to the embedding")
    if held[0].shape != shape:
        raise UserError(f"{directory}: {_LM_HEAD} has shape {list(held[0].shape)}, expected {list(shape)}")
    return held[0]


def stop_ids(
    directory: pathlib.Path, raw: Mapping[str, Any], tokenizer: transformers.PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The ids that end a turn: eos_token_id of generation_config.json, else of config.json; and the tokenizer's own.

    Raises:
      UserError: there is none, or one that is no id.
    """
    path, source = directory / GENERATION, raw
    if path.exists():
        source = read_object(path)
        schema.check(source, file_schemas.GENERATION, str(path))
        if source.get("eos_token_id") is None:
            source = raw
    named = source.get("eos_token_id")
    found = [i for i in (*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id) if i is not None]
    if not found:
        raise UserError(f"{directory}: neither {GENERATION}, config.json nor the tokenizer names an eos token")
    if not all(type(i) is int and 0 <= i < raw["vocab_size"] for i in found):
        raise UserError(
            f"{directory}: eos_token_id: expected ids below the vocab_size of {raw['vocab_size']}, found {found}"
        )
    return tuple(sorted(set(found)))
