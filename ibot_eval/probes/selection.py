"""Which head of a sweep is reported, and from which epoch.

Two groups of heads are trained: "held-out" does not see a part of train and is scored on it, "full" sees all of train
and is scored on test. The reported classifier is the full group's, of the setting and epoch that are best for the
held-out group, so that nothing is chosen on test. What publications report, the best setting and epoch on test itself,
is kept beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ibot_eval import distributed
from ibot_eval.probes.sweep import HeadSetting, Scores, Sweep


@dataclass(frozen=True)
class Chosen:
    """The outcome of a selection, the same on every rank."""

    setting: HeadSetting
    epoch: int
    """Number of epochs trained when the head was taken, from 1."""
    weight: Tensor
    """(C, D) float32, on the CPU."""
    bias: Tensor
    """(C,) float32, on the CPU."""
    held_out_top1: float | None
    """Percent of the held-out images that the held-out group's head got right; None without held-out images."""
    best_on_test: float
    """Percent, of the best setting at the best epoch on test."""
    best_on_test_setting: HeadSetting
    best_on_test_epoch: int
    table: list[dict[str, Any]]
    """Per setting, in the grid's order: lr, weight_decay, optimizer, and the accuracies in percent at the last epoch:
    ``held_out_top1`` (None without held-out images) and ``test_top1``."""


class Selection:
    """Watches a sweep from epoch to epoch, on one rank's share of the settings.

    Args:
        settings: the whole grid, the same on every rank; this rank trains ``share(settings)``.
        held_out: number of held-out images; 0 where none could be held out. The sweep then has one group, "full", and
            the reported head is that of the middle rate of the grid at the last epoch.
        test: number of test images.
    """

    def __init__(self, settings: Sequence[HeadSetting], held_out: int, test: int) -> None:
        self.grid, self.held_out, self.test = tuple(settings), held_out, test
        self.own = list(range(distributed.rank(), len(settings), distributed.world_size()))
        self._best: tuple[Any, ...] | None = None
        self._head: tuple[Tensor, Tensor] | None = None
        self._best_on_test: tuple[Any, ...] | None = None
        self._last: list[tuple[int | None, int]] = []

    @property
    def groups(self) -> int:
        """Of the sweep: the held-out group first, if there is one; the last is the full group."""
        return 2 if self.held_out else 1

    def watch(self, sweep: Sweep, epoch: int, held_out: Scores | None, test: Scores, *, last: bool) -> None:
        """Takes the scores after an epoch, and a copy of a head that is the best so far.

        Args:
            sweep: of this rank's settings.
            epoch: number of epochs trained so far, from 1.
            held_out: of group 0 on the held-out images; None without any.
            test: of the full group on the test images.
            last: whether this was the last epoch.
        """
        first_full = len(sweep) - len(self.own)
        for i, index in enumerate(self.own):
            lr = self.grid[index].lr
            key = (-int(test.correct[i]), float(test.log_loss[i]), lr, index, epoch)
            self._best_on_test = min(filter(None, (self._best_on_test, key)))
        if held_out is not None:
            keys = [
                (-int(held_out.correct[i]), float(held_out.log_loss[i]), self.grid[index].lr, index, epoch)
                for i, index in enumerate(self.own)
            ]
            if keys and (self._best is None or min(keys) < self._best):
                self._best = min(keys)
                self._head = sweep.head(first_full + self.own.index(self._best[3]))
        elif last and (middle := middle_setting(self.grid)) in self.own:
            self._best = (0, 0.0, self.grid[middle].lr, middle, epoch)
            self._head = sweep.head(first_full + self.own.index(middle))
        self._last = [
            (None if held_out is None else int(held_out.correct[i]), int(test.correct[i])) for i in range(len(self.own))
        ]

    def result(self) -> Chosen:
        """The best over all ranks. A collective call."""
        parts = distributed.gather_objects(
            (self._best, self._best_on_test, dict(zip(self.own, self._last, strict=False)))
        )
        best = min(own for own, _, _ in parts if own is not None)
        on_test = min(own for _, own, _ in parts if own is not None)
        mine = self._head if self._best == best else None
        head = next(head for head in distributed.gather_objects(mine) if head is not None)
        counts = {index: pair for _, _, of_rank in parts for index, pair in of_rank.items()}

        def percent(correct: int | None, of: int) -> float | None:
            return None if correct is None else 100 * correct / of

        table = [
            {
                "lr": setting.lr,
                "weight_decay": setting.weight_decay,
                "optimizer": setting.optimizer,
                "held_out_top1": percent(counts[i][0], self.held_out),
                "test_top1": percent(counts[i][1], self.test),
            }
            for i, setting in enumerate(self.grid)
        ]
        return Chosen(
            setting=self.grid[best[3]],
            epoch=best[4],
            weight=head[0],
            bias=head[1],
            held_out_top1=100 * -best[0] / self.held_out if self.held_out else None,
            best_on_test=100 * -on_test[0] / self.test,
            best_on_test_setting=self.grid[on_test[3]],
            best_on_test_epoch=on_test[4],
            table=table,
        )

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far: plain numbers and tensors."""
        return {"best": self._best, "head": self._head, "best_on_test": self._best_on_test, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = None if state["best"] is None else tuple(state["best"])
        self._head = None if state["head"] is None else (state["head"][0].clone(), state["head"][1].clone())
        self._best_on_test = None if state["best_on_test"] is None else tuple(state["best_on_test"])
        self._last = [tuple(pair) for pair in state["last"]]


def middle_setting(settings: Sequence[HeadSetting]) -> int:
    """Index of the middle learning rate among the settings with the first one's optimizer and weight decay."""
    alike = [
        i
        for i, s in enumerate(settings)
        if (s.optimizer, s.weight_decay) == (settings[0].optimizer, settings[0].weight_decay)
    ]
    return sorted(alike, key=lambda i: settings[i].lr)[len(alike) // 2]
