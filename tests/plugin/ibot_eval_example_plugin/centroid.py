"""Nearest-centroid accuracy of frozen features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.protocol import Event, FrozenProtocol, Metric, Predictions, Session


@dataclass(frozen=True)
class CentroidConfig:
    """Settings of the nearest-centroid protocol."""

    block: int = -1
    """Block whose [CLS] token is used."""


class NearestCentroid(FrozenProtocol[CentroidConfig]):
    """Assigns each test image to the class with the nearest mean feature."""

    config_type = CentroidConfig
    version = 1
    primary = "top1"

    def features(self) -> Sequence[FeatureRequest]:
        return [FeatureRequest("train", self.config.block), FeatureRequest("test", self.config.block)]

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        train, test = (banks[request] for request in self.features())
        classes = np.unique(train.labels)
        centres = np.stack([train.features[train.labels == c].mean(0) for c in classes])
        distances = np.linalg.norm(test.features[:, None] - centres, axis=-1)
        guess = classes[distances.argmin(1)]
        yield Predictions(test.image_ids, {"label": test.labels, "top1": guess})
        yield Metric("top1", 100 * float(np.mean(guess == test.labels)), n=len(test))
