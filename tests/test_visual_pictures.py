"""Pictures of any size and kind, cut to whole patches; what is refused, and with which words."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from ibot_eval.errors import BadImage, ConfigError, DataError
from ibot_eval.visual import pictures
from ibot_eval.visual.grids import whole_patches
from ibot_eval.visual.pictures import image_files, open_path, open_upload, prepare, sample_sources, view
from ibot_eval.visual.pictures import with_patch_marked as marked
from tests import images, looking

BACKBONE = looking.PixelBackbone(patch=8)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [(64, 64, (4, 4)), (64, 128, (4, 8)), (100, 63, (6, 4)), (1, 1, (4, 4)), (30, 200, (4, 27))],
)
def test_shorter_side_and_whole_patches(height: int, width: int, grid: tuple[int, int]) -> None:
    picture = prepare(looking.noise(height, width), BACKBONE, 32)
    assert picture.grid == grid
    assert picture.image.size == (8 * grid[1], 8 * grid[0])
    assert picture.tensor(BACKBONE).shape == (1, 3, 8 * grid[0], 8 * grid[1])


def test_pixels_are_pils_bicubic_and_normalised() -> None:
    source = looking.noise(64, 96)
    backbone = looking.PixelBackbone(patch=8)
    backbone.mean, backbone.std = (0.5, 0.25, 0.1), (0.5, 0.2, 0.3)
    wanted = np.asarray(source.image.resize((48, 32), Image.Resampling.BICUBIC), np.float32) / 255
    wanted = (wanted - np.array(backbone.mean)) / np.array(backbone.std)
    found = prepare(source, backbone, 32).tensor(backbone)[0].permute(1, 2, 0)
    torch.testing.assert_close(found, torch.from_numpy(wanted).float(), rtol=1e-5, atol=1e-5)


def test_a_picture_that_fits_is_left_as_it_is() -> None:
    source = looking.noise(32, 48)
    assert np.array_equal(prepare(source, BACKBONE, 32).pixels(), np.asarray(source.image))


def test_limit_of_patches_is_kept_and_told() -> None:
    picture = prepare(looking.noise(40, 20_000 // 8), BACKBONE, 320)
    assert picture.grid[0] * picture.grid[1] <= pictures.MAX_TOKENS
    assert any("reduced to" in note and "4,096 are the limit" in note for note in picture.notes)
    assert picture.grid == (8, 500)
    small = prepare(looking.noise(64, 64), BACKBONE, 64, max_tokens=10)
    assert small.grid == (3, 3)


@pytest.mark.parametrize(
    ("height", "width", "limit"), [(100, 20_000, 4096), (20_000, 100, 4096), (427, 640, 97), (100, 250, 23), (1, 9, 9)]
)
def test_limit_of_patches_keeps_the_proportions(height: int, width: int, limit: int) -> None:
    rows, columns = whole_patches(height, width, 10_000, 14, limit)[0]
    assert rows * columns <= limit
    shorter, longer = sorted((rows, columns))
    assert (rows < columns) == (height < width)
    assert abs(longer - shorter * max(height, width) / min(height, width)) < 1


def test_the_longer_side_follows_from_the_shorter() -> None:
    # 100 pixels are 6.25 patches of 16: from 6 of them follow 24.4 columns, from 6.25 it would be 25.4.
    assert whole_patches(150, 610, 100, 16, 4096)[0] == (6, 24)


def test_a_line_of_pixels_is_refused() -> None:
    with pytest.raises(ConfigError, match="even one row of them"):
        prepare(looking.noise(1, 20_000), BACKBONE, 224)


def test_a_single_pixel_is_enlarged_and_told() -> None:
    picture = prepare(open_upload(png(np.full((1, 1, 3), 9, np.uint8)), "one.png"), BACKBONE, 32)
    assert (picture.pixels() == 9).all()
    assert any("only 1 x 1 pixels" in note for note in picture.notes)


def test_text_called_jpg(tmp_path: Path) -> None:
    path = tmp_path / "text.jpg"
    path.write_text("no picture")
    with pytest.raises(BadImage, match="not an image"):
        open_path(path)
    with pytest.raises(BadImage, match="not an image"):
        open_upload(b"no picture", "text.jpg")


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    for source in (open_path(tmp_path / "a.gif"), open_upload((tmp_path / "a.gif").read_bytes(), "a.gif")):
        assert source.image.getpixel((3, 3)) == (255, 0, 0)
        assert any("first of 2 frames" in note for note in source.notes)
        assert prepare(source, BACKBONE, 16).notes == source.notes


def test_pages_of_a_tiff_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL takes seconds to count tens of thousands of them, which fit into an upload."""
    counted = []
    monkeypatch.setattr(TiffImageFile, "n_frames", property(lambda _: counted.append(1) or 3))
    pages = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    pages[0].save(tmp_path / "a.tiff", save_all=True, append_images=pages[1:])
    counted.clear()
    assert open_path(tmp_path / "a.tiff").notes == ("a file of several pages: the first is shown",)
    pages[0].save(tmp_path / "one.tiff")
    assert open_path(tmp_path / "one.tiff").notes == ()
    assert not counted


def test_uploads_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(images.picture(20, 20))
    monkeypatch.setattr(pictures, "UPLOAD_PIXELS", 399)
    with pytest.raises(BadImage, match="20 x 20 pixels"):
        open_upload(data, "large.png")
    monkeypatch.setattr(pictures, "UPLOAD_BYTES", len(data) - 1)
    with pytest.raises(BadImage, match=r"large\.png has .* MB"):
        open_upload(data, "large.png")


def test_bomb_is_refused_before_it_is_decoded() -> None:
    # 60,000 x 60,000 white pixels in a file of some kilobytes: decoding would take 3.6 GB.
    header = io.BytesIO()
    Image.new("1", (60_000, 8)).save(header, "PNG")
    data = bytearray(header.getvalue())
    data[20:24] = (60_000).to_bytes(4, "big")
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    with pytest.raises(BadImage, match="bomb"):
        open_upload(bytes(data), "bomb.png")


@pytest.mark.parametrize("name", ["../../etc/passwd", r"C:\folder\a.png", "folder/a.png", ""])
def test_names_of_uploads_have_no_folders(name: str) -> None:
    found = open_upload(png(images.picture()), name).name
    assert found in {"passwd", "a.png", "upload"}


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        open_path(tmp_path)
    with pytest.raises(BadImage, match="does not exist"):
        open_path(tmp_path / "none.png")
    with pytest.raises(DataError, match="no images directly"):
        image_files([tmp_path])
    images.tree(tmp_path, {"pictures": ["b10.png", "b9.png", "a.png"]})
    (tmp_path / "pictures" / "notes.txt").write_text("")
    found = image_files([tmp_path / "pictures", tmp_path / "x.png"], count=2)
    assert [path.name for path in found] == ["a.png", "b9.png", "x.png"]


def test_samples_come_with_scikit_learn() -> None:
    sources = sample_sources()
    assert [(source.name, source.image.size) for source in sources] == [
        ("china.jpg", (640, 427)),
        ("flower.jpg", (640, 427)),
    ]


def test_a_view_is_the_cropped_and_mirrored_part() -> None:
    source = looking.noise(64, 64)
    picture = view(source, BACKBONE, (0.25, 0.5, 0.75, 1.0), flip=True, side=32)
    pixels = np.asarray(source.image)[32:64, 16:48]
    assert np.array_equal(picture.pixels(), pixels[:, ::-1])
    assert picture.box == (0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("box", [(0.5, 0, 0.5, 1), (0.6, 0, 0.5, 1), (-0.1, 0, 1, 1), (0, 0, 1, 1.01)])
def test_boxes_outside_of_the_picture(box: tuple[float, float, float, float]) -> None:
    with pytest.raises(ConfigError, match="not a part of the picture"):
        view(looking.noise(16, 16), BACKBONE, box)


def test_hash_changes_with_everything_that_is_shown() -> None:
    source = looking.noise(64, 64)
    shown = [
        prepare(source, BACKBONE, 32),
        prepare(source, BACKBONE, 64),
        view(source, BACKBONE, (0, 0, 0.5, 1), side=32),
        view(source, BACKBONE, (0, 0, 1, 1), flip=True, side=32),
        prepare(looking.noise(64, 64, seed=1), BACKBONE, 32),
        prepare(source, looking.PixelBackbone(patch=16), 32),
    ]
    assert len({picture.sha256 for picture in shown}) == len(shown)
    assert prepare(looking.noise(64, 64), BACKBONE, 32).sha256 == shown[0].sha256


@pytest.mark.parametrize(
    ("x", "y", "patch"), [(0, 0, (0, 0)), (299, 99, (3, 11)), (300, 100, (3, 11)), (30, 55, (2, 1)), (-5, 20, (0, 0))]
)
def test_clicks(x: float, y: float, patch: tuple[int, int]) -> None:
    picture = prepare(looking.noise(32, 96), BACKBONE, 32)
    assert picture.grid == (4, 12)
    assert picture.patch_at(x, y, 300, 100) == patch


def test_the_marked_patch_is_framed_where_it_was_clicked() -> None:
    picture = prepare(looking.source(np.zeros((32, 64, 3), np.uint8)), BACKBONE, 32)
    shown = np.asarray(marked(picture, (1, 6), 320))
    assert shown.shape == (320, 640, 3)
    yellow = (shown == (255, 255, 0)).all(axis=2)
    rows, columns = np.nonzero(yellow)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (80, 159, 480, 559)
    assert not (np.asarray(marked(picture, None, 320)) == (255, 255, 0)).all(axis=2).any()
