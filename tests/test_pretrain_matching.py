"""Dense self-distillation: which patch of the other view a patch is compared with, against plain loops."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from pretrain.augment import Augmentation, crop
from pretrain.config import ObjectiveSettings
from pretrain.ibot import IBOT, Views, patch_places
from pretrain.networks import Tokens


def _matched(objective: str, views: Views, teacher: torch.Tensor, student: torch.Tensor | None = None):
    ibot = IBOT.__new__(IBOT)
    ibot.settings = ObjectiveSettings(patch_objective=objective)  # type: ignore[arg-type]
    return ibot._match(Tokens(teacher[:, 0], teacher), student, views)


def test_places_are_where_the_crops_pixels_come_from() -> None:
    """A picture whose red and green are its coordinates tells where each patch of a crop was, flipped or not."""
    picture = np.zeros((120, 200, 3), np.uint8)
    picture[..., 0], picture[..., 1] = np.arange(200), np.arange(120)[:, None]
    augmentation = Augmentation(global_size=32, local_crops=0, flip=0.5)
    flips = set()
    for seed in range(12):
        made = crop(Image.fromarray(picture), augmentation, [np.random.default_rng((seed, i)) for i in range(2)])
        places = patch_places(torch.from_numpy(made.boxes), 16).unflatten(1, (4, 4)).numpy()
        seen = made.globals[:, :2].reshape(2, 2, 4, 8, 4, 8).mean((3, 5)).transpose(0, 2, 3, 1) + 0.5
        assert np.abs(places - seen).max() < 2
        flips |= set(made.boxes[:, 4].tolist())
    assert flips == {0.0, 1.0}


def test_by_position_the_nearest_patch_and_only_where_both_views_show_it() -> None:
    generator = torch.Generator().manual_seed(0)
    low = 60 * torch.rand(6, 2, generator=generator)
    boxes = torch.cat([low, 20 + 60 * torch.rand(6, 2, generator=generator), torch.tensor([[0.0], [1]] * 3)], 1)
    boxes[2] = torch.tensor([500.0, 500, 10, 10, 0])  # image 2's first view, which shares nothing with its second
    teacher = torch.zeros(6, 9, 4)
    positions, weights = _matched("position", Views(torch.zeros(6, 3, 3, 3), 3, boxes=boxes), teacher)
    places = patch_places(boxes, 9)
    for view in range(6):
        other = (view + 3) % 6
        left, top, width, height, _ = boxes[other].tolist()
        shown = [left <= x <= left + width and top <= y <= top + height for x, y in places[view].tolist()]
        for patch in range(9):
            distances = (places[view, patch] - places[other]).norm(dim=1)
            assert positions[view * 9 + patch] == other * 9 + distances.argmin()
            expected = shown[patch] / max(sum(shown), 1) / 6
            assert abs(weights[view * 9 + patch].item() - expected) < 1e-7
    assert weights[2 * 9 : 3 * 9].sum() == 0
    assert (weights > 0).any()


def test_by_feature_the_most_similar_patch_of_the_other_view() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(4, 9, 8, generator=generator) for _ in range(2))
    positions, weights = _matched("feature", Views(torch.zeros(4, 3, 3, 3), 2), teacher, student)
    for view in range(4):
        other = (view + 2) % 4
        for patch in range(9):
            similar = torch.cosine_similarity(student[view, patch], teacher[other], dim=1)
            assert positions[view * 9 + patch] == other * 9 + similar.argmax()
    assert torch.equal(weights, torch.full((36,), 1 / 36))


def test_by_feature_nearly_equal_patches_under_bfloat16() -> None:
    """Their similarities are all 1 to the 8 bits of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(8, generator=generator)
    teacher, student = (common + 1e-2 * torch.randn(4, 9, 8, generator=generator) for _ in range(2))
    views = Views(torch.zeros(4, 3, 3, 3), 2)
    exact, _ = _matched("feature", views, teacher, student)
    assert len(exact.unique()) > 4
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = _matched("feature", views, teacher, student)
    assert torch.equal(rounded, exact)


def test_by_position_far_from_the_corner_of_a_large_image() -> None:
    """Where squared coordinates have no digits left for a patch of a few pixels."""
    generator = torch.Generator().manual_seed(0)
    low = 6000 + 20 * torch.rand(2, 2, generator=generator)
    boxes = torch.cat([low, torch.tensor([[30.0, 35], [25, 40]]), torch.zeros(2, 1)], 1)
    positions, _ = _matched("position", Views(torch.zeros(2, 3, 3, 3), 1, boxes=boxes), torch.zeros(2, 196, 4))
    places = patch_places(boxes, 196).double()
    for view in range(2):
        found = positions[view * 196 : (view + 1) * 196] - (1 - view) * 196
        distances = (places[view, :, None] - places[1 - view]).norm(dim=-1)
        chosen = distances.gather(1, found[:, None])[:, 0]
        torch.testing.assert_close(chosen, distances.min(1).values, rtol=0, atol=1e-3)
