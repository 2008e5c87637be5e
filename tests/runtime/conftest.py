"""A toy model under the real train step."""

from training_fixtures import batch, setup  # noqa: F401
