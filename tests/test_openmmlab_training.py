"""Training and testing of mmengine models: data, results, files, and what goes wrong."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ibot_eval.errors import BadImage, CheckpointError, ConfigError, DataError
from ibot_eval.training.finite import NotFinite
from ibot_eval.training.logs import read_log

pytest.importorskip("mmengine")

from mmengine.runner import load_checkpoint

from protocols.openmmlab import configuration, evaluation, model_file, parallel, training
from protocols.openmmlab.seeded_data import EvaluationData, TrainingData
from tests import dense_training
from tests.dense_training import IMAGES, TESTS, TinyModel, described, run, session


def data(rank: int = 0, world: int = 1, seed: int = 0, skip: bool = False, **loader: Any) -> TrainingData:
    whole = {"batch_size": 3, "dataset": {"type": "TinyData"}, **loader}
    return TrainingData(whole, seed, rank, world, skip=skip)


def drawn(source: TrainingData, first: int, last: int) -> list[tuple[list[int], list[np.ndarray]]]:
    return [(batch["places"], [image.numpy() for image in batch["inputs"]]) for batch, _ in source.batches(first, last)]


def test_an_epoch_has_each_image_once_and_ranks_share_it() -> None:
    one, two = data(), [data(rank, 2) for rank in range(2)]
    assert len(one) == 4
    assert len(two[0]) == 2
    orders = [one.order(epoch) for epoch in range(3)]
    assert all(len(set(order.ravel())) == order.size == 12 for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    # What both ranks have of an iteration, one process has in two: the images and their augmentation.
    alone, shared = drawn(one, 0, 4), [drawn(part, 0, 2) for part in two]
    for step, rank in itertools.product(range(2), range(2)):
        places, images = shared[rank][step]
        assert places == alone[2 * step + rank][0]
        np.testing.assert_array_equal(images, alone[2 * step + rank][1])


def test_batches_do_not_depend_on_what_came_before() -> None:
    whole = drawn(data(), 0, 10)
    for others in (drawn(data(), 6, 10), drawn(data(num_workers=2), 6, 10)):
        assert [places for places, _ in others] == [places for places, _ in whole[6:]]
        np.testing.assert_array_equal([i for _, i in others], [i for _, i in whole[6:]])
    # Another epoch, and another seed, have other augmentation of an image.
    other = drawn(data(seed=1), 0, 10)
    views = [
        image for places, images in [*whole, *other] for place, image in zip(places, images, strict=True) if not place
    ]
    assert len(views) >= 3
    assert all(not np.array_equal(a, b) for a, b in itertools.combinations(views, 2))


def test_the_global_generators_stay_as_they_are() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    drawn(data(), 0, 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_batches_of_one_shape() -> None:
    """Even numbers are upright, odd ones oblong; at most one batch of an epoch has both."""
    grouped = data(batch_sampler={"type": "AspectRatioBatchSampler"})
    seen: set[int] = set()
    for epoch in range(6):
        order = grouped.order(epoch)
        seen |= set(order.ravel())
        assert len(set(order.ravel())) == order.size == 12
        assert sum(len({i % 2 for i in batch}) == 2 for batch in order.reshape(-1, 3)) <= 1
    assert seen == set(range(IMAGES))


def test_few_images_make_smaller_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = data(world=2, batch_size=16)
    assert (small.batch_size, small.images_per_step, len(small)) == (6, 12, 1)
    with pytest.raises(ConfigError, match="fewer than the 20 processes"):
        data(world=20)
    run(tmp_path, configuration.finish(described(train_dataloader__batch_size=50, train_cfg__max_iters=1)))
    assert "13 images make batches of 13, not of 50" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_decoded(tmp_path: Path, workers: int) -> None:
    (tmp_path / "3.png").write_text("no image")
    dataset = {"type": "TinyData", "bad": [3], "folder": str(tmp_path)}
    with pytest.raises(BadImage, match=r"3\.png cannot be decoded[\s\S]*--bad-images skip"):
        drawn(data(dataset=dataset, num_workers=workers), 0, 8)
    first, again = (data(dataset=dataset, num_workers=workers, skip=True) for _ in range(2))
    batches = [(batch["places"], replaced) for batch, replaced in first.batches(0, 8)]
    assert sum(replaced for _, replaced in batches) == sum(3 in order for order in (first.order(0), first.order(1)))
    assert all(3 not in places for places, _ in batches)
    assert batches[5:] == [(batch["places"], replaced) for batch, replaced in again.batches(5, 8)]
    every = {**dataset, "bad": list(range(IMAGES))}
    for index in range(IMAGES):
        (tmp_path / f"{index}.png").write_text("no image")
    with pytest.raises(DataError, match="none can be decoded"):
        drawn(data(dataset=every, num_workers=workers, skip=True), 0, 1)


def test_a_fault_of_the_pipeline_is_no_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its own name where the file is sound."""
    for index in range(IMAGES):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{index}.png")
    monkeypatch.setattr(dense_training.TinyData, "prepare_data", lambda self, i: {}["crop"])
    with pytest.raises(KeyError, match="crop"):
        drawn(data(dataset={"type": "TinyData", "folder": str(tmp_path)}, skip=True), 0, 1)


def test_a_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: Any, index: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(dense_training.TinyData, "prepare_data", die)
    with pytest.raises(DataError, match="data-loading process was killed"):
        drawn(data(num_workers=1), 0, 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_test_images(world: int) -> None:
    parts = []
    for rank in range(world):
        loader = {"batch_size": 2, "dataset": {"type": "TinyData", "images": TESTS, "test_mode": True}}
        part = EvaluationData(loader, 0, rank, world)
        places = [place for batch in part.batches() for place in batch["places"]]
        assert places == list(part.indices)
        parts += places
    assert sorted(parts) == list(range(TESTS))


def test_results_log_and_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained = run(tmp_path)
    assert capfd.readouterr() == ("", "")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoints", "log.jsonl", "mmengine.log", "model.pth", ".lock"}
    logits = trained.results["tiny/logits"]
    assert trained.results["tiny/places"].tolist() == list(range(TESTS))
    rows = read_log(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows if row.get("event") == "test"] == [5, 10, 14]
    assert rows[-1]["tiny/right"] == trained.results["tiny/right"]
    losses = [row for row in rows if "loss" in row]
    assert all(row["loss"] == pytest.approx(row["loss_class"] + row["loss_size"]) for row in losses)
    # The rate that an iteration had: warm-up from a tenth within four of them, then to 0 in the last.
    ramp = [0.05 * (0.1 + 0.9 * i / 3) for i in range(4)] + [0.05 * (1 - i / 9) for i in range(10)]
    assert [row["lr"] for row in losses] == pytest.approx([ramp[row["step"] - 1] for row in losses])
    assert all(0 < row["gradient_norm"] < 100 and 0 <= row["data_wait"] <= 1 for row in losses)
    # The model is mmengine's, and gives these results again, from the file and from the weights.
    state = torch.load(trained.path, weights_only=True)
    assert state["meta"]["dataset_meta"]["classes"] == ("red", "green", "blue")
    assert "TinyModel" in state["meta"]["cfg"]
    load_checkpoint(TinyModel(), str(trained.path), map_location="cpu")
    for source in (trained.path, state["state_dict"]):
        tested = training.test(configuration.finish(described()), session(tmp_path / "test"), source)
        np.testing.assert_array_equal(tested.results["tiny/logits"], logits)
        assert not tested.model.training


def test_which_results_are_numbers() -> None:
    results = {"a": 1, "b": np.float32(2), "c": torch.tensor(3.0), "d": np.zeros(3), "e": "x", "f": None, "g": [1]}
    assert evaluation.scalars(results) == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_training_learns(tmp_path: Path) -> None:
    """The loop does train: from chance to all of the images it has seen."""
    config = described(
        train_cfg={"by_epoch": False, "max_iters": 60},
        param_scheduler=None,
        model__width=16,
        test_dataloader__dataset={"type": "TinyData", "test_mode": True},
    )
    trained = run(tmp_path, configuration.finish(config), save_minutes=10)
    assert trained.results["tiny/right"] > 90


def test_no_looks_and_no_test(tmp_path: Path) -> None:
    config = configuration.finish(described(train_cfg={"by_epoch": False, "max_iters": 3, "val_interval": 0}))
    run(tmp_path / "one", config)
    trained = run(tmp_path / "two", config, train_only=True)
    assert [r["step"] for r in read_log(tmp_path / "one" / "log.jsonl") if r.get("event") == "test"] == [3]
    assert [r["step"] for r in read_log(tmp_path / "two" / "log.jsonl")] == [2, 3]
    assert trained.results == {}


def test_a_length_is_needed() -> None:
    cfg = configuration.finish(described(train_cfg={"by_epoch": False, "max_iters": 0}))
    with pytest.raises(ConfigError, match="how long to train"):
        training.plan_of(cfg, 4, 1, 1, evaluate=True)


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="the loss is NaN or infinite at step 1"):
        run(tmp_path, configuration.finish(described(model__scale=1e300)))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__type": "TinyModle"}, "TinyModle is not in the"),
        ({"model__wdth": 3}, "unexpected keyword argument 'wdth'"),
        ({"test_evaluator": {"type": "Nothing"}}, "Nothing is not in the"),
        ({"optim_wrapper__optimizer__type": "Adamm"}, "cannot be built: None is not a callable"),
        ({"param_scheduler": {"type": "Nothing"}}, "Nothing is not in the"),
    ],
)
def test_a_configuration_that_cannot_be_built(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, configuration.finish(described(**changes)))


def test_weights_of_another_model(tmp_path: Path) -> None:
    weights = TinyModel(width=4).state_dict()
    del weights["head.bias"]
    weights["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"tensors do not fit[\s\S]*conv\.bias has shape \(4,\)"):
        training.test(configuration.finish(described()), session(tmp_path), weights)


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(TinyModel, "forward", fail)
    with pytest.raises(ConfigError, match=r"batches of 4 in fp32: CUDA out of memory[^\n]*\n.*--train-batch"):
        run(tmp_path)


def test_weights_without_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Expected to have finished reduction … by passing `find_unused_parameters=True` …")

    monkeypatch.setattr(TinyModel, "forward", fail)
    with pytest.raises(ConfigError, match="--set find_unused_parameters=True"):
        run(tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_file, "atomic_open", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run(tmp_path)


def test_half_precision_is_for_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, half = run(tmp_path / "full"), run(tmp_path / "half", precision="bf16")
    assert "bf16 is slower than fp32 on the CPU" in capsys.readouterr().err
    np.testing.assert_array_equal(full.results["tiny/logits"], half.results["tiny/logits"])
    amp = described(optim_wrapper__type="AmpOptimWrapper", optim_wrapper__dtype="bfloat16")
    run(tmp_path / "amp", configuration.finish(amp))
    with pytest.raises(ConfigError, match="fp16 overflows"):
        run(tmp_path / "fp16", precision="fp16")


def test_in_bf16_asks_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match="no bfloat16"):
        parallel.in_bf16("bf16", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert parallel.in_bf16("bf16", torch.device("cuda"))
    assert not parallel.in_bf16("bf16", torch.device("cpu"))
    assert not parallel.in_bf16("fp32", torch.device("cuda"))


def test_synced_batch_norm_in_one_process(tmp_path: Path) -> None:
    run(tmp_path, configuration.finish(described(model__norm="SyncBN")))
