"""A PRM from whatever holds one: a run of train, one of its checkpoints, or a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cfprm_jax.checkpoints.saving import LoadedPRM, load_for_inference, warn
from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.rows import sigmoid
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import param_specs
from cfprm_jax.run.directory import CHECKPOINTS, compute_dtype, read_prm
from cfprm_jax.sharding import rules


def open_prm(
    path: str | pathlib.Path,
    dtype: str = "auto",
    attention: str = "auto",
    mesh: Mesh | None = None,
    encoding: EncodingConfig | None = None,
    say: Callable[[str], None] = warn,
) -> LoadedPRM:
    """The PRM that a directory holds, ready to score.

    Args:
      path: a run directory of train (its newest checkpoint), one of its checkpoints/STEP, the link best there, or a
        Hugging Face directory of a PRM.
      dtype: type that the network computes in, and of its weights; the reward head is float32. "auto" is the type that
        a run computed in, or that of the weights of a Hugging Face directory.
      attention: attention backend.
      mesh: where the parameters go; None is one device.
      encoding: how texts become tokens, for a Hugging Face directory that does not say so (prm.json, which export
        writes); a directory that does say is believed. None is EncodingConfig's defaults.
      say: takes a line about a checkpoint of a run that is damaged, so that an older one is taken; see
        :func:`cfprm_jax.checkpoints.saving.load_for_inference`.

    Raises:
      UserError: nothing of that kind is there, or a language model without a reward head.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        raise loading.no_such_directory(path, "a run of train, a checkpoint or a Hugging Face directory")
    target = path.resolve()  # of RUN/best
    if target.name == CHECKPOINTS or target.parent.name == CHECKPOINTS or (path / CHECKPOINTS).is_dir():
        return load_for_inference(path, dtype, attention, mesh, say)
    head = loading.head_of(path)
    if head is None:
        raise UserError(f"{path} has no reward head (score.*): it is a language model, not a process reward model")
    meta, described = read_prm(path)
    backbone, raw = loading.read_config(path)
    dtype = compute_dtype(dtype, meta, raw)
    mesh = mesh or rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    backend = rules.attention_backend(attention, mesh, backbone, dtype)
    config = PRMConfig(backbone=backbone, head=head, dtype=dtype, attention=backend, remat="none")
    shardings = rules.param_shardings(mesh, param_specs(config))
    params, _ = loading.load_params(path, config, shardings=shardings, dtype=jnp.dtype(dtype))
    encoding = described or encoding or EncodingConfig()
    tokenizer = load_tokenizer(path, encoding.marker, backbone.vocab_size)
    return LoadedPRM(config, params, tokenizer, encoding, meta)


def limited(loaded: LoadedPRM, max_length: int) -> LoadedPRM:
    """The PRM for solutions of up to max_length tokens; 0 is the length that it was trained for.

    Raises:
      UserError: the backbone does not take rows of that length.
    """
    if max_length:
        loaded = dataclasses.replace(loaded, encoding=dataclasses.replace(loaded.encoding, max_length=max_length))
    loaded.config.backbone.refuse_length(loaded.encoding.max_length)
    return loaded


class PRM:
    """A process reward model for notebooks: load once, score many."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def score(self, question: str, steps: Sequence[str]) -> list[float]:
        """The score of each step, in [0, 1].

        Raises:
          UserError: there are no steps, or they are longer than the model's max_length in tokens.
        """
        if isinstance(steps, str):
            raise UserError("steps is one text, expected a sequence with a text a step")
        (logits,) = self._scorer.score([(question, steps)])
        if logits is None:
            limit = self._scorer.encoder.config.max_length
            raise UserError("a solution without steps" if not steps else f"the solution is longer than {limit} tokens")
        return sigmoid(logits).tolist()


def load(directory: str | pathlib.Path, dtype: str = "auto") -> PRM:
    """The PRM of a run directory, a checkpoint or a Hugging Face directory (see :func:`open_prm`).

    Args:
      dtype: "float32" or "bfloat16", the type that the network computes in; "auto" is that of the run or the weights.
    """
    return PRM(Scorer(open_prm(directory, dtype), batch_rows=1))
