"""Fine-tuning with few labels: the whole network is trained on a part of train, from the projection head's first layer.

--labels keeps a share of each class, a number of images per class, or the images of a list file (SimCLR's 1 % and 10 %
of ImageNet, which published numbers need). The classifier stands on the first layer of the projection head, so the
checkpoint must hold that. All else is as in `finetune`, with DeiT's recipe instead of BEiT's: no layer decay, three
views of each image, 1000 epochs. Classifiers of frozen features with the same labels are `lowshot`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ibot_eval.data.subsets import KNOWN_LISTS, LabelSubset
from ibot_eval.errors import ConfigError
from ibot_eval.finetuning import outcome
from ibot_eval.finetuning.config import MAY_CHANGE, FinetuneConfig, check
from ibot_eval.finetuning.run import finetune
from ibot_eval.finetuning.sweeping import sweep, sweep_figures
from ibot_eval.finetuning.trials import parse_sweep, with_held_out
from ibot_eval.protocol import EvalProtocol, Event, PublishedKey, Session, Warning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord

NOT_OF_THE_EXPERIMENT = MAY_CHANGE | {"labels", "sweep", "hold_out", "eval_every", "train_batch", "accumulate", "fsdp"}
"""Settings in which a run may differ from the published one and still be compared with it."""


@dataclass(frozen=True)
class SemiSupervisedConfig(FinetuneConfig):
    """Settings of fine-tuning with few labels."""

    labels: str = "1%"
    """Labelled part of train: a share of each class (1%), images per class (5), or a file that lists images, one a
    line."""
    from_head_layer: int = 1
    """Layers of the projection head that are kept below the classifier; 0 for none."""
    epochs: int = 1000
    """Passes over the labelled images."""
    lr: float = 1e-5
    """Learning rate for steps of 1024 images; the one used is this times the images of a step / 1024. The published
    5e-6 is for 512, which is the same."""
    min_lr: float = 1e-5
    """Learning rate at the end, not scaled. As published, it is that of the whole run after warm-up."""
    warmup_lr: float = 1e-6
    """Learning rate at the start of the warm-up, not scaled."""
    warmup_epochs: int = 5
    """Epochs over which the learning rate rises; a fifth of the run where that has no more epochs than these."""
    layer_decay: float = 1.0
    """Factor from each block's learning rate to that of the block before it; 1 for none."""
    repeats: int = 3
    """Views of an image in the epochs that have it; above 1 is repeated augmentation."""
    head_scale: float = 1.0
    """Factor on the classifier's first weights."""


class SemiSupervised(EvalProtocol[SemiSupervisedConfig]):
    """End-to-end fine-tuning on few labels."""

    config_type = SemiSupervisedConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"
    resumable: ClassVar[bool] = True

    def __init__(self, config: SemiSupervisedConfig) -> None:
        super().__init__(config)
        check(config)
        parse_sweep(config.sweep, type(config))
        if config.from_head_layer < 0:
            raise ConfigError(f"--from-head-layer {config.from_head_layer}: it is 0 or above")
        self.subset = LabelSubset.parse(config.labels)
        self.image_size: int | None = None

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """The labelled images that a sweep chooses on."""
        resolved = type(self)(with_held_out(self.config, asked))
        resolved.image_size = transform.crop
        return resolved

    def as_published(self) -> bool:
        """DeiT's recipe, on SimCLR's lists, at 224 pixels; of a sweep, one of the learning rate."""
        own, usual = asdict(self.config), asdict(SemiSupervisedConfig())
        swept = {name for trial in parse_sweep(self.config.sweep, type(self.config)) for name in trial.changes}
        return (
            self.image_size == 224
            and self.subset.name in KNOWN_LISTS
            and swept <= {"lr"}
            and all(own[name] == value for name, value in usual.items() if name not in NOT_OF_THE_EXPERIMENT)
        )

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """Publications have the top-1 for SimCLR's lists, the best epoch on the test images or the last."""
        if metric["name"] not in ("top1", "top1_best_on_test") or self.subset.name not in KNOWN_LISTS:
            return None
        return PublishedKey("semi-supervised", "top1", f"{data} {self.subset.name.removeprefix('SimCLR ')}")

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields what :func:`ibot_eval.finetuning.run.finetune` does, or of a sweep what the chosen run has.

        Raises:
            DataError: a list that does not fit the train images.
            UserError: as that function, or as :func:`ibot_eval.finetuning.sweeping.sweep`.
        """
        data = session.data
        if data is None:
            raise TypeError("semi-supervised opens images, and the session has none")
        train = data.splits["train"]
        labelled = train.take(self.subset.rows(train.labels, train.image_ids, session.seed))
        if self.config.sweep:
            yield from sweep(
                "semi-supervised", type(self), self.config, session, tuple(MAY_CHANGE), labels=labelled.labels
            )
            return
        yield from map(Warning, self.subset.remarks(train.labels, session.class_names, data.data_name))
        yield from finetune(
            self.config,
            session,
            labelled,
            data.splits["test"],
            protocol="semi-supervised",
            version=self.version,
            head_layers=self.config.from_head_layer,
            # A list file may have moved; which images it names is compared by the fingerprint of the part.
            identity={"labels": self.subset.name},
            params={"labels": self.subset.name, "n_train": len(labelled)},
        )

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``learning_curve``, ``confusion``, and of sweeps ``accuracy_by_setting``."""
        return {**outcome.figures(*records), **sweep_figures(*records)}
