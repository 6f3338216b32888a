"""A segmentation run from its settings to its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mmengine.config import Config

from ibot_eval import distributed
from ibot_eval.data.label_maps import LabelMapSplit
from ibot_eval.errors import ConfigError
from ibot_eval.protocol import Artifact, Event, Session, Warning
from protocols.openmmlab import layer_decay, region_results, segmentation_data, state_files, training
from protocols.openmmlab.configuration import FILE
from protocols.openmmlab.dense_run import DenseRun, Parts, carry_out
from protocols.openmmlab.segmentation_model import schedule, segmentor
from protocols.openmmlab.segmentation_pictures import draw_example, palette_of

if TYPE_CHECKING:
    from protocols.segment import SegmentConfig

METRIC = region_results.RegionResults.__name__
DATASET = segmentation_data.LabelMaps.__name__
PICTURES = "pictures"
IMPORTS = tuple(module.__name__ for module in (layer_decay, segmentation_data, region_results))
"""Modules that register what the configuration names."""


def segment(config: SegmentConfig, session: Session, *, version: int) -> Iterator[Event]:
    """Trains on the train split and yields what a record is to hold. A collective.

    Args:
        config: checked already, with all that depends on the network filled in.
        session: of a run with checked ``LabelMapSplit`` data and a loaded checkpoint.
        version: of the protocol.

    Yields:
        miou, macc and aacc with intervals, IoU and accuracy by class, warnings, the pixel counts of each image,
        pictures, the trained weights, the configuration and the log. With several looks at each test image, these
        come first and those of a single look after them.

    Raises:
        UserError: as :func:`protocols.openmmlab.dense_run.carry_out`, and for a batch that a head cannot be trained on.
    """
    assert session.data is not None
    train, test = (session.data.splits[role] for role in ("train", "test"))
    assert isinstance(train, LabelMapSplit)
    assert isinstance(test, LabelMapSplit)
    _check_batch(config, session, len(train))
    if config.head == "linear" and config.freeze_blocks:
        yield Warning("--freeze-blocks changes nothing: under the linear head the whole backbone is frozen")
    # Mid-interval indices, so that pictures come from all over the split.
    drawn = np.unique(((np.arange(config.draw) + 0.5) * len(test) / max(1, config.draw)).astype(int)).tolist()
    files = {role: session.output / f"{role}_images.json" for role in ("train", "test")}
    distributed.from_main(
        lambda: [
            segmentation_data.write_split(split, files[role]) for role, split in (("train", train), ("test", test))
        ]
    )
    evaluator = {"type": METRIC, "drawn": [str(test.path(index).resolve()) for index in drawn]}
    run = DenseRun(
        protocol="segment",
        version=version,
        configuration=configuration(config, session, files, evaluator),
        fixed={
            "default_scope": "mmseg",
            **{f"{role}_dataloader.dataset.type": DATASET for role in files},
            **{f"{role}_dataloader.dataset.ann_file": str(file.resolve()) for role, file in files.items()},
            "test_evaluator": evaluator,
        },
        fit=lambda cfg: fit_to_widths(cfg, Parts(config, session, norm=True).widths()),
    )
    outcome = yield from carry_out(run, config, session)
    one_look: Mapping[str, Any] = {"head": config.head}
    if config.scales or config.test_flip:
        results = _several_looks(config, session)
        about = {
            **one_look,
            "scales": " ".join(f"{scale:g}" for scale in config.scales or (1.0,)),
            "flip": config.test_flip,
        }
        yield from _events(results, config, session, test, about)
        yield from _events(outcome.results, config, session, test, one_look, predictions=False)
    else:
        results = outcome.results
        yield from _events(results, config, session, test, one_look)
    yield from _pictures(results["maps"], session, test, drawn)
    yield from outcome.artifacts
    # Only now, when whoever takes the events has written what it makes of them.
    training.discard_states(session)


def _check_batch(config: SegmentConfig, session: Session, images: int) -> None:
    world = distributed.world_size()
    shared = world if session.device.type == "cuda" else 1
    batch = min(config.train_batch, images // world)
    if config.head == "upernet" and batch * shared < 2 and config.trained is None:
        raise ConfigError(
            "UperNet pools each image to one pixel, and batch norm over one image makes nothing of that",
            todo="--train-batch 2 or more, and as many images on each process",
        )


def fit_to_widths(cfg: Any, widths: Sequence[int]) -> None:
    """Changes a user's configuration so that it fits the checkpoint's network and its levels.

    Args:
        widths: channels of each level.

    Raises:
        ConfigError: a head takes a level that is not there.
    """
    model, wrapper = cfg.model, cfg.optim_wrapper
    if "pretrained" in model:
        # Weights come from --ckpt only.
        model["pretrained"] = None
    if wrapper.get("paramwise_cfg") and "constructor" not in wrapper:
        # The last norm has two names in the core's networks.
        wrapper["paramwise_cfg"]["bypass_duplicate"] = True
    if isinstance(model.get("neck"), dict):
        model["neck"]["in_channels"] = list(widths)
        return
    for name in ("decode_head", "auxiliary_head"):
        given = model.get(name) or ()
        for head in given if isinstance(given, (list, tuple)) else [given]:
            places: Any = head.get("in_index", -1) if isinstance(head, dict) else head
            several = isinstance(places, (list, tuple))
            try:
                head["in_channels"] = [widths[i] for i in places] if several else widths[places]
            except (IndexError, TypeError) as error:
                raise ConfigError(
                    f"the configuration's model.{name} cannot take the levels {places!r}",
                    todo=f"in_index is a number from 0 to {len(widths) - 1}, or a list of such",
                ) from error


def configuration(
    config: SegmentConfig, session: Session, files: Mapping[str, Path], evaluator: Mapping[str, Any]
) -> dict[str, Any]:
    """All that mmengine's configuration is to say, as plain values.

    Args:
        files: of ``segmentation_data.write_split``, by role.
        evaluator: configuration of the metric.
    """
    assert session.loaded is not None
    assert config.lr is not None
    assert config.layer_decay is not None
    assert config.drop_path is not None
    assert config.dropout is not None
    parts = Parts(config, session, norm=True)
    linear = config.head == "linear"
    backbone = parts.backbone(0.0 if linear else config.drop_path) | {"level_maps": config.head == "upernet"}
    if linear:
        backbone["frozen"] = session.loaded.backbone.depth

    def data(role: str, pipeline: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        return {"type": DATASET, "ann_file": str(files[role].resolve()), "pipeline": list(pipeline), **more}

    trained = data(
        "train",
        segmentation_data.training_pipeline(
            config.short_side, config.crop_size, config.random_scale, photometric=config.photometric
        ),
    )
    tested = data("test", segmentation_data.evaluation_pipeline(config.short_side), test_mode=True)
    return {
        "default_scope": "mmseg",
        "custom_imports": {"imports": list(IMPORTS)},
        "model": segmentor(
            config.head,
            backbone,
            parts.widths(),
            len(session.class_names),
            channels=config.channels,
            dropout=config.dropout,
            norm="SyncBN",
            mean=parts.mean,
            std=parts.std,
            crop_size=config.crop_size,
            inference=config.inference,
            stride=config.stride,
        ),
        "train_dataloader": parts.loader(trained, config.train_batch),
        "train_cfg": {
            "type": "IterBasedTrainLoop",
            "max_iters": config.iterations,
            "val_interval": config.eval_every or config.iterations,
        },
        "optim_wrapper": parts.optim_wrapper(config.lr, config.weight_decay, config.layer_decay),
        "param_scheduler": schedule(config.iterations, config.warmup),
        "test_dataloader": parts.loader(tested, 1),
        "test_evaluator": dict(evaluator),
        "test_cfg": {"type": "TestLoop"},
    }


def _several_looks(config: SegmentConfig, session: Session) -> Mapping[str, Any]:
    """Results of the trained network where each test image is seen at several sizes, or mirrored too."""
    cfg: Any = Config.fromfile(str(session.output / FILE))
    cfg.test_dataloader.dataset.pipeline = segmentation_data.evaluation_pipeline(
        config.short_side, config.scales, flip=config.test_flip
    )
    cfg.model = {"type": "SegTTAModel", "module": cfg.model}
    weights = state_files.read(config.trained or session.output / training.MODEL)["state_dict"]
    return training.test(cfg, session, {f"module.{name}": tensor for name, tensor in weights.items()}).results


def _events(
    results: Mapping[str, Any],
    config: SegmentConfig,
    session: Session,
    test: LabelMapSplit,
    params: Mapping[str, Any],
    *,
    predictions: bool = True,
) -> Iterator[Event]:
    counts = results["counts"]
    yield from region_results.metrics(
        counts, session.class_names, params, resamples=config.bootstrap, seed=session.seed
    )
    if predictions:
        yield region_results.predictions(counts, test.image_ids)


def _pictures(
    maps: Mapping[str, np.ndarray], session: Session, test: LabelMapSplit, drawn: Sequence[int]
) -> Iterator[Event]:
    palette = list(test.label_rule.colours) or palette_of(len(test.class_names))
    for index in drawn:
        image = test.path(index)
        file = session.output / PICTURES / f"{index:06}_{image.stem}.png"
        predicted, label = maps[str(image.resolve())], test.read_labels(index)
        distributed.from_main(
            lambda f=file, i=image, p=predicted, t=label: draw_example(f, i, p, t, test.class_names, palette)
        )
        yield Artifact(file, "figure")
