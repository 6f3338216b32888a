"""The loader of training images: a plain second loop, the same images however they are made, and bad ones."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.data import create_transform
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.loading import explain_worker_death
from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import BadImage, ConfigError, DataError
from ibot_eval.finetuning.augmentation import TrainTransform
from ibot_eval.finetuning.loader import Batch, _pack, _Samples, finish, fitted_batch_size, training_loader
from tests import images
from tests.fakes import Suicidal

TRANSFORM = TrainTransform(24, erasing=0.5)
N = 10


@pytest.fixture
def split(tmp_path: Path) -> FolderSplit:
    """Ten images of noise, in sizes below and above the crops'."""
    files = [f"{i}.png" for i in range(N)]
    for i, file in enumerate(files):
        images.save(tmp_path / file, images.picture(8 + 6 * i, 50 - 4 * i, seed=i))
    return FolderSplit("some", tmp_path, files, np.arange(N) % 3)


def load(split: ImageSplit, **settings: Any) -> list[Batch]:
    chosen: dict[str, Any] = {"batch_size": 4, "seed": 3, "epochs": 2} | settings
    return list(training_loader(split, chosen.pop("transform", TRANSFORM), **chosen))


def assert_equal(ours: Sequence[Batch], theirs: Sequence[Batch]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.indices.tolist(), a.labels.tolist()) == (b.indices.tolist(), b.labels.tolist())
        assert a.replaced == b.replaced
        assert torch.equal(finish(a, TRANSFORM), finish(b, TRANSFORM))


def by_hand(split: ImageSplit, index: int, view: int, seed: int = 3) -> Tensor:
    """timm's whole pipeline, normalisation and erasing among it, with its generators seeded one by one."""
    words = np.random.SeedSequence((1, seed, view, index)).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))
    transform: Any = create_transform(
        24,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.5,
        re_mode="pixel",
    )
    return transform(split.load(index))


def test_equals_a_plain_loop(split: FolderSplit) -> None:
    batches, erased = load(split), 0
    assert len(batches) == 4
    for number, batch in enumerate(batches):
        epoch, start = number // 2, number % 2 * 4
        order = np.random.default_rng((0, 3, epoch)).permutation(N)[start : start + 4]
        assert (batch.images.shape, batch.images.dtype) == ((4, 3, 24, 24), torch.uint8)
        assert batch.indices.tolist() == order.tolist()
        assert batch.labels.tolist() == [i % 3 for i in order]
        assert batch.replaced == 0
        expected = torch.stack([by_hand(split, int(i), epoch) for i in order])
        assert torch.equal(finish(batch, TRANSFORM), expected)
        erased += len(batch.boxes)
    assert 1 < erased < 16


def test_repeated_views_differ(split: FolderSplit) -> None:
    batches = load(split, batch_size=9, repeats=3)
    for epoch, batch in enumerate(batches):
        order = np.random.default_rng((0, 3, epoch)).permutation(N)[:3].repeat(3)
        assert batch.indices.tolist() == order.tolist()
        expected = [by_hand(split, int(i), 3 * epoch + place % 3) for place, i in enumerate(order)]
        assert torch.equal(finish(batch, TRANSFORM), torch.stack(expected))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(split: FolderSplit, workers: int) -> None:
    assert_equal(load(split, workers=workers), load(split))


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4])
def test_resumed_run_is_the_tail_of_the_whole(split: FolderSplit, start: int) -> None:
    assert_equal(load(split, start_step=start), load(split)[start:])


def test_ranks_share_the_images_of_one_process(split: FolderSplit) -> None:
    ranks = [load(split, batch_size=2, world_size=2, rank=rank) for rank in (0, 1)]
    for batch, *halves in zip(load(split), *ranks, strict=True):
        assert batch.indices.tolist() == halves[0].indices.tolist() + halves[1].indices.tolist()
        assert torch.equal(finish(batch, TRANSFORM), torch.cat([finish(half, TRANSFORM) for half in halves]))


def test_accumulated_batches_fill_whole_steps(split: FolderSplit) -> None:
    """Ten images are five batches of two, of which four make two steps of two batches each."""
    batches = load(split, batch_size=2, accumulate=2)
    assert len(batches) == 8
    for i, step in enumerate(load(split)):
        halves = [finish(half, TRANSFORM) for half in batches[2 * i : 2 * i + 2]]
        assert torch.equal(finish(step, TRANSFORM), torch.cat(halves))
    assert_equal(load(split, batch_size=2, accumulate=2, start_step=5), batches[5:])


def test_a_split_smaller_than_a_batch_is_one_batch(split: FolderSplit) -> None:
    batches = load(split, batch_size=64)
    assert [sorted(batch.indices.tolist()) for batch in batches] == [list(range(N))] * 2
    halves = [load(split, batch_size=64, accumulate=3, world_size=1)[i].indices.tolist() for i in range(3)]
    assert [len(half) for half in halves] == [3, 3, 3]
    assert len({i for half in halves for i in half}) == 9


def test_fitted_batch_size() -> None:
    assert fitted_batch_size(1000, 64, 2, 2) == 64
    assert fitted_batch_size(256, 64, 2, 2) == 64
    assert fitted_batch_size(255, 64, 2, 2) == 63
    assert fitted_batch_size(4, 64, 2, 2) == 1
    with pytest.raises(ConfigError, match=r"3 images, fewer than the 4 forward passes .*2 accumulated, on 2 processes"):
        fitted_batch_size(3, 64, 2, 2)
    with pytest.raises(ConfigError, match="0 images"):
        fitted_batch_size(0, 64, 1, 1)


def test_too_few_images_are_said_at_once(split: FolderSplit) -> None:
    """By the call itself, before anything is loaded."""
    with pytest.raises(ConfigError, match="fewer than the 11 forward passes"):
        training_loader(split, TRANSFORM, batch_size=1, accumulate=11, seed=0, epochs=1)


def test_seed_epoch_and_image_change_the_augmentation(split: FolderSplit) -> None:
    for i in range(N):
        images.save(split.path(i), images.picture(60, 60, seed=0))
    batches = load(split, batch_size=N) + load(split, batch_size=N, seed=4)
    pixels = torch.cat([batch.images for batch in batches])
    assert len(torch.unique(pixels.flatten(1), dim=0)) == len(pixels) == 4 * N


def test_the_global_generators_are_left_alone(split: FolderSplit) -> None:
    def draws() -> list[float]:
        return [*torch.rand(2).tolist(), np.random.randn(), random.gauss(0, 1)]

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = draws()
    for workers in (0, 1):
        seed()
        for batch in load(split, workers=workers):
            finish(batch, TRANSFORM)
        assert draws() == expected


def test_batch_moves_as_a_whole(split: FolderSplit) -> None:
    batch = load(split, epochs=1)[0].to("meta")
    tensors = (batch.images, batch.noise, batch.labels, batch.indices)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert finish(batch, TRANSFORM).device.type == "meta"


def test_all_of_a_batch_is_pinned_by_torchs_thread(split: FolderSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned, so the copies to another device stand for it."""
    packed = _pack([_Samples(split, TRANSFORM, 0, skip=False)[0, i] for i in range(3)])
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.to("meta"))
    batch = torch_pin_memory(packed)
    assert isinstance(batch, Batch)
    assert {t.device.type for t in (batch.images, batch.noise, batch.labels, batch.indices)} == {"meta"}


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_names_the_file(split: FolderSplit, workers: int) -> None:
    split.path(6).write_bytes(b"")
    with pytest.raises(BadImage, match=r"6\.png.*0 bytes") as caught:
        load(split, workers=workers, batch_size=N)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_puts_the_same_other_image_in_place(split: FolderSplit, workers: int) -> None:
    whole = load(split)
    for i in (2, 6):
        split.path(i).write_bytes(b"")
    batches = load(split, bad_images="skip", workers=workers)
    assert_equal(batches, load(split, bad_images="skip"))
    stood_in = 0
    for batch, before in zip(batches, whole, strict=True):
        bad = np.isin(before.indices.numpy(), (2, 6))
        assert batch.replaced == bad.sum()
        assert not np.isin(batch.indices.numpy(), (2, 6)).any()
        assert torch.equal(finish(batch, TRANSFORM)[~bad], finish(before, TRANSFORM)[~bad])
        assert batch.labels.tolist() == [i % 3 for i in batch.indices.tolist()]
        stood_in += batch.replaced
    assert stood_in > 0


def test_skip_gives_up_when_nothing_can_be_decoded(split: FolderSplit) -> None:
    for i in range(N):
        split.path(i).write_bytes(b"")
    with pytest.raises(DataError, match="none can be decoded"):
        load(split, bad_images="skip")


def test_a_killed_worker_is_explained() -> None:
    with pytest.raises(DataError, match=r"(?s)process was killed.*memory.*--workers 1"), explain_worker_death():
        load(Suicidal(N), workers=1, batch_size=5)


def test_workers_outlast_the_signals_that_ask_a_run_to_stop(split: FolderSplit) -> None:
    before = set(multiprocessing.active_children())
    loader = training_loader(split, TRANSFORM, batch_size=4, seed=3, epochs=6, workers=1)
    batches = [next(loader)]
    [worker] = set(multiprocessing.active_children()) - before
    for number in (signal.SIGINT, signal.SIGTERM):
        assert worker.pid is not None
        os.kill(worker.pid, number)
    with explain_worker_death():
        batches += list(loader)
    assert_equal(batches, load(split, epochs=6))


def test_leaving_early_stops_the_workers(split: FolderSplit) -> None:
    before = set(multiprocessing.active_children())
    loader = training_loader(split, TRANSFORM, batch_size=2, seed=0, epochs=5, workers=2)
    next(loader)
    ours = set(multiprocessing.active_children()) - before
    assert len(ours) == 2
    loader.close()
    assert not ours & set(multiprocessing.active_children())
