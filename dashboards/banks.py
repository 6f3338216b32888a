"""The pattern bank that the app shows: that of --patterns, or one made of the digits for the demonstration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st
from torchvision.transforms import functional as F

from dashboards import networks
from dashboards.gallery import holds
from dashboards.given import Given
from dashboards.networks import COMPUTING, Network
from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.settings import DataSettings, EngineSettings
from ibot_eval.visual.pattern_bank import PatternBank, open_bank
from ibot_eval.visual.pattern_layouts import BEYOND, BankImages, settings_of
from ibot_eval.visual.pattern_making import make
from ibot_eval.visual.patterns import Assignment, assign
from ibot_eval.visual.pictures import Picture, Source, prepare


def bank() -> PatternBank | None:
    """The bank to show; None where the command line names none."""
    given = Given.from_environment()
    if given.patterns is not None:
        return _opened(given.patterns)
    return demonstration() if is_demonstration(given) else None


def is_demonstration(given: Given) -> bool:
    """Whether a bank is made of scikit-learn's digits: nothing was asked for but the demonstration."""
    return given.patterns is None and given.data is None and given.ckpt[0] == "demo"


@st.cache_resource(show_spinner="Opening the patterns …")
def _opened(path: str) -> PatternBank:
    return open_bank(Path(path))


@st.cache_resource(show_spinner="Sorting the patches of 445 digits by prototype, once …")
def demonstration() -> PatternBank:
    """What `ibot-eval draw patterns` draws where it is told nothing: the demonstration network on its test digits."""
    network = networks.network("demo")
    with COMPUTING:
        return make(network.loaded, DataSettings(data="demo"), networks.device(), engine=EngineSettings(workers=0))


def images(bank: PatternBank) -> BankImages:
    """The images that a bank points to: in --data where that is given, else where they were when it was made.

    Raises:
        DataError: they are not there.
    """
    return _images(bank, str(bank.path), Given.from_environment().folder)


@st.cache_resource(show_spinner="Looking for the images of the patterns …")
def _images(_bank: PatternBank, path: str, data: str | None) -> BankImages:
    if data is None:
        return _within(_bank, None, getattr(settings_of(_bank), "data", None))
    try:
        return _within(_bank, DataSettings(data=data), data)
    except (DataError, ConfigError) as error:
        raise DataError(
            error.what,
            where=error.where or "--data",
            todo="start the app with the folder that the patterns were made from, or without --data: then their images "
            "are read from where they were",
        ) from error


def _within(bank: PatternBank, settings: DataSettings | None, folder: str | None) -> BankImages:
    images = _Inside.open(bank, settings)
    assert isinstance(images, _Inside)
    if folder is not None:
        images.keep(folder, own=settings is None)
    return images


class _Inside(BankImages):
    """Those of a folder; grey stands for images that are links which lead out of it."""

    def __init__(self, bank: PatternBank, split: ImageSplit, notes: tuple[str, ...] = ()) -> None:
        super().__init__(bank, split, notes)
        self._folder = split.folder if isinstance(split, FolderSplit) else None
        self._roots: list[str] = []
        self._files: list[str] = []
        if isinstance(split, FolderSplit):
            places = {image_id: i for i, image_id in enumerate(split.image_ids)}
            self._files = [str(split.path(places[image_id])) for image_id in bank.image_ids]

    def keep(self, data: str, *, own: bool) -> None:
        """Leaves out what lies outside of ``data``.

        Args:
            own: whether the bank itself names the folder; its split may then lie elsewhere.

        Raises:
            DataError: everything does.
        """
        if self._folder is None:
            return
        self._roots = [os.path.realpath(folder) for folder in (data, *([self._folder] if own else []))]
        folders: dict[str, bool] = {}
        outside = 0
        for path in self._files:
            folder = os.path.dirname(path)
            if folder not in folders:
                folders[folder] = self._holds(folder)
            outside += not folders[folder] or (os.path.islink(path) and not self._holds(path))
        if outside and outside == len(self._files):
            raise DataError(f"the images of the patterns are links that lead out of {data}")
        if outside:
            self.notes = (*self.notes, f"{outside} images are links that lead out of {data}: grey")

    def image(self, image: int) -> np.ndarray:
        if self._roots and not self._holds(self._files[image]):
            side = self.bank.about["transform"]["crop"]
            return np.full((side, side, 3), BEYOND, np.uint8)
        return super().image(image)

    def _holds(self, path: str) -> bool:
        return any(holds(root, Path(path)) for root in self._roots)


def seen(bank: PatternBank, network: Network, source: Source, side: int) -> Picture:
    """A picture as the prototypes are told of it: all of it by patches, by whole images what the bank cut from its own.

    Args:
        side: pixels of the shorter side, for patches.
    """
    if bank.about["level"] == "patch":
        return prepare(source, network.backbone, side)
    about: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in bank.about["transform"].items()
        if name != "antialias"
    }
    transform = EvalTransform(**about)
    image = F.to_pil_image(transform(source.image))
    width, height = (length / min(source.image.size) * transform.resize for length in source.image.size)
    across, down = transform.crop / width / 2, transform.crop / height / 2
    box = (0.5 - across, 0.5 - down, 0.5 + across, 0.5 + down)
    note = f"the middle of it, {transform.crop} x {transform.crop} pixels, as the patterns were made"
    return Picture(source, image, network.backbone.patch_size, box, notes=(*source.notes, note))


def network_of(bank: PatternBank) -> Network | str:
    """The network of the command line that made ``bank``, or why there is none."""
    reason = ""
    for network in networks.all_networks():
        try:
            bank.check(network.loaded)
        except ConfigError as error:
            reason = str(error)
        else:
            return network
    return reason


def assigned(bank: PatternBank, network: Network, picture: Picture) -> Assignment:
    """The prototype of each patch of a picture, kept for the next time."""
    return _assigned(bank, network, picture, str(bank.path), network.sha256, picture.sha256)


@st.cache_resource(max_entries=networks.KEPT, show_spinner=False)
def _assigned(
    _bank: PatternBank, _network: Network, _picture: Picture, path: str, checkpoint: str, image: str
) -> Assignment:
    with COMPUTING:
        return assign(_bank, _network.loaded, _picture)
