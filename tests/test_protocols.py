"""Every registered protocol keeps the contract, and the conformance test notices one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from typing import Any

import numpy as np
import pytest

from ibot_eval import registry, testing
from ibot_eval.features import FeatureRequest
from ibot_eval.protocol import Event, FrozenProtocol, Metric, Predictions


@pytest.mark.parametrize("name", registry.entries("protocols"))
def test_registered_protocols_conform(name: str) -> None:
    events = testing.check_protocol(name)
    kind = registry.load_protocol(name)
    if issubclass(kind, FrozenProtocol):
        assert any(isinstance(event, Metric) and event.name == kind.primary for event in events)
        assert any(isinstance(event, Predictions) for event in events), "paired comparisons need predictions"


@dataclass(frozen=True)
class Settings:
    """Settings."""

    level: int = 1
    """A level."""


def protocol(*events: Event, config_type: type = Settings, version: Any = 1, primary: str = "top1") -> type:
    """A protocol that yields ``events``."""

    def features(self: Any) -> list[FeatureRequest]:
        return [FeatureRequest("test")]

    def score(self: Any, banks: Any, session: Any) -> Iterator[Event]:
        yield from events

    members = {"config_type": config_type, "version": version, "primary": primary, "features": features, "score": score}
    return type("Example", (FrozenProtocol,), members)


GOOD = Metric("top1", 50.0, n=4, interval=(20.0, 80.0))


def check(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    monkeypatch.setattr(testing.registry, "load_protocol", lambda name: kind)
    testing.check_protocol("example")


def test_a_good_protocol_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, protocol(GOOD, Predictions(["a", "b"], {"label": np.arange(2)})))


@dataclass
class NotFrozen:
    """Settings."""

    level: int = 1
    """A level."""


@dataclass(frozen=True)
class Undocumented:
    """Settings."""

    level: int = 1


@dataclass(frozen=True)
class Shadowing:
    """Settings."""

    seed: int = 1
    """Also a shared flag."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (protocol(), "primary metric 'top1' is missing"),
        (protocol(Metric("top1", 0.5, unit="fraction")), "unknown unit"),  # type: ignore[arg-type]
        (protocol(Metric("top1", 150.0)), "outside"),
        (protocol(Metric("top1", float("nan"))), "is nan"),
        (protocol(Metric("accuracy", 50.0)), "not in record.schema.json"),
        (protocol(Metric("top1", 50.0, interval=(60.0, 70.0))), "does not hold"),
        (protocol(GOOD, GOOD), "same name and params"),
        (protocol(GOOD, Predictions(["a", "a"], {})), "ids repeat"),
        (protocol(GOOD, Predictions(["a", "b"], {"x": np.arange(3)})), "one per image"),
        (protocol(GOOD, "text"), "yields a str"),  # type: ignore[arg-type]
        (protocol(GOOD, version=0), "at least 1"),
        (protocol(GOOD, version="1"), "integer"),
        (protocol(GOOD, config_type=NotFrozen), "must be frozen"),
        (protocol(GOOD, config_type=Undocumented), r"without a docstring: \['level'\]"),
        (protocol(GOOD, config_type=Shadowing), r"shadows shared flags: \['seed'\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_protocol_that_breaks_the_contract_is_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: type, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        check(monkeypatch, kind)


def test_numbers_that_change_from_run_to_run_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([10.0, 20.0])
    kind = protocol()
    kind.score = lambda self, banks, session: iter([Metric("top1", next(values))])  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="different numbers"):
        check(monkeypatch, kind)


def test_a_settings_class_without_defaults_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = protocol(GOOD, config_type=make_dataclass("NoDefault", [("level", int)], frozen=True))
    with pytest.raises(TypeError):
        check(monkeypatch, kind)
