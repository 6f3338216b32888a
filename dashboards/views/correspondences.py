"""Which patch of another picture, or of another view of the same one, is most like a patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import streamlit as st

from dashboards import networks
from dashboards.choosing import choose_image
from dashboards.clicking import asks, beside, clickable, patch_at, query_place
from dashboards.frame import plain
from dashboards.link import Link
from dashboards.networks import Network
from dashboards.taking import command, downloads, file_name, picture_of
from dashboards.views.attention import SIDES
from ibot_eval.errors import ConfigError
from ibot_eval.visual import command_lines
from ibot_eval.visual.attention_figures import heat
from ibot_eval.visual.correspondence import Matches, match, similarity_map, strongest
from ibot_eval.visual.correspondence_figures import correspondence_figure
from ibot_eval.visual.export import provenance
from ibot_eval.visual.pictures import WHOLE, Box, Picture, view
from ibot_eval.visual.views import accuracy_in_words, with_geometry

VIEWS, TWO = "two views of one image", "two images"
SIMILARITIES = {"dot": "dot product (published)", "cosine": "cosine"}


@dataclass(frozen=True)
class Pair:
    """What is compared, and how."""

    left: Picture
    right: Picture
    left_box: Box
    right_box: Box
    flip: bool
    side: int
    block: int
    similarity: Any
    mutual: bool
    top: int

    @property
    def views(self) -> bool:
        return self.left.source.sha256 == self.right.source.sha256


def draw(link: Link) -> None:
    st.title("Correspondences")
    with st.sidebar:
        network = networks.choose(link)
        pair = _settings(link, network)
    if not network.backbone.has_patches:
        raise ConfigError(
            f"{network.backbone.architecture} gives no patch tokens, so patches cannot be matched",
            todo="choose a checkpoint of a Vision Transformer",
        )
    st.caption("Click a patch on the left: on the right stands how like it every patch is, and the best one.")
    with st.spinner("Computing …"):
        left = networks.tokens(network, pair.left, pair.block)
        right = networks.tokens(network, pair.right, pair.block)
        matches = match(left, right, pair.similarity, mutual=pair.mutual)
        if pair.views:
            matches = with_geometry(matches, pair.left, pair.right)
    place = query_place(link)
    patch = None if place is None else patch_at(place, pair.left.grid)
    columns = st.columns(2)
    with columns[0]:
        clickable(pair.left, patch, link.key("left"), asks(link, pair.left.grid))
        st.caption(plain(pair.left.name))
    with columns[1]:
        if patch is None:
            st.image(beside(pair.right, pair.right.pixels()))
            st.caption(plain(pair.right.name))
        else:
            similar = similarity_map(left, right, patch, pair.similarity)
            _best(pair, patch, similar)
    _strongest(link, network, pair, strongest(matches, pair.top), matches)


def _settings(link: Link, network: Network) -> Pair:
    mode = link.choice("Compare", "mode", (VIEWS, TWO))
    first = choose_image(link, "image", "Image" if mode == VIEWS else "Left image").source
    if mode == TWO:
        second, flip = choose_image(link, "image2", "Right image", default=1).source, False
        boxes = (WHOLE, WHOLE)
    else:
        second = first
        boxes = (_box(link, "Left view", "left", (0, 80)), _box(link, "Right view", "right", (20, 100)))
        flip = link.switch("Mirror the right view", "flip")
    depth = network.backbone.depth
    block = link.number("Block", "block", 0, depth - 1, depth - 1, help="0 is the first")
    similarity = link.choice("Similarity", "similarity", tuple(SIMILARITIES), format=SIMILARITIES.__getitem__)
    mutual = link.switch("Only mutual best matches", "mutual", help="Each patch is the other's best.")
    top = link.number("Lines", "top", 1, 48, 12, help="The patches to which [CLS] attends most.")
    side = link.choice("Shorter side (pixels)", "side", SIDES, 224)
    pictures = (
        view(first, network.backbone, boxes[0], side=side),
        view(second, network.backbone, boxes[1], flip=flip, side=side),
    )
    return Pair(*pictures, *boxes, flip, side, block, similarity, mutual, top)


def _box(link: Link, label: str, name: str, default: tuple[int, int]) -> Box:
    across = link.span(f"{label}: from left to right", f"{name}-x", default)
    down = link.span(f"{label}: from top to bottom", f"{name}-y", default)
    return across[0] / 100, down[0] / 100, across[1] / 100, down[1] / 100


def _best(pair: Pair, patch: tuple[int, int], similar: np.ndarray) -> None:
    row, column = (int(i) for i in np.unravel_index(similar.argmax(), similar.shape))
    # From the least on: the colours of a map begin at 0.
    st.image(beside(pair.right, heat(pair.right, similar - float(similar.min()), None), (row, column)))
    st.caption(
        f"{plain(pair.right.name)}: patch {patch[0]}, {patch[1]} on the left is most like patch {row}, {column} here "
        f"({SIMILARITIES[pair.similarity].partition(' (')[0]} {similar.max():.3g})"
    )


def _strongest(link: Link, network: Network, pair: Pair, best: Matches, matches: Matches) -> None:
    by = "to which [CLS] attends most" if matches.attention is not None else "with the highest scores"
    st.subheader(plain(f"The {len(best)} patches {by}"), anchor=False)
    if pair.views:
        told = accuracy_in_words(matches, pair.left, pair.right, mutual=pair.mutual)
        if len(best):
            st.caption(f"{told}. Wrong ones are dashed.")
        else:
            st.info(f"{told[0].upper()}{told[1:]}.")
    names = [pair.left.name, pair.right.name]
    pictures = (pair.left.sha256, pair.right.sha256, *names)
    key = (network.sha256, *pictures, pair.block, pair.similarity, pair.mutual, pair.top)
    st.image(picture_of(lambda: correspondence_figure([(pair.left, pair.right, best)]), "matches", *key))
    for note in dict.fromkeys((*pair.left.notes, *pair.right.notes)):
        st.caption(plain(note))
    settings = {
        "side": pair.side,
        "block": pair.block,
        "similarity": pair.similarity,
        "mutual": pair.mutual,
        "top": pair.top,
    }
    boxes = {"left_box": pair.left_box, "right_box": pair.right_box, "flip": pair.flip} if pair.views else {}
    line = command_lines.draw_correspondence(network.settings, pair.left.source, pair.right.source, **settings, **boxes)
    downloads(
        file_name("correspondence", *(name.rpartition(".")[0] for name in dict.fromkeys(names))),
        lambda: correspondence_figure([(pair.left, pair.right, best)]),
        lambda: provenance("correspondence", network.loaded, settings | boxes, names, line),
        link.key("figure"),
    )
    command(line, [pair.left.source, pair.right.source])
