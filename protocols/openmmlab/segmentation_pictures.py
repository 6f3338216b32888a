"""What segmentation draws: test images beside prediction and label, and the figures of a record. Imports no mm*."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ibot_eval.data.images import load_rgb
from ibot_eval.data.label_rule import IGNORED
from ibot_eval.figures import new_figure, save_figure
from protocols.openmmlab import dense_figures
from protocols.openmmlab.dense_figures import Drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.record import EvalRecord

GOLDEN_RATIO = 0.618034
LEGEND = 20
"""Classes of an image that the legend names, the largest ones."""
GREY = (224, 224, 224)
"""Colour of pixels without a class."""


def palette_of(classes: int) -> list[list[int]]:
    """RGB colours, 0 to 255, for classes that have none of their own: neighbours are well apart in hue."""
    hues = np.arange(classes) * GOLDEN_RATIO % 1
    tones = [(0.75, 0.95), (0.5, 0.75), (0.9, 0.6)]
    colours = [colorsys.hsv_to_rgb(float(hue), *tones[i % 3]) for i, hue in enumerate(hues)]
    return [[round(255 * part) for part in colour] for colour in colours]


def draw_example(
    file: Path,
    image: Path,
    predicted: np.ndarray,
    label: np.ndarray,
    classes: Sequence[str],
    palette: Sequence[Sequence[int]],
) -> Path:
    """An image, its prediction and its label side by side in ``file``, with a legend. Returns ``file``.

    Args:
        file: PNG; folders are made.
        image: path of the image.
        predicted, label: (H, W) class indices; pixels whose label is 255 are grey in both.
        classes, palette: name and RGB of each class.
    """
    from matplotlib.patches import Patch

    picture = load_rgb(image, str(image)).resize(label.shape[::-1])
    counted = label != IGNORED
    colours = np.array([*palette, GREY], dtype=np.uint8)
    shown = [np.asarray(picture), *(colours[np.where(counted, one, len(palette))] for one in (predicted, label))]
    height, width = label.shape
    figure = new_figure(12, 12 / 3 * height / width + 1.2)
    titles = ("image", "prediction", "label")
    for axes, title, pixels in zip(figure.subplots(1, 3), titles, shown, strict=True):
        axes.imshow(pixels, interpolation="nearest")
        axes.set_title(title, fontsize="small")
        axes.axis("off")
    areas = np.bincount(np.concatenate([predicted[counted], label[counted]]).astype(np.int64), minlength=len(classes))
    largest = [int(c) for c in np.argsort(-areas, kind="stable")[:LEGEND] if areas[c]]
    handles = [Patch(color=colours[c] / 255, label=classes[c]) for c in largest]
    if not counted.all():
        handles.append(Patch(color=colours[-1] / 255, label="not counted"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize="x-small", frameon=False)
    return save_figure(figure, file, 100)


DRAWN = Drawn(
    scores=(("miou", ""),),
    loss_axis="loss, auxiliary heads included",
    score_axis="mIoU of test (%)",
    bar_axis="IoU (%)",
    bars="iou_by_class",
)


def figures(*records: EvalRecord) -> dict[str, Figure]:
    """``learning_curve`` (loss and mean IoU against steps, several runs on the same axes) and ``iou_by_class``."""
    return dense_figures.figures(records, DRAWN)
