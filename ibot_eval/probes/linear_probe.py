"""A linear classifier of frozen features, its learning rate and epoch chosen on a held-out part of train."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.metrics.accuracy import target_ranks
from ibot_eval.probes.grid import Grid, grid
from ibot_eval.probes.holdout import hold_out
from ibot_eval.probes.labelled import Labelled
from ibot_eval.probes.selection import Chosen, Selection
from ibot_eval.probes.sweep import EVALUATED_VALUES, HeadSetting, Optimizer, Sweep, on_device
from ibot_eval.training.schedules import cosine

DEFAULT_BATCH = 1024
LEAST_STEPS = 8
"""Steps of an epoch below which the default batch shrinks, down to ``LEAST_BATCH``."""
LEAST_BATCH = 32


@dataclass(frozen=True)
class ProbeSettings:
    """How a linear probe is trained: the flags that all protocols with such a probe share."""

    epochs: int = 100
    """Passes over the train split."""
    batch: int | None = None
    """Images per step, over all processes, at most; those of an epoch are shared out evenly. Default: 1024, or an
    eighth of the train split where that is less (at least 32)."""
    sweep: Grid = "rates"
    """rates: 45 learning rates, n x 10^k times batch / 256; full: those with weight decay 0 and 1e-6, SGD and LARS."""
    lrs: tuple[float, ...] | None = None
    """Learning rates to use instead of the sweep's; as they are, whatever the batch."""
    optimizer: Optimizer = "sgd"
    """Optimizer of all heads: sgd (momentum 0.9), lars or adamw."""
    weight_decay: float = 0.0
    """Weight decay of all heads."""
    hold_out: float = 0.1
    """Share of the train split that the learning rate and epoch are chosen on."""
    eval_every: int = 1
    """Epochs between two looks at the accuracies; an epoch that is not looked at cannot be chosen, but the last."""

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that make no probe."""
        for name, value, fine in (
            ("epochs", self.epochs, self.epochs >= 1),
            ("batch", self.batch, self.batch is None or self.batch >= 1),
            ("eval-every", self.eval_every, self.eval_every >= 1),
            ("weight-decay", self.weight_decay, 0 <= self.weight_decay < float("inf")),
            ("hold-out", self.hold_out, 0 <= self.hold_out < 1),
        ):
            if not fine:
                raise ConfigError(f"{name.replace('-', ' ')} cannot be {value}", where=f"--{name}")
        if self.lrs is not None and (
            not self.lrs or len(set(self.lrs)) < len(self.lrs) or not all(0 < lr < float("inf") for lr in self.lrs)
        ):
            raise ConfigError(
                f"learning rates must be different positive numbers; given: {', '.join(map(str, self.lrs)) or 'none'}",
                where="--lrs",
            )
        if self.sweep == "full" and (self.lrs is not None or self.optimizer != "sgd" or self.weight_decay):
            raise ConfigError(
                "--sweep full has optimizers, weight decays and learning rates of its own",
                where="--sweep",
                todo="leave out --lrs, --optimizer and --weight-decay, or --sweep",
            )

    def effective_batch(self, images: int) -> int:
        """Images in each step of an epoch of that many, of which some steps may have one less."""
        batch = self.batch or min(DEFAULT_BATCH, max(LEAST_BATCH, images // LEAST_STEPS))
        steps = -(-images // batch)
        return -(-images // steps)

    def heads(self, batch: int) -> tuple[HeadSetting, ...]:
        """The heads to train with ``batch`` images per step."""
        if self.sweep == "full":
            return grid("full", batch)
        rates = self.lrs or [setting.lr for setting in grid("rates", batch)]
        return tuple(HeadSetting(lr, self.weight_decay, self.optimizer) for lr in rates)


@dataclass
class ProbeResult:
    """The reported classifier and what it says about test."""

    predicted: np.ndarray
    """(n_test,) int64 labels."""
    in_top5: np.ndarray
    """(n_test,) bool: whether the right class is among the five best."""
    setting: HeadSetting
    epoch: int
    """Epochs trained when the head was taken, from 1."""
    held_out_top1: float | None
    """Percent of the held-out images; None where nothing could be held out."""
    best_on_test: float
    """Percent, of the best setting at the best epoch on test: the published habit."""
    best_on_test_setting: HeadSetting
    best_on_test_epoch: int
    weight: Tensor
    """(C, D) float32, on the CPU."""
    bias: Tensor
    """(C,) float32."""
    classes: np.ndarray
    """(C,) int64: the label of each row of ``weight``, ascending."""
    table: list[dict[str, Any]]
    """Per setting lr, weight_decay, optimizer, held_out_top1 and test_top1 (percent, at the last epoch)."""
    batch: int
    """Images per step."""
    warnings: list[str] = field(default_factory=list)


def train_probe(
    train: Labelled,
    test: Labelled,
    settings: ProbeSettings,
    *,
    device: torch.device,
    seed: int,
    progress: bool = False,
    desc: str = "linear probe",
) -> ProbeResult:
    """Trains the heads of ``settings`` and reports the one that is best on a held-out part of train.

    Cross-entropy, cosine schedule to 0 over all steps (published code sets the rate once per epoch, so that it is half
    an epoch behind on average), images in an order that depends on the seed and epoch only.
    With several processes each trains a share of the settings; a collective call then, with the same arguments on
    every rank.

    Args:
        train, test: features of the same width; classes that train lacks count as wrong.
        seed: of the held-out part, the initial weights and the order of images.
        progress: whether rank 0 shows a bar.
        desc: its name.
    """
    batch = settings.effective_batch(len(train))
    heads = settings.heads(batch)
    held = hold_out(train.labels, settings.hold_out, seed)
    selection = Selection(heads, int(held.sum()), len(test))
    distributed.everywhere(
        lambda: _train(
            selection, train, test, held, settings, batch, device, seed, progress and distributed.is_main(), desc
        )
    )
    return reported(selection, test, train.classes, settings, batch, device)


def reported(
    selection: Selection, test: Labelled, classes: np.ndarray, settings: ProbeSettings, batch: int, device: torch.device
) -> ProbeResult:
    """What comes of a sweep that has ended: the chosen head, and what it says about test. A collective.

    Args:
        classes: (C,) labels of train, ascending.
        batch: images per step.
    """
    chosen = selection.result()
    predicted, in_top5 = classify(chosen.weight, chosen.bias, test, classes, device)
    return ProbeResult(
        predicted=predicted,
        in_top5=in_top5,
        setting=chosen.setting,
        epoch=chosen.epoch,
        held_out_top1=chosen.held_out_top1,
        best_on_test=chosen.best_on_test,
        best_on_test_setting=chosen.best_on_test_setting,
        best_on_test_epoch=chosen.best_on_test_epoch,
        weight=chosen.weight,
        bias=chosen.bias,
        classes=classes,
        table=chosen.table,
        batch=batch,
        warnings=selection_warnings(chosen, classes, settings.hold_out),
    )


def classify(
    weight: Tensor, bias: Tensor, test: Labelled, classes: np.ndarray, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """What a linear classifier says.

    Args:
        weight, bias: (C, D) and (C,).
        classes: (C,) ascending, the labels of the rows.

    Returns:
        predicted labels (n,) int64, -1 where the logits are not finite; and whether the right class is among the five
        best (n,) bool.
    """
    weight, bias = weight.to(device), bias.to(device)
    targets = torch.from_numpy(test.targets(classes)).to(device)
    predicted, in_top5 = [], []
    rows = max(1, EVALUATED_VALUES // max(weight.shape))
    for a in range(0, len(test), rows):
        logits = F.linear(on_device(test.features[a : a + rows], device), weight, bias)
        # arg-max takes a NaN for the largest number; a diverged head knows nothing, as in Sweep.evaluate.
        fine = logits.logsumexp(1).isfinite()
        predicted.append(torch.where(fine, logits.argmax(1), -1).cpu())
        in_top5.append(((target_ranks(logits, targets[a : a + rows]) < 5) & fine).cpu())
    position = torch.cat(predicted).numpy()
    return np.where(position < 0, -1, classes[position]), torch.cat(in_top5).numpy()


def selection_warnings(chosen: Chosen, classes: np.ndarray, fraction: float) -> list[str]:
    """What the reader of the reported number should know.

    Args:
        classes: that were learnt.
        fraction: to hold out, as asked for.
    """
    warnings = []
    if len(classes) == 1:
        warnings.append("the train split has one class: every test image of that class counts as right")
    if chosen.held_out_top1 is None:
        reason = "nothing is held out" if not fraction else "no class of train has an image to hold out"
        warnings.append(
            f"{reason}, so no learning rate can be chosen: the result is that of the middle one, "
            f"{chosen.setting.lr:g}, after the last epoch"
        )
    if not (chosen.weight.isfinite().all() and chosen.bias.isfinite().all()):
        warnings.append(
            f"the reported classifier has diverged at the learning rate {chosen.setting.lr:g}: its weights are NaN or "
            "infinite, and every image counts as wrong"
        )
    return warnings


def _train(
    selection: Selection,
    train: Labelled,
    test: Labelled,
    held: np.ndarray,
    settings: ProbeSettings,
    batch: int,
    device: torch.device,
    seed: int,
    progress: bool,
    desc: str,
) -> None:
    """Trains this rank's share of the heads; ``selection`` then knows what became of them."""
    if not selection.own:
        return
    features, test_features = _near(train.features, device), _near(test.features, device)
    targets = torch.from_numpy(train.targets(train.classes)).to(device)
    test_targets = torch.from_numpy(test.targets(train.classes)).to(device)
    held_rows = np.flatnonzero(held)
    held_features = _near(train.features[held_rows], device)
    counts = torch.from_numpy(np.stack([~held, np.ones_like(held)])).to(device, torch.float32)
    sweep = Sweep(
        train.features.shape[1],
        len(train.classes),
        [selection.grid[i] for i in selection.own],
        groups=selection.groups,
        seed=seed,
        device=device,
    )
    steps = -(-len(train) // batch)
    scales = iter(cosine(1, 0, settings.epochs * steps))
    # A log file gets a line now and then instead of a redrawn bar.
    interval = 0.1 if sys.stderr.isatty() else 30
    with tqdm(
        total=settings.epochs * len(train),
        desc=desc,
        unit="images",
        mininterval=interval,
        disable=not progress,
        leave=False,
    ) as bar:
        for epoch in range(1, settings.epochs + 1):
            order = np.random.default_rng([seed, epoch]).permutation(len(train))
            for rows in np.array_split(order, steps):
                index = torch.from_numpy(rows).to(device)
                weights = counts[:, index] if selection.groups == 2 else None
                sweep.step(_rows(features, rows, index, device), targets[index], weights, float(next(scales)))
                bar.update(len(rows))
            last = epoch == settings.epochs
            if last or epoch % settings.eval_every == 0:
                on_held = sweep.evaluate(held_features, targets[held_rows]) if selection.held_out else None
                on_test = sweep.evaluate(test_features, test_targets, selection.groups - 1)
                selection.watch(sweep, epoch, on_held, on_test, last=last)


def _near(features: np.ndarray, device: torch.device) -> np.ndarray | Tensor:
    """Features on a GPU where they leave half of it free; else where they are, perhaps in a file."""
    if device.type == "cpu" or (device.type == "cuda" and features.nbytes > torch.cuda.mem_get_info(device)[0] / 2):
        return features
    return on_device(features, device)


def _rows(features: np.ndarray | Tensor, rows: np.ndarray, index: Tensor, device: torch.device) -> Tensor:
    return features[index] if isinstance(features, Tensor) else on_device(features[rows], device)
