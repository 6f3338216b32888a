"""What the app reads and shows: images of --data only, uploads under limits, names never as markup."""

from __future__ import annotations

import io
import string
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("streamlit")
pytest.importorskip("streamlit_image_coordinates")

from dashboards.clicking import patch_at, patch_of, place_of, place_text, read_place
from dashboards.frame import WORD_JOINER, plain
from dashboards.gallery import Folder, Samples
from dashboards.taking import file_name
from dashboards.uploads import KEPT, PREFIX, Uploads, open_checked
from ibot_eval.errors import BadImage, DataError
from ibot_eval.visual.pictures import Picture, Source


def save(path: Path, colour: tuple[int, int, int] = (200, 10, 60)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 12), colour).save(path)
    return path


def encoded(image: Image.Image, form: str, **settings: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **settings)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds next to nothing: what a decompression bomb looks like."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def test_images_are_listed_by_folder_and_opened_by_name(tmp_path: Path) -> None:
    save(tmp_path / "top.png")
    save(tmp_path / "cats" / "a.png", (1, 2, 3))
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    gallery = Folder(tmp_path)
    assert gallery.folders == {"": ["top.png"], "cats": ["a.png"]}
    assert gallery.notes == []
    assert gallery.open("cats/a.png").image.getpixel((0, 0)) == (1, 2, 3)
    before = gallery.stamp("cats/a.png")
    Image.new("RGB", (21, 12)).save(tmp_path / "cats" / "a.png")
    assert gallery.stamp("cats/a.png") != before


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "cats/../../secret.png", "/etc/passwd", "cats/./a.png", "cats//a.png", "CATS/a.png", "", "cats"],
)
def test_names_that_are_not_in_the_list_are_refused(name: str, tmp_path: Path) -> None:
    save(tmp_path / "secret.png")
    save(tmp_path / "data" / "cats" / "a.png")
    gallery = Folder(tmp_path / "data")
    with pytest.raises(DataError, match="no such image"):
        gallery.open(name)


def test_links_out_of_the_folder_are_refused_and_links_inside_are_not(tmp_path: Path) -> None:
    secret = save(tmp_path / "elsewhere" / "secret.png")
    data = tmp_path / "data"
    save(data / "a.png")
    (data / "out.png").symlink_to(secret)
    (data / "folder").symlink_to(secret.parent, target_is_directory=True)
    (data / "in.png").symlink_to(data / "a.png")
    gallery = Folder(data)
    assert gallery.folders == {"": ["a.png", "in.png"]}
    assert gallery.notes == [f"2 images are links that lead out of {data}: left out"]
    assert gallery.open("in.png").image.size == (20, 12)
    # A file may become a link after it was listed.
    (data / "a.png").unlink()
    (data / "a.png").symlink_to(secret)
    with pytest.raises(DataError, match="leads out"):
        gallery.open("a.png")
    with pytest.raises(DataError, match="leads out"):
        gallery.open("in.png")


def test_a_folder_whose_name_begins_alike_is_outside(tmp_path: Path) -> None:
    save(tmp_path / "data-private" / "secret.png")
    save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "b.png").symlink_to(tmp_path / "data-private" / "secret.png")
    assert Folder(tmp_path / "data").folders == {"": ["a.png"]}


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    save(tmp_path / "real" / "x" / "a.png")
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    assert Folder(tmp_path / "link").open("x/a.png").image.size == (20, 12)


def test_a_folder_without_images_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="no images"):
        Folder(tmp_path)


def test_the_sample_pictures_are_those_of_scikit_learn() -> None:
    samples = Samples()
    assert samples.folders == {"": ["china.jpg", "flower.jpg"]}
    assert samples.open("china.jpg").image.size == (640, 427)
    with pytest.raises(DataError):
        samples.open("../china.jpg")


def test_uploads_are_known_by_their_content() -> None:
    uploads = Uploads()
    data = encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG")
    key = uploads.add(data, r"C:\photos\dot.png")
    assert key.startswith(PREFIX)
    assert uploads.add(data, "again.png") == key
    assert uploads.open(key).image.getpixel((0, 0)) == (9, 8, 7)
    others = [uploads.add(encoded(Image.new("RGB", (1, 1), (i, 0, 0)), "PNG"), f"{i}.png") for i in range(KEPT)]
    assert key not in uploads
    assert all(other in uploads for other in others)
    with pytest.raises(DataError, match="no longer here"):
        uploads.open(key)
    with pytest.raises(DataError, match="no longer here"):
        uploads.open("upload:../../etc/passwd")


def test_only_the_last_part_of_an_uploads_name_is_kept() -> None:
    uploads = Uploads()
    key = uploads.add(encoded(Image.new("RGB", (2, 2)), "PNG"), "../../home/me/.ssh/x.png")
    assert uploads.get(key).name == uploads.open(key).name == "x.png"


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (b"just text, whatever it is called\n", "notes.jpg", "notes.jpg is not a picture"),
        (b"", "empty.png", "empty.png is not a picture"),
        (POSTSCRIPT, "drawing.png", "not a picture that can be read here"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "x.png", "x.png"),
        (encoded(Image.new("RGB", (64, 64)), "PNG")[:60], "cut.png", "cannot decode the image cut.png"),
        (png_header(8000, 5001), "bomb.png", "8,000 x 5,001 pixels"),
        (png_header(60000, 60000), "bomb.png", "far too many pixels"),
        (b"\xff\xd8\xff" + bytes(10_000_001), "large.jpg", "10.0 MB"),
    ],
)
def test_uploads_that_cannot_be_pictures_are_refused(data: bytes, name: str, message: str) -> None:
    uploads = Uploads()
    with pytest.raises(BadImage, match=message):
        uploads.add(data, name)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    source = open_checked(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), "moving.gif")
    assert source.image.getpixel((4, 4)) == (255, 0, 0)
    assert any("first of 2 frames" in note for note in source.notes)


def test_markdown_in_names_is_escaped() -> None:
    for mark in string.punctuation:
        assert plain(mark) == f"\\{mark}" if mark != "@" else plain(mark).startswith("\\@")
    assert plain("a b.png") == r"a b\.png"
    assert plain("www.x") == f"www{WORD_JOINER}\\.x"
    assert WORD_JOINER in plain("https://x")
    # The symbols and icons that streamlit's page makes of words of their own.
    for symbol in ("<->", "->", "<-", "--", ">=", "<=", "~="):
        shown = plain(f"a {symbol} b {symbol}").replace("\\", "")
        assert shown == f"a {symbol[0]}{WORD_JOINER}{symbol[1:]} b {symbol[0]}{WORD_JOINER}{symbol[1:]}"
    assert plain("a--b") == r"a\-\-b"
    assert plain(":material_home:") == rf"\:{WORD_JOINER}material\_home\:"
    # Two spaces before a line's end break it; a line that begins with a mark is no list and no heading.
    assert plain("a\n- b\n# c") == "a  \n\\- b  \n\\# c"


def test_names_of_downloads_are_plain() -> None:
    assert file_name("attention", "../../ä b<c>", "vit-s/14") == "attention-b-c-vit-s-14"
    assert file_name("", "///") == "figure"
    assert len(file_name("x" * 500)) == 80


def picture(rows: int, columns: int, patch: int = 4) -> Picture:
    image = Image.fromarray(np.zeros((rows * patch, columns * patch, 3), np.uint8))
    return Picture(Source("x", image, ""), image, patch)


@pytest.mark.parametrize("grid", [(1, 1), (3, 7), (16, 24), (37, 37)])
def test_a_patch_is_found_again_from_its_place(grid: tuple[int, int]) -> None:
    for row in range(grid[0]):
        for column in range(grid[1]):
            place = read_place(place_text(place_of((row, column), grid)))
            assert place is not None
            assert patch_at(place, grid) == (row, column)
    assert patch_at((1.0, 1.0), grid) == (grid[0] - 1, grid[1] - 1)


def test_places_carry_over_to_other_patch_sizes() -> None:
    assert patch_at(place_of((1, 2), (4, 4)), (8, 8)) == (3, 5)
    assert patch_at(place_of((3, 5), (8, 8)), (4, 4)) == (1, 2)


@pytest.mark.parametrize("text", [None, "", "cls", "0.5", "a,b", "1.5,0", "-1,0", "nan,0.1", "0.1,0.2,0.3", "<b>,0"])
def test_what_is_no_place_is_cls(text: str | None) -> None:
    assert read_place(text) is None


def test_clicks_become_patches() -> None:
    shown = picture(3, 6)
    # 6 columns over 300 pixels, 3 rows over 150: 50 pixels each.
    assert patch_of(shown, {"x": 49, "y": 0, "width": 300, "height": 150}) == (0, 0)
    assert patch_of(shown, {"x": 50, "y": 149, "width": 300, "height": 150}) == (2, 1)
    assert patch_of(shown, {"x": 300, "y": 150, "width": 300, "height": 150}) == (2, 5)
    for nonsense in (
        {},
        {"x": 1},
        {"x": "1", "y": 1, "width": 2, "height": 2},
        dict.fromkeys(("x", "y", "width", "height"), 0),
    ):
        assert patch_of(shown, nonsense) is None
