"""robustness.sheets: pixels of a sheet, and the points of the curves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from ibot_eval.record import EvalRecord
from ibot_eval.robustness.sheets import draw_curves, write_sheet


def test_a_sheet_shows_the_pixels_and_mean_colour_where_all_is_zero(tmp_path):
    images = torch.zeros(1, 2, 3, 8, 8)
    images[0, 0] = 2.0
    path = write_sheet(tmp_path / "new" / "sheet.png", images, (0.5, 0.4, 0.2), (0.25, 0.2, 0.1))
    pixels = np.asarray(Image.open(path))
    assert pixels.shape == (16, 28, 3)
    assert pixels[8, 8].tolist() == [255, 204, 102]
    assert pixels[8, 20].tolist() == [128, 102, 51]


@pytest.mark.parametrize("runs", [1, 2])
def test_every_run_and_kind_is_a_line(runs):
    records = [EvalRecord(f"run{i}", "occlusion", 1) for i in range(runs)]
    rows = {
        kind: [{"params": {"level": level}, "value": 90.0 - level, "interval": [80, 95]} for level in (50, 0)]
        for kind in ("random", "salient")
    }
    _, axes = draw_curves(records, lambda _: rows, lambda _, m: m["params"]["level"], "occlusion")
    assert [line.get_xdata().tolist() for line in axes.lines] == [[0, 50]] * 2 * runs
    assert axes.lines[0].get_ydata().tolist() == [90, 40]
    assert len({line.get_label() for line in axes.lines}) == 2 * runs
    assert axes.get_title() == ("occlusion, run0" if runs == 1 else "occlusion")
