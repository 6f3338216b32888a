"""The training loop against the published one: golden steps, and the second witness on other inputs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.config import PretrainSettings
from pretrain.ibot import Views
from pretrain.masking import Masking
from pretrain.networks import build
from tests.golden_train import VARIANTS, golden
from tests.pretraining import AfterStep, published, run_loop, tiny, views
from tests.published_network import Head, Network
from tests.published_step import PublishedStep, StepSettings

EVERY_STEP = {"save_steps": 1, "log_every": 1, "keep": 100}
ROUNDING = 3e-6
"""Of a loss in float32: the difference of numbers near 10."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_trajectory(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = golden(variant)
    of = wanted.settings
    settings = tiny(
        width=48,
        depth=4,
        heads=of["heads"],
        prototypes=of["out_dim"],
        hidden=of["hidden_dim"],
        bottleneck=of["bottleneck_dim"],
        norm_last_layer=False,
        sharing="semi-shared-2" if variant == "separate_student_head" else "shared",
        cls_weight=of["cls_weight"],
        student_temp=of["student_temp"],
        teacher_temp_start=of["teacher_temp"][0],
        teacher_temp=of["teacher_temp"][1],
        teacher_temp_warmup=of["temp_warmup_epochs"],
        centre_momentum=of["center_momentum"],
        patch_centre_momentum=of["center_momentum"],
        global_size=64,
        local_size=32,
        local_crops=of["local_crops"],
        epochs=of["epochs"],
        stop_after=of["steps"] // of["steps_per_epoch"],
        batch_size=of["batch"],
        lr=of["lr"] * 256 / of["batch"],
        lr_warmup=of["warmup_epochs"],
        lr_end=of["min_lr"],
        weight_decay=of["wd"][0],
        weight_decay_end=of["wd"][1],
        momentum=of["momentum"],
        clip=of["clip_per_parameter"],
        freeze_last_layer=of["freeze_last_layer_epochs"],
        **EVERY_STEP,
    )
    batches = [views(step.global_crops, step.local_crops, step.masks) for step in wanted.steps]
    after = run_loop(
        monkeypatch,
        tmp_path / "run",
        settings,
        batches,
        steps_per_epoch=of["steps_per_epoch"],
        start=(wanted.start_student, wanted.start_teacher),
    )
    assert len(after) == len(wanted.rows) == 6
    names = {
        "loss": "loss",
        "patch": "patch_loss",
        "epoch": "epoch",
        "lr": "lr",
        "wd": "weight_decay",
        "momentum": "momentum",
        "teacher_temp": "teacher_temp",
        "teacher_patch_temp": "patch_teacher_temp",
        "cls": "cls_loss",
    }
    for found, step, row in zip(after, wanted.steps, wanted.rows, strict=True):
        for theirs, ours in names.items():
            assert found.row[ours] == pytest.approx(row[theirs], rel=1e-5, abs=1e-12), (row["step"], ours)
        centres = found.state["centres"]
        torch.testing.assert_close(centres["cls.mean"], step.centre_cls[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(centres["patch.mean"], step.centre_patch[0, 0], rtol=0, atol=1e-6)
    for role, end in (("student", wanted.end_student), ("teacher", wanted.end_teacher)):
        state = published(after[-1].state[role])
        assert set(end) <= set(state)
        for name, tensor in end.items():
            torch.testing.assert_close(
                state[name].reshape(tensor.shape), tensor, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )


# Settings and batches that differ from the golden ones in one respect each.
CASES: dict[str, dict[str, Any]] = {
    "patch 4 and K 40": {"patch_size": 4, "prototypes": 40, "width": 30, "depth": 1},
    "batch 1": {"batch_size": 1},
    "no local crops": {"local_crops": 0},
    "many local crops": {"local_crops": 5},
    "one crop in two masked": {"mask_crops": "one-global"},
    "random masks": {"mask_shape": "random", "pred_ratio": (0.7,), "pred_ratio_var": (0.2,)},
    "fixed lengths": {"norm_last_layer": True},
    "no clipping": {"clip": 0.0},
    "patch temperature": {"patch_teacher_temp_start": 0.05, "patch_teacher_temp": 0.09},
    "weights": {"cls_weight": 0.3, "patch_weight": 2.0},
    "DINO loss alone": {"patch_weight": 0.0},
    "semi-shared-2": {"sharing": "semi-shared-2"},
    "semi-shared": {"sharing": "semi-shared"},
    "vanilla": {"sharing": "vanilla"},
    "vanilla with two K": {"sharing": "vanilla", "patch_prototypes": 24},
}


@pytest.mark.parametrize("case", CASES)
def test_second_witness(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(**CASES[case])
    seed = list(CASES).index(case)
    _compare(monkeypatch, tmp_path, settings, _batches(settings, seed))


@pytest.mark.parametrize("empty", [(2,), (0, 1, 2, 3)])
def test_batches_without_a_masked_token(empty: tuple[int, ...], tmp_path: Path, monkeypatch) -> None:
    settings = _settings()
    batches = _batches(settings, 0)
    for step in empty:
        batches[step][2][:] = [torch.zeros_like(mask) for mask in batches[step][2]]
    after = _compare(monkeypatch, tmp_path, settings, batches)
    for step, one in enumerate(after):
        assert (one.row["patch_loss"] == 0) == (step in empty)
        assert (one.row["patch_loss_per_token"] is None) == (step in empty)
        assert (one.row["patch_entropy"] is None) == (step in empty)


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(seed=seed)
    _compare(monkeypatch, tmp_path, settings, _batches(settings, seed))


def test_accumulated_passes_are_one_step_on_their_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of [CLS] and of patches are means over images, so two halves weigh as much as the whole."""
    whole, halves = _settings(batch_size=4), _settings(batch_size=2, accumulate=2)
    batches = [_assembled(batch) for batch in _batches(whole, 5)]
    one = run_loop(monkeypatch, tmp_path / "one", whole, batches, steps_per_epoch=2)
    parts = [_assembled(tuple([t[i : i + 2] for t in kind] for kind in b)) for b in _batches(whole, 5) for i in (0, 2)]
    two = run_loop(monkeypatch, tmp_path / "two", halves, parts, steps_per_epoch=2)
    for found, wanted in zip(two, one, strict=True):
        assert found.row["lr"] == wanted.row["lr"]
        assert found.row["gradient_norm"] == pytest.approx(wanted.row["gradient_norm"], rel=1e-4)
        for name in ("cls.mean", "patch.mean"):
            torch.testing.assert_close(found.state["centres"][name], wanted.state["centres"][name], rtol=0, atol=1e-6)
        for name, tensor in wanted.state["student"].items():
            torch.testing.assert_close(found.state["student"][name], tensor, rtol=0, atol=1e-4)


Batch = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Global crops, local crops and masks of one step."""


def _settings(**flags: Any) -> PretrainSettings:
    few = {"epochs": 4, "stop_after": 2, "lr": 0.064, "lr_warmup": 1, "teacher_temp_warmup": 3, "momentum": 0.9}
    trained = {"batch_size": 2, "norm_last_layer": False, "clip": 0.3, "pred_ratio": (0.4,), "pred_ratio_var": (0.2,)}
    return tiny(**(few | trained | EVERY_STEP | flags))


def _batches(settings: PretrainSettings, seed: int) -> list[Batch]:
    """Noise, and masks of its own for each of four steps."""
    rng = np.random.default_rng(seed)
    crops, masks, count = settings.crops, settings.masks, settings.optimiser.batch_size
    side = crops.global_size // (settings.network.patch_size or 16)
    masking = Masking(masks.pred_ratio, masks.pred_ratio_var, masks.mask_shape, at_least_one=True)

    def images(size: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=(count, 3, size, size)).astype(np.float32))

    def mask(crop: int) -> Tensor:
        drawn = np.stack([masking.sample(rng, (side, side), 0) for _ in range(count)])
        return torch.from_numpy(drawn & (crop == 0 or masks.mask_crops == "global"))

    return [
        (
            [images(crops.global_size) for _ in range(2)],
            [images(crops.local_size) for _ in range(crops.local_crops)],
            [mask(crop) for crop in range(2)],
        )
        for _ in range(4)
    ]


def _assembled(batch: Any) -> Views:
    return views(*batch)


def _compare(monkeypatch: Any, folder: Path, settings: PretrainSettings, batches: list[Batch]) -> list[AfterStep]:
    after = run_loop(monkeypatch, folder / "run", settings, [_assembled(b) for b in batches], steps_per_epoch=2)
    assert len(after) == len(batches) == 4
    student, teacher = (published(net.state_dict()) for net in build(settings))
    witness = PublishedStep(
        _network(student, settings), _network(teacher, settings, masked=False), _witness_settings(settings)
    )
    goal = settings.objective
    for found, batch in zip(after, batches, strict=True):
        now = witness.settings.at(witness.done)
        wanted = witness.step(*batch)
        row = found.row
        for name, number in (
            ("loss", wanted["loss"]),
            ("lr", now["lr"]),
            ("momentum", now["momentum"]),
            ("patch_teacher_temp", now["teacher_patch_temp"]),
        ):
            assert row[name] == pytest.approx(float(number), rel=1e-5, abs=ROUNDING), (row["step"], name)
        # The log has losses before their weights.
        assert goal.cls_weight * row["cls_loss"] == pytest.approx(wanted["cls"].item(), rel=1e-5, abs=ROUNDING)
        assert goal.patch_weight * row["patch_loss"] == pytest.approx(wanted["patch"].item(), rel=1e-5, abs=ROUNDING)
        centres = found.state["centres"]
        torch.testing.assert_close(centres["cls.mean"], witness.centre_cls[0], rtol=0, atol=1e-6)
        if goal.patch_weight:
            torch.testing.assert_close(centres["patch.mean"], witness.centre_patch[0, 0], rtol=0, atol=1e-6)
        for role, network in (("student", witness.student), ("teacher", witness.teacher)):
            state = published(found.state[role])
            for name, tensor in network.state_dict().items():
                if name.endswith("attn.qkv.bias"):
                    # A softmax does not see a bias of the keys; its gradient is rounding, which Adam makes a full step.
                    state[name], tensor = (torch.cat([b.chunk(3)[0], b.chunk(3)[2]]) for b in (state[name], tensor))
                torch.testing.assert_close(
                    state[name].reshape(tensor.shape),
                    tensor,
                    rtol=0,
                    atol=1e-4,
                    msg=lambda text, n=name: f"{n}: {text}",
                )
    return after


def _witness_settings(settings: PretrainSettings) -> StepSettings:
    goal, opt = settings.objective, settings.optimiser
    patch = (goal.patch_teacher_temp_start, goal.patch_teacher_temp)
    plain = StepSettings(
        steps_per_epoch=2,
        epochs=opt.epochs,
        lr=opt.lr * opt.batch_size / 256,
        min_lr=opt.lr_end,
        warmup_epochs=opt.lr_warmup,
        momentum=opt.momentum,
        temp_warmup_epochs=goal.teacher_temp_warmup,
        clip=opt.clip,
        cls_weight=goal.cls_weight,
        patch_weight=goal.patch_weight,
        train_gain=not settings.head.norm_last_layer,
    )
    return plain if patch == (None, None) else replace(plain, patch_temp=patch)


def _network(state: dict[str, Tensor], settings: PretrainSettings, masked: bool = True) -> Network:
    own_mlp = {name: tensor for name, tensor in state.items() if name.startswith("head.mlp2.")}
    state = {name: tensor.clone() for name, tensor in state.items() if name not in own_mlp}
    network = Network.from_state(state, heads=settings.network.heads or 0, masked=masked)
    if own_mlp:
        network.head = TwoHeads(network.head)
        network.head.mlp2.load_state_dict({n.removeprefix("head.mlp2."): t.clone() for n, t in own_mlp.items()})
    return network


class TwoHeads(Head):
    """The published head, but patches have an MLP of their own."""

    def __init__(self, head: Head) -> None:
        nn.Module.__init__(self)
        self.mlp, self.mlp2 = head.mlp, copy.deepcopy(head.mlp)
        self.last_layer, self.last_layer2 = head.last_layer, head.last_layer2

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        assert self.last_layer2 is not None
        cls, patches = F.normalize(self.mlp(tokens[:, 0]), dim=-1), F.normalize(self.mlp2(tokens[:, 1:]), dim=-1)
        return self.last_layer(cls), self.last_layer2(patches)
