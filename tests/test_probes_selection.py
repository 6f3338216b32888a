"""probes.selection: which head is reported, and what ties and interruptions do to it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ibot_eval.probes.selection import Selection, middle_setting
from ibot_eval.probes.sweep import HeadSetting, Scores, Sweep


def _scores(correct, loss):
    return Scores(np.array(correct), np.array(loss, dtype=np.float64))


def test_ties_go_to_the_lower_loss_then_to_the_smaller_rate_then_to_the_earlier_epoch():
    settings = [HeadSetting(0.3), HeadSetting(0.1), HeadSetting(0.2)]
    sweep = Sweep(2, 2, settings, groups=2, seed=0)
    test = _scores([1, 2, 3], [1, 1, 1])
    for correct, loss, wanted in (
        ([5, 5, 4], [0.5, 0.6, 0.1], 0),
        ([5, 5, 5], [0.5, 0.5, 0.6], 1),
        ([5, 5, 6], [0.1, 0.1, math.inf], 2),
    ):
        selection = Selection(settings, 8, 4)
        for epoch in (1, 2):
            selection.watch(sweep, epoch, _scores(correct, loss), test, last=epoch == 2)
        chosen = selection.result()
        assert (chosen.setting, chosen.epoch) == (settings[wanted], 1)
        assert chosen.held_out_top1 == pytest.approx(100 * correct[wanted] / 8)
        assert (chosen.best_on_test, chosen.best_on_test_setting, chosen.best_on_test_epoch) == (75, settings[2], 1)


def test_the_head_is_the_one_of_the_chosen_epoch_from_the_group_that_saw_everything():
    settings = [HeadSetting(0.3), HeadSetting(0.1)]
    sweep = Sweep(2, 2, settings, groups=2, seed=0)
    selection = Selection(settings, 8, 4)
    for epoch, correct in ((1, [3, 2]), (2, [4, 6]), (3, [5, 5])):
        sweep.weight += 1 + torch.arange(4.0)[:, None, None]
        kept = sweep.head(3)[0] if epoch == 2 else None
        selection.watch(sweep, epoch, _scores(correct, [1, 1]), _scores([4, 0], [1, 1]), last=epoch == 3)
        if kept is not None:
            wanted = kept
    assert torch.equal(selection.result().weight, wanted)


def test_a_selection_goes_on_from_its_state():
    settings = [HeadSetting(0.3), HeadSetting(0.1)]
    sweep = Sweep(2, 2, settings, groups=2, seed=0)
    first, second = Selection(settings, 8, 4), Selection(settings, 8, 4)
    first.watch(sweep, 1, _scores([3, 7], [1, 1]), _scores([4, 0], [1, 1]), last=False)
    second.load_state_dict(first.state_dict())
    sweep.weight += 1
    for selection in (first, second):
        selection.watch(sweep, 2, _scores([5, 5], [1, 1]), _scores([3, 1], [1, 1]), last=True)
    one, two = first.result(), second.result()
    assert (one.setting, one.epoch, one.best_on_test, one.table) == (
        two.setting,
        two.epoch,
        two.best_on_test,
        two.table,
    )
    assert one.epoch == 1
    assert torch.equal(one.weight, two.weight)


def test_middle_setting():
    settings = [HeadSetting(r, d, o) for o in ("sgd", "lars") for d in (0.0, 1e-6) for r in (9.0, 0.1, 1.0)]
    assert settings[middle_setting(settings)] == HeadSetting(1.0)
    assert middle_setting([HeadSetting(4e-3, 0.0, "adamw")]) == 0
