"""Attention maps drawn: one panel a head with the mass contour, and all heads in colours over one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ibot_eval.visual.attention import MASS, AttentionMaps, at_image_resolution, mass_mask
from ibot_eval.visual.canvas import draw_outline, grey_of, mark_patch, outline, panel_size, panels, plain, show
from ibot_eval.visual.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4
LEAST_SHOWN = 0.2
"""Of the largest weight of a head: weaker patches stay grey in overlays, as published."""


def attention_figure(
    picture: Picture,
    maps: AttentionMaps,
    *,
    heads: Sequence[int] | None = None,
    mass: float | None = MASS,
    smooth: bool = False,
) -> Figure:
    """The picture with its query, the mean over all heads, and a panel for each of ``heads`` (all of them for None).

    Each map is scaled to its own largest weight. The white line holds ``mass`` of the attention on patches.

    Raises:
        ConfigError: a head that does not exist, or a mass out of its range.
    """
    chosen = maps.check_heads(None if heads is None else list(heads))
    titles = [
        f"query: {query_name(maps)}",
        "mean of all heads",
        *(f"head {head}" for head in chosen),
    ]
    drawn = [maps.mean, *(maps.weights[head] for head in chosen)]
    count = len(titles)
    columns = min(count, COLUMNS)
    size = panel_size([picture.image.width / picture.image.height])
    caption = f"{plain(picture.name)}, block {maps.block}; each map is scaled to its own largest weight"
    if mass is not None:
        caption += f"; the outline holds {100 * mass:g} % of the attention on patches"
    figure, axes = panels(math.ceil(count / columns), columns, *size, caption=caption)
    show(axes.flat[0], picture.pixels(), titles[0])
    if maps.query is not None:
        mark_patch(axes.flat[0], maps.query, picture.patch)
    for ax, title, weights in zip(list(axes.flat)[1:], titles[1:], drawn, strict=False):
        show(ax, heat(picture, weights, None, smooth), title)
        if mass is not None:
            draw_outline(ax, mass_mask(weights, mass), (picture.image.height, picture.image.width))
    return figure


def heat(picture: Picture, weights: np.ndarray, mass: float | None = MASS, smooth: bool = False) -> np.ndarray:
    """One map (h, w) in colours over the grey picture, with the outline of its mass: (H, W, 3) uint8.

    Args:
        mass: share of the attention inside of the outline; None draws none.
        smooth: see ``attention.at_image_resolution``.
    """
    from matplotlib import colormaps

    size = (picture.image.height, picture.image.width)
    large = at_image_resolution(weights, size, smooth)
    colours = colormaps["inferno"](large / max(float(large.max()), 1e-12))[..., :3].astype(np.float32)
    mixed = 0.35 * grey_of(picture.pixels())[..., None] + 0.65 * 255 * colours
    pixels = np.rint(mixed).astype(np.uint8)
    return pixels if mass is None else _with_outline(pixels, mass_mask(weights, mass))


def _with_outline(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    from PIL import Image, ImageDraw

    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    scale = np.array([image.width / mask.shape[1], image.height / mask.shape[0]])
    limit = np.array([image.width - 1, image.height - 1])
    for start, end in np.minimum(np.rint(outline(mask) * scale), limit):
        draw.line([*map(int, start), *map(int, end)], fill=(255, 255, 255), width=1)
    return np.asarray(image)


def overlay_figure(
    rows: Sequence[tuple[Picture, AttentionMaps]],
    *,
    heads: Sequence[int] | None = None,
    mass: float = MASS,
    titles: Sequence[str] | None = None,
) -> Figure:
    """Pictures and, beside each, its attention heads in colours (iBOT's figures 6 and 18).

    Args:
        rows: a picture and its maps each; all of networks with the same number of heads where ``heads`` is None.
        titles: of each picture; their names by default.

    Raises:
        ConfigError: a head that does not exist, or a mass out of its range.
    """
    from matplotlib.patches import Patch

    chosen = rows[0][1].check_heads(None if heads is None else list(heads))
    names = list(titles) if titles is not None else [picture.name for picture, _ in rows]
    columns = 1 if len(rows) == 1 else 2 if len(rows) <= 4 else 3
    size = panel_size([picture.image.width / picture.image.height for picture, _ in rows])
    figure, axes = panels(math.ceil(len(rows) / columns), 2 * columns, *size)
    for i, (picture, maps) in enumerate(rows):
        pair = axes[i // columns, 2 * (i % columns) : 2 * (i % columns) + 2]
        show(pair[0], picture.pixels(), plain(names[i], 26))
        show(pair[1], overlay(picture, maps, chosen, mass), f"block {maps.block}, {query_name(maps)}")
        if maps.query is not None:
            mark_patch(pair[0], maps.query, picture.patch)
    handles = [Patch(color=colour, label=f"head {head}") for head, colour in zip(chosen, _palette(chosen), strict=True)]
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 3 * columns))
    for text in legend.get_texts():
        text.set_fontsize(8)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.15 + 0.2 * math.ceil(len(handles) / (3 * columns)))
    return figure


def overlay(
    picture: Picture, maps: AttentionMaps, heads: Sequence[int] | None = None, mass: float = MASS
) -> np.ndarray:
    """Heads in colours over the grey picture: (H, W, 3) uint8.

    Of each head the patches that hold ``mass`` of its attention are coloured, the more strongly the larger their
    weight (the square root of its share of the head's largest), those below a fifth of the largest left out. Where
    heads overlap, a patch has the colour of the head in which its share is largest. The published figure paints one
    head over the other instead, so that the colours of an overlap are none of the legend's.
    """
    chosen = maps.check_heads(None if heads is None else list(heads))
    size = (picture.image.height, picture.image.width)
    weights = np.where(mass_mask(maps.weights[chosen], mass), maps.weights[chosen], 0)
    shares = weights / weights.max(axis=(1, 2), keepdims=True).clip(1e-12)
    strongest = shares.argmax(axis=0)
    share = shares.max(axis=0)
    cover = at_image_resolution(np.sqrt(share) * (share > LEAST_SHOWN), size)[..., None]
    colours = 255 * np.asarray(_palette(chosen), np.float32)[strongest]
    painted = np.stack([at_image_resolution(colours[..., channel], size) for channel in range(3)], axis=-1)
    mixed = grey_of(picture.pixels())[..., None] * (1 - cover) + painted * cover
    return np.rint(mixed).clip(0, 255).astype(np.uint8)


def activation_figure(picture: Picture, activation: np.ndarray, block: int) -> Figure:
    """The picture and how strongly each position of ``block`` responds."""
    figure, axes = panels(1, 2, *panel_size([picture.image.width / picture.image.height]))
    show(axes[0, 0], picture.pixels(), plain(picture.name))
    low = float(activation.min())
    show(axes[0, 1], heat(picture, activation - low, None), f"activation of block {block}")
    return figure


def query_name(maps: AttentionMaps) -> str:
    """What the query is called in titles."""
    return "[CLS]" if maps.query is None else f"patch {maps.query[0]}, {maps.query[1]}"


def _palette(heads: Sequence[int]) -> list[tuple[float, float, float]]:
    """A colour for each head, by its number, so that choosing fewer heads changes none of them."""
    from matplotlib import colormaps

    colours = colormaps["tab10"].colors + colormaps["Dark2"].colors + colormaps["Set2"].colors  # type: ignore[attr-defined]
    return [tuple(colours[head % len(colours)]) for head in heads]
