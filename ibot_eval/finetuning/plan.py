"""What a run's settings come to on its data: steps, images per step and learning rates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ibot_eval.data.epochs import steps_per_epoch
from ibot_eval.finetuning.config import FinetuneConfig, effective_lr
from ibot_eval.finetuning.loader import fitted_batch_size
from ibot_eval.training.schedules import cosine

WORTH_TELLING = 0.1
"""Share of the images that may sit an epoch out unremarked."""


@dataclass(frozen=True)
class Plan:
    """A run of ``epochs * steps_per_epoch`` steps."""

    epochs: int
    steps_per_epoch: int
    batch_size: int
    """Images per process and forward pass."""
    passes: int
    """Forward passes per step."""
    images_per_step: int
    """Over all processes and passes."""
    lr: np.ndarray
    """(steps,) float64, of the last layer; each group of parameters takes it times its ``lr_scale``."""
    notices: tuple[str, ...]
    """What the reader of the result should know of it."""

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def top_lr(self) -> float:
        """The highest learning rate."""
        return float(self.lr.max())


def make_plan(config: FinetuneConfig, images: int, world_size: int = 1) -> Plan:
    """The schedule of BEiT's fine-tuning code: linear warm-up, then a cosine, both by step.

    A run that is no longer than the warm-up, for which the published code fails, gets one of a fifth of its steps: the
    published share, 20 epochs of 100.

    Args:
        config: checked settings.
        images: of the train split.
        world_size: number of processes.

    Raises:
        ConfigError: fewer images than forward passes in a step.
    """
    passes = config.accumulate
    batch_size = fitted_batch_size(images, config.train_batch, passes, world_size)
    per_epoch = steps_per_epoch(images, batch_size * passes, world_size)
    per_step = batch_size * passes * world_size
    notices = []
    if batch_size < config.train_batch:
        notices.append(
            f"steps are of {per_step:,} images, not of {config.train_batch * passes * world_size:,}: train has no more "
            f"than {images:,}"
        )
    left = images - per_epoch * per_step
    if left > WORTH_TELLING * images:
        notices.append(
            f"{left:,} of {images:,} train images, others each time, sit every epoch out: they do not fill a step of "
            f"{per_step:,}"
        )
    steps, warmup = config.epochs * per_epoch, config.warmup_epochs * per_epoch
    if warmup >= steps:
        warmup = steps // 5
        notices.append(
            f"the warm-up is {warmup} of {steps} steps: the run has {config.epochs} "
            f"{'epoch' if config.epochs == 1 else 'epochs'}, too few for {config.warmup_epochs} of warm-up"
        )
    top = effective_lr(config, per_step)
    if config.min_lr > top:
        notices.append(
            f"the learning rate rises, from {top:g} after the warm-up to --min-lr {config.min_lr:g} at the end: for "
            f"steps of {per_step:,} images --lr {config.lr:g} is less than that, which does not go with the images"
        )
    rates = cosine(top, config.min_lr, steps, warmup_steps=warmup, warmup_start=config.warmup_lr)
    return Plan(config.epochs, per_epoch, batch_size, passes, per_step, rates, tuple(notices))
