"""The backgrounds challenge against a plain loop over all pairs, on one rank and on three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ibot_eval import distributed
from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.splits import Data
from ibot_eval.errors import DataError
from ibot_eval.robustness.answers import Reading, answers
from ibot_eval.robustness.pasting import Foregrounds, challenge, find_foregrounds
from ibot_eval.settings import DataSettings
from tests.images import picture, save, truncated
from tests.ranks import run_ranks
from tests.robustness_folders import SIDE, session

FOREGROUNDS, BACKGROUNDS, CLASSES = 11, 7, 3
READING = Reading(np.array([0, 1, 2, 4]), np.array([2, 0, 1, -1]))


class Linear:
    """Five logits that are fixed sums of the pixels."""

    def __init__(self) -> None:
        weight = torch.randn(5, 3 * SIDE * SIDE, generator=torch.Generator().manual_seed(0))
        # The first half of the rows, in the masks, says more than the rest.
        weight = weight.view(5, 3, SIDE, SIDE) * torch.linspace(3, 0, SIDE)[:, None]
        self.weight = weight - weight.mean((1, 2, 3), keepdim=True)
        self.seen = 0

    def logits(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return torch.einsum("bchw,kchw->bk", images, self.weight)


def make(root: Path) -> tuple[Foregrounds, FolderSplit]:
    """Objects of different sizes, and backgrounds."""
    files = [save(root / f"original/val/c{i % CLASSES}/{i}.png", picture(SIDE, SIDE, i)) for i in range(FOREGROUNDS)]
    names = [str(file.relative_to(root / "original/val")) for file in files]
    for i, name in enumerate(names):
        path = (root / "fg_mask/val" / name).with_suffix(".npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        mask = np.zeros((SIDE, SIDE), bool)
        mask[: 31 - 2 * (i % 5)] = True
        np.save(path, mask)
    labels = np.arange(FOREGROUNDS) % CLASSES
    found = find_foregrounds(root, FolderSplit("original/val", root / "original/val", names, labels))
    behind = [save(root / f"only_bg_t/val/c/{i}.png", picture(SIDE, SIDE, 100 + i)).name for i in range(BACKGROUNDS)]
    split = FolderSplit("only_bg_t/val", root / "only_bg_t/val/c", behind, np.zeros(BACKGROUNDS, int))
    return found, split


def by_pairs(root: Path, found: Foregrounds) -> np.ndarray:
    """(n, backgrounds) labels, by the published formula on floats."""
    rows = []
    for i, name in enumerate(found.ids):
        mask = np.load(root / name).astype(np.float32)[None]
        number = int(Path(found.split.image_ids[i]).stem)
        front = picture(SIDE, SIDE, number).transpose(2, 0, 1) / np.float32(255)
        row = []
        for b in range(BACKGROUNDS):
            behind = picture(SIDE, SIDE, 100 + b).transpose(2, 0, 1) / np.float32(255)
            logits = Linear().logits(torch.from_numpy(behind * (1 - mask) + mask * front)[None].float())[0].tolist()
            row.append({0: 2, 1: 0, 2: 1, 4: -1}[max((0, 1, 2, 4), key=lambda c: logits[c])])
        rows.append(row)
    return np.array(rows)


def relabelled(found: Foregrounds, labels: np.ndarray) -> Foregrounds:
    found.split.labels = labels.astype(np.int64)
    return found


def asked(root: Path, **engine: Any) -> Any:
    settings = DataSettings(data=str(root), bad_images=engine.pop("bad_images", "stop"))
    return session(Data("", (), {}, {}), root, settings, **engine)


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_equals_a_loop_over_all_pairs(tmp_path: Path, batch_size: int) -> None:
    found, behind = make(tmp_path)
    pairs = by_pairs(tmp_path, found)
    # What most backgrounds lead to, so that some foregrounds survive and others do not.
    labels = np.array([np.bincount(row[row >= 0], minlength=CLASSES).argmax() for row in pairs])
    relabelled(found, labels)
    robust = (pairs == labels[:, None]).all(1)
    assert 0 < robust.sum() < FOREGROUNDS
    classifier = Linear()
    worst = challenge(classifier, found, behind, READING, asked(tmp_path, batch_size=batch_size))
    expected = [row[np.argmax(row != label)] for row, label in zip(pairs, labels, strict=True)]
    assert worst.predicted.tolist() == expected
    assert (worst.predicted == worst.labels).tolist() == robust.tolist()
    assert classifier.seen < pairs.size, "foregrounds that were fooled are not tried again"


def on_ranks(root: str) -> list[list[int]]:
    distributed.init("cpu")
    files = sorted(str(p.relative_to(root + "/original/val")) for p in Path(root, "original/val").rglob("*.png"))
    labels = np.array([int(Path(file).stem) % CLASSES for file in files])
    split = FolderSplit("original/val", Path(root, "original/val"), files, labels)
    behind = FolderSplit(
        "only_bg_t/val", Path(root, "only_bg_t/val/c"), [f"{i}.png" for i in range(BACKGROUNDS)], labels
    )
    where = asked(Path(root), batch_size=3, bad_images="skip")
    worst = challenge(Linear(), find_foregrounds(Path(root), split), behind, READING, where)
    found = answers(Linear(), split, READING, where)
    distributed.shutdown()
    return [worst.indices.tolist(), worst.predicted.tolist(), found.indices.tolist(), found.predicted.tolist()]


def test_three_ranks_give_what_one_gives(tmp_path: Path) -> None:
    make(tmp_path)
    truncated(tmp_path / "original/val/c1/4.jpg").rename(tmp_path / "original/val/c1/4.png")
    alone = on_ranks(str(tmp_path))
    assert len(alone[0]) == len(alone[2]) == FOREGROUNDS - 1
    assert run_ranks(3, on_ranks, str(tmp_path)) == [alone] * 3


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    found, behind = make(tmp_path)
    classifier = Linear()
    classifier.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match=r"fg_mask/val/c0/0.npy on only_bg_t/val/0.png are NaN"):
        challenge(classifier, found, behind, READING, asked(tmp_path, batch_size=3))
    with pytest.raises(DataError, match=r"the logits of original/val/c0/0.png are NaN"):
        answers(classifier, found.split, READING, asked(tmp_path))
