"""What the runner promises protocols: settings that depend on the network, features that may be missing, resuming, the
published number they name; and what it promises a caller who has the network and the images already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from ibot_eval import published, runner
from ibot_eval.backbone import Backbone
from ibot_eval.cache import BankCache
from ibot_eval.data.opening import open_data
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.own_network import from_module
from ibot_eval.protocol import Event, FrozenProtocol, Metric, PublishedKey, Session
from ibot_eval.record import EvalRecord, find_records
from ibot_eval.run_folder import set_aside
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings
from tests.fakes import DEPTH, FakeBackbone

HEAD = FeatureRequest("test", reducer="head_argmax", optional=True)


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of a protocol for these tests."""

    blocks: tuple[int, ...] | None = None
    """Blocks; by default what suits the network."""


class Probe(FrozenProtocol[ProbeSettings]):
    """Says what it was given."""

    config_type, version, primary = ProbeSettings, 1, "top1"
    requests: Sequence[FeatureRequest] = ()
    seen: Mapping[FeatureRequest, FeatureBank] = {}
    unavailable: Mapping[FeatureRequest, str] = {}
    asked_of_network: frozenset[str] = frozenset()

    def for_network(self, backbone: Backbone, transform: EvalTransform, asked: frozenset[str]) -> Self:
        Probe.asked_of_network = asked
        if self.config.blocks is None:
            return type(self)(ProbeSettings(tuple(range(backbone.depth))))
        if "blocks" in asked and max(self.config.blocks) >= backbone.depth:
            raise ConfigError("no such block")
        return self

    def features(self) -> Sequence[FeatureRequest]:
        assert self.config.blocks is not None, "for_network comes first"
        return [*(FeatureRequest("test", block) for block in self.config.blocks), *self.requests]

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        Probe.seen, Probe.unavailable = dict(banks), dict(session.unavailable)
        assert session.transform is not None
        assert session.engine is not None
        assert session.data_settings is not None
        assert session.checkpoint["architecture"] == "fake"
        for block in self.config.blocks or ():
            yield Metric("top1", 50.0, params={"block": block})


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    return RunSettings(
        checkpoint=CheckpointSettings(ckpt="fake"),
        data=DataSettings(data="demo", resize=8, crop=8),
        engine=EngineSettings(device="cpu", workers=0, batch_size=512),
        output=OutputSettings(output=tmp_path / "runs", name="x"),
    )


def run(protocol: Any, settings: RunSettings, backbone: FakeBackbone | None = None, **more: Any) -> EvalRecord:
    return runner.run("probe", protocol, settings, loaded=from_module(backbone or FakeBackbone()), **more)


def test_the_network_fills_in_settings_before_anything_else(settings: RunSettings) -> None:
    record = run(Probe(ProbeSettings()), settings, asked=("seed",))
    assert record.config["blocks"] == tuple(range(DEPTH)), "the record tells what was run"
    assert {request.block for request in Probe.seen} == set(range(DEPTH))
    assert Probe.asked_of_network == {"seed"}


def test_settings_that_the_network_cannot_serve_leave_a_record(settings: RunSettings) -> None:
    with pytest.raises(ConfigError, match="no such block"):
        run(Probe(ProbeSettings((7,))), settings, asked=("blocks",))
    record = EvalRecord.load(settings.output.output / "x")
    assert record.status == "error"
    assert record.config["blocks"] == [7]


def test_what_a_network_has_not_is_missing_only_where_it_is_optional(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "requests", (HEAD,))
    run(Probe(ProbeSettings((0,))), settings)
    assert HEAD not in Probe.seen
    assert "projection head" in Probe.unavailable[HEAD]
    assert list(Probe.unavailable) == [HEAD]
    monkeypatch.setattr(Probe, "requests", (replace(HEAD, optional=False),))
    with pytest.raises(ConfigError, match="projection head"):
        run(Probe(ProbeSettings((0,))), replace(settings, output=replace(settings.output, name="y")))


def test_one_block_by_two_names_is_refused_within_a_protocol_only(settings: RunSettings) -> None:
    with pytest.raises(ConfigError, match="names a block twice"):
        run(Probe(ProbeSettings((-1, DEPTH - 1))), settings)
    loaded, data = from_module(FakeBackbone()), open_data(settings.data, ("test",))
    transform = EvalTransform(8, 8, "bicubic", (0.5,) * 3, (0.5,) * 3)
    requests = [FeatureRequest("test", block) for block in (-1, DEPTH - 1)]
    banks, stats = runner.extract_union(
        requests, loaded, data.splits, transform, BankCache(), settings, torch.device("cpu")
    )
    assert stats.images == len(data.splits["test"])
    assert banks.keys() == set(requests)


def test_the_published_number_is_the_one_that_the_protocol_names(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"protocol": "other", "metric": "acc", "data": "Sets 1%", "method": "M", "arch": "fake"}
    monkeypatch.setattr(published, "entries", lambda: ({**entry, "value": 61.9, "source": "a paper"},))

    def key(self: Probe, name: str, metric: Mapping[str, Any], data: str) -> PublishedKey | None:
        assert name == "probe"
        return PublishedKey("other", "acc", f"{data} 1%", " (of another kind)") if metric["params"]["block"] else None

    named = replace(settings, output=replace(settings.output, data_name="Sets", method="M"))
    assert [m["published"] for m in run(Probe(ProbeSettings((1, 0))), named).metrics] == [None, None]
    monkeypatch.setattr(Probe, "published_key", key)
    for name, blocks, expected in (("y", (1, 0), [61.9, None]), ("z", (0, 1), [None, None])):
        record = run(Probe(ProbeSettings(blocks)), replace(named, output=replace(named.output, name=name)))
        numbers = [m["published"] for m in record.metrics]
        assert [n and n["value"] for n in numbers] == expected, "it belongs to the headline number"
        if name == "y":
            assert numbers[0]["source"] == "a paper (of another kind)"
    unnamed = run(Probe(ProbeSettings((1,))), replace(settings, output=replace(settings.output, name="w")))
    assert unnamed.metrics[0]["published"] is None, "data without a name has no published numbers"


class Halting(Probe):
    """Stops at its first attempt."""

    resumable = True

    def score(self, banks: Mapping[FeatureRequest, FeatureBank], session: Session) -> Iterator[Event]:
        state = session.output / "state"
        if not state.exists():
            state.write_text("half")
            raise DataError("stopped")
        yield Metric("top1", 1.0)


def test_an_unfinished_run_is_gone_on_with_where_the_protocol_can(settings: RunSettings) -> None:
    folder = settings.output.output / "x"
    with pytest.raises(DataError, match="stopped"):
        run(Halting(ProbeSettings((0,))), settings)
    with pytest.raises(ConfigError, match="exists already"):
        runner.run("other", Halting(ProbeSettings((0,))), settings)
    with pytest.raises(ConfigError, match="exists already"):
        run(Probe(ProbeSettings((0,))), settings)
    assert run(Halting(ProbeSettings((0,))), settings).status == "success"
    assert (folder / "state").exists()
    with pytest.raises(ConfigError, match="exists already"):
        run(Halting(ProbeSettings((0,))), settings)
    assert EvalRecord.load(folder).metrics[0]["value"] == 1.0, "what is done is never overwritten"


def test_a_caller_may_bring_the_cache_the_images_and_a_title(
    settings: RunSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone, told = FakeBackbone(), {"warning: known"}
    loaded = replace(from_module(backbone), cacheable=True)
    loaded.report.notes[:] = ["a note"]
    data = open_data(settings.data, ("test",))
    data.warnings += ["known", "new"]
    for name in ("one", "two"):
        at = replace(settings, output=replace(settings.output, name=name))
        record = runner.run(
            "probe",
            Probe(ProbeSettings((0,))),
            at,
            loaded=loaded,
            data=data,
            cache=BankCache(tmp_path / "elsewhere"),
            told=told,
            title=f"all/{name}",
        )
        assert record.run == f"all/{name}"
        assert record.folder == settings.output.output / name
        assert record.warnings == ["known", "new"], "the record repeats what the terminal does not"
    assert backbone.forwarded == len(data.splits["test"])
    assert len(list((tmp_path / "elsewhere" / "banks").iterdir())) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "features of" not in line]
    assert lines == ["a note", "warning: new"]


def test_what_is_set_aside_is_in_no_list(settings: RunSettings) -> None:
    for name in ("x", "replaced"):
        run(Probe(ProbeSettings((0,))), replace(settings, output=replace(settings.output, name=name)))
    folder = settings.output.output
    assert [path.parent.name for path in find_records(folder)] == ["replaced", "x"], "a run may be called so"
    moved = set_aside(folder / "x")
    assert moved.parent == folder / "replaced"
    assert [path.parent.name for path in find_records(folder)] == ["replaced"]
    assert list(find_records(moved)) == [moved / "record.json"], "it is there for those who ask for it"
    with pytest.raises(ConfigError, match="cannot move"):
        set_aside(folder / "nowhere")
