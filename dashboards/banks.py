"""The pattern bank that the app shows: that of --patterns, or one made of the digits for the demonstration."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import streamlit as st

from dashboards import networks
from dashboards.given import Given
from dashboards.networks import COMPUTING, Network
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.settings import DataSettings, EngineSettings
from ibot_eval.visual.pattern_bank import PatternBank, open_bank
from ibot_eval.visual.pattern_layouts import BankImages
from ibot_eval.visual.pattern_making import make
from ibot_eval.visual.patterns import Assignment, assign
from ibot_eval.visual.pictures import Picture


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
    """The images that a bank points to: in --data where they are there, else where they were when it was made."""
    return _images(bank, str(bank.path), Given.from_environment().data)


@st.cache_resource(show_spinner="Looking for the images of the patterns …")
def _images(_bank: PatternBank, path: str, data: str | None) -> BankImages:
    if data is not None:
        with suppress(DataError, ConfigError):
            return BankImages.open(_bank, DataSettings(data=data))
    return BankImages.open(_bank)


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
