"""Markers for tokenizers without one: a token that the tokenizer keeps in reserve is renamed to the marker.

Llama 3 has <|reserved_special_token_0|> and more, Qwen2.5 and Qwen3 <|quad_end|> (for image regions, in models without
images), Mistral's tokenizers [control_8] or <SPECIAL_20> and more. Such a token keeps its id, so every other text keeps
its ids, and no text gives it. The embedding is there; it has hardly been trained, as that of any new token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cfprm_jax.config import QWEN_MARKER_ID

RENAMED_FROM = "marker_renamed_from"
"""Key of tokenizer_config.json and prm.json: what the tokenizer of the backbone calls the marker."""

# What id 151651 is called in a stock Qwen2.5 tokenizer.
_QWEN = "<|quad_end|>"
_RESERVED = (
    re.compile(r"<\|reserved_special_token_\d+\|>"),
    re.compile(r"\[control_\d+\]"),
    re.compile(r"<SPECIAL_\d+>"),
    re.compile(r"[<\[]\|?(reserved|unused|extra_id|dummy|placeholder)[_-]?(token_?)?\d+\|?[>\]]"),
)


def reserved_token(description: Mapping[str, Any], beside: Mapping[str, Any], template: str) -> str | None:
    """The added token that becomes the marker: Qwen's, or of the first kind that there is the one of the lowest id.

    A token that has a role is none of them: bos, eos, pad and so on of tokenizer_config.json, or part of the template.

    Args:
      description: tokenizer.json.
      beside: the fields of tokenizer_config.json and special_tokens_map.json.
      template: all text of chat templates.
    """
    added = sorted((token["id"], token["content"]) for token in description.get("added_tokens") or ())
    roles = {_content(value) for key, value in beside.items() if key.endswith("_token")}
    free = [(index, name) for index, name in added if name not in roles and name not in template]
    if (QWEN_MARKER_ID, _QWEN) in free:
        return _QWEN
    return next((name for kind in _RESERVED for _, name in free if kind.fullmatch(name)), None)


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def renamed(description: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """tokenizer.json with the new name in the place of an added token's old one, in the vocabulary too if it is there.

    Without the latter the library would give the new name a new id.
    """
    added = [{**token, "content": new} if token["content"] == old else token for token in description["added_tokens"]]
    model = dict(description["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new if name == old else name: index for name, index in model["vocab"].items()}
    else:
        model["vocab"] = [[new if name == old else name, score] for name, score in model["vocab"]]
    return {**description, "added_tokens": added, "model": model}


def replaced(value: Any, old: str, new: str) -> Any:
    """A JSON value with every string or key that is the old name replaced; a longer string that has it is left."""
    if isinstance(value, dict):
        return {replaced(key, old, new): replaced(entry, old, new) for key, entry in value.items()}
    if isinstance(value, list):
        return [replaced(entry, old, new) for entry in value]
    return new if value == old else value
