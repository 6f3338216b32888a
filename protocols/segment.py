"""Semantic segmentation: UperNet, a linear head or SETR-PUP is trained on a data set of label maps; mean IoU.

--data is a folder of images and label PNGs: ADE20K, Cityscapes, or images/SPLIT beside annotations/SPLIT with a list of
classes. The annotations are checked first, and --check-data does no more than that. Needs the extra `dense`. A run with
--name that was broken off goes on where its last training state left it: give the same command again. mmengine's
configuration lies in RUN/mmengine_config.py and can be given back with --config; --set changes single values of it.
Pixels without a class count neither in training nor in the scores. --crop-size and --short-side say how large the
images are; --resize, --crop and --batch-size are of classification.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.protocol import EvalProtocol, Event, PublishedKey, Session
from protocols.openmmlab.dense_config import PART, POSITIVE, RATE, DenseConfig, Range, at_least, check
from protocols.openmmlab.released import (
    CLASSES_OF_ADE20K,
    DROPOUT,
    INPUTS,
    OTHERWISE,
    PUBLISHED,
    PUBLISHED_BATCH,
    drop_path,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.splits import Data
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord
    from ibot_eval.settings import DataSettings, RunSettings

SMALLEST = 16
"""Pixels of a scaled image's shorter side."""


@dataclass(frozen=True)
class SegmentConfig(DenseConfig):
    """Settings of segmentation."""

    head: Literal["upernet", "linear", "setr-pup"] = "upernet"
    """What is trained on the backbone: UperNet; one 1x1 convolution over four levels of the frozen backbone (linear);
    or SETR's progressive upsampling (setr-pup)."""
    iterations: int = 160_000
    """Steps of training."""
    train_batch: int = 2
    """Images per process and step. Published: 16 a step, so 2 on each of 8 GPUs."""
    lr: float | None = None
    """Highest learning rate, not scaled by the batch. Default: the released one. UperNet: 3e-5 for ViT-S, 2e-5 for
    ViT-L; linear: 3e-5 for ViT-S; setr-pup: 1e-3. Others have that of ViT-B: 8e-5 and 8e-4."""
    weight_decay: float = 0.05
    """Weight decay; biases, norms, position embeddings and [CLS] have none."""
    layer_decay: float | None = None
    """Factor from each block's learning rate to that of the block before it; 1 for none. Default: the released one.
    UperNet: 0.9 for ViT-S, 0.95 for ViT-L; others 0.65, which is also the paper's for all."""
    drop_path: float | None = None
    """Stochastic depth: probability of skipping the last block; it falls to 0 towards the first. A frozen backbone has
    none. Default: the released one, 0.2 for ViT-L and 0.1 for others."""
    dropout: float | None = None
    """Probability of dropping a channel before a head's classifier. Default: the released one, 0.1 for UperNet and 0
    for the other heads."""
    warmup: int = 1500
    """Steps over which the learning rate rises; it falls linearly to 0 over the whole run. Default in runs of less than
    15,000 steps: a tenth of the run."""
    crop_size: int = 512
    """Side in pixels of the training crops, and of the windows of --inference slide."""
    short_side: int = 0
    """Shorter side in pixels of test images, and of train images before they are scaled at random; the longer is at
    most four times as long. 0: as --crop-size."""
    random_scale: tuple[float, float] = (0.5, 2.0)
    """Smallest and largest factor by which a train image is scaled before it is cropped."""
    photometric: bool = True
    """Random brightness, contrast, saturation and hue of train images."""
    inference: Literal["slide", "whole"] = "slide"
    """Test images in overlapping windows, whose scores are averaged, or whole."""
    stride: int = 0
    """Pixels between windows. 0: two thirds of --crop-size, which are the published 341 of 512."""
    scales: tuple[float, ...] = ()
    """Sizes at which each test image is looked at, as multiples of --short-side; probabilities are averaged."""
    test_flip: bool = False
    """Also look at each test image mirrored, and average."""
    channels: int = 0
    """Width of the head. 0: as wide as the backbone (upernet, as published), or 256 (setr-pup). linear has none."""
    classes: Path | None = None
    """Text file with the name of a class per line in the order of the labels, or name,R,G,B. Default: classes.txt of
    the data, the known names of ADE20K and Cityscapes, else numbers."""
    reduce_zero: Literal["auto", "yes", "no"] = "auto"
    """Whether label 0 means "other" and does not count, so that label 1 is the first class. auto: as it is known of
    ADE20K, else no."""
    ignore: int = 255
    """Label of the pixels that do not count."""


class Segment(EvalProtocol[SegmentConfig]):
    """Semantic segmentation with a trained head."""

    config_type = SegmentConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "miou"
    resumable: ClassVar[bool] = True

    def __init__(self, config: SegmentConfig) -> None:
        super().__init__(config)
        check_segment(config)
        self.architecture: str | None = None
        self.inputs: dict[str, Any] = {}
        self.labels: tuple[int, bool, int] | None = None
        """Number of classes, whether 0 means none, and what else does; known once the data are open."""

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """The sizes and rates that were left open.

        Raises:
            ConfigError: a flag of classification was given, or a warm-up as long as the run.
        """
        for name in sorted(asked & OF_CLASSIFICATION.keys()):
            raise ConfigError(
                f"--{name.replace('_', '-')} is of classification, and does nothing here", todo=OF_CLASSIFICATION[name]
            )
        own = self.config
        warmup = own.warmup if "warmup" in asked else min(own.warmup, own.iterations // 10)
        if warmup >= own.iterations:
            raise ConfigError(f"--warmup {warmup} does not end before --iterations {own.iterations}")
        side = own.short_side or own.crop_size
        for name, factor in (("random-scale", own.random_scale[0]), ("scales", min(own.scales, default=1.0))):
            if side * factor < SMALLEST:
                raise ConfigError(
                    f"--{name} {factor:g} of a shorter side of {side} pixels is less than {SMALLEST}: nothing to see"
                )
        rate, decay = PUBLISHED.get((own.head, backbone.architecture), OTHERWISE[own.head])
        from ibot_eval.models import ResNetBackbone

        # A ResNet has no drop path, so the released one is not for it.
        usual_drop_path = 0.0 if isinstance(backbone, ResNetBackbone) else drop_path(backbone.architecture)
        resolved = type(self)(
            replace(
                own,
                lr=rate if own.lr is None else own.lr,
                warmup=warmup,
                layer_decay=decay if own.layer_decay is None else own.layer_decay,
                drop_path=usual_drop_path if own.drop_path is None else own.drop_path,
                dropout=DROPOUT[own.head] if own.dropout is None else own.dropout,
                short_side=side,
                stride=own.stride or max(1, own.crop_size * 2 // 3),
            )
        )
        resolved.architecture = backbone.architecture
        resolved.inputs = {"mean": transform.mean, "std": transform.std}
        return resolved

    def open(self, settings: DataSettings) -> Data:
        """Images and label maps, checked; says what there is.

        Raises:
            MissingExtra: mmengine, mmcv-lite, mmdet or mmsegmentation is not installed.
            UserError: no such data, or annotations that cannot be trained on.
        """
        from ibot_eval.data.label_map_check import check_data
        from ibot_eval.data.label_maps import LabelMapSplit
        from protocols.openmmlab import ready
        from protocols.openmmlab.checked_data import checked

        ready.prepare()
        data = checked(self._opened(settings), settings, check_data)
        test = data.splits["test"]
        assert isinstance(test, LabelMapSplit)
        self.labels = (len(test.class_names), test.reduce_zero_label, test.ignore_index)
        sizes = ("crop_size", "short_side", "random_scale", "photometric", "inference", "stride", "scales", "test_flip")
        data.transform = {**{name: getattr(self.config, name) for name in sizes}, **self.inputs}
        return data

    def instead(self, settings: RunSettings) -> str | None:
        """With ``check_data``, what there is to say of the annotations, which needs no extra.

        Raises:
            MissingExtra: for a run, mmengine, mmcv-lite, mmdet or mmsegmentation is not installed.
            UserError: no such data, or annotations that cannot be trained on.
        """
        if not self.config.check_data:
            from protocols.openmmlab import ready

            ready.require()
            return None
        from ibot_eval.data.label_map_check import check_data
        from protocols.openmmlab.checked_data import said_of

        return said_of(self._opened(settings.data), settings.data, check_data)

    def _opened(self, settings: DataSettings) -> Data:
        from ibot_eval.data.label_maps import open_label_maps

        own = self.config
        reduce = REDUCE_ZERO[own.reduce_zero]
        return open_label_maps(settings, classes=own.classes, reduce_zero=reduce, ignore=own.ignore)

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """The number of the published settings on ADE20K."""
        fits = data.casefold() == "ade20k" and metric["name"] == self.primary and "class" not in metric["params"]
        return PublishedKey(name, "miou", "ADE20K") if fits and self._as_on_ade20k() else None

    def _as_on_ade20k(self) -> bool:
        own, usual = self.config, SegmentConfig()
        same = ("iterations", "weight_decay", "warmup", "crop_size", "random_scale", "photometric", "inference")
        wanted = PUBLISHED.get((own.head, self.architecture or ""))
        if wanted is None or own.config or own.set or own.trained:
            return False
        decays = (wanted[1], 0.65) if own.head == "upernet" else (wanted[1],)
        return (
            all(getattr(own, name) == getattr(usual, name) for name in (*same, "clip_grad", "channels", "window"))
            and (own.freeze_blocks == 0 or own.head == "linear")
            and (own.short_side, own.stride, own.scales, own.test_flip) == (512, 341, (), False)
            and own.lr == wanted[0]
            and own.dropout == DROPOUT[own.head]
            and (own.drop_path == drop_path(self.architecture) or own.head == "linear")
            and {name: tuple(value) for name, value in self.inputs.items()} == INPUTS
            and self.labels == (CLASSES_OF_ADE20K, True, SegmentConfig.ignore)
            and (own.layer_decay in decays or own.head == "linear")
            and own.train_batch * distributed.world_size() == PUBLISHED_BATCH
        )

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields what :func:`protocols.openmmlab.segmentation.segment` does.

        Raises:
            MissingExtra: mmengine, mmcv-lite, mmdet or mmsegmentation is not installed.
            UserError: as that function.
        """
        from protocols.openmmlab import ready

        ready.prepare()
        from protocols.openmmlab.segmentation import segment

        yield from segment(self.config, session, version=self.version)

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``learning_curve`` and ``iou_by_class``."""
        from protocols.openmmlab.segmentation_pictures import figures

        return figures(*records)


REDUCE_ZERO: Mapping[str, Any] = {"auto": "auto", "yes": True, "no": False}
OF_CLASSIFICATION: Mapping[str, str] = {
    "crop": "--crop-size is the side of the training crops",
    "resize": "--short-side is the shorter side of the images",
    "batch_size": "test images go through one by one; --train-batch is that of training",
}


def check_segment(config: SegmentConfig) -> None:
    """Raises ConfigError for settings that are out of range or contradict each other, before anything is read."""
    check(config, _RANGES)
    for name, (fits, needed) in {"lr": POSITIVE, "layer_decay": RATE, "drop_path": PART, "dropout": PART}.items():
        value = getattr(config, name)
        if value is not None and not fits(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: {needed}")
    low, high = config.random_scale
    if low > high:
        raise ConfigError(f"--random-scale {low} {high}: the first is the smaller")
    if config.stride > config.crop_size:
        raise ConfigError(
            f"--stride {config.stride} is larger than --crop-size {config.crop_size}: windows would leave gaps"
        )


_RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("iterations", "train_batch"), at_least(1)),
    "crop_size": at_least(32),
    "short_side": (lambda side: side == 0 or 32 <= side < math.inf, "it is 32 or above, or 0"),
    **dict.fromkeys(("weight_decay", "warmup", "stride", "channels", "ignore"), at_least(0)),
    **dict.fromkeys(("random_scale", "scales"), POSITIVE),
}
