"""Random small networks, their rows and an independent implementation."""

from model_fixtures import make_reference, make_rows, random_params, tiny_tokenizer  # noqa: F401
