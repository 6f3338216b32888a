"""The protocol finetune: what it reports, saves and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

from ibot_eval import testing
from ibot_eval.backbone import Backbone
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.errors import CheckpointError, ConfigError, DataError, UserError
from ibot_eval.export import own_metadata
from ibot_eval.finetuning.config import FinetuneConfig
from ibot_eval.finetuning.evaluation import evaluate
from ibot_eval.finetuning.saving import classifier_of
from ibot_eval.protocol import Artifact, Event, Metric, Predictions, Warning
from ibot_eval.record import EvalRecord, save_predictions
from ibot_eval.settings import CheckpointSettings
from ibot_eval.training.logs import TrainingLog
from protocols.finetune import CLASSIC, IMAGENET, TRANSFER, Finetune
from tests.finetuning_runs import CONFIG, TRANSFORM, Colours, labels, loaded, metrics, run, session

LEARNING = replace(CONFIG, epochs=8, eval_every=8, mixup=0, cutmix=0, erasing=0, auto_augment="none", flip=0)


def warnings(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Warning)]


def test_a_network_learns_and_its_file_says_the_same(tmp_path: Path):
    """Class 2 comes in test only."""
    train, test = Colours([label for label in labels(24, 4) if label != 2]), Colours(labels(16, 4), "test")
    where = session(tmp_path, train, test)
    events = run(LEARNING, where)
    testing.check_events("finetune", Finetune, events)

    found, (predictions,) = metrics(events), [e for e in events if isinstance(e, Predictions)]
    right = predictions.values["top1"] == predictions.values["label"]
    assert predictions.image_ids == test.image_ids
    assert set(predictions.values["top1"].tolist()) <= {0, 1, 3}
    assert found["top1"].value == 100 * right.mean() == 75
    assert found["top1"].params == {
        **{"selection": "last epoch", "epoch": 8, "lr": 2e-3, "batch": 8, "image_size": 32},
    }
    assert found["top5"].value == 75
    assert found["top1_best_on_test"].value == 75
    of_classes = {e.params["class"]: (e.value, e.n) for e in events if isinstance(e, Metric) and "class" in e.params}
    assert of_classes == {f"class {c}": (0.0 if c == 2 else 100.0, 4) for c in range(4)}
    assert "4 of 16 test images count as wrong, since the train split has none of their class class 2" in warnings(
        events
    )

    (path,) = [e.path for e in events if isinstance(e, Artifact) and e.kind == "checkpoint"]
    about = own_metadata(path)
    assert (about["class_names"], about["labels"]) == (["class 0", "class 1", "class 3"], [0, 1, 3])
    assert (about["image_size"], about["epoch"], about["pooling"]) == (32, 8, "cls")
    read = classifier_of(load_checkpoint(CheckpointSettings(ckpt=str(path))))
    again = evaluate(read, test, TRANSFORM, np.array([0, 1, 3]), device=torch.device("cpu"))
    assert again.predicted.tolist() == predictions.values["top1"].tolist()
    network = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=3
    )
    network.load_state_dict(load_file(path))
    by_timm = evaluate(network, test, TRANSFORM, np.array([0, 1, 3]), device=torch.device("cpu"))
    assert by_timm.predicted.tolist() == again.predicted.tolist()
    assert not (tmp_path / "checkpoints").exists()


def test_held_out_images_are_not_trained_on(tmp_path: Path):
    where = session(tmp_path, Colours(labels(30)), Colours(labels(9), "test"))
    with (
        mock.patch("ibot_eval.finetuning.run.train", side_effect=DataError("seen")) as trained,
        pytest.raises(DataError, match="seen"),
    ):
        run(replace(CONFIG, hold_out=0.2), where)
    images = trained.call_args.args[1]
    assert (len(images.train), len(images.held_out)) == (24, 6)
    assert not set(images.train.image_ids) & set(images.held_out.image_ids)
    assert np.bincount(images.held_out.labels).tolist() == [2, 2, 2]
    assert images.augmentation.mean == TRANSFORM.mean

    events = run(replace(CONFIG, hold_out=0.2), where)
    top1 = metrics(events)["top1"]
    assert top1.params["selection"] == "held-out"
    assert 0 <= top1.params["held_out_top1"] <= 100


def test_nothing_can_be_held_out(tmp_path: Path):
    events = run(replace(CONFIG, hold_out=0.2), session(tmp_path, Colours(labels(8, 8)), Colours(labels(8, 8), "test")))
    assert any(text.startswith("no image of train can be held out") for text in warnings(events))
    assert metrics(events)["top1"].params["selection"] == "last epoch"


def test_images_that_cannot_be_decoded(tmp_path: Path):
    train, test = Colours(labels(21), bad=[3]), Colours(labels(9), "test", bad=[0, 4])
    with pytest.raises(DataError, match=r"train/003\.png cannot be decoded"):
        run(CONFIG, session(tmp_path / "stop", train, test))
    events = run(CONFIG, session(tmp_path / "skip", train, test, bad_images="skip"))
    said = warnings(events)
    assert "unreadable images of test, left out: 2 ('test/000.png', 'test/004.png')" in said
    assert sum("an image of train could not be decoded" in text for text in said) == 1
    assert metrics(events)["top1"].n == 7


def test_a_classifier_is_fine_tuned_further_only_when_asked(tmp_path: Path):
    train, test = Colours(labels(21)), Colours(labels(9), "test")
    run(LEARNING, session(tmp_path / "first", train, test))
    ckpt = load_checkpoint(CheckpointSettings(ckpt=str(tmp_path / "first" / "classifier.safetensors")))
    before = {name: tensor.clone() for name, tensor in ckpt.backbone.state_dict().items()}
    with pytest.raises(ConfigError, match="--from-finetuned"):
        run(CONFIG, session(tmp_path / "no", train, test, ckpt))
    again = replace(LEARNING, epochs=1, lr=1e-6, min_lr=0.0, warmup_epochs=0, from_finetuned=True)
    kept = metrics(run(replace(again, keep_head=True), session(tmp_path / "kept", train, test, ckpt)))
    assert kept["top1"].value == 100
    run(again, session(tmp_path / "fresh", train, test, ckpt))
    first, fresh = (load_file(tmp_path / n / "classifier.safetensors") for n in ("kept", "fresh"))
    assert (first["head.weight"] - fresh["head.weight"]).abs().max() > 1e-3
    # The network that a session shares with others stays as it was.
    assert all(torch.equal(tensor, before[name]) for name, tensor in ckpt.backbone.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "engine", "error", "said"),
    [
        ({"layer_scale": 0.1, "freeze_blocks": 9}, {}, ConfigError, "9 blocks cannot be frozen"),
        ({"auto_augment": "nonsense-m9"}, {}, ConfigError, "nonsense-m9"),
        ({}, {"precision": "fp16"}, ConfigError, "fp16"),
        ({"accumulate": 30}, {}, ConfigError, "fewer than the 30 forward passes"),
        ({"keep_head": True, "from_finetuned": True}, {}, ConfigError, "classifier"),
    ],
)
def test_what_cannot_be_done(tmp_path: Path, changes: dict[str, Any], engine: Any, error: type[UserError], said: str):
    where = session(tmp_path, Colours(labels(21)), Colours(labels(9), "test"), **engine)
    with pytest.raises(error, match=said):
        run(replace(CONFIG, **changes), where)
    assert not (tmp_path / "checkpoints").exists()


def test_too_little_memory_for_the_weights_is_explained(tmp_path: Path):
    """Also where there is no room left for the network that made way."""
    where = session(tmp_path, Colours(labels(21)), Colours(labels(9), "test"))
    with (
        mock.patch("torch.nn.Module.to", side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried")),
        pytest.raises(ConfigError, match=r"memory ran out for the weights(?s:.*)CUDA(?s:.*)--fsdp"),
    ):
        run(CONFIG, where)


def test_labels_are_needed(tmp_path: Path):
    with pytest.raises(DataError, match="1 of 9 images of the test split have no label, the first being test/008"):
        run(CONFIG, session(tmp_path, Colours(labels(21)), Colours([*labels(8), -1], "test")))


def test_a_module_that_cannot_be_trained(tmp_path: Path):
    class Features(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean((2, 3))

    from ibot_eval.own_network import from_module

    where = session(tmp_path, Colours(labels(9)), Colours(labels(9), "test"), from_module(Features(), image_size=32))
    with pytest.raises((ConfigError, CheckpointError), match="cannot be fine-tuned"):
        run(CONFIG, where)


def on_network(config: FinetuneConfig, architecture: str, size: int = 224, family: str = "ibot") -> Finetune:
    backbone = mock.Mock(spec=Backbone, architecture=architecture, family=family)
    return Finetune(config).for_network(backbone, replace(TRANSFORM, resize=size, crop=size), frozenset())


TOP1 = {"name": "top1", "params": {}}


@pytest.mark.parametrize("architecture", IMAGENET)
def test_published_settings_have_a_published_number(architecture: str):
    config = FinetuneConfig(**IMAGENET[architecture], lr=2e-3)
    key = on_network(config, architecture).published_key("finetune", TOP1, "ImageNet-1K")
    assert key is not None
    assert key[:3] == ("finetune", "top1", "ImageNet-1K")
    swept = replace(config, lr=1.0, sweep=("lr=8e-4,9e-4",))
    assert on_network(swept, architecture).published_key("finetune", TOP1, "ImageNet-1K")
    others: list[dict[str, Any]] = [{"lr": 3e-3}, {"epochs": 7}, {"mixup": 0.0}, {"weight_decay": 0.0}]
    others += [{"sweep": ("lr=1e-3,3e-3",)}, {"sweep": ("lr=1e-3", "drop_path=0.1,0.5")}, {"sweep": ("mixup=0,1",)}]
    others += [{"pooling": "mean"}, {"positions": "relative"}, {"layer_scale": 0.1}, {"head_scale": 1.0}]
    others += [{"freeze_blocks": 1}, {"ema": 0.9}, {"repeats": 3}, {"from_finetuned": True}]
    for other in others:
        changed = on_network(replace(config, **other), architecture)
        assert changed.published_key("finetune", TOP1, "ImageNet-1K") is None, other
    for same in ({"accumulate": 8, "train_batch": 16}, {"hold_out": 0.1}, {"compile": True, "eval_every": 10}):
        assert on_network(replace(config, **same), architecture).published_key("finetune", TOP1, "ImageNet-1K"), same
    beit = replace(config, pooling="mean", positions="relative", layer_scale=0.1)
    assert on_network(beit, architecture, family="beit").published_key("finetune", TOP1, "ImageNet-1K")
    assert on_network(config, architecture, 96).published_key("finetune", TOP1, "ImageNet-1K") is None
    assert on_network(config, architecture).published_key("finetune", {"name": "top5"}, "ImageNet-1K") is None


def test_published_numbers_of_transfer_and_larger_images():
    classic = FinetuneConfig(**CLASSIC, **TRANSFER["CIFAR-10"])
    assert on_network(classic, "vit-s/16").published_key("finetune", TOP1, "CIFAR-10")
    for data in ("iNat18", "Cars"):
        assert on_network(classic, "vit-s/16").published_key("finetune", TOP1, data) is None
    for other in ({"lr": 1e-3}, {"repeats": 1}, {"min_lr": 1e-6}, {"freeze_blocks": 12}, {"erasing": 0.1}):
        changed = on_network(replace(classic, **other), "vit-s/16")
        assert changed.published_key("finetune", TOP1, "CIFAR-10") is None, other
    assert on_network(classic, "vit-s/16", 96).published_key("finetune", TOP1, "CIFAR-10") is None
    further = FinetuneConfig(from_finetuned=True)
    key = on_network(further, "vit-l/16", 512).published_key("finetune", TOP1, "ImageNet-1K")
    assert key is not None
    assert "not published" in key.remark
    for architecture, size in (("vit-l/16", 224), ("vit-b/16", 384)):
        assert on_network(further, architecture, size).published_key("finetune", TOP1, "ImageNet-1K") is None


def record_of(folder: Path, name: str) -> EvalRecord:
    (folder / name).mkdir(parents=True)
    log = TrainingLog(folder / name)
    for step in range(1, 5):
        log.write(step, {"epoch": (step - 1) // 2, "loss": 2.0 / step})
        if step % 2 == 0:
            log.write(
                step,
                {
                    "event": "epoch",
                    "epoch": step // 2,
                    "test_top1": 20.0 * step,
                    "test_loss": 1.0,
                    "held_out_top1": None,
                },
            )
    log.close()
    values = {"label": np.array([0, 0, 0, 2]), "top1": np.array([0, 0, 1, 2])}
    save_predictions(folder / name / "predictions.npz", ["a", "b", "c", "d"], values)
    record = EvalRecord(name, "finetune", 1, status="success", data={"class_to_idx": {"cat": 0, "dog": 1, "cow": 2}})
    record.save(folder / name)
    return record


def test_figures(tmp_path: Path):
    one = record_of(tmp_path, "one")
    drawn = Finetune.figures(one)
    assert drawn.keys() == {"learning_curve", "confusion"}
    losses, accuracies = drawn["learning_curve"].axes
    assert losses.lines[0].get_xydata().tolist() == [[0.5, 2.0], [1.0, 1.0], [1.5, 2 / 3], [2.0, 0.5]]  # pyright: ignore
    assert accuracies.lines[0].get_xydata().tolist() == [[1, 40], [2, 80]]  # pyright: ignore
    matrix = drawn["confusion"].axes[0]
    np.testing.assert_allclose(
        np.asarray(matrix.images[0].get_array()), [[200 / 3, 100 / 3, 0], [0, 0, 0], [0, 0, 100]]
    )
    assert [text.get_text() for text in matrix.get_yticklabels()] == ["cat", "dog", "cow"]
    two = Finetune.figures(one, record_of(tmp_path, "two"))
    assert len(two["learning_curve"].axes[0].lines) == 4
    assert len(two["confusion"].axes) == 4
    assert [text.get_text() for text in two["learning_curve"].legends[0].get_texts()] == ["one", "two"]


@pytest.mark.parametrize("runs", [1, 8, 16])
def test_figures_of_many_runs_can_be_read(runs: int, tmp_path: Path):
    """Legends lie within the figure, colours differ, matrices stand in rows."""
    names = [f"rates_of_layers/sweep/lr-{n}e-4_auto_augment-rand-m9-mstd0.5-inc1" for n in range(runs)]
    drawn = Finetune.figures(*(record_of(tmp_path, name) for name in names))
    for figure in drawn.values():
        figure.draw_without_rendering()
        assert figure.get_figwidth() <= 22
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= figure.bbox.x1
    losses = drawn["learning_curve"].axes[0]
    assert len({line.get_color() for line in losses.lines}) == runs
    assert len(drawn["confusion"].axes) == 2 * runs
    assert Finetune.figures(EvalRecord("none", "finetune", 1)) == {}


def test_it_conforms():
    assert testing.check_protocol("finetune") == []


def test_the_session_must_hold_a_checkpoint(tmp_path: Path):
    where = session(tmp_path, Colours(labels(9)), Colours(labels(9), "test"))
    backbone = loaded().backbone
    assert isinstance(where.loaded, LoadedCheckpoint)
    with pytest.raises(TypeError):
        list(Finetune(CONFIG).run(backbone, replace(where, loaded=None)))
