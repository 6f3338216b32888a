"""Linear classification as published: a sweep of learning rates on random crops, a pass over the images each epoch.

As `linear`, but every epoch sees new random resized crops of the train images, half of them flipped (the setting of the
published numbers). This takes as long as 100 passes over the images. A run with --name that was broken off goes on
where its last training state left it: give the same command again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ibot_eval import distributed
from ibot_eval.data.loading import explain_worker_death
from ibot_eval.errors import ConfigError
from ibot_eval.extraction import default_workers
from ibot_eval.probes.augmented_probe import train_augmented_probe
from ibot_eval.probes.frozen_network import FrozenNetwork
from ibot_eval.probes.labelled import unknown_classes
from ibot_eval.probes.linear_probe import DEFAULT_BATCH
from ibot_eval.probes.outcome import probe_metrics, save_head, save_sweep, sweep_figures
from ibot_eval.probes.published_features import check_blocks, feature_requests, resolve_features
from ibot_eval.protocol import EvalProtocol, Event, Predictions, PublishedKey, Session, Warning
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.holding import hold
from protocols.linear import LinearConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord

STATES = "training"
"""Folder of the training states in the run's; it goes when the run has succeeded."""
MAY_CHANGE = ("save_head", "save_minutes")
"""Settings that a run may be gone on with others of."""


@dataclass(frozen=True)
class LinearAugmentConfig(LinearConfig):
    """Settings of the linear protocol with augmentation."""

    save_minutes: float = 10.0
    """Minutes of training between two states to go on from, all that can be lost when a run is broken off."""


class LinearAugment(EvalProtocol[LinearAugmentConfig]):
    """A linear classifier trained on random crops seen by a frozen network."""

    config_type = LinearAugmentConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"
    resumable: ClassVar[bool] = True

    def __init__(self, config: LinearAugmentConfig) -> None:
        super().__init__(config)
        check_blocks(config.blocks)
        if not 0 <= config.save_minutes < float("inf"):
            raise ConfigError(f"{config.save_minutes} minutes between two states", where="--save-minutes")
        self.published_features = config.features == "published" and config.blocks is None

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """Features and blocks of the network's family."""
        features, blocks = resolve_features(self.config.features, self.config.blocks, backbone)
        resolved = type(self)(replace(self.config, features=features, blocks=blocks))
        usual = (features, blocks) == resolve_features("published", None, backbone)
        # BEiT's numbers are of an intermediate block, average-pooled, and AdamW.
        resolved.published_features = usual and backbone.family != "beit"
        return resolved

    def as_published(self) -> bool:
        """The family's features, 100 epochs of steps of 1024 images, the 45 learning rates with SGD."""
        own, usual = self.config, LinearAugmentConfig(batch=DEFAULT_BATCH)
        same = ("epochs", "sweep", "lrs", "optimizer", "weight_decay", "eval_every")
        return (
            self.published_features
            and own.batch in (None, usual.batch)
            and all(getattr(own, name) == getattr(usual, name) for name in same)
        )

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """Publications report the best head on the test split as their top-1."""
        if metric["name"] not in ("top1", "top1_best_on_test"):
            return None
        remark = " (best head on the test set)" if metric["name"] == "top1" else ""
        return PublishedKey("linear", "top1", data, remark)

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields top1, top5, top1_best_on_test, warnings, per-image predictions, the sweep's table and the head.

        Raises:
            DataError: an unlabelled or unreadable image, or features that are not finite.
            ConfigError: another process writes this run, or it was begun with other settings, data or weights.
        """
        data, engine, transform, images = session.data, session.engine, session.transform, session.data_settings
        if data is None or engine is None or transform is None or images is None:
            raise TypeError("linear-augment opens images, and the session has none")
        train, test = data.splits["train"], data.splits["test"]
        requests = feature_requests("train", self.config.features, self.config.blocks)
        network = FrozenNetwork(
            backbone,
            requests,
            transform,
            device=session.device,
            precision=engine.precision,
            batch_size=engine.batch_size,
            workers=default_workers(session.device) if engine.workers is None else engine.workers,
            bad_images=images.bad_images,
            progress=session.progress,
        )
        identity = {
            **{name: value for name, value in asdict(self.config).items() if name not in MAY_CHANGE},
            "version": self.version,
            "checkpoint": {name: session.checkpoint.get(name) for name in ("sha256", "key", "overrides", "identity")},
            "pos_embed_resize": str(getattr(backbone, "resize", None)),
            "transform": transform.describe(),
            "images": {"train": train.fingerprint, "test": test.fingerprint},
            "bad_images": images.bad_images,
            "precision": engine.precision,
            "seed": session.seed,
            "processes": distributed.world_size(),
        }
        lock = hold(session.output)
        try:
            states = TrainingCheckpoints(session.output / STATES, keep=1)
            with network.evaluating(), explain_worker_death():
                result, tested = train_augmented_probe(
                    network,
                    train,
                    test,
                    self.config,
                    seed=session.seed,
                    states=states,
                    identity=identity,
                    save_minutes=self.config.save_minutes,
                )
            unknown = unknown_classes(tested.labels, result.classes, session.class_names, "the train split")
            if unknown:
                yield Warning(unknown)
            yield from map(Warning, result.warnings)
            yield from probe_metrics(result, tested.labels)
            yield Predictions(tested.image_ids, {"label": tested.labels, "top1": result.predicted})
            yield save_sweep(result, session.output)
            if self.config.save_head:
                arguments = (result.weight, result.bias, result.classes, requests, session)
                yield save_head(*arguments, protocol="linear-augment")
            # Only now, when whoever takes the events has written what it makes of them.
            distributed.from_main(lambda: shutil.rmtree(states.folder, ignore_errors=True))
        finally:
            lock.release()

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``accuracy_by_rate``: accuracy on the held-out part and on test, after the last epoch, against the rate."""
        return sweep_figures(*records)
