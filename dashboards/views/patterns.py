"""What each prototype stands for, and which prototype a patch belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import streamlit as st

from dashboards import banks, networks
from dashboards.choosing import choose_image
from dashboards.clicking import asks, clickable, patch_at, query_place
from dashboards.frame import plain
from dashboards.given import Given
from dashboards.link import Link
from dashboards.networks import Network
from dashboards.taking import command, downloads, file_name
from dashboards.views.attention import SIDES
from ibot_eval.settings import DataSettings
from ibot_eval.visual import command_lines
from ibot_eval.visual.export import provenance
from ibot_eval.visual.pattern_bank import PatternBank
from ibot_eval.visual.pattern_layouts import MIN_BRIGHTNESS, BankImages, layout_figure, layout_image, shown_items
from ibot_eval.visual.pictures import Source

PER_PAGE, ACROSS = 6, 3
SHOWN = 36
"""Patches in the layout of a prototype."""
ORDERS = {"size": "size, the largest first", "purity": "class purity, the purest first"}


def draw(link: Link) -> None:
    st.title("Patterns")
    bank = banks.bank()
    if bank is None:
        _explain()
        return
    about = bank.about
    st.caption(
        plain(
            f"{len(bank)} prototypes ({about['prototypes']}) of {about['checkpoint']['architecture']} on "
            f"{about['data']['reference']}: the patches of each about which the network is most certain, with their "
            "surroundings."
            if about["level"] == "patch"
            else f"{len(bank)} prototypes ({about['prototypes']}) of {about['checkpoint']['architecture']} on "
            f"{about['data']['reference']}: the images of each about which the network is most certain."
        )
    )
    images = banks.images(bank)
    for note in (*about["notes"], *images.notes):
        st.caption(plain(note))
    with st.sidebar:
        orders = [name for name in ORDERS if name == "size" or bank.purity is not None]
        order = link.choice("Prototypes by", "order", orders, format=ORDERS.__getitem__)
        dark = link.switch("Show near-black patches as well", "dark")
        ranked = bank.by_size() if order == "size" else bank.by_purity()
        pages = max(1, -(-len(ranked) // PER_PAGE))
        page = link.number("Page", "page", 1, pages, 1)
        source = choose_image(link).source
        by_patch = about["level"] == "patch"
        side = link.choice("Shorter side (pixels)", "side", SIDES, 224) if by_patch else 0
    brightness = 0.0 if dark else MIN_BRIGHTNESS
    _which(link, bank, images, source, side, brightness)
    shown = [int(prototype) for prototype in ranked[(page - 1) * PER_PAGE : page * PER_PAGE]]
    st.subheader(f"Prototypes by {ORDERS[order].partition(',')[0]}, page {page} of {pages}", anchor=False)
    if not shown:
        st.info("No prototype has items of 10 images, so none can be called pure. Choose the order by size.")
        return
    _layouts(bank, images, shown, brightness)
    _take(link, bank, images, shown, brightness)


def _explain() -> None:
    """How to make patterns, where the command line names none."""
    given = Given.from_environment()
    st.info(
        "The page shows what each prototype of a network stands for. That takes a pass over a data set, whose result "
        "is a file. Make it once, then start the app with it:"
    )
    for reference in given.ckpt:
        network = networks.network(reference)
        if network.loaded.projection_head is None:
            st.caption(
                plain(
                    f"{network.title} has no projection head, so it has no prototypes of its own: the command makes "
                    "some by k-means of its patch tokens, and says so."
                )
            )
        line = command_lines.make_patterns(network.settings, DataSettings(data=given.folder or "FOLDER"))
        st.code(line, language="bash", wrap_lines=True)
    st.code("ibot-eval app --ckpt FILE --patterns BANK", language="bash")


def _which(link: Link, bank: PatternBank, images: BankImages, source: Source, side: int, brightness: float) -> None:
    """A picture to click, and the prototype of the patch."""
    st.subheader("Which prototype is this?", anchor=False)
    network = banks.network_of(bank)
    if isinstance(network, str):
        st.info(plain(f"Start the app with the checkpoint that made these patterns to look pictures up.\n{network}"))
        return
    picture = banks.seen(bank, network, source, side)
    found = banks.assigned(bank, network, picture)
    whole = found.prototypes.shape == (1, 1)
    place = query_place(link)
    patch = None if place is None else patch_at(place, picture.grid)
    left, right = st.columns(2)
    with left:
        clickable(picture, None if whole else patch, link.key("picture"), asks(link, picture.grid))
        for note in picture.notes:
            st.caption(plain(note))
    with right:
        if patch is None and not whole:
            st.info("Click a patch to see which prototype it belongs to.")
            return
        at = (0, 0) if whole or patch is None else patch
        prototype, confidence = int(found.prototypes[at]), float(found.confidences[at])
        what = "The image" if whole else f"The patch in row {at[0]}, column {at[1]}"
        st.caption(plain(f"{what} belongs to {_title(bank, prototype)}, confidence {confidence:.3g}."))
        _layout(bank, images, prototype, brightness)


def _title(bank: PatternBank, prototype: int) -> str:
    """``prototype 12 (345 patches, 83 % of them n02979186)``."""
    size = f"{bank.counts[prototype]:,} {bank.items}"
    purity, majority = bank.purity, bank.majority(prototype)
    if purity is None or majority is None or np.isnan(purity[prototype]):
        return f"prototype {prototype} ({size})"
    return f"prototype {prototype} ({size}, {purity[prototype]:.0f} % of them {majority})"


def _layout(bank: PatternBank, images: BankImages, prototype: int, brightness: float) -> None:
    pixels = _pixels(bank, images, prototype, brightness, str(bank.path))
    if pixels is None:
        st.caption("No patch of it is brighter than near-black.")
    else:
        st.image(pixels, width="stretch")


@st.cache_data(max_entries=256, show_spinner=False)
def _pixels(_bank: PatternBank, _images: BankImages, prototype: int, brightness: float, path: str) -> np.ndarray | None:
    if not len(shown_items(_bank, prototype, SHOWN, brightness)):
        return None
    return layout_image(_bank, _images, prototype, n=SHOWN, min_brightness=brightness)


def _layouts(bank: PatternBank, images: BankImages, shown: Sequence[int], brightness: float) -> None:
    for first in range(0, len(shown), ACROSS):
        # A row at a time: layouts with fewer patches are lower.
        for column, prototype in zip(st.columns(ACROSS), shown[first : first + ACROSS], strict=False):
            with column:
                st.caption(plain(_title(bank, prototype)))
                _layout(bank, images, prototype, brightness)


def _take(link: Link, bank: PatternBank, images: BankImages, shown: Sequence[int], brightness: float) -> None:
    network = banks.network_of(bank)
    loaded = [] if isinstance(network, str) else [network.loaded]
    line = "" if isinstance(network, str) else _line(network, bank, shown, brightness)
    downloads(
        file_name("patterns", *map(str, shown)),
        lambda: layout_figure(bank, images, shown, min_brightness=brightness),
        lambda: provenance("patterns", loaded, {"prototypes": list(shown), "min_brightness": brightness}, [], line),
        link.key("figure"),
    )
    if line:
        command(line)


def _line(network: Network, bank: PatternBank, shown: Sequence[int], brightness: float) -> str:
    settings: dict[str, Any] = {} if brightness == MIN_BRIGHTNESS else {"min_brightness": brightness}
    if bank.path is None:  # the demonstration: the command makes it as well
        settings["patterns"] = None
    settings["data"] = Given.from_environment().folder
    return command_lines.draw_patterns(network.settings, bank, shown, **settings)
