"""Natural adversarial images: accuracy, calibration error and AURRA on ImageNet-A.

--data is the folder of ImageNet-A: one folder per class, 200 classes of the 1000 of ImageNet. The classifier may know
all 1000; only the logits of the classes in the data compete, in accuracy as in confidence. The calibration error is the
root mean square over bins of 100 images, the last bin left out as the published code does; AURRA is the area under the
response-rate accuracy curve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ibot_eval.metrics.calibration import BIN_SIZE, aurra, rms_calibration_error
from ibot_eval.metrics.intervals import wilson
from ibot_eval.protocol import EvalProtocol, Event, Metric, Predictions, Session, Warning

if TYPE_CHECKING:
    from ibot_eval.backbone import Backbone
    from ibot_eval.data.splits import Data
    from ibot_eval.settings import DataSettings


@dataclass(frozen=True)
class NaturalAdversarialConfig:
    """Settings of the protocol."""

    head: str = "auto"
    """Who classifies: a head file or run of linear --save-head, own (the checkpoint's classifier), or auto: own."""


class NaturalAdversarial(EvalProtocol[NaturalAdversarialConfig]):
    """A classifier of ImageNet's classes on ImageNet-A."""

    config_type = NaturalAdversarialConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"

    def roles(self) -> tuple[str, ...]:
        return ("test",)

    def open(self, settings: DataSettings) -> Data:
        """The class folders of ``--data``.

        Raises:
            DataError: no such folder, or no images in it.
        """
        from ibot_eval.robustness.variants import open_one

        return open_one(settings, settings.data or "", "test")

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields top1, calibration_error, aurra and per-image predictions.

        Raises:
            ConfigError: a classifier that lacks a class of the data.
        """
        from ibot_eval.robustness.answers import answers, restricted_to_data
        from ibot_eval.robustness.classifier import open_classifier
        from ibot_eval.robustness.heads import head_notes

        assert session.data is not None
        classifier = open_classifier(session, self.config.head, among="data")
        yield from map(Warning, head_notes(classifier, session.asked))
        split = session.data.splits["test"]
        reading = restricted_to_data(classifier.classes, session.class_names)
        found = answers(classifier, split, reading, session, "natural adversarial")
        n, right = len(found.indices), int(found.right.sum())
        if found.unreadable:
            yield Warning(f"unreadable images, left out: {len(found.unreadable)} ({found.unreadable[0]} …)")
        yield Metric("top1", 100 * right / n if n else None, n=n, interval=wilson(right, n))
        error = rms_calibration_error(found.confidence, found.right)
        if error is None:
            yield Warning(f"no calibration error: {n} images are fewer than two bins of {BIN_SIZE}")
        yield Metric("calibration_error", error, higher_is_better=False, params={"bin_size": BIN_SIZE}, n=n)
        yield Metric("aurra", aurra(found.confidence, found.right), n=n)
        ids = [split.image_ids[int(i)] for i in found.indices]
        yield Predictions(ids, {"label": found.labels, "top1": found.predicted, "confidence": found.confidence})
