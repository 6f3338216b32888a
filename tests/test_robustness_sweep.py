"""The pass over damaged images: what is decoded, forwarded and counted, on any number of batches and ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ibot_eval.errors import BadImage, ConfigError, DataError
from ibot_eval.protocol import Artifact, Metric, Predictions, Warning
from ibot_eval.robustness.occluding import Occlusions
from protocols.occlusion import OcclusionConfig
from protocols.shuffle import ShuffleConfig
from tests import layouts
from tests.ranks import run_ranks
from tests.robustness_runs import CLASSIFIER, SIDE, TRANSFORM, numbers, on_ranks, plant, run, session

QUICK = {"levels": (0, 50, 90), "sheet": 0}


@pytest.fixture(autouse=True)
def planted() -> Iterator[None]:
    """One thread, and the true classifier back afterwards."""
    before, threads = sys.modules.get(CLASSIFIER), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if before is None:
        sys.modules.pop(CLASSIFIER, None)
    else:
        sys.modules[CLASSIFIER] = before


def test_images_are_decoded_once_and_forwarded_clean_once(tmp_path: Path):
    found = plant()
    where = session(tmp_path, 12, batch_size=5)
    run(OcclusionConfig(**QUICK, repeats=2), where)
    assert where.data is not None
    assert where.data.splits["test"].decoded == 12
    # Of three batches: clean, random twice at two levels, salient and non-salient once: nothing about them is drawn.
    assert found.made[0].batches == 3 * (1 + 2 * 2 + 2 * 2)


@pytest.mark.parametrize("config", [OcclusionConfig(**QUICK, repeats=2), ShuffleConfig(sheet=0, repeats=3)])
def test_the_first_level_is_the_clean_accuracy_to_the_last_bit(tmp_path: Path, config):
    found = plant()
    where = session(tmp_path, 30)
    events = run(config, where)
    classifier = found.made[0]
    assert where.data is not None
    split = where.data.splits["test"]
    with torch.no_grad():
        images = TRANSFORM.normalize(torch.stack([TRANSFORM(split.load(i)) for i in range(30)]))
        predicted = classifier.logits(images).argmax(1).numpy()
    clean = 100 * float((predicted == split.labels).mean())
    first = [
        e.value
        for e in events
        if isinstance(e, Metric) and e.name == "top1" and (e.params.get("level") == 0 or e.params.get("grid") == "1x1")
    ]
    assert first == [clean] * len(first)
    (table,) = [e for e in events if isinstance(e, Predictions)]
    columns = [name for name in table.values if "level=0" in name or "1x1" in name]
    assert len(columns) == len(first)
    assert all(table.values[name].tolist() == predicted.tolist() for name in columns)


OTHERS = [
    OcclusionConfig(levels=(0, 40, 80), offset="random", fill="noise", repeats=2, sheet=0),
    OcclusionConfig(**QUICK, drop="tokens"),
    ShuffleConfig(grids=("1x1", "2x2", "4x8"), repeats=2, sheet=0),
]


@pytest.mark.parametrize("config", OTHERS, ids=["offset and noise", "tokens", "shuffle"])
def test_numbers_do_not_depend_on_the_batch(tmp_path: Path, config):
    plant()
    one, many = (numbers(run(config, session(tmp_path, 10, batch_size=size))) for size in (1, 64))
    assert one == many
    other = numbers(run(config, session(tmp_path, 10, seed=1)))
    assert other["predictions"] != one["predictions"], "the seed changes nothing"


def test_three_ranks_give_the_numbers_of_one(tmp_path: Path):
    (alone,) = run_ranks(1, on_ranks, str(tmp_path / "one"))
    for found in run_ranks(3, on_ranks, str(tmp_path / "three")):
        assert found == alone
    assert len(alone["OcclusionConfig"]["predictions"]["label"]) == 10
    sheets = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("one", "three")]
    assert sheets == [["sheet-non-salient.png", "sheet-random.png", "sheet-salient.png"]] * 2
    for name in sheets[0]:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def test_repeats_are_other_draws_and_their_mean_is_shown(tmp_path: Path):
    plant()
    whole = run(ShuffleConfig(grids=("1x1", "4x4"), repeats=3, sheet=0), session(tmp_path, 60))
    metric = next(e for e in whole if isinstance(e, Metric) and e.params.get("grid") == "4x4")
    assert metric.interval is not None
    assert metric.value is not None
    assert metric.interval[0] < metric.value < metric.interval[1]


def test_random_heads_are_at_chance_when_nearly_all_is_dropped(tmp_path: Path):
    config, found = OcclusionConfig(kinds=("random",), levels=(0, 90), sheet=0), []
    for seed in range(16):
        plant(seed=seed)
        events = run(config, session(tmp_path, 30, seed=seed))
        found += [e.value for e in events if isinstance(e, Metric) and e.params.get("level") == 90]
    assert np.mean(found) == pytest.approx(100 / 3, abs=4 * np.std(found) / 4)
    assert np.std(found) < 25


def test_nothing_left_is_the_same_answer_for_every_image(tmp_path: Path):
    plant()
    events = run(OcclusionConfig(kinds=("random",), levels=(0, 100), sheet=0), session(tmp_path, 30))
    (table,) = [e for e in events if isinstance(e, Predictions)]
    assert len(np.unique(table.values["top1@kind=random,level=100"])) == 1
    accuracy = next(e.value for e in events if isinstance(e, Metric) and e.params.get("level") == 100)
    assert accuracy == pytest.approx(100 / 3)


def test_dropping_tokens_is_not_painting_over_them(tmp_path: Path):
    results = {}
    for mean in (False, True):
        for drop in ("pixels", "tokens"):
            plant(mean=mean)
            config = OcclusionConfig(levels=(0, 60), drop=drop, sheet=0)
            results[mean, drop] = numbers(run(config, session(tmp_path, 40)))["predictions"]
        pixels, tokens = results[mean, "pixels"], results[mean, "tokens"]
        assert pixels.keys() == tokens.keys()
        assert all((pixels[name] == tokens[name]) == ("level=60" not in name) for name in pixels)


def test_bad_images_stop_or_are_left_out(tmp_path: Path):
    plant()
    with pytest.raises(BadImage, match="val/004"):
        run(ShuffleConfig(sheet=0), session(tmp_path, 6, bad=[4]))
    events = run(ShuffleConfig(sheet=9), session(tmp_path, 6, bad=[4], bad_images="skip"))
    assert any("left out: 1 ('val/004.png')" in e.message for e in events if isinstance(e, Warning))
    assert {e.n for e in events if isinstance(e, Metric)} == {5}
    with pytest.raises(DataError, match="no image of val can be read"):
        run(ShuffleConfig(sheet=0), session(tmp_path, 2, bad=[0, 1], bad_images="skip"))


def test_logits_that_are_not_finite_name_the_image(tmp_path: Path):
    plant(spoil=True)
    with pytest.raises(DataError, match=r"logits of val/000.png are NaN or infinite after damage"):
        run(ShuffleConfig(sheet=0), session(tmp_path, 6))


def test_unlabelled_images_and_classes_that_the_classifier_lacks(tmp_path: Path):
    plant()
    where = session(tmp_path, 6)
    assert where.data is not None
    where.data.splits["test"].labels[2] = -1
    with pytest.raises(DataError, match=r"1 of 6 images of val have no label, .* val/002.png"):
        run(ShuffleConfig(sheet=0), where)
    plant(classes=(2, -1, 1))
    events = run(ShuffleConfig(sheet=0), session(tmp_path, 6))
    assert any("2 of 6 test images count as wrong" in e.message for e in events if isinstance(e, Warning))
    (table,) = [e for e in events if isinstance(e, Predictions)]
    assert set(np.unique(table.values["top1@grid=2x2"])) <= {-1, 1, 2}


def test_what_the_classifier_has_to_say_and_settings_without_effect(tmp_path: Path):
    plant()
    where = session(tmp_path, 3)
    where.asked = frozenset({"k", "grids"})
    events = run(ShuffleConfig(grids=("1x1", "2x2"), sheet=0), where)
    messages = [e.message for e in events if isinstance(e, Warning)]
    assert messages == ["planted", "--k: no effect, since no neighbours vote"]
    assert all(e.params["head"] == "planted" and "classes" not in e.params for e in events if isinstance(e, Metric))


def test_no_images_in_a_batch(tmp_path: Path):
    plant()
    with pytest.raises(ConfigError, match="--batch-size 0"):
        run(ShuffleConfig(), session(tmp_path, batch_size=0))


def test_a_sheet_has_a_row_for_each_image_and_a_column_for_each_level(tmp_path: Path):
    plant()
    where = session(tmp_path, 12)
    events = run(OcclusionConfig(kinds=("random", "salient"), levels=(0, 50, 75, 100), sheet=2), where)
    paths = [e.path for e in events if isinstance(e, Artifact)]
    assert [path.name for path in paths] == ["sheet-random.png", "sheet-salient.png"]
    assert {e.kind for e in events if isinstance(e, Artifact)} == {"figure"}
    pixels = np.asarray(Image.open(paths[0]).convert("RGB")).astype(int)
    cell = SIDE + 4
    assert pixels.shape == (14 + 2 * cell + 4, 4 * cell + 4, 3)
    titles = pixels[:14] < 128
    assert all(titles[:, 4 + column * cell :][:, :SIDE].any() for column in range(4))
    assert where.data is not None
    # Of twelve images the two that cut the rest into three parts.
    for row, index in enumerate((4, 7)):
        shown = [pixels[18 + row * cell :, 4 + column * cell :][:SIDE, :SIDE] for column in range(4)]
        clean = np.asarray(where.data.splits["test"].load(index)).astype(int)
        assert np.abs(shown[0] - clean).max() <= 1
        grey = np.round(255 * np.array(TRANSFORM.mean))
        for column, share in enumerate((0, 0.5, 0.75, 1)):
            dropped = (np.abs(shown[column] - grey) <= 1).all(2)
            assert dropped.mean() == pytest.approx(share, abs=0.02)


def test_occlusions_are_what_their_masks_say():
    generator = torch.Generator().manual_seed(0)
    images, indices = torch.randn(3, 3, 32, 32, generator=generator), torch.tensor([2, 5, 9])
    damage = Occlusions(("random",), (25, 50), 8, TRANSFORM, offset="random", seed=4, repeats=2)
    found = list(damage(images, indices))
    assert len(found) == len(damage) == 4
    for way, damaged in zip(damage.ways(), found, strict=True):
        gone = (damaged.images == 0).all(1)
        assert torch.equal(damaged.images[~gone[:, None].expand_as(images)], images[~gone[:, None].expand_as(images)])
        assert gone.float().mean((1, 2)).tolist() == [way.level / 100] * 3
        assert damaged.loss is not None
        assert damaged.loss.tolist() == [way.level / 100] * 3
    # Nested within a repeat, other squares and another offset in the next.
    gone = [(damaged.images == 0).all(1) for damaged in found]
    assert (gone[1] | gone[0]).equal(gone[1])
    assert not torch.equal(gone[2], gone[0])
    half = Occlusions(("random",), (50,), 8, TRANSFORM, offset="half")
    (damaged,) = half(images, indices)
    edges = (damaged.images == 0).all(1).float().diff(dim=1).abs().sum((0, 2))
    assert torch.nonzero(edges).flatten().add(1).remainder(8).unique().tolist() == [4]


@pytest.mark.parametrize("make", [layouts.resnet, layouts.swin])
def test_networks_without_cls_attention(tmp_path: Path, make):
    plant()
    where = session(tmp_path, 4, module=make())
    with pytest.raises(ConfigError, match=r"no attention of a \[CLS\] token"):
        run(OcclusionConfig(sheet=0), where)
    with pytest.raises(ConfigError, match="only a plain ViT"):
        run(OcclusionConfig(kinds=("random",), drop="tokens"), where)
