"""Where each head of a block looks, for [CLS] or for a patch that is clicked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from dashboards import networks
from dashboards.choosing import choose_image
from dashboards.clicking import asks, beside, clickable, patch_at, query_place
from dashboards.frame import mistake, plain
from dashboards.link import Link
from dashboards.networks import Network
from dashboards.taking import command, downloads, file_name, picture_of
from ibot_eval.errors import UserError
from ibot_eval.visual import command_lines
from ibot_eval.visual.attention import AttentionMaps, explain_no_attention
from ibot_eval.visual.attention_figures import activation_figure, attention_figure, heat, overlay, overlay_figure
from ibot_eval.visual.export import provenance
from ibot_eval.visual.pictures import Picture, prepare

SIDES = (112, 168, 224, 336, 448, 560, 672)
"""Pixels of the shorter side, on offer."""
THUMBNAIL = 110
"""Pixels that the picture of one head among all is high, unless it is very wide or narrow."""
MEAN = "mean"
STYLES = {"heads": "a panel for each head", "overlay": "all heads in colours"}


def draw(link: Link) -> None:
    st.title("Attention")
    shown = networks.all_networks()
    with st.sidebar:
        source = choose_image(link).source
        able = [network for network in shown if explain_no_attention(network.backbone) is None]
        settings = _settings(link, able or shown)
    st.caption(
        "Click a patch to see where it looks. Bright is where a head's attention lies, and the outline holds "
        f"{settings['mass']} % of it."
        if able
        else "How strongly each position responds."
    )
    columns = st.columns(len(shown)) if len(shown) > 1 else [st.container()]
    for number, (column, network) in enumerate(zip(columns, shown, strict=True)):
        index = number if len(shown) > 1 else None
        with column:
            st.markdown(f"##### {plain(network.title)}")
            try:
                picture = prepare(source, network.backbone, settings["side"])
                if explain_no_attention(network.backbone) is None:
                    _maps(link, network, picture, settings, index)
                else:
                    _without_attention(link, network, picture, settings, index)
            except UserError as error:  # the other checkpoint may well show something
                mistake(error)


def _settings(link: Link, shown: Sequence[Network]) -> dict[str, Any]:
    depth = max(network.backbone.depth for network in shown)
    heads = max(network.backbone.num_heads for network in shown)
    values: dict[str, Any] = {
        "block": link.number("Block", "block", 0, depth - 1, depth - 1, help="0 is the first"),
    }
    values["head"] = link.choice("Head", "head", [MEAN, *map(str, range(heads))], slider=True)
    values["mass"] = link.number("Outline holds (% of the attention)", "mass", 5, 100, 60, step=5)
    values["side"] = link.choice("Shorter side (pixels)", "side", SIDES, 224)
    values["smooth"] = link.switch("Smooth between patches", "smooth")
    values["style"] = link.choice("Figure to download", "style", tuple(STYLES), format=STYLES.__getitem__)
    values["place"] = query_place(link)
    return values


def _maps(link: Link, network: Network, picture: Picture, settings: dict[str, Any], index: int | None) -> None:
    place = settings["place"]
    query = None if place is None else patch_at(place, picture.grid)
    if query is None and not network.backbone.has_cls:
        st.info("This network has no [CLS] token: click a patch to make it the query.")
        clickable(picture, None, link.key(f"picture{index or 0}"), asks(link, picture.grid))
        return
    block = networks.clipped(network, settings["block"])
    maps = networks.attention(network, picture, block, query)
    mass = settings["mass"] / 100
    # Beside other checkpoints, and for panoramas, there is no room for two pictures in a row.
    in_a_row = index is None and picture.image.width <= 2 * picture.image.height
    left, right = st.columns(2) if in_a_row else (st.container(), st.container())
    with left:
        clickable(picture, query, link.key(f"picture{index or 0}"), asks(link, picture.grid))
        _query(link, network, picture, query, index)
    with right:
        head = settings["head"]
        less = []
        if block < settings["block"]:
            less.append(f" It has {block + 1} blocks only.")
        if head != MEAN and int(head) >= maps.heads:
            less.append(f" It has {maps.heads} heads only.")
            head = MEAN
        weights = maps.mean if head == MEAN else maps.weights[int(head)]
        what = "mean of all heads" if head == MEAN else f"head {head}"
        st.image(beside(picture, heat(picture, weights, mass, settings["smooth"])))
        st.caption(f"Block {maps.block}, {what}.{''.join(less)}")
    for note in picture.notes:
        st.caption(plain(note))
    _every_head(picture, maps, mass, settings["smooth"])
    _take(link, network, picture, maps, settings, index)


def _query(link: Link, network: Network, picture: Picture, query: tuple[int, int] | None, index: int | None) -> None:
    """What the query is, and ways to change it without a mouse."""
    name = "[CLS]" if query is None else f"the patch in row {query[0]}, column {query[1]}"
    h, w = picture.grid
    st.caption(f"{plain(f'Query: {name}')}, of {h} x {w} patches of {picture.patch} pixels.")
    with st.popover("Change the query"):
        row, column = query or (h // 2, w // 2)
        keys = [link.key(f"{what}{index or 0}") for what in ("row", "column")]

        ask = asks(link, picture.grid)

        def typed() -> None:
            ask((int(st.session_state[keys[0]]), int(st.session_state[keys[1]])))

        for key, value in zip(keys, (row, column), strict=True):
            st.session_state[key] = value
        st.number_input("Row", 0, h - 1, key=keys[0], on_change=typed)
        st.number_input("Column", 0, w - 1, key=keys[1], on_change=typed)
        if network.backbone.has_cls:
            st.button(
                r"Back to \[CLS\]", key=link.key(f"cls{index or 0}"), on_click=ask, args=(None,), disabled=query is None
            )


def _every_head(picture: Picture, maps: AttentionMaps, mass: float, smooth: bool) -> None:
    """Thumbnails in rows: all heads in colours, then each."""
    images = [overlay(picture, maps, None, mass), *(heat(picture, weights, mass, smooth) for weights in maps.weights)]
    titles = ["all heads in colours", *(f"head {head}" for head in range(maps.heads))]
    width = round(THUMBNAIL * picture.image.width / picture.image.height)
    with st.container(horizontal=True):
        for image, title in zip(images, titles, strict=True):
            st.image(image, title, width=min(max(width, 80), 760))


def _take(
    link: Link, network: Network, picture: Picture, maps: AttentionMaps, settings: dict[str, Any], index: int | None
) -> None:
    mass, style, smooth = settings["mass"] / 100, settings["style"], settings["smooth"]
    heads = None if settings["head"] == MEAN else [int(settings["head"])]
    if heads and heads[0] >= maps.heads:
        heads = None
    line = command_lines.draw_attention(
        network.settings,
        [picture.source],
        side=settings["side"],
        block=maps.block,
        query=maps.query,
        mass=mass,
        heads=heads,
        style=style,
        smooth=smooth,
    )

    def figure() -> Any:
        if style == "overlay":
            return overlay_figure([(picture, maps)], heads=heads, mass=mass)
        return attention_figure(picture, maps, heads=heads, mass=mass, smooth=smooth)

    about = {
        "block": maps.block,
        "query": maps.query,
        "heads": heads,
        "mass": mass,
        "side": settings["side"],
        "style": style,
        "smooth": smooth,
    }
    name = file_name("attention", picture.name.rpartition(".")[0], network.loaded.report.architecture)
    downloads(
        name,
        figure,
        lambda: provenance("attention", network.loaded, about, [picture.name], line),
        link.key(f"figure{index or 0}"),
    )
    command(line, [picture.source])


def _without_attention(
    link: Link, network: Network, picture: Picture, settings: dict[str, Any], index: int | None
) -> None:
    """What can be shown of a CNN or a network whose attention is local."""
    block, side = networks.clipped(network, settings["block"]), settings["side"]
    st.info(plain(f"There are no attention maps here: {explain_no_attention(network.backbone)}."))
    found = networks.activation(network, picture, block)

    def figure() -> Any:
        return activation_figure(picture, found, block)

    st.image(picture_of(figure, "activation", network.sha256, picture.sha256, picture.name, block))
    st.caption(f"The picture, and how strongly each position of block {block} responds.")
    for note in picture.notes:
        st.caption(plain(note))
    line = command_lines.draw_attention(network.settings, [picture.source], side=side, block=block, style="activation")
    downloads(
        file_name("activation", picture.name.rpartition(".")[0], network.loaded.report.architecture),
        figure,
        lambda: provenance("activation", network.loaded, {"block": block, "side": side}, [picture.name], line),
        link.key(f"figure{index or 0}"),
    )
    command(line, [picture.source])
