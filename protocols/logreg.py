"""Logistic regression on frozen features: multinomial, l2 penalty, no intercept.

Features are divided by their l2 norm; the weights W minimise (1/n) sum log-loss + lambda/2 |W|^2 over the n images of
the train split (the published objective; ibot_eval.probes.logistic has the mapping to scikit-learn's C). Of several
lambda the one is reported that is best on a held-out part of train, fitted again to all of train; top1_best_on_test is
the accuracy of the one that is best on the test split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.metrics.intervals import wilson
from ibot_eval.probes.holdout import hold_out
from ibot_eval.probes.labelled import Labelled, labelled, unknown_classes
from ibot_eval.probes.linear_probe import classify
from ibot_eval.probes.logistic import Backend, LogisticFit, fit_logistic, log_loss, normalise
from ibot_eval.probes.outcome import save_head
from ibot_eval.probes.published_features import Features, check_blocks, feature_requests, resolve_features
from ibot_eval.protocol import Event, FrozenProtocol, Metric, Predictions, Session, Warning

if TYPE_CHECKING:
    from ibot_eval.backbone import Backbone
    from ibot_eval.data.transforms import EvalTransform

Part = Literal["held-out", "full"]


@dataclass(frozen=True)
class LogRegConfig:
    """Settings of the logistic regression protocol."""

    lambdas: tuple[float, ...] = (0.01, 0.1, 1.0)
    """Weights of the penalty to choose from, as multiples of 1/n: 0.1 stands for lambda = 0.1/n with n images."""
    features: Features = "cls"
    """What to classify: [CLS] or mean patch tokens of a block, both, or what the network's family publishes."""
    blocks: tuple[int, ...] | None = None
    """Blocks whose features are concatenated; negative ones count from the last. Default: as --features says."""
    hold_out: float = 0.1
    """Share of every class of the train split that lambda is chosen on."""
    tolerance: float = 1e-4
    """A fit ends when the largest entry of the gradient is this share of that at the start."""
    max_iterations: int = 1000
    """Steps of L-BFGS after which a fit is given up, with a warning."""
    backend: Backend = "auto"
    """Who fits; auto: torch on a GPU and for very large problems, scikit-learn otherwise."""
    save_head: bool = False
    """Save the classifier as head.safetensors, for robustness and fine-tuning."""


@dataclass(frozen=True)
class _Scored:
    """A fit and what it says about the images that it is scored on."""

    multiple: float
    """lambda, times n."""
    part: Part
    """held-out: without the held-out images, scored on them; full: all of train, scored on test."""
    fit: LogisticFit
    correct: int
    log_loss: float
    """Of held-out images; 0 on test, where some may be of unknown classes."""
    predicted: np.ndarray
    in_top5: np.ndarray


class LogReg(FrozenProtocol[LogRegConfig]):
    """Multinomial logistic regression."""

    config_type = LogRegConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"

    def __init__(self, config: LogRegConfig) -> None:
        super().__init__(config)
        lambdas = config.lambdas
        if not lambdas or len(set(lambdas)) < len(lambdas) or not all(0 < x < math.inf for x in lambdas):
            given = ", ".join(f"{x:g}" for x in lambdas) or "none"
            raise ConfigError(f"lambdas must be different positive numbers; given: {given}", where="--lambdas")
        for name, value, fine in (
            ("hold-out", config.hold_out, 0 <= config.hold_out < 1),
            ("tolerance", config.tolerance, 0 < config.tolerance < 1),
            ("max-iterations", config.max_iterations, config.max_iterations >= 1),
        ):
            if not fine:
                raise ConfigError(f"{name.replace('-', ' ')} cannot be {value}", where=f"--{name}")
        check_blocks(config.blocks)

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        """With the features spelled out."""
        features, blocks = resolve_features(self.config.features, self.config.blocks, backbone)
        return type(self)(replace(self.config, features=features, blocks=blocks))

    def features(self) -> Sequence[FeatureRequest]:
        return [*self._requests("train"), *self._requests("test")]

    def as_published(self) -> bool:
        """[CLS] of the last block, and the three published lambda."""
        same = set(self.config.lambdas) == set(LogRegConfig().lambdas)
        return same and self._requests("test") == [FeatureRequest("test")]

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        """Yields top1, top5, top1_best_on_test, warnings, per-image predictions and, if asked, the head.

        Raises:
            DataError: an unlabelled or missing image, or features that are not finite.
        """
        train, test = (
            labelled(banks, self._requests(split), split, "logistic regression") for split in ("train", "test")
        )
        unknown = unknown_classes(test.labels, train.classes, session.class_names, "the train split")
        if unknown:
            yield Warning(unknown)
        if len(train.classes) == 1:
            yield Warning("the train split has one class: every test image of that class counts as right")
        held = hold_out(train.labels, self.config.hold_out, session.seed)
        if len(self.config.lambdas) > 1 and not held.any():
            yield Warning(self._unchosen())

        fits = self._fits(train, test, held, session)
        for scored in fits:
            if not scored.fit.converged:
                yield Warning(self._unconverged(scored))
        full = {f.multiple: f for f in fits if f.part == "full"}
        candidates = [f for f in fits if f.part == "held-out"]
        if candidates:
            # Of equally good ones the stronger penalty.
            selected = min(candidates, key=lambda f: (-f.correct, f.log_loss, -f.multiple))
            selection, multiple = "held-out", selected.multiple
        else:
            selection, multiple = ("given" if len(full) == 1 else "middle lambda"), self._middle()
        chosen, best = full[multiple], min(full.values(), key=lambda f: (-f.correct, -f.multiple))
        n, params = len(test), {"selection": selection, "lambda": f"{multiple:g}/n"}
        for name, correct in (("top1", chosen.correct), ("top5", int(chosen.in_top5.sum()))):
            yield Metric(name, 100 * correct / n, params=params, n=n, interval=wilson(correct, n))
        # No interval: Wilson's would leave out that the best of several was taken.
        yield Metric("top1_best_on_test", 100 * best.correct / n, params={"lambda": f"{best.multiple:g}/n"}, n=n)
        yield Predictions(test.image_ids, {"label": test.labels, "top1": chosen.predicted})
        if self.config.save_head:
            weight = torch.from_numpy(chosen.fit.weight)
            yield save_head(
                weight,
                weight.new_zeros(len(weight)),
                train.classes,
                self._requests("train"),
                session,
                protocol="logreg",
                normalised=True,
            )

    def _requests(self, split: Literal["train", "test"]) -> list[FeatureRequest]:
        return feature_requests(split, self.config.features, self.config.blocks)

    def _middle(self) -> float:
        return sorted(self.config.lambdas)[len(self.config.lambdas) // 2]

    def _fits(self, train: Labelled, test: Labelled, held: np.ndarray, session: Session) -> list[_Scored]:
        """Every lambda on every part, shared out among the ranks; the same list on all of them."""
        train, test = (replace(split, features=normalise(split.features)) for split in (train, test))
        parts: dict[Part, tuple[Labelled, Labelled]] = {"full": (train, test)}
        if len(self.config.lambdas) > 1 and held.any():
            parts["held-out"] = (train.take(np.flatnonzero(~held)), train.take(np.flatnonzero(held)))
        tasks: list[tuple[Part, float]] = [(part, multiple) for part in parts for multiple in self.config.lambdas]
        own = range(distributed.rank(), len(tasks), distributed.world_size())
        show = session.progress and distributed.is_main()

        def work() -> dict[int, _Scored]:
            bar = tqdm(own, desc="logistic regression", unit="fits", disable=not show, leave=False)
            return {i: self._fit(*tasks[i], *parts[tasks[i][0]], session.device) for i in bar}

        shares = distributed.gather_objects(distributed.everywhere(work))
        found = {index: scored for share in shares for index, scored in share.items()}
        return [found[index] for index in range(len(tasks))]

    def _fit(self, part: Part, multiple: float, train: Labelled, test: Labelled, device: torch.device) -> _Scored:
        classes = train.classes
        fit = fit_logistic(
            train.features,
            train.targets(classes),
            len(classes),
            multiple / len(train),
            device=device,
            tolerance=self.config.tolerance,
            max_iterations=self.config.max_iterations,
            backend=self.config.backend,
        )
        weight = torch.from_numpy(fit.weight)
        predicted, in_top5 = classify(weight, weight.new_zeros(len(weight)), test, classes, device)
        return _Scored(
            multiple=multiple,
            part=part,
            fit=fit,
            correct=int((predicted == test.labels).sum()),
            log_loss=log_loss(fit.weight, test.features, test.targets(classes)) if part == "held-out" else 0.0,
            predicted=predicted,
            in_top5=in_top5,
        )

    def _unchosen(self) -> str:
        reason = "no class of train has an image to hold out" if self.config.hold_out else "nothing is held out"
        return f"{reason}, so no lambda can be chosen: reported is the middle one, {self._middle():g}/n"

    def _unconverged(self, scored: _Scored) -> str:
        images = "train" if scored.part == "full" else "train without the held-out images"
        limit = self.config.max_iterations
        # Short of the limit, roundings leave no step that would lower the objective.
        todo = (
            f"raise --max-iterations (now {limit})"
            if scored.fit.iterations >= limit
            else "nothing nearer can be computed, so choose a larger --tolerance"
        )
        return (
            f"the fit to {images} with lambda = {scored.multiple:g}/n has not converged after "
            f"{scored.fit.iterations} iterations: the gradient came down to {scored.fit.gradient_norm:.1e} of that at "
            f"the start, not to {self.config.tolerance:g}; {todo}"
        )
