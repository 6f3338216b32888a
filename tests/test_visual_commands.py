"""`ibot-eval draw` and `ibot-eval patterns` as they are typed, from the demonstration to what is refused."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ibot_eval.cli import main
from ibot_eval.visual.export import read_metadata
from ibot_eval.visual.pattern_bank import open_bank
from tests import images


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def drawn(capsys: pytest.CaptureFixture[str], *words: object) -> list[Path]:
    """The files that the command names."""
    assert main([*map(str, words), "--dpi", "40"]) == 0
    out = capsys.readouterr().out
    return [Path(line) for line in out.splitlines() if re.search(r"\.(png|svg)$", line)]


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(list(map(str, words))) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_demonstration_of_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert [p.name for p in drawn(capsys, "draw", "attention", "--out", "a")] == [
        "attention-china.png",
        "attention-flower.png",
    ]
    for what, name in (("correspondence", "correspondence"), ("pca", "pca"), ("patterns", "patterns-patch")):
        (path,) = drawn(capsys, "draw", what, "--format", "svg", "--out", "figures", "--side", 64)
        assert path == Path("figures") / f"{name}.svg"
        found = read_metadata(path.read_bytes())
        assert found["title"] == what
        assert found["checkpoints"][0]["name"] == "demo"
        assert len(found["checkpoints"][0]["sha256"]) == 64


def test_settings_are_in_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    images.save(tmp_path / "x y.png", images.picture(20, 30))
    (path,) = drawn(capsys, "draw", "attention", "x y.png", "--block", 1, "--query", 1, 2, "--mass", 0.5, "--side", 32)
    found = read_metadata(path.read_bytes())
    assert found["pictures"] == ["x y.png"]
    assert found["settings"]["query"] == [1, 2]
    assert (found["settings"]["block"], found["settings"]["mass"]) == (1, 0.5)


def test_pictures_of_one_name_do_not_replace_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    images.tree(tmp_path, {"a": ["x.png"], "b": ["x.png"]})
    files = drawn(capsys, "draw", "attention", "a", "b", "--side", 16)
    assert [path.name for path in files] == ["attention-x.png", "attention-x-2.png"]
    assert all(path.is_file() for path in files)


def test_bank_is_made_opened_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    images.tree(tmp_path, {"data/val/a": 4, "data/val/b": 4})
    common = ["--ckpt", "demo", "--data", "data", "--resize", 32, "--crop", 32]
    assert main([*map(str, ["patterns", *common, "--workers", 0, "--output", "p.safetensors"])]) == 0
    out = capsys.readouterr().out
    assert "128 patches of 8 images" in out
    bank = open_bank(tmp_path / "p.safetensors")
    assert bank.counts.sum() == 8 * 16
    assert bank.class_names == ("a", "b")
    assert not list(tmp_path.glob(".*partial*"))
    words = ["draw", "patterns", "--ckpt", "demo", "--patterns", "p.safetensors", "--count", 2, "--out", "drawn"]
    (path,) = drawn(capsys, *words)
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        assert np.asarray(image.convert("L")).std() > 5
    assert "exists already" in refused(capsys, "patterns", *common, "--output", "p.safetensors")
    assert "another checkpoint" in refused(capsys, *words, "--ckpt", "random:resnet18")
    assert "no prototype has items of 10 images" in refused(capsys, *words, "--sort", "purity")
    assert main([*map(str, ["patterns", *common, "--level", "cls", "--output", "p.safetensors", "--overwrite"])]) == 0
    assert open_bank(tmp_path / "p.safetensors").counts.sum() == 8


def test_a_checkpoint_without_a_head_gets_kmeans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    images.tree(tmp_path, {"data/val/a": 3, "data/val/b": 3})
    words = ["--ckpt", "random:resnet18", "--data", "data", "--resize", 64, "--crop", 64, "--k", 4, "--workers", 0]
    assert main(["patterns", *map(str, words)]) == 0
    assert "no projection head: these are 4 prototypes of spherical k-means" in capsys.readouterr().err
    assert open_bank(tmp_path / "patterns.safetensors").about["prototypes"] == "k-means"


def test_correspondence_of_views_pairs_and_classes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    images.tree(tmp_path, {"data/val/a": 3, "data/val/b": 3})
    common = ["--ckpt", "demo", "--side", 32]
    for words, count in (
        (["data/val/a/0.png"], 1),
        (["data/val/a/0.png", "data/val/a/1.png"], 1),
        (["--data", "data", "--count", 2, "--pairs", "class"], 2),
        (["--data", "data", "--count", 3, "--pairs", "views", "--flip"], 3),
    ):
        (path,) = drawn(capsys, "draw", "correspondence", *words, *common, "--format", "svg")
        assert path.is_file()
        names = read_metadata(path.read_bytes())["pictures"]
        assert len(names) <= 2 * count
    error = refused(capsys, "draw", "correspondence", *["data/val/a/0.png"] * 3, *common)
    assert "do not make pairs" in error


def test_views_are_told_as_they_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    images.save(tmp_path / "x.png", images.picture(64, 64))
    words = ["draw", "correspondence", "x.png", "--side", "32", "--dpi", "40"]
    assert main([*words, "--mutual"]) == 0
    assert re.search(r"% of \d+ mutual matches that both views show", capsys.readouterr().out)
    assert main([*words, "--left-box", "0", "0", "0.4", "1", "--right-box", "0.6", "0", "1", "1"]) == 0
    out = capsys.readouterr().out
    assert "x.png: the views do not overlap" in out
    assert "nan" not in out


@pytest.mark.parametrize("given", [["notes.txt"], ["--data", ".", "--ckpt", "demo"]])
def test_what_is_no_image_is_to_be_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: list[str]
) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    images.tree(tmp_path, {"val/a": 1})
    (tmp_path / "val/a/0.png").write_text("no picture")
    error = refused(capsys, "draw", "attention", *given)
    assert "not an image" in error
    assert "choose another picture" in error
    assert "--bad-images" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attention", "none.png"], "does not exist"),
        (["attention", "text.jpg"], "not an image"),
        (["attention", "x.png", "--block", "7"], "block 7 does not exist"),
        (["attention", "x.png", "--query", "0", "99"], "outside of x.png"),
        (["attention", "x.png", "--show-heads", "9"], "head 9 does not exist"),
        (["attention", "x.png", "--mass", "60"], "not a share"),
        (["attention", "x.png", "--ckpt", "random:resnet18"], "has no attention"),
        (["attention", "x.png", "--side", "0"], "--side 0"),
        (["attention", "x.png", "--dpi", "100000"], "beyond print"),
        (["attention", "x.png", "--out", "x.png"], "not a folder"),
        (["attention", "--data", "x"], "no --ckpt"),
        (["attention", "x.png", "--data", "x", "--ckpt", "demo"], "pictures are named, and --data as well"),
        (["correspondence", "x.png", "--left-box", "0.5", "0", "0.2", "1"], "not a part of the picture"),
        (["correspondence", "x.png", "--pairs", "class"], "give --data"),
        (["correspondence", "x.png", "--ckpt", "random:resnet18", "--block", "1"], "choose the last block"),
        (["patterns", "x.png"], "not from single pictures"),
        (["patterns", "--patterns", "none.safetensors"], "there is no file"),
        (["patterns", "--patterns", "text.jpg"], "damaged"),
        (["patterns", "--prototypes", "64"], "no prototype 64"),
        (["pca", "x.png", "--side", "8"], "no three components"),
    ],
)
def test_mistakes_are_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str
) -> None:
    images.save(tmp_path / "x.png", images.picture(20, 20))
    (tmp_path / "text.jpg").write_text("no picture")
    assert message in refused(capsys, "draw", *words)


def test_activation_maps_of_a_cnn(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["draw", "attention", "--style", "activation", "--ckpt", "random:resnet18", "--side", 64]
    assert [path.name for path in drawn(capsys, *words)] == ["activation-china.png", "activation-flower.png"]
