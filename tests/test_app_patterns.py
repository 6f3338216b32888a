"""The page of patterns with a bank of one's own: whose images it shows, and what it says of them."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("streamlit")
pytest.importorskip("streamlit_image_coordinates")

from dashboards import banks, networks
from dashboards.given import VARIABLE, Given
from ibot_eval import cli
from ibot_eval.errors import DataError
from ibot_eval.visual.pattern_layouts import BEYOND
from ibot_eval.visual.patterns import assign
from ibot_eval.visual.pictures import open_path
from tests.app_pages import command, opened, own_caches, run, text

__all__ = ["own_caches"]  # a fixture


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve pictures of two classes, twice as wide as high, their middles unlike their sides."""
    folder = tmp_path / "data"
    for number in range(12):
        random = np.random.default_rng(number)
        pixels = np.repeat(random.integers(60, 255, (64, 16, 3)), 8, axis=1).astype(np.uint8)
        pixels[:, 32:96] = random.integers(60, 255, 3)
        path = folder / "val" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


def made(data: Path, level: str = "patch") -> Path:
    bank = data.parent / f"{level}.safetensors"
    words = ["patterns", "--data", str(data), "--level", level, "--output", str(bank), "--device", "cpu"]
    assert cli.main([*words, "--ckpt", "demo", "--workers", "0", "--resize", "64", "--crop", "64"]) == 0
    return bank


def given(monkeypatch: pytest.MonkeyPatch, bank: Path, data: Path | None) -> Given:
    settings = Given(patterns=str(bank), data=None if data is None else str(data), device="cpu")
    monkeypatch.setenv(VARIABLE, settings.as_json())
    return settings


@pytest.mark.parametrize("named", [True, False])
def test_links_out_of_the_data_are_grey(named: bool, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = made(data)
    linked = data / "val" / "class0" / "2.png"
    linked.rename(data.parent / "secret.png")
    linked.symlink_to(data.parent / "secret.png")
    given(monkeypatch, bank, data if named else None)
    opened_bank = banks.bank()
    assert opened_bank is not None
    images = banks.images(opened_bank)
    assert any("1 images are links that lead out" in note for note in images.notes)
    for number, image_id in enumerate(opened_bank.image_ids):
        assert (images.image(number) == BEYOND).all() == (image_id == "val/class0/2.png")
    # A file may become a link after it was looked at.
    other = data / "val" / "class1" / "1.png"
    other.unlink()
    other.symlink_to(data.parent / "secret.png")
    assert (images.image(opened_bank.image_ids.index("val/class1/1.png")) == BEYOND).all()


def test_data_that_holds_other_images_is_not_passed_over(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = made(data)
    moved = data.parent / "moved"
    shutil.copytree(data, moved)
    (moved / "val" / "class1" / "3.png").unlink()
    app = opened(monkeypatch, "patterns", given(monkeypatch, bank, moved))
    assert "1 of 12 images" in app.error[0].value.replace("\\", "")
    assert "without" in app.error[0].value
    assert not app.code
    empty = data.parent / "empty"
    empty.mkdir()
    given(monkeypatch, bank, empty)
    opened_bank = banks.bank()
    assert opened_bank is not None
    with pytest.raises(DataError, match="cannot be opened"):
        banks.images(opened_bank)
    # Without --data the bank's own folder is meant.
    app = opened(monkeypatch, "patterns", given(monkeypatch, bank, None))
    assert not app.error
    assert "--data" not in command(app)


def test_the_command_names_the_data(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bank = made(data)
    moved = data.rename(data.parent / "demo")  # as --data is spelled, that would be scikit-learn's digits
    monkeypatch.chdir(tmp_path)
    app = opened(monkeypatch, "patterns", given(monkeypatch, bank, Path(moved.name)))
    words = shlex.split(command(app))
    assert words[words.index("--data") + 1] == "./demo"
    assert cli.main([*words[1:], "--dpi", "30"]) == 0


def test_no_prototype_is_pure_by_few_images(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9, 12):
        (data / "val" / f"class{number % 2}" / f"{number}.png").unlink()
    app = opened(monkeypatch, "patterns", given(monkeypatch, made(data), None))
    assert app.code
    app.selectbox(key="patterns.order").set_value("purity")
    run(app)
    assert "no prototype has items of 10 images" in app.info[-1].value.lower()
    assert not app.code
    assert not app.get("download_button")


def test_whole_images_are_cut_as_those_of_the_bank(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = given(monkeypatch, made(data, "cls"), data)
    bank = banks.bank()
    assert bank is not None
    network = networks.network("demo")
    wide = 0
    for prototype, row in enumerate(bank.images):
        for image in row[row >= 0]:
            source = open_path(data / bank.image_ids[image])
            seen = banks.seen(bank, network, source, 224)
            assert (seen.pixels() == np.asarray(source.image)[:, 32:96]).all()
            assert seen.box == (0.25, 0, 0.75, 1)
            assert assign(bank, network.loaded, seen).prototypes.tolist() == [[prototype]]
            wide += 1
    assert wide == 12
    app = opened(monkeypatch, "patterns", settings)
    assert "the middle of it" in text(app)
    assert not [box for box in app.selectbox if box.key == "patterns.side"]
