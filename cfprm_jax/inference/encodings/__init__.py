"""How PRMs read solutions, by the name of the encoding: text to token ids and score positions, and what gives z there.

The network and its reward head are the same for all: a linear head gives z at a score position, whether it was stored
as such, as a value head, or as two rows of a language-model head whose difference it is. sigmoid(z) is the step's score
as the PRM's own program gives it.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import transformers

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoded, Encoder, Item
from cfprm_jax.errors import UserError
from cfprm_jax.inference.encodings.math_shepherd import MathShepherdEncoder
from cfprm_jax.inference.encodings.rlhflow import RLHFlowEncoder
from cfprm_jax.inference.encodings.skywork import SkyworkEncoder
from cfprm_jax.inference.encodings.trl import TRLEncoder

# Maximum length of a solution for a PRM without prm.json: that of published PRMs.
_LONGEST = 4096


class SolutionEncoder(Protocol):
    """What the scorer needs of an encoding."""

    config: EncodingConfig

    def encode_many(self, items: list[Item]) -> list[Encoded]:
        """Ids and score positions of each solution; one that is too long has fewer positions than steps."""

    def split(self, text: str) -> list[str]:
        """The steps of a text that comes without them."""


@dataclasses.dataclass(frozen=True)
class Encoding:
    """One way to read solutions.

    Attributes:
      encoder: made from a tokenizer and an EncodingConfig.
      head: where z comes from: "score" (a classification head, one label or two), "value" (v_head.summary) or
        "vocabulary" (two rows of the language-model head; encoder.signs gives them).
      separator: the step_separator by default.
      marker: whether the encoding has a marker token of its own, and a chat template.
      separable: whether another separator may be named.
    """

    encoder: type
    head: str
    separator: str = "\\n\\n"
    marker: bool = False
    separable: bool = True


TABLE = {
    "cfprm": Encoding(Encoder, "score", marker=True, separable=False),
    "qwen_prm": Encoding(Encoder, "score", marker=True),
    "trl": Encoding(TRLEncoder, "score", separator="\\n"),
    "math_shepherd": Encoding(MathShepherdEncoder, "vocabulary"),
    "rlhflow": Encoding(RLHFlowEncoder, "vocabulary"),
    "skywork": Encoding(SkyworkEncoder, "value", separator="\\n", separable=False),
}


def make_encoder(name: str, tokenizer: transformers.PreTrainedTokenizerBase, config: EncodingConfig) -> SolutionEncoder:
    """The encoder of an encoding. UserError when the tokenizer does not have what it needs."""
    encoder: SolutionEncoder = TABLE[name].encoder(tokenizer, config)
    return encoder


def default_config(name: str, positions: int, step_separator: str = "") -> EncodingConfig:
    """The options of a PRM whose directory has no prm.json.

    Args:
      positions: the most tokens that the backbone takes.
      step_separator: the separator, with escapes; empty for the encoding's own.

    Raises:
      UserError: a separator for an encoding that has but one.
    """
    encoding = TABLE[name]
    if step_separator and not encoding.separable:
        raise UserError(
            f"--step_separator={step_separator}, but the separator of the encoding {name} is fixed: omit it; solutions "
            'with other steps need them as a list, "steps" of a candidate or "completions" of a stepwise row'
        )
    config = EncodingConfig(max_length=min(_LONGEST, positions), step_separator=step_separator or encoding.separator)
    return config if encoding.marker else dataclasses.replace(config, marker="", system_prompt="")
