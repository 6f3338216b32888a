"""ImageNet-9 on tiny folders, with a classifier whose answers are known, and with a real network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ibot_eval import cli
from ibot_eval.errors import BadImage, ConfigError, DataError
from ibot_eval.protocol import Warning
from ibot_eval.record import EvalRecord
from ibot_eval.settings import DataSettings
from ibot_eval.testing import check_protocol
from protocols.backgrounds import Backgrounds, BackgroundsConfig
from tests import layouts
from tests.images import picture, save, truncated
from tests.robustness_classifiers import checkpoint
from tests.robustness_folders import SIDE, classify_by_pixel, folder, predictions, run, says, values


def test_conforms() -> None:
    check_protocol("backgrounds")


def test_accuracy_per_variant_and_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Classes 0 and 1 of the classifier are the first of the data, 2 is the second, 3 is none.
    (tmp_path / "map.json").write_text(json.dumps({"0": 0, "1": 0, "2": 1, "3": -1}))
    root = folder(
        tmp_path / "in9",
        {
            "mixed_same/val/00_dog": [0, 1],
            "mixed_same/val/01_bird": [2, 3],
            "mixed_rand/val/00_dog": [2, 1],
            "mixed_rand/val/01_bird": [3, 0],
        },
    )
    (root / "only_fg" / "val").mkdir(parents=True)
    classify_by_pixel(monkeypatch, range(4))
    protocol = Backgrounds(BackgroundsConfig(class_map=tmp_path / "map.json"))
    notes = protocol.open(DataSettings(data=str(root))).warnings
    assert any("'only_fg'" in w and "without images" in w for w in notes)
    assert any("'original'" in w and "not there" in w for w in notes)
    events = run(protocol, tmp_path, DataSettings(data=str(root)))
    found = values(events, "variant")
    assert found == {("top1", "mixed_same"): 75, ("top1", "mixed_rand"): 25, ("background_gap", None): 50}
    assert not any(isinstance(e, Warning) for e in events)
    assert predictions(events)["mixed_same/val/01_bird/1.png"] == -1


def test_one_variant_has_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path, {"only_fg/val/a": [0, 0, 1], "only_fg/val/b": [1, 1]})
    classify_by_pixel(monkeypatch, [0, 1])
    events = run(Backgrounds(BackgroundsConfig()), tmp_path, DataSettings(data=str(root), test_per_class=2))
    assert values(events, "variant") == {("top1", "only_fg"): 100}
    assert any(isinstance(e, Warning) and "no background gap" in e.message for e in events)
    shown = Backgrounds.headline([{"name": "top1", "params": {"variant": "only_fg"}}])
    assert shown is not None


def test_other_classes_need_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path, {"original/val/dog": [0], "original/val/bird": [1]})
    classify_by_pixel(monkeypatch, [-1] * 4)
    with pytest.raises(ConfigError, match="in_to_in9"):
        run(Backgrounds(BackgroundsConfig()), tmp_path, DataSettings(data=str(root)))
    (tmp_path / "map.json").write_text(json.dumps({"0": 0, "1": 1, "2": -1}))
    with pytest.raises(DataError, match="misses 1 of the classifier's 4 classes: '3'"):
        run(Backgrounds(BackgroundsConfig(class_map=tmp_path / "map.json")), tmp_path, DataSettings(data=str(root)))


def test_no_variant_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of the folders"):
        Backgrounds(BackgroundsConfig()).open(DataSettings(data=str(tmp_path)))
    with pytest.raises(DataError, match="no such folder"):
        Backgrounds(BackgroundsConfig()).open(DataSettings(data=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="fixed names"):
        Backgrounds(BackgroundsConfig()).open(DataSettings(data=str(tmp_path), test_split="val"))


def test_images_are_taken_as_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path, {"original/val/a": [0], "original/val/b": [1]})
    save(root / "original/val/b/odd.png", says(1)[:, 1:])
    classify_by_pixel(monkeypatch, [0, 1])
    with pytest.raises(DataError, match=rf"original/val/b/odd.png has {SIDE - 1} x {SIDE} pixels, not {SIDE} x {SIDE}"):
        run(Backgrounds(BackgroundsConfig()), tmp_path, DataSettings(data=str(root), bad_images="skip"))
    events = run(Backgrounds(BackgroundsConfig()), tmp_path, DataSettings(data=str(root), resize=SIDE))
    assert values(events, "variant")["top1", "original"] == 100
    assert any(isinstance(e, Warning) and "--resize" in e.message for e in events)


def test_an_unreadable_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path, {"original/val/a": [0], "original/val/b": [1, 0]})
    truncated(root / "original/val/a/broken.jpg")
    classify_by_pixel(monkeypatch, [0, 1])
    with pytest.raises(BadImage, match=r"broken\.jpg"):
        run(Backgrounds(BackgroundsConfig()), tmp_path, DataSettings(data=str(root)))
    events = run(Backgrounds(BackgroundsConfig()), tmp_path, DataSettings(data=str(root), bad_images="skip"))
    assert values(events, "variant")["top1", "original"] == pytest.approx(200 / 3)
    assert any(isinstance(e, Warning) and "broken.jpg" in e.message for e in events)


def challenge_folder(root: Path) -> Path:
    """The object of a/0 hides the pixel that the classifier reads, those of a/1 and b/0 do not; b/1 is not an object.

    Both classes have a background; whatever shows it is taken for the background's class.
    """
    folder(root, {"original/val/a": [0, 0], "original/val/b": [1, 1]})
    folder(root, {"only_bg_t/val/a": [0], "only_bg_t/val/b": [1, 2]})
    for name, corner in (("a/0", 1), ("a/1", 0), ("b/0", 0)):
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[0, 0], mask[9:, 9:] = corner, 1
        path = root / f"fg_mask/val/{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, mask)
    return root


def test_the_worst_background_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = challenge_folder(tmp_path)
    classify_by_pixel(monkeypatch, [0, 1, -1])
    events = run(Backgrounds(BackgroundsConfig(challenge=True)), tmp_path, DataSettings(data=str(root)))
    found = values(events, "variant", "backgrounds")
    assert found["top1", "challenge", 3] == pytest.approx(100 / 3)
    assert found["top1", "original", None] == 100
    answers = predictions(events)
    # Fooled by the first background that is not of its class: of a/1 the second, of b/0 the first.
    assert [answers[f"fg_mask/val/{name}.npy"] for name in ("a/0", "a/1", "b/0")] == [0, 1, 0]
    part = DataSettings(data=str(root), test_per_class=1)
    found = values(run(Backgrounds(BackgroundsConfig(challenge=True)), tmp_path, part), "variant", "backgrounds")
    assert found["top1", "challenge", 2] == 50


def test_what_the_challenge_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classify_by_pixel(monkeypatch, [0, 1, -1])
    protocol = Backgrounds(BackgroundsConfig(challenge=True))

    def refused(root: Path, message: str, **settings: int) -> None:
        with pytest.raises((DataError, ConfigError), match=message):
            run(protocol, tmp_path, DataSettings(data=str(root), **settings))

    refused(challenge_folder(tmp_path / "resized"), "as they are stored", resize=SIDE)
    refused(folder(tmp_path / "part", {"original/val/a": [0], "original/val/b": [1]}), "the challenge needs only_bg_t")
    bare = folder(tmp_path / "bare", {f"{v}/val/{c}": [0] for v in ("original", "only_bg_t") for c in "ab"})
    refused(bare, "there are no masks")
    extra = challenge_folder(tmp_path / "extra")
    np.save(extra / "fg_mask/val/a/7.npy", np.zeros((SIDE, SIDE)))
    refused(extra, "1 of 4 masks have no image of their name in original/val: 'a/7'")
    mask = tmp_path / "extra/fg_mask/val/a/0.npy"
    (tmp_path / "extra/fg_mask/val/a/7.npy").unlink()
    np.save(mask, np.ones((SIDE, SIDE + 1)))
    refused(extra, f"is {SIDE} x {SIDE + 1}, and the images are {SIDE} x {SIDE} pixels")
    np.save(mask, np.full((SIDE, SIDE), 255, np.uint8))
    refused(extra, "values other than 0 and 1")
    mask.write_bytes(b"no array")
    refused(extra, "cannot read the mask")


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("original", "mixed_same", "mixed_rand", "only_bg_t")):
        for i in range(4):
            save(tmp_path / f"in9/{name}/val/{'ab'[i % 2]}/{i}.png", picture(64, 64, 10 * number + i))
    for i in range(2):
        (tmp_path / f"in9/fg_mask/val/{'ab'[i]}").mkdir(parents=True)
        np.save(tmp_path / f"in9/fg_mask/val/{'ab'[i]}/{i}.npy", np.arange(64 * 64).reshape(64, 64) > 2000)
    (tmp_path / "map.json").write_text(json.dumps({str(i): i % 2 for i in range(1000)}))
    checkpoint(tmp_path / "net.safetensors", layouts.resnet(num_classes=1000))
    shared = ["backgrounds", "--ckpt", "net.safetensors", "--data", "in9", "--workers", "0"]
    command = [*shared, "--crop", "64", "--name", "run", "--challenge"]
    assert cli.main([*command, "--class-map", "map.json"]) == 0
    record = EvalRecord.load(tmp_path / "runs" / "run")
    top1 = {m["params"]["variant"]: m for m in record.metrics if m["name"] == "top1"}
    assert list(top1) == ["original", "mixed_same", "mixed_rand", "only_bg_t", "challenge"]
    assert [m["n"] for m in top1.values()] == [4, 4, 4, 4, 2]
    gap = next(m["value"] for m in record.metrics if m["name"] == "background_gap")
    assert gap == top1["mixed_same"]["value"] - top1["mixed_rand"]["value"]
    assert record.data["transform"]["resize"] is None
    assert record.data["transform"]["crop"] == 64


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ckpt", "net.safetensors"], "the classifier's 5 classes are not the 2 of the data"),
        (["--ckpt", "net.safetensors", "--class-map", "nowhere.json"], "cannot read the class map"),
        (["--ckpt", "net.safetensors", "--head", "nowhere"], "nowhere"),
        (["--ckpt", "demo"], "linear --save-head"),
        (["--ckpt", "demo", "--head", "knn"], "no train split"),
    ],
)
def test_bad_input_on_the_command_line(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "net.safetensors", layouts.resnet(num_classes=5))
    folder(tmp_path / "in9", {"original/val/a": [0], "original/val/b": [1]})
    assert cli.main(["backgrounds", "--data", "in9", "--crop", "32", "--workers", "0", *flags]) == 2
    assert message in capsys.readouterr().err
