"""k-NN classification of frozen features: the weighted vote of the nearest training images.

Every image of the test split asks its k most similar images of the train split (cosine), each of which votes for its
class with the weight exp(similarity / temperature); Wu et al. 2018, Caron et al. 2021, and the iBOT paper's tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.features import FeatureBank, FeatureRequest, Split
from ibot_eval.metrics.accuracy import target_ranks
from ibot_eval.metrics.intervals import wilson
from ibot_eval.metrics.votes import cumulative_votes
from ibot_eval.neighbors import Backend, search_tiles
from ibot_eval.probes.labelled import unknown_classes
from ibot_eval.protocol import Event, FrozenProtocol, Metric, Predictions, Session, Warning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.record import EvalRecord

HEADLINE_K = 20
REDUCERS = {"cls": ("cls",), "patch_mean": ("patch_mean",), "cls+patch_mean": ("cls", "patch_mean")}
# Votes of (images x classes) held at a time: 2 MB, which stay in the cache.
VOTE_VALUES = 1 << 18


@dataclass(frozen=True)
class KNNConfig:
    """Settings of the k-NN protocol."""

    k: tuple[int, ...] = (10, 20, 100, 200)
    """Numbers of neighbours that vote; one search serves all."""
    temperature: float = 0.07
    """A neighbour's vote weighs exp(similarity / temperature)."""
    blocks: tuple[int, ...] = (-1,)
    """Blocks whose features are concatenated; negative ones count from the last."""
    pooling: Literal["cls", "patch_mean", "cls+patch_mean"] = "cls"
    """Features of a block: the [CLS] token, the mean of the patch tokens, or both concatenated."""
    leave_one_out: bool = False
    """Classify every image of one split by all others of the same split."""
    loo_split: Literal["train", "test"] = "test"
    """The split for --leave-one-out."""
    save_votes: bool = False
    """Also save each image's vote probabilities: (images, classes) for every k."""
    backend: Backend = "auto"
    """Neighbour search by torch or faiss, both exact; auto: torch, the faster of the two."""


class KNN(FrozenProtocol[KNNConfig]):
    """k nearest neighbours, weighted vote."""

    config_type = KNNConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"

    def __init__(self, config: KNNConfig) -> None:
        super().__init__(config)
        if not config.k or min(config.k) < 1 or len(set(config.k)) < len(config.k):
            given = _list(config.k) or "none"
            raise ConfigError(f"k must be different numbers from 1 up; given: {given}", where="--k")
        if not config.temperature > 0 or math.isinf(config.temperature):
            raise ConfigError(f"the temperature must be positive, not {config.temperature}", where="--temperature")
        if not config.blocks or len(set(config.blocks)) < len(config.blocks):
            raise ConfigError(f"blocks must be different, and at least one: {config.blocks}", where="--blocks")

    def features(self) -> Sequence[FeatureRequest]:
        return [r for split in dict.fromkeys(self._roles()) for r in self._requests(split)]

    def as_published(self) -> bool:
        """[CLS] of the last block, temperature 0.07, train against validation."""
        own, published = self.config, KNNConfig()
        names = ("temperature", "blocks", "pooling", "leave_one_out")
        return all(getattr(own, name) == getattr(published, name) for name in names)

    def check(self, sizes: Mapping[str, int], session: Session) -> None:
        """Raises ConfigError for a k asked for by hand that is larger than the gallery."""
        if "loo_split" in session.asked and not self.config.leave_one_out:
            raise ConfigError("--loo-split has no effect without --leave-one-out", todo="add --leave-one-out")
        size = sizes[self._roles()[0]] - self.config.leave_one_out
        if "k" in session.asked and size > 0:
            self._usable_k(size, by_hand=True)

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        """Yields top1 and top5 for every k, warnings, and per-image predictions.

        Raises:
            DataError: an unlabelled or missing image, or features that are not finite.
            ConfigError: a k asked for by hand that is larger than the gallery.
        """
        gallery, query = ([banks[r] for r in self._requests(split)] for split in self._roles())
        for role, atoms in (("gallery", gallery), ("query", query)):
            _check(role, atoms)
        size = len(gallery[0]) - self.config.leave_one_out
        ks, warning = self._usable_k(size, "k" in session.asked)
        if warning:
            yield Warning(warning)
        classes, votes_for = np.unique(gallery[0].labels, return_inverse=True)
        labels = np.asarray(query[0].labels)
        unknown = unknown_classes(labels, classes, session.class_names, "the gallery")
        if unknown:
            yield Warning(unknown)
        targets = np.where(np.isin(labels, classes), np.searchsorted(classes, labels), -1)

        local = distributed.everywhere(lambda: self._classify(gallery, query, votes_for, targets, ks, session))
        rows = local.pop("rows")
        whole = {name: distributed.gather_rows(part, rows, len(labels)).numpy() for name, part in local.items()}

        values: dict[str, np.ndarray] = {"label": labels}
        for i, k in enumerate(ks):
            params: dict[str, Any] = {"k": k, "temperature": self.config.temperature, **self._variant()}
            values[f"top1@k={k}"] = predicted = classes[whole["predicted"][:, i]]
            for name, right in (("top1", predicted == labels), ("top5", whole["in_top5"][:, i])):
                correct, n = int(right.sum()), len(labels)
                yield Metric(name, 100 * correct / n, params=params, n=n, interval=wilson(correct, n))
            if self.config.save_votes:
                values[f"votes@k={k}"] = _columns(whole["votes"][:, i], classes, len(session.class_names))
        yield Predictions(query[0].image_ids, values)

    @classmethod
    def headline(cls, metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Top-1 at the k nearest to 20: a fixed choice, since the best k on the test split would be tuned on it.

        20 is what DINO's code recommends; of two equally near, the smaller.
        """
        named = [m for m in metrics if m["name"] == cls.primary]
        return min(named, key=lambda m: (abs(m["params"]["k"] - HEADLINE_K), m["params"]["k"]), default=None)

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``accuracy_by_k``: top-1 with its interval and top-5 against k, and the published top-1 if there is one."""
        from matplotlib import colormaps

        from ibot_eval.figures import new_figure

        # The legend lies below the axes, a line a run: inside, long names would hide the curves.
        figure = new_figure(6.5, 4 + 0.2 * len(records))
        axes = figure.subplots()
        for index, record in enumerate(records):
            colour = f"C{index}" if len(records) <= 10 else colormaps["turbo"]((index + 0.5) / len(records))
            for name, label, style in (("top1", "top-1", "-"), ("top5", "top-5", ":")):
                metrics = sorted((m for m in record.metrics if m["name"] == name), key=lambda m: m["params"]["k"])
                k = [m["params"]["k"] for m in metrics]
                whose = label if len(records) == 1 else record.run if name == "top1" else None
                values = [m["value"] for m in metrics]
                axes.plot(k, values, style, marker="o", markersize=4, color=colour, label=whose)
                intervals = [m.get("interval") or (m["value"], m["value"]) for m in metrics]
                low, high = [low for low, _ in intervals], [high for _, high in intervals]
                axes.fill_between(k, low, high, color=colour, alpha=0.15, linewidth=0)
        metrics = [m for record in records for m in record.metrics]
        for value in sorted({m["published"]["value"] for m in metrics if m["name"] == "top1" and m.get("published")}):
            axes.axhline(value, linestyle="--", color="grey", label=f"published top-1 {value:g}")
        axes.set_xscale("log")
        ticks = sorted({m["params"]["k"] for m in metrics})
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        title = f"k-NN, {records[0].run}" if len(records) == 1 else "k-NN: top-1 solid, top-5 dotted"
        axes.set(xlabel="k", ylabel="accuracy (%), shaded: 95 % interval", title=title)
        figure.legend(loc="outside lower center", fontsize="small")
        return {"accuracy_by_k": figure}

    def _variant(self) -> dict[str, Any]:
        """Settings other than the usual ones, for the metrics' params: they tell rows of a report apart."""
        usual, own = KNNConfig(), self.config
        names = ("blocks", "pooling", "leave_one_out")
        return {name: getattr(own, name) for name in names if getattr(own, name) != getattr(usual, name)}

    def _roles(self) -> tuple[Split, Split]:
        """Splits of the gallery and of the queries."""
        if self.config.leave_one_out:
            return self.config.loo_split, self.config.loo_split
        return "train", "test"

    def _requests(self, split: Split) -> list[FeatureRequest]:
        reducers = REDUCERS[self.config.pooling]
        return [FeatureRequest(split, block, reducer=reducer) for block in self.config.blocks for reducer in reducers]

    def _usable_k(self, size: int, by_hand: bool) -> tuple[list[int], str | None]:
        """The k to evaluate in ascending order, and a warning about those left out."""
        if size < 1:
            raise DataError(
                "the gallery is empty" if not self.config.leave_one_out else "one image cannot be classified by others",
                todo="give a split with more images",
            )
        usable, large = ([k for k in sorted(self.config.k) if (k <= size) == fits] for fits in (True, False))
        if not large:
            return usable, None
        others = f"{'other' if self.config.leave_one_out else 'gallery'} image{'s' * (size != 1)}"
        if by_hand:
            raise ConfigError(
                f"k = {_list(large)} is more than the {size} {others}", where="--k", todo=f"choose k up to {size}"
            )
        instead = "" if usable else f"; k = {size} is used"
        return usable or [
            size
        ], f"default k = {_list(large)} left out: there {'are' if size != 1 else 'is'} only {size} {others}{instead}"

    def _classify(
        self,
        gallery: Sequence[FeatureBank],
        query: Sequence[FeatureBank],
        votes_for: np.ndarray,
        targets: np.ndarray,
        ks: Sequence[int],
        session: Session,
    ) -> dict[str, Tensor]:
        """This rank's part: ``rows`` (m,), ``predicted`` (m, ks) and ``in_top5`` (m, ks), ``votes`` (m, ks, classes).

        Args:
            votes_for: (gallery,) the class index, 0 … C - 1, that each item votes for.
            targets: (queries,) the right class index, or -1 where the gallery does not know the class.
        """
        classes = int(votes_for.max()) + 1
        voters, right = torch.from_numpy(votes_for), torch.from_numpy(targets)
        tiles = search_tiles(
            [atom.features for atom in query],
            [atom.features for atom in gallery],
            max(ks),
            device=session.device,
            exclude_self=self.config.leave_one_out,
            backend=self.config.backend,
            query_ids=query[0].image_ids,
            gallery_ids=gallery[0].image_ids,
        )
        found: dict[str, list[Tensor]] = {"rows": [], "predicted": [], "in_top5": []}
        if self.config.save_votes:
            found["votes"] = []
        step = max(1, VOTE_VALUES // classes)
        show = session.progress and distributed.is_main()
        with tqdm(total=len(targets), desc="k-NN", unit="images", disable=not show, leave=False) as bar:
            for tile, similarities, indices in tiles:
                for a in range(0, len(indices), step):
                    neighbours = voters[torch.from_numpy(indices[a : a + step])]
                    shares = cumulative_votes(
                        torch.from_numpy(similarities[a : a + step]), neighbours, ks, self.config.temperature, classes
                    )
                    outcomes = [_outcome(votes, right[tile][a : a + step], self.config.save_votes) for votes in shares]
                    for name in outcomes[0]:
                        found[name].append(torch.stack([o[name] for o in outcomes], 1))
                found["rows"].append(torch.arange(tile.start, tile.stop))
                bar.update((tile.stop - tile.start) * distributed.world_size())
        return {name: torch.cat(parts) if parts else torch.empty(0) for name, parts in found.items()}


def _outcome(votes: Tensor, targets: Tensor, keep_votes: bool) -> dict[str, Tensor]:
    # Classes without a vote would fill up the five best where fewer got one, and be right by chance.
    got_vote = votes.gather(1, targets.clamp(min=0)[:, None]).squeeze(1) > 0
    in_top5 = target_ranks(votes, torch.where(got_vote, targets, -1)) < 5
    outcome = {"predicted": votes.argmax(1), "in_top5": in_top5}
    if keep_votes:
        outcome["votes"] = (votes / votes.sum(1, keepdim=True)).float()
    return outcome


def _check(role: str, atoms: Sequence[FeatureBank]) -> None:
    bank = atoms[0]
    if any(list(a.image_ids) != list(bank.image_ids) for a in atoms[1:]):
        raise ValueError("atoms of different images cannot be concatenated")
    if not len(bank):
        raise DataError(f"the {role} has no images")
    unlabelled = np.flatnonzero(np.asarray(bank.labels) < 0)
    if len(unlabelled):
        raise DataError(
            f"{len(unlabelled)} of {len(bank)} {role} images have no label, the first being "
            f"{bank.image_ids[unlabelled[0]]}",
            todo="k-NN needs labels on both sides: sort the images into class folders, or give --test-labels",
        )


def _columns(votes: np.ndarray, classes: np.ndarray, named: int) -> np.ndarray:
    """Votes by label, a column for each named class; by known label in ascending order if some have no name."""
    if classes[-1] >= named:
        return votes
    columns = np.zeros((len(votes), named), votes.dtype)
    columns[:, classes] = votes
    return columns


def _list(numbers: Sequence[Any]) -> str:
    return ", ".join(map(str, numbers))
