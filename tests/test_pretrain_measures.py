"""What a step and an epoch say about themselves, against plain formulas; over ranks that have masked unlike much."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical
from torch.nn import functional as F

from ibot_eval import distributed
from pretrain.ibot import StepResult
from pretrain.losses import patch_losses, teacher_targets
from pretrain.measures import EpochPredictions, measures
from tests.ranks import run_ranks

PATCH_VALUES = ("patch_loss_per_token", "patch_entropy", "patch_kl")


def logits(seed: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Student's and teacher's (tokens, 6)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 6, generator=generator), torch.randn(tokens, 6, generator=generator)


def result(seed: int, masked: int, padding: int, kind: Literal["softmax", "hardmax"] = "softmax") -> StepResult:
    """Of two images and two global views; ``padding`` patches are in the list and not masked."""
    student, teacher = logits(seed, masked + padding)
    targets = teacher_targets(teacher, None, 0.5, kind)
    weights = torch.tensor([0.25] * masked + [0.0] * padding)
    losses = patch_losses(student, targets.probabilities, 0.1)
    zero = torch.zeros(())
    return StepResult(
        loss=zero,
        cls_loss=zero,
        patch_loss=(losses * weights).sum(),
        patch_loss_per_token=losses[:masked].mean() if masked else zero,
        cls_mean=torch.zeros(6),
        patch_mean=None,
        targets=teacher_targets(logits(99, 4)[1].unflatten(0, (2, 2)), None, 0.5),
        patch_targets=targets,
        weights=weights,
        student_cls=logits(99, 4)[0],
    )


def expected(*parts: tuple[int, int, int]) -> tuple[float, float]:
    """Loss and entropy per masked token, of all (seed, masked, padding) together."""
    losses, entropies = [], []
    for seed, masked, padding in parts:
        student, teacher = (part[:masked] for part in logits(seed, masked + padding))
        targets = (teacher / 0.5).softmax(-1)
        losses.append(F.cross_entropy(student / 0.1, targets, reduction="none"))
        entropies.append(Categorical(probs=targets).entropy())
    return torch.cat(losses).mean().item(), torch.cat(entropies).mean().item()


def test_a_loss_is_the_targets_entropy_and_the_kl() -> None:
    found = measures(result(0, 5, 3), torch.tensor([3.0, 4.0]), 0.1)
    loss, entropy = expected((0, 5, 3))
    assert [found[name] for name in PATCH_VALUES] == pytest.approx([loss, entropy, loss - entropy], rel=1e-5)
    student, teacher = (part[:5] for part in logits(0, 8))
    kl = F.kl_div((student / 0.1).log_softmax(-1), (teacher / 0.5).softmax(-1), reduction="batchmean")
    assert found["patch_kl"] == pytest.approx(kl.item(), rel=1e-5)
    assert found["gradient_norm"] == 5
    assert "masked_tokens" not in found


def test_hard_targets_have_no_entropy_to_subtract() -> None:
    found = measures(result(0, 5, 3, "hardmax"), torch.ones(1), 0.1)
    student, teacher = (part[:5] for part in logits(0, 8))
    kl = F.cross_entropy(student / 0.1, teacher.argmax(-1)).item()  # from a one-hot distribution
    assert found["patch_kl"] == pytest.approx(kl, rel=1e-5)
    assert found["patch_loss_per_token"] == pytest.approx(kl, rel=1e-5)
    # What is watched is still how sure the teacher is.
    assert found["patch_entropy"] == pytest.approx(expected((0, 5, 3))[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "hardmax"])
def test_without_masked_tokens_patches_have_no_values(kind: Literal["softmax", "hardmax"]) -> None:
    found = measures(result(0, 0, 4, kind), torch.ones(1), 0.1)
    assert all(math.isnan(found[name]) for name in PATCH_VALUES)
    assert all(math.isfinite(found[name]) for name in found if name not in PATCH_VALUES)


UNLIKE = {"some and none": ((0, 3, 2), (1, 0, 5)), "many and few": ((0, 6, 1), (1, 1, 0)), "none": ((0, 0, 2),) * 2}
"""By rank."""


def measured() -> list[list[float]]:
    distributed.init("cpu")
    found = [measures(result(*parts[distributed.rank()]), torch.ones(1), 0.1) for parts in UNLIKE.values()]
    distributed.shutdown()
    return [[of[name] for name in PATCH_VALUES] for of in found]


def test_means_are_over_the_tokens_of_all_ranks() -> None:
    first, second = run_ranks(2, measured)
    for ours, theirs, parts in zip(first, second, UNLIKE.values(), strict=True):
        assert ours == pytest.approx(theirs, nan_ok=True)
        loss, entropy = expected(*parts)
        assert ours == pytest.approx([loss, entropy, loss - entropy], rel=1e-5, nan_ok=True)
    assert all(math.isnan(value) for value in first[-1])


def test_predictions_of_an_epoch_go_on_where_a_checkpoint_left_them() -> None:
    labels = torch.tensor([0, 1])
    whole, before, after = EpochPredictions(), EpochPredictions(), EpochPredictions()
    for seed in range(4):
        step = result(seed, 1, 0)._replace(targets=teacher_targets(logits(seed, 4)[1].unflatten(0, (2, 2)), None, 0.5))
        whole.add(step, labels)
        if seed == 2:
            after.restore(before.state())
        (before if seed < 2 else after).add(step, labels)
    assert after.state()["teacher"].tolist() == [
        cls for seed in range(4) for cls in logits(seed, 4)[1][:2].argmax(-1).tolist()
    ]
    assert after.finish() == whole.finish()
    assert after.state() == {}


def test_predictions_on_a_device_join_those_of_a_checkpoint() -> None:
    """Tensors without values stand for those of a GPU."""
    with FakeTensorMode() as fake:
        cpu, device = fake.from_tensor(torch.zeros(6, dtype=torch.int64)), torch.device("cuda")
        predictions = EpochPredictions()
        predictions.restore({"teacher": cpu, "agreed": cpu.to(torch.float32), "labels": cpu})
        targets = teacher_targets(torch.zeros(2, 2, 6, device=device), None, 0.5)
        zeros = torch.zeros(4, 6, device=device)
        step = result(0, 1, 0)._replace(targets=targets, student_cls=zeros)
        predictions.add(step, torch.zeros(2, dtype=torch.int64))
        state = predictions.state()
    assert set(state) == {"teacher", "agreed", "labels"}
    for tensor in state.values():
        assert (tensor.device.type, len(tensor)) == ("cpu", 8)


def test_predictions_keep_no_memory_of_the_batch() -> None:
    labels, predictions = torch.tensor([0, 1]), EpochPredictions()
    predictions.add(result(0, 1, 0), labels)
    labels.zero_()  # as page-locked memory is when the next batch comes
    assert predictions.state()["labels"].tolist() == [0, 1]
