"""Conformance test for protocols; packages with protocols of their own can run it too.

>>> from ibot_eval.testing import check_protocol
>>> def test_conforms(): check_protocol("my-protocol")
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import math
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from ibot_eval import registry
from ibot_eval.features import FeatureBank, FeatureRequest, parse_reducer
from ibot_eval.protocol import (
    Artifact,
    EvalProtocol,
    Event,
    FrozenProtocol,
    Metric,
    Predictions,
    Session,
    Unit,
    Warning,
)
from ibot_eval.record import SCHEMA_FILE
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings

CLASSES, TRAIN, TEST, WIDTH = 5, 60, 25, 12


def check_protocol(name: str, config: Any = None) -> list[Event]:
    """Asserts that the protocol registered as ``name`` keeps the contract, and returns the events of one run.

    Checked for all protocols: the registration, the settings (frozen dataclass; every field has a default and a
    docstring, and none shadows a shared flag), version, primary metric. For a FrozenProtocol also a run on synthetic
    banks: events of the right kinds, metric names and units of the schema, percentages in [0, 100], the primary
    metric among them, intervals that hold the value, predictions as long as their ids, and the same numbers twice.

    Args:
        name: registered name.
        config: settings to run with; the default ones if None.

    Raises:
        AssertionError: with what is not as it should be.
    """
    kind = registry.load_protocol(name)
    check_settings(kind)
    assert isinstance(kind.version, int), f"{name}: version must be an integer"
    assert kind.version >= 1, f"{name}: version must be at least 1"
    assert isinstance(kind.primary, str), f"{name}: primary must name a metric"
    assert kind.primary, f"{name}: primary must name a metric"
    if not issubclass(kind, FrozenProtocol):
        return []
    protocol = kind(config if config is not None else kind.config_type())
    requests = protocol.features()
    assert requests, f"{name}: features() asks for nothing"
    assert len(set(requests)) == len(requests), f"{name}: features() asks twice for the same"
    banks = synthetic_banks(requests)
    first, second = _score(protocol, banks), _score(protocol, banks)
    check_events(name, kind, first)
    numbers = [
        [(m.name, m.value, dict(m.params)) for m in events if isinstance(m, Metric)] for events in (first, second)
    ]
    assert numbers[0] == numbers[1], f"{name}: two runs with one seed give different numbers"
    return first


def check_settings(kind: type[EvalProtocol[Any]]) -> None:
    """Asserts that the protocol's settings make good flags."""
    config_type = kind.config_type
    assert dataclasses.is_dataclass(config_type), f"{config_type.__name__} must be a dataclass"
    config_type()
    fields = {f.name for f in dataclasses.fields(config_type)}
    shared = {
        f.name
        for group in (CheckpointSettings, DataSettings, EngineSettings, OutputSettings)
        for f in dataclasses.fields(group)
    } | {"recipe"}
    assert not fields & shared, f"{config_type.__name__} shadows shared flags: {sorted(fields & shared)}"
    undocumented = fields - _documented(config_type)
    assert not undocumented, f"{config_type.__name__}: fields without a docstring: {sorted(undocumented)}"
    instance = config_type()
    for name in fields:
        try:
            setattr(instance, name, getattr(instance, name))
        except dataclasses.FrozenInstanceError:
            continue
        raise AssertionError(f"{config_type.__name__} must be frozen")


def check_events(name: str, kind: type[EvalProtocol[Any]], events: Sequence[Event]) -> None:
    """Asserts that events are what a record can hold."""
    for event in events:
        assert isinstance(event, (Metric, Predictions, Artifact, Warning)), f"{name} yields a {type(event).__name__}"
        if isinstance(event, Metric):
            _check_metric(name, event)
        elif isinstance(event, Predictions):
            assert len(set(event.image_ids)) == len(event.image_ids), f"{name}: prediction ids repeat"
            for column, values in event.values.items():
                assert len(values) == len(event.image_ids), f"{name}: predictions {column!r} are not one per image"
                assert np.asarray(values).dtype != object, f"{name}: predictions {column!r} are not plain numbers"
    metrics = [event for event in events if isinstance(event, Metric)]
    assert any(m.name == kind.primary for m in metrics), f"{name}: the primary metric {kind.primary!r} is missing"
    keys = [(m.name, json.dumps(dict(m.params), sort_keys=True)) for m in metrics]
    assert len(set(keys)) == len(keys), f"{name}: two metrics have the same name and params"


def _check_metric(name: str, metric: Metric) -> None:
    label = f"{name}: {metric.name}"
    known = known_metrics()
    assert metric.name in known, f"{label} is not in record.schema.json; known: {', '.join(sorted(known))}"
    assert metric.unit in get_args(Unit), f"{label} has the unknown unit {metric.unit!r}"
    json.dumps(dict(metric.params))
    if metric.value is None:
        return
    assert math.isfinite(metric.value), f"{label} is {metric.value}"
    if metric.unit == "%" and metric.name not in ("ari", "background_gap", "mce", "relative_mce"):
        assert 0 <= metric.value <= 100, f"{label} is {metric.value} %, outside [0, 100]"
    if metric.interval is not None:
        low, high = metric.interval
        assert low <= metric.value <= high, f"{label}: the interval {metric.interval} does not hold {metric.value}"


def known_metrics() -> set[str]:
    """Metric names of record.schema.json."""
    groups = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["$defs"]["names"]
    return {text.split()[0] for names in groups.values() for text in names}


def synthetic_banks(requests: Sequence[FeatureRequest], seed: int = 0) -> dict[FeatureRequest, FeatureBank]:
    """Banks of well-separated classes for ``requests``: 60 train and 25 test images of 5 classes, 12 wide, 4x4 patches.

    Atoms of one split share images and labels, as extraction guarantees.
    """
    banks = {}
    for request in requests:
        n = TRAIN if request.split == "train" else TEST
        labels = np.arange(n, dtype=np.int64) % CLASSES
        generator = np.random.default_rng([seed, request.split == "train", request.block % 997])
        centres = np.random.default_rng(seed).normal(size=(CLASSES, WIDTH)) * 2
        tokens = centres[labels][:, None, None] + generator.normal(size=(n, 4, 4, WIDTH))
        reducer, _ = parse_reducer(request.reducer)
        features: np.ndarray
        if reducer == "head_argmax":
            features = (labels + 2) % 7
        elif reducer == "patches":
            features = tokens.astype(np.float16)
        else:
            features = tokens.mean((1, 2)).astype(np.float32)
        ids = [f"{request.split}/{label}/{index:03d}.png" for index, label in enumerate(labels)]
        banks[request] = FeatureBank(features, labels, ids)
    return banks


def _score(protocol: FrozenProtocol[Any], banks: Mapping[FeatureRequest, FeatureBank]) -> list[Event]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            device=torch.device("cpu"),
            output=Path(folder),
            class_names=tuple(f"class {index}" for index in range(CLASSES)),
            progress=False,
        )
        return list(protocol.score(banks, session))


def _documented(config_type: type) -> set[str]:
    """Names of the fields that a docstring follows in the source, those of base classes included."""
    return {name for kind in config_type.__mro__ if dataclasses.is_dataclass(kind) for name in _documented_in(kind)}


def _documented_in(config_type: type) -> Iterator[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_type)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
            and following.value.value.strip()
        ):
            yield statement.target.id
