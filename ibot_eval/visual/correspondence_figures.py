"""Correspondences drawn: pairs of pictures with lines between their patches (iBOT's figure 19)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ibot_eval.visual.canvas import PANEL, panels, plain, show
from ibot_eval.visual.correspondence import Matches
from ibot_eval.visual.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = 0.06
"""Between the two pictures, as a share of their height."""
RIGHT_WITHIN = 1.0
"""Patches: matches farther from the true place are drawn as wrong."""


def correspondence_figure(
    pairs: Sequence[tuple[Picture, Picture, Matches]], *, titles: Sequence[str] | None = None
) -> Figure:
    """Each pair side by side, a line in a colour of its own for every match given.

    Draw ``strongest(matches)``: hundreds of lines hide the pictures. Where the geometry is known, matches more than one
    patch from the true place are dashed.

    Args:
        titles: of each pair; the pictures' names by default.
    """
    from matplotlib import colormaps

    columns = 1 if len(pairs) == 1 else 2
    joined = [_side_by_side(left, right) for left, right, _ in pairs]
    aspect = max(pixels.shape[1] / pixels.shape[0] for pixels, _ in joined)
    height = PANEL * 1.3 if len(pairs) > 1 else PANEL * 1.8
    known = any(matches.errors is not None for _, _, matches in pairs)
    caption = "dashed: more than one patch from the true place" if known else None
    rows = math.ceil(len(pairs) / columns)
    figure, axes = panels(rows, columns, min(height * aspect, 9.0), height, gap=0.12, caption=caption)
    for i, ((left, right, matches), (pixels, (scale_left, scale_right, start))) in enumerate(
        zip(pairs, joined, strict=True)
    ):
        ax = axes.flat[i]
        name = titles[i] if titles is not None else _names(left, right)
        show(ax, pixels, name)
        colours = colormaps["tab20" if len(matches) > 10 else "tab10"].colors  # type: ignore[attr-defined]
        for j in range(len(matches)):
            a = (matches.left[j, ::-1] + 0.5) * left.patch * scale_left
            b = (matches.right[j, ::-1] + 0.5) * right.patch * scale_right + np.array([start, 0])
            wrong = matches.errors is not None and matches.errors[j] > RIGHT_WITHIN
            colour = colours[j % len(colours)]
            line = {"linestyle": (0, (3, 2)) if wrong else "-", "linewidth": 1.1, "color": colour, "clip_on": False}
            ax.plot(*zip(a, b, strict=True), **line, zorder=2)
            ax.plot(
                *zip(a, b, strict=True),
                linestyle="none",
                marker="o",
                markersize=3.6,
                markerfacecolor=colour,
                markeredgecolor="white",
                markeredgewidth=0.6,
                zorder=3,
            )
        ax.set_xlim(0, pixels.shape[1])
        ax.set_ylim(pixels.shape[0], 0)
    return figure


def _names(left: Picture, right: Picture) -> str:
    if left.source.sha256 == right.source.sha256:
        return f"{plain(left.name)}: two views"
    return f"{plain(left.name, 24)}  |  {plain(right.name, 24)}"


def _side_by_side(left: Picture, right: Picture) -> tuple[np.ndarray, tuple[float, float, float]]:
    """Both pictures at the height of the higher one, the factors they were enlarged by, and where the right begins."""
    from PIL import Image

    height = max(left.image.height, right.image.height)
    resized = [
        picture.image.resize((round(picture.image.width * height / picture.image.height), height))
        for picture in (left, right)
    ]
    start = resized[0].width + max(1, round(GAP * height))
    canvas = Image.new("RGB", (start + resized[1].width, height), (255, 255, 255))
    canvas.paste(resized[0], (0, 0))
    canvas.paste(resized[1], (start, 0))
    return np.asarray(canvas), (height / left.image.height, height / right.image.height, start)
