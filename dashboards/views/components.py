"""Principal components of the patch tokens of several images, as colours."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from dashboards import networks
from dashboards.choosing import choose_images
from dashboards.frame import plain
from dashboards.link import Link
from dashboards.taking import command, downloads, file_name, picture_of
from dashboards.views.attention import SIDES
from ibot_eval.errors import ConfigError
from ibot_eval.visual import command_lines
from ibot_eval.visual.components import Components, components, components_figure
from ibot_eval.visual.correspondence import Tokens
from ibot_eval.visual.export import provenance
from ibot_eval.visual.pictures import prepare


def draw(link: Link) -> None:
    st.title("Components")
    with st.sidebar:
        network = networks.choose(link)
        sources = choose_images(link)
        depth = network.backbone.depth
        block = link.number("Block", "block", 0, depth - 1, depth - 1, help="0 is the first")
        foreground = link.switch(
            "Foreground only", "foreground", True, help="The first component of all patches tells it from the rest."
        )
        side = link.choice("Shorter side (pixels)", "side", SIDES, 224)
    st.caption(
        "The first three principal components of all patches together, as red, green and blue: patches of one colour "
        "have similar features, also across images."
    )
    if not network.backbone.has_patches:
        raise ConfigError(
            f"{network.backbone.architecture} gives no patch tokens", todo="choose a checkpoint of another network"
        )
    pictures, tokens = [], []
    bar = st.progress(0.0, "Computing …")
    for number, source in enumerate(sources):
        bar.progress(number / len(sources), plain(source.name))
        pictures.append(prepare(source, network.backbone, side))
        tokens.append(networks.tokens(network, pictures[-1], block))
    bar.empty()
    key = (network.sha256, *(picture.sha256 for picture in pictures), block, foreground)
    found = _components(tokens, foreground, repr(key))
    names = [picture.name for picture in pictures]
    st.image(picture_of(lambda: components_figure(pictures, found), "components", *key, *names))
    explained = ", ".join(f"{share:.0f} %" for share in found.explained)
    st.caption(f"Share of the variance in red, green and blue: {explained}.")
    for note in dict.fromkeys((*found.notes, *(note for picture in pictures for note in picture.notes))):
        st.caption(plain(note))
    line = command_lines.draw_pca(network.settings, sources, side=side, block=block, foreground=foreground)
    downloads(
        file_name("components", *(name.rpartition(".")[0] for name in names[:2])),
        lambda: components_figure(pictures, found),
        lambda: provenance(
            "components", network.loaded, {"side": side, "block": block, "foreground": foreground}, names, line
        ),
        link.key("figure"),
    )
    command(line, sources)


@st.cache_resource(max_entries=networks.KEPT, show_spinner=False)
def _components(_tokens: Sequence[Tokens], foreground: bool, key: str) -> Components:
    return components(_tokens, foreground=foreground)
