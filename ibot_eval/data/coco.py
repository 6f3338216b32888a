"""Data in COCO's format: folders of images, and a JSON file per split with boxes and masks.

What a folder may look like, SPLIT being ``train``, ``val2017`` …::

    FOLDER/annotations/instances_SPLIT.json   FOLDER/SPLIT/, FOLDER/images/SPLIT/ or FOLDER/images/
    FOLDER/SPLIT.json                         likewise
    FOLDER/SPLIT/_annotations.coco.json       FOLDER/SPLIT/

:mod:`ibot_eval.data.coco_check` looks for faults in the annotations.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ibot_eval.data.annotated import AnnotatedSplit, data_root, whole_only
from ibot_eval.data.coco_masks import run_lengths
from ibot_eval.data.folders import visible_folders
from ibot_eval.data.splits import Data, few, near
from ibot_eval.errors import DataError
from ibot_eval.settings import DataSettings

EXPORTED = "_annotations.coco.json"
"""What labelling tools call the file that they put among the images."""
_USUAL = {"train": ("train",), "test": ("val", "valid", "validation", "test")}
_UNFIT = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's categories of control characters, surrogates and separators of lines and paragraphs."""
_TRIED = 20
"""Images that show to which folder the names in a file belong."""
_LARGEST_AREA = 1e18
"""Pixels; more, as infinity, is no area."""
_SIZES_OF_COCO = {"train": 118_287, "test": 5_000}


class CocoSplit(AnnotatedSplit):
    """Images of one JSON file, in its order."""

    def __init__(
        self,
        name: str,
        folder: Path,
        annotation_file: Path,
        images: Sequence[Mapping[str, Any]],
        categories: Mapping[int, str],
        *,
        all_names: Sequence[str],
        has_masks: bool,
        content: bool = False,
    ) -> None:
        """
        Args:
            name: the split's name.
            folder: what the images' ``file_name`` are relative to.
            annotation_file: the JSON file.
            images: its ``images`` (``id``, ``file_name``), or some of them.
            categories: id -> name, in the order of the data's classes.
            all_names: of all categories in the file, in its order.
            has_masks: whether objects have masks.
            content: fingerprint by the files' bytes.
        """
        super().__init__(name, folder, [image["file_name"] for image in images], [annotation_file], content=content)
        self.annotation_file, self.image_root = annotation_file, folder
        self.categories = dict(categories)
        """Id in the file -> name, in the order of the data's classes: the i-th has label i. pycocotools and mmdet
        number classes by the order in the file, which may be another (see :func:`standardised`)."""
        self.coco_ids = np.array([image["id"] for image in images], np.int64)
        """(n,) ids of the images in the file."""
        self.all_names, self.has_masks = tuple(all_names), has_masks

    @property
    def rule(self) -> Sequence[str]:
        return [json.dumps(list(self.categories.items()))]

    def take(self, indices: Sequence[int] | np.ndarray) -> CocoSplit:
        """As of every split; ``annotation_file`` still names all images, ``coco_ids`` those that are left."""
        files = [self.image_ids[i].removeprefix(self._prefix) for i in indices]
        images = [{"id": self.coco_ids[i], "file_name": file} for i, file in zip(indices, files, strict=True)]
        return CocoSplit(
            self.name,
            self.folder,
            self.annotation_file,
            images,
            self.categories,
            all_names=self.all_names,
            has_masks=self.has_masks,
            content=self.content,
        )


def open_coco(settings: DataSettings, roles: Sequence[str] = ("train", "test")) -> Data:
    """The COCO-format data in the folder ``settings.data``. The annotations are read, but not checked.

    Classes are those of the train file in its order (of the test file, where only that is opened). Splits default to
    ``train`` or ``train2017`` … and to ``val``, ``valid``, ``validation``, ``test``, with a year or without.

    Raises:
        ConfigError: settings that are for images with one class each.
        DataError: no such folder or split, or a JSON file without images or categories.
    """
    root = data_root(settings)
    whole_only(settings, "data in COCO's format")
    there = find_annotations(root)
    asked = {"train": settings.train_split, "test": settings.test_split}
    class_names: tuple[str, ...] = ()
    splits: dict[str, Any] = {}
    for role in roles:
        name = _split_name(root, there, role, asked[role])
        content = read_instances(there[name])
        own = {category["id"]: category["name"] for category in content["categories"]}
        class_names = class_names or tuple(own.values())
        splits[role] = CocoSplit(
            name,
            _image_root(root, name, there[name], content["images"]),
            there[name],
            content["images"],
            {
                i: own[i]
                for i in sorted((i for i in own if own[i] in class_names), key=lambda i: class_names.index(own[i]))
            },
            all_names=[category["name"] for category in content["categories"]],
            has_masks=any(annotation.get("segmentation") for annotation in content.get("annotations", ())),
            content=settings.fingerprint == "content",
        )
    sizes = {role: len(split) for role, split in splits.items()}
    data = Data(str(settings.data), class_names, splits, {role: split.name for role, split in splits.items()})
    if len(class_names) == 80 and sizes.items() <= _SIZES_OF_COCO.items():
        data.data_name = "COCO"
    return data


def find_annotations(root: Path) -> dict[str, Path]:
    """The JSON files below ``root`` that may describe splits, by the name of the split."""
    found: dict[str, Path] = {}
    for folder in visible_folders(root):
        if (root / folder / EXPORTED).is_file():
            found[folder] = root / folder / EXPORTED
    if (root / EXPORTED).is_file():
        found["."] = root / EXPORTED
    for folder in (root, root / "annotations"):
        files = sorted(folder.glob("*.json"))
        instances = [file for file in files if file.name.startswith("instances_")]
        # Beside instances_*.json, COCO has captions, key points and lists of images without annotations.
        for file in instances or files:
            if file.name != EXPORTED:
                found[file.stem.removeprefix("instances_")] = file
    return found


def _split_name(root: Path, there: Mapping[str, Path], role: str, asked: str | None) -> str:
    if not there:
        raise DataError(
            f"there are no annotations in COCO's format in {root}",
            todo="put annotations/instances_SPLIT.json beside a folder SPLIT of images (or SPLIT.json, or "
            f"SPLIT/{EXPORTED})",
        )
    if asked is not None and asked in there:
        return asked
    # "train" is the flag's default, and COCO itself says train2017.
    bare = _USUAL[role] if asked is None else (asked,) if asked in _USUAL[role] else ()
    for name in bare:
        for known in sorted(there, key=lambda known: (len(known), known), reverse=True):
            if re.fullmatch(rf"{name}[-_]?\d*", known):
                return known
    wanted = asked or _USUAL[role][0]
    raise DataError(
        f"there are no annotations of the split {wanted!r} in {root}; there are some of {few(there, 10)}",
        todo=f"{near(wanted, list(there))} (--{role}-split)",
    )


def _image_root(root: Path, name: str, file: Path, images: Sequence[Mapping[str, Any]]) -> Path:
    if file.name == EXPORTED:
        return file.parent
    folders = [root / name, root / "images" / name, root / "images", root]
    for folder in folders:
        if any((folder / image["file_name"]).is_file() for image in images[:_TRIED]):
            return folder
    # That images are missing is the check's to say.
    for folder in folders[:3]:
        if folder.is_dir():
            return folder
    raise DataError(
        f"the images of {file} are not there: no folder {name} or images in {root}",
        todo=f"put them into {root / name}",
    )


def read_instances(file: Path) -> dict[str, Any]:
    """The content of a JSON file in COCO's format, ``images`` and ``categories`` being well formed and not empty.

    ``annotations`` may be missing, as they are from files that only list images.

    Raises:
        DataError: it cannot be read, is no such file, or an image or a category lacks its id or name.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not readable JSON: {error}", todo="save it again; it may be cut off") from error
    if isinstance(content, list):
        raise DataError(
            f"{file} holds a list, as a file of results does",
            todo="give the annotations: images, annotations, categories",
        )
    if not isinstance(content, dict):
        raise DataError(f"{file} is not in COCO's format: it holds no object with images, annotations and categories")
    for key, name in (("images", "file_name"), ("categories", "name")):
        entries = content.get(key)
        if not isinstance(entries, list):
            raise DataError(f"{file} is not in COCO's format: it has no list {key!r}", todo=f"it has {few(content, 8)}")
        if not entries:
            raise DataError(f"{file}: the list {key!r} is empty")
        for entry in entries:
            if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not _is_name(entry.get(name)):
                shown = json.dumps(entry)[:120]
                raise DataError(
                    f"{file}: each of {key!r} needs an integer 'id' and a {name!r}, one line of text; one is {shown}"
                )
    if "annotations" in content and not _objects(content["annotations"]):
        raise DataError(f"{file}: 'annotations' is not a list of objects")
    return content


def _is_id(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_name(value: Any) -> bool:
    """Whether it is text that can be shown, and be a path: no line breaks, no NUL, no halves of a character."""
    return isinstance(value, str) and value.strip() != "" and not any(unicodedata.category(c) in _UNFIT for c in value)


def _objects(entries: Any) -> bool:
    return isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)


def standardised(split: CocoSplit) -> dict[str, Any]:
    """The content of the split's file as pycocotools and mmdet want it: only the split's images and the annotations
    of these and of its categories; categories in the order of the classes, so that the i-th has label i everywhere;
    annotation ids from 1, since COCOeval takes 0 for "not matched"; and ``iscrowd`` and ``area`` on every annotation,
    that of the mask or else of the box where there was none above 0, since mmdet drops such objects.

    Raises:
        DataError: as :func:`read_instances`.
    """
    content = read_instances(split.annotation_file)
    wanted = set(split.coco_ids.tolist())
    annotations = []
    for annotation in content.get("annotations", ()):
        if annotation.get("image_id") in wanted and annotation.get("category_id") in split.categories:
            crowd, area = int(bool(annotation.get("iscrowd"))), area_of(annotation)
            annotations.append({**annotation, "id": len(annotations) + 1, "iscrowd": crowd, "area": area})
    categories = {category["id"]: category for category in content["categories"]}
    return {
        **content,
        "images": [image for image in content["images"] if image["id"] in wanted],
        "annotations": annotations,
        "categories": [categories[i] for i in split.categories],
    }


def has_area(annotation: Mapping[str, Any]) -> bool:
    """Whether it says an area above 0; some tools write 0 on all objects."""
    area = annotation.get("area")
    return isinstance(area, (int, float)) and not isinstance(area, bool) and 0 < area < _LARGEST_AREA


def area_of(annotation: Mapping[str, Any]) -> float:
    """The area in pixels that it says, else that of its mask, else that of its box; 0 where it has none of them."""
    if has_area(annotation):
        return annotation["area"]
    mask, box = annotation.get("segmentation"), annotation.get("bbox")
    if isinstance(mask, dict) and (lengths := run_lengths(mask)):
        return float(sum(lengths[1::2]))
    if isinstance(mask, list) and (rings := [ring for ring in mask if len(ring) >= 6 and len(ring) % 2 == 0]):
        return sum(_polygon_area(np.array(ring, np.float64).reshape(-1, 2)) for ring in rings)
    return float(box[2] * box[3]) if isinstance(box, list) and len(box) == 4 else 0.0


def _polygon_area(points: np.ndarray) -> float:
    """By the shoelace formula; ``points`` (n, 2)."""
    after = np.roll(points, -1, axis=0)
    return float(abs((points[:, 0] * after[:, 1] - points[:, 1] * after[:, 0]).sum()) / 2)
