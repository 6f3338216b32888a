"""Checkpoints in memory, one network each for all sessions, and what was computed with them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import streamlit as st
import torch

from dashboards.frame import plain
from dashboards.given import Given
from dashboards.link import Link
from ibot_eval import distributed
from ibot_eval.backbone import Backbone
from ibot_eval.cache import BankCache
from ibot_eval.checkpoint import NAMED, LoadedCheckpoint
from ibot_eval.runner import load_any
from ibot_eval.settings import CheckpointSettings
from ibot_eval.visual.attention import AttentionMaps, activation_map, attention_maps
from ibot_eval.visual.correspondence import Tokens, tokens_of
from ibot_eval.visual.pictures import Picture

COMPUTING = threading.RLock()
"""One pass through a network at a time: several at once would be no faster and need the memory of all."""
KEPT = 64
"""Maps of that many passes; the oldest make place."""
TOKENS_KEPT = 24
"""Patch tokens of that many passes, of which the largest take 16 MB."""


@dataclass(frozen=True)
class Network:
    """A loaded checkpoint and how it was asked for."""

    settings: CheckpointSettings
    loaded: LoadedCheckpoint

    @property
    def backbone(self) -> Backbone:
        return self.loaded.backbone

    @property
    def sha256(self) -> str:
        """Of the checkpoint and of what was set by hand: the key of cached results."""
        report = self.loaded.report
        return f"{report.sha256} {report.key} {sorted(report.overrides.items())}"

    @property
    def title(self) -> str:
        """Reference and architecture; text, not Markdown."""
        report = self.loaded.report
        key = f", {report.key}" if report.key else ""
        return f"{short(self.settings.ckpt or '')} ({report.architecture}{key})"


def short(reference: str) -> str:
    """What a checkpoint is called in titles: of a path the last parts, as few as tell it from the others."""
    if ":" in reference:
        return reference
    parts = Path(reference).parts
    others = [Path(other).parts for other in Given.from_environment().ckpt if other != reference]
    for count in range(1, len(parts)):
        if all(other[-count:] != parts[-count:] for other in others):
            return "/".join(parts[-count:])
    return reference


def settings_of(reference: str) -> CheckpointSettings:
    """Settings of one of the checkpoints of the command line."""
    given = Given.from_environment()
    if reference == "demo" or reference.startswith(NAMED):
        return CheckpointSettings(ckpt=reference)
    return CheckpointSettings(
        ckpt=reference,
        key=given.key,
        arch=given.arch,
        patch_size=given.patch_size,
        heads=given.heads,
        trust_pickle=given.trust_pickle,
    )


def network(reference: str) -> Network:
    """The network of one of the checkpoints of the command line, loaded when first asked for.

    Raises:
        CheckpointError: it cannot be read.
        KeyError: the command line names no such checkpoint.
    """
    if reference not in Given.from_environment().ckpt:
        raise KeyError(reference)
    with st.spinner(f"Loading {plain(short(reference))} …"):
        return _load(reference)


@st.cache_resource(show_spinner=False)
def _load(reference: str) -> Network:
    given = Given.from_environment()
    settings = settings_of(reference)
    with COMPUTING:
        loaded = load_any(settings, BankCache(Path(given.cache) if given.cache else None), seed=0)
        loaded.backbone.to(device())
        if loaded.projection_head is not None:
            loaded.projection_head.to(device())
    return Network(settings, loaded)


def device() -> torch.device:
    """Where everything is computed."""
    return distributed.init(Given.from_environment().device)


def choose(link: Link) -> Network:
    """One of the checkpoints; no choice is shown where there is one only."""
    return network(link.choice("Checkpoint", "ckpt", Given.from_environment().ckpt, format=short))


def all_networks() -> list[Network]:
    """Of all checkpoints of the command line, in its order."""
    return [network(reference) for reference in Given.from_environment().ckpt]


def attention(network: Network, picture: Picture, block: int, query: tuple[int, int] | None) -> AttentionMaps:
    """As ``visual.attention.attention_maps``, kept for the next time."""
    return _attention(network, picture, network.sha256, picture.sha256, block, query)


@st.cache_resource(max_entries=KEPT, show_spinner=False)
def _attention(
    _network: Network, _picture: Picture, checkpoint: str, image: str, block: int, query: tuple[int, int] | None
) -> AttentionMaps:
    with COMPUTING:
        return attention_maps(_network.backbone, _picture, block, query)


def activation(network: Network, picture: Picture, block: int) -> np.ndarray:
    """As ``visual.attention.activation_map``, kept for the next time."""
    return _activation(network, picture, network.sha256, picture.sha256, block)


@st.cache_resource(max_entries=KEPT, show_spinner=False)
def _activation(_network: Network, _picture: Picture, checkpoint: str, image: str, block: int) -> np.ndarray:
    with COMPUTING:
        return activation_map(_network.backbone, _picture, block)


def tokens(network: Network, picture: Picture, block: int) -> Tokens:
    """As ``visual.correspondence.tokens_of``, kept for the next time."""
    return _tokens(network, picture, network.sha256, picture.sha256, block)


@st.cache_resource(max_entries=TOKENS_KEPT, show_spinner=False)
def _tokens(_network: Network, _picture: Picture, checkpoint: str, image: str, block: int) -> Tokens:
    with COMPUTING:
        return tokens_of(_network.backbone, _picture, block)


def clipped(network: Network, block: int) -> int:
    """``block``, or the last one where the network has fewer."""
    return min(block, network.backbone.depth - 1)
