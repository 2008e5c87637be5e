"""A toy model under the real train step."""

from model_fixtures import random_params  # noqa: F401
from training_fixtures import batch, setup  # noqa: F401
