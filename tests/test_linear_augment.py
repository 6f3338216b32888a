"""linear-augment: heads trained one by one as reference, bad input, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import functional as F

from ibot_eval.backbone import Outputs
from ibot_eval.checkpoint import load_checkpoint
from ibot_eval.data.arrays import open_demo
from ibot_eval.data.random_crops import RandomCrops
from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import EvalTransform, eval_transform
from ibot_eval.errors import BadImage, ConfigError, DataError
from ibot_eval.probes import augmented_probe
from ibot_eval.probes.head_file import load_head
from ibot_eval.probes.holdout import hold_out
from ibot_eval.probes.labelled import Labelled
from ibot_eval.probes.linear_probe import ProbeSettings, train_probe
from ibot_eval.protocol import Artifact
from ibot_eval.settings import CheckpointSettings, DataSettings
from ibot_eval.testing import check_events, check_protocol
from protocols.linear_augment import LinearAugment, LinearAugmentConfig
from tests.augmented_runs import CONFIG, RATES, run, session
from tests.fakes import TRANSFORM, FakeBackbone, FakeSplit


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def features(backbone: Any, images: list[Tensor], transform: EvalTransform, blocks: tuple[int, ...]) -> Tensor:
    backbone.eval()
    with torch.no_grad():
        outputs = backbone.outputs(transform.normalize(torch.stack(images)), blocks)
    return torch.cat([block.cls for block in outputs.blocks], 1)


def one_by_one(train: FakeSplit, test: FakeSplit, seed: int) -> dict[str, Any]:
    """CONFIG's run written plainly: a network of two nn.Linear for each rate, torch.optim, and a choice at the end."""
    backbone, blocks, epochs, batch = FakeBackbone(), (-3, -1), CONFIG.epochs, 7
    readable = np.array([i not in train.bad for i in range(len(train))])
    held = hold_out(train.labels, 0.1, seed)
    x = {
        role: features(backbone, [TRANSFORM(split.load(int(i))) for i in rows], TRANSFORM, blocks)
        for role, split, rows in (
            ("held", train, np.flatnonzero(held & readable)),
            ("test", test, [i for i in range(len(test)) if i not in test.bad]),
        )
    }
    y = {
        "held": torch.from_numpy(train.labels[held & readable]),
        "test": torch.from_numpy(np.delete(test.labels, sorted(test.bad))),
    }
    start = torch.empty(3, 12).normal_(0, 0.01, generator=torch.Generator().manual_seed(seed))
    pairs = []
    for lr in RATES:
        heads = nn.ModuleList(nn.Linear(12, 3) for _ in range(2))
        for head in heads:
            head.weight.data.copy_(start)  # pyright: ignore
            head.bias.data.zero_()  # pyright: ignore
        pairs.append((lr, heads, torch.optim.SGD(heads.parameters(), lr, momentum=0.9)))
    steps = -(-len(train) // batch)
    seen = []
    for step in range(epochs * steps):
        epoch = step // steps + 1
        order = np.random.default_rng([seed, epoch]).permutation(len(train))
        rows = [int(i) for i in np.array_split(order, steps)[step % steps] if readable[i]]
        crops = RandomCrops(train, 8, seed, epoch)
        inputs = features(backbone, [F.pil_to_tensor(crops.load(i)) for i in rows], TRANSFORM, blocks)
        counts = torch.from_numpy(np.stack([~held[rows], np.ones(len(rows), bool)])).float()
        for lr, heads, optimizer in pairs:
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + np.cos(np.pi * step / (epochs * steps)))
            optimizer.zero_grad()
            for head, count in zip(heads, counts, strict=True):
                losses = nn.functional.cross_entropy(
                    head(inputs), torch.from_numpy(train.labels[rows]), reduction="none"
                )
                ((losses * count).sum() / count.sum().clamp(min=1)).backward()
            optimizer.step()
            if step % steps == steps - 1:
                with torch.no_grad():
                    logits = {"held": heads[0](x["held"]), "test": heads[1](x["test"])}
                right = {role: int((values.argmax(1) == y[role]).sum()) for role, values in logits.items()}
                loss = {role: float(nn.functional.cross_entropy(v, y[role])) for role, v in logits.items()}
                keys = {role: (-right[role], round(loss[role], 5), lr, epoch) for role in right}
                seen.append((keys, heads[1].weight.detach().clone(), logits["test"].argmax(1).numpy()))  # pyright: ignore
    chosen = min(seen, key=lambda s: s[0]["held"])
    best = min(seen, key=lambda s: s[0]["test"])
    return {
        "weight": chosen[1],
        "predicted": chosen[2],
        "lr": chosen[0]["held"][2],
        "epoch": chosen[0]["held"][3],
        "best": (100 * -best[0]["test"][0] / len(y["test"]), best[0]["test"][2], best[0]["test"][3]),
    }


@pytest.mark.parametrize(("seed", "bad"), [(0, ()), (1, (2, 30, 31))])
def test_equals_heads_trained_one_by_one(seed: int, bad: tuple[int, ...], tmp_path: Path) -> None:
    train, test = FakeSplit(40, bad=bad), FakeSplit(25, "test", bad=bad[:1])
    wanted = one_by_one(train, test, seed)
    config = LinearAugmentConfig(**{**vars(CONFIG), "save_head": True})
    where = session(tmp_path / "run", train, test, seed=seed, bad_images="skip" if bad else "stop", batch_size=4)
    metrics, predictions, warnings, events = run(config, where)
    check_events("linear-augment", LinearAugment, events)
    assert (metrics["top1"].params["lr"], metrics["top1"].params["epoch"]) == (wanted["lr"], wanted["epoch"])
    head = load_head(tmp_path / "run")
    torch.testing.assert_close(head.weight, wanted["weight"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(predictions.values["top1"], wanted["predicted"])
    best = metrics["top1_best_on_test"]
    assert (best.value, best.params["lr"], best.params["epoch"]) == pytest.approx(wanted["best"])
    assert best.n == metrics["top1"].n == 25 - len(bad[:1])
    if bad:
        assert warnings == [
            "unreadable images of train, left out: 3 ('train/002.png', 'train/030.png', 'train/031.png')",
            "unreadable images of test, left out: 1 ('test/002.png')",
        ]
        assert "test/002.png" not in predictions.image_ids
    else:
        assert warnings == []


class NotCropped(ImageSplit):
    """In the place of RandomCrops: the images that evaluation sees."""

    def __init__(self, split: ImageSplit, size: int, seed: int, epoch: int) -> None:
        self.split, self.name, self.image_ids, self.labels = split, split.name, split.image_ids, split.labels
        self.transform = EvalTransform(size, size, "bicubic", (0, 0, 0), (1, 1, 1))

    def load(self, i: int) -> Image.Image:
        return F.to_pil_image(self.transform(self.split.load(i)))

    def _fingerprint(self) -> str:
        return ""

    def take(self, indices: Any) -> ImageSplit:
        raise NotImplementedError


def test_without_augmentation_it_is_the_probe_of_banks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On digits, with the demonstration network and the whole grid."""
    monkeypatch.setattr(augmented_probe, "RandomCrops", NotCropped)
    data = open_demo(["train", "test"])
    train, test = data.splits["train"].take(np.arange(0, 1352, 10)), data.splits["test"].take(np.arange(0, 445, 5))
    backbone = load_checkpoint(CheckpointSettings(ckpt="demo")).backbone
    transform = eval_transform(DataSettings(data="demo"), backbone)
    banks = [
        Labelled(
            features(backbone, [transform(s.load(i)) for i in range(len(s))], transform, (-3, -2, -1)).numpy(),
            s.labels,
            s.image_ids,
        )
        for s in (train, test)
    ]
    wanted = train_probe(banks[0], banks[1], ProbeSettings(epochs=4), device=torch.device("cpu"), seed=3)
    protocol = LinearAugment(LinearAugmentConfig(epochs=4, save_head=True)).for_network(
        backbone, transform, frozenset()
    )
    metrics, predictions, _, _ = run(
        protocol.config, session(tmp_path / "run", train, test, transform, seed=3), backbone
    )
    np.testing.assert_array_equal(predictions.values["top1"], wanted.predicted)
    np.testing.assert_array_equal(predictions.values["label"], test.labels)
    assert metrics["top1"].params["lr"] == pytest.approx(wanted.setting.lr)
    assert metrics["top1"].params["epoch"] == wanted.epoch
    assert (predictions.values["top1"] == test.labels).mean() > 0.8, "a head of digits works"
    assert metrics["top5"].value == pytest.approx(100 * wanted.in_top5.mean())
    assert metrics["top1_best_on_test"].value == pytest.approx(wanted.best_on_test)
    head = load_head(tmp_path / "run")
    torch.testing.assert_close(head.weight, wanted.weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(head.bias, wanted.bias, rtol=1e-3, atol=1e-4)
    assert [part["block"] for part in head.features] == [-3, -2, -1]
    logits = head.logits(torch.from_numpy(banks[1].features))
    np.testing.assert_array_equal(np.array(head.labels)[logits.argmax(1).numpy()], wanted.predicted)


def test_neither_workers_nor_batch_size_matter(tmp_path: Path) -> None:
    train, test = FakeSplit(40), FakeSplit(25, "test")
    results = []
    for index, (batch_size, workers) in enumerate(((64, 0), (3, 0), (5, 2))):
        where = session(tmp_path / str(index), train, test, batch_size=batch_size, workers=workers)
        run(CONFIG, where)
        results.append(json.loads((where.output / "sweep.json").read_text()))
    assert results[0] == results[1] == results[2]
    assert len(results[0]["settings"]) == 3


def labelled_as(labels: list[int], name: str = "train") -> FakeSplit:
    split = FakeSplit(len(labels), name)
    split.labels = np.array(labels, dtype=np.int64)
    return split


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        ([0] * 8, [0, 0, 0], "one class"),
        ([0, 1, 2], [0, 1, 2], "no class of train has an image to hold out"),
        ([0] * 4 + [2] * 4, [0, 1, 2], "1 of 3 test images count as wrong"),
    ],
)
def test_small_and_odd_data_work_with_a_warning(train: list[int], test: list[int], said: str, tmp_path: Path) -> None:
    metrics, predictions, warnings, events = run(
        CONFIG, session(tmp_path / "run", labelled_as(train), labelled_as(test, "test"))
    )
    check_events("linear-augment", LinearAugment, events)
    assert said in " ".join(warnings)
    right = (predictions.values["top1"] == test).mean()
    assert metrics["top1"].value == pytest.approx(100 * right)
    assert set(predictions.values["top1"]) <= set(train)


class NaNLater(FakeBackbone):
    def outputs(self, *arguments: Any, **options: Any) -> Outputs:
        self.nan_at = 1 if self.passes > 3 else None
        return super().outputs(*arguments, **options)


def test_features_that_are_not_finite_name_an_image(tmp_path: Path) -> None:
    train, test = FakeSplit(20), FakeSplit(9, "test")
    with pytest.raises(DataError, match=r"test/000.png \(test split\) are NaN"):
        run(CONFIG, session(tmp_path / "run", train, test), FakeBackbone(nan_at=0))
    order = np.random.default_rng([0, 1]).permutation(20)
    # Passes: test, held-out, then training in batches of 7 (20 images: 7, 7, 6).
    named = train.image_ids[order[14 + 1]]
    with pytest.raises(DataError, match=f"a crop of '{named}'"):
        run(CONFIG, session(tmp_path / "run", train, test), NaNLater())


def test_data_that_cannot_be_used_are_refused_before_any_pass(tmp_path: Path) -> None:
    good, backbone = FakeSplit(9, "test"), FakeBackbone()
    for train, test, said in (
        (labelled_as([0, 1, -1]), good, "1 of 3 images of the train split have no label"),
        (good, labelled_as([0, -1], "test"), "1 of 2 images of the test split have no label"),
    ):
        with pytest.raises(DataError, match=said):
            run(CONFIG, session(tmp_path / "run", train, test), backbone)
    with pytest.raises(ConfigError, match="batch-size 0"):
        run(CONFIG, session(tmp_path / "run", good, good, batch_size=0), backbone)
    assert backbone.passes == 0
    for bad in ({"train": [5]}, {"test": [5]}):
        splits = [FakeSplit(20, name, bad.get(name, ())) for name in ("train", "test")]
        with pytest.raises(BadImage, match=r"005\.png"):
            run(CONFIG, session(tmp_path / "run", splits[0], splits[1]))


@pytest.mark.parametrize("change", [{"epochs": 0}, {"blocks": ()}, {"lrs": (0.1, 0.1)}, {"save_minutes": -1.0}])
def test_settings_that_make_no_probe(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LinearAugment(LinearAugmentConfig(**change))


def test_settings_and_published_numbers(tmp_path: Path) -> None:
    check_protocol("linear-augment")
    backbone = load_checkpoint(CheckpointSettings(ckpt="demo")).backbone

    def resolved(**settings: Any) -> LinearAugment:
        return LinearAugment(LinearAugmentConfig(**settings)).for_network(backbone, TRANSFORM, frozenset())

    usual = resolved()
    assert (usual.config.features, usual.config.blocks) == ("last4", (-3, -2, -1))
    assert usual.as_published()
    assert resolved(features="last4", batch=1024, save_head=True).as_published()
    for change in ({"epochs": 10}, {"features": "cls"}, {"batch": 512}, {"lrs": (0.1,)}, {"optimizer": "lars"}):
        assert not resolved(**change).as_published()
    keys = {n: usual.published_key("linear-augment", {"name": n}, "ImageNet-1K") for n in ("top1_best_on_test", "top1")}
    assert all(key is not None and key[:3] == ("linear", "top1", "ImageNet-1K") for key in keys.values())
    assert [key.remark for key in keys.values() if key] == ["", " (best head on the test set)"]
    assert usual.published_key("linear-augment", {"name": "top5"}, "ImageNet-1K") is None
    backbone.family = "beit"
    assert not resolved().as_published(), "published with AdamW, of the patches of an intermediate block"


def test_a_module_in_training_mode_is_given_back_so(tmp_path: Path) -> None:
    backbone = FakeBackbone().train()
    backbone.norm.eval()
    _, _, _, events = run(CONFIG, session(tmp_path / "run", FakeSplit(20), FakeSplit(9, "test")), backbone)
    assert backbone.training
    assert not backbone.norm.training
    assert {e.kind for e in events if isinstance(e, Artifact)} == {"log"}
