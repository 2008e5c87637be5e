"""The picture: it is there, of a readable size, and not empty."""

from __future__ import annotations

import struct

import pytest

from cfprm_jax.report import plot


def test_a_panel_a_data_set(result, compared, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    for outcome in (result.outcome, compared.outcome):
        path = tmp_path / "plot.png"
        plot.write(outcome, path)
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert 1200 < width < 2600 and 500 < height < 900
        pixels = image.imread(path)[..., :3]
        coloured = (pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.2
        # Lines in the left panel and in the right one.
        assert coloured[:, : width // 3].mean() > 0.005 and coloured[:, width // 3 : 2 * width // 3].mean() > 0.005


def test_there_are_colours_for_every_line_and_they_differ():
    assert len(set(plot.COLOURS)) == len(plot.COLOURS) == len(plot.DASHES)
