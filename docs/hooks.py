"""Hooks of mkdocs: cross-references of docstrings, :func:`name`, are shown as their names."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with the content of each page."""
    return _ROLE.sub(lambda match: f"<code>{match[1].removeprefix('cfprm_jax.')}</code>", html)
