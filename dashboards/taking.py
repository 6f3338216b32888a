"""What every page offers to take away: its figure as a file, and the command that draws it again."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import streamlit as st

from dashboards.frame import plain
from dashboards.networks import COMPUTING
from ibot_eval.visual.export import Provenance, figure_bytes
from ibot_eval.visual.pictures import Source

SCREEN = 130
"""Dots per inch of figures on the page."""
DRAWN = 64
"""Figures kept as they are shown."""

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def file_name(*parts: str) -> str:
    """A name for a download that every system takes, from words that may hold anything."""
    words = (re.sub(r"[^A-Za-z0-9]+", "-", part).strip("-") for part in parts)
    return "-".join(word for word in words if word)[:80] or "figure"


def picture_of(figure: Callable[[], Figure], *key: object) -> bytes:
    """A figure as a PNG for the page; drawn once for each ``key``, since drawing takes longer than a click may."""
    return _drawn(figure, repr(key))


@st.cache_data(max_entries=DRAWN, show_spinner=False)
def _drawn(_figure: Callable[[], Figure], key: str) -> bytes:
    buffer = io.BytesIO()
    with COMPUTING:
        _figure().savefig(buffer, format="png", dpi=SCREEN)
    return buffer.getvalue()


def downloads(name: str, figure: Callable[[], Figure], about: Callable[[], Provenance], key: str) -> None:
    """Buttons for a figure as PNG and SVG. It is drawn when a button is pressed, in print quality."""

    def drawn(form: str) -> Callable[[], bytes]:
        def draw() -> bytes:
            with COMPUTING:
                return figure_bytes(figure(), about(), "svg" if form == "svg" else "png")

        return draw

    with st.container(horizontal=True):
        for form, kind in (("png", "image/png"), ("svg", "image/svg+xml")):
            st.download_button(
                f"Download {form.upper()}",
                drawn(form),
                f"{name}.{form}",
                kind,
                key=f"{key}.{form}",
                on_click="ignore",
                icon=":material/download:",
            )


def command(line: str, uploads: Sequence[Source] = ()) -> None:
    """The command that reproduces what is shown.

    Args:
        uploads: pictures in it that the command line knows no file of.
    """
    if missing := [source.name for source in uploads if source.path is None]:
        st.caption(f"The same from the command line, once the upload is saved as {plain(', '.join(missing))}:")
    else:
        st.caption("The same from the command line:")
    st.code(line, language="bash", wrap_lines=True)
