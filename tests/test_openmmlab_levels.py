"""protocols.openmmlab.levels: which blocks, and where in the image the cells of a map lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ibot_eval.errors import ConfigError
from protocols.openmmlab.levels import Pyramid, at_patch_stride, level_blocks, pad_to, resample


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(12, (3, 5, 7, 11)), (24, (7, 11, 15, 23)), (4, (0, 1, 2, 3)), (40, (9, 19, 29, 39)), (6, (1, 2, 4, 5))],
)
def test_blocks_of_the_levels(depth: int, expected: tuple[int, ...]):
    assert level_blocks(depth) == expected


def test_blocks_of_ones_own():
    assert level_blocks(12, [3, 6, 9, 12]) == (2, 5, 8, 11)


@pytest.mark.parametrize("blocks", [[1, 2, 3], [1, 2, 2, 3], [4, 3, 2, 1], [0, 1, 2, 3], [1, 2, 3, 13]])
def test_other_blocks_are_refused(blocks: list[int]):
    with pytest.raises(ConfigError, match="block"):
        level_blocks(12, blocks)


def shape_of(step: nn.Module) -> list[str]:
    layers = list(step) if isinstance(step, nn.Sequential) else [step]
    return [f"{type(layer).__name__}{getattr(layer, 'stride', '')}" for layer in layers]


def test_levels_are_made_as_published():
    up, norm = "ConvTranspose2d(2, 2)", "BatchNorm2d"
    of_16 = [shape_of(step) for step in Pyramid([4] * 4, 16, "BN").steps]
    assert of_16 == [[up, norm, "GELU", up], [up], [], ["MaxPool2d2"]]
    of_8 = [shape_of(step) for step in Pyramid([4] * 4, 8, "BN").steps]
    assert of_8 == [[up], [], ["MaxPool2d2"], ["MaxPool2d4"]]
    of_32 = [shape_of(step) for step in Pyramid([4] * 4, 32, "BN").steps]
    assert of_32 == [[up, norm, "GELU", up, norm, "GELU", up], [up, norm, "GELU", up], [up], []]
    assert [shape_of(step) for step in Pyramid([4] * 4, 14, "BN").steps] == of_16


def test_norms_are_shared_between_gpus_by_default():
    assert isinstance(list(Pyramid([4] * 4, 16).steps[0].children())[1], nn.SyncBatchNorm)


@pytest.mark.parametrize("patch", [8, 14, 16, 32])
@pytest.mark.parametrize("size", [(64, 96), (70, 50)])
def test_sizes_of_levels_follow_the_image(patch: int, size: tuple[int, int]):
    grid = tuple(-(-side // 32) * 32 // patch if 32 % patch == 0 else -(-side // patch) for side in size)
    maps = [torch.randn(2, 3, *grid)] * 4
    levels = Pyramid([3] * 4, patch, "BN")(maps, size)
    expected = [(2, 3, -(-size[0] // s), -(-size[1] // s)) for s in (4, 8, 16, 32)]
    assert [tuple(level.shape) for level in levels] == expected


def ramp(stride: float, cells: tuple[int, int]) -> Tensor:
    """(1, 2, h, w): the image's y and x in pixels at the centre of every cell."""
    y, x = (stride * (torch.arange(n, dtype=torch.float64) + 0.5) for n in cells)
    return torch.stack(torch.meshgrid(y, x, indexing="ij"))[None]


def test_patches_of_14_are_sampled_at_exact_strides():
    pyramid = Pyramid([2] * 4, 14, "BN").double()
    with torch.no_grad():
        for parameter in pyramid.parameters():
            parameter.zero_()
        for channel in range(2):
            # One deconvolution that only repeats every cell: stride 14 becomes 7.
            pyramid.steps[1][0].weight[channel, channel] = 1
    levels = pyramid([ramp(14, (16, 20))] * 4, (224, 280))
    # The third level goes from 14 to 16 pixels per cell; at the edge there is nothing to interpolate with.
    torch.testing.assert_close(levels[2], ramp(16, (14, 18))[..., :14, :18].clamp(max=273))
    # A cell of 8 pixels centred at 8 (i + 1/2) is read off cells of 7, each of which holds its parent's centre.
    doubled = ramp(14, (16, 20)).repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert levels[1].shape == (1, 2, 28, 35)
    for i, j in ((3, 5), (10, 20), (17, 30)):
        row, column = (8 * (i + 0.5)) / 7 - 0.5, (8 * (j + 0.5)) / 7 - 0.5
        top, left = int(row), int(column)
        down, across = row - top, column - left
        rows = (1 - down) * doubled[0, :, top] + down * doubled[0, :, top + 1]
        expected = (1 - across) * rows[:, left] + across * rows[:, left + 1]
        torch.testing.assert_close(levels[1][0, :, i, j], expected)


def test_maps_of_a_padded_image_span_the_image():
    maps = at_patch_stride([ramp(14, (5, 6))], 14, (64, 80))
    y, x = 64 / 5 * (torch.arange(5) + 0.5), 80 / 6 * (torch.arange(6) + 0.5)
    torch.testing.assert_close(maps[0][0, 0, :, 0], y.double().clamp(min=7))
    torch.testing.assert_close(maps[0][0, 1, 0], x.double().clamp(min=7))


def test_maps_of_an_image_that_patches_divide_are_left_alone():
    features = torch.randn(1, 2, 3, 4)
    assert at_patch_stride([features], 16, (48, 64))[0] is features


@pytest.mark.parametrize("size", [(3, 5), (4, 5)])
def test_gradients_go_through_the_sampling(size: tuple[int, int]):
    features = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: resample(x, size, (7 / 8, 7 / 8)), (features,))


def test_padding_is_at_the_right_and_the_bottom():
    images = torch.ones(1, 3, 5, 8)
    padded = pad_to(images, 4)
    assert padded.shape == (1, 3, 8, 8)
    assert padded[..., :5, :].eq(1).all()
    assert padded[..., 5:, :].eq(0).all()
    assert pad_to(padded, 4) is padded
