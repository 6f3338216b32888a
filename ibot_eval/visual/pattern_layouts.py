"""Layouts of patterns: the most confident patches of a prototype, each with its surroundings (iBOT's figures 4, 16)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ibot_eval.data.opening import open_data
from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.settings import DataSettings
from ibot_eval.visual.canvas import panels, plain, show
from ibot_eval.visual.pattern_bank import PatternBank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 36
"""Patches of a layout."""
LAYOUTS = 20
"""Prototypes of the published figure: the largest."""
CONTEXT = 5
"""Patches on each side of the square that is shown around a patch."""
MIN_BRIGHTNESS = 40.0
"""Patches whose mean V (0 to 255) is not above this are skipped."""
GAP = 3
"""Pixels between the patches of a layout."""
BEYOND = 225
"""Grey of what lies beyond the picture's border."""
HELD = 512
"""Images kept in memory."""


class BankImages:
    """The images that a bank points to, cropped as the network saw them."""

    def __init__(self, bank: PatternBank, split: ImageSplit, notes: tuple[str, ...] = ()) -> None:
        """
        Args:
            bank: of any split that holds its images.
            split: opened as it was when the bank was made; :meth:`open` does that.
        """
        self.bank, self.notes = bank, notes
        about = dict(bank.about["transform"])
        about.pop("antialias", None)
        about |= {name: tuple(about[name]) for name in ("mean", "std")}
        transform = EvalTransform(**about)
        places = {image_id: i for i, image_id in enumerate(split.image_ids)}
        missing = [image_id for image_id in bank.image_ids if image_id not in places]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(bank.image_ids)} images of the patterns, such as {missing[0]!r}, are not in "
                f"{split.source or split.name}",
                todo="give the data set that the patterns were made from: --data FOLDER",
            )

        def load(image: int) -> np.ndarray:
            pixels = transform(split.load(places[bank.image_ids[image]]))
            return pixels.permute(1, 2, 0).contiguous().numpy()

        self._load = lru_cache(HELD)(load)

    @classmethod
    def open(cls, bank: PatternBank, data: DataSettings | None = None) -> BankImages:
        """Opens the bank's data set, or ``data`` where that is given and names one.

        Raises:
            DataError: it is gone, or does not hold the bank's images.
            ConfigError: the bank does not tell where its images lie, and ``data`` is not given.
        """
        made = bank.about["data"]
        stored = settings_of(bank)
        if data is None or data.data is None:
            if stored is None:
                raise ConfigError("the patterns do not tell where their images lie", todo="give --data FOLDER")
            settings = stored
        else:
            # Another place of the same data set: what else was said of it holds there too.
            settings = data if stored is None else replace(stored, data=data.data, data_root=data.data_root)
        try:
            split = open_data(settings, roles=(made["role"],), labelled=False).splits[made["role"]]
        except DataError as error:
            raise DataError(
                f"the images of the patterns cannot be opened: {error.what}",
                where=error.where or settings.data,
                todo="give the place where they are now: --data FOLDER",
            ) from error
        notes = ()
        if split.fingerprint != made["fingerprint"]:
            notes = (f"{settings.data} is not exactly the data set that the patterns were made from",)
        return cls(bank, split, notes)

    def image(self, image: int) -> np.ndarray:
        """(H, W, 3) uint8, image ``image`` of the bank as the network saw it."""
        return self._load(image)

    def crop(self, image: int, position: int, context: int = CONTEXT, *, framed: bool = True) -> np.ndarray:
        """A patch with ``context`` x ``context`` patches around it, (S, S, 3) uint8, grey beyond the picture's border.

        At level cls the whole image.

        Args:
            framed: whether a thin frame marks the patch.
        """
        pixels = self.image(image)
        if self.bank.about["level"] == "cls":
            return pixels
        p, (_, w) = self.bank.about["patch"], self.bank.grid
        row, column = divmod(position, w)
        reach = context // 2 * p
        padded = np.pad(pixels, ((reach, reach), (reach, reach), (0, 0)), constant_values=BEYOND)
        shown = padded[row * p : row * p + p + 2 * reach, column * p : column * p + p + 2 * reach].copy()
        if framed and reach:
            a, b = reach - 1, reach + p
            for side in (np.s_[a, a : b + 1], np.s_[b, a : b + 1], np.s_[a : b + 1, a], np.s_[a : b + 1, b]):
                shown[side] = (255, 255, 0)
        return shown


def settings_of(bank: PatternBank) -> DataSettings | None:
    """How the bank's data set was opened; None where it does not tell."""
    stored: dict[str, Any] | None = bank.about["data"].get("settings")
    if stored is None:
        return None
    known = {field.name: field for field in fields(DataSettings)}
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in stored.items() if name in known
    }
    paths: dict[str, Any] = {
        name: Path(values[name]) for name in ("data_root", "test_labels") if values.get(name) is not None
    }
    return DataSettings(**(values | paths))


def shown_items(
    bank: PatternBank, prototype: int, n: int = SHOWN, min_brightness: float = MIN_BRIGHTNESS
) -> np.ndarray:
    """Columns of a prototype's row in the bank that a layout shows: the first ``n`` that are not near-black.

    Whole images (level cls) are never skipped.
    """
    bank.check_prototype(prototype)
    there = bank.images[prototype] >= 0
    if bank.about["level"] == "patch":
        there &= bank.brightness[prototype] > min_brightness
    return np.flatnonzero(there)[:n]


def layout_image(
    bank: PatternBank,
    images: BankImages,
    prototype: int,
    *,
    n: int = SHOWN,
    columns: int = 6,
    context: int = CONTEXT,
    min_brightness: float = MIN_BRIGHTNESS,
) -> np.ndarray:
    """The ``n`` most confident patches of a prototype in rows, best first: (H, W, 3) uint8.

    Raises:
        ConfigError: no such prototype, a number below 1, or an even context, which has no middle.
    """
    for name, value in (("patches", n), ("columns", columns), ("context", context)):
        if value < 1:
            raise ConfigError(f"the number of {name} must be at least 1, not {value}")
    if context % 2 == 0:
        raise ConfigError(f"a context of {context} patches has no middle", todo=f"use {context + 1}")
    # More context than the picture has would be grey.
    context = min(context, 2 * max(bank.grid) - 1)
    whole = bank.about["level"] == "cls"
    side = bank.about["transform"]["crop"] if whole else context * bank.about["patch"]
    items = shown_items(bank, prototype, n, min_brightness)
    rows = max(1, math.ceil(len(items) / columns))
    sheet = np.full((rows * (side + GAP) - GAP, columns * (side + GAP) - GAP, 3), 255, np.uint8)
    for place, item in enumerate(items):
        y, x = (place // columns) * (side + GAP), (place % columns) * (side + GAP)
        pixels = images.crop(int(bank.images[prototype, item]), int(bank.positions[prototype, item]), context)
        sheet[y : y + side, x : x + side] = pixels
    return sheet


def layout_figure(
    bank: PatternBank,
    images: BankImages,
    prototypes: Sequence[int],
    *,
    n: int = SHOWN,
    columns: int = 6,
    context: int = CONTEXT,
    min_brightness: float = MIN_BRIGHTNESS,
) -> Figure:
    """A layout for each of ``prototypes`` with its size and, where there are labels, its most frequent class.

    Raises:
        ConfigError: no prototype, or what :func:`layout_image` refuses.
    """
    if not len(prototypes):
        raise ConfigError("no prototype to draw", todo="name some: --prototypes 0 1 2")
    across = min(len(prototypes), 5 if len(prototypes) > 4 else 4)
    rows = math.ceil(len(prototypes) / across)
    width = 2.4 if len(prototypes) > 4 else 3.4
    sheets = [
        layout_image(bank, images, p, n=n, columns=columns, context=context, min_brightness=min_brightness)
        for p in prototypes
    ]
    height = width * max(sheet.shape[0] for sheet in sheets) / sheets[0].shape[1]
    caption = f"{len(bank)} prototypes ({bank.about['prototypes']}), {bank.about['checkpoint']['architecture']}"
    if bank.about["level"] == "patch":
        caption += f"; the framed patch in its {context} x {context} surroundings, grey beyond the picture"
    figure, axes = panels(rows, across, width, height, title_lines=2, gap=0.16, caption=caption)
    for ax, prototype, sheet in zip(axes.flat, prototypes, sheets, strict=False):
        show(ax, sheet, title_of(bank, int(prototype)))
    return figure


def title_of(bank: PatternBank, prototype: int) -> str:
    """Number, size and, where there are labels, the most frequent class of a prototype."""
    first = f"prototype {prototype}: {bank.counts[prototype]:,} {bank.items}"
    if bank.about["level"] == "patch":
        first += f", {bank.image_counts[prototype]:,} images"
    purity, majority = bank.purity, bank.majority(prototype)
    if purity is None or majority is None:
        return first
    return f"{first}\n{purity[prototype]:.0f} % {plain(majority, 24)}"
