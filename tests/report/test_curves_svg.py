"""The curves of the report page."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from cfprm_jax.report.curves_svg import drawing, legend
from cfprm_jax.report.series import Curve

CURVES = [
    Curve("best & <first>", ((8, 0.5, 0.4, 0.6), (16, 0.75, 0.7, 0.8), (64, 1.0, 1.0, 1.0))),
    Curve("oracle", ((8, 1.0, 1.0, 1.0), (16, 1.0, 1.0, 1.0), (64, 1.0, 1.0, 1.0))),
]


def test_points_are_where_their_numbers_are():
    root = ET.fromstring(drawing(CURVES, "MATH & more", 3))
    assert root.get("role") == "img" and root.get("aria-labelledby") == "plot-3"
    assert root.find("title").text.startswith("MATH & more")
    circles = root.findall(".//circle")
    x, y = ([float(circle.get(name)) for circle in circles] for name in ("cx", "cy"))
    assert abs((y[0] - y[1]) - (y[1] - y[2])) < 0.2 and y[0] - y[1] > 20  # 25 points each
    assert abs((x[2] - x[1]) - 2 * (x[1] - x[0])) < 0.3  # a logarithmic axis
    titles = [title.text for title in root.iter("title")]
    assert "best & <first>, n = 8: 50.0 [40.0, 60.0]" in titles


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.96, 0.98, ["96.0", "96.5", "97.0", "97.5", "98.0"]),
        (0.96, 0.99, ["96.0", "96.5", "97.0", "97.5", "98.0", "98.5", "99.0"]),
        (0.93, 0.98, ["93", "94", "95", "96", "97", "98"]),
    ],
)
def test_ticks_are_told_apart(low, high, expected):
    root = ET.fromstring(drawing([Curve("a", ((8, low, low, high),))], "a", 0))
    ticks = [text.text for text in root.iter("text") if text.get("text-anchor") == "end"]
    assert ticks == expected


def test_one_value_and_the_legend_draw_too():
    for value in (0.0, 0.5, 1.0):
        ET.fromstring(drawing([Curve("a", ((8, value, value, value),))], "a", 0))
    root = ET.fromstring(legend(CURVES))
    assert ["".join(item.itertext()) for item in root.findall("li")] == ["best & <first>", "oracle"]
