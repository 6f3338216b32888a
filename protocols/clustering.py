"""Clustering: how well clusters found without labels agree with the classes (NMI, ARI, FMI, accuracy).

Three ways to get clusters of the images of one split. head: the index of the projection head's largest output on
[CLS], as in the iBOT paper's Table 5, whose model was pre-trained with K = 1000 outputs; it needs a checkpoint with its
head. kmeans: k-means of the frozen features. spherical: k-means of the features and centroids at unit length. Numbers
of different methods are not comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.features import FeatureBank, FeatureRequest, Split
from ibot_eval.kmeans import Backend, chosen_backend, kmeans
from ibot_eval.metrics.clustering import ari, clustering_accuracy, fmi, nmi
from ibot_eval.probes.labelled import Labelled, labelled
from ibot_eval.probes.published_features import (
    Features,
    check_blocks,
    default_blocks,
    feature_requests,
    resolve_features,
)
from ibot_eval.protocol import Event, FrozenProtocol, Metric, Predictions, PublishedKey, Session, Warning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.backbone import Backbone
    from ibot_eval.data.transforms import EvalTransform
    from ibot_eval.record import EvalRecord

Method = Literal["head", "kmeans", "spherical"]
METHODS: tuple[Method, ...] = ("head", "kmeans", "spherical")
MEASURES = {"nmi": nmi, "ari": ari, "fmi": fmi, "acc": clustering_accuracy}
PUBLISHED_OUTPUTS = 1000


@dataclass(frozen=True)
class ClusteringConfig:
    """Settings of the clustering protocol."""

    methods: tuple[Method, ...] = METHODS
    """Where clusters come from: the projection head's largest output (left out with a warning if the checkpoint has no
    head and another method is named), k-means, spherical k-means."""
    clusters: int | None = None
    """Clusters of kmeans and spherical; default: as many as there are classes in the split."""
    restarts: int = 10
    """Starts of kmeans and spherical; the one with the least objective counts."""
    iterations: int = 100
    """Steps of kmeans and spherical from each start, at most; a start ends earlier once it gets no better."""
    split: Split = "test"
    """The split whose images are clustered."""
    features: Features = "cls"
    """Features for kmeans and spherical: [CLS], [CLS] of the last four blocks (last4), the mean of the patch tokens,
    [CLS] and that mean, or the last norm of the mean of the raw patch tokens; published: those of linear."""
    blocks: tuple[int, ...] | None = None
    """Blocks whose features are concatenated, negative ones counting from the last. Default: the last, or the last
    four for last4."""
    backend: Backend = "auto"
    """k-means by faiss or scikit-learn (sklearn); auto: faiss if it is installed."""


class Clustering(FrozenProtocol[ClusteringConfig]):
    """Clusters against classes."""

    config_type = ClusteringConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "nmi"

    def __init__(self, config: ClusteringConfig) -> None:
        super().__init__(config)
        if not config.methods or len(set(config.methods)) < len(config.methods):
            raise ConfigError("methods must be different ones, and at least one", where="--methods")
        check_blocks(config.blocks)
        for name in ("clusters", "restarts", "iterations"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}", where=f"--{name}")

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """With the features spelled out, and the backend that is used, so that the record says which."""
        features, blocks = resolve_features(self.config.features, self.config.blocks, backbone)
        backend = chosen_backend(self.config.backend)
        return type(self)(replace(self.config, features=features, blocks=blocks, backend=backend))

    def features(self) -> Sequence[FeatureRequest]:
        head = [self._head_request()] if "head" in self.config.methods else []
        return head + (self._feature_requests() if self._k_means() else [])

    def check(self, sizes: Mapping[str, int], session: Session) -> None:
        """Raises ConfigError for more clusters than images, and for settings without an effect."""
        useless = sorted(session.asked & {"clusters", "restarts", "iterations", "features", "blocks", "backend"})
        if useless and not self._k_means():
            raise ConfigError(
                f"--{useless[0]} has no effect on the projection head's clusters",
                where="--methods head",
                todo="add kmeans or spherical to --methods",
            )
        self._check_clusters(sizes[self.config.split])

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        """Yields nmi, ari, fmi and acc for every method, warnings, and each image's clusters.

        A metric's params: ``method``, ``clusters`` (asked for, or the head's number of outputs; left out where that is
        not known) and ``used`` (those that hold an image).

        Raises:
            DataError: no image, an unlabelled one, or features that are not finite.
            ConfigError: more clusters than images.
        """
        features = self._features(banks) if self._k_means() else None
        values: dict[str, np.ndarray] = {}
        images: Labelled | None = features
        for method in sorted(self.config.methods, key=METHODS.index):
            if method == "head":
                request = self._head_request()
                if request in session.unavailable:
                    yield Warning(f"method head is left out: {session.unavailable[request]}")
                    continue
                images, clusters = self._head(banks[request])
                asked = (session.checkpoint.get("projection_head") or {}).get("K")
            else:
                assert features is not None
                asked = self.config.clusters or len(features.classes)
                clusters = self._cluster(features, asked, method, session)
            assert images is not None
            values |= {"label": images.labels, f"cluster@method={method}": clusters}
            used = len(np.unique(clusters))
            for message in _doubts(method, asked, used):
                yield Warning(message)
            params = {"method": method} | ({} if asked is None else {"clusters": asked}) | {"used": used}
            for name, measure in MEASURES.items():
                value = measure(images.labels, clusters)
                yield Metric(name, value, params=params | self._variant(method), n=len(clusters))
        assert images is not None
        if len(images.classes) == 1:
            yield Warning("all images are of one class, so that agreement with the classes says nothing")
        yield Predictions(images.image_ids, values)

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """Published are clusters of the test split by a projection head of 1000 outputs."""
        params = metric["params"]
        published = params["method"] == "head" and params.get("clusters") == PUBLISHED_OUTPUTS
        return PublishedKey(name, metric["name"], data) if published and self.config.split == "test" else None

    @classmethod
    def headline(cls, metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """NMI of the first of head, kmeans and spherical that is there: a fixed order, whichever is best."""
        named = [m for m in metrics if m["name"] == cls.primary]
        return min(named, key=lambda m: METHODS.index(m["params"]["method"]), default=None)

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``agreement``: a bar for every measure, record and method; published numbers as dashes across the bars."""
        from matplotlib import colormaps

        from ibot_eval.figures import new_figure

        present = [
            (record, method)
            for record in records
            for method in METHODS
            if any(m["params"]["method"] == method for m in record.metrics)
        ]
        # The legend lies below the axes, a line for every record and method: inside, long names would hide bars.
        figure = new_figure(6.5, 4 + 0.2 * len(present))
        axes = figure.subplots()
        axes.axhline(0, color="black", linewidth=0.8)
        width = 0.8 / max(1, len(present))
        published_label = "published"
        for index, (record, method) in enumerate(present):
            found = {m["name"]: m for m in record.metrics if m["params"]["method"] == method}
            names = [name for name in MEASURES if name in found and found[name]["value"] is not None]
            at = [list(MEASURES).index(name) + (index - (len(present) - 1) / 2) * width for name in names]
            colour = f"C{index}" if len(present) <= 10 else colormaps["turbo"]((index + 0.5) / len(present))
            label = method if len(records) == 1 else f"{record.run}, {method}"
            axes.bar(at, [found[name]["value"] for name in names], width, color=colour, label=label)
            for x, name in zip(at, names, strict=True):
                if found[name].get("published"):
                    value, ends = found[name]["published"]["value"], (x - width / 2, x + width / 2)
                    axes.plot(ends, (value, value), "--", color="black", linewidth=1.5, label=published_label)
                    published_label = None
        axes.set_xticks(range(len(MEASURES)), [name.upper() for name in MEASURES])
        title = f"clustering, {records[0].run}" if len(records) == 1 else "clustering"
        axes.set(ylabel="agreement with the classes (%)", title=title)
        figure.legend(loc="outside lower center", fontsize="small")
        return {"agreement": figure}

    def _k_means(self) -> bool:
        return any(method != "head" for method in self.config.methods)

    def _head_request(self) -> FeatureRequest:
        return FeatureRequest(self.config.split, reducer="head_argmax", optional=self._k_means())

    def _feature_requests(self) -> list[FeatureRequest]:
        return feature_requests(self.config.split, self.config.features, self.config.blocks)

    def _variant(self, method: Method) -> dict[str, Any]:
        """Settings other than the usual ones, for the metrics' params: they tell rows of a report apart."""
        own = self.config
        variant: dict[str, Any] = {} if own.split == "test" else {"split": own.split}
        if method == "head":
            return variant
        if own.features != "cls":
            variant["features"] = own.features
        if own.blocks not in (None, default_blocks(own.features)):
            variant["blocks"] = own.blocks
        return variant

    def _check_clusters(self, images: int) -> None:
        clusters = self.config.clusters
        if self._k_means() and clusters is not None and images and clusters > images:
            raise ConfigError(
                f"{clusters} clusters of {images} images of the {self.config.split} split",
                where="--clusters",
                todo=f"choose 1 to {images}",
            )

    def _features(self, banks: Mapping[FeatureRequest, FeatureBank]) -> Labelled:
        images = labelled(banks, self._feature_requests(), self.config.split, "clustering")
        # Images that could not be read are gone by now.
        self._check_clusters(len(images))
        return images

    def _head(self, bank: FeatureBank) -> tuple[Labelled, np.ndarray]:
        column = replace(bank, features=np.asarray(bank.features)[:, None])
        images = labelled({self._head_request(): column}, [self._head_request()], self.config.split, "clustering")
        return images, images.features[:, 0]

    def _cluster(self, features: Labelled, clusters: int, method: Method, session: Session) -> np.ndarray:
        return kmeans(
            features.features,
            clusters,
            restarts=self.config.restarts,
            iterations=self.config.iterations,
            spherical=method == "spherical",
            seed=session.seed,
            backend=self.config.backend,
            progress=session.progress and distributed.is_main(),
        ).assignment


def _doubts(method: Method, clusters: int | None, used: int) -> Iterator[str]:
    """What the reader should know about clusters found by ``method``, ``used`` of which hold an image."""
    if method == "head":
        if used == 1 and clusters != 1:
            yield "all images have the largest output of the projection head in common: it has collapsed"
    elif clusters is not None and used < clusters:
        yield f"{clusters - used} of {clusters} clusters of {method} stayed empty"
