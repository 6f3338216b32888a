"""Evaluation of classifiers: against a plain loop, over ranks, and with images, classes and logits that are amiss."""

from __future__ import annotations

import math
import os
import signal
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from ibot_eval import distributed
from ibot_eval.errors import BadImage, ConfigError, DataError
from ibot_eval.finetuning.evaluation import Evaluation, evaluate
from tests.fakes import SIDE, TRANSFORM, FakeSplit, fake_images
from tests.ranks import run_ranks

CPU = torch.device("cpu")
CLASSES = np.arange(8)


class Linear(nn.Module):
    """One small product per image, so that a batch's size cannot change the last bit; dropout, so that modes show."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3 * SIDE * SIDE, classes, generator=generator) / 10)
        self.dropout = nn.Dropout(0.9)
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images)
        return torch.stack([self.dropout(image.flatten()) @ self.weight for image in images])


def run(split: FakeSplit, classifier: Any = None, classes: np.ndarray = CLASSES, **settings: Any) -> Evaluation:
    return evaluate(classifier or Linear(), split, TRANSFORM, classes, device=CPU, **{"batch_size": 4} | settings)


def logits_of(indices: list[int]) -> np.ndarray:
    """(n, 8) float64, computed with numpy."""
    images = fake_images(FakeSplit(30), indices).flatten(1).numpy()
    return images.astype(np.float64) @ Linear().weight.detach().numpy().astype(np.float64)


def assert_same(ours: Evaluation, theirs: Evaluation) -> None:
    assert ours.loss == theirs.loss
    assert ours.unreadable == theirs.unreadable
    for name in ("indices", "labels", "predicted", "in_top5"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_equals_a_plain_loop() -> None:
    split = FakeSplit(30)
    result, logits = run(split), logits_of(list(range(30)))
    order = np.argsort(-logits, axis=1)
    np.testing.assert_array_equal(result.indices, np.arange(30))
    np.testing.assert_array_equal(result.labels, split.labels)
    np.testing.assert_array_equal(result.predicted, order[:, 0])
    np.testing.assert_array_equal(result.in_top5, (order[:, :5] == split.labels[:, None]).any(1))
    exponentials = np.exp(logits)
    right = exponentials[np.arange(30), split.labels] / exponentials.sum(1)
    assert result.loss == pytest.approx(-np.log(right).mean(), rel=1e-5)
    assert result.top1 == pytest.approx(100 * (order[:, 0] == split.labels).mean())
    assert result.top5 == pytest.approx(100 * (order[:, :5] == split.labels[:, None]).any(1).mean())
    assert 0 < result.in_top5.sum() < 30
    assert result.unreadable == []
    assert result.predicted.dtype == result.labels.dtype == np.int64
    assert result.in_top5.dtype == bool


@pytest.mark.parametrize("settings", [{"batch_size": 1}, {"batch_size": 64}, {"workers": 2, "batch_size": 7}])
def test_batches_and_workers_change_nothing(settings: dict[str, Any]) -> None:
    assert_same(run(FakeSplit(30), **settings), run(FakeSplit(30)))


def test_classes_are_places_of_logits() -> None:
    """A classifier of three of the labels; the images of the others are wrong, and have no part in the loss."""
    split, classes = FakeSplit(30), np.array([1, 2, 7])
    split.labels = np.arange(30) % 4  # 0 and 3 are unknown to it
    result = run(split, Linear(3), classes)
    assert set(result.predicted.tolist()) <= {1, 2, 7}
    known = np.isin(split.labels, classes)
    assert result.in_top5.tolist() == known.tolist()  # of three classes all are among the best five
    np.testing.assert_array_equal(result.labels, split.labels)
    with torch.no_grad():
        logits = Linear(3).eval()(fake_images(split, range(30)))
    np.testing.assert_array_equal(result.predicted, classes[logits.argmax(1).numpy()])
    targets = torch.from_numpy(np.searchsorted(classes, split.labels[known]))
    assert result.loss == pytest.approx(float(nn.functional.cross_entropy(logits[known], targets)), rel=1e-5)


def test_no_image_of_a_known_class() -> None:
    split = FakeSplit(6)
    split.labels = np.array([0, 9, 4, 9, 0, 4])
    result = run(split, Linear(2), np.array([3, 5]))
    assert result.loss is None
    assert not result.in_top5.any()
    assert result.top1 == 0


def test_a_classifier_that_says_the_same_of_all_gains_nothing() -> None:
    result = run(FakeSplit(30), lambda images: torch.zeros(len(images), 8))
    assert set(result.predicted.tolist()) == {0}
    assert result.in_top5.all()  # labels are 0, 1 and 2
    assert result.loss == pytest.approx(math.log(8))


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_are_left_out_and_named(workers: int) -> None:
    bad = (0, 4, 5, 6, 7, 29)  # one whole batch among them
    result, whole = run(FakeSplit(30, bad=bad), bad_images="skip", workers=workers), run(FakeSplit(30))
    good = [i for i in range(30) if i not in bad]
    assert result.indices.tolist() == good
    assert result.unreadable == [f"train/{i:03d}.png" for i in bad]
    np.testing.assert_array_equal(result.predicted, whole.predicted[good])
    np.testing.assert_array_equal(result.in_top5, whole.in_top5[good])
    with pytest.raises(BadImage, match="train/000"):
        run(FakeSplit(30, bad=bad), workers=workers)


def test_too_little_memory_is_explained() -> None:
    """By the batch size of evaluations, not that of training."""
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried"))
    with pytest.raises(ConfigError, match=r"in the evaluation, with --batch-size 4: (?s:.*)--batch-size 2;"):
        run(FakeSplit(30), full)


def test_nothing_can_be_read() -> None:
    result = run(FakeSplit(3, bad=(0, 1, 2)), bad_images="skip")
    assert len(result.indices) == len(result.predicted) == 0
    assert len(result.unreadable) == 3
    assert result.top1 is result.top5 is result.loss is None


class Signalled(FakeSplit):
    """The process that loads image 2 gets what a scheduler sends to all processes of a run that is to stop."""

    def load(self, i: int) -> Image.Image:
        if i == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().load(i)


def test_workers_outlast_the_signals_that_ask_a_run_to_stop() -> None:
    assert_same(run(Signalled(9), workers=1), run(FakeSplit(9)))


def test_logits_that_are_not_finite_name_their_images() -> None:
    def diverged(images: Tensor) -> Tensor:
        logits = torch.zeros(len(images), 8)
        logits[1, 3] = torch.nan
        return logits

    with pytest.raises(DataError, match=r"(?s)'train/001.png' \(train split\) are NaN.*learning rate"):
        run(FakeSplit(6), diverged)


def test_modes_and_gradients_are_as_before() -> None:
    classifier = Linear().train()
    classifier.dropout.eval()
    frozen = Linear().eval()
    for module in (classifier, frozen):
        modes = [part.training for part in module.modules()]
        assert_same(run(FakeSplit(9), module), run(FakeSplit(9)))
        assert [part.training for part in module.modules()] == modes
    assert classifier.weight.grad is None
    # What the network may have kept can still be trained with.
    (classifier(classifier.seen[0]).sum() + classifier.seen[0].sum()).backward()
    assert classifier.weight.grad is not None


def test_precision() -> None:
    dtypes = []

    def classifier(images: Tensor) -> Tensor:
        logits = images.flatten(1) @ torch.ones(3 * SIDE * SIDE, 8)
        dtypes.append((images.dtype, logits.dtype))
        return logits

    run(FakeSplit(4), classifier)
    run(FakeSplit(4), classifier, precision="bf16")
    assert dtypes == [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]


def on_rank(n: int, bad: list[int]) -> dict[str, Any]:
    distributed.init("cpu")
    try:
        result = run(FakeSplit(n, bad=bad), bad_images="skip")
    finally:
        distributed.shutdown()
    return {
        "indices": result.indices.tolist(),
        "labels": result.labels.tolist(),
        "predicted": result.predicted.tolist(),
        "in_top5": result.in_top5.tolist(),
        "loss": result.loss,
        "unreadable": result.unreadable,
    }


@pytest.mark.parametrize(("n", "bad"), [(23, [5, 8, 22]), (1, [])])
def test_ranks_share_the_images(n: int, bad: list[int]) -> None:
    """Nothing padded, nothing counted twice, the same on every rank as in one process; a rank may have no image."""
    one = on_rank(n, bad)
    assert run_ranks(2, on_rank, n, bad) == [one, one]


def failing_on_rank() -> str:
    distributed.init("cpu")
    try:
        run(FakeSplit(9, bad=[3]))
    except BadImage as error:
        return error.what
    finally:
        distributed.shutdown()
    return "nothing"


def test_an_error_of_one_rank_is_raised_by_all() -> None:
    assert run_ranks(2, failing_on_rank) == ["train/003.png cannot be decoded"] * 2
