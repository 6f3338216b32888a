"""Backgrounds: how much a classifier leans on what stands behind the object (ImageNet-9).

--data is the folder of the public challenge: original, mixed_same, mixed_rand, mixed_next, only_fg, no_fg, only_bg_b
and only_bg_t, each VARIANT/val/CLASS; those that are missing are left out. The classifier answers among its own
classes, such as the 1000 of ImageNet, and --class-map (in_to_in9.json) says which of the nine each belongs to. The
background gap is the accuracy on mixed_same minus that on mixed_rand. Images are 224 px as stored; nothing is resized.

--challenge adds the adversarial backgrounds: every foreground (fg_mask/val/CLASS/NAME.npy, of the image of that name in
original/val) on every image of only_bg_t, and a foreground counts as right only if all of these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ibot_eval.errors import ConfigError, DataError
from ibot_eval.metrics.intervals import wilson
from ibot_eval.protocol import EvalProtocol, Event, Metric, Predictions, Session, Warning

if TYPE_CHECKING:
    from ibot_eval.backbone import Backbone
    from ibot_eval.data.splits import Data
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.robustness.answers import Reading
    from ibot_eval.robustness.classifier import Classifier
    from ibot_eval.settings import DataSettings

VARIANTS = ("original", "mixed_same", "mixed_rand", "mixed_next", "only_fg", "no_fg", "only_bg_b", "only_bg_t")
FOREGROUNDS, BACKGROUNDS = "original", "only_bg_t"
"""What the challenge is made of."""


@dataclass(frozen=True)
class BackgroundsConfig:
    """Settings of the protocol."""

    head: str = "auto"
    """Who classifies: a head file or run of linear --save-head, own (the checkpoint's classifier), or auto: own."""
    class_map: Path | None = None
    """JSON file from the classifier's classes to the nine: in_to_in9.json. None: the classifier knows the nine."""
    challenge: bool = False
    """Also paste every foreground onto every background, which takes up to 16 million forward passes."""


class Backgrounds(EvalProtocol[BackgroundsConfig]):
    """A classifier on the variants of ImageNet-9."""

    config_type = BackgroundsConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "background_gap"

    transform: EvalTransform | None = None

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        made = type(self)(self.config)
        made.transform = transform
        return made

    def roles(self) -> tuple[str, ...]:
        return VARIANTS

    def open(self, settings: DataSettings) -> Data:
        """The variants that ``--data`` holds.

        Raises:
            ConfigError: --challenge with images that are resized, which masks are not.
            DataError: no variant with images, or --challenge without those that it is made of.
        """
        from ibot_eval.robustness.stored import describe_stored
        from ibot_eval.robustness.variants import open_variants

        if self.config.challenge and settings.resize is not None:
            raise ConfigError("the challenge takes images as they are stored, and masks too", where="--resize")
        data = open_variants(settings, {name: f"{name}/val" for name in VARIANTS})
        if self.config.challenge:
            missing = [name for name in (FOREGROUNDS, BACKGROUNDS) if name not in data.splits]
            if missing:
                raise DataError(f"the challenge needs {' and '.join(missing)}", where=f"--data {settings.data}")
        data.transform = describe_stored(self.transform, settings)
        return data

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields top1 for every variant and the challenge, background_gap, and per-image predictions.

        Raises:
            ConfigError: a class map that cannot be read, or none where the classifier knows other classes.
            DataError: a class map that misses classes, an image of another size, or a mask that does not fit.
        """
        from ibot_eval.robustness.answers import answers
        from ibot_eval.robustness.classifier import open_classifier
        from ibot_eval.robustness.heads import head_notes
        from ibot_eval.robustness.pasting import challenge, find_foregrounds
        from ibot_eval.robustness.stored import as_stored, checked, note_resized

        own, data, settings = self.config, session.data, session.data_settings
        assert data is not None
        assert settings is not None
        session = as_stored(session)
        classifier = open_classifier(session, own.head, among="mapped")
        reading = self._reading(classifier, session.class_names)
        yield from map(Warning, [*head_notes(classifier, session.asked), *note_resized(session)])
        splits = {name: checked(split, session, exact=True) for name, split in data.splits.items()}
        foregrounds = None
        if own.challenge:
            root, part = Path(str(settings.data)).expanduser(), settings.test_per_class is not None
            foregrounds = find_foregrounds(root, splits[FOREGROUNDS], part=part)
        accuracy: dict[str, float] = {}
        ids: list[str] = []
        labels, predicted = [], []
        for name, split in splits.items():
            found = answers(classifier, split, reading, session, name)
            n, right = len(found.indices), int(found.right.sum())
            yield from _note_unreadable(name, found.unreadable)
            if n:
                accuracy[name] = 100 * right / n
            yield Metric("top1", accuracy.get(name), params={"variant": name}, n=n, interval=wilson(right, n))
            ids += [split.image_ids[int(i)] for i in found.indices]
            labels.append(found.labels)
            predicted.append(found.predicted)
        if {"mixed_same", "mixed_rand"} <= accuracy.keys():
            yield Metric("background_gap", accuracy["mixed_same"] - accuracy["mixed_rand"], higher_is_better=False)
        else:
            yield Warning("no background gap: it needs images in both mixed_same and mixed_rand")
        if foregrounds is not None:
            worst = challenge(classifier, foregrounds, splits[BACKGROUNDS], reading, session)
            n, right = len(worst.indices), int((worst.predicted == worst.labels).sum())
            yield from _note_unreadable("challenge", worst.unreadable)
            params = {"variant": "challenge", "backgrounds": len(splits[BACKGROUNDS])}
            yield Metric("top1", 100 * right / n if n else None, params=params, n=n, interval=wilson(right, n))
            ids += [foregrounds.ids[int(i)] for i in worst.indices]
            labels.append(worst.labels)
            predicted.append(worst.predicted)
        yield Predictions(ids, {"label": np.concatenate(labels), "top1": np.concatenate(predicted)})

    @classmethod
    def headline(cls, metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The background gap; where there is none, the accuracy on the first variant."""
        gap = super().headline(metrics)
        return gap or next((m for m in metrics if m["name"] == "top1"), None)

    def _reading(self, classifier: Classifier, class_names: Sequence[str]) -> Reading:
        from ibot_eval.robustness.answers import Reading
        from ibot_eval.robustness.class_maps import read_class_map

        classes = np.asarray(classifier.classes)
        columns = np.arange(len(classes))
        if self.config.class_map is not None:
            named = read_class_map(self.config.class_map, len(classes), len(class_names), classifier.class_names)
            return Reading(columns, named)
        if not set(range(len(class_names))) <= set(classes.tolist()):
            raise ConfigError(
                f"the classifier's {len(classes)} classes are not the {len(class_names)} of the data",
                where="--class-map",
                todo="give --class-map in_to_in9.json of the public challenge",
            )
        return Reading(columns, classes)


def _note_unreadable(name: str, unreadable: Sequence[str]) -> Iterator[Warning]:
    if unreadable:
        yield Warning(f"{name}: unreadable images, left out: {len(unreadable)} ({unreadable[0]} …)")
