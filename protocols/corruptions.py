"""Corruptions: error on noise, blur, weather and compression (ImageNet-C).

--data is the folder of ImageNet-C, CORRUPTION/SEVERITY/CLASS (or GROUP/CORRUPTION/… as its parts unpack) with images of
224 px, which are cropped and not resized. mCE is the mean over its 15 corruptions of the error in percent of AlexNet's;
the mean of the errors as they are stands beside it. Relative mCE compares the rises above the clean error and needs
--clean, the folder of clean validation images, one folder per class.

With --on-the-fly, --data is any data of clean images, which are resized and cropped as usual and then corrupted by
imagecorruptions-imaug (extra `corruptions`). Such numbers are near to those of ImageNet-C, not equal to them: the noise
is drawn anew, and ImageNet-C is stored as JPEG.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ibot_eval.errors import ConfigError
from ibot_eval.metrics.intervals import wilson
from ibot_eval.protocol import EvalProtocol, Event, Metric, Predictions, Session, Warning
from ibot_eval.robustness.config import open_for, roles_for
from ibot_eval.robustness.corruption_errors import (
    ALEXNET,
    EXTRA,
    GROUPS,
    corruption_error,
    mean_corruption_error,
    relative_corruption_error,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.splits import Data
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord
    from ibot_eval.robustness.answers import Answers, Reading
    from ibot_eval.robustness.classifier import Classifier
    from ibot_eval.settings import DataSettings

    _Part = tuple[str, int, list[str], Answers]

SEVERITIES = (1, 2, 3, 4, 5)
CLEAN = "clean"


@dataclass(frozen=True)
class CorruptionsConfig:
    """Settings of the protocol."""

    head: str = "auto"
    """Who classifies: a head file or run of linear --save-head, own (the checkpoint's classifier), or auto: own; with
    --on-the-fly also knn (neighbours in the train split), which auto takes where there is no own."""
    corruptions: tuple[str, ...] = tuple(ALEXNET)
    """Which corruptions, by the names of ImageNet-C; mCE needs the 15 that are the default."""
    clean: Path | None = None
    """Folder of clean images, one folder per class, for relative mCE."""
    on_the_fly: bool = False
    """Corrupt the images of --data here, instead of reading corrupted ones."""


class Corruptions(EvalProtocol[CorruptionsConfig]):
    """A classifier on corrupted images."""

    config_type = CorruptionsConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "mce"

    transform: EvalTransform | None = None

    def __init__(self, config: CorruptionsConfig) -> None:
        super().__init__(config)
        unknown = [name for name in config.corruptions if name not in (*ALEXNET, *EXTRA)]
        if unknown or not config.corruptions or len(set(config.corruptions)) < len(config.corruptions):
            given = ", ".join(config.corruptions) or "none"
            raise ConfigError(
                f"corruptions must be different ones of ImageNet-C; given: {given}",
                where="--corruptions",
                todo=f"known: {', '.join((*ALEXNET, *EXTRA))}",
            )
        if config.on_the_fly and config.clean is not None:
            raise ConfigError("--clean is not needed with --on-the-fly: --data is clean then", where="--clean")

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        if self.config.on_the_fly:
            from ibot_eval.robustness.corrupted import check_corrupting

            check_corrupting(transform.crop)
        made = type(self)(self.config)
        made.transform = transform
        return made

    def roles(self) -> tuple[str, ...]:
        return roles_for(self.config.head) if self.config.on_the_fly else ()

    def open(self, settings: DataSettings) -> Data:
        """The corrupted folders of ``--data``, and the clean one; or the images to corrupt.

        Raises:
            ConfigError: clean images of other classes.
            DataError: no folder of any of the corruptions.
        """
        from ibot_eval.robustness.stored import describe_stored
        from ibot_eval.robustness.variants import open_one, open_variants

        if self.config.on_the_fly:
            return open_for(self.config.head, settings)
        root = Path(settings.data or "").expanduser()
        paths = {name: _folder(root, name) for name in self.config.corruptions}
        data = open_variants(
            settings, {f"{c}/{level}": f"{path}/{level}" for c, path in paths.items() for level in SEVERITIES}
        )
        data.transform = describe_stored(self.transform, settings)
        if self.config.clean is not None:
            clean = open_one(settings, self.config.clean, CLEAN)
            if clean.class_names != data.class_names:
                raise ConfigError(
                    f"the {len(clean.class_names)} classes of --clean are not the {len(data.class_names)} of --data",
                    where=str(self.config.clean),
                )
            data.splits[CLEAN], data.split_names[CLEAN] = clean.splits[CLEAN], CLEAN
            data.warnings += clean.warnings
            if data.transform is not None and self.transform is not None:
                data.transform[CLEAN] = self.transform.describe()
        return data

    def as_published(self) -> bool:
        return not self.config.on_the_fly

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields mce and relative_mce over all and per corruption, top1 per corruption and severity, and predictions.

        Raises:
            ConfigError: a classifier that lacks a class of the data.
            DataError: a stored image of another size.
        """
        from ibot_eval.robustness.answers import restricted_to_data
        from ibot_eval.robustness.classifier import open_classifier
        from ibot_eval.robustness.heads import head_notes, head_params
        from ibot_eval.robustness.stored import note_resized

        classifier = open_classifier(session, self.config.head, among="data")
        resized = [] if self.config.on_the_fly else note_resized(session)
        yield from map(Warning, [*head_notes(classifier, session.asked), *resized])
        reading = restricted_to_data(classifier.classes, session.class_names)
        made = self._corrupted if self.config.on_the_fly else self._stored
        errors: dict[str, dict[int, float]] = {}
        details: list[Metric] = []
        parts: list[_Part] = []
        voted = head_params(classifier) if classifier.about["head"] == "knn" else {}
        for corruption, level, named, found in made(classifier, reading, session):
            n, right = len(found.indices), int(found.right.sum())
            accuracy = 100 * right / n if n else None
            params = {"corruption": corruption, "severity": level, **voted}
            details.append(Metric("top1", accuracy, params=params, n=n, interval=wilson(right, n)))
            if accuracy is not None:
                errors.setdefault(corruption, {})[level] = 100 - accuracy
            if found.unreadable:
                shown = f"{len(found.unreadable)} ({found.unreadable[0]} …)"
                yield Warning(f"{corruption}/{level}: unreadable images, left out: {shown}")
            # Lists of the same names are kept once.
            parts.append((corruption, level, parts[0][2] if parts and named == parts[0][2] else named, found))
        yield from self.summary(errors, voted)
        yield from details
        yield _predictions(parts)

    def summary(self, errors: Mapping[str, Mapping[int, float]], who: Mapping[str, Any]) -> Iterator[Event]:
        """mce, relative_mce and mean accuracies.

        Args:
            errors: corruption -> severity -> error in percent; the clean one is that of :data:`CLEAN`, severity 0.
            who: what the metrics' params say about the classifier.
        """
        # A mean over other severities compares with nothing published.
        whole = {name: list(by.values()) for name, by in errors.items() if set(by) == set(SEVERITIES)}
        counted = [name for name in whole if name in ALEXNET]
        clean = errors.get(CLEAN, {}).get(0)
        mean = mean_corruption_error(whole)
        if mean is None:
            yield Warning(f"no mCE: only {len(counted)} of its 15 corruptions have images of all five severities")
        else:
            yield Metric("mce", mean, higher_is_better=False, params=who)
            if clean is not None:
                yield Metric("relative_mce", mean_corruption_error(whole, clean), higher_is_better=False, params=who)
            for names in (counted, [*counted, *EXTRA]):
                if set(names) <= set(whole):
                    plain = float(np.mean([whole[name] for name in names]))
                    params = {"relative_to": "none", "corruptions": len(names), **who}
                    yield Metric("mce", plain, higher_is_better=False, params=params)
        for name in counted:
            params = {"corruption": name, **who}
            yield Metric("mce", corruption_error(whole[name], name), higher_is_better=False, params=params)
            if clean is not None:
                relative = relative_corruption_error(whole[name], name, clean)
                yield Metric("relative_mce", relative, higher_is_better=False, params=params)
        for name, by in whole.items():
            yield Metric("top1", 100 - float(np.mean(by)), params={"corruption": name, "severity": "mean", **who})

    @classmethod
    def headline(cls, metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """mCE over the 15 corruptions, relative to AlexNet."""
        of_all = (m for m in metrics if not {"corruption", "corruptions"} & m["params"].keys())
        return next((m for m in of_all if m["name"] == cls.primary), None)

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``accuracy_by_severity``: mean top-1 over the corruptions of each kind, a line per run and kind."""
        from ibot_eval.robustness.sheets import draw_curves

        def curves(record: EvalRecord) -> dict[str, list[dict[str, Any]]]:
            top1 = [m for m in record.metrics if m["name"] == "top1" and m["value"] is not None]
            found = {}
            for kind, names in GROUPS.items():
                by: dict[int, list[float]] = {}
                for metric in top1:
                    name, level = metric["params"]["corruption"], metric["params"]["severity"]
                    if name in (*names, CLEAN) and level != "mean":
                        by.setdefault(level, []).append(metric["value"])
                if by.keys() - {0}:
                    found[kind] = [{"value": float(np.mean(v)), "params": {"severity": n}} for n, v in by.items()]
            return found

        figure, axes = draw_curves(records, curves, lambda _, m: m["params"]["severity"], "corruptions")
        axes.set(xlabel="severity (0: clean)", ylabel="top-1 (%), mean over corruptions")
        return {"accuracy_by_severity": figure}

    def _stored(self, classifier: Classifier, reading: Reading, session: Session) -> Iterator[_Part]:
        """Corruption, severity, names of the clean images that were read, and what was answered to them."""
        from ibot_eval.robustness.answers import answers
        from ibot_eval.robustness.stored import as_stored, checked

        assert session.data is not None
        cropped = as_stored(session)
        for name, split in session.data.splits.items():
            corruption, _, level = name.partition("/")
            where = session if name == CLEAN else cropped
            split = split if name == CLEAN else checked(split, session, exact=False)
            found = answers(classifier, split, reading, where, name)
            own = f"{split.name}/"
            yield corruption, int(level or 0), [split.image_ids[int(i)].removeprefix(own) for i in found.indices], found

    def _corrupted(self, classifier: Classifier, reading: Reading, session: Session) -> Iterator[_Part]:
        """Likewise, of images that are corrupted here."""
        from ibot_eval.robustness.answers import answers
        from ibot_eval.robustness.corrupted import CorruptedSplit
        from ibot_eval.robustness.stored import crop_only

        assert session.data is not None
        assert session.transform is not None
        ways = [(CLEAN, 0), *((name, level) for name in self.config.corruptions for level in SEVERITIES)]
        split = CorruptedSplit(session.data.splits["test"], session.transform, ways, session.seed)
        # Corrupted images are cropped already.
        found = answers(
            classifier, split, reading, replace(session, transform=crop_only(session.transform)), "corruptions"
        )
        for (corruption, level), part in split.each(found):
            yield corruption, level, [split.split.image_ids[int(i)] for i in part.indices], part


def _predictions(parts: Sequence[_Part]) -> Predictions:
    """A row per image and a column per corruption and severity; a row per corrupted image where not all of them are of
    the same images."""
    first, labels = parts[0][2], parts[0][3].labels
    if all(names == first for _, _, names, _ in parts):
        columns = {f"top1@corruption={name},severity={level}": found.predicted for name, level, _, found in parts}
        return Predictions(first, {"label": labels, **columns})
    ids = [
        f"{name}/{image}" if name == CLEAN else f"{name}/{level}/{image}"
        for name, level, names, _ in parts
        for image in names
    ]
    joined = {"label": [found.labels for *_, found in parts], "top1": [found.predicted for *_, found in parts]}
    return Predictions(ids, {name: np.concatenate(arrays) for name, arrays in joined.items()})


def _folder(root: Path, name: str) -> str:
    """Where a corruption lies below ``root``: there itself, or in the part of ImageNet-C that it belongs to."""
    return next((f"{group}/{name}" for group in GROUPS if (root / group / name).is_dir()), name)
