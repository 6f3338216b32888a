"""Curves of accuracy against damage, and sheets of damaged images."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from torchvision.utils import make_grid

from ibot_eval import distributed
from ibot_eval.figures import new_figure
from ibot_eval.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ibot_eval.data.splits import ImageSplit
    from ibot_eval.protocol import Session
    from ibot_eval.record import EvalRecord
    from ibot_eval.robustness.sweep import Damage

Rows = Sequence[Mapping[str, Any]]
STYLES = ("-", "--", ":", "-.")
PADDING, TITLE = 4, 14
"""Of a sheet, in pixels: between images, and the height of the titles."""


def write_sheet(
    path: Path, images: Tensor, mean: Sequence[float], std: Sequence[float], titles: Sequence[str] = ()
) -> Path:
    """A PNG with a row per image and a column per level.

    Args:
        path: folders are made.
        images: (rows, columns, 3, H, W) float, normalised.
        mean, std: what they were normalised with, per channel.
        titles: of the columns, written above them.

    Returns:
        the path.
    """
    shift, scale = (images.new_tensor(list(values)).view(3, 1, 1) for values in (mean, std))
    pixels = (images * scale + shift).clamp(0, 1).mul(255).round().byte().cpu().flatten(0, 1)
    whole = make_grid(pixels, nrow=images.shape[1], padding=PADDING, pad_value=255)
    sheet = Image.fromarray(whole.permute(1, 2, 0).numpy())
    if titles:
        sheet = ImageOps.expand(sheet, (0, TITLE, 0, 0), "white")
        pen, step = ImageDraw.Draw(sheet), images.shape[-1] + PADDING
        for column, title in enumerate(titles):
            pen.text((PADDING + column * step + images.shape[-1] / 2, TITLE), title, "black", anchor="md")
    with io.BytesIO() as file:
        sheet.save(file, "PNG")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, file.getvalue())
    return path


def damage_sheets(
    damage: Damage,
    names: Sequence[str],
    titles: Sequence[str],
    split: ImageSplit,
    readable: np.ndarray,
    count: int,
    session: Session,
) -> list[Path]:
    """Writes a sheet for each of ``names``: images as they are, then after each way of damage. A collective call.

    Args:
        damage: its ways are equal shares of ``names``, one after the other.
        titles: of the columns, the first of the images as they are.
        split: where the images come from.
        readable: (n,) indices of the images that can be decoded; those that are drawn are spread evenly over them.
        count: how many are drawn; none for 0.
        session: device, transform and output folder.

    Returns:
        the paths, in the order of ``names``.
    """
    transform = session.transform
    assert transform is not None
    paths = [session.output / (f"sheet-{name}.png" if len(names) > 1 else "sheet.png") for name in names]
    if not count:
        return []

    def write() -> None:
        places = np.unique(np.linspace(0, len(readable) - 1, count + 2).round().astype(np.int64)[1:-1])
        indices = torch.from_numpy(readable[places])
        images = torch.stack([transform(split.load(int(i))) for i in indices])
        images, indices = transform.normalize(images.to(session.device)), indices.to(session.device)
        with torch.inference_mode():
            ways = [damaged.images.cpu() for damaged in damage(images, indices)]
        each = len(ways) // len(names)
        for number, path in enumerate(paths):
            columns = [images.cpu(), *ways[number * each : (number + 1) * each]]
            write_sheet(path, torch.stack(columns, 1), transform.mean, transform.std, titles)

    distributed.from_main(write)
    return paths


def draw_curves(
    records: Sequence[EvalRecord],
    curves_of: Callable[[EvalRecord], Mapping[str, Rows]],
    place: Callable[[EvalRecord, Mapping[str, Any]], float],
    title: str,
    ringed: Callable[[Mapping[str, Any]], bool] = lambda _: False,
) -> tuple[Figure, Axes]:
    """Top-1 with its interval, a colour per run and a style per kind of damage; on the same axes.

    Args:
        records: at least one.
        curves_of: the ``top1`` metrics of a record by kind; the kind is not written where it is empty.
        place: where a metric of a record stands on the horizontal axis.
        title: what is drawn.
        ringed: which metrics' points get a ring.

    Returns:
        the figure, and its axes to be labelled.
    """
    figure = new_figure(6.5, 4 + 0.2 * len(records))
    axes = figure.subplots()
    for index, record in enumerate(records):
        for number, (kind, rows) in enumerate(curves_of(record).items()):
            points = sorted(((place(record, m), m) for m in rows), key=lambda point: point[0])
            x = [position for position, _ in points]
            bounds = [m.get("interval") or (m["value"], m["value"]) for _, m in points]
            # One run has a colour for each kind, several one each.
            colour = f"C{(number if len(records) == 1 else index) % 10}"
            label = " ".join(part for part in (record.run if len(records) > 1 or not kind else "", kind) if part)
            axes.plot(x, [m["value"] for _, m in points], STYLES[number % 4], marker="o", markersize=4, color=colour,
                      label=label)  # fmt: skip
            rings = [(position, m["value"]) for position, m in points if ringed(m)]
            if rings:
                axes.scatter(*zip(*rings, strict=True), s=80, facecolors="none", edgecolors=colour)
            axes.fill_between(x, [b[0] for b in bounds], [b[1] for b in bounds], color=colour, alpha=0.1, linewidth=0)
    axes.set(
        ylabel="top-1 (%), shaded: 95 % interval", title=f"{title}, {records[0].run}" if len(records) == 1 else title
    )
    figure.legend(loc="outside lower center", fontsize="small")
    return figure, axes
