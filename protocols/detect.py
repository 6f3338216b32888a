"""Detection and instance segmentation: Cascade Mask R-CNN is trained on data in COCO's format; box and mask AP.

--data is a folder with annotations/instances_SPLIT.json and the images of each split, as of COCO, or SPLIT.json or
SPLIT/_annotations.coco.json as labelling tools export it. The annotations are checked first, and --check-data does no
more than that. Needs the extra `dense`. A run with --name that was broken off goes on where its last training state
left it: give the same command again. RUN/mmengine_config.py is mmengine's configuration, which --config takes back;
single values of it are changed with --set. Data without masks train a detector of boxes. --short-sides, --test-side and
--long-side say how large the images are; --resize, --crop and --batch-size are of classification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.protocol import EvalProtocol, Event, PublishedKey, Session
from protocols.openmmlab.dense_config import PART, POSITIVE, RATE, DenseConfig, Range, at_least, check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.splits import Data
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord
    from ibot_eval.settings import DataSettings, RunSettings

CLASSES_OF_COCO = 80


@dataclass(frozen=True)
class DetectConfig(DenseConfig):
    """Settings of detection."""

    epochs: int = 12
    """Passes over the train images that have objects. Published: 12 (1x) and 36 (3x)."""
    eval_every: int = 0
    """Epochs between two looks at the test images; 0 looks at the end only."""
    train_batch: int = 4
    """Images per process and step. Published on 8 GPUs: 4 for ViT-S, 2 for ViT-B."""
    lr: float = 1e-4
    """Highest learning rate, not scaled by the batch."""
    weight_decay: float = 0.05
    """Weight decay; biases, norms, position embeddings and [CLS] have none."""
    layer_decay: float = 0.8
    """Factor from each block's learning rate to that of the block before it; 1 for none. Released: 0.8 for ViT-S, 0.75
    for ViT-B; the paper tries 0.65, 0.75, 0.8 and 0.9."""
    drop_path: float = 0.1
    """Stochastic depth: probability of skipping the last block; it falls to 0 towards the first. A ResNet has none."""
    steps: tuple[int, ...] = (8, 11)
    """Epochs done when the learning rate falls to a tenth. Published: 8 11 of 12, 27 33 of 36."""
    warmup: int = 500
    """Steps over which the learning rate rises from a thousandth: mmdet's default; the paper does not say. At most a
    tenth of the run."""
    short_sides: tuple[int, ...] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    """Shorter sides in pixels of which one is drawn for each train image."""
    test_side: int = 800
    """Shorter side in pixels of test images."""
    long_side: int = 1333
    """Most that the longer side of any image has."""
    crops: bool = True
    """Half of the train images are first resized to 400, 500 or 600 and cropped to 384 to 600 pixels a side."""
    channels: int = 256
    """Channels of the feature pyramid and the region proposals."""
    head_width: int = 256
    """Channels of the four convolutions in each box and mask head."""
    fc_width: int = 1024
    """Width of the box heads' fully connected layer."""
    rois: int = 512
    """Regions per image that each stage is trained on."""
    proposals: tuple[int, int] = (2000, 1000)
    """Region proposals kept of an image, in training and in testing."""
    sync_bn: bool = True
    """Batch norm in the box heads over all GPUs, as published, rather than on each. Never on the CPU."""
    score_threshold: float = 0.05
    """Least score of a detection."""
    test_batch: int = 1
    """Test images per process and forward pass. Above 1 they are padded to the largest, which moves AP a little."""


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "vit-s/16": {"layer_decay": 0.8, "drop_path": 0.1, "train_batch": 4},
    "vit-b/16": {"layer_decay": 0.75, "drop_path": 0.1, "train_batch": 2},
}
"""What the published settings of a network have of their own; the rest are the defaults."""
_ANY = frozenset(
    (
        *("checkpoint_blocks", "eval_every", "log_every", "keep", "save_minutes", "bootstrap", "draw", "check_data"),
        "train_batch",
    )
)
"""Settings that do not make a run another experiment than the published one; the whole batch is looked at apart."""
_PROCESSES = 8


class Detect(EvalProtocol[DetectConfig]):
    """Cascade Mask R-CNN, trained end to end."""

    config_type = DetectConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "box_ap"
    resumable: ClassVar[bool] = True

    def __init__(self, config: DetectConfig) -> None:
        super().__init__(config)
        check_detect(config)
        self.architecture: str | None = None
        self.classes: int | None = None
        self.inputs: dict[str, Any] = {}

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """What goes with the network into the record and decides which published number is comparable.

        Raises:
            ConfigError: a flag of classification was given.
        """
        for name, todo in OF_CLASSIFICATION.items():
            if name in asked:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is of classification, and does nothing here", todo=todo)
        from ibot_eval.models import ResNetBackbone

        # A ResNet has no drop path, so the flag's default is not for it.
        none = isinstance(backbone, ResNetBackbone) and "drop_path" not in asked
        resolved = type(self)(replace(self.config, drop_path=0.0) if none else self.config)
        resolved.architecture = backbone.architecture
        resolved.inputs = {"mean": transform.mean, "std": transform.std}
        return resolved

    def open(self, settings: DataSettings) -> Data:
        """Images and annotations, checked; says what there is.

        Raises:
            MissingExtra: mmengine, mmcv-lite, mmdet or mmsegmentation is not installed.
            UserError: no such data, or annotations that cannot be trained on.
        """
        from ibot_eval.data.coco import open_coco
        from ibot_eval.data.coco_check import check_data
        from protocols.openmmlab import ready
        from protocols.openmmlab.checked_data import checked

        ready.prepare()
        data = checked(open_coco(settings), settings, check_data)
        data.transform = {
            **{name: getattr(self.config, name) for name in ("short_sides", "test_side", "long_side", "crops")},
            **self.inputs,
        }
        self.classes = len(data.class_names)
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
        from ibot_eval.data.coco import open_coco
        from ibot_eval.data.coco_check import check_data
        from protocols.openmmlab.checked_data import said_of

        return said_of(open_coco(settings.data), settings.data, check_data)

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """The AP of the published settings on COCO."""
        if metric["name"] not in ("box_ap", "mask_ap") or metric["params"] or not self._as_on_coco(data):
            return None
        return PublishedKey(name, metric["name"], "COCO", exact=True)

    def _as_on_coco(self, data: str) -> bool:
        own, usual, wanted = asdict(self.config), asdict(DetectConfig()), PUBLISHED.get(self.architecture or "")
        return (
            wanted is not None
            and data.casefold() == "coco"
            and self.classes == CLASSES_OF_COCO
            and own["train_batch"] * distributed.world_size() == wanted["train_batch"] * _PROCESSES
            and all(own[name] == {**usual, **wanted}[name] for name in own if name not in _ANY)
        )

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields what :func:`protocols.openmmlab.detection.detect` does.

        Raises:
            MissingExtra: mmengine, mmcv-lite, mmdet or mmsegmentation is not installed.
            UserError: as that function.
        """
        from protocols.openmmlab import ready

        ready.prepare()
        from protocols.openmmlab.detection import detect

        yield from detect(self.config, session, version=self.version)

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``learning_curve`` and ``ap_by_class``."""
        from protocols.openmmlab.detection_pictures import figures

        return figures(*records)


OF_CLASSIFICATION: Mapping[str, str] = {
    "crop": "--crops and --no-crops turn the crops of training on and off",
    "resize": "--short-sides and --test-side are the sizes of the images",
    "batch_size": "--train-batch and --test-batch are the images of a forward pass",
}


def check_detect(config: DetectConfig) -> None:
    """Raises ConfigError for settings that are out of range or contradict each other, before anything is read."""
    check(config, _RANGES)
    if list(config.steps) != sorted(set(config.steps)) or any(step >= config.epochs for step in config.steps):
        given = " ".join(map(str, config.steps))
        raise ConfigError(
            f"--steps {given} are not rising numbers below --epochs {config.epochs}",
            todo="give others; of a run of N epochs, two thirds and eleven twelfths of N are usual",
        )
    if not config.short_sides:
        raise ConfigError("--short-sides needs a number of pixels")
    largest = max(*config.short_sides, config.test_side)
    if config.long_side < largest:
        raise ConfigError(f"--long-side {config.long_side} is below the largest shorter side, {largest}")


_RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("epochs", "train_batch", "test_batch", "channels", "head_width", "fc_width", "rois"), at_least(1)),
    **dict.fromkeys(("proposals", "steps"), at_least(1)),
    **dict.fromkeys(("short_sides", "test_side", "long_side"), at_least(32)),
    **dict.fromkeys(("weight_decay", "warmup"), at_least(0)),
    "lr": POSITIVE,
    "layer_decay": RATE,
    **dict.fromkeys(("drop_path", "score_threshold"), PART),
}
