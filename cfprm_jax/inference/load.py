"""A PRM from whatever holds one: a run of train, one of its checkpoints, or a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from jax.sharding import Mesh
from jaxtyping import Float32

from cfprm_jax.checkpoints.prm_file import read_prm
from cfprm_jax.checkpoints.retention import CHECKPOINTS
from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.huggingface.published_heads import Head, value_head, vocabulary_head
from cfprm_jax.inference.compute_dtype import compute_dtype
from cfprm_jax.inference.encodings import TABLE, default_config, make_encoder
from cfprm_jax.inference.encodings.recognise import Recognised, recognise
from cfprm_jax.inference.loaded import LoadedPRM, load_for_inference, warn
from cfprm_jax.inference.rows import sigmoid
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import param_specs
from cfprm_jax.sharding import rules


def open_prm(
    path: str | pathlib.Path,
    dtype: str = "auto",
    attention: str = "auto",
    mesh: Mesh | None = None,
    encoding: str = "auto",
    step_separator: str = "",
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
      encoding: how the PRM reads solutions, one of config.ENCODINGS: "auto" goes by the directory's files.
      step_separator: text between steps, with escapes (\\n); empty is the encoding's own. prm.json has it for cfprm.
      say: takes a line about a checkpoint of a run that is damaged, so that an older one is taken; see
        :func:`cfprm_jax.inference.loaded.load_for_inference`.

    Raises:
      UserError: nothing of that kind is there, its files do not tell the encoding, or the encoding's head is missing.
    """
    path = pathlib.Path(path)
    name = encoding_of(path, encoding, step_separator).name
    if is_run(path):
        return load_for_inference(path, dtype, attention, mesh, say)
    meta, described = read_prm(path)
    backbone, _ = loading.read_config(path)
    config = described or default_config(name, backbone.longest[0], step_separator)
    tokenizer = load_tokenizer(path, config.marker if TABLE[name].marker else None, backbone.vocab_size)
    kind, head = _head(path, name, tokenizer, config, backbone)
    dtype = compute_dtype(dtype, meta, path)
    mesh = mesh or rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    backend = rules.attention_backend(attention, mesh, backbone, dtype)
    network = PRMConfig(backbone, kind, dtype, backend, "none", meta.get("redundancy", False))
    shardings = rules.param_shardings(mesh, param_specs(network))
    params, _ = loading.load_params(path, network, shardings=shardings, dtype=jnp.dtype(dtype), head=head)
    return LoadedPRM(network, params, tokenizer, config, meta, name)


def is_run(path: pathlib.Path) -> bool:
    """Whether a directory is a run of train, or one of its checkpoints; RUN/best is."""
    target = path.resolve()
    return target.name == CHECKPOINTS or target.parent.name == CHECKPOINTS or (path / CHECKPOINTS).is_dir()


def encoding_of(path: str | pathlib.Path, encoding: str = "auto", step_separator: str = "") -> Recognised:
    """The encoding of what a directory holds, and the evidence; weights are not read.

    Raises:
      UserError: the files do not tell, or contradict encoding and step_separator.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        raise loading.no_such_directory(path, "a run of train, a checkpoint or a Hugging Face directory")
    if is_run(path):
        if encoding not in ("auto", "cfprm"):
            raise UserError(f"--encoding={encoding}, but {path} is a run of train, which is cfprm: leave it out")
        found = Recognised("cfprm", "a run of train")
    else:
        found = recognise(path, encoding, loading.read_config(path)[1])
    if step_separator:
        default_config(found.name, 8, step_separator)
    return found


def _head(
    path: pathlib.Path,
    name: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    config: EncodingConfig,
    backbone: BackboneConfig,
) -> tuple[str, Head | None]:
    """The kind of the reward head, and its values where the directory does not hold it as `score`."""
    source = TABLE[name].head
    if source == "value":
        return "linear", value_head(path, backbone)
    if source == "vocabulary":
        signs = make_encoder(name, tokenizer, config).signs()  # type: ignore[attr-defined]
        return "linear", vocabulary_head(path, backbone, *signs)
    kind = loading.head_of(path)
    if kind is None:
        raise UserError(f"{path} has no reward head (score.*): it is a language model, not a process reward model")
    return kind, None


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
        return sigmoid(self._outputs(question, steps)[:, 0]).tolist()

    def redundancy(self, question: str, steps: Sequence[str]) -> list[float]:
        """How likely it is of each step, in [0, 1], that it is right but of no use.

        Raises:
          UserError: the model has no redundancy output, or as of :meth:`score`.
        """
        outputs = self._outputs(question, steps)
        if outputs.shape[1] < 2:
            raise UserError("this model has no redundancy output: train --redundancy_weight gives one")
        return sigmoid(outputs[:, 1]).tolist()

    def _outputs(self, question: str, steps: Sequence[str]) -> Float32[np.ndarray, "steps outputs"]:
        if isinstance(steps, str):
            raise UserError("steps is one text, expected a sequence with a text a step")
        (outputs,) = self._scorer.start(self._scorer.plan([(question, steps)])).outputs()
        if outputs is None:
            limit = self._scorer.encoder.config.max_length
            raise UserError("a solution without steps" if not steps else f"the solution is longer than {limit} tokens")
        return outputs


def load(directory: str | pathlib.Path, dtype: str = "auto", encoding: str = "auto", step_separator: str = "") -> PRM:
    """The PRM of a run directory, a checkpoint or a Hugging Face directory (see :func:`open_prm`).

    Args:
      dtype: "float32" or "bfloat16", the type that the network computes in; "auto" is that of the run or the weights.
      encoding: "auto" for what the directory's files tell, or "cfprm", "qwen_prm", "trl", "math_shepherd", "rlhflow" or
        "skywork" (docs/encodings.md).
      step_separator: for trl, the separator that the PRM was trained with, "\\n" by default.
    """
    return PRM(Scorer(open_prm(directory, dtype, encoding=encoding, step_separator=step_separator), batch_rows=1))
