"""ImageNet-A on a tiny folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ibot_eval import cli
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.protocol import Warning
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.settings import DataSettings
from ibot_eval.testing import check_protocol
from protocols.natural_adversarial import NaturalAdversarial, NaturalAdversarialConfig
from tests import layouts
from tests.images import picture, save
from tests.robustness_classifiers import checkpoint
from tests.robustness_folders import classify_by_pixel, folder, run, values


def protocol(head: str = "own") -> NaturalAdversarial:
    return NaturalAdversarial(NaturalAdversarialConfig(head=head))


def test_conforms() -> None:
    check_protocol("natural-adversarial")


def test_only_classes_of_the_data_compete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Logits 0 and 2 are classes 'b' and 'a'; the third image's answer, logit 1, does not compete, so 'b' comes first.
    root = folder(tmp_path, {"a": [2, 0, 1], "b": [0]})
    classify_by_pixel(monkeypatch, [1, -1, 0])
    events = run(protocol(), tmp_path, DataSettings(data=str(root)))
    # Right, wrong, right at the same confidence, in the order of the files, then the undecided one, wrong.
    expected = 100 * (1 + 1 / 2 + 2 / 3 + 2 / 4) / 4
    assert values(events) == {"top1": 50, "aurra": pytest.approx(expected)}
    assert values(events, "bin_size")["calibration_error", 100] is None
    assert any(isinstance(e, Warning) and "fewer than two bins" in e.message for e in events)


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path, {"a": [0], "b": [0]})
    classify_by_pixel(monkeypatch, [0, -1])
    with pytest.raises(ConfigError, match="lacks 1 of the 2 classes of the data: 'b'"):
        run(protocol(), tmp_path, DataSettings(data=str(root)))
    with pytest.raises(DataError, match="holds images in class folders"):
        run(protocol(), tmp_path, DataSettings(data=str(root / "a")))
    with pytest.raises(DataError, match="no such folder"):
        run(protocol(), tmp_path, DataSettings(data=str(root / "c")))
    with pytest.raises(ConfigError, match="--test-per-class 0"):
        run(protocol(), tmp_path, DataSettings(data=str(root), test_per_class=0))


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of ImageNet's 1000 classes on three of them: only these compete."""
    monkeypatch.chdir(tmp_path)
    network = layouts.resnet(num_classes=1000)
    checkpoint(tmp_path / "net.safetensors", network)
    for number, name in enumerate(("n01440764", "n01443537", "n15075141")):
        for i in range(2):
            save(tmp_path / f"a/{name}/{i}.png", picture(64, 64, 10 * number + i))
    command = ["natural-adversarial", "--ckpt", "net.safetensors", "--data", "a", "--resize", "64", "--crop", "64"]
    assert cli.main([*command, "--workers", "0", "--name", "run"]) == 0
    record = EvalRecord.load(tmp_path / "runs" / "run")
    assert [m["name"] for m in record.metrics] == ["top1", "calibration_error", "aurra"]
    table = load_predictions(tmp_path / "runs" / "run" / "predictions.npz")
    assert table["label"].tolist() == [0, 0, 1, 1, 2, 2]
    images = torch.stack(
        [torch.from_numpy(picture(64, 64, 10 * n + i)).permute(2, 0, 1) for n in range(3) for i in range(2)]
    )
    mean, std = (torch.tensor(record.data["transform"][name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.inference_mode():
        logits = network((images / 255 - mean) / std)[:, [0, 1, 999]]
    assert table["top1"].tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(table["confidence"], logits.softmax(1).max(1).values, rtol=1e-4)
    assert cli.main([*command, "--head", "knn"]) == 2
