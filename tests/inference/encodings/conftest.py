"""Small random PRMs as other programs write them."""

from encoding_fixtures import ids_of, scored, torch, write_tokenizer  # noqa: F401
from model_fixtures import make_reference  # noqa: F401
