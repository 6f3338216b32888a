"""Shuffling: how much a classifier leans on where the parts of an image stand.

Each test image is cut into a grid of cells that change places at random, and classified; accuracy is shown against the
number of cells, as in the iBOT paper's Figure 10. 1x1 is the image as it is. Grids whose cells hold whole patches of
the network are marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ibot_eval.errors import ConfigError
from ibot_eval.protocol import Artifact, EvalProtocol, Event, Predictions, PublishedKey, Session, Warning
from ibot_eval.robustness.config import (
    DamageSettings,
    check_damage,
    divides,
    on_patch_grid,
    open_for,
    parse_grids,
    roles_for,
)
from ibot_eval.robustness.outcome import area_metric, cell_positions, level_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.splits import Data
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord
    from ibot_eval.settings import DataSettings


@dataclass(frozen=True)
class ShuffleConfig(DamageSettings):
    """Settings of the protocol."""

    grids: tuple[str, ...] = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "14x14", "16x16")
    """Grids of cells, ROWSxCOLUMNS; 1x1 is the clean image. Defaults that do not divide the crop are left out."""
    resize_to_fit: bool = False
    """For a grid that does not divide the crop, resize the image to the nearest size that it does, shuffle, and resize
    back to the crop."""


class Shuffle(EvalProtocol[ShuffleConfig]):
    """A classifier on images whose cells changed places."""

    config_type = ShuffleConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "area_under_curve"

    def __init__(self, config: ShuffleConfig) -> None:
        super().__init__(config)
        check_damage(config)
        self.grids = parse_grids(config.grids)
        self.left_out: list[str] = []
        """Default grids that do not divide the crop."""

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """Default grids that divide the crop; with --resize-to-fit all.

        Raises:
            ConfigError: a grid asked for by hand that does not.
        """
        side = transform.crop
        numbers = [str(n) for n in range(1, side // 2 + 1) if side % n == 0]
        todo = f"rows and columns may be {', '.join(numbers)}; or choose another --crop, or add --resize-to-fit"
        tiny = [_text(grid) for grid in self.grids if max(grid) > side]
        if tiny:
            raise ConfigError(f"{', '.join(tiny)}: an image of {side} pixels has no so many cells", where="--grids")
        wrong = [_text(grid) for grid in self.grids if not divides(grid, side)]
        if not wrong or self.config.resize_to_fit:
            return self
        if "grids" in asked:
            raise ConfigError(
                f"{', '.join(wrong)}: an image of {side} pixels cannot be cut into so many equal cells",
                where="--grids",
                todo=todo,
            )
        kept = tuple(_text(grid) for grid in self.grids if divides(grid, side))
        if len(kept) < 2:
            raise ConfigError(f"no default grid divides {side} pixels", where="--crop", todo=todo)
        fitted = type(self)(replace(self.config, grids=kept))
        fitted.left_out = wrong
        return fitted

    def roles(self) -> tuple[str, ...]:
        return roles_for(self.config.head)

    def open(self, settings: DataSettings) -> Data:
        """Labelled images; the train split only where its images vote (--head knn)."""
        return open_for(self.config.head, settings)

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """None: the paper draws its numbers and does not list them."""
        return None

    def levels(self, side: int, patch: int | None) -> list[dict[str, Any]]:
        """What distinguishes each grid's metrics, on images of ``side`` pixels; no patch, no patch grid."""
        return [
            {
                "grid": _text(grid),
                "cells": grid[0] * grid[1],
                "on_patch_grid": patch is not None and on_patch_grid(grid, side, patch),
                **({} if divides(grid, side) else {"resized": True}),
            }
            for grid in self.grids
        ]

    def events(
        self,
        params: Sequence[Mapping[str, Any]],
        labels: np.ndarray,
        predicted: np.ndarray,
        ids: Sequence[str],
        seed: int,
    ) -> Iterator[Event]:
        """Metrics and predictions.

        Args:
            params: of the L grids, as from :meth:`levels`.
            labels: (n,).
            predicted: (R, n, L), of R repeats.
            ids: n names of images.
            seed: of the bootstrap.
        """
        correct = predicted == labels[None, :, None]
        yield from level_metrics(params, correct)
        own = ("grid", "cells", "on_patch_grid", "resized")
        shared = {name: value for name, value in params[0].items() if name not in own}
        yield area_metric(cell_positions([p["cells"] for p in params]), correct, shared, seed)
        columns = {f"top1@grid={p['grid']}": predicted[0, :, index] for index, p in enumerate(params)}
        yield Predictions(ids, {"label": labels, **columns})

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields top1 of every grid, the area under the curve, predictions of the first repeat, and a sheet.

        Raises:
            ConfigError: a head that does not fit.
            DataError: an unlabelled or unreadable image, or logits that are not finite.
        """
        from ibot_eval.robustness.classifier import open_classifier
        from ibot_eval.robustness.heads import head_notes, head_params
        from ibot_eval.robustness.sheets import damage_sheets
        from ibot_eval.robustness.shuffling import Shuffles, fitting_size
        from ibot_eval.robustness.sweep import sweep

        assert session.data is not None
        assert session.transform is not None
        own, split, side = self.config, session.data.splits["test"], session.transform.crop
        if self.left_out:
            yield Warning(f"default grids left out, since they do not divide {side} pixels: {', '.join(self.left_out)}")
        resized = [grid for grid in self.grids if not divides(grid, side)]
        if resized:
            sizes = ", ".join(f"{_text(grid)} at {_text(fitting_size(side, grid))}" for grid in resized)
            yield Warning(f"shuffled at the nearest size that the grid divides, then resized to {side}: {sizes}")
        # A Swin's patches are merged on the way; what a grid may cut are those that it begins with.
        patch = getattr(backbone, "embed_patch_size", backbone.patch_size) if backbone.num_heads else None
        classifier = open_classifier(session, own.head, k=own.k, temperature=own.temperature)
        yield from map(Warning, head_notes(classifier, session.asked))
        params = [{**p, **head_params(classifier)} for p in self.levels(side, patch)]
        damage = Shuffles(self.grids[1:], session.seed, own.repeats)
        swept = sweep(lambda d: classifier.logits(d.images), classifier.classes, split, damage, session, "shuffle")
        yield from map(Warning, swept.notes(classifier.classes, session.class_names))
        n = len(swept.indices)
        damaged = swept.predicted.reshape(n, own.repeats, -1).transpose(1, 0, 2)
        clean = np.broadcast_to(swept.clean[None, :, None], (own.repeats, n, 1))
        ids = [split.image_ids[int(i)] for i in swept.indices]
        yield from self.events(params, swept.labels, np.concatenate([clean, damaged], 2), ids, session.seed)
        shown = replace(damage, repeats=1)
        titles = [_text(grid) for grid in self.grids]
        for path in damage_sheets(shown, ("shuffle",), titles, split, swept.indices, own.sheet, session):
            yield Artifact(path, "figure")

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``accuracy_by_cells``: top-1 against the number of cells, a line per run; ringed where no patch is cut."""
        from ibot_eval.robustness.sheets import draw_curves

        figure, axes = draw_curves(
            records,
            lambda record: {"": [m for m in record.metrics if m["name"] == "top1"]},
            lambda _, m: m["params"]["cells"],
            "shuffle",
            ringed=lambda m: m["params"]["on_patch_grid"],
        )
        axes.set_xscale("log", base=2)
        cells = sorted({m["params"]["cells"] for r in records for m in r.metrics if m["name"] == "top1"})
        # Of numbers that would overlap, as 196 and 256, the larger is written.
        texts = ["" if following < 1.4 * n else str(n) for n, following in pairwise([*cells, math.inf])]
        axes.set_xticks(cells, texts)
        axes.minorticks_off()
        axes.set_xlabel("cells (ringed: no patch of the network is cut)")
        return {"accuracy_by_cells": figure}


def _text(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"
