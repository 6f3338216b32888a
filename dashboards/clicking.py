"""A picture in which patches are clicked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import streamlit as st
from PIL import Image
from streamlit_image_coordinates import streamlit_image_coordinates

from dashboards.link import Link
from ibot_eval.visual.pictures import Picture, with_patch_marked

Patch = tuple[int, int]
Place = tuple[float, float]
"""Across and down, from 0 to 1: the same place in pictures of other patch sizes."""
QUERY = "query"
SHORT, WIDEST, TALLEST = 448, 1200, 700
"""Pixels of a picture on the page where the column is wide enough: the shorter side, and at most width and height."""


def clickable(picture: Picture, patch: Patch | None, key: str, clicked: Callable[[Patch], None]) -> None:
    """Shows ``picture`` with ``patch`` outlined, and calls ``clicked`` with the patch under a click."""

    def on_click() -> None:
        value = st.session_state.get(key)
        if isinstance(value, dict) and (found := patch_of(picture, value)) is not None:
            clicked(found)

    shown = with_patch_marked(picture, patch, _shorter_side(picture))
    # Across the container, which is as wide as the picture but never wider than the column: the component itself would
    # cut off what does not fit.
    with st.container(width=shown.width):
        streamlit_image_coordinates(
            shown,
            key=key,
            use_column_width="always",
            png_compression_level=1,
            cursor="crosshair",
            on_click=on_click,
        )


def beside(picture: Picture, pixels: np.ndarray, patch: Patch | None = None) -> Image.Image:
    """``pixels`` (H, W, 3) that show something of ``picture``, as large as :func:`clickable` shows it."""
    return with_patch_marked(replace(picture, image=Image.fromarray(pixels)), patch, _shorter_side(picture))


def _shorter_side(picture: Picture) -> int:
    width, height = picture.image.size
    return max(1, round(min(width, height) * min(SHORT / min(width, height), WIDEST / width, TALLEST / height)))


def patch_of(picture: Picture, value: dict[str, object]) -> Patch | None:
    """The patch that the browser says was clicked; None for a message that makes no sense."""
    numbers = [value.get(name) for name in ("x", "y", "width", "height")]
    if not all(isinstance(number, (int, float)) and abs(number) < 1e6 for number in numbers):
        return None
    x, y, width, height = (float(number) for number in numbers)  # type: ignore[arg-type]
    return picture.patch_at(x, y, width, height) if width > 0 and height > 0 else None


def query_place(link: Link) -> Place | None:
    """The place that was clicked last, or that the link holds; None before that, and for [CLS]."""
    key = link.key(QUERY)
    if key not in st.session_state:
        st.session_state[key] = place_text(read_place(link.wanted(QUERY)))
    link.keep(QUERY, st.session_state[key])
    return read_place(st.session_state[key])


def asks(link: Link, grid: tuple[int, int]) -> Callable[[Patch | None], None]:
    """What makes a patch of ``grid``, or [CLS] for None, the query of the page."""

    def ask(patch: Patch | None) -> None:
        st.session_state[link.key(QUERY)] = place_text(None if patch is None else place_of(patch, grid))

    return ask


def place_of(patch: Patch, grid: tuple[int, int]) -> Place:
    """The middle of a patch (row, column)."""
    return (patch[1] + 0.5) / grid[1], (patch[0] + 0.5) / grid[0]


def patch_at(place: Place, grid: tuple[int, int]) -> Patch:
    """The patch (row, column) of a grid at a place."""
    return min(int(place[1] * grid[0]), grid[0] - 1), min(int(place[0] * grid[1]), grid[1] - 1)


def place_text(place: Place | None) -> str:
    """For links: ``0.4821,0.1071``, or ``cls``."""
    return "cls" if place is None else f"{place[0]:.4f},{place[1]:.4f}"


def read_place(text: str | None) -> Place | None:
    """What :func:`place_text` wrote; None for [CLS] and for anything that is no place."""
    try:
        across, down = map(float, (text or "").split(","))
    except ValueError:
        return None
    return (across, down) if 0 <= across <= 1 and 0 <= down <= 1 else None
