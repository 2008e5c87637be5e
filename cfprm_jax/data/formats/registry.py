"""The formats, in the order in which a row's content is tried against them. A new one is added here."""

from __future__ import annotations

from types import ModuleType

from cfprm_jax.data.formats import math_aps, math_shepherd, prm800k, ratings, rest_mcts, rlhflow, stepwise

FORMATS: tuple[ModuleType, ...] = (stepwise, prm800k, math_shepherd, rlhflow, rest_mcts, math_aps, ratings)
