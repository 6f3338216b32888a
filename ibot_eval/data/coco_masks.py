"""Faults in COCO's three ways of writing a mask: polygons, run lengths, and run lengths packed into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ibot_eval.data.annotation_report import Finding, found

Objects = Sequence[Mapping[str, Any]]
_FAR = 1e9
"""Pixels; beyond it, as NaN is, nothing is a coordinate."""


def check_masks(annotations: Objects, images: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Findings about the masks of ``annotations``, all of which belong to one of ``images`` (by id)."""
    faults: dict[str, list[str]] = {}
    kinds = {"polygons": 0, "run lengths": 0, "packed run lengths": 0}
    without = []
    for annotation in annotations:
        mask = annotation.get("segmentation")
        if not mask:
            without.append(annotation.get("id"))
            continue
        kind, fault = _kind(mask), mask_fault(mask, images[annotation["image_id"]])
        kinds[kind] += 1
        if fault:
            faults.setdefault(fault, []).append(f"object {annotation.get('id')}")
    findings = [finding for what, cases in faults.items() for finding in found("error", what, cases)]
    if len(without) == len(annotations):
        return [Finding("note", "no object has a mask: only boxes can be trained and measured")] if without else []
    shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    return [
        *findings,
        *found("error", "objects without a mask, where others have one", without, "give all of them one, or none"),
        Finding("info", f"masks: {shown}"),
    ]


def _kind(mask: Any) -> str:
    if not isinstance(mask, dict):
        return "polygons"
    return "run lengths" if isinstance(mask.get("counts"), list) else "packed run lengths"


def mask_fault(mask: Any, image: Mapping[str, Any]) -> str:
    """What is wrong with a ``segmentation`` of ``image`` (its ``height`` and ``width`` are looked at); '' for nothing.

    Never raises, whatever ``mask`` is.
    """
    if isinstance(mask, dict):
        return _fault_of_runs(mask, image)
    if not isinstance(mask, list) or not all(isinstance(ring, list) for ring in mask):
        return "masks that are neither lists of polygons nor run lengths"
    if any(len(ring) < 6 for ring in mask):
        return "polygons of fewer than 3 points (6 numbers)"
    if any(len(ring) % 2 for ring in mask):
        return "polygons of an odd number of coordinates"
    if not all(isinstance(value, (int, float)) and abs(value) < _FAR for ring in mask for value in ring):
        return "polygons with coordinates that are no numbers"
    return ""


def _fault_of_runs(mask: Mapping[str, Any], image: Mapping[str, Any]) -> str:
    size, lengths = mask.get("size"), run_lengths(mask)
    if not isinstance(size, list) or size != [image.get("height"), image.get("width")]:
        return "run lengths whose size (height, width) is not the image's"
    if lengths is None:
        return "run lengths that cannot be read"
    return "" if sum(lengths) == size[0] * size[1] else "run lengths that do not add up to the image"


def run_lengths(mask: Mapping[str, Any]) -> list[int] | None:
    """The lengths of the runs of background, object, background … down the columns; None if they cannot be read."""
    lengths = mask.get("counts")
    if isinstance(lengths, str):
        lengths = unpack(lengths)
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        return None
    return lengths


def unpack(text: str) -> list[int] | None:
    """The run lengths that COCO's packed text stands for; None if it is cut off or holds other characters.

    pycocotools reads beyond the end of such a text instead of saying so. Each character holds 5 bits of a number, the
    lowest first, and whether more follow; from the fourth on, numbers are differences to the last but one
    (``rleToString`` in cocoapi's maskApi.c).
    """
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = shift = 0
    return None if shift else lengths
