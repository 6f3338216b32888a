"""Faults in COCO-format annotations that would spoil hours of training, found in advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ibot_eval.data.annotation_report import Finding, Histogram, Report, found
from ibot_eval.data.coco import CocoSplit, area_of, has_area, read_instances
from ibot_eval.data.coco_boxes import check_boxes, is_side
from ibot_eval.data.coco_masks import check_masks
from ibot_eval.data.headers import Size, check_headers
from ibot_eval.data.splits import Data

SMALL, LARGE = 32**2, 96**2
"""Areas in pixels that divide COCO's small, medium and large objects."""
Entry = Mapping[str, Any]


def check_data(data: Data) -> Report:
    """:func:`check` of every split, and what only both together show.

    Raises:
        DataError: a file that cannot be read at all.
    """
    splits = {role: split for role, split in data.splits.items() if isinstance(split, CocoSplit)}
    report = Report([Finding("info", warning) for warning in data.warnings])
    for split in splits.values():
        report += check(split)
    return report + Report(_together(**splits)) if len(splits) == 2 else report


def check(split: CocoSplit) -> Report:
    """What is wrong with the annotation file of ``split``, and how many objects of which class and size it has.

    Of the images only the headers are read, and of all in the file, whatever part of it the split is.

    Raises:
        DataError: the JSON file cannot be read, or has no proper images and categories.
    """
    content = read_instances(split.annotation_file)
    images = {image["id"]: image for image in content["images"]}
    categories = {category["id"]: category["name"] for category in content["categories"]}
    annotations: Sequence[Entry] = content.get("annotations", ())
    sizes = _sizes(content["images"])
    known = [a for a in annotations if _among(a.get("image_id"), images) and _among(a.get("category_id"), categories)]
    findings = [
        *_ids(content, annotations),
        *check_headers([split.image_root / i["file_name"] for i in content["images"]], sizes, "the annotation file"),
        *found(
            "error",
            "names of files with backslashes, as Windows writes them",
            (i["file_name"] for i in content["images"] if _is_windows(split.image_root, i["file_name"])),
            "write / in 'file_name', and no drive",
        ),
        *found(
            "error",
            "images without width and height in the file",
            (image["file_name"] for image, size in zip(content["images"], sizes, strict=True) if size == (0, 0)),
        ),
    ]
    if "annotations" not in content:
        findings.append(Finding("error", "the file has no annotations, as those of test sets: nothing can be measured"))
    else:
        findings += [
            *_unknown(annotations, images, categories),
            *check_boxes(known, images),
            *check_masks(known, images),
            *_emptiness(known, images, categories),
        ]
    counts = Counter(categories[a["category_id"]] for a in known if not a.get("iscrowd"))
    crowds = sum(bool(a.get("iscrowd")) for a in known)
    head = f"{split.name}: {len(images):,} images, {len(annotations):,} objects, {len(categories)} classes"
    histograms = [
        Histogram(f"{split.name}: objects per class", {name: counts[name] for name in categories.values()}),
        Histogram(f"{split.name}: objects by size", _by_size(known), sort=False),
    ]
    return Report(findings, histograms, [head + (f" ({crowds:,} crowds)" if crowds else "")]).within(split.name)


def _is_windows(folder: Path, name: str) -> bool:
    return "\\" in name and not (folder / name).exists()


def _among(key: Any, known: Mapping[int, Any]) -> bool:
    return type(key) is int and key in known


def _sizes(images: Sequence[Entry]) -> list[Size]:
    sizes = ((image.get("width"), image.get("height")) for image in images)
    return [(w, h) if is_side(w) and is_side(h) else (0, 0) for w, h in sizes]


def _twice(values: Sequence[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


def _ids(content: Entry, annotations: Sequence[Entry]) -> list[Finding]:
    images, categories = content["images"], content["categories"]
    numbers = sorted(category["id"] for category in categories)
    own = [a.get("id") for a in annotations]

    def without(has: Callable[[Entry], bool]) -> list[str]:
        return [f"object {a.get('id')} of image {a.get('image_id')}" for a in annotations if not has(a)]

    findings = [
        *found("error", "ids that several images have", _twice([image["id"] for image in images])),
        *found("error", "files that several images name", _twice([image["file_name"] for image in images])),
        *found("error", "ids that several classes have", _twice(numbers)),
        *found("error", "names that several classes have", _twice([category["name"] for category in categories])),
        *found(
            "note",
            "ids that several objects have; they are numbered anew",
            _twice([i for i in own if type(i) is int]),
        ),
        *found("note", "objects without an id; they are numbered", without(lambda a: type(a.get("id")) is int)),
        *found(
            "note",
            "objects without iscrowd, taken for no crowds",
            without(lambda a: a.get("iscrowd") is not None),
        ),
        *found(
            "error",
            "objects whose iscrowd is neither 0 nor 1",
            without(lambda a: a.get("iscrowd") in (None, 0, 1)),
        ),
        *found("note", "objects without an area; it is computed", without(has_area)),
    ]
    if len(numbers) > 1 and numbers[-1] - numbers[0] + 1 > len(numbers):
        gaps = f"class ids run from {numbers[0]} to {numbers[-1]} with gaps, {len(numbers)} of them: that is fine"
        findings.append(Finding("info", gaps))
    return findings


def _unknown(annotations: Sequence[Entry], images: Mapping[int, Entry], classes: Mapping[int, str]) -> list[Finding]:
    def cases(key: str, known: Mapping[int, Any]) -> list[str]:
        return [f"object {a.get('id')}: {a.get(key)!r}" for a in annotations if not _among(a.get(key), known)]

    return [
        *found("error", "objects of an image that is not in the file", cases("image_id", images)),
        *found(
            "error",
            "objects of a class that is not in the file",
            cases("category_id", classes),
            "class ids are integers from the list 'categories'",
        ),
    ]


def _emptiness(known: Sequence[Entry], images: Mapping[int, Entry], classes: Mapping[int, str]) -> list[Finding]:
    full = {a["image_id"] for a in known if not a.get("iscrowd")}
    seen = {a["category_id"] for a in known if not a.get("iscrowd")}
    if not full:
        return [Finding("error", "no image has an object")]
    empty = [image["file_name"] for i, image in images.items() if i not in full]
    return [
        *found("note", "images without objects; training leaves them out", empty),
        *found("note", "classes without objects", [name for i, name in classes.items() if i not in seen]),
    ]


def _by_size(known: Sequence[Entry]) -> dict[str, int]:
    areas = np.array([_area(a) for a in known], np.float64)
    return {
        f"small (under {int(SMALL**0.5)}x{int(SMALL**0.5)})": int((areas < SMALL).sum()),
        "medium": int(((areas >= SMALL) & (areas < LARGE)).sum()),
        f"large (from {int(LARGE**0.5)}x{int(LARGE**0.5)})": int((areas >= LARGE).sum()),
    }


def _area(annotation: Entry) -> float:
    try:
        return area_of(annotation)
    except (TypeError, ValueError, OverflowError):
        # Its box or mask holds something else than numbers, which the checks of these tell.
        return 0.0


def _together(train: CocoSplit, test: CocoSplit) -> list[Finding]:
    """Classes that one file lacks, names that differ in case only, images that both have."""
    a, b = list(dict.fromkeys(train.all_names)), list(dict.fromkeys(test.all_names))
    lower = {name.strip().casefold(): name for name in a}
    only = [name for name in b if name not in a]
    alike = {name: lower[name.strip().casefold()] for name in only if name.strip().casefold() in lower}
    shared = {path.resolve() for path in train.paths} & {path.resolve() for path in test.paths}
    same = train.annotation_file.resolve() == test.annotation_file.resolve()
    findings = [
        *found(
            "error",
            f"class names of {test.name} and {train.name} that differ only in case or spaces",
            (f"{name!r} and {other!r}" for name, other in alike.items()),
            "write them alike",
        ),
        *found(
            "error",
            f"classes of {test.name} that {train.name} lacks",
            (repr(name) for name in only if name not in alike),
            "a class that is not trained cannot be found: add it to 'categories' of both files, or to neither",
        ),
        *found(
            "note",
            f"classes of {train.name} that {test.name} lacks",
            (repr(name) for name in a if name not in b and name not in alike.values()),
        ),
    ]
    common = [name for name in a if name in b]
    if common != [name for name in b if name in a]:
        findings.append(Finding("note", f"classes are numbered as in {train.name}; {test.name} has another order"))
    if same:
        findings.append(Finding("note", "train and test are the same file: results say nothing about new images"))
    elif shared:
        findings += found("note", "images that are in both train and test", sorted(path.name for path in shared))
    return findings
