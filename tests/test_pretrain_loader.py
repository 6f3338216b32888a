"""The loader of crops: the same samples however they are made, bad images, killed workers, unlabelled data."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.loading import explain_worker_death
from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import BadImage, ConfigError, DataError
from pretrain.augment import Augmentation
from pretrain.loader import CropBatch, _pack, crop_loader, finish
from pretrain.masking import Masking, masked_positions
from pretrain.samples import Samples
from tests.fakes import Suicidal

from . import images

SMALL = Augmentation(global_size=32, local_size=16, local_crops=3, rotation=5)
MASKS = Masking((0.0, 0.5), (0.0, 0.1))
N = 10


@pytest.fixture
def split(tmp_path: Path) -> FolderSplit:
    """Ten images of noise, in sizes below and above the crops'."""
    files = [f"{i}.png" for i in range(N)]
    for i, file in enumerate(files):
        images.save(tmp_path / file, images.picture(8 + 6 * i, 50 - 4 * i, seed=i))
    return FolderSplit("some", tmp_path, files, np.arange(N) % 3)


def _load(split: ImageSplit, **settings: Any) -> list[CropBatch]:
    chosen: dict[str, Any] = {"mask_cell": 8, "batch_size": 4, "seed": 3, "epochs": 2} | settings
    return list(crop_loader(split, chosen.pop("augmentation", SMALL), chosen.pop("masking", MASKS), **chosen))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, CropBatch):
        value = [value.globals, value.locals, value.global_masks, value.local_masks, value.indices, value.labels]
    return [tensor for item in value if item is not None for tensor in _tensors(item)]


def _assert_equal(ours: Sequence[CropBatch], theirs: Sequence[CropBatch]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(_tensors([a, finish(a, SMALL)]), _tensors([b, finish(b, SMALL)]), strict=True):
            assert torch.equal(x, y)


def test_shapes_and_order(split: FolderSplit) -> None:
    batches = _load(split, mask_crops="all")
    assert len(batches) == 4
    for batch in batches:
        assert (batch.globals.shape, batch.globals.dtype) == ((2, 4, 3, 32, 32), torch.uint8)
        assert (batch.locals.shape, batch.locals.dtype) == ((3, 4, 3, 16, 16), torch.uint8)
        assert batch.labels.tolist() == [i % 3 for i in batch.indices.tolist()]
        assert batch.replaced == 0
        for masks, masked, shape in (
            (batch.global_masks, batch.global_masked, (8, 4, 4)),
            (batch.local_masks, batch.local_masked, (12, 2, 2)),
        ):
            assert masks is not None
            assert masked is not None
            assert (masks.shape, masks.dtype) == (shape, torch.bool)
            expected = masked_positions(masks.numpy(), 16)
            assert torch.equal(masked.index, expected.index)
            assert torch.equal(masked.weight, expected.weight)
        global_images, local_images = finish(batch, SMALL)
        assert local_images is not None
        assert (global_images.shape, global_images.dtype) == ((8, 3, 32, 32), torch.float32)
        assert (local_images.shape, local_images.dtype) == ((12, 3, 16, 16), torch.float32)
    epochs = [torch.cat([batch.indices for batch in batches[i : i + 2]]).tolist() for i in (0, 2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert len(set(epoch)) == 8  # of ten images, two sit the epoch out


def test_crops_come_before_images(split: FolderSplit) -> None:
    """Row g * B + b of the finished crops is crop g of image b, and so are the masks' rows."""
    plain = Augmentation(
        global_size=32, local_size=8, local_crops=2, flip=0, jitter_probability=0, grey=0, blur=(0, 0, 0),
        solarise=(0, 0, 0), mean=(0, 0, 0), std=(1 / 255,) * 3,
    )  # fmt: skip
    for i in range(N):
        images.save(split.path(i), np.full((20, 20, 3), 10 * i, np.uint8))
    [batch] = _load(split, augmentation=plain, epochs=1, batch_size=N)
    for crops, n in zip(finish(batch, plain), (2, 2), strict=True):
        assert crops is not None
        assert crops[:, 1, 3, 3].round().tolist() == [10.0 * i for i in batch.indices.tolist()] * n
    one = _load(split, augmentation=plain, epochs=1, batch_size=N, mask_crops="one-global")[0].global_masks
    assert batch.global_masks is not None
    assert one is not None
    assert torch.equal(one[:N], batch.global_masks[:N])
    assert batch.global_masks[N:].any()
    assert not one[N:].any()


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(split: FolderSplit, workers: int) -> None:
    _assert_equal(_load(split, workers=workers, mask_crops="all"), _load(split, mask_crops="all"))


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4])
def test_resumed_run_is_the_tail_of_the_whole(split: FolderSplit, start: int) -> None:
    _assert_equal(_load(split, start_step=start), _load(split)[start:])


def test_ranks_share_the_samples_of_one_process(split: FolderSplit) -> None:
    whole = _load(split)
    ranks = [_load(split, batch_size=2, world_size=2, rank=rank) for rank in (0, 1)]
    for batch, *halves in zip(whole, *ranks, strict=True):
        assert batch.indices.tolist() == halves[0].indices.tolist() + halves[1].indices.tolist()
        assert torch.equal(batch.globals, torch.cat([half.globals for half in halves], 1))
        assert torch.equal(batch.locals, torch.cat([half.locals for half in halves], 1))
        together = finish(batch, SMALL)[0].unflatten(0, (2, 4))
        assert torch.equal(together, torch.cat([finish(half, SMALL)[0].unflatten(0, (2, 2)) for half in halves], 1))
        masks = [b.global_masks.unflatten(0, (2, -1)) for b in (batch, *halves) if b.global_masks is not None]
        assert torch.equal(masks[0], torch.cat(masks[1:], 1))


def test_seed_epoch_crop_and_image_change_the_crops(split: FolderSplit) -> None:
    for i in range(N):
        images.save(split.path(i), images.picture(60, 60, seed=0))
    batches = _load(split, batch_size=N) + _load(split, batch_size=N, seed=4)
    crops = torch.cat([batch.globals.flatten(0, 1) for batch in batches])
    assert len(torch.unique(crops.flatten(1), dim=0)) == len(crops) == 3 * 2 * N + 2 * N
    masks = [
        b.global_masks.flatten(1)
        for b in _load(split, batch_size=N, masking=Masking((0.5,), (0.1,)))
        if b.global_masks is not None
    ]
    assert len(torch.unique(torch.cat(masks), dim=0)) > 35


def test_masks_do_not_change_the_crops(split: FolderSplit) -> None:
    for masked, plain in zip(_load(split), _load(split, masking=None), strict=True):
        assert torch.equal(masked.globals, plain.globals)
        assert plain.global_masks is plain.global_masked is plain.local_masks is plain.local_masked is None


def test_masks_start_at_their_epoch(split: FolderSplit) -> None:
    batches = _load(split, masking=Masking((0.5,), (0.0,), start_epoch=1))
    counts = [batch.global_masked.count for batch in batches if batch.global_masked is not None]
    assert counts[:2] == [0, 0]
    assert min(counts[2:]) > 0
    assert batches[0].global_masked is not None
    assert batches[0].global_masked.index.tolist() == [0] * 16


def test_no_local_crops_and_a_batch_of_one(split: FolderSplit) -> None:
    bare = Augmentation(global_size=32, local_crops=0)
    batches = _load(split, augmentation=bare, batch_size=1, epochs=1, mask_crops="all")
    assert len(batches) == N
    global_images, local_images = finish(batches[0], bare)
    assert global_images.shape == (2, 3, 32, 32)
    assert local_images is None
    assert batches[0].local_masks is None


def test_unlabelled(split: FolderSplit) -> None:
    split.labels = np.full(N, -1)
    assert {label for batch in _load(split) for label in batch.labels.tolist()} == {-1}


def test_batch_moves_as_a_whole(split: FolderSplit) -> None:
    batch = _load(split, mask_crops="all", epochs=1)[0].to("meta")
    assert {tensor.device.type for tensor in _tensors(batch)} == {"meta"}
    assert batch.global_masked is not None
    assert batch.global_masked.weight.device.type == batch.global_changes.values.device.type == "meta"
    assert batch.global_changes.moves is not None
    assert batch.global_changes.index.device.type == batch.global_changes.moves.matrices.device.type == "meta"


def test_all_of_a_batch_is_pinned_by_torchs_thread(split: FolderSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned, so the copies to another device stand for it."""
    packed = _pack([Samples(split, SMALL, MASKS, "all", 8, 0, skip=False)[0, i] for i in range(3)])
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.to("meta"))
    batch = torch_pin_memory(packed)
    assert isinstance(batch, CropBatch)
    assert {tensor.device.type for tensor in _tensors(batch)} == {"meta"}
    assert batch.global_changes.index.device.type == "meta"


def test_finish_ignores_autocast(split: FolderSplit) -> None:
    batch = _load(split, epochs=1)[0]
    expected = finish(batch, SMALL)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(finish(batch, SMALL)[0], expected)


def test_the_global_generators_are_left_alone(split: FolderSplit) -> None:
    def draws() -> tuple[list[float], float]:
        return torch.rand(2).tolist(), np.random.rand()

    torch.manual_seed(3)
    np.random.seed(3)
    expected = draws()
    torch.manual_seed(3)
    np.random.seed(3)
    for batch in _load(split, workers=1):
        finish(batch, SMALL)
    assert draws() == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_names_the_file(split: FolderSplit, workers: int) -> None:
    split.path(6).write_bytes(b"")
    with pytest.raises(BadImage, match=r"6\.png.*0 bytes") as caught:
        _load(split, workers=workers, batch_size=N)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_puts_the_same_other_image_in_place(split: FolderSplit, workers: int) -> None:
    whole = _load(split)
    for i in (2, 6):
        split.path(i).write_bytes(b"")
    batches = _load(split, bad_images="skip", workers=workers)
    _assert_equal(batches, _load(split, bad_images="skip", batch_size=4))
    stood_in = 0
    for batch, before in zip(batches, whole, strict=True):
        bad = np.isin(before.indices.numpy(), (2, 6))
        assert batch.replaced == bad.sum()
        assert not np.isin(batch.indices.numpy(), (2, 6)).any()
        assert torch.equal(batch.globals[:, ~bad], before.globals[:, ~bad])
        assert batch.labels.tolist() == [i % 3 for i in batch.indices.tolist()]
        stood_in += batch.replaced
    assert stood_in > 0


def test_skip_gives_up_when_nothing_can_be_decoded(split: FolderSplit) -> None:
    for i in range(N):
        split.path(i).write_bytes(b"")
    with pytest.raises(DataError, match="none can be decoded"):
        _load(split, bad_images="skip")


def test_unreadable_files_stop_even_with_skip(split: FolderSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(DataError, match="no permission"):
        _load(split, bad_images="skip")


def test_a_killed_worker_is_explained() -> None:
    with pytest.raises(DataError, match=r"(?s)process was killed.*memory.*--workers 1"), explain_worker_death():
        _load(Suicidal(N), workers=1, batch_size=5)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()  # the end of another process does not bring the error back


def test_workers_outlast_the_signals_that_ask_a_run_to_stop(split: FolderSplit) -> None:
    before = set(multiprocessing.active_children())
    loader = crop_loader(split, SMALL, MASKS, mask_cell=8, batch_size=4, seed=3, epochs=6, workers=1)
    batches = [next(loader)]
    [worker] = set(multiprocessing.active_children()) - before
    for number in (signal.SIGINT, signal.SIGTERM):
        assert worker.pid is not None
        os.kill(worker.pid, number)
    with explain_worker_death():
        batches += list(loader)
    _assert_equal(batches, _load(split, epochs=6))


def test_accumulated_batches_fill_whole_steps(split: FolderSplit) -> None:
    """Ten images are five batches of two, of which four make two steps of two batches each."""
    batches = _load(split, batch_size=2, accumulate=2)
    whole = _load(split, batch_size=4)
    assert len(batches) == 2 * len(whole) == 8
    for i, step in enumerate(whole):
        halves = batches[2 * i : 2 * i + 2]
        assert torch.equal(step.globals, torch.cat([half.globals for half in halves], 1))
    _assert_equal(_load(split, batch_size=2, accumulate=2, start_step=6), batches[6:])
    with pytest.raises(ConfigError, match="fewer than one batch"):
        _load(split, batch_size=4, accumulate=3)


def test_leaving_early_stops_the_workers(split: FolderSplit) -> None:
    before = set(multiprocessing.active_children())
    loader = crop_loader(split, SMALL, None, batch_size=2, seed=0, epochs=5, workers=2)
    next(loader)
    ours = set(multiprocessing.active_children()) - before
    assert len(ours) == 2
    loader.close()
    assert not ours & set(multiprocessing.active_children())


def test_what_is_wrong_is_said_at_once(split: FolderSplit) -> None:
    """By the call itself, before anything is loaded."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 11}, "fewer than one batch"),
        ({"mask_cell": 12}, "global crops of 32 pixels do not divide into mask cells of 12"),
        ({"mask_cell": 32, "mask_crops": "all"}, "local crops of 16 pixels"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            crop_loader(split, SMALL, MASKS, **({"batch_size": 4, "seed": 0, "epochs": 1} | settings))
    crop_loader(split, SMALL, None, mask_cell=12, batch_size=4, seed=0, epochs=1)
