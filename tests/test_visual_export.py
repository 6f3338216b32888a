"""Files that tell where they come from, and command lines that draw a view again."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from ibot_eval.cli import parse
from ibot_eval.commands.draw import Draw
from ibot_eval.commands.patterns import Patterns
from ibot_eval.errors import DataError
from ibot_eval.figures import new_figure
from ibot_eval.settings import CheckpointSettings, DataSettings
from ibot_eval.visual import command_lines
from ibot_eval.visual.export import array_png, figure_bytes, provenance, read_metadata
from ibot_eval.visual.pattern_bank import PatternBank
from ibot_eval.visual.pictures import Source, source_of
from tests import looking

HOSTILE = "<script>alert('x')</script> & \"é\" \udcff\x07.png"


def about(pictures: tuple[str, ...] = ("a.png",)):
    loaded = looking.loaded_of(looking.PixelBackbone())
    settings = {"block": -1, "query": None, "patterns": Path("x/y")}
    return provenance("attention", loaded, settings, pictures, f"ibot-eval draw attention {pictures[0]}")


def figure():
    drawn = new_figure(2, 1.5)
    ax = drawn.subplots()
    ax.imshow(np.arange(12).reshape(3, 4))
    ax.set_title("a title")
    return drawn


@pytest.mark.parametrize("form", ["png", "svg"])
@pytest.mark.parametrize("name", ["a.png", HOSTILE])
def test_metadata_comes_back(form: str, name: str) -> None:
    data = figure_bytes(figure(), about((name,)), form)
    found = read_metadata(data)
    assert found["checkpoints"] == [
        {"name": "fake.pth", "sha256": "a" * 64, "key": "teacher", "architecture": "pixels"}
    ]
    assert found["settings"] == {"block": -1, "query": None, "patterns": "x/y"}
    assert found["pictures"] == [name]
    assert found["command"] == f"ibot-eval draw attention {name}"
    assert found["software"].startswith("ibot-eval ")


def test_png_has_text_chunks_and_print_quality() -> None:
    with Image.open(io.BytesIO(figure_bytes(figure(), about()))) as image:
        assert image.size == (600, 450)
        assert round(image.info["dpi"][0]) == 300
        assert image.info["Checkpoint SHA-256"] == "a" * 64
        assert image.info["Checkpoint"] == "fake.pth"
        assert json.loads(image.info["ibot-eval"])["title"] == "attention"


def test_svg_is_well_formed_and_holds_no_markup_of_names() -> None:
    data = figure_bytes(figure(), about((HOSTILE,)), "svg")
    root = ElementTree.fromstring(data)
    assert root.find(".//{http://www.w3.org/2000/svg}metadata") is not None
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert b"<script" not in data
    # Text is drawn as paths: no font is needed to show it.
    assert root.find(".//{http://www.w3.org/2000/svg}text") is None


@pytest.mark.parametrize("form", ["png", "svg"])
def test_same_figure_same_bytes(form: str) -> None:
    assert figure_bytes(figure(), about(), form) == figure_bytes(figure(), about(), form)


def test_arrays_as_png() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    data = array_png(pixels, about())
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(np.asarray(image), pixels)
    assert read_metadata(data)["title"] == "attention"


def test_files_without_metadata() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG")
    for data in (buffer.getvalue(), b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"text"):
        with pytest.raises(DataError, match="does not tell"):
            read_metadata(data)


def parsed(line: str, name: str = "draw") -> Draw:
    words = shlex.split(line)
    assert words[:2] == ["ibot-eval", name]
    return parse(Draw if name == "draw" else Patterns, words[2:], name)  # type: ignore[return-value]


def sources(*paths: str) -> list[Source]:
    image = Image.new("RGB", (4, 4))
    return [source_of(image, Path(path).name, path=Path(path)) for path in paths]


CHECKPOINT = CheckpointSettings(ckpt="my weights/a'b.pth", key="student", grid=(3, 4))


def test_attention_line_means_what_was_shown() -> None:
    given = sources("a folder/é.jpg", "$HOME.png")
    line = command_lines.draw_attention(
        CHECKPOINT, given, side=448, block=3, query=(2, 5), mass=0.8, heads=[0, 4], style="overlay", smooth=True
    )
    found = parsed(line)
    assert found.what == "attention"
    assert found.pictures == (Path("a folder/é.jpg"), Path("$HOME.png"))
    assert found.checkpoint == CHECKPOINT
    assert (found.side, found.block, found.query, found.mass) == (448, 3, (2, 5), 0.8)
    assert (found.show_heads, found.style, found.smooth) == ((0, 4), "overlay", True)
    short = command_lines.draw_attention(CheckpointSettings(ckpt="demo"), sources("a.jpg"))
    assert short == "ibot-eval draw attention a.jpg --ckpt demo"
    assert parsed(command_lines.draw_attention(CHECKPOINT, given, block=-2)).block == -2


def test_correspondence_line() -> None:
    left, right = sources("l.png", "r.png")
    line = command_lines.draw_correspondence(
        CHECKPOINT,
        left,
        right,
        similarity="cosine",
        mutual=True,
        top=5,
        left_box=(0, 0.1, 0.5, 1),
        right_box=(0, 0, 1, 1),
        flip=True,
        patch=(1, 2),
    )
    found = parsed(line)
    assert found.pictures == (Path("l.png"), Path("r.png"))
    assert (found.similarity, found.mutual, found.top, found.flip, found.query) == ("cosine", True, 5, True, (1, 2))
    assert (found.left_box, found.right_box) == ((0, 0.1, 0.5, 1), None)


def test_pca_and_pattern_lines(tmp_path: Path) -> None:
    found = parsed(command_lines.draw_pca(CHECKPOINT, sources("a.png"), foreground=False))
    assert (found.what, found.foreground) == ("pca", False)
    empty = np.zeros((1, 1))
    bank = PatternBank(empty, empty, empty, empty, empty, empty, None, [], (), {}, path=tmp_path / "b c.safetensors")
    found = parsed(command_lines.draw_patterns(CHECKPOINT, bank, [3, 1], sort="purity", context=None))
    assert (found.what, found.patterns, found.prototypes, found.sort) == ("patterns", bank.path, (3, 1), "purity")
    made = parsed(
        command_lines.make_patterns(CHECKPOINT, DataSettings(data="x", crop=112), level="cls", output=Path("o")),
        "patterns",
    )
    assert (made.checkpoint, made.data.data, made.data.crop) == (CHECKPOINT, "x", 112)


def test_an_upload_is_called_by_its_name() -> None:
    upload = source_of(Image.new("RGB", (4, 4)), "--out.png")
    assert parsed(command_lines.draw_attention(CHECKPOINT, [upload])).pictures == (Path("--out.png"),)


def test_a_path_that_begins_with_a_dash_is_no_flag() -> None:
    given = [source_of(Image.new("RGB", (4, 4)), "x.png", path=Path(path)) for path in ("-x.png", "--out/x.png", "/x")]
    line = command_lines.draw_pca(CHECKPOINT, given)
    assert "./-x.png ./--out/x.png /x " in line
    assert parsed(line).pictures == tuple(source.path for source in given)
