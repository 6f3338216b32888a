"""Losses, targets, centres and the head's short cuts, each against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ibot_eval import distributed
from ibot_eval.heads import ProjectionHead, Sharing
from pretrain.losses import Centre, Targets, cls_loss, patch_losses, teacher_targets
from pretrain.networks import Tokens, build, head_logits, prototypes
from pretrain.tokenizers import OnlineTokenizer
from tests.pretraining import tiny
from tests.ranks import run_ranks


@pytest.mark.parametrize(("views", "count", "batch"), [(2, 2, 3), (12, 2, 2), (3, 1, 4), (5, 3, 1)])
def test_cls_loss_is_the_mean_over_pairs_of_different_views(views: int, count: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(views)
    student = 3 * torch.randn(views, batch, 11, generator=generator)
    targets = (5 * torch.randn(count, batch, 11, generator=generator)).softmax(-1)
    pairs = [
        F.cross_entropy(student[v, b] / 0.1, targets[t, b])
        for t in range(count)
        for v in range(views)
        for b in range(batch)
        if v != t
    ]
    torch.testing.assert_close(cls_loss(student, targets, 0.1), torch.stack(pairs).mean())


def test_cls_loss_has_the_gradient_of_the_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(4, 2, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(2, 2, 7, generator=generator, dtype=torch.float64).softmax(-1)
    (ours,) = torch.autograd.grad(cls_loss(student, targets, 0.1), student)
    pairs = [F.cross_entropy(student[v] / 0.1, targets[t]) for t in range(2) for v in range(4) if v != t]
    (theirs,) = torch.autograd.grad(torch.stack(pairs).mean(), student)
    torch.testing.assert_close(ours, theirs)


def test_cls_loss_with_large_logits_stays_finite() -> None:
    student = torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]])
    targets = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    assert cls_loss(student, targets, 1.0).item() == 0
    assert cls_loss(student, targets.flip(0), 1.0).item() == 1e4


def test_patch_losses() -> None:
    generator = torch.Generator().manual_seed(1)
    student = 2 * torch.randn(6, 9, generator=generator)
    targets = (4 * torch.randn(6, 9, generator=generator)).softmax(-1)
    expected = F.cross_entropy(student / 0.2, targets, reduction="none")
    torch.testing.assert_close(patch_losses(student, targets, 0.2), expected)


@pytest.mark.parametrize("centred", [True, False])
def test_softmax_targets(centred: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits, centre = torch.randn(2, 3, 5, generator=generator), torch.randn(5, generator=generator)
    targets = teacher_targets(logits, centre if centred else None, 0.05)
    for view in range(2):
        for image in range(3):
            weights = [
                math.exp((logits[view, image, k] - (centre[k] if centred else 0)).item() / 0.05) for k in range(5)
            ]
            expected = torch.tensor([w / sum(weights) for w in weights])
            torch.testing.assert_close(targets.probabilities[view, image], expected, rtol=1e-4, atol=1e-6)


def test_hard_targets_take_the_largest_centred_output() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [0.3, 0.2, 0.1]])
    hard = teacher_targets(logits, torch.tensor([0.0, 1.5, 0.0]), 0.1, "hardmax")
    assert hard.probabilities.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert hard.probabilities.dtype == torch.float32
    assert teacher_targets(logits, None, 0.1, "hardmax").probabilities.tolist() == [[0, 1, 0], [1, 0, 0]]
    # What is watched is the teacher's distribution, not the one-hot target, whose entropy is always 0.
    soft = teacher_targets(logits, None, 0.1)
    torch.testing.assert_close(teacher_targets(logits, None, 0.1, "hardmax").entropy(), soft.entropy())


def test_entropy() -> None:
    generator = torch.Generator().manual_seed(3)
    targets = teacher_targets(torch.randn(4, 6, generator=generator), None, 0.3)
    expected = torch.distributions.Categorical(probs=targets.probabilities).entropy()
    torch.testing.assert_close(targets.entropy(), expected)
    uniform = Targets(torch.full((8,), 1 / 8), torch.zeros(8))
    assert uniform.entropy().item() == pytest.approx(math.log(8))
    assert teacher_targets(torch.tensor([1e4, 0.0, 0.0]), None, 0.04).entropy().item() == pytest.approx(0, abs=1e-6)


def test_centre_follows_the_mean() -> None:
    centre = Centre(3, 0.9)
    assert centre.mean.tolist() == [0, 0, 0]
    expected = torch.zeros(3)
    for seed in range(3):
        mean = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        given = mean.clone()
        centre.update(given)
        assert torch.equal(given, mean), "the caller's tensor is left alone"
        expected = 0.9 * expected + 0.1 * mean
        torch.testing.assert_close(centre.mean, expected)
    assert "mean" in centre.state_dict()


def centre_of_rank() -> list[list[float]]:
    distributed.init("cpu")
    centre, seen = Centre(2, 0.5), []
    for batch_mean in ([1.0, 8.0], [3.0, 0.0]):
        scale = 1 + distributed.rank()
        centre.update(scale * torch.tensor(batch_mean))
        seen.append(centre.mean.tolist())
    distributed.shutdown()
    return seen


def test_centre_is_averaged_over_ranks() -> None:
    # Means over the ranks are 1.5 times those of rank 0: (1.5, 12), then (4.5, 0).
    assert run_ranks(2, centre_of_rank) == [[[0.75, 6.0], [2.625, 3.0]]] * 2


@pytest.mark.parametrize(
    ("sharing", "patch_k"),
    [("shared", None), ("last-separate", None), ("separate", None), ("last-separate", 7), ("separate", 7)],
)
def test_head_on_chosen_tokens_equals_the_whole_head(sharing: Sharing, patch_k: int | None) -> None:
    torch.manual_seed(0)
    head = ProjectionHead(12, 10, patch_prototypes=patch_k, hidden=16, bottleneck=6, sharing=sharing)
    cls, patches = torch.randn(5, 12), torch.randn(9, 12)
    ours, theirs = head_logits(head, cls, patches), head(cls, patches)
    for a, b in zip(ours, theirs, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b)
    alone, nothing = head_logits(head, cls, None)
    torch.testing.assert_close(alone, theirs[0])
    assert nothing is None


def test_last_layer_is_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    head = ProjectionHead(12, 10, hidden=16, bottleneck=6)
    with torch.autocast("cpu", torch.bfloat16):
        bottleneck = head.bottleneck_cls(torch.randn(4, 12))
        logits = prototypes(head.last_layer, bottleneck)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(bottleneck.float(), head.last_layer.weight()))


@pytest.mark.parametrize("sharing", ["shared", "vanilla"])
def test_patch_outputs_of_the_teacher(sharing: str) -> None:
    """Logits at few positions, and the centre from the mean bottleneck, against all logits."""
    _, teacher = build(tiny(sharing=sharing))
    tokens = Tokens(torch.randn(3, 24), torch.randn(3, 16, 24))
    with torch.no_grad():
        every: Tensor = teacher.head(tokens.cls, tokens.patches)[1]
        outputs = OnlineTokenizer(teacher).patches(torch.empty(0), tokens)
        torch.testing.assert_close(outputs.mean(), every.mean((0, 1)), rtol=1e-5, atol=1e-6)
        chosen = torch.tensor([17, 0, 47, 17])
        torch.testing.assert_close(outputs.logits_at(chosen), every.flatten(0, 1)[chosen])
