"""Linear classification of frozen features: a sweep of learning rates, without augmentation.

A linear layer is trained on the features of the train split with each of 45 learning rates at once (SGD, cosine
schedule). The learning rate and epoch that are reported are chosen on a held-out part of train; the published habit,
the best of all on the test split, is reported beside it as top1_best_on_test. `linear-augment` trains as the papers do,
with a pass over the images in each epoch. BEiT's probe of a block: --features patch_mean --blocks 8 --optimizer adamw
--lrs 4e-3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.probes.labelled import labelled, unknown_classes
from ibot_eval.probes.linear_probe import ProbeSettings, train_probe
from ibot_eval.probes.outcome import probe_metrics, save_head, save_sweep, sweep_figures
from ibot_eval.probes.published_features import (
    Features,
    check_blocks,
    feature_requests,
    resolve_features,
)
from ibot_eval.protocol import Event, FrozenProtocol, Predictions, PublishedKey, Session, Warning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord


@dataclass(frozen=True)
class LinearConfig(ProbeSettings):
    """Settings of the linear protocol."""

    features: Features = "published"
    """What is classified: [CLS] of the last four blocks (last4), [CLS], the mean of the patch tokens, both, or the
    last norm of the mean of the raw patch tokens; published: as publications of the network's family do."""
    blocks: tuple[int, ...] | None = None
    """Blocks whose features are concatenated, negative ones counting from the last. Default: the last, or the last
    four for last4."""
    save_head: bool = False
    """Save the reported classifier as head.safetensors in the run's folder."""


class Linear(FrozenProtocol[LinearConfig]):
    """A linear classifier on frozen features."""

    config_type = LinearConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        check_blocks(config.blocks)

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """Features and blocks of the network's family."""
        features, blocks = resolve_features(self.config.features, self.config.blocks, backbone)
        return type(self)(replace(self.config, features=features, blocks=blocks))

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """None: published numbers are trained with augmentation, so they are shown beside `linear-augment`."""
        return None

    def features(self) -> Sequence[FeatureRequest]:
        return [*self._requests("train"), *self._requests("test")]

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        """Yields top1, top5, top1_best_on_test, warnings, per-image predictions, the sweep's table and the head.

        Raises:
            DataError: an unlabelled or missing image, or features that are not finite.
        """
        train, test = (labelled(banks, self._requests(role), role, "linear probing") for role in ("train", "test"))
        unknown = unknown_classes(test.labels, train.classes, session.class_names, "the train split")
        if unknown:
            yield Warning(unknown)
        result = train_probe(
            train, test, self.config, device=session.device, seed=session.seed, progress=session.progress
        )
        yield from map(Warning, result.warnings)
        yield from probe_metrics(result, test.labels)
        yield Predictions(test.image_ids, {"label": test.labels, "top1": result.predicted})
        yield save_sweep(result, session.output)
        if self.config.save_head:
            yield save_head(
                result.weight, result.bias, result.classes, self._requests("train"), session, protocol="linear"
            )

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``accuracy_by_rate``: accuracy on the held-out part and on test, after the last epoch, against the rate."""
        return sweep_figures(*records)

    def _requests(self, split: Any) -> list[FeatureRequest]:
        return feature_requests(split, self.config.features, self.config.blocks)
