"""Accuracy over n as SVG for the report page: one drawing a data set, coloured by the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from cfprm_jax.report.series import Curve

_WIDTH, _HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 40
_MARKERS = (
    '<circle cx="{x}" cy="{y}" r="4"/>',
    '<rect x="{left}" y="{top}" width="7" height="7"/>',
    '<path d="M{x} {top}l4.5 7.5h-9z"/>',
    '<path d="M{x} {top}l4.5 4.5l-4.5 4.5l-4.5 -4.5z"/>',
    '<path d="M{left} {top}h7l-3.5 7.5z"/>',
)


def drawing(curves: Sequence[Curve], title: str, number: int) -> str:
    """The SVG of one panel; number makes its identifiers unique among panels."""
    every = sorted({point[0] for curve in curves for point in curve.points})
    low = min(point[2] for curve in curves for point in curve.points)
    high = max(point[3] for curve in curves for point in curve.points)
    bottom, top, step = _scale(low, high)

    def x(n: int) -> float:
        first, last = math.log(every[0]), math.log(every[-1])
        share = 0.5 if first == last else (math.log(n) - first) / (last - first)
        return _LEFT + 12 + share * (_WIDTH - _LEFT - _RIGHT - 24)

    def y(accuracy: float) -> float:
        return _TOP + (top - accuracy) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    out = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="plot-{number}">',
        f'<title id="plot-{number}">{html.escape(title)}: accuracy over n; the table above has the numbers</title>',
    ]
    decimals = 1 if step < 0.01 else 0  # of a point
    for tick in range(round((top - bottom) / step) + 1):
        value = bottom + tick * step
        shown = f"{100 * value:.{decimals}f}"
        out.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}"/>')
        out.append(f'<text class="tick" x="{_LEFT - 7}" y="{y(value) + 4:.1f}" text-anchor="end">{shown}</text>')
    for n in every:
        out.append(f'<text class="tick" x="{x(n):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{n}</text>')
    out.append(
        f'<text class="tick" x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 5}" text-anchor="middle">candidates, n</text>'
    )
    for place, curve in enumerate(curves):
        there = [f"{x(n):.1f} {y(h):.1f}" for n, _, _, h in curve.points]
        back = [f"{x(n):.1f} {y(low):.1f}" for n, _, low, _ in reversed(curve.points)]
        out.append(f'<path class="band c{place}" d="M{"L".join(there + back)}Z"/>')
    for place, curve in enumerate(curves):
        path = "L".join(f"{x(n):.1f} {y(a):.1f}" for n, a, _, _ in curve.points)
        out.append(f'<g class="curve c{place}"><path class="line" d="M{path}"/>')
        for n, accuracy, low, high in curve.points:
            label = f"{curve.name}, n = {n}: {100 * accuracy:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
            out.append(f"<g><title>{html.escape(label)}</title>{_marker(place, x(n), y(accuracy))}</g>")
        out.append("</g>")
    return "".join([*out, "</svg>"])


def legend(curves: Sequence[Curve]) -> str:
    """The names of the lines with a piece of each."""
    entries = (
        f'<li><svg class="key" viewBox="0 0 36 14" aria-hidden="true"><g class="curve c{place}">'
        f'<path class="line" d="M1 7H35"/>{_marker(place, 18, 7)}</g></svg>{html.escape(curve.name)}</li>'
        for place, curve in enumerate(curves)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _marker(place: int, x: float, y: float) -> str:
    return _MARKERS[place % len(_MARKERS)].format(
        x=round(x, 1), y=round(y, 1), left=round(x - 3.5, 1), top=round(y - 4, 1)
    )


def _scale(low: float, high: float) -> tuple[float, float, float]:
    """Bottom, top and step of an axis with some four to eight round ticks."""
    span = max(high - low, 0.02)
    step = next(s for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if span / s <= 8 or s == 0.2)
    bottom, top = math.floor(low / step), math.ceil(high / step)
    if bottom == top:  # one number everywhere
        bottom, top = (bottom - 1, top) if top * step >= 1 else (bottom, top + 1)
    return bottom * step, top * step, step
