"""The pages of the app; what streamlit runs. ``ibot-eval app`` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

# streamlit puts the script's folder in front, where our modules would hide others of their names.
if sys.path and sys.path[0] == str(Path(__file__).parent):
    del sys.path[0]

import numpy as np
import streamlit as st
from PIL import Image

from dashboards.frame import page

# Title, module in dashboards.views and part of the URL, icon. The first is where the app opens.
PAGES = (
    ("Attention", "attention", ":material/visibility:"),
    ("Patterns", "patterns", ":material/grid_view:"),
    ("Correspondences", "correspondences", ":material/compare_arrows:"),
    ("Components", "components", ":material/palette:"),
    ("Results", "results", ":material/table_chart:"),
    ("Checkpoint", "checkpoint", ":material/deployed_code:"),
)


@st.cache_resource(show_spinner=False)
def icon() -> Image.Image:
    """Two by two patches, one of them attended to."""
    patches = np.full((32, 32, 3), 70, np.uint8)
    patches[2:15, 17:30] = (250, 190, 40)
    patches[2:15, 2:15] = patches[17:30, 2:15] = patches[17:30, 17:30] = 150
    return Image.fromarray(patches)


def main() -> None:
    # Without an icon of ours the browser would be told to fetch the page's from a font server.
    st.set_page_config(page_title="ibot-eval", page_icon=icon(), layout="wide")
    pages = [
        st.Page(page(name), title=title, icon=icon, url_path=name, default=name == PAGES[0][1])
        for title, name, icon in PAGES
    ]
    st.navigation(pages).run()


main()
