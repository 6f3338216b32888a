"""What a protocol is: settings in, events out.

A protocol is one module with one class, registered by one line of pyproject (group ``ibot_eval.protocols``).
Protocols for which banks of frozen features suffice derive from :class:`FrozenProtocol` and never see a backbone, so
synthetic tensors test them in milliseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch

from ibot_eval.features import FeatureBank, FeatureRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.checkpoint import LoadedCheckpoint
    from ibot_eval.data.splits import Data
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord
    from ibot_eval.settings import DataSettings, EngineSettings, RunSettings

Unit = Literal["%", "s", "images/s", "GB", "1", "h"]


@dataclass(frozen=True)
class Metric:
    """One number. Accuracies, AP, mIoU, NMI … are in percent, 0 to 100, never fractions."""

    name: str
    """From the list in record.schema.json, ``$defs.names``."""
    value: float | None
    unit: Unit = "%"
    higher_is_better: bool = True
    params: Mapping[str, Any] = field(default_factory=dict)
    """What distinguishes it from other metrics of the same name: k, block, method, grid, level …"""
    n: int | None = None
    """Number of samples it was measured on."""
    interval: tuple[float, float] | None = None
    """95 %, in the metric's unit."""


@dataclass(frozen=True)
class Predictions:
    """Per-sample results, saved beside the record for intervals and paired comparisons."""

    image_ids: Sequence[str]
    values: Mapping[str, np.ndarray]
    """Name -> array whose first axis has length ``len(image_ids)``, e.g. ``label``, ``top1@k=20``."""


@dataclass(frozen=True)
class Artifact:
    """A file that the protocol wrote into the run's folder."""

    path: Path
    kind: Literal["predictions", "figure", "head", "checkpoint", "log"]


@dataclass(frozen=True)
class Warning:
    """Something the reader of the numbers should know."""

    message: str


Event = Metric | Predictions | Artifact | Warning


@dataclass
class Session:
    """What a protocol may use while it runs."""

    device: torch.device
    output: Path
    """The run's own folder."""
    class_names: tuple[str, ...]
    seed: int = 0
    data: Data | None = None
    """Images, for protocols that need more than banks."""
    progress: bool = True
    """Whether to show progress bars (on stderr)."""
    asked: frozenset[str] = frozenset()
    """Names of the protocol's settings that the user gave by hand (defaults may be relaxed, these may not)."""
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """The record's ``checkpoint``: reference, sha256, key, architecture …; empty for synthetic banks."""
    unavailable: Mapping[FeatureRequest, str] = field(default_factory=dict)
    """Optional requests that the network cannot serve, and why."""
    transform: EvalTransform | None = None
    """What evaluation images go through; for protocols that open images themselves, as are the next two."""
    engine: EngineSettings | None = None
    data_settings: DataSettings | None = None
    loaded: LoadedCheckpoint | None = None
    """All that the checkpoint holds, for protocols that train it on: its projection head, its classifier."""


Config = TypeVar("Config")


class PublishedKey(NamedTuple):
    """Under which names published.json has the number that a metric reproduces."""

    protocol: str
    metric: str
    data: str
    remark: str = ""
    """What to add to the source where the two are not quite the same thing."""
    exact: bool = False
    """Whether this very metric is the published one; else an entry that names no parameters goes with the headline."""


class EvalProtocol(ABC, Generic[Config]):
    """One way of evaluating a backbone."""

    config_type: ClassVar[type]
    """Frozen dataclass of settings; every field has a default and a docstring (they become flags and their help)."""
    version: ClassVar[int]
    """Raised whenever a number may move."""
    primary: ClassVar[str]
    """Name of the headline metric."""
    resumable: ClassVar[bool] = False
    """Whether an unfinished run of the same name is gone on with: its folder is then given to :meth:`run` again."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Evaluate ``backbone`` and yield results as they come."""

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """This protocol with the settings that depend on the network filled in: features of the family, k up to the
        grid. Called before :meth:`run` or ``features()``; the record holds the settings of the result.

        Args:
            backbone: not to be run, only asked for its attributes.
            transform: of the images that it will see.
            asked: names of the settings that the user gave by hand.

        Raises:
            ConfigError: settings given by hand that this network cannot serve.
        """
        return self

    def roles(self) -> tuple[str, ...]:
        """The splits that it needs."""
        return ("train", "test")

    def open(self, settings: DataSettings) -> Data:
        """The data that ``--data`` names: labelled images, unless a protocol reads something else.

        Called after :meth:`for_network`.

        Raises:
            UserError: as :func:`ibot_eval.data.opening.open_data`.
        """
        # Here, since the readers take a while to import, and a protocol's --help needs none of them.
        from ibot_eval.data.opening import open_data

        return open_data(settings, roles=self.roles())

    def instead(self, settings: RunSettings) -> str | None:
        """What to print in place of a run, for settings that ask for a check only; None for a run.

        Called before a checkpoint is loaded or a folder made; ``settings`` may name no checkpoint.

        Raises:
            UserError: the check found what makes the run impossible; its text says all of it.
        """
        return None

    def as_published(self) -> bool:
        """Whether these settings are those of the published experiment; if not, no published number is shown."""
        return True

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """Where the published number for ``metric`` is to be found; None where none is comparable.

        Args:
            name: the protocol's registered name.
            metric: as in the record (name, params …).
            data: what publications call the data set.
        """
        return PublishedKey(name, metric["name"], data)

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """Figures drawn from one saved record, or from several on the same axes, by name; none by default."""
        return {}

    @classmethod
    def headline(cls, metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The metric to show when only one fits: the first called ``primary``.

        A protocol with several of them may choose by a rule that is fixed beforehand, never the best on the test
        split.
        """
        return next((m for m in metrics if m["name"] == cls.primary), None)


class FrozenProtocol(EvalProtocol[Config]):
    """A protocol that banks of frozen features suffice for."""

    @abstractmethod
    def features(self) -> Sequence[FeatureRequest]:
        """The atomic outputs it needs, of which splits."""

    def roles(self) -> tuple[str, ...]:
        return tuple(sorted({request.split for request in self.features()}, reverse=True))

    def check(self, sizes: Mapping[str, int], session: Session) -> None:
        """Raises ConfigError for settings that these splits (role -> number of images) cannot serve.

        Called before the features are extracted, which may take hours.
        """

    @abstractmethod
    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        """Results from banks alone; called with exactly the requests of :meth:`features`."""

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        raise TypeError(f"{type(self).__name__} scores banks; the runner extracts them and calls score()")
