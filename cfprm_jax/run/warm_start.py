"""Warm start from a PRM: head and encoding of its directory, unless a flag sets them.

A directory with a reward head is a PRM, published or exported here. Options without a flag are taken from it: the kind
of head from its tensors; marker, system prompt and step separator from prm.json, which every export has. A published
PRM has no such file; then the flags apply, whose defaults are those of Qwen2.5-Math-PRM.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection
from typing import NamedTuple

from cfprm_jax.checkpoints.prm_file import PRM_FILE, read_prm
from cfprm_jax.config import EncodingConfig, ModelConfig
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading

# Options of the text that the model reads, which a run may have a reason to change.
_TEXT = ("system_prompt", "step_separator")


class Adopted(NamedTuple):
    """The options to train with, and log lines about their origin (none for a language model)."""

    model: ModelConfig
    encoding: EncodingConfig
    lines: tuple[str, ...]


def adopt(
    directory: pathlib.Path,
    model: ModelConfig,
    encoding: EncodingConfig,
    given: Collection[str],
    redundancy: bool = False,
) -> Adopted:
    """The options with those of a PRM's directory. For a language model they are unchanged.

    Args:
      given: names of the flags that were set, by --flagfile too.
      redundancy: whether the run trains a redundancy output.

    Raises:
      UserError: a flag names another head or marker than the PRM was trained with, for which its head means nothing.
    """
    head = loading.head_of(directory)
    if head is None:
        return Adopted(model, encoding, ())
    meta, theirs = read_prm(directory)
    if meta.get("redundancy") and not redundancy:
        raise UserError(
            f"{directory} has a redundancy output, which a run without --redundancy_weight would lose: give it a "
            "weight, or export the PRM with --drop_redundancy"
        )
    if "head" in given and model.head != head:
        raise UserError(f"--head={model.head}, but {directory} is a PRM with a head of kind {head}: leave --head out")
    lines = []
    if theirs is None:
        lines.append(f"a PRM with a {head} head, without {PRM_FILE}: marker and texts of the flags")
    else:
        if "marker" in given and encoding.marker != theirs.marker:
            raise UserError(
                f"--marker={encoding.marker}, but {directory} was trained with the marker {theirs.marker}: leave "
                "--marker out"
            )
        kept = {name for name in _TEXT if name in given and getattr(encoding, name) != getattr(theirs, name)}
        taken = {name: getattr(theirs, name) for name in ("marker", *_TEXT) if name not in kept}
        encoding = dataclasses.replace(encoding, **taken)
        lines.append(f"a PRM with a {head} head; of its {PRM_FILE}: {', '.join(taken)}")
        lines += [f"--{name} of the flag; the PRM was trained with {getattr(theirs, name)!r}" for name in kept]
    lines.append(f"marker {encoding.marker!r}, step separator '{encoding.step_separator}'")
    lines.append(f"system prompt {encoding.system_prompt!r}")
    return Adopted(dataclasses.replace(model, head=head), encoding, tuple(lines))


def adopt_own(
    directory: pathlib.Path, model: ModelConfig, encoding: EncodingConfig, given: Collection[str]
) -> tuple[ModelConfig, EncodingConfig]:
    """The options of a run that is resumed from its own model/: head and encoding from there, unless a flag sets them.

    Raises:
      UserError: a field of prm.json is not what train writes.
    """
    meta, theirs = read_prm(directory)
    if "head" not in given:
        model = dataclasses.replace(model, head=meta.get("head", model.head))
    if theirs is not None:
        own = {name: getattr(theirs, name) for name in ("marker", *_TEXT) if name not in given}
        encoding = dataclasses.replace(encoding, **own)
    return model, encoding
