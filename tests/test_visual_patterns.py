"""The bank of patterns, against counting everything by hand; its file; what is drawn from it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import Data
from ibot_eval.errors import CacheError, ConfigError, DataError
from ibot_eval.heads import ProjectionHead
from ibot_eval.image_pass import Engine
from ibot_eval.settings import DataSettings
from ibot_eval.visual import pattern_progress, top_patches
from ibot_eval.visual.pattern_bank import PatternBank, open_bank, save_bank
from ibot_eval.visual.pattern_layouts import BankImages, layout_figure, layout_image, settings_of, shown_items
from ibot_eval.visual.patterns import assign, make_bank
from ibot_eval.visual.pictures import prepare, source_of
from ibot_eval.visual.top_patches import TopPatches
from tests import images, looking
from tests.fakes import PATCH, TRANSFORM, WIDTH, FakeBackbone, FakeSplit

CLASSES = ("a", "b", "c")
N = 23


def head_of(k: int = 7, **arguments: Any) -> ProjectionHead:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = ProjectionHead(WIDTH, k, hidden=16, bottleneck=8, **arguments).eval()
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
    return head


def data_of(n: int = N, **arguments: Any) -> Data:
    return Data("fake", CLASSES, {"test": FakeSplit(n, **arguments)}, {"test": "val"})


def engine_of(head: Any, backbone: FakeBackbone | None = None, **changes: Any) -> Engine:
    loaded = looking.loaded_of(backbone or FakeBackbone(), head)
    return replace(Engine(loaded, TRANSFORM, torch.device("cpu"), "fp32", 4, 0, "stop", False), **changes)


def outputs_of(level: str, head: ProjectionHead, n: int = N) -> np.ndarray:
    """(n, items, K) raw outputs, an image at a time."""
    backbone, split, rows = FakeBackbone().eval(), FakeSplit(n), []
    for i in range(n):
        image = TRANSFORM.normalize(TRANSFORM(split.load(i))[None])
        with torch.no_grad():
            tokens = backbone.outputs(image).blocks[0]
            rows.append(head.forward_cls(tokens.cls) if level == "cls" else head.forward_patches(tokens.patches[0]))
    return torch.stack(rows).reshape(n, -1, rows[0].shape[-1]).numpy()


def brute_force(outputs: np.ndarray, labels: np.ndarray, top: int) -> dict[str, Any]:
    """Counts, and per prototype the (image, place, output) of the best item of each image, best first."""
    k = outputs.shape[2]
    counts, of_class, images = [0] * k, [[0] * len(CLASSES) for _ in range(k)], defaultdict(dict)
    for i, image in enumerate(outputs):
        for place, values in enumerate(image):
            prototype = int(values.argmax())
            counts[prototype] += 1
            of_class[prototype][labels[i]] += 1
            best = images[prototype].get(i)
            if best is None or values[prototype] > best[1]:
                images[prototype][i] = (place, float(values[prototype]))
    ranked = {
        p: sorted(((i, place, value) for i, (place, value) in found.items()), key=lambda row: -row[2])[:top]
        for p, found in images.items()
    }
    return {"counts": counts, "classes": of_class, "images": {p: len(v) for p, v in images.items()}, "top": ranked}


def assert_equal(bank: PatternBank, wanted: dict[str, Any]) -> None:
    assert bank.counts.tolist() == wanted["counts"]
    assert bank.class_counts is not None
    assert bank.class_counts.tolist() == wanted["classes"]
    for p in range(len(bank)):
        ranked = wanted["top"].get(p, [])
        there = bank.images[p] >= 0
        assert bank.image_counts[p] == wanted["images"].get(p, 0)
        assert there.sum() == len(ranked)
        assert np.isnan(bank.confidences[p][~there]).all()
        ids = [bank.image_ids[i] for i in bank.images[p][there]]
        assert ids == [f"train/{i:03d}.png" for i, _, _ in ranked]
        assert bank.positions[p][there].tolist() == [place for _, place, _ in ranked]
        np.testing.assert_allclose(bank.confidences[p][there], [value for *_, value in ranked], rtol=1e-5)


@pytest.mark.parametrize("level", ["patch", "cls"])
@pytest.mark.parametrize("top", [1, 3, 30])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_bank_equals_counting_everything(level: Any, top: int, batch: int) -> None:
    head = head_of()
    bank = make_bank(engine_of(head, batch_size=batch), data_of(), level=level, top=top)
    wanted = brute_force(outputs_of(level, head), FakeSplit(N).labels, top)
    assert sum(wanted["counts"]) == N * (1 if level == "cls" else 4)
    assert_equal(bank, wanted)
    assert bank.about["prototypes"] == "projection head"
    assert bank.about["notes"] == []


def test_patches_go_through_the_patch_branch() -> None:
    head = head_of(5, patch_prototypes=9, sharing="separate")
    bank = make_bank(engine_of(head), data_of(), top=4)
    assert len(bank) == 9
    assert_equal(bank, brute_force(outputs_of("patch", head), FakeSplit(N).labels, 4))
    assert len(make_bank(engine_of(head), data_of(), level="cls")) == 5


def test_brightness_is_the_mean_of_v() -> None:
    bank = make_bank(engine_of(head_of()), data_of())
    split = FakeSplit(N)
    for p, item in zip(*np.nonzero(bank.images >= 0), strict=True):
        pixels = split.pixels(int(bank.image_ids[bank.images[p, item]][-7:-4])).astype(float)
        row, column = divmod(int(bank.positions[p, item]), 2)
        patch = pixels[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
        np.testing.assert_allclose(bank.brightness[p, item], patch.max(axis=2).mean(), rtol=1e-6)


def test_purity_by_hand() -> None:
    bank = make_bank(engine_of(head_of(3)), data_of())
    bank.class_counts = np.array([[3, 1, 0], [0, 0, 0], [2, 2, 0]])
    bank.counts, bank.image_counts = np.array([4, 0, 4]), np.array([4, 0, 2])
    assert bank.purity is not None
    np.testing.assert_array_equal(bank.purity, [75, np.nan, 50])
    assert bank.majority(0) == "a"
    assert bank.majority(1) is None
    assert bank.by_purity(least=1).tolist() == [0, 2]
    assert bank.by_purity(least=3).tolist() == [0]
    assert bank.by_size().tolist() == [0, 2]


def test_without_labels_there_is_no_purity() -> None:
    data = data_of()
    data.splits["test"].labels[:] = -1
    bank = make_bank(engine_of(head_of()), data)
    assert bank.purity is None
    assert bank.majority(0) is None
    with pytest.raises(ConfigError, match="no labels"):
        bank.by_purity()


def test_bad_images_are_left_out_and_named() -> None:
    head = head_of()
    bank = make_bank(engine_of(head, bad_images="skip"), data_of(bad=[3, 8]))
    assert bank.about["data"]["skipped"] == ["train/003.png", "train/008.png"]
    assert bank.counts.sum() == 4 * (N - 2)
    with pytest.raises(DataError, match="003"):
        make_bank(engine_of(head), data_of(bad=[3]))
    with pytest.raises(DataError, match="no image"):
        make_bank(engine_of(head, bad_images="skip"), data_of(4, bad=range(4)))


def test_outputs_that_are_not_finite_name_the_image() -> None:
    with pytest.raises(DataError, match=r"train/002\.png"):
        make_bank(engine_of(head_of(), FakeBackbone(nan_at=2)), data_of())


def test_kmeans_where_there_is_no_head() -> None:
    bank = make_bank(engine_of(None), data_of(), k=5)
    assert bank.about["prototypes"] == "k-means"
    assert "no projection head" in bank.about["notes"][0]
    assert bank.mean is not None
    assert bank.centroids is not None
    np.testing.assert_allclose(np.linalg.norm(bank.centroids, axis=1), 1, rtol=1e-5)
    tokens = []
    for i in range(N):
        image = TRANSFORM.normalize(TRANSFORM(FakeSplit(N).load(i))[None])
        with torch.no_grad():
            tokens.append(FakeBackbone().eval().outputs(image).blocks[0].patches[0].flatten(0, 1).numpy())
    centred = np.stack(tokens) - bank.mean
    cosines = centred @ bank.centroids.T / np.linalg.norm(centred, axis=-1, keepdims=True)
    assert_equal(bank, brute_force(cosines, FakeSplit(N).labels, 72))
    # The mean is that of the tokens: all patches of a few images are the sample.
    np.testing.assert_allclose(bank.mean, np.concatenate(tokens).mean(0), rtol=1e-4, atol=1e-6)


def test_more_clusters_than_items() -> None:
    assert len(make_bank(engine_of(None), data_of(3), k=50)) == 12


@pytest.mark.parametrize(("name", "value"), [("top", 0), ("k", 0)])
def test_numbers_below_one(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"--{name} must be at least 1"):
        make_bank(engine_of(None), data_of(), **{name: value})


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_top_patches_in_any_batches_and_processes(data: st.DataObject) -> None:
    """Few confidences, so that many are equal; the order must not depend on how images were grouped."""
    n, k, items, top = (data.draw(st.integers(1, high)) for high in (9, 3, 4, 5))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    prototypes = generator.integers(0, k, (n, items))
    confidences = generator.choice(np.array([-2, -0.0, 0.0, 0.5, 3e9], np.float32), (n, items))
    brightness = generator.random((n, items)).astype(np.float32)
    labels = generator.integers(-1, 2, n)
    parts = [TopPatches(k, top, 2) for _ in range(2)]
    owner = generator.integers(0, 2, n)
    for part in (0, 1):
        mine = np.flatnonzero(owner == part)
        for rows in np.array_split(mine, data.draw(st.integers(1, 4))):
            if len(rows):
                with patch.object(top_patches, "WAITING", data.draw(st.integers(1, 20))):
                    parts[part].add(rows, prototypes[rows], confidences[rows], brightness[rows], labels[rows])
    parts[0].settle()
    parts[0].merge(parts[1])
    for p in range(k):
        best: dict[int, tuple[float, int]] = {}
        for i in range(n):
            found = [(-confidences[i, j], j) for j in range(items) if prototypes[i, j] == p]
            if found:
                best[i] = min(found)
        ranked = sorted((value, i, j) for i, (value, j) in best.items())[:top]
        there = parts[0].images[p] >= 0
        assert parts[0].images[p][there].tolist() == [i for _, i, _ in ranked]
        assert parts[0].positions[p][there].tolist() == [j for *_, j in ranked]
        assert parts[0].brightness[p][there].tolist() == [brightness[i, j] for _, i, j in ranked]
        assert parts[0].image_counts[p] == len(best)
        assert parts[0].counts[p] == (prototypes == p).sum()
        assert parts[0].class_counts is not None
        assert parts[0].class_counts[p].tolist() == [((prototypes == p) & (labels == c)[:, None]).sum() for c in (0, 1)]


def test_memory_does_not_grow_with_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_patches, "WAITING", 100)
    best = TopPatches(5, 3)
    size = sum(value.nbytes for value in best.arrays().values())
    waited = []
    for start in range(0, 200, 10):
        index = np.random.default_rng(start).integers(0, 5, (10, 6))
        # Better than all before them, so that every one is able to enter the tables.
        values = np.full((10, 6), start, np.float32)
        best.add(np.arange(start, start + 10), index, values, values)
        waited.append(sum(len(waiting[0]) for waiting in best._waiting))
    assert 0 < max(waited) < 100
    assert 0 in waited
    assert sum(value.nbytes for value in best.arrays().values()) == size


def test_file_gives_back_everything(tmp_path: Path) -> None:
    path = tmp_path / "bank.safetensors"
    for head in (head_of(), None):
        bank = make_bank(engine_of(head), data_of(), k=5)
        save_bank(bank, path)
        found = open_bank(path)
        for name, value in vars(bank).items():
            if name != "path":
                np.testing.assert_equal(getattr(found, name), value)


def test_file_keeps_odd_names(tmp_path: Path) -> None:
    bank = make_bank(engine_of(head_of()), data_of())
    bank.image_ids[0] = "a\nb/\udcff<b>é.png"
    save_bank(bank, tmp_path / "b.safetensors")
    assert open_bank(tmp_path / "b.safetensors").image_ids == bank.image_ids


def test_files_that_hold_no_patterns(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(CacheError, match="there is no file"):
        open_bank(path)
    path.write_bytes(b"nothing")
    with pytest.raises(CacheError, match="damaged"):
        open_bank(path)
    save_file({"x": np.zeros(3)}, path)
    with pytest.raises(CacheError, match="holds no patterns"):
        open_bank(path)
    bank = make_bank(engine_of(head_of()), data_of())
    save_bank(bank, path)
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(CacheError, match="damaged"):
        open_bank(path)
    bank.image_ids = bank.image_ids[:2]
    save_bank(bank, path)
    with pytest.raises(CacheError, match="do not fit together"):
        open_bank(path)


def test_another_checkpoint_is_refused() -> None:
    head = head_of()
    bank = make_bank(engine_of(head), data_of())
    same = looking.loaded_of(FakeBackbone(), head)
    bank.check(same)
    other = looking.loaded_of(FakeBackbone(), head, sha256="b" * 64)
    for change in ({"sha256": "b" * 64}, {"key": "student"}, {"identity": {"heads": 6}}, {"overrides": {"grid": 2}}):
        other = looking.loaded_of(FakeBackbone(), head)
        vars(other.report).update(change)
        with pytest.raises(ConfigError, match="another checkpoint"):
            bank.check(other)
        with pytest.raises(ConfigError, match="another checkpoint"):
            assign(bank, other, prepare(looking.noise(8, 8), FakeBackbone(), 8))


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("level", ["patch", "cls"])
def test_assignment_of_an_image_of_the_bank(level: Any, with_head: bool) -> None:
    """Every patch that the bank points to is of the prototype that it is listed under."""
    engine = engine_of(head_of() if with_head else None)
    bank = make_bank(engine, data_of(), level=level, k=5)
    backbone = engine.loaded.backbone
    backbone.mean, backbone.std = TRANSFORM.mean, TRANSFORM.std
    for p, item in zip(*np.nonzero(bank.images >= 0), strict=True):
        name = bank.image_ids[bank.images[p, item]]
        picture = prepare(source_of(FakeSplit(N).load(int(name[-7:-4])), name), backbone, 8)
        found = assign(bank, engine.loaded, picture)
        assert found.prototypes.ravel()[bank.positions[p, item]] == p
        np.testing.assert_allclose(found.confidences.ravel()[bank.positions[p, item]], bank.confidences[p, item], 1e-4)
    assert found.prototypes.shape == ((1, 1) if level == "cls" else (2, 2))


class _Stop(Exception):
    pass


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_progress, "SECONDS", -1.0)
    file = tmp_path / ".partial"
    for head in (head_of(), None):
        whole = make_bank(engine_of(head), data_of(), k=5)
        data, split = data_of(), FakeSplit(N)
        calls, load = [], split.load

        def dying(i: int, load: Any = load, calls: list[int] = calls, head: Any = head) -> Any:
            calls.append(i)
            # k-means has looked at all images once before.
            if len(calls) == 14 + (0 if head else N):
                raise _Stop
            return load(i)

        monkeypatch.setattr(split, "load", dying)
        data.splits["test"] = split
        with pytest.raises(_Stop):
            make_bank(engine_of(head), data, k=5, progress_file=file)
        assert file.is_file()
        resumed_on = FakeBackbone()
        resumed = make_bank(engine_of(head, resumed_on), data_of(), k=5, progress_file=file)
        assert resumed_on.forwarded == N - 12
        for name in ("counts", "image_counts", "images", "positions", "confidences", "class_counts", "centroids"):
            np.testing.assert_array_equal(getattr(resumed, name), getattr(whole, name))
        # Another setting does not go on from there.
        again = FakeBackbone()
        make_bank(engine_of(head, again), data_of(), k=5, top=9, progress_file=file)
        assert again.forwarded >= N
        file.unlink()


def folder_bank(root: Path, count: int = 6) -> tuple[PatternBank, DataSettings]:
    images.tree(root, {"val/a": count, "val/b": count})
    chosen = DataSettings(data=str(root), resize=8, crop=8)
    data = open_data(chosen, roles=("test",))
    return make_bank(engine_of(head_of(2)), data, settings=chosen), chosen


def test_crops_show_what_the_network_saw(tmp_path: Path) -> None:
    bank, _ = folder_bank(tmp_path / "data")
    shown = BankImages.open(bank)
    split = open_data(settings_of(bank) or DataSettings(), roles=("test",)).splits["test"]
    index = list(split.image_ids).index(bank.image_ids[4])
    whole = TRANSFORM(split.load(index)).permute(1, 2, 0).numpy()
    assert np.array_equal(shown.image(4), whole)
    # Patch 1 of the 2x2 grid is the upper right one; a context of 3 reaches a patch beyond the picture.
    crop = shown.crop(4, 1, 3, framed=False)
    assert crop.shape == (12, 12, 3)
    assert np.array_equal(crop[4:12, :8], whole)
    assert (crop[:4] == 225).all()
    assert (crop[:, 8:] == 225).all()
    assert np.array_equal(shown.crop(4, 1, 1), whole[:4, 4:])


def test_layouts_skip_near_black_patches(tmp_path: Path) -> None:
    bank, _ = folder_bank(tmp_path / "data")
    shown = BankImages.open(bank)
    p = int(bank.by_size()[0])
    there = int((bank.images[p] >= 0).sum())
    assert there > 3
    bank.brightness[p, 1] = 40.0
    bank.brightness[p, 0] = 40.1
    assert shown_items(bank, p, 3, 40).tolist() == [0, 2, 3]
    sheet = layout_image(bank, shown, p, n=4, columns=2, context=1)
    assert sheet.shape == (4 + 3 + 4, 4 + 3 + 4, 3)
    wanted = shown.crop(int(bank.images[p, 2]), int(bank.positions[p, 2]), 1)
    assert np.array_equal(sheet[:4, 7:], wanted)
    figure = layout_figure(bank, shown, [p], n=4)
    assert figure.axes[0].get_title().startswith(f"prototype {p}: {bank.counts[p]} patches, {there} images")
    figure.canvas.draw()
    with pytest.raises(ConfigError, match="no middle"):
        layout_image(bank, shown, p, context=4)
    with pytest.raises(ConfigError, match="no prototype 2"):
        layout_image(bank, shown, 2)


def test_images_that_moved_or_are_gone(tmp_path: Path) -> None:
    bank, chosen = folder_bank(tmp_path / "data")
    assert BankImages.open(bank).notes == ()
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="cannot be opened"):
        BankImages.open(bank)
    moved = BankImages.open(bank, replace(chosen, data=str(tmp_path / "moved")))
    assert moved.notes == ()
    images.save(tmp_path / "moved" / "val" / "a" / "new.png")
    assert "not exactly" in BankImages.open(bank, DataSettings(data=str(tmp_path / "moved"))).notes[0]
    gone = bank.image_ids[0]
    (tmp_path / "moved" / gone).unlink()
    with pytest.raises(DataError, match=gone):
        BankImages.open(bank, DataSettings(data=str(tmp_path / "moved")))


def test_settings_survive_the_file(tmp_path: Path) -> None:
    bank, chosen = folder_bank(tmp_path / "data")
    save_bank(bank, tmp_path / "b.safetensors")
    found = open_bank(tmp_path / "b.safetensors")
    assert settings_of(found) == chosen
    json.dumps(found.about)
    strange = replace(chosen, data_root=tmp_path, mean=(0.1, 0.2, 0.3))
    found.about["data"]["settings"] = json.loads(json.dumps(vars(strange), default=str))
    assert settings_of(found) == strange
