"""Scaling of rotary frequencies for contexts longer than those of the pre-training, as Llama 3.1 does."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from cfprm_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """rope_type "llama3", under the names of config.json: how frequencies change for a longer context.

    Waves longer than original_max_position_embeddings / low_freq_factor are stretched by factor; those shorter than
    original_max_position_embeddings / high_freq_factor stay; between them both are mixed.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"{field.name}: expected a positive number, found {value!r}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor {self.low_freq_factor}"
            )

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """The scaled frequencies; float32 [head_dim / 2], as the argument."""
        length = self.original_max_position_embeddings
        waves = 2 * math.pi / frequencies
        stretched = frequencies / self.factor
        share = (length / waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        mixed = (1 - share) * frequencies / self.factor + share * frequencies
        outer = np.where(waves > length / self.low_freq_factor, stretched, frequencies)
        between = (waves >= length / self.high_freq_factor) & (waves <= length / self.low_freq_factor)
        return np.where(between, mixed, outer)
