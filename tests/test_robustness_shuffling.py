"""robustness.shuffling: a 4x4 image by hand, a slow way of doing the same, and sizes that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ibot_eval.robustness.shuffling import Shuffles, fitting_size, shuffle, shuffled

IMAGE = torch.arange(16.0).view(1, 1, 4, 4)


def test_2x2_by_hand():
    found = shuffled(IMAGE, (2, 2), torch.tensor([[3, 0, 2, 1]]))
    assert found[0, 0].int().tolist() == [[10, 11, 0, 1], [14, 15, 4, 5], [8, 9, 2, 3], [12, 13, 6, 7]]


def test_1x2_and_4x1_by_hand():
    assert shuffled(IMAGE, (1, 2), torch.tensor([[1, 0]]))[0, 0, 0].int().tolist() == [2, 3, 0, 1]
    found = shuffled(IMAGE, (4, 1), torch.tensor([[2, 3, 1, 0]]))
    assert found[0, 0, :, 0].int().tolist() == [8, 12, 4, 0]


@pytest.mark.parametrize("grid", [(2, 4), (4, 8), (3, 1)])
def test_against_cells_moved_one_by_one(grid):
    rows, columns = grid
    images = torch.randn(3, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    orders = torch.stack([torch.randperm(rows * columns, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    height, width = 24 // rows, 32 // columns
    expected = torch.zeros_like(images)
    for image in range(3):
        for place, cell in enumerate(orders[image].tolist()):
            (r, c), (y, x) = divmod(place, columns), divmod(cell, columns)
            expected[image, :, r * height : (r + 1) * height, c * width : (c + 1) * width] = images[
                image, :, y * height : (y + 1) * height, x * width : (x + 1) * width
            ]
    assert torch.equal(shuffled(images, grid, orders), expected)


def test_each_image_has_its_own_draw_whatever_its_batch():
    images = torch.randn(1, 3, 16, 16).expand(40, -1, -1, -1)
    found = shuffle(images, (4, 4), torch.arange(40), 0, 0)
    assert len(found.flatten(1).unique(dim=0)) == 40
    assert torch.equal(shuffle(images[:1], (4, 4), torch.tensor([7]), 0, 0)[0], found[7])
    assert torch.equal(found.flatten(2).sort(2).values, images.flatten(2).sort(2).values), "pixels were made or lost"
    for other in ((1, 0), (0, 1)):
        assert not torch.equal(shuffle(images, (4, 4), torch.arange(40), *other), found)


def test_1x1_is_the_image_itself():
    assert shuffle(IMAGE, (1, 1), torch.tensor([0]), 0, 0) is IMAGE


def test_a_grid_that_does_not_divide():
    with pytest.raises(ValueError, match="4x4 pixels cannot be cut into 3x2"):
        shuffled(IMAGE, (3, 2), torch.zeros(1, 6, dtype=torch.long))
    assert fitting_size(224, (14, 16)) == (224, 224)
    assert fitting_size(100, (14, 16)) == (98, 96)
    assert fitting_size(100, (8, 3)) == (104, 99), "of 96 and 104 the larger"
    assert fitting_size(4, (10, 1)) == (10, 4)


def test_resizing_to_fit_moves_cells_of_the_resized_image():
    image = torch.randn(1, 3, 10, 10, generator=torch.Generator().manual_seed(3))
    found = shuffle(image, (3, 3), torch.tensor([0]), 0, 0)
    assert found.shape == image.shape
    small = F.interpolate(image, (9, 9), mode="bilinear", antialias=True)
    cells = shuffle(small, (3, 3), torch.tensor([0]), 0, 0)
    assert not torch.equal(cells, small)
    assert torch.equal(found, F.interpolate(cells, (10, 10), mode="bilinear", antialias=True))


def test_all_ways_in_their_order():
    images, indices = torch.randn(2, 3, 8, 8), torch.tensor([4, 5])
    damage = Shuffles([(2, 2), (4, 4)], seed=9, repeats=2)
    found = list(damage(images, indices))
    assert len(found) == len(damage) == 4
    for way, (grid, repeat) in zip(found, [((2, 2), 0), ((4, 4), 0), ((2, 2), 1), ((4, 4), 1)], strict=True):
        assert torch.equal(way.images, shuffle(images, grid, indices, 9, repeat))
