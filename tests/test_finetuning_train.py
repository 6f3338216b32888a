"""The fine-tuning loop, against a plain second loop with torch's AdamW for every parameter by itself."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.augmentation import TrainTransform
from ibot_eval.finetuning.config import FinetuneConfig
from ibot_eval.finetuning.evaluation import evaluate
from ibot_eval.finetuning.loader import finish, training_loader
from ibot_eval.finetuning.looking import Images
from ibot_eval.finetuning.memory import explain_out_of_memory
from ibot_eval.finetuning.mixing import Mixing
from ibot_eval.finetuning.network import Classifier, build_classifier
from ibot_eval.finetuning.plan import make_plan
from ibot_eval.finetuning.train import Outcome, train
from ibot_eval.models import wrap
from ibot_eval.own_network import from_module
from ibot_eval.settings import EngineSettings
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.finite import NotFinite
from ibot_eval.training.logs import read_log
from tests import layouts
from tests.finetuning_runs import CONFIG, SIDE, TRANSFORM, Colours, labels, loaded

AUGMENTATION = TrainTransform(SIDE)
CLASSES = np.array([0, 2, 5])


def classifier_for(config: FinetuneConfig) -> Classifier:
    return build_classifier(
        loaded(),
        3,
        SIDE,
        drop_path=config.drop_path,
        head_scale=config.head_scale,
        freeze_blocks=config.freeze_blocks,
    )


def images_for(test: int = 12, held_out: int = 0) -> Images:
    splits = [Colours(CLASSES[labels(n)].tolist(), name) for n, name in ((21, "train"), (test, "test"))]
    held = Colours(CLASSES[labels(held_out)].tolist(), "held") if held_out else None
    return Images(splits[0], splits[1], held, CLASSES, AUGMENTATION, TRANSFORM)


def fit(
    folder: Path,
    config: FinetuneConfig,
    classifier: Classifier | None = None,
    images: Images | None = None,
    **engine: Any,
) -> Outcome:
    images = images or images_for(held_out=6 if config.hold_out else 0)
    return train(
        classifier or classifier_for(config),
        images,
        config,
        make_plan(config, len(images.train)),
        Mixing(3, mixup=config.mixup, cutmix=config.cutmix, smoothing=config.smoothing),
        EngineSettings(**({"device": "cpu", "seed": 5} | engine)),
        torch.device("cpu"),
        folder,
        states=TrainingCheckpoints(folder / "checkpoints"),
        identity={},
        progress=False,
        say=print,
    )


def with_changes(**changes: Any) -> FinetuneConfig:
    return FinetuneConfig(**{**vars(CONFIG), **changes})


def depth_below_the_head(name: str, depth: int = 2) -> int:
    """How many layers lie between a parameter and the head, the head's own counting 0."""
    if name.startswith(("backbone.net.patch_embed", "backbone.net.pos_embed", "backbone.net.cls_token")):
        return depth + 1
    return depth - int(name.split(".")[3]) if name.startswith("backbone.net.blocks") else 0


def is_plain(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 1 or name.endswith(("cls_token", "pos_embed"))


def test_a_plain_loop_gives_the_same_weights(tmp_path: Path):
    """Accumulated passes, clipping and a moving average; every parameter has an optimiser of its own."""
    config = with_changes(ema=0.8, clip_grad=0.5, min_lr=1e-4, warmup_lr=1e-5, weight_decay=0.3, layer_decay=0.6)
    outcome = fit(tmp_path, config)

    classifier = classifier_for(config).train()
    averages = {name: p.detach().clone() for name, p in classifier.named_parameters()}
    optimisers = {
        name: torch.optim.AdamW([p], weight_decay=0.0 if is_plain(name, p) else 0.3)
        for name, p in classifier.named_parameters()
    }
    rates = [1e-5, 2e-3, *(1e-4 + (2e-3 - 1e-4) * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(4))]
    mixing = Mixing(3)
    loader = training_loader(images_for().train, AUGMENTATION, batch_size=4, accumulate=2, seed=5, epochs=3)
    torch.manual_seed(5)
    for step, rate in enumerate(rates):
        for part in range(2):
            batch = next(loader)
            targets = torch.from_numpy(np.searchsorted(CLASSES, batch.labels.numpy()))
            pixels, targets = mixing(finish(batch, AUGMENTATION), targets, seed=5, step=2 * step + part)
            (mixing.loss(classifier(pixels), targets) / 2).backward()
        norm = torch.sqrt(sum(((p.grad**2).sum() for p in classifier.parameters()), torch.zeros(())))  # pyright: ignore
        for name, parameter in classifier.named_parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
            optimisers[name].param_groups[0]["lr"] = rate * 0.6 ** depth_below_the_head(name)
            optimisers[name].step()
            parameter.grad = None
            averages[name] = 0.8 * averages[name] + 0.2 * parameter.detach()
    assert next(loader, None) is None
    # The average is what is reported.
    for name, expected in averages.items():
        # A key's bias has no effect: its gradient is rounding, which Adam makes as long as any other.
        rows = [*range(48), *range(96, 144)] if name.endswith("qkv.bias") else slice(None)
        torch.testing.assert_close(outcome.weights[name][rows], expected[rows], rtol=1e-4, atol=2e-6)
    classifier.load_state_dict(averages, strict=False)
    tested = evaluate(classifier, images_for().test, TRANSFORM, CLASSES, device=torch.device("cpu"))
    assert outcome.tested.predicted.tolist() == tested.predicted.tolist()
    assert outcome.tested.loss == pytest.approx(tested.loss, abs=1e-5)
    assert outcome.looks[-1].test == tested.top1


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_how_far_every_layer_moves(tmp_path: Path, frozen: int):
    """Adam's first step moves every weight by its learning rate, whatever the gradient; frozen layers stay."""
    config = with_changes(
        epochs=1,
        train_batch=10,
        warmup_epochs=0,
        weight_decay=0.0,
        layer_decay=0.5,
        drop_path=0.0,
        freeze_blocks=frozen,
    )
    before = copy.deepcopy(classifier_for(config).state_dict())
    outcome = fit(tmp_path, config)
    moved = {
        n: (outcome.weights[n] - before[n]).abs().max().item() for n, _ in classifier_for(config).named_parameters()
    }
    assert len(moved) == 32
    for name, distance in moved.items():
        below = depth_below_the_head(name)
        expected = 0.0 if below > 2 - frozen + (frozen == 0) else 2e-3 * 0.5**below
        assert distance == pytest.approx(expected, rel=0.05), name
    assert (frozen == 0) == all(distance > 0 for distance in moved.values())


NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean of the patches": (layouts.vit, {"pooling": "mean"}),
    "registers": (partial(layouts.vit, reg_tokens=2), {}),
    "relative positions, LayerScale": (layouts.vit, {"positions": "relative", "layer_scale": 0.1}),
    "beit": (layouts.beit, {"pooling": "mean"}),
    "swin": (partial(layouts.swin, img_size=64, window_size=2), {}),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_parameter_of_every_network_moves(tmp_path: Path, kind: str):
    make, changes = NETWORKS[kind]
    size = 64 if kind == "swin" else SIDE
    config = with_changes(
        epochs=2, train_batch=10, accumulate=1, warmup_epochs=0, drop_path=0.0, checkpoint_blocks=True
    )
    classifier = build_classifier(from_module(wrap(make(), family="ibot")), 3, size, head_scale=1.0, **changes)
    before = {name: p.detach().clone() for name, p in classifier.named_parameters()}
    splits = images_for()
    images = replace(splits, augmentation=TrainTransform(size), transform=replace(TRANSFORM, resize=size, crop=size))
    outcome = fit(tmp_path, config, classifier, images)
    still = {name for name, tensor in before.items() if torch.equal(outcome.weights[name], tensor)}
    assert not still
    assert outcome.tested.loss is not None


def test_the_epoch_that_is_best_on_held_out_images_is_reported(tmp_path: Path):
    config = with_changes(hold_out=0.2)
    scripted = iter([20.0, 60.0, 60.0])
    kept: dict[int, Tensor] = {}

    def held_out(classifier: Any, split: Any, *rest: Any, **more: Any) -> Any:
        result = evaluate(classifier, split, *rest, **more)
        if split.name != "held":
            return result
        kept[len(kept) + 1] = classifier.head.weight.detach().clone()
        return mock.Mock(top1=next(scripted), indices=result.indices)

    with mock.patch("ibot_eval.finetuning.looking.evaluate", held_out):
        outcome = fit(tmp_path, config)
    assert (outcome.reported.epoch, outcome.reported.held_out) == (2, 60.0)
    assert torch.equal(outcome.weights["head.weight"], kept[2])
    assert not torch.equal(kept[2], kept[3])
    assert [look.epoch for look in outcome.looks] == [1, 2, 3]
    rows = [row for row in read_log(tmp_path / "log.jsonl") if row.get("event") == "epoch"]
    assert [row["held_out_top1"] for row in rows] == [20.0, 60.0, 60.0]
    assert outcome.tested.top1 == outcome.looks[1].test


def test_what_is_logged_and_looked_at(tmp_path: Path):
    outcome = fit(tmp_path, with_changes(epochs=5, eval_every=2, log_every=3))
    assert [look.epoch for look in outcome.looks] == [2, 4, 5]
    assert outcome.reported == outcome.looks[-1]
    rows = read_log(tmp_path / "log.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [3, 6, 9, 10]
    assert all(np.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in steps)
    assert [(row["step"], row["epoch"]) for row in rows if row.get("event") == "epoch"] == [(4, 2), (8, 4), (10, 5)]


def test_recomputed_blocks_change_nothing(tmp_path: Path):
    wanted = fit(tmp_path / "plain", CONFIG).weights
    recomputed = fit(tmp_path / "recomputed", with_changes(checkpoint_blocks=True)).weights
    assert all(torch.equal(recomputed[name], tensor) for name, tensor in wanted.items())


def test_bf16_is_near(tmp_path: Path):
    wanted, half = (fit(tmp_path / p, CONFIG, precision=p) for p in ("fp32", "bf16"))
    assert half.weights["head.weight"].dtype == torch.float32
    assert not torch.equal(half.weights["head.weight"], wanted.weights["head.weight"])
    assert half.tested.loss == pytest.approx(wanted.tested.loss, abs=0.1)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path):
    classifier = classifier_for(CONFIG)
    with torch.no_grad():
        classifier.head.bias[1] = torch.nan
    with pytest.raises(NotFinite, match="the loss is NaN or infinite at step 1"):
        fit(tmp_path, CONFIG, classifier)
    assert not (tmp_path / "checkpoints").exists()


def test_too_little_memory_is_explained(tmp_path: Path):
    with (
        mock.patch.object(Classifier, "forward", side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried")),
        pytest.raises(ConfigError) as caught,
    ):
        fit(tmp_path, CONFIG)
    text = str(caught.value)
    for word in ("--train-batch 4,", "--precision fp32", "no --checkpoint-blocks", "--train-batch 2 --accumulate 4"):
        assert word in text


def test_the_cpu_that_has_no_more_memory_is_explained() -> None:
    with pytest.raises(ConfigError, match="memory ran out with --train-batch 8"):  # noqa: SIM117
        with explain_out_of_memory(8, 1, "fp32", checkpointed=False):
            torch.empty(10**14)
