"""Loading PRMs for inference: from a run of train, one of its checkpoints, or a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from jax.sharding import Mesh
from jaxtyping import Float32

from cfprm_jax.checkpoints.prm_file import read_prm
from cfprm_jax.checkpoints.saving import is_run, require_prm_directory
from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import hub, loading
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
    *,
    encoding: str = "auto",
    step_separator: str = "",
    log: Callable[[str], None] = warn,
) -> LoadedPRM:
    """Loads the PRM of a directory for scoring.

    Args:
      path: a run directory of train (its newest checkpoint), one of its checkpoints/STEP, its link best, or a Hugging
        Face directory of a PRM.
      dtype: dtype of the weights and the computation; the reward head is float32. "auto" is the dtype of the training
        run, or that of the weights of a Hugging Face directory.
      attention: attention backend.
      mesh: mesh of the parameters; None is a single device.
      encoding: encoding of solutions, one of config.ENCODINGS; "auto" detects it from the files of the directory.
      step_separator: step separator, with escapes (\\n); empty is the default of the encoding. prm.json defines it for
        cfprm.
      log: called with a message if a checkpoint is damaged and an older one is used; see
        :func:`cfprm_jax.inference.loaded.load_for_inference`.

    Raises:
      UserError: the directory contains no PRM, its files do not determine the encoding, or the head of the encoding is
        missing.
    """
    path = pathlib.Path(path)
    name = encoding_of(path, encoding, step_separator).name
    if is_run(path):
        return load_for_inference(path, dtype, attention, mesh, log)
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


def open_configured(path: str | pathlib.Path, config: Any, mesh: Mesh, log: Callable[[str], None] = warn) -> LoadedPRM:
    """:func:`open_prm` with the options of a command: dtype, attention, encoding and step_separator."""
    return open_prm(
        path,
        config.dtype,
        config.attention,
        mesh,
        encoding=config.encoding,
        step_separator=config.step_separator,
        log=log,
    )


def require_one_prm(model: str, checkpoint: str) -> None:
    """UserError unless exactly one of --model and --checkpoint is set."""
    if bool(model) == bool(checkpoint):
        raise UserError("expected either --model (a Hugging Face directory) or --checkpoint (a run of train)")


def encoding_of(path: str | pathlib.Path, encoding: str = "auto", step_separator: str = "") -> Recognised:
    """The encoding of the PRM in a directory, and the reason; weights are not read.

    Raises:
      UserError: the files do not determine the encoding, or contradict encoding or step_separator.
    """
    path = pathlib.Path(path)
    require_prm_directory(path)
    if is_run(path):
        if encoding not in ("auto", "cfprm"):
            raise UserError(f"--encoding={encoding}, but {path} is a run of train, whose encoding is cfprm: omit it")
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
    """The kind of the reward head; also its values, if the directory does not contain it as `score`."""
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
    """The PRM for solutions of up to max_length tokens; 0 is the maximum of training.

    Raises:
      UserError: the backbone does not support that length.
    """
    if max_length:
        loaded = dataclasses.replace(loaded, encoding=dataclasses.replace(loaded.encoding, max_length=max_length))
    loaded.config.backbone.check_length(loaded.encoding.max_length)
    return loaded


class PRM:
    """A loaded process reward model with a Python interface for scoring."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def score(self, question: str, steps: Sequence[str]) -> list[float]:
        """The score of each step, in [0, 1].

        Raises:
          UserError: there are no steps, or the solution is longer than the model's max_length in tokens.
        """
        return sigmoid(self._outputs(question, steps)[:, 0]).tolist()

    def score_many(
        self, questions: Sequence[str], solutions: Sequence[Sequence[str | Sequence[str]]]
    ) -> list[list[list[float]]]:
        """The scores of many solutions, computed together: [question][solution][step].

        Args:
          solutions: of each question its solutions, each as steps, or as a text that is split at the step separator.

        Raises:
          UserError: as of :meth:`score`, or another number of questions than of lists of solutions.
        """
        if len(questions) != len(solutions):
            raise UserError(f"{len(questions)} questions but {len(solutions)} lists of solutions")
        split, counts = self._scorer.encoder.split, SplitCounts()
        items = []
        for number, (question, own) in enumerate(zip(questions, solutions, strict=True)):
            if isinstance(own, str):
                raise UserError(f"solutions[{number}] is one text, expected a sequence of the solutions of a question")
            for solution in own:
                steps = split(solution) if isinstance(solution, str) else solution
                items.append((question, steps))
                if isinstance(solution, str):
                    counts.add(solution, steps)
        if warning := counts.warning(self._scorer.encoder.config.separator):
            warn(warning)
        found = iter(self._scorer.score(items))
        scores: list[list[list[float]]] = []
        for question, own in zip(questions, solutions, strict=True):
            scores.append([])
            for number in range(len(own)):
                z = next(found)
                if z is None:
                    raise UserError(
                        f"solution {number} of the question {question[:80]!r} has no steps, or more than "
                        f"{self._scorer.encoder.config.max_length} tokens"
                    )
                scores[-1].append(sigmoid(z).tolist())
        return scores

    def redundancy(self, question: str, steps: Sequence[str]) -> list[float]:
        """The redundancy of each step, in [0, 1]: the probability that it is correct but redundant.

        Raises:
          UserError: the model has no redundancy output, or as :meth:`score`.
        """
        outputs = self._outputs(question, steps)
        if outputs.shape[1] < 2:
            raise UserError("this model has no redundancy output (train with --redundancy_weight)")
        return sigmoid(outputs[:, 1]).tolist()

    def _outputs(self, question: str, steps: Sequence[str]) -> Float32[np.ndarray, "steps outputs"]:
        if isinstance(steps, str):
            raise UserError("steps is one text, expected a sequence with one text per step")
        (outputs,) = self._scorer.start(self._scorer.plan([(question, steps)])).outputs()
        if outputs is None:
            limit = self._scorer.encoder.config.max_length
            raise UserError(
                "the solution is without steps" if not steps else f"the solution is longer than {limit} tokens"
            )
        return outputs


def load(directory: str | pathlib.Path, dtype: str = "auto", encoding: str = "auto", step_separator: str = "") -> PRM:
    """Loads the PRM of a run directory, a checkpoint or a Hugging Face directory (see :func:`open_prm`).

    Args:
      directory: path, or name on the Hugging Face hub, "owner/name" or "owner/name@revision".
      dtype: "float32" or "bfloat16", the dtype of the computation; "auto" is that of the run or of the weights.
      encoding: "auto" to detect it from the files of the directory, or "cfprm", "qwen_prm", "trl", "math_shepherd",
        "rlhflow" or "skywork" (docs/encodings.md).
      step_separator: for trl, the separator of the training, "\\n" by default.
    """
    directory = hub.local_directory(str(directory), "directory")
    return PRM(Scorer(open_prm(directory, dtype, encoding=encoding, step_separator=step_separator), batch_rows=1))
