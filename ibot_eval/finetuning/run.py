"""A fine-tuning run from its settings to its results: what fine-tuning and semi-supervised learning have in common."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ibot_eval import distributed
from ibot_eval.backbone import Backbone
from ibot_eval.data.splits import ImageSplit, few
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError
from ibot_eval.extraction import default_workers
from ibot_eval.finetuning.augmentation import TrainTransform
from ibot_eval.finetuning.config import MAY_CHANGE, FinetuneConfig
from ibot_eval.finetuning.looking import Images
from ibot_eval.finetuning.memory import explain_out_of_memory_for_weights
from ibot_eval.finetuning.mixing import Mixing
from ibot_eval.finetuning.network import Classifier, build_classifier
from ibot_eval.finetuning.outcome import metrics
from ibot_eval.finetuning.plan import make_plan
from ibot_eval.finetuning.saving import save_classifier
from ibot_eval.finetuning.train import train
from ibot_eval.probes.holdout import hold_out
from ibot_eval.probes.labelled import require_labels, unknown_classes
from ibot_eval.protocol import Artifact, Event, Predictions, Session, Warning
from ibot_eval.recording import say
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.holding import hold
from ibot_eval.training.resuming import check_same_on_ranks

STATES = "checkpoints"
"""Folder of the training states in the run's; it goes when the run has succeeded."""
CLASSIFIER = "classifier.safetensors"


def finetune(
    config: FinetuneConfig,
    session: Session,
    train_split: ImageSplit,
    test_split: ImageSplit,
    *,
    protocol: str,
    version: int,
    head_layers: int = 0,
    identity: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
) -> Iterator[Event]:
    """Trains on ``train_split`` and yields what a record is to hold. A collective.

    Goes on from the training states in the run's folder, if there are some, and deletes them at the end.

    Args:
        config: checked already (``config.check``); its ``sweep`` is not looked at.
        session: of a run with images and a loaded checkpoint.
        train_split, test_split: labelled images. Classes that train lacks count as wrong.
        protocol, version: whose run it is, for the saved classifier and for telling runs apart.
        head_layers: layers of the projection head to train between backbone and classifier.
        identity: JSON-like: what else a run that is gone on with must have in common with its beginning.
        params: what else the metrics are to say of themselves.

    Yields:
        top1, top5, top1_best_on_test, per_class_top1, warnings, per-image predictions, ``classifier.safetensors`` and
        the log.

    Raises:
        DataError: an unlabelled or unreadable image.
        ConfigError: settings that the network or the data cannot serve, a run that another process writes or that was
            begun with other settings, data or weights, or too little memory.
        NotFinite: the loss is NaN or infinite.
    """
    loaded, engine, transform, settings = session.loaded, session.engine, session.transform, session.data_settings
    if loaded is None or engine is None or transform is None or settings is None:
        raise TypeError(f"{protocol} opens images and trains a network, and the session has none")
    _check_precision(engine.precision, session.device)
    for role, split in (("train", train_split), ("test", test_split)):
        require_labels(split.labels, split.image_ids, role, "fine-tuning")

    images = _images(config, session, transform, train_split, test_split)
    plan = make_plan(config, len(images.train), distributed.world_size())
    mixing = Mixing(len(images.classes), mixup=config.mixup, cutmix=config.cutmix, smoothing=config.smoothing)
    with ExitStack() as stack:
        stack.enter_context(explain_out_of_memory_for_weights())
        stack.enter_context(_off_the_device(loaded.backbone))
        classifier = build_classifier(
            loaded,
            len(images.classes),
            transform.crop,
            pooling=config.pooling,
            drop_path=config.drop_path,
            head_scale=config.head_scale,
            layer_scale=config.layer_scale or None,
            positions=config.positions,
            head_layers=head_layers,
            freeze_blocks=config.freeze_blocks,
            allow_finetuned=config.from_finetuned,
            keep_head=config.keep_head,
            seed=session.seed,
        )
        if not config.fsdp or distributed.world_size() == 1:
            classifier.to(session.device)
        whole_identity = {
            **_identity(config, session, images),
            **(identity or {}),
            "protocol": protocol,
            "version": version,
            "images": {"train": train_split.fingerprint, "test": test_split.fingerprint},
        }
        check_same_on_ranks(whole_identity)

        stack.callback(hold(session.output).release)
        states = TrainingCheckpoints(session.output / STATES, config.keep)
        yield from map(Warning, plan.notices)
        if config.hold_out and images.held_out is None:
            yield Warning("no image of train can be held out, since no class has two: the last epoch is reported")
        unknown = unknown_classes(test_split.labels, images.classes, session.class_names, "the train split")
        if unknown:
            yield Warning(unknown)
        outcome = train(
            classifier,
            images,
            config,
            plan,
            mixing,
            engine,
            session.device,
            session.output,
            states=states,
            identity=whole_identity,
            progress=session.progress,
            say=lambda text: say([text]),
        )
        if outcome.replaced:
            yield Warning(
                f"{outcome.replaced:,} times an image of train could not be decoded and another took its place"
            )
        tested = outcome.tested
        if tested.unreadable:
            yield Warning(f"unreadable images of test, left out: {len(tested.unreadable)} ({few(tested.unreadable)})")
        about = {"lr": _short(plan.top_lr), "batch": plan.images_per_step, "image_size": transform.crop}
        yield from metrics(outcome, about | dict(params or {}), session.class_names)
        ids = [test_split.image_ids[int(i)] for i in tested.indices]
        yield Predictions(ids, {"label": tested.labels, "top1": tested.predicted})
        path = session.output / CLASSIFIER
        metadata = _metadata(config, session, images, classifier, outcome.reported.epoch, protocol)
        distributed.from_main(lambda: save_classifier(path, classifier, metadata, state=outcome.weights))
        yield Artifact(path, "checkpoint")
        yield Artifact(session.output / "log.jsonl", "log")
        # Only now, when whoever takes the events has written what it makes of them.
        distributed.from_main(lambda: shutil.rmtree(states.folder, ignore_errors=True))


def _images(
    config: FinetuneConfig, session: Session, transform: EvalTransform, train: ImageSplit, test: ImageSplit
) -> Images:
    engine, settings = session.engine, session.data_settings
    assert engine is not None
    assert settings is not None
    held = hold_out(train.labels, config.hold_out, session.seed)
    return Images(
        train=train.take(np.flatnonzero(~held)) if held.any() else train,
        test=test,
        held_out=train.take(np.flatnonzero(held)) if held.any() else None,
        classes=np.unique(train.labels),
        augmentation=TrainTransform(
            transform.crop,
            auto_augment=config.auto_augment,
            erasing=config.erasing,
            colour_jitter=config.colour_jitter,
            interpolation=settings.interpolation,
            scale=config.crop_scale,
            flip=config.flip,
            mean=transform.mean,
            std=transform.std,
        ),
        transform=transform,
        workers=default_workers(session.device) if engine.workers is None else engine.workers,
        bad_images=settings.bad_images,
    )


def _identity(config: FinetuneConfig, session: Session, images: Images) -> dict[str, Any]:
    """What a run that is gone on with must have in common with its beginning, whatever its protocol."""
    return {
        **{name: value for name, value in asdict(config).items() if name not in MAY_CHANGE},
        "classes": len(images.classes),
        "checkpoint": {name: session.checkpoint.get(name) for name in ("sha256", "key", "overrides", "identity")},
        "transform": images.transform.describe(),
        "augmentation": images.augmentation.describe(),
        "bad_images": images.bad_images,
        "precision": session.engine and session.engine.precision,
        "seed": session.seed,
        "processes": distributed.world_size(),
    }


@contextmanager
def _off_the_device(backbone: Backbone) -> Iterator[None]:
    """The checkpoint's own network only takes up memory while a copy is trained."""
    # A module of the user's own may have no parameters; where it is does not matter then.
    places = {parameter.device for parameter in backbone.parameters()}
    backbone.cpu()
    try:
        yield
    except BaseException:
        # Where memory ran out there is no room to go back to, and the first error says more than a second.
        with suppress(RuntimeError):
            _back(backbone, places)
        raise
    _back(backbone, places)


def _back(backbone: Backbone, places: set[torch.device]) -> None:
    for place in places:
        backbone.to(place)


def _check_precision(precision: str, device: torch.device) -> None:
    if precision == "fp16":
        raise ConfigError("training in fp16 overflows", todo="--precision bf16, or fp32")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("this GPU has no bfloat16", todo="--precision fp32")


def _metadata(
    config: FinetuneConfig, session: Session, images: Images, classifier: Classifier, epoch: int, protocol: str
) -> dict[str, Any]:
    """What the saved classifier says about itself, besides its network."""
    names = session.class_names
    return {
        "class_names": [names[c] if c < len(names) else str(c) for c in images.classes.tolist()],
        "labels": images.classes.tolist(),
        "image_size": images.transform.crop,
        "transform": images.transform.describe(),
        "protocol": protocol,
        "epoch": epoch,
        "settings": asdict(config),
        "started_from": {k: session.checkpoint.get(k) for k in ("reference", "sha256", "key", "architecture")},
    }


def _short(rate: float) -> float:
    return float(f"{rate:.6g}")
