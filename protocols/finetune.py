"""Fine-tuning: the whole network is trained on the train images, then classifies the test images.

BEiT's recipe as iBOT uses it: AdamW with a smaller learning rate for earlier blocks, mixup and CutMix, RandAugment,
random erasing, label smoothing and stochastic depth. The classifier of the last epoch is reported and saved as
classifier.safetensors, which --ckpt and timm take; top1_best_on_test is the best epoch on the test images, as often
published. --crop is the image size of training and test. A run with --name that was broken off goes on where its last
training state left it: give the same command again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ibot_eval.finetuning import outcome
from ibot_eval.finetuning.config import MAY_CHANGE, FinetuneConfig, check
from ibot_eval.finetuning.run import finetune
from ibot_eval.finetuning.sweeping import sweep, sweep_figures
from ibot_eval.finetuning.trials import parse_sweep, with_held_out
from ibot_eval.protocol import EvalProtocol, Event, PublishedKey, Session

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord

IMAGENET: Mapping[str, Mapping[str, Any]] = {
    "vit-s/16": {"epochs": 200, "warmup_epochs": 20, "layer_decay": 0.75, "drop_path": 0.1},
    "vit-b/16": {"epochs": 100, "warmup_epochs": 20, "layer_decay": 0.65, "drop_path": 0.2},
    "vit-l/16": {"epochs": 50, "warmup_epochs": 5, "layer_decay": 0.75, "drop_path": 0.4},
}
"""What the published ImageNet settings of a network have of their own."""
IMAGENET_RATES = (8e-4, 9e-4, 1e-3, 2e-3, 4e-3)
"""Those that the iBOT paper sweeps, and the published code's default."""
CLASSIC: Mapping[str, Any] = {
    **{"layer_decay": 1, "warmup_epochs": 5, "warmup_lr": 1e-6, "min_lr": 1e-5, "head_scale": 1, "repeats": 3}
}
"""What DeiT's recipe, that of the published transfer runs, has of its own."""
TRANSFER: Mapping[str, Mapping[str, Any]] = {
    **{name: {"epochs": 1000, "lr": 1.5e-5} for name in ("CIFAR-10", "CIFAR-100", "Flowers")},
    "Cars": {"epochs": 1000, "lr": 1.5e-4},
    "iNat18": {"epochs": 360, "lr": 1e-4, "erasing": 0.1},
    "iNat19": {"epochs": 360, "lr": 5e-5, "erasing": 0.1},
}
"""And what each has; rates of ViT-S/16, for 1024 images."""
NOT_OF_THE_EXPERIMENT = MAY_CHANGE | {"sweep", "hold_out", "eval_every", "train_batch", "accumulate", "fsdp"}
"""Settings in which a run may differ from the published one and still be compared with it."""
HABITS_OF_BEIT = frozenset({"pooling", "positions", "layer_scale"})
"""Others of BEiT's networks, whose publications classify the mean of the patches."""


class Finetune(EvalProtocol[FinetuneConfig]):
    """End-to-end fine-tuning on all labels."""

    config_type = FinetuneConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"
    resumable: ClassVar[bool] = True

    def __init__(self, config: FinetuneConfig) -> None:
        super().__init__(config)
        check(config)
        parse_sweep(config.sweep, type(config))
        self.architecture: str | None = None
        self.family: str | None = None
        self.image_size: int | None = None

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """The part of train that a sweep chooses on."""
        resolved = type(self)(with_held_out(self.config, asked))
        resolved.architecture, resolved.family = backbone.architecture, backbone.family
        resolved.image_size = transform.crop
        return resolved

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """The number of the published settings for this data; publications report the best epoch on test or the last.

        Further fine-tuning of a classifier at 384 and 512 pixels has numbers of its own, which name the size.
        """
        if metric["name"] not in ("top1", "top1_best_on_test"):
            return None
        if self.config.from_finetuned:
            further = self.architecture == "vit-l/16" and self.image_size in (384, 512)
            return PublishedKey(name, "top1", data, " (with settings that are not published)") if further else None
        if data in TRANSFER:
            wanted = {**CLASSIC, **TRANSFER[data]}
            rates: tuple[float, ...] = (wanted["lr"],)
        else:
            wanted, rates = IMAGENET.get(self.architecture or ""), IMAGENET_RATES
        if wanted is None:
            return None
        fits = self.image_size == 224 and self._differs_in_no_more_than(wanted) and self._rates() <= set(rates)
        return PublishedKey(name, "top1", data) if fits else None

    def _differs_in_no_more_than(self, wanted: Mapping[str, Any]) -> bool:
        """Whether the settings are ``wanted``, and where that names none, the defaults."""
        ignored = NOT_OF_THE_EXPERIMENT | {"lr"} | (HABITS_OF_BEIT if self.family == "beit" else set())
        usual = asdict(FinetuneConfig()) | dict(wanted)
        return all(value == usual[name] for name, value in asdict(self.config).items() if name not in ignored)

    def _rates(self) -> set[float]:
        """Learning rates of the run or the runs; NaN stands for a sweep of anything else."""
        trials = [trial.changes for trial in parse_sweep(self.config.sweep, type(self.config))]
        if not trials:
            return {self.config.lr}
        return {changes["lr"] if changes.keys() == {"lr"} else float("nan") for changes in trials}

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields what :func:`ibot_eval.finetuning.run.finetune` does, or of a sweep what the chosen run has.

        Raises:
            UserError: as that function, or as :func:`ibot_eval.finetuning.sweeping.sweep`.
        """
        if session.data is None:
            raise TypeError("finetune opens images, and the session has none")
        if self.config.sweep:
            yield from sweep("finetune", type(self), self.config, session, tuple(MAY_CHANGE))
            return
        splits = session.data.splits
        yield from finetune(
            self.config,
            session,
            splits["train"],
            splits["test"],
            protocol="finetune",
            version=self.version,
        )

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``learning_curve``, ``confusion``, and of sweeps ``accuracy_by_setting``."""
        return {**outcome.figures(*records), **sweep_figures(*records)}
