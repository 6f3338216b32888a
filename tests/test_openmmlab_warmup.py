"""The learning rate of detection's first iterations, as mmengine's schedulers make it."""

from __future__ import annotations

import pytest
import torch
from mmengine.registry import PARAM_SCHEDULERS

from tests.dense import prepared

prepared()

from protocols.openmmlab.detection import _schedule  # noqa: E402


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_the_whole_rate_is_reached_when_the_warmup_ends(warmup: int) -> None:
    """Linear from a thousandth: at iteration i, 1 - (1 - i / warmup) (1 - 0.001) of the rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = [PARAM_SCHEDULERS.build({**one, "optimizer": optimizer}) for one in _schedule((8, 11), 12, warmup)]
    by_iteration = [one for one in schedulers if not one.by_epoch]
    rates = []
    for _ in range(warmup + 2):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for one in by_iteration:
            one.step()
    wanted = [1 - (1 - min(1.0, i / warmup)) * 0.999 if warmup else 1.0 for i in range(warmup + 2)]
    assert rates == pytest.approx(wanted)
