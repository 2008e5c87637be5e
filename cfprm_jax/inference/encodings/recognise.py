"""The encoding of a Hugging Face directory, from its own files: never guessed."""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

from cfprm_jax.checkpoints.prm_file import PRM_FILE
from cfprm_jax.config import ENCODINGS, MARKER
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.huggingface.published_heads import VALUE_HEAD
from cfprm_jax.huggingface.safetensors_files import list_directory
from cfprm_jax.inference.encodings.math_shepherd import TAG
from cfprm_jax.runtime import regular_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
_CARD = "README.md"


class Recognised(NamedTuple):
    """The name of an encoding, and the evidence for it."""

    name: str
    reason: str


def recognise(directory: pathlib.Path, encoding: str, raw: dict[str, Any]) -> Recognised:
    """The encoding of a PRM.

    Args:
      encoding: one of ENCODINGS; "auto" detects it from the files of the directory; any other is used unless there is
        a prm.json.
      raw: its config.json.

    Raises:
      UserError: the files do not determine the encoding, or contradict the given one.
    """
    if encoding not in ENCODINGS:
        raise UserError(f"--encoding: {encoding!r} is not among: {', '.join(ENCODINGS)}")
    if (directory / PRM_FILE).is_file():
        if encoding not in ("auto", "cfprm"):
            raise UserError(f"--encoding={encoding}, but {directory / PRM_FILE} describes a cfprm PRM: omit it")
        return Recognised("cfprm", PRM_FILE)
    if encoding != "auto":
        return Recognised(encoding, f"--encoding={encoding}")
    architectures = raw.get("architectures")
    named = set(map(str, architectures)) if isinstance(architectures, list) else set()
    names = {tensor.name for tensor in list_directory(directory).tensors}
    if VALUE_HEAD in names:
        return Recognised("skywork", f"{VALUE_HEAD} is among its tensors")
    if loading.head_of(directory) is not None:
        if "Qwen2ForProcessRewardModel" in named and _knows_marker(directory):
            return Recognised("qwen_prm", f"Qwen2ForProcessRewardModel, and {MARKER} in its tokenizer")
        raise UserError(
            f"{directory} does not record its encoding (no {PRM_FILE}, and its files are not those of a known "
            f"published PRM): set --encoding={'|'.join(name for name in ENCODINGS if name != 'auto')}; "
            "of TRL's trainer it is trl"
        )
    card = directory / _CARD
    if regular_files.contains(card, TAG, "candidate_tokens"):
        return Recognised("math_shepherd", f"a language model, scored at {TAG!r} in its {_CARD}")
    if regular_files.contains(card, "process-supervised reward", "RLHFlow/RLHF-Reward-Modeling"):
        return Recognised("rlhflow", f"a language model, RLHFlow's process-supervised reward by its {_CARD}")
    raise UserError(
        f"{directory} has no reward head (score.*): it is a language model, not a process reward model. "
        "If its '+' and '-' are scores, name --encoding=math_shepherd or --encoding=rlhflow"
    )


def _knows_marker(directory: pathlib.Path) -> bool:
    return any(regular_files.contains(directory / name, json.dumps(MARKER)) for name in _TOKENIZER_FILES)
