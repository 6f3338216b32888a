"""Part-wise linear probing: how much a few patches tell about the image.

A linear layer is trained on the mean of the k patch tokens that the [CLS] token of the last block attends to most, for
several k, as in the iBOT paper's figure of part-wise probing; heads are chosen as `linear` does. --reverse takes the
patches that it attends to least and --random takes any, as controls. One pass over the images serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ibot_eval.atoms import resolve
from ibot_eval.errors import ConfigError
from ibot_eval.features import FeatureBank, FeatureRequest, Split
from ibot_eval.probes.labelled import labelled, unknown_classes
from ibot_eval.probes.linear_probe import ProbeSettings, train_probe
from ibot_eval.probes.outcome import probe_metrics
from ibot_eval.protocol import Event, FrozenProtocol, Predictions, PublishedKey, Session, Warning

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord

HEADLINE_K = 14
REDUCERS = {"attention": "norm_topk", "reverse": "norm_bottomk", "random": "norm_randomk"}
LINES = {
    "attention": ("-", "largest attention of [CLS]"),
    "reverse": ("--", "smallest attention of [CLS]"),
    "random": (":", "random patches"),
}


@dataclass(frozen=True)
class PartProbeConfig(ProbeSettings):
    """Settings of the part-wise probe."""

    k: tuple[int, ...] = (1, 7, 14, 28, 56, 112, 196)
    """Numbers of patches whose mean is classified. Defaults above the grid stand for all patches."""
    reverse: bool = False
    """Also classify the mean of the k patches with the smallest attention."""
    random: bool = False
    """Also classify the mean of k patches drawn for each image; the draw does not depend on --seed."""


class PartProbe(FrozenProtocol[PartProbeConfig]):
    """A linear classifier on the mean of the patches that [CLS] attends to."""

    config_type = PartProbeConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"

    def __init__(self, config: PartProbeConfig) -> None:
        super().__init__(config)
        if not config.k or min(config.k) < 1 or len(set(config.k)) < len(config.k):
            given = ", ".join(map(str, config.k)) or "none"
            raise ConfigError(f"k must be different numbers from 1 up; given: {given}", where="--k")
        self.orders = ["attention", *(name for name in ("reverse", "random") if getattr(config, name))]

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """Default k up to the number of patches.

        Raises:
            ConfigError: a network without [CLS] attention, or a k asked for by hand that is above its grid.
        """
        # A Swin's grid is not what its user should hear of first.
        resolve(self.features()[0], backbone, None)
        backbone.check_size(transform.crop, transform.crop)
        side = transform.crop // backbone.patch_size
        large = [k for k in self.config.k if k > side**2]
        if large and "k" in asked:
            raise ConfigError(
                f"k = {', '.join(map(str, large))} is more than the {side}x{side} = {side**2} patches of an image",
                where="--k",
                todo=f"choose k up to {side**2}, or a larger --crop",
            )
        return type(self)(replace(self.config, k=tuple(sorted({min(k, side**2) for k in self.config.k}))))

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """None: the paper draws its numbers and does not list them."""
        return None

    def features(self) -> Sequence[FeatureRequest]:
        return [
            self._request(split, k, order)
            for split in ("train", "test")
            for order in self.orders
            for k in self.config.k
        ]

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        """Yields top1, top5 and top1_best_on_test for every k and order, warnings, and per-image predictions.

        Raises:
            DataError: an unlabelled or missing image, or features that are not finite.
        """
        values: dict[str, np.ndarray] = {}
        image_ids: Sequence[str] = ()
        warned: set[str] = set()
        for order in self.orders:
            for k in self.config.k:
                train, test = (
                    labelled(banks, [self._request(split, k, order)], split, "part-wise probing")
                    for split in ("train", "test")
                )
                result = train_probe(
                    train,
                    test,
                    self.config,
                    device=session.device,
                    seed=session.seed,
                    progress=session.progress,
                    desc=f"k = {k}, {order}",
                )
                unknown = unknown_classes(test.labels, train.classes, session.class_names, "the train split")
                new = [w for w in (unknown, *result.warnings) if w and w not in warned]
                yield from map(Warning, new)
                warned.update(new)
                for metric in probe_metrics(result, test.labels):
                    yield replace(metric, params={"k": k, "order": order, **metric.params})
                image_ids, values["label"] = test.image_ids, test.labels
                values[f"top1@k={k},order={order}"] = result.predicted
        yield Predictions(image_ids, values)

    @classmethod
    def headline(cls, metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Top-1 of the most attended patches at the k nearest to 14; of two equally near, the smaller.

        A fixed choice, since the best k on the test split would be tuned on it.
        """
        named = [m for m in metrics if m["name"] == cls.primary and m["params"]["order"] == "attention"]
        return min(named, key=lambda m: (abs(m["params"]["k"] - HEADLINE_K), m["params"]["k"]), default=None)

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``accuracy_by_k``: top-1 with its interval against the number of patches, a line per run and order."""
        from matplotlib import colormaps

        from ibot_eval.figures import new_figure

        figure = new_figure(6.5, 4 + 0.2 * len(records))
        axes = figure.subplots()
        drawn: set[str] = set()
        ticks: set[int] = set()
        for index, record in enumerate(records):
            colour = f"C{index}" if len(records) <= 10 else colormaps["turbo"]((index + 0.5) / len(records))
            for number, (order, (style, meaning)) in enumerate(LINES.items()):
                rows = sorted(
                    (m for m in record.metrics if m["name"] == "top1" and m["params"]["order"] == order),
                    key=lambda m: m["params"]["k"],
                )
                if not rows:
                    continue
                drawn.add(order)
                k = [m["params"]["k"] for m in rows]
                ticks.update(k)
                # One run has a colour for each order, several one each.
                if len(records) == 1:
                    colour, label = f"C{number}", meaning
                else:
                    label = record.run if order == "attention" else None
                axes.plot(k, [m["value"] for m in rows], style, marker="o", markersize=4, color=colour, label=label)
                intervals = [m.get("interval") or (m["value"], m["value"]) for m in rows]
                low, high = [low for low, _ in intervals], [high for _, high in intervals]
                axes.fill_between(k, low, high, color=colour, alpha=0.1, linewidth=0)
        if len(records) > 1 and len(drawn) > 1:
            # What the styles mean, once for all runs.
            for style, meaning in (LINES[order] for order in LINES if order in drawn):
                axes.plot([], [], style, color="grey", label=meaning)
        axes.set_xscale("log")
        # Of numbers that would overlap, as 56 and 64, the larger is written.
        texts = ["" if following < 1.25 * k else str(k) for k, following in pairwise([*sorted(ticks), math.inf])]
        axes.set_xticks(sorted(ticks), texts)
        axes.minorticks_off()
        axes.set(
            xlabel="patches whose mean is classified",
            ylabel="top-1 (%), shaded: 95 % interval",
            title=f"part-wise probe, {records[0].run}" if len(records) == 1 else "part-wise probe",
        )
        figure.legend(loc="outside lower center", fontsize="small")
        return {"accuracy_by_k": figure}

    def _request(self, split: Split, k: int, order: str) -> FeatureRequest:
        return FeatureRequest(split, -1, "none", f"{REDUCERS[order]}:{k}")
