"""Images and the label maps that belong to them, found by the names of folders and files.

What a folder may look like, SPLIT being ``training``, ``val`` …::

    FOLDER/images/SPLIT/        FOLDER/annotations/SPLIT/                (ADE20K; or labels/, masks/)
    FOLDER/SPLIT/images/        FOLDER/SPLIT/annotations/                (likewise)
    FOLDER/leftImg8bit/SPLIT/   FOLDER/gtFine/SPLIT/                     (Cityscapes)

A label map has its image's name, with another ending or with one more word that all of them share (``0001_mask.png``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ibot_eval.data.folders import scan, visible_folders
from ibot_eval.data.images import IMAGE_EXTENSIONS
from ibot_eval.data.splits import few, near
from ibot_eval.errors import DataError

_IMAGES = ("images", "img_dir", "imgs", "img", "JPEGImages")
_LABELS = ("annotations", "labels", "masks", "ann_dir", "label", "mask", "annots", "SegmentationClass")
_USUAL = {"train": ("train", "training"), "test": ("val", "validation", "valid", "test")}


@dataclass(frozen=True)
class Pairs:
    """The files of one split."""

    name: str
    folder: Path
    files: list[str]
    labels: list[Path]
    unlabelled: list[str]
    orphans: list[str]
    kind: Literal["ade20k", "cityscapes", "cityscapes ids", "any"]


def find_pairs(root: Path, role: str, asked: str | None) -> Pairs:
    """The images and label maps that play ``role``.

    Args:
        asked: the split's name; where it is None or a usual name of the role, the others will do too.

    Raises:
        DataError: there is no such split, or none of its images has a label map.
    """
    there = find_splits(root)
    if not there:
        raise DataError(
            f"there are no images with label maps in {root}",
            todo="put them into images/SPLIT and annotations/SPLIT, or SPLIT/images and SPLIT/labels, with equal names",
        )
    usual = (asked, *_USUAL[role]) if asked in _USUAL[role] else _USUAL[role] if asked is None else (asked,)
    name = next((name for name in usual if name in there), None)
    if name is None:
        lone = next(((images, labels) for images, labels in _lone_images(root) if images.name in usual), None)
        if lone:
            raise DataError(f"{lone[0]} has no label maps: there is no folder {lone[1]}", todo="put them there")
        wanted = asked or _USUAL[role][0]
        todo = f"{near(wanted, list(there))} (--{role}-split)"
        if list(there) == ["."]:
            todo = f"for a folder without splits give --{role}-split ."
        raise DataError(f"there is no split {wanted!r} in {root}; there is {few(there, 10)}", todo=todo)
    images, labels = there[name]
    files, maps = scan(images).images, scan(labels).images
    if not files or not maps:
        raise DataError(f"there is no image in {labels if files else images}", todo="put the files there")
    if labels.parts[-2:-1] == ("gtFine",):
        return _cityscapes(name, images, labels, files, maps)
    found = _match(files, maps)
    if not found:
        raise DataError(
            f"no image in {images} has a label map in {labels}: {few(files)} there, {few(maps)} here",
            todo="give a label map the name of its image",
        )
    used = set(found.values())
    ade20k = all(re.fullmatch(r"ADE_(train|val)_\d{8}", Path(file).stem) for file in found)
    return Pairs(
        name,
        images,
        list(found),
        [labels / label for label in found.values()],
        [file for file in files if file not in found],
        [label for label in maps if label not in used],
        "ade20k" if ade20k else "any",
    )


def find_splits(root: Path) -> dict[str, tuple[Path, Path]]:
    """The folders of images and of label maps below ``root``, by the name of the split; '.' where there are none."""
    if (root / "leftImg8bit").is_dir() and (root / "gtFine").is_dir():
        pairs = [(root / "leftImg8bit", root / "gtFine")]
    else:
        pairs = [(root / a, root / b) for a in _IMAGES for b in _LABELS if (root / a).is_dir() and (root / b).is_dir()]
    found: dict[str, tuple[Path, Path]] = {}
    for images, labels in pairs[:1]:
        both = [name for name in visible_folders(images) if (labels / name).is_dir()]
        found.update({name: (images / name, labels / name) for name in both})
        if not both and any(path.suffix.lower() in IMAGE_EXTENSIONS for path in labels.iterdir()):
            found["."] = (images, labels)
    if not pairs:
        for name in visible_folders(root):
            inside = [(root / name / a, root / name / b) for a in _IMAGES for b in _LABELS]
            pair = next(((a, b) for a, b in inside if a.is_dir() and b.is_dir()), None)
            if pair:
                found[name] = pair
    return found


def _lone_images(root: Path) -> list[tuple[Path, Path]]:
    """Folders of a split's images, and where its label maps should be and are not."""
    pairs = [(root / a, root / b) for a in _IMAGES for b in _LABELS if (root / a).is_dir() and (root / b).is_dir()]
    return [
        (images / name, labels / name)
        for images, labels in pairs[:1]
        for name in visible_folders(images)
        if not (labels / name).is_dir()
    ]


def _match(files: Sequence[str], maps: Sequence[str]) -> dict[str, str]:
    """Image -> label map, in the order of the images: of equal names but for the ending, or for one more word."""
    stems = {_stem(label): label for label in maps}
    found = {file: stems[stem] for file in files if (stem := _stem(file)) in stems}
    if found:
        return found
    names = {_stem(file) for file in files}
    words = Counter(
        stem[cut:] for stem in stems for cut in range(1, len(stem)) if not stem[cut].isalnum() and stem[:cut] in names
    )
    if not words:
        return {}
    word = words.most_common(1)[0][0]
    return {file: stems[stem] for file in files if (stem := _stem(file) + word) in stems}


def _cityscapes(name: str, images: Path, labels: Path, files: Sequence[str], maps: Sequence[str]) -> Pairs:
    there = set(maps)
    stems = [file.removesuffix("_leftImg8bit.png") for file in files]
    numbered = {stem for stem in stems if f"{stem}_gtFine_labelTrainIds.png" in there}
    kind = "cityscapes" if numbered else "cityscapes ids"
    ending = "_gtFine_labelTrainIds.png" if numbered else "_gtFine_labelIds.png"
    found = {file: stem + ending for file, stem in zip(files, stems, strict=True) if stem + ending in there}
    if not found:
        raise DataError(
            f"no image in {images} has a *_gtFine_labelTrainIds.png or *_gtFine_labelIds.png in {labels}",
            todo="unpack gtFine_trainvaltest.zip beside leftImg8bit",
        )
    lone = [file for file in files if file not in found]
    maps = [file for file in maps if file.endswith(ending) and file not in set(found.values())]
    return Pairs(name, images, list(found), [labels / label for label in found.values()], lone, maps, kind)


def _stem(file: str) -> str:
    return file.rpartition(".")[0]
