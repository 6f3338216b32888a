"""Every value that changes during a run, by step and by epoch, worked out beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ibot_eval.training.schedules import cosine, warmup_then_constant
from pretrain.config import PretrainSettings
from pretrain.ibot import Temperatures


@dataclass(frozen=True)
class Schedule:
    """Values of a run of ``epochs * steps_per_epoch`` steps."""

    steps_per_epoch: int
    epochs: int
    lr: np.ndarray
    """(steps,)"""
    weight_decay: np.ndarray
    """(steps,)"""
    momentum: np.ndarray
    """(steps,) of the teacher's moving average."""
    teacher_temp: np.ndarray
    """(epochs,)"""
    patch_teacher_temp: np.ndarray
    """(epochs,)"""
    lr_warmup: int
    """Epochs."""
    temp_warmup: int
    """Epochs."""
    notices: tuple[str, ...]
    """What was shortened."""

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def temperatures(self, step: int) -> Temperatures:
        epoch = step // self.steps_per_epoch
        return Temperatures(float(self.teacher_temp[epoch]), float(self.patch_teacher_temp[epoch]))


def schedule(settings: PretrainSettings, steps_per_epoch: int, images_per_step: int) -> Schedule:
    """The published schedules: cosine for learning rate, weight decay and EMA momentum, linear then constant for
    temperatures.

    A run that is shorter than a warm-up, for which the published code fails, gets a warm-up of a tenth of it.

    Args:
        settings: of the run.
        steps_per_epoch: optimiser steps.
        images_per_step: over all processes and accumulated passes; scales the learning rate by n / 256.
    """
    opt, goal = settings.optimiser, settings.objective
    notices = []

    def fitting(warmup: int, what: str, start: int = 0) -> int:
        if start + warmup <= opt.epochs:
            return warmup
        tenth = opt.epochs // 10
        shorter = min(tenth, opt.epochs - start)
        takes = f"is {shorter} epochs long" if shorter else "is left out"
        room = f"{opt.epochs} epochs" + (f", masks from epoch {start}" if start else "")
        notices.append(f"the warm-up of the {what} {takes}: the run has {room}, too few for {warmup}")
        return shorter

    lr_warmup = fitting(opt.lr_warmup, "learning rate")
    temp_warmup = fitting(goal.teacher_temp_warmup, "teacher's temperature")
    steps = opt.epochs * steps_per_epoch
    # The published code lets the patches' temperature wait for the first masks.
    wait = min(settings.masks.mask_start_epoch, opt.epochs)
    patch_warmup = fitting(goal.teacher_temp_warmup, "teacher's patch temperature", wait) if wait else temp_warmup
    patch_end = goal.teacher_temp if goal.patch_teacher_temp is None else goal.patch_teacher_temp
    patch_start = goal.teacher_temp_start if goal.patch_teacher_temp_start is None else goal.patch_teacher_temp_start
    return Schedule(
        steps_per_epoch,
        opt.epochs,
        cosine(opt.lr * images_per_step / 256, opt.lr_end, steps, warmup_steps=lr_warmup * steps_per_epoch),
        cosine(opt.weight_decay, opt.weight_decay_end, steps),
        cosine(opt.momentum, 1.0, steps),
        warmup_then_constant(goal.teacher_temp_start, goal.teacher_temp, opt.epochs, temp_warmup),
        np.concatenate([np.full(wait, patch_start), _ramp(patch_start, patch_end, opt.epochs - wait, patch_warmup)]),
        lr_warmup,
        temp_warmup,
        tuple(notices),
    )


def _ramp(start: float, end: float, epochs: int, warmup: int) -> np.ndarray:
    return warmup_then_constant(start, end, epochs, warmup) if epochs else np.empty(0)
