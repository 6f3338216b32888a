"""Weights of a trained model, on their way back into one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ibot_eval.errors import CheckpointError
from tests.dense import prepared

prepared()

from protocols.openmmlab.model_file import load_weights  # noqa: E402


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    """They would detect nothing, and an AP of 0 would be believed."""
    model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match="1 tensors hold NaN or infinity, such as bias"):
        load_weights(model, {"weight": torch.ones(1, 2), "bias": torch.tensor([value])}, "a file")
    assert model.bias.isfinite().all()
