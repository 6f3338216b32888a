"""What detection draws: test images with predictions beside annotations, and the figures of a record. No mm*."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ibot_eval.data.images import load_rgb
from ibot_eval.files import atomic_write_bytes
from protocols.openmmlab import dense_figures
from protocols.openmmlab.dense_figures import Drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.record import EvalRecord

SHOWN_FROM = 0.3
"""Least score of a detection that is drawn."""
_GAP, _HEADING = 8, 14
"""Pixels between the two sides, and above them for what they are called."""
_GOLDEN = 0.618033988749895


def draw_example(
    path: Path,
    image: Path,
    objects: Sequence[Mapping[str, Any]],
    detections: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> Path:
    """``path``: an image with its annotations on the left and what was detected on the right.

    Args:
        path: of the PNG; folders are made.
        image: the file.
        objects: annotations in COCO's format.
        detections: in COCO's format for results; those with a score below 0.3 are left out.
        names: COCO's id of each category -> its name.

    Returns:
        the path.

    Raises:
        BadImage: the image cannot be decoded.
    """
    pixels = pil_to_tensor(load_rgb(image, str(image)))
    sure = [d for d in detections if d["score"] >= SHOWN_FROM]
    sides = [
        _drawn(
            pixels,
            objects,
            [names.get(o["category_id"], "?") + " (crowd)" * bool(o.get("iscrowd")) for o in objects],
            names,
        ),
        _drawn(pixels, sure, [f"{names.get(d['category_id'], '?')} {d['score']:.2f}" for d in sure], names),
    ]
    gap = torch.full((3, pixels.shape[1], _GAP), 255, dtype=torch.uint8)
    both = Image.fromarray(torch.cat([sides[0], gap, sides[1]], dim=2).permute(1, 2, 0).numpy())
    sheet = Image.new("RGB", (both.width, both.height + _HEADING), "white")
    sheet.paste(both, (0, _HEADING))
    for left, text in ((2, "annotations"), (pixels.shape[2] + _GAP, f"detections from {SHOWN_FROM}")):
        ImageDraw.Draw(sheet).text((left, 1), text, fill="black")
    with io.BytesIO() as file:
        sheet.save(file, "PNG")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, file.getvalue())
    return path


def _drawn(
    pixels: Tensor, things: Sequence[Mapping[str, Any]], texts: Sequence[str], names: Mapping[int, str]
) -> Tensor:
    if not things:
        return pixels
    height, width = pixels.shape[1:]
    places = {number: place for place, number in enumerate(names)}
    colours = [_colour(places.get(thing["category_id"], 0)) for thing in things]
    masks = [_mask(thing.get("segmentation"), height, width) for thing in things]
    # One by one: of overlapping masks torchvision colours neither.
    for mask, colour in zip(masks, colours, strict=True):
        pixels = draw_segmentation_masks(pixels, torch.from_numpy(mask), alpha=0.45, colors=colour)
    corners = torch.tensor([[x, y, x + max(w, 0), y + max(h, 0)] for x, y, w, h in (t["bbox"] for t in things)])
    shown: dict[str, Any] = {"colors": colours, "label_colors": ["white"] * len(texts), "fill_labels": True}
    return draw_bounding_boxes(pixels, corners, labels=list(texts), width=2, **shown)


def _mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    from pycocotools import mask as rle

    nothing = np.zeros((height, width), bool)
    if not segmentation:
        return nothing
    if isinstance(segmentation, list):
        lengths: Any = rle.merge(rle.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        lengths = rle.frPyObjects(segmentation, *segmentation["size"])  # type: ignore[arg-type]
    else:
        lengths = segmentation
    mask = rle.decode(lengths).astype(bool)
    return mask if mask.shape == nothing.shape else nothing


def _colour(place: int) -> tuple[int, int, int]:
    """Well apart in hue, the same in every run."""
    import colorsys

    red, green, blue = colorsys.hsv_to_rgb((place * _GOLDEN) % 1, 0.85, (0.95, 0.75, 0.6)[place % 3])
    return round(255 * red), round(255 * green), round(255 * blue)


DRAWN = Drawn(
    scores=(("box_ap", "box"), ("mask_ap", "mask")),
    loss_axis="loss, all parts together",
    score_axis="AP of test (%)",
    bar_axis="box AP (%)",
    bars="ap_by_class",
)


def figures(*records: EvalRecord) -> dict[str, Figure]:
    """``learning_curve`` (loss and AP against steps, several runs on the same axes) and ``ap_by_class``."""
    return dense_figures.figures(records, DRAWN)
