"""Faults in label maps that would spoil hours of training, found in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ibot_eval.data.annotated import each
from ibot_eval.data.annotation_report import Finding, Histogram, Report, found
from ibot_eval.data.headers import Size, check_headers
from ibot_eval.data.label_maps import LabelMapSplit
from ibot_eval.data.label_rule import BEYOND, IGNORED, Colour, colour_counts, raw_labels, without_channels
from ibot_eval.data.splits import Data
from ibot_eval.errors import BadImage

_OFTEN = 0.05
"""Share of pixels from which 0 counts as frequent: what "other" is in most data, and hardly a first class by chance."""


@dataclass
class Pixels:
    """What the label maps of a split hold."""

    values: np.ndarray = field(default_factory=lambda: np.zeros(BEYOND + 1, np.int64))
    """(257,) pixels by number, the last for numbers that 8 bits do not hold."""
    classes: np.ndarray = field(default_factory=lambda: np.zeros(IGNORED + 1, np.int64))
    """(256,) pixels by class index; the last for none."""
    colours: dict[Colour, int] = field(default_factory=dict)
    """Pixels by colour, of coloured label maps."""
    coloured: list[Path] = field(default_factory=list)
    numbered: list[Path] = field(default_factory=list)
    holders: dict[int, list[Path]] = field(default_factory=dict)
    """Label maps in which each number occurs."""
    empty: list[Path] = field(default_factory=list)
    """Label maps without any class."""
    unreadable: list[str] = field(default_factory=list)


@dataclass
class _Map:
    """What one label map holds."""

    size: Size = (0, 0)
    values: np.ndarray | None = None
    classes: np.ndarray | None = None
    colours: dict[Colour, int] | None = None
    fault: str = ""


def check_data(data: Data) -> Report:
    """:func:`check` of every split, and what only both together show."""
    splits = {role: split for role, split in data.splits.items() if isinstance(split, LabelMapSplit)}
    report, seen = Report([Finding("info", warning) for warning in data.warnings]), {}
    if len(splits) == 2 and splits["train"].paths == splits["test"].paths:
        return check(splits["test"]) + Report(_together(splits, {}))
    for role, split in splits.items():
        own, pixels = _check(split)
        report, seen[role] = report + own, pixels.classes[: len(split.class_names)] > 0
    return report + Report(_together(splits, seen)) if len(splits) == 2 else report


def check(split: LabelMapSplit) -> Report:
    """What is wrong with the label maps of ``split``, and how many pixels each class has.

    All label maps are decoded, and of the images the headers.
    """
    return _check(split)[0]


def _check(split: LabelMapSplit) -> tuple[Report, Pixels]:
    maps = each(lambda path: _look(path, split), split.label_paths)
    pixels = _sum(split, maps)
    total = int(pixels.classes.sum())
    findings = [
        *found("error", "images without a label map", split.unlabelled, "add them, or take the images away"),
        *found("note", "label maps without an image", split.orphans),
        *found("error", "label maps that cannot be read", pixels.unreadable, "replace the files"),
        *check_headers(split.paths, [one.size for one in maps], "the label map"),
        *_lossy(split),
        *_colours(split, pixels),
        *_values(split, pixels),
        *found("note", "label maps without any class", (path.name for path in pixels.empty)),
    ]
    if total and pixels.classes[IGNORED] == total:
        findings.append(Finding("error", "no pixel has a class"))
    elif (pixels.classes[:IGNORED] > 0).sum() == 1:
        findings.append(_one_class(split, pixels))
    counts = {name: int(pixels.classes[i]) for i, name in enumerate(split.class_names)}
    never = [name for name, count in counts.items() if not count]
    findings += found("note", "classes without pixels", never)
    head = f"{split.name}: {len(split):,} images with label maps, {len(split.class_names)} classes"
    if total:
        share = 100 * pixels.classes[IGNORED] / total
        zero = " (0 and " if split.reduce_zero_label else " ("
        head += f", {share:.1f} % of the pixels without a class{zero}{split.ignore_index} in the files)"
    title = f"{split.name}: pixels per class"
    return Report(findings, [Histogram(title, counts)], [head]).within(split.name), pixels


def _one_class(split: LabelMapSplit, pixels: Pixels) -> Finding:
    if len(split.class_names) > 1:
        return Finding("note", "all pixels with a class are of one class")
    white = split.ignore_index == IGNORED and pixels.values[IGNORED] > 0
    todo = "are 0 and 255 two classes? Then give --classes FILE with background,0,0,0 and object,255,255,255"
    return Finding("error", "there is one class, so there is nothing to learn", todo=todo if white else "")


def _look(path: Path, split: LabelMapSplit) -> _Map:
    try:
        raw = raw_labels(path, bool(split.label_rule.colours))
    except BadImage as error:
        return _Map(fault=f"{error.what}")
    raw = raw if split.label_rule.colours else without_channels(raw)
    classes = np.bincount(split.label_rule.apply(raw).ravel(), minlength=IGNORED + 1)
    size = (raw.shape[1], raw.shape[0])
    if raw.ndim == 3:
        return _Map(size, classes=classes, colours=colour_counts(raw))
    return _Map(size, values=np.bincount(raw.ravel(), minlength=BEYOND + 1), classes=classes)


def _sum(split: LabelMapSplit, maps: Sequence[_Map]) -> Pixels:
    pixels = Pixels()
    for path, one in zip(split.label_paths, maps, strict=True):
        if one.fault:
            pixels.unreadable.append(one.fault)
        if one.classes is not None:
            pixels.classes += one.classes
            if not one.classes[:IGNORED].any():
                pixels.empty.append(path)
        if one.values is not None:
            pixels.values += one.values
            pixels.numbered.append(path)
            for value in np.flatnonzero(one.values).tolist():
                pixels.holders.setdefault(value, []).append(path)
        if one.colours is not None:
            pixels.coloured.append(path)
            for colour, count in one.colours.items():
                pixels.colours[colour] = pixels.colours.get(colour, 0) + count
    return pixels


def _lossy(split: LabelMapSplit) -> list[Finding]:
    return found(
        "error",
        "label maps saved as JPEG, which changes labels at their borders",
        (path.name for path in split.label_paths if path.suffix.lower() in (".jpg", ".jpeg")),
        "save them as PNG from their source",
    )


def _colours(split: LabelMapSplit, pixels: Pixels) -> list[Finding]:
    known = set(split.label_rule.colours)
    if not known:
        return found(
            "error",
            "label maps that hold colours instead of class numbers",
            (path.name for path in pixels.coloured),
            "give --classes FILE with a line 'name,R,G,B' per class, or save class numbers",
        )
    strange = {colour: count for colour, count in pixels.colours.items() if colour not in known}
    by_count = sorted(strange, key=lambda colour: -strange[colour])
    # Black and white are what most tools give to pixels that nobody labelled.
    usual = [colour for colour in by_count if colour in ((0, 0, 0), (255, 255, 255))]
    rest = [colour for colour in by_count if colour not in usual]
    return [
        *found("info", "colours that stand for no class", (_share(colour, strange, pixels) for colour in usual)),
        *found(
            "error",
            "colours that are not in the class list",
            (_share(colour, strange, pixels) for colour in rest),
            "add them; many rare ones come from scaling or JPEG: save label maps without smoothing",
        ),
    ]


def _share(colour: Colour, counts: dict[Colour, int], pixels: Pixels) -> str:
    return f"{','.join(map(str, colour))} {100 * counts[colour] / sum(pixels.colours.values()):.2f} %"


def _values(split: LabelMapSplit, pixels: Pixels) -> list[Finding]:
    """Numbers that stand for no class, and whether 0 is what it is taken for."""
    if not pixels.numbered:
        return []
    first = int(split.reduce_zero_label)
    given = {number for number, index in enumerate(split.label_rule.table) if index != IGNORED}
    last = max(given)
    gaps = bool(set(range(first, last)) - given - {split.ignore_index})
    if gaps and not split.label_rule.colours:
        return []  # Cityscapes' ids: all others are left out on purpose
    meant = given | {split.ignore_index} | ({0} if first else set())
    present = np.flatnonzero(pixels.values).tolist()
    total = int(pixels.values.sum())
    wrong = [value for value in present if value not in meant]
    zero = pixels.values[0] / total
    findings = []
    if wrong:
        numbers = ", ".join(map(str, sorted(given))) if gaps else f"{first} to {last}"
        what = f"label values outside of {numbers} (or {split.ignore_index} for none)"
        examples = tuple(
            f"{'more than 255' if value == BEYOND else value} in {len(pixels.holders[value]):,} label maps "
            f"({pixels.holders[value][0].name} …)"
            for value in wrong
        )
        findings.append(Finding("error", what, None, examples, _advice(split, wrong, pixels)))
    if first and not wrong and zero >= _OFTEN and last not in present and 1 in present:
        findings.append(
            Finding(
                "note",
                f"0 means no class here (--reduce-zero yes) and takes {100 * zero:.1f} % of the pixels, and {last}, "
                "the last class, never occurs: do labels count from 0?",
            )
        )
    if not first and 0 not in present and last not in present and not wrong:
        findings.append(
            Finding("note", f"neither 0 ({split.class_names[0]!r}) nor {last} occurs; labels may be off by one")
        )
    if first:
        share = f"0 has {100 * zero:.1f} % of the pixels"
        findings.append(
            Finding("info", f"0 means no class (reduce_zero_label), 1 is {split.class_names[0]!r}: {share}")
        )
    return findings


def _advice(split: LabelMapSplit, wrong: Sequence[int], pixels: Pixels) -> str:
    classes = len(split.class_names)
    if not split.reduce_zero_label and wrong == [classes]:
        zero = 100 * pixels.values[0] / pixels.values.sum()
        return (
            f"with {classes} classes, if 0 ({zero:.1f} % of the pixels) means no class and 1 is "
            f"{split.class_names[0]!r}: --reduce-zero yes; if {classes} means no class: --ignore {classes}"
        )
    if len(wrong) == 1 and wrong[0] != BEYOND:
        return f"if {wrong[0]} means no class: --ignore {wrong[0]}; else add its name to the class list (--classes)"
    return "correct the files or the class list (--classes)"


def _together(splits: dict[str, LabelMapSplit], seen: dict[str, np.ndarray]) -> list[Finding]:
    train, test = splits["train"], splits["test"]
    shared = {path.resolve() for path in train.paths} & {path.resolve() for path in test.paths}
    lacking = np.flatnonzero(seen["test"] & ~seen["train"]).tolist() if seen else []
    findings = found(
        "note",
        f"classes that {test.name} has and {train.name} lacks; they cannot be found",
        (train.class_names[i] for i in lacking),
    )
    if shared and len(shared) == len(test):
        findings.append(Finding("note", "all test images are train images: results say nothing about new images"))
    elif shared:
        findings += found("note", "images that are in both train and test", sorted(path.name for path in shared))
    return findings
