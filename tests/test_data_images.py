"""Decoding: every kind of image becomes upright 8-bit RGB, or a BadImage that names the file."""

from __future__ import annotations

import errno
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ibot_eval.data.images import IMAGE_EXTENSIONS, load_rgb, to_rgb
from ibot_eval.errors import BadImage, DataError

from . import images


def rgb(path: Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = load_rgb(path, str(path))
    assert image.mode == "RGB"
    return np.asarray(image)


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=-1)


def test_rgb_is_untouched(tmp_path: Path) -> None:
    np.testing.assert_array_equal(rgb(images.save(tmp_path / "a.png")), images.picture())


@pytest.mark.parametrize("alpha", [False, True])
def test_greyscale(tmp_path: Path, alpha: bool) -> None:
    values = images.picture()[..., 0]
    image = Image.fromarray(values)
    if alpha:
        image.putalpha(100)
        assert image.mode == "LA"
    image.save(tmp_path / "a.png")
    np.testing.assert_array_equal(rgb(tmp_path / "a.png"), grey(values))


def test_rgba_keeps_the_colours_beneath(tmp_path: Path) -> None:
    pixels = images.picture()
    image = Image.fromarray(pixels)
    image.putalpha(Image.fromarray(images.picture(seed=1)[..., 0]))
    image.save(tmp_path / "a.png")
    np.testing.assert_array_equal(rgb(tmp_path / "a.png"), pixels)


@pytest.mark.parametrize("transparency", [None, 1, b"\x00\x40\xff"])
def test_palette(tmp_path: Path, transparency: int | bytes | None) -> None:
    colours = np.array([[250, 10, 20], [0, 90, 200], [7, 8, 9]], np.uint8)
    places = np.arange(12, dtype=np.uint8).reshape(3, 4) % 3
    image = Image.fromarray(places, "P")
    image.putpalette(colours.ravel().tolist())
    settings: dict[str, Any] = {} if transparency is None else {"transparency": transparency}
    image.save(tmp_path / "a.png", **settings)
    np.testing.assert_array_equal(rgb(tmp_path / "a.png"), colours[places])


def test_one_bit(tmp_path: Path) -> None:
    bits = images.picture()[..., 0] > 127
    Image.fromarray(bits).save(tmp_path / "a.png")
    np.testing.assert_array_equal(rgb(tmp_path / "a.png"), grey(bits * np.uint8(255)))


@pytest.mark.parametrize("ending", [".png", ".tif", ".pgm"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, ending: str) -> None:
    values = np.array([[0, 257, 300, 25700], [40000, 65000, 65278, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / f"a{ending}")
    expected = np.array([[0, 1, 1, 100], [156, 253, 254, 255]], np.uint8)  # values / 257, to the nearest
    np.testing.assert_array_equal(rgb(tmp_path / f"a{ending}"), grey(expected))


def test_big_endian_sixteen_bits() -> None:
    values = np.array([[0, 25700, 65535]], ">u2")
    image = Image.frombytes("I;16B", (3, 1), values.tobytes())
    np.testing.assert_array_equal(np.asarray(to_rgb(image, "a")), grey(np.array([[0, 100, 255]], np.uint8)))


def test_thirty_two_bit_integers(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 25700, 65535]], np.int32)).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(rgb(tmp_path / "a.tif"), grey(np.array([[0, 100, 255]], np.uint8)))
    Image.fromarray(np.array([[0, 70000]], np.int32)).save(tmp_path / "b.tif")
    with pytest.raises(BadImage, match=r"b\.tif has integer pixels outside 0 to 65535"):
        rgb(tmp_path / "b.tif")


def test_floats_are_scaled_from_0_to_1_and_refused_beyond(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 0.5, 1]], np.float32)).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(rgb(tmp_path / "a.tif"), grey(np.array([[0, 128, 255]], np.uint8)))
    for i, value in enumerate([1.5, -0.1, np.nan]):
        Image.fromarray(np.array([[0, value]], np.float32)).save(tmp_path / f"{i}.tif")
        with pytest.raises(BadImage, match="float pixels outside 0 to 1"):
            rgb(tmp_path / f"{i}.tif")


def test_cmyk(tmp_path: Path) -> None:
    inks = np.array([[[0, 0, 0, 0], [255, 255, 255, 0], [0, 0, 0, 255], [0, 255, 255, 0]]], np.uint8)
    expected = np.array([[[255] * 3, [0] * 3, [0] * 3, [255, 0, 0]]])
    Image.fromarray(inks, "CMYK").save(tmp_path / "a.tif")
    np.testing.assert_array_equal(rgb(tmp_path / "a.tif"), expected)
    big = Image.fromarray(np.repeat(np.repeat(inks, 16, 0), 16, 1), "CMYK")
    big.save(tmp_path / "a.jpg", quality=100)  # PIL writes the inverted inks of Adobe
    assert b"Adobe" in (tmp_path / "a.jpg").read_bytes()
    np.testing.assert_allclose(rgb(tmp_path / "a.jpg")[8:9, 8::16].astype(int), expected, atol=3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int) -> None:
    upright = images.picture()
    np.testing.assert_array_equal(rgb(images.with_orientation(tmp_path / "a.png", upright, orientation)), upright)


@pytest.mark.parametrize("exif", [b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01"])
def test_malformed_exif_is_ignored(tmp_path: Path, exif: bytes) -> None:
    path = images.save(tmp_path / "a.jpg", np.full((8, 8, 3), 90, np.uint8), exif=exif)
    assert abs(int(rgb(path)[4, 4, 1]) - 90) < 3


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (5, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert (rgb(tmp_path / "a.gif") == [255, 0, 0]).all()


def test_a_stream(tmp_path: Path) -> None:
    data = io.BytesIO(images.save(tmp_path / "a.png").read_bytes())
    np.testing.assert_array_equal(np.asarray(load_rgb(data, "x")), images.picture())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"the image .*bad\.jpg: the file is empty \(0 bytes\)"),
        (b"<html>404</html>", r"bad\.jpg: this is not an image that PIL can read"),
        (b"\xff\xd8\xff\xe0garbage", r"bad\.jpg: "),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, r"bad\.jpg: "),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    with pytest.raises(BadImage, match=message):
        rgb(path)
    if not content:
        with pytest.raises(BadImage, match="member 7: the file is empty"):
            load_rgb(io.BytesIO(content), "member 7")


def test_truncated_and_missing(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"half\.jpg: .*truncated"):
        rgb(images.truncated(tmp_path / "half.jpg"))
    data = images.save(tmp_path / "a.png", images.picture(64, 64)).read_bytes()
    (tmp_path / "half.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadImage, match=r"half\.png"):
        rgb(tmp_path / "half.png")
    with pytest.raises(BadImage, match=r"gone\.png: the file does not exist"):
        rgb(tmp_path / "gone.png")


def test_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = images.save(tmp_path / "bomb.png", images.picture(20, 20))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 250)
    assert rgb(path).shape == (20, 20, 3)  # PIL would warn from 250 pixels; it refuses from twice that
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 199)
    with pytest.raises(BadImage, match=r"bomb\.png: .*decompression bomb"):
        rgb(path)


def test_lab(tmp_path: Path) -> None:
    Image.new("LAB", (4, 4), (255, 128, 128)).save(tmp_path / "lab.tif")  # full lightness, no colour
    assert rgb(tmp_path / "lab.tif").min() >= 253


@pytest.mark.parametrize("mode", ["La", "RGBa", "PA", "HSV", "YCbCr"])
def test_rare_modes(mode: str) -> None:
    image = Image.new("L", (2, 2), 102).convert({"La": "LA", "RGBa": "RGBA"}.get(mode, "RGB")).convert(mode)
    assert (np.asarray(to_rgb(image, "a")) == 102).all()  # 102 is in the palette of PA


def test_no_permission_is_never_a_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(DataError, match="no permission to read") as caught:
        load_rgb(tmp_path / "a.png", "a.png")
    assert not isinstance(caught.value, BadImage)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT])
def test_trouble_of_the_system_is_never_a_bad_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(DataError, match=os.strerror(number)) as caught:
        load_rgb(tmp_path / "a.png", "a.png")
    assert not isinstance(caught.value, BadImage)


def test_errors_survive_pickling(tmp_path: Path) -> None:
    with pytest.raises(BadImage) as caught:
        rgb(tmp_path / "gone.png")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, BadImage)
    assert str(again) == str(caught.value)


def test_extensions() -> None:
    assert {".jpg", ".jpeg", ".png", ".webp", ".tif", ".ppm", ".bmp"} <= set(IMAGE_EXTENSIONS)
    assert all(e == e.lower() and e.startswith(".") for e in IMAGE_EXTENSIONS)
