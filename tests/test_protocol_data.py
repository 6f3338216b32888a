"""Protocols that open data of their own kind, and those that only check it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ibot_eval import cli, registry, runner
from ibot_eval.backbone import Backbone
from ibot_eval.data.splits import Data
from ibot_eval.errors import DataError
from ibot_eval.own_network import from_module
from ibot_eval.protocol import EvalProtocol, Event, Metric, Session
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings
from tests.dense_data import coco_folder, opened_coco
from tests.fakes import FakeBackbone


@dataclass(frozen=True)
class CountSettings:
    """Settings of a protocol for these tests."""

    check_only: bool = False
    """Only look at the data."""


class Count(EvalProtocol[CountSettings]):
    """Counts the test images of COCO-format data."""

    config_type, version, primary = CountSettings, 1, "box_ap"

    def open(self, settings: DataSettings) -> Data:
        assert settings.data is not None
        data = opened_coco(Path(settings.data), self.roles())
        data.transform = {"long side": 1333}
        data.warnings.append("odd boxes")
        return data

    def instead(self, settings: RunSettings) -> str | None:
        if not self.config.check_only:
            return None
        if settings.data.data is None:
            raise DataError("nothing to check")
        return f"{len(self.open(settings.data).splits['test'])} images are fine"

    def run(self, backbone: Backbone, session: Session) -> Iterator[Event]:
        assert session.data is not None
        yield Metric("box_ap", float(len(session.data.splits["test"])))


def test_the_runner_takes_the_data_that_the_protocol_opens(tmp_path: Path) -> None:
    root = coco_folder(tmp_path / "coco", train=3, test=2)
    settings = RunSettings(
        checkpoint=CheckpointSettings(ckpt="fake"),
        data=DataSettings(data=str(root)),
        engine=EngineSettings(device="cpu"),
        output=OutputSettings(output=tmp_path / "runs", name="x"),
    )
    record = runner.run("count", Count(CountSettings()), settings, loaded=from_module(FakeBackbone()))
    assert record.metrics[0]["value"] == 2
    assert record.data["transform"] == {"long side": 1333}
    assert record.data["classes"] == 3
    assert record.data["splits"]["train"]["images"] == 3
    assert record.data["fingerprint"] == opened_coco(root).fingerprint
    assert record.warnings == ["odd boxes"]


class TestCheckingOnly:
    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        point = registry.metadata.EntryPoint("count", f"{__name__}:Count", "ibot_eval.protocols")
        points = {"protocols": {"count": point}, "commands": {}}
        monkeypatch.setattr(registry, "entries", lambda group: points[group])
        monkeypatch.chdir(tmp_path)

    def test_needs_no_checkpoint_and_leaves_no_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        root = coco_folder(tmp_path / "coco", test=2)
        # Nor are processes started for it.
        assert cli.main(["count", "--check-only", "--data", str(root), "--launch", "local:2"]) == 0
        assert capsys.readouterr().out == "2 images are fine\n"
        assert not (tmp_path / "runs").exists()

    def test_faults_are_the_exit_code(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["count", "--check-only"]) == 2
        assert "nothing to check" in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()

    def test_only_the_first_of_several_ranks_prints(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = coco_folder(tmp_path / "coco")
        monkeypatch.setenv("RANK", "1")
        assert cli.main(["count", "--check-only", "--data", str(root)]) == 0
        assert capsys.readouterr().out == ""
