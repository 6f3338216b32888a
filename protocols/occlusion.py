"""Occlusion: how much of an image a classifier needs.

Patches of each test image are dropped, at random, those that the [CLS] token of a chosen network attends to most first
(salient) or those that it attends to least first (non-salient), and what is left is classified; accuracy is shown
against the information loss, as in the iBOT paper's Figure 9. Levels of salient and non-salient are shares of the
attention's mass; the share of the image that was lost is reported as `loss`. --saliency-ckpt with DINO's ViT-S/16 and
--saliency-head 1 is the published choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from ibot_eval.errors import ConfigError
from ibot_eval.protocol import Artifact, EvalProtocol, Event, Predictions, PublishedKey, Session, Warning
from ibot_eval.robustness.config import (
    DamageSettings,
    Fill,
    Kind,
    Offset,
    check_damage,
    check_levels,
    open_for,
    roles_for,
)
from ibot_eval.robustness.outcome import area_metric, level_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.splits import Data
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord
    from ibot_eval.robustness.occluding import Occlusions
    from ibot_eval.robustness.sweep import Swept
    from ibot_eval.settings import DataSettings

KINDS: tuple[Kind, ...] = ("random", "salient", "non-salient")
PUBLISHED_SIDE = 16


@dataclass(frozen=True)
class OcclusionConfig(DamageSettings):
    """Settings of the protocol."""

    kinds: tuple[Kind, ...] = KINDS
    """Which patches go first: any (random), those of most attention (salient), or those of least (non-salient)."""
    levels: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90)
    """Percent of the patches (random) or of the attention's mass (salient, non-salient); ascending from 0."""
    drop: Literal["pixels", "tokens"] = "pixels"
    """Paint over the pixels of a patch, or take its token out of the sequence of a plain ViT."""
    fill: Fill = "mean"
    """What dropped pixels show: the mean colour (0 after normalisation), black, or noise."""
    cell: int | None = None
    """Side in pixels of the squares that are dropped. Default: the patch of a plain Transformer, 16 for others."""
    offset: Offset = "none"
    """Shift the squares against the patches: by a random part of a square for each image, or by half of one. What is
    pushed out on one side comes in on the other."""
    saliency_ckpt: str | None = None
    """Network whose last block's [CLS] attention tells what is salient, named as --ckpt is. Default: the one under
    test."""
    saliency_key: str | None = None
    """Which network of that file, as --key. Default: teacher when both exist."""
    saliency_head: Literal["mean"] | int = "mean"
    """Attention head that tells: mean of all, or one of them counted from 0."""


class Occlusion(EvalProtocol[OcclusionConfig]):
    """A classifier on images whose patches were dropped."""

    config_type = OcclusionConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "area_under_curve"

    def __init__(self, config: OcclusionConfig) -> None:
        super().__init__(config)
        check_damage(config)
        check_levels(config.levels)
        if not config.kinds or len(set(config.kinds)) < len(config.kinds):
            raise ConfigError("kinds must be different, and at least one", where="--kinds")
        if config.cell is not None and config.cell < 1:
            raise ConfigError(f"squares of {config.cell} pixels cannot be dropped", where="--cell")
        if config.saliency_key is not None and config.saliency_ckpt is None:
            raise ConfigError("--saliency-key has no effect without --saliency-ckpt")
        if set(config.kinds) == {"random"} and config.saliency_ckpt is not None:
            raise ConfigError(
                "--saliency-ckpt has no effect where patches are dropped at random only",
                todo="add salient or non-salient to --kinds",
            )
        if config.drop == "tokens":
            if config.offset != "none":
                raise ConfigError("tokens are whole patches, which cannot be shifted", where="--offset")
            if config.levels[-1] == 100:
                raise ConfigError("of an image without tokens nothing is left", where="--levels", todo="end below 100")

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """The side of the squares, where it is not given.

        Raises:
            ConfigError: squares that do not divide the image; tokens of a network that cannot lose some; or saliency
                of a network that has no [CLS] attention.
        """
        from ibot_eval.models.kept_tokens import KeptTokens
        from ibot_eval.models.transformer import TransformerBackbone
        from ibot_eval.robustness.saliency import check_saliency

        own, patch = self.config, backbone.patch_size
        cell = own.cell or (patch if isinstance(backbone, TransformerBackbone) else PUBLISHED_SIDE)
        if own.drop == "tokens":
            KeptTokens(backbone)
            if "fill" in asked:
                raise ConfigError("--fill has no effect with --drop tokens", todo="leave it out, or --drop pixels")
            if cell != patch:
                raise ConfigError(f"tokens are patches of {patch} pixels, not of {cell}", where="--cell")
        if transform.crop % cell:
            raise ConfigError(
                f"an image of {transform.crop} pixels cannot be cut into squares of {cell}",
                where="--cell" if own.cell else "--crop",
                todo=f"choose a crop such as {max(1, round(transform.crop / cell)) * cell} (--crop), or another --cell",
            )
        if own.saliency_ckpt is None and set(own.kinds) != {"random"}:
            check_saliency(backbone, own.saliency_head, "--ckpt")
        return type(self)(replace(own, cell=cell))

    def roles(self) -> tuple[str, ...]:
        return roles_for(self.config.head)

    def open(self, settings: DataSettings) -> Data:
        """Labelled images; the train split only where its images vote (--head knn)."""
        return open_for(self.config.head, settings)

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """None: the paper draws its numbers and does not list them."""
        return None

    def events(
        self,
        labels: np.ndarray,
        predicted: Mapping[str, np.ndarray],
        loss: Mapping[str, np.ndarray],
        ids: Sequence[str],
        seed: int,
        saliency: str | None = None,
        head: Mapping[str, Any] | None = None,
    ) -> Iterator[Event]:
        """Metrics and predictions.

        Args:
            labels: (n,).
            predicted: kind -> (R, n, L), of its R repeats and the L levels.
            loss: kind -> (R, n, L) shares of the image that were dropped.
            ids: n names of images.
            seed: of the bootstrap.
            saliency: whose attention tells what is salient.
            head: what the metrics' params say about the classifier.
        """
        values = {"label": labels}
        for kind in self.config.kinds:
            variant = {**self._variant(kind, saliency), **(head or {})}
            params = [{"kind": kind, "level": level, **variant} for level in self.config.levels]
            correct = predicted[kind] == labels[None, :, None]
            yield from level_metrics(params, correct, loss[kind])
            yield area_metric(self.config.levels, correct, {"kind": kind, **variant}, seed)
            for index, level in enumerate(self.config.levels):
                values[f"top1@kind={kind},level={level}"] = predicted[kind][0, :, index]
        yield Predictions(ids, values)

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        """Yields top1 of every kind and level, areas under the curves, predictions of the first repeat, and sheets.

        Raises:
            ConfigError: a head that does not fit, or a saliency network without [CLS] attention or that head.
            DataError: an unlabelled or unreadable image, or logits that are not finite.
        """
        from ibot_eval.models.kept_tokens import KeptTokens
        from ibot_eval.robustness.classifier import open_classifier
        from ibot_eval.robustness.heads import head_notes, head_params
        from ibot_eval.robustness.sheets import damage_sheets
        from ibot_eval.robustness.sweep import Damaged, sweep

        assert session.data is not None
        assert session.loaded is not None
        own, split = self.config, session.data.splits["test"]
        damage = self._damage(session)
        if damage.saliency is not None and damage.saliency.note:
            yield Warning(damage.saliency.note)
        dropping = KeptTokens(backbone) if own.drop == "tokens" else None
        if dropping is not None:
            session = replace(session, loaded=replace(session.loaded, backbone=dropping))
        classifier = open_classifier(session, own.head, k=own.k, temperature=own.temperature)
        yield from map(Warning, head_notes(classifier, session.asked))

        def classify(damaged: Damaged) -> Tensor:
            with nullcontext() if dropping is None or damaged.kept is None else dropping.keeping(damaged.kept):
                return classifier.logits(damaged.images)

        swept = sweep(classify, classifier.classes, split, damage, session, "occlusion")
        yield from map(Warning, swept.notes(classifier.classes, session.class_names))
        ids = [split.image_ids[int(i)] for i in swept.indices]
        predicted, loss = _by_kind(damage, swept)
        saliency = damage.saliency and damage.saliency.name
        yield from self.events(swept.labels, predicted, loss, ids, session.seed, saliency, head_params(classifier))
        painting = replace(damage, tokens=False, repeats=1)
        titles = [f"{level} %" for level in own.levels]
        for path in damage_sheets(painting, own.kinds, titles, split, swept.indices, own.sheet, session):
            yield Artifact(path, "figure")

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``accuracy_by_loss``: top-1 against the information loss reached, a line per run and kind."""
        from ibot_eval.robustness.sheets import draw_curves

        def curves(record: EvalRecord) -> dict[str, list[dict[str, Any]]]:
            top1 = [m for m in record.metrics if m["name"] == "top1"]
            found = {kind: [m for m in top1 if m["params"]["kind"] == kind] for kind in KINDS}
            return {kind: rows for kind, rows in found.items() if rows}

        figure, axes = draw_curves(records, curves, lambda _, m: m["params"]["loss"], "occlusion")
        axes.set_xlabel("information loss (%)")
        return {"accuracy_by_loss": figure}

    def _variant(self, kind: Kind, saliency: str | None) -> dict[str, Any]:
        """What distinguishes this run's metrics of a kind from those of other settings."""
        own = self.config
        variant: dict[str, Any] = {"fill": own.fill} if own.drop == "pixels" else {"drop": "tokens"}
        if own.offset != "none":
            variant["offset"] = own.offset
        if kind != "random" and saliency is not None:
            heads = "mean of heads" if own.saliency_head == "mean" else f"head {own.saliency_head}"
            variant["saliency"] = f"{saliency}, {heads}"
        return variant

    def _damage(self, session: Session) -> Occlusions:
        from ibot_eval.robustness.occluding import Occlusions
        from ibot_eval.robustness.saliency import open_saliency

        own, transform = self.config, session.transform
        assert transform is not None
        assert own.cell is not None
        saliency = None
        if set(own.kinds) != {"random"}:
            grid = (transform.crop // own.cell, transform.crop // own.cell)
            saliency = open_saliency(session, own.saliency_ckpt, own.saliency_key, own.saliency_head, grid)
        return Occlusions(
            kinds=own.kinds,
            levels=own.levels[1:],
            side=own.cell,
            transform=transform,
            saliency=saliency,
            fill=own.fill,
            offset=own.offset,
            tokens=own.drop == "tokens",
            seed=session.seed,
            repeats=own.repeats,
        )


def _by_kind(damage: Occlusions, swept: Swept) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """kind -> (R, n, L) predicted labels, and losses; the first level is the clean one."""
    predicted: dict[str, np.ndarray] = {}
    loss: dict[str, np.ndarray] = {}
    ways = damage.ways()
    for kind in damage.kinds:
        rows = [[i for i, way in enumerate(ways) if way[:2] == (kind, r)] for r in range(damage.repeats_of(kind))]
        predicted[kind] = np.stack([np.column_stack([swept.clean, swept.predicted[:, row]]) for row in rows])
        loss[kind] = np.stack([np.column_stack([0 * swept.clean, swept.loss[:, row]]) for row in rows])
    return predicted, loss
