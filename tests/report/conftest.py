"""A small world of candidates and what Best-of-N makes of it."""

from evaluation_fixtures import compared, made_rows, result  # noqa: F401
