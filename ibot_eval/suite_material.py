"""What the protocols of a suite share: the network, the images, and one extraction of all their features."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ibot_eval import distributed, runner
from ibot_eval.cache import BankCache
from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import Data, ImageSplit
from ibot_eval.data.transforms import EvalTransform, eval_transform
from ibot_eval.errors import UserError
from ibot_eval.extraction import shared_temporary_folder
from ibot_eval.features import FeatureRequest
from ibot_eval.files import canonical_json
from ibot_eval.protocol import EvalProtocol, FrozenProtocol
from ibot_eval.recording import say
from ibot_eval.settings import DataSettings, RunSettings

_OF_TRANSFORM = ("resize", "crop", "interpolation", "mean", "std")


@dataclass(frozen=True)
class Member:
    """One protocol of a suite."""

    name: str
    """The registered one; also its folder's."""
    protocol: EvalProtocol[Any]
    settings: RunSettings
    """The suite's, changed by what its recipe sets."""
    asked: frozenset[str] = frozenset()
    """Names of the settings that flags or the recipe set."""
    recipe: tuple[str, ...] = ()
    """The recipe as flags."""


@dataclass
class Material:
    """What the members share: the network, the data sets, the cache."""

    settings: RunSettings
    device: torch.device
    told: set[str] = field(default_factory=set)
    """Remarks that were printed."""

    def __post_init__(self) -> None:
        self.cache = BankCache(self.settings.engine.cache)
        self.loaded = runner.load_any(self.settings.checkpoint, self.cache, self.settings.engine.seed)
        self.loaded.backbone.to(self.device)
        say(self.loaded.report.notes, self.told)
        self._opened: dict[tuple[DataSettings, Sequence[str]], Data] = {}

    def identity(self) -> dict[str, Any]:
        """What tells this network, these images and this transform from others; JSON-ready."""
        report, data = self.loaded.report, self._whole_data()
        return {
            "checkpoint": {
                "sha256": report.sha256,
                "key": report.key,
                "overrides": dict(report.overrides),
                "identity": dict(report.identity),
                "pos_embed_resize": str(getattr(self.loaded.backbone, "resize", None)),
            },
            "data": {"splits": sorted(data.splits), "fingerprint": data.fingerprint},
            "transform": eval_transform(self.settings.data, self.loaded.backbone).describe(),
        }

    def _whole_data(self) -> Data:
        """All splits that there are, whatever the members need: other members of the same suite may need others."""
        errors = []
        for roles in (("train", "test"), ("test",), ("train",)):
            try:
                return self.open(self.settings.data, roles)
            except UserError as error:
                errors.append(error)
        raise errors[0]

    def open(self, settings: DataSettings, roles: Sequence[str]) -> Data:
        """As ``open_data``, once for the same images. The splits are exactly ``roles``, as in a run of its own: the
        fingerprint in the record depends on them."""
        images = replace(settings, **{name: getattr(DataSettings(), name) for name in _OF_TRANSFORM})
        if (images, roles) not in self._opened:
            self._opened[images, roles] = open_data(settings, roles=roles)
        return self._opened[images, roles]

    def serves(self, member: Member) -> bool:
        """Whether ``member`` can use this network: not if its recipe asks for another, nor if it might change it."""
        own = member.settings
        same = (own.checkpoint, own.engine) == (self.settings.checkpoint, self.settings.engine)
        return same and isinstance(member.protocol, FrozenProtocol)

    def needs(self, member: Member) -> tuple[EvalTransform, Data, list[FeatureRequest]]:
        """The transform, the images and the features that a frozen ``member`` will ask for."""
        transform = eval_transform(member.settings.data, self.loaded.backbone)
        protocol: Any = member.protocol.for_network(self.loaded.backbone, transform, member.asked)
        data = self.open(member.settings.data, protocol.roles())
        return transform, data, runner.available(protocol.features(), self.loaded)[0]

    @contextmanager
    def banks_in_one_place(self) -> Iterator[None]:
        """Gives a network whose banks must not be kept one temporary cache for the time of the suite."""
        if self.loaded.cacheable:
            yield
            return
        with shared_temporary_folder() as folder:
            self.cache, self.loaded = BankCache(folder), replace(self.loaded, cacheable=True)
            yield


@dataclass
class _Pass:
    """A pass over the images of one split: what several protocols want of them."""

    split: ImageSplit
    transform: EvalTransform
    settings: RunSettings
    requests: dict[FeatureRequest, None] = field(default_factory=dict)
    members: dict[str, None] = field(default_factory=dict)


def extract_together(members: Sequence[Member], material: Material) -> Mapping[str, Data]:
    """Puts the banks of frozen ``members`` into the cache, and gives the images of each by its name.

    A member that cannot say what it needs, or whose features cannot be made, is left out: it fails when it is run, and
    its own record then says why.
    """
    images: dict[str, Data] = {}
    passes: dict[tuple[str, ...], _Pass] = {}
    for member in members:
        if not material.serves(member):
            continue
        try:
            transform, data, requests = distributed.everywhere(lambda member=member: material.needs(member))
        except Exception:  # noqa: BLE001 - it comes again, and is recorded then
            continue
        images[member.name] = data
        for request in requests:
            split, bad_images = data.splits[request.split], member.settings.data.bad_images
            key = (split.name, split.fingerprint, canonical_json(transform.describe()), bad_images)
            union = passes.setdefault(key, _Pass(split, transform, member.settings))
            # One split may have two roles; its banks do not know about them.
            union.requests[replace(request, split="test")] = None
            union.members[member.name] = None
    for union in passes.values():
        with going_on(f"extraction for {', '.join(union.members)}", material.settings):
            _, stats = runner.extract_union(
                list(union.requests),
                material.loaded,
                {"test": union.split},
                union.transform,
                material.cache,
                union.settings,
                material.device,
            )
            if stats.images:
                speed = f"{stats.images:,} images of {union.split.name} in {stats.seconds:.1f} s"
                say([f"suite: features for {', '.join(union.members)}: {speed}"])
    return images


@contextmanager
def going_on(what: str, settings: RunSettings) -> Iterator[None]:
    """Says what went wrong in the block instead of ending the suite."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, UserError)
        if not known and distributed.world_size() > 1:
            raise
        if settings.output.debug:
            traceback.print_exc()
        say([f"ibot-eval: {what} failed: {'' if known else f'{type(error).__name__}: '}{error}"])
