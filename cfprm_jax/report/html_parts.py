"""What the pages of reports are made of: files of the package, tables, and what a content security policy lets pass."""

from __future__ import annotations

import base64
import html
import importlib.resources
from collections.abc import Sequence

from cfprm_jax.runtime import digests


def asset(name: str) -> str:
    """The text of a file of this package."""
    return importlib.resources.files("cfprm_jax.report").joinpath(name).read_text(encoding="utf-8")


def policy_hash(text: str) -> str:
    """The source expression of an inline script or style in the content security policy."""
    return f"'sha256-{base64.b64encode(digests.raw(text)).decode()}'"


def table(grid: Sequence[Sequence[str]], label: str) -> str:
    """A table in a box that scrolls, also by keyboard. A first column of data sets is a heading of its rows, too."""
    heads = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in grid[0])
    headings = 2 if grid[0][0] == "data set" else 1
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{html.escape(text)}</th>' if place < headings else f"<td>{_cell(text)}</td>"
            for place, text in enumerate(line)
        )
        + "</tr>"
        for line in grid[1:]
    )
    return (
        f'<div class="scroll" role="region" aria-label="{html.escape(label)}" tabindex="0">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    """A number, with its interval in smaller print."""
    number, bracket, rest = text.partition(" [")
    certainty = f' <span class="interval">[{html.escape(rest)}</span>' if bracket and number else ""
    return f"{html.escape(number)}{certainty}" if certainty else html.escape(text)
