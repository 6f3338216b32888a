"""A detection run from its settings to its results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ibot_eval import distributed
from ibot_eval.data.coco import CocoSplit, standardised
from ibot_eval.data.splits import few
from ibot_eval.files import atomic_write_bytes
from ibot_eval.protocol import Event, Session
from ibot_eval.recording import say
from protocols.openmmlab import coco_results, detection_data, detection_model
from protocols.openmmlab.coco_events import results
from protocols.openmmlab.dense_run import DenseRun, Parts, carry_out
from protocols.openmmlab.training import discard_states

if TYPE_CHECKING:
    from protocols.detect import DetectConfig

TRUTH = "test_annotations.json"
"""In the run's folder: the annotations that detections are compared with, ids and areas put in order."""
MODULES = ("backbone", "layer_decay", "detection_data", "detection_model", "coco_results")
"""Those that register what the configuration names."""
WARMUP_SHARE = 10
"""Warm-up is at most a run's length divided by this."""


def detect(config: DetectConfig, session: Session, *, version: int) -> Iterator[Event]:
    """Trains on the train split and yields what a record is to hold. A collective.

    Args:
        config: checked already.
        session: of a run with checked ``CocoSplit`` data and a loaded checkpoint.
        version: of the protocol.

    Yields:
        box_ap, box_ap50, box_ap75 and their mask_… counterparts with intervals, AP by size and class, warnings, what
        became of each image, the detections, pictures, the trained weights, the configuration and the log.

    Raises:
        UserError: as :func:`protocols.openmmlab.dense_run.carry_out`.
    """
    assert session.data is not None
    train, test = (session.data.splits[role] for role in ("train", "test"))
    assert isinstance(train, CocoSplit)
    assert isinstance(test, CocoSplit)
    masks = train.has_masks and test.has_masks
    say([f"the heads have the {len(session.class_names)} classes of the data: {few(session.class_names, 5)}"])
    truth = session.output / TRUTH
    distributed.from_main(lambda: atomic_write_bytes(truth, json.dumps(standardised(test)).encode()))
    whole = configuration(config, session, train, test, truth=truth, masks=masks)
    run = DenseRun("detect", version, whole, _fixed(whole))
    outcome = yield from carry_out(run, config, session)
    evaluation = outcome.results[coco_results.EVALUATION]
    yield from distributed.from_main(lambda: list(results(evaluation, config, session, test, truth, masks=masks)))
    yield from outcome.artifacts
    # Only now, when whoever takes the events has written what it makes of them.
    discard_states(session)


def configuration(
    config: DetectConfig, session: Session, train: CocoSplit, test: CocoSplit, *, truth: Path, masks: bool
) -> dict[str, Any]:
    """All that mmengine's configuration is to say, as plain values.

    Args:
        truth: file with the annotations of ``test``.
        masks: whether there is a mask head.
    """
    parts = Parts(config, session, norm=False)
    backbone = parts.backbone(config.drop_path)
    epoch = max(1, len(train) // (config.train_batch * distributed.world_size()))
    warmup = min(config.warmup, config.epochs * epoch // WARMUP_SHARE)
    trained = {
        **detection_data.dataset(train, session.class_names, train.annotation_file, masks=masks, test=False),
        "pipeline": detection_data.train_pipeline(
            config.short_sides, config.long_side, crops=config.crops, masks=masks
        ),
    }
    tested = {
        **detection_data.dataset(test, session.class_names, truth, masks=masks, test=True),
        "pipeline": detection_data.test_pipeline(config.test_side, config.long_side),
    }
    return {
        "default_scope": "mmdet",
        "custom_imports": {"imports": [f"protocols.openmmlab.{module}" for module in MODULES]},
        "model": detection_model.cascade_mask_rcnn(
            backbone,
            parts.widths(),
            len(session.class_names),
            mean=parts.mean,
            std=parts.std,
            masks=masks,
            channels=config.channels,
            head_width=config.head_width,
            fc_width=config.fc_width,
            rois=config.rois,
            proposals=config.proposals,
            norm="SyncBN" if config.sync_bn else "BN",
            score_threshold=config.score_threshold,
        ),
        "train_dataloader": {
            **parts.loader(trained, config.train_batch),
            "batch_sampler": {"type": "AspectRatioBatchSampler"},
        },
        "train_cfg": {
            "type": "EpochBasedTrainLoop",
            "max_epochs": config.epochs,
            "val_interval": config.eval_every or config.epochs,
        },
        "optim_wrapper": parts.optim_wrapper(config.lr, config.weight_decay, config.layer_decay),
        "param_scheduler": _schedule(config.steps, config.epochs, warmup),
        "test_dataloader": parts.loader(tested, config.test_batch),
        "test_cfg": {"type": "TestLoop"},
        "test_evaluator": {
            "type": coco_results.CocoResults.__name__,
            "annotation_file": str(truth.resolve()),
            "category_ids": detection_data.category_ids(test, session.class_names),
            "masks": masks,
        },
    }


def _fixed(whole: dict[str, Any]) -> dict[str, Any]:
    """What a configuration that is given has to leave to us: data and evaluation, but for the pipelines."""
    fixed = {"test_evaluator": whole["test_evaluator"]}
    for role in ("train", "test"):
        name = f"{role}_dataloader.dataset"
        fixed |= {f"{name}.{key}": v for key, v in whole[f"{role}_dataloader"]["dataset"].items() if key != "pipeline"}
    return fixed


def _schedule(steps: Sequence[int], epochs: int, warmup: int) -> list[dict[str, Any]]:
    falls = {
        "type": "MultiStepLR",
        "begin": 0,
        "end": epochs,
        "by_epoch": True,
        "milestones": list(steps),
        "gamma": 0.1,
    }
    # mmengine takes no warm-up of no length, and reaches the whole rate one iteration before ``end``.
    rises = {"type": "LinearLR", "start_factor": 0.001, "by_epoch": False, "begin": 0, "end": warmup + 1}
    return [rises, falls] if warmup else [falls]
