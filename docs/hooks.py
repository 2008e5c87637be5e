"""Hooks of mkdocs: the diagram of packages, and cross-references of docstrings, :func:`name`, as their names."""

from __future__ import annotations

import ast
import collections
import html
import pathlib
import re
from collections.abc import Mapping
from typing import Any

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):<code>~?([^<]*)</code>")
_DIAGRAM = "<!-- diagram of packages -->"
_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "cfprm_jax"
_WIDTH, _HEIGHT, _BOX, _GAP = 118, 26, 136, 58

Arrows = Mapping[str, set[str]]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the source of each page."""
    return markdown.replace(_DIAGRAM, diagram(arrows())) if _DIAGRAM in markdown else markdown


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    return _ROLE.sub(lambda match: f"<code>{match[1].removeprefix('cfprm_jax.')}</code>", content)


def arrows() -> dict[str, set[str]]:
    """Package -> packages that its modules import, without those that another of these imports, too."""
    every: dict[str, set[str]] = {path.name: set() for path in _PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    for name, targets in every.items():
        for path in (_PACKAGE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cfprm_jax"):
                    parts = f"{node.module}.{node.names[0].name}".split(".")
                    targets |= {parts[1]} & every.keys() - {name}
    below = {name: _below(name, every) for name in every}
    return {
        name: {one for one in targets if not any(one in below[other] for other in targets)}
        for name, targets in every.items()
    }


def _below(name: str, edges: Arrows) -> set[str]:
    """All packages that one imports, directly or through others."""
    return {found for one in edges[name] for found in (one, *_below(one, edges))}


def diagram(edges: Arrows) -> str:
    """The packages as an SVG figure: each line leads from a package down to one that it imports."""

    def level(name: str) -> int:
        return 1 + max((level(other) for other in edges[name]), default=-1)

    layers = collections.defaultdict(list)
    for name in sorted(edges):
        layers[level(name)].append(name)
    top, widest = max(layers), max(map(len, layers.values()))
    place: dict[str, tuple[float, float]] = {}
    for number in range(top + 1):
        names = layers[number]
        # Above the packages that they import, as far as there is room.
        names.sort(key=lambda name: sum(place[other][0] for other in edges[name]) / max(len(edges[name]), 1))
        for column, name in enumerate(names):
            x = _BOX * (widest - len(names)) / 2 + _BOX * column + _BOX / 2
            place[name] = x, (top - number) * _GAP + _HEIGHT
    parts = []
    for name, targets in edges.items():
        for other in sorted(targets):
            (x, y), (u, v) = place[name], place[other]
            y, v = y + _HEIGHT / 2, v - _HEIGHT / 2
            middle = (y + v) / 2
            parts.append(f'<path d="M{x:g} {y:g}C{x:g} {middle:g} {u:g} {middle:g} {u:g} {v:g}"/>')
    for name, (x, y) in place.items():
        parts.append(
            f'<rect x="{x - _WIDTH / 2:g}" y="{y - _HEIGHT / 2:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="4"/>'
            f'<text x="{x:g}" y="{y + 4:g}">{html.escape(name)}</text>'
        )
    size = f"0 0 {_BOX * widest} {top * _GAP + 2 * _HEIGHT}"
    start = f'<svg class="packages" role="img" aria-label="Imports between packages" viewBox="{size}">'
    return f"{start}{''.join(parts)}</svg>"
