"""What the figures of pictures share: panels without axes, outlines of patches, shades of grey."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ibot_eval.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 1.7
"""Shorter side of a panel in inches."""
TITLE = 8
"""Size of a panel's title in points."""
LETTERS_PER_INCH = 15
"""Of text of that size."""
TITLE_HEIGHT = 0.2
"""Inches that a line of title takes."""


def panels(
    rows: int,
    columns: int,
    width: float,
    height: float,
    *,
    title_lines: int = 1,
    gap: float = 0.06,
    caption: str | None = None,
) -> tuple[Figure, Any]:
    """A figure of rows x columns panels, each ``width`` x ``height`` inches, without axes.

    Args:
        title_lines: lines of the panels' titles.
        gap: inches between panels.
        caption: what is to be said below them; broken into lines.

    Returns:
        The figure and a (rows, columns) array of its Axes.
    """
    across = columns * (width + gap)
    lines = [] if caption is None else textwrap.wrap(caption, int(across * LETTERS_PER_INCH))
    below = 0.1 + 0.15 * len(lines) if lines else 0.0
    figure = new_figure(across, rows * (height + gap + title_lines * TITLE_HEIGHT) + below)
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=gap / 2, h_pad=gap / 2, wspace=0, hspace=0)
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=TITLE, parse_math=False)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
        ax.set_anchor("N")
    return figure, axes


def panel_size(aspects: list[float]) -> tuple[float, float]:
    """Width and height in inches of panels that hold pictures of these aspects (width / height)."""
    widest = min(max(max(aspects), 0.4), 4.0)
    tallest = min(max(min(aspects), 0.25), 2.5)
    width = PANEL * max(widest, 1.0)
    return (width, max(PANEL, width / widest)) if tallest >= 1 else (width, min(PANEL / tallest, 2.5 * PANEL))


def show(ax: Axes, pixels: np.ndarray, title: str | None = None) -> None:
    """An (H, W, 3) or (H, W) uint8 picture in a panel, in its own coordinates: pixels, y downwards."""
    h, w = pixels.shape[:2]
    grey = {"cmap": "gray", "vmin": 0, "vmax": 255} if pixels.ndim == 2 else {}
    ax.imshow(pixels, extent=(0, w, h, 0), interpolation="antialiased", **grey)
    if title:
        # Between dollars matplotlib would read mathematics, and names of files may hold any character.
        ax.set_title(title, fontsize=TITLE, pad=3, parse_math=False)


def plain(text: str, longest: int = 40) -> str:
    """A name as it can be drawn: without control characters, and cut in its middle where it is long."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    half = longest // 2 - 1
    return f"{text[:half]}…{text[-half:]}" if len(text) > longest else text


def outline(mask: np.ndarray) -> np.ndarray:
    """(n, 2, 2) float: the edges between True and False patches of a mask (h, w), as (x, y) ends in patches."""
    padded = np.pad(mask, 1)
    rows, columns = np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1])
    across = np.stack([np.stack([columns, rows], 1), np.stack([columns + 1, rows], 1)], 1)
    rows, columns = np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1])
    down = np.stack([np.stack([columns, rows], 1), np.stack([columns, rows + 1], 1)], 1)
    return np.concatenate([across, down]).astype(float)


def draw_outline(ax: Axes, mask: np.ndarray, size: tuple[int, int], colour: str = "white", width: float = 0.9) -> None:
    """The outline of a mask (h, w) over a picture of ``size`` (H, W) pixels."""
    from matplotlib.collections import LineCollection

    scale = np.array([size[1] / mask.shape[1], size[0] / mask.shape[0]])
    ax.add_collection(LineCollection(list(outline(mask) * scale), colors=colour, linewidths=width), autolim=False)


def mark_patch(ax: Axes, patch: tuple[int, int], side: int, colour: str = "yellow") -> None:
    """A frame around one patch (row, column) of ``side`` pixels, visible on light and dark."""
    from matplotlib.patches import Rectangle

    corner = (patch[1] * side, patch[0] * side)
    ax.add_patch(Rectangle(corner, side, side, fill=False, edgecolor="black", linewidth=2.2))
    ax.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=1.1))


def grey_of(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 -> (H, W) float32 0 to 255, the mean of the channels."""
    return pixels.astype(np.float32).mean(axis=2)
