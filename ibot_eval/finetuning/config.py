"""Settings of fine-tuning. Each field is a flag; its docstring is the flag's help.

Defaults are those of the published ViT-S/16 (BEiT's recipe as iBOT uses it), but for the epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ibot_eval.errors import ConfigError

REFERENCE_BATCH = 1024
"""Images per step for which ``--lr`` is meant."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of fine-tuning."""

    epochs: int = 100
    """Passes over the train images. Published: 200 for ViT-S, 100 for ViT-B, 50 for ViT-L."""
    train_batch: int = 128
    """Images per process and forward pass in training (--batch-size is that of the evaluation)."""
    accumulate: int = 1
    """Forward passes whose gradients make one step."""
    lr: float = 1e-3
    """Learning rate for steps of 1024 images; the one used is this times the images of a step / 1024."""
    scale_lr: bool = True
    """Whether the learning rate goes with the images of a step; --no-scale-lr takes --lr as it is."""
    min_lr: float = 1e-6
    """Learning rate at the end, not scaled."""
    warmup_lr: float = 0.0
    """Learning rate at the start of the warm-up, not scaled. The published code ignores its flag of this name."""
    warmup_epochs: int = 20
    """Epochs over which the learning rate rises; a fifth of the run where that has no more epochs than these."""
    weight_decay: float = 0.05
    """Weight decay; biases, norms, position embeddings and [CLS] have none."""
    layer_decay: float = 0.75
    """Factor from each block's learning rate to that of the block before it; 1 for none. Published: 0.65 for ViT-B."""
    drop_path: float = 0.1
    """Stochastic depth: probability of skipping the last block; it falls to 0 towards the first."""
    clip_grad: float = 0.0
    """Largest joint norm of the gradients; 0 for none."""
    ema: float = 0.0
    """Decay of a moving average of the weights, which is then what is evaluated and kept; 0 for none."""
    smoothing: float = 0.1
    """Label smoothing."""
    mixup: float = 0.8
    """Strength (alpha) of mixup; 0 for none."""
    cutmix: float = 1.0
    """Strength (alpha) of CutMix; where both are on, each batch gets one of the two."""
    auto_augment: str = "rand-m9-mstd0.5-inc1"
    """RandAugment or AutoAugment in timm's notation, or none."""
    colour_jitter: float = 0.4
    """Strength of colour jitter, where there is no --auto-augment."""
    erasing: float = 0.25
    """Probability of random erasing."""
    repeats: int = 1
    """Views of an image in the epochs that have it; above 1 is repeated augmentation (DeiT: 3)."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Least and largest share of the image's area that a training crop covers."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    pooling: Literal["cls", "mean"] = "cls"
    """What is classified: the [CLS] token, or the norm of the mean of the patch tokens. Swin always takes the mean."""
    positions: Literal["absolute", "relative"] = "absolute"
    """Keep the position embeddings, or add relative position biases to the attention."""
    layer_scale: float = 0.0
    """Start of LayerScale in blocks that have none; 0 adds none."""
    head_scale: float = 0.001
    """Factor on the classifier's first weights."""
    freeze_blocks: int = 0
    """Blocks, from the first, that are not trained, nor is what comes before them or what they share with others (a
    relative position bias of all blocks)."""
    from_finetuned: bool = False
    """Start from a checkpoint that has a classifier already, so has been trained with labels (intermediate
    fine-tuning, or a second run at a larger size)."""
    keep_head: bool = False
    """Go on with that classifier, if it has as many classes."""
    hold_out: float = 0.0
    """Share of train that the reported epoch is chosen on; with 0 the last epoch is reported, and none is chosen."""
    sweep: tuple[str, ...] = ()
    """Settings to try values of, such as lr=8e-4,1e-3 drop_path=0.1,0.2: a run for each combination, in RUN/sweep/. Of
    these the one with the highest top-1 on held-out images of train is reported (--hold-out is then 0.1 by default)."""
    eval_every: int = 1
    """Epochs between two looks at the accuracy; the last is always looked at."""
    log_every: int = 10
    """Steps between lines of log.jsonl."""
    tensorboard: bool = False
    """Write TensorBoard files as well, where tensorboard is installed."""
    keep: int = 3
    """Training states to keep while the run goes on, the newest ones."""
    save_minutes: float = 10.0
    """Minutes of training between two states to go on from, all that can be lost when a run is broken off."""
    compile: bool = False
    """Compile the network with torch.compile."""
    checkpoint_blocks: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    fsdp: bool = False
    """Share the weights among the processes (FSDP2) instead of giving each a copy: for networks that outgrow a GPU."""


MAY_CHANGE = frozenset({"log_every", "tensorboard", "keep", "save_minutes", "compile", "checkpoint_blocks"})
"""Settings that a run may be gone on with others of: none changes what is computed but by rounding."""


def check(config: FinetuneConfig) -> None:
    """Raises ConfigError for settings that are out of range or contradict each other, before anything is read."""
    given = asdict(config)
    for name, (fits, needed) in _RANGES.items():
        for value in given[name] if isinstance(given[name], tuple) else [given[name]]:
            if not fits(value):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: {needed}")
    low, high = config.crop_scale
    if low > high:
        raise ConfigError(f"--crop-scale {low} {high}: the first is the smaller")
    if config.keep_head and not config.from_finetuned:
        raise ConfigError("--keep-head goes on with a trained classifier", todo="add --from-finetuned")
    if config.fsdp and config.ema:
        raise ConfigError("--ema keeps a whole copy of the weights, which --fsdp is to avoid", todo="leave one out")


def effective_lr(config: FinetuneConfig, images_per_step: int) -> float:
    """The highest learning rate of the run, that of the last layer after warm-up."""
    return config.lr * images_per_step / REFERENCE_BATCH if config.scale_lr else config.lr


def _at_least(least: int) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: least <= value < math.inf), f"it is {least} or above"


_RATE = (lambda value: 0 < value <= 1), "it is above 0, and at most 1"
_SHARE = (lambda value: 0 <= value <= 1), "it lies between 0 and 1"
_PART = (lambda value: 0 <= value < 1), "it is at least 0 and below 1"

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("epochs", "train_batch", "accumulate", "repeats", "eval_every", "log_every", "keep"), _at_least(1)
    ),
    **dict.fromkeys(("min_lr", "warmup_lr", "warmup_epochs", "weight_decay", "clip_grad", "mixup"), _at_least(0)),
    **dict.fromkeys(("cutmix", "colour_jitter", "layer_scale", "head_scale", "save_minutes"), _at_least(0)),
    "freeze_blocks": _at_least(0),
    "lr": ((lambda value: 0 < value < math.inf), "it must be above 0"),
    **dict.fromkeys(("layer_decay", "crop_scale"), _RATE),
    **dict.fromkeys(("erasing", "flip"), _SHARE),
    **dict.fromkeys(("drop_path", "ema", "smoothing", "hold_out"), _PART),
}
