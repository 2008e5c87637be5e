"""Accuracy over n as a picture: a panel a data set, a line a method, a band for its 95 % interval."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from cfprm_jax.report.series import Curve, columns, curves
from cfprm_jax.runtime import atomic
from cfprm_jax.runtime.progress import counted

# Okabe and Ito's colours, distinguishable with any colour vision; dashes and markers encode the same.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A7A00", "#7F7F7F", "#5D3A9B")
DASHES = ("-", "--", "-", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), "--", "-.", ":")
_MARKERS = "so^Dv<>P*X"


def write(outcome: Mapping[str, Any], path: str | pathlib.Path) -> None:
    """Write the picture as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = columns(outcome)
    # No pyplot: it keeps figures, and chooses a backend by what the machine has.
    figure = Figure(figsize=(5.2 * len(shown) + 2.6, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for panel, column in zip(panels, shown, strict=True):
        lines = curves(outcome, column)
        for number, curve in enumerate(lines):
            _draw(panel, curve, number)
        every = sorted({point[0] for curve in lines for point in curve.points})
        panel.set_xscale("log", base=2)
        panel.set_xticks(every, [str(n) for n in every])
        panel.minorticks_off()
        panel.set_xlabel("candidates, n")
        panel.set_ylabel("accuracy in %")
        panel.set_title(f"{column.title or 'all questions'} ({counted(column.questions, 'question')})", fontsize=11)
        panel.grid(alpha=0.25)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    with atomic.writing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def _draw(panel: Any, curve: Curve, number: int) -> None:
    n = [point[0] for point in curve.points]
    accuracy, low, high = ([100 * point[place] for point in curve.points] for place in (1, 2, 3))
    colour = COLOURS[number % len(COLOURS)]
    panel.fill_between(n, low, high, color=colour, alpha=0.09, linewidth=0)
    panel.plot(
        n,
        accuracy,
        color=colour,
        linestyle=DASHES[number % len(DASHES)],
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=5,
        label=curve.name,
    )
