"""protocols.occlusion: settings, metrics by hand, the figure's axis, and runs from the command line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ibot_eval import cli
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import ConfigError
from ibot_eval.models import wrap
from ibot_eval.protocol import Metric
from ibot_eval.record import EvalRecord, load_predictions
from ibot_eval.testing import check_events
from protocols.occlusion import Occlusion, OcclusionConfig
from tests import layouts


def test_metrics_and_figure_by_hand():
    protocol = Occlusion(OcclusionConfig(kinds=("random", "salient"), levels=(0, 50, 100)))
    labels = np.array([0, 1])
    predicted = {"random": np.array([[[0, 0, 1], [1, 1, 0]]]), "salient": np.array([[[0, 1, 1], [1, 1, 0]]])}
    loss = {"random": np.array([[[0, 0.5, 1]] * 2]), "salient": np.array([[[0, 0.2, 1], [0, 0.4, 1]]])}
    found = [e for e in protocol.events(labels, predicted, loss, ["a", "b"], 0) if isinstance(e, Metric)]
    values = {(m.name, m.params["kind"], m.params.get("level")): m.value for m in found}
    assert [values["top1", "salient", level] for level in (0, 50, 100)] == [100, 50, 0]
    assert [m.params["loss"] for m in found if m.params["kind"] == "salient" and m.name == "top1"] == [0, 30, 100]
    assert values["area_under_curve", "random", None] == pytest.approx(75)
    assert values["area_under_curve", "salient", None] == pytest.approx(50)
    record = EvalRecord("one", "occlusion", 1, metrics=[asdict(m) for m in found])
    (figure,) = Occlusion.figures(record).values()
    assert figure.axes[0].lines[1].get_xdata() == pytest.approx([0, 30, 100])


def record(protocol: Occlusion, run: str, rows: int = 2) -> EvalRecord:
    """Of images of which the first half is right at every level but the last."""
    labels = np.zeros(rows, int)
    predicted = {kind: np.zeros((1, rows, 3), int) for kind in protocol.config.kinds}
    for answers in predicted.values():
        answers[0, rows // 2 :] = 1
        answers[0, :, 2] = 1
    loss = {kind: np.tile([0, 0.5, 0.9], (1, rows, 1)) for kind in predicted}
    events = protocol.events(labels, predicted, loss, [str(i) for i in range(rows)], 0, "vit 1234")
    return EvalRecord(run, "occlusion", 1, metrics=[asdict(e) for e in events if isinstance(e, Metric)])


def test_several_runs_share_the_axes():
    protocol = Occlusion(OcclusionConfig(levels=(0, 50, 90)))
    random = Occlusion(OcclusionConfig(kinds=("random",), levels=(0, 50, 90)))
    (figure,) = Occlusion.figures(record(protocol, "one"), record(random, "two")).values()
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines.keys() == {"one random", "one salient", "one non-salient", "two random"}
    assert all(line.get_xdata().tolist() == [0, 50, 90] for line in lines.values())
    assert all(line.get_ydata().tolist() == [50, 50, 0] for line in lines.values())
    assert lines["one random"].get_color() != lines["two random"].get_color()


def test_params_tell_variants_apart():
    changes = {"random": {}, "tokens": {"drop": "tokens"}, "shifted": {"offset": "half", "saliency_head": 2}}
    seen = {
        name: {
            metric["params"]["kind"]: metric["params"]
            for metric in record(Occlusion(OcclusionConfig(levels=(0, 50, 90), **change)), "run").metrics
            if metric["name"] == "area_under_curve"
        }
        for name, change in changes.items()
    }
    assert seen["random"]["random"] == {"kind": "random", "fill": "mean"}
    assert seen["tokens"]["random"] == {"kind": "random", "drop": "tokens"}
    assert seen["shifted"]["salient"] == {
        "kind": "salient",
        "fill": "mean",
        "offset": "half",
        "saliency": "vit 1234, head 2",
    }
    assert seen["random"]["non-salient"]["saliency"] == "vit 1234, mean of heads"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ()}, "at least one"),
        ({"kinds": ("random", "random")}, "different"),
        ({"levels": (10, 20)}, "ascend from 0"),
        ({"cell": 0}, "squares of 0 pixels"),
        ({"saliency_key": "teacher"}, "without --saliency-ckpt"),
        ({"kinds": ("random",), "saliency_ckpt": "demo"}, "at random only"),
        ({"drop": "tokens", "offset": "half"}, "cannot be shifted"),
        ({"drop": "tokens", "levels": (0, 100)}, "nothing is left"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        Occlusion(OcclusionConfig(**changes))


def fitted(network: Any, crop: int = 32, asked: frozenset[str] = frozenset(), **changes: Any) -> OcclusionConfig:
    transform = EvalTransform(crop, crop, "bicubic", (0.5,) * 3, (0.5,) * 3)
    return Occlusion(OcclusionConfig(**changes)).for_network(wrap(network), transform, asked).config


def test_squares_are_the_patches_of_a_transformer_and_16_pixels_for_others():
    assert fitted(layouts.vit()).cell == 8
    assert fitted(layouts.vit(), cell=4).cell == 4
    assert fitted(layouts.resnet(), kinds=("random",)).cell == 16
    assert fitted(layouts.resnet(), saliency_ckpt="demo").cell == 16, "another network tells what is salient"


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (layouts.vit, {"cell": 5}, r"32 pixels cannot be cut into squares of 5"),
        (layouts.vit, {"drop": "tokens", "cell": 4}, "patches of 8 pixels, not of 4"),
        (layouts.vit, {"drop": "tokens", "fill": "black", "asked": frozenset({"fill"})}, "--fill has no effect"),
        (layouts.beit, {"drop": "tokens"}, "only a plain ViT"),
        (layouts.vit, {"saliency_head": 3}, "head 3 does not exist"),
        (layouts.resnet, {}, "no attention of a .CLS. token"),
        (layouts.swin, {"kinds": ("salient",)}, "no attention of a .CLS. token"),
    ],
)
def test_settings_that_a_network_cannot_serve(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        fitted(make(), **changes)


def command(*arguments: object) -> int:
    return cli.main([*map(str, arguments)])


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Digits by k-NN, then the figure of two runs."""
    monkeypatch.chdir(tmp_path)
    few = ("--train-per-class", 4, "--test-per-class", 2, "--resize", 64, "--crop", 64, "--workers", 0, "--seed", 5)
    shared = ("occlusion", "--levels", 0, 50, 90, "--k", 3, *few)
    assert command(*shared, "--head", "knn", "--name", "pixels") == 0
    more = ("--drop", "tokens", "--saliency-head", 1, "--repeats", 2, "--sheet", 0)
    assert command(*shared, *more, "--name", "tokens") == 0
    one, two = (EvalRecord.load(tmp_path / "runs" / name) for name in ("pixels", "tokens"))
    metrics = [Metric(**{k: v for k, v in m.items() if k != "published"}) for m in one.metrics]
    check_events("occlusion", Occlusion, metrics)
    for found in (one, two):
        top1 = [m for m in found.metrics if m["name"] == "top1"]
        assert len(top1) == 9
        assert len({m["value"] for m in top1 if m["params"]["level"] == 0}) == 1
        assert all(m["n"] == 20 for m in top1)
        assert {m["params"]["loss"] for m in top1 if m["params"]["kind"] == "random"} == {0, 50, 89.06}
        assert all(m["params"]["head"] == "knn" and m["params"]["k"] == 3 for m in top1)
    headline = Occlusion.headline(one.metrics)
    assert headline is not None
    assert headline["params"]["kind"] == "random"
    sheets = [a["path"] for a in one.artifacts if a["kind"] == "figure"]
    assert sheets == ["sheet-random.png", "sheet-salient.png", "sheet-non-salient.png"]
    assert all((tmp_path / "runs" / "pixels" / name).is_file() for name in sheets)
    table = load_predictions(tmp_path / "runs" / "pixels" / "predictions.npz")
    value = next(m["value"] for m in one.metrics if m["params"].get("level") == 50 and m["params"]["kind"] == "salient")
    assert 100 * (table["top1@kind=salient,level=50"] == table["label"]).mean() == pytest.approx(value)
    assert command("plot", "runs/pixels", "runs/tokens") == 0
    assert (tmp_path / "figures" / "occlusion-accuracy_by_loss.png").is_file()


def test_bad_input_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.chdir(tmp_path)
    few = ("--train-per-class", 2, "--test-per-class", 1, "--workers", 0)
    assert command("occlusion", *few, "--saliency-ckpt", "nowhere.pth") == 2
    assert "nowhere.pth" in capsys.readouterr().err
    assert command("occlusion", *few, "--head", "nowhere") == 2
    assert "'nowhere'" in capsys.readouterr().err
