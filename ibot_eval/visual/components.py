"""Principal components of patch tokens as colours, one basis for several pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ibot_eval.errors import ConfigError
from ibot_eval.visual.canvas import panel_size, panels, plain, show
from ibot_eval.visual.correspondence import Tokens
from ibot_eval.visual.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 3
CLIPPED = (1.0, 99.0)
"""Percentiles of each component that become 0 and 1: a few far tokens must not take all the contrast."""


@dataclass(frozen=True)
class Components:
    """Colours of the patches of several pictures."""

    colours: tuple[np.ndarray, ...]
    """Per picture (h, w, 3) float32, 0 to 1; background patches are 0."""
    foreground: tuple[np.ndarray, ...]
    """Per picture (h, w) bool; all True where no foreground was sought or found."""
    explained: np.ndarray
    """(3,) float64, percent of the variance of the tokens that take part."""
    notes: tuple[str, ...] = ()


def components(tokens: Sequence[Tokens], *, foreground: bool = True) -> Components:
    """The first three principal components of all patches together, as red, green and blue.

    With ``foreground``, the first component of all patches splits them at its mean (0); the side that has the smaller
    share of the pictures' borders is the foreground, and the colours are the components of the foreground alone, as in
    the figures of the DINOv2 paper. Signs are fixed: the largest loading of each component is positive.

    Args:
        tokens: of each picture; any grids, one width.

    Raises:
        ConfigError: no picture, tokens of different widths, or fewer than four patches in all.
    """
    if not tokens:
        raise ConfigError("no picture to take components of")
    widths = {one.tokens.shape[-1] for one in tokens}
    if len(widths) > 1:
        raise ConfigError(f"tokens of {sorted(widths)} numbers have no common components")
    flat = np.concatenate([one.tokens.reshape(-1, one.tokens.shape[-1]) for one in tokens]).astype(np.float64)
    if len(flat) <= COLOURS:
        raise ConfigError(
            f"{len(flat)} patches in all have no three components", todo="use more or larger pictures: --side"
        )
    notes: list[str] = []
    kept = np.ones(len(flat), bool)
    if foreground:
        kept = _foreground(flat, tokens)
        if kept.sum() <= COLOURS:
            kept[:] = True
            notes.append("the first component separates no foreground: all patches are shown")
    scores, explained = _principal(flat[kept])
    low, high = np.percentile(scores, CLIPPED, axis=0)
    colours = np.zeros((len(flat), COLOURS), np.float32)
    colours[kept] = ((scores - low) / np.where(high > low, high - low, 1)).clip(0, 1)
    return Components(
        tuple(part.astype(np.float32) for part in _split(colours, tokens)),
        tuple(_split(kept, tokens)),
        explained,
        tuple(notes),
    )


def _principal(points: np.ndarray, count: int = COLOURS) -> tuple[np.ndarray, np.ndarray]:
    """(n, count) scores and (count,) percent of variance, in float64, from the covariance of (n, D) points."""
    from scipy.linalg import eigh

    centred = points - points.mean(axis=0)
    covariance = centred.T @ centred / len(points)
    width = covariance.shape[0]
    take = min(count, width)
    values, vectors = eigh(covariance, subset_by_index=(width - take, width - 1))
    values, vectors = values[::-1], vectors[:, ::-1]
    vectors = vectors * np.where(vectors[np.abs(vectors).argmax(axis=0), np.arange(take)] < 0, -1.0, 1.0)
    total = float(np.trace(covariance))
    explained = 100 * values.clip(0) / total if total > 0 else np.zeros(take)
    pad = count - take
    return np.pad(centred @ vectors, ((0, 0), (0, pad))), np.pad(explained, (0, pad))


def _foreground(flat: np.ndarray, tokens: Sequence[Tokens]) -> np.ndarray:
    above = _principal(flat, 1)[0][:, 0] > 0
    border = np.concatenate([_border(*one.tokens.shape[:2]).ravel() for one in tokens])
    # Compared with the whole picture: in a close-up most of the border may be foreground as well.
    share = [side[border].mean() - side[~border].mean() if (~border).any() else side.mean() for side in (above, ~above)]
    return above if share[0] <= share[1] else ~above


def _border(h: int, w: int) -> np.ndarray:
    border = np.ones((h, w), bool)
    border[1:-1, 1:-1] = False
    return border


def _split(rows: np.ndarray, tokens: Sequence[Tokens]) -> list[np.ndarray]:
    grids = [one.tokens.shape[:2] for one in tokens]
    ends = np.cumsum([h * w for h, w in grids])[:-1]
    parts = np.split(rows, ends)
    return [part.reshape(*grid, *rows.shape[1:]) for part, grid in zip(parts, grids, strict=True)]


def components_figure(pictures: Sequence[Picture], found: Components) -> Figure:
    """Pictures and, beside each, its components as colours, the background black."""
    columns = 1 if len(pictures) == 1 else 2 if len(pictures) <= 4 else 3
    size = panel_size([picture.image.width / picture.image.height for picture in pictures])
    what = "foreground patches" if not all(part.all() for part in found.foreground) else "patches"
    caption = (
        f"red, green, blue: components 1 to 3 of the {what} of all pictures, "
        f"{', '.join(f'{share:.0f}' for share in found.explained)} % of their variance"
    )
    figure, axes = panels(math.ceil(len(pictures) / columns), 2 * columns, *size, caption=caption)
    for i, (picture, colours) in enumerate(zip(pictures, found.colours, strict=True)):
        pair = axes[i // columns, 2 * (i % columns) : 2 * (i % columns) + 2]
        show(pair[0], picture.pixels(), plain(picture.name, 26))
        pixels = np.rint(255 * colours).astype(np.uint8)
        # Each patch as large as it is in the picture, so that the two can be compared.
        scale = max(1, picture.image.height // pixels.shape[0])
        show(pair[1], pixels.repeat(scale, 0).repeat(scale, 1), "components")
    return figure
