"""Low-shot classification of frozen features: a few labels per class, scored by linear, logistic and k-NN classifiers.

The training split is cut to a share of each class, to a number of images per class, or to the images of a list file
(SimCLR's 1 % and 10 % of ImageNet, which published numbers need); then the protocols linear, logreg and knn do what
they do on any other training split. Only, since few images choose badly, the learning rate and lambda are chosen on
half of the labelled images (--hold-out), and the epoch is always the last. Each of several draws cuts another subset;
their mean is reported with its interval.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.backbone import Backbone
from ibot_eval.data.subsets import KNOWN_LISTS, LabelSubset, listed
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.metrics.intervals import wilson
from ibot_eval.probes.labelled import labelled
from ibot_eval.probes.published_features import Features, resolve_features
from ibot_eval.protocol import Event, FrozenProtocol, Metric, Predictions, PublishedKey, Session, Warning
from protocols.knn import KNN, KNNConfig
from protocols.linear import Linear, LinearConfig
from protocols.logreg import LogReg, LogRegConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.record import EvalRecord

Scorer = Literal["linear", "logreg", "knn"]


@dataclass(frozen=True)
class LowShotConfig:
    """Settings of the low-shot protocol."""

    labels: tuple[str, ...] = ("1%", "10%")
    """Labelled subsets: a share of each class (1%), images per class (5), or a file that lists images, one a line."""
    draws: int = 5
    """Subsets drawn at random for each share or number; a list is one subset."""
    scorers: tuple[Scorer, ...] = ("linear", "logreg", "knn")
    """Classifiers; settings that are not here are the defaults of their own protocols."""
    linear_features: Features = "published"
    """Features of the linear probe, as --features of `linear`; logreg and knn take [CLS] of the last block."""
    linear_blocks: tuple[int, ...] | None = None
    """Blocks of these features; negative ones count from the last. Default: the last four for last4, else the last."""
    hold_out: float = 0.5
    """Share of the labelled images on which the learning rate of linear and lambda of logreg are chosen; with those,
    all labelled images are learnt from."""
    k: int = 20
    """Neighbours that vote in k-NN; all labelled images where there are fewer."""


def linear_config(config: LowShotConfig) -> LinearConfig:
    """Settings of the linear probe: its own defaults, but only the last epoch counts.

    The few images that are held out choose badly among many candidates, such as all epochs of all learning rates.
    """
    epochs = LinearConfig().epochs
    return LinearConfig(
        features=config.linear_features,
        blocks=config.linear_blocks,
        epochs=epochs,
        eval_every=epochs,
        hold_out=config.hold_out,
    )


class LowShot(FrozenProtocol[LowShotConfig]):
    """Linear, logistic and k-NN classifiers of few labels."""

    config_type = LowShotConfig
    version: ClassVar[int] = 1
    primary: ClassVar[str] = "top1"

    def __init__(self, config: LowShotConfig) -> None:
        super().__init__(config)
        if config.draws < 1:
            raise ConfigError(f"there must be at least one draw, not {config.draws}", where="--draws")
        self.subsets = [LabelSubset.parse(text) for text in config.labels]
        for flag, values in (("labels", [s.name for s in self.subsets]), ("scorers", config.scorers)):
            if not values or len(set(values)) < len(values):
                given = ", ".join(values) or "none"
                raise ConfigError(f"{flag} must be different, and at least one; given: {given}", where=f"--{flag}")
        with _linear_flags():
            linear = Linear(linear_config(config))
        possible: dict[Scorer, FrozenProtocol[Any]] = {
            "linear": linear,
            "logreg": LogReg(LogRegConfig(hold_out=config.hold_out)),
            "knn": KNN(KNNConfig(k=(config.k,))),
        }
        self.scorers = {name: possible[name] for name in config.scorers}
        self.usual_features = config.linear_features == "published" and config.linear_blocks is None

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        with _linear_flags():
            features, blocks = resolve_features(self.config.linear_features, self.config.linear_blocks, backbone)
        # Counted from the last, as the other scorers count: one block must not be asked for under two names.
        blocks = tuple(backbone.resolve_block(block) - backbone.depth for block in blocks)
        resolved = type(self)(replace(self.config, linear_features=features, linear_blocks=blocks))
        resolved.usual_features = (features, blocks) == resolve_features("published", None, backbone)
        return resolved

    def features(self) -> Sequence[FeatureRequest]:
        return list(dict.fromkeys(request for scorer in self.scorers.values() for request in scorer.features()))

    def check(self, sizes: Mapping[str, int], session: Session) -> None:
        """Raises DataError for a list that does not fit the training images."""
        for subset in self.subsets:
            if subset.path is not None and session.data is not None:
                listed(subset.path, session.data.splits["train"].image_ids)

    def published_key(self, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        """Published are a linear and a logistic classifier of SimCLR's lists."""
        labels, scorer = metric["params"]["labels"], metric["params"]["scorer"]
        if labels not in KNOWN_LISTS or scorer == "knn" or (scorer == "linear" and not self.usual_features):
            return None
        own = name if scorer == "linear" else scorer
        return PublishedKey(own, "top1", f"{data} {labels.removeprefix('SimCLR ')}", exact=True)

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        """Yields top1 for all labels and scorers: the mean of the draws with its t interval, or Wilson's of one.

        What differs from draw to draw is the subset; the seed of the classifiers stays the same, so that each result
        is what the scorer's own protocol gives with this training split.

        Raises:
            DataError: a list that does not fit the training images, or what the scorers raise.
        """
        train, test = (
            labelled(banks, [next(r for r in banks if r.split == split)], split, "low-shot classification")
            for split in ("train", "test")
        )
        values: dict[str, np.ndarray] = {"label": test.labels}
        data_name = session.data and session.data.data_name
        show = session.progress and distributed.is_main()
        planned = sum(1 if s.path is not None else self.config.draws for s in self.subsets) * len(self.scorers)
        with (
            tqdm(total=planned, desc="low-shot", unit="fits", disable=not show, leave=False) as bar,
            tempfile.TemporaryDirectory() as folder,
        ):
            # The scorers' own files (heads, logs) are of no use once the next draw has overwritten them.
            inner = replace(session, output=Path(folder), asked=frozenset())
            for subset in self.subsets:
                for warning in subset.remarks(train.labels, session.class_names, data_name):
                    yield Warning(warning)
                found: dict[str, list[_Outcome]] = {name: [] for name in self.scorers}
                n_train = 0
                for draw in range(1 if subset.path is not None else self.config.draws):
                    rows = subset.rows(train.labels, train.image_ids, session.seed, draw)
                    n_train = len(rows)
                    cut = {r: _cut(bank, rows) if r.split == "train" else bank for r, bank in banks.items()}
                    for name, scorer in self.scorers.items():
                        found[name].append(_outcome(scorer, {r: cut[r] for r in scorer.features()}, inner))
                        bar.update()
                    if n_train == len(train):
                        # All draws of all images are the same one.
                        break
                yield from (Warning(f"labels {subset.name}, {text}") for text in _warnings(found))
                for name, outcomes in found.items():
                    params = {"labels": subset.name, "scorer": name, "draws": len(outcomes), "n_train": n_train}
                    value, interval = _summary(outcomes, values["label"])
                    yield Metric("top1", value, params=params, n=len(test), interval=interval)
                    for draw, outcome in enumerate(outcomes):
                        which = f",draw={draw}" if len(outcomes) > 1 else ""
                        values[f"top1@labels={subset.name},scorer={name}{which}"] = outcome.predicted
        yield Predictions(test.image_ids, values)

    @classmethod
    def figures(cls, *records: EvalRecord) -> Mapping[str, Figure]:
        """``accuracy_by_labels``: top-1 with its interval against labelled images per class, a line per scorer."""
        from ibot_eval.figures import new_figure

        lines = [(r, s) for r in records for s in dict.fromkeys(m["params"]["scorer"] for m in r.metrics)]
        figure = new_figure(6.5, 4 + 0.2 * len(lines))
        axes = figure.subplots()
        for index, (record, scorer) in enumerate(lines):
            metrics = [m for m in record.metrics if m["params"]["scorer"] == scorer]
            metrics.sort(key=lambda m: m["params"]["n_train"])
            x = [m["params"]["n_train"] / record.data["classes"] for m in metrics]
            intervals = [m.get("interval") or (m["value"], m["value"]) for m in metrics]
            low, high = [low for low, _ in intervals], [high for _, high in intervals]
            colour = f"C{index % 10}"
            label = scorer if len(records) == 1 else f"{scorer}, {record.run}"
            axes.plot(x, [m["value"] for m in metrics], marker="o", markersize=4, color=colour, label=label)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            published = [(at, m["published"]["value"]) for at, m in zip(x, metrics, strict=True) if m.get("published")]
            for at, value in published:
                axes.plot(at, value, "x", color=colour, label=f"{label}, published {value:g}")
        axes.set_xscale("log")
        ticks = sorted({m["params"]["n_train"] / record.data["classes"] for record in records for m in record.metrics})
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axes.minorticks_off()
        title = f"low-shot, {records[0].run}" if len(records) == 1 else "low-shot"
        axes.set(xlabel="labelled images per class", ylabel="top-1 (%), shaded: 95 % interval", title=title)
        figure.legend(loc="outside lower center", fontsize="small")
        return {"accuracy_by_labels": figure}


@dataclass(frozen=True)
class _Outcome:
    """What a scorer's own protocol says of one subset."""

    top1: float
    predicted: np.ndarray
    warnings: Sequence[str]


@contextmanager
def _linear_flags() -> Iterator[None]:
    """Faults of the linear probe's settings, under the names that they have here."""
    try:
        yield
    except ConfigError as error:
        # --hold-out is called the same in both.
        what, where = (
            text and text.replace("--", "--linear-").replace("--linear-hold-out", "--hold-out")
            for text in (error.what, error.where)
        )
        raise ConfigError(what or "", where=where, todo=error.todo) from None


def _cut(bank: FeatureBank, rows: np.ndarray) -> FeatureBank:
    return FeatureBank(bank.features[rows], np.asarray(bank.labels)[rows], [bank.image_ids[int(i)] for i in rows])


def _outcome(protocol: FrozenProtocol[Any], banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> _Outcome:
    events = list(protocol.score(banks, session))
    headline = protocol.headline([asdict(event) for event in events if isinstance(event, Metric)])
    (predictions,) = [event for event in events if isinstance(event, Predictions)]
    assert headline is not None
    column = f"top1@k={headline['params']['k']}" if "k" in headline["params"] else "top1"
    warnings = [event.message for event in events if isinstance(event, Warning)]
    return _Outcome(headline["value"], predictions.values[column], warnings)


def _summary(outcomes: Sequence[_Outcome], labels: np.ndarray) -> tuple[float, tuple[float, float] | None]:
    """Mean top-1 of the draws and its 95 % interval: Student's t over the draws, within 0 and 100; Wilson's for one."""
    if len(outcomes) == 1:
        return outcomes[0].top1, wilson(int((outcomes[0].predicted == labels).sum()), len(labels))
    from scipy.stats import t

    found = np.array([outcome.top1 for outcome in outcomes])
    mean = float(found.mean())
    half = float(t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found)))
    return mean, (max(0.0, mean - half), min(100.0, mean + half))


def _warnings(found: Mapping[str, Sequence[_Outcome]]) -> Iterator[str]:
    """The scorers' warnings, each once, with whose they are and in how many of the draws."""
    draws: dict[str, list[tuple[str, int]]] = {}
    for name, outcomes in found.items():
        for draw, outcome in enumerate(outcomes):
            for message in dict.fromkeys(outcome.warnings):
                draws.setdefault(message, []).append((name, draw))
    total = max(len(outcomes) for outcomes in found.values())
    for message, where in draws.items():
        scorers, times = dict.fromkeys(name for name, _ in where), len({draw for _, draw in where})
        often = "" if times == total else f" ({times} of {total} draws)"
        yield f"{', '.join(scorers)}{often}: {message}"
