"""The second witness itself against the published code's numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import golden_train
from tests.conftest import SHARED, needs_shared
from tests.golden_train import GOLDEN, VARIANTS, GoldenTrajectory, golden
from tests.published_network import Network, ViT
from tests.published_step import PublishedStep, StepSettings


def published_run(trajectory: GoldenTrajectory, **changes: float) -> PublishedStep:
    settings = trajectory.settings
    return PublishedStep(
        Network.from_state(trajectory.start_student, heads=settings["heads"]),
        Network.from_state(trajectory.start_teacher, heads=settings["heads"]),
        replace(step_settings(settings), **changes),
    )


def step_settings(settings: dict) -> StepSettings:
    return StepSettings(
        steps_per_epoch=settings["steps_per_epoch"],
        epochs=settings["epochs"],
        lr=settings["lr"],
        min_lr=settings["min_lr"],
        warmup_epochs=settings["warmup_epochs"],
        weight_decay=tuple(settings["wd"]),
        momentum=settings["momentum"],
        teacher_temp=tuple(settings["teacher_temp"]),
        patch_temp=tuple(settings["teacher_temp"]),
        temp_warmup_epochs=settings["temp_warmup_epochs"],
        student_temp=settings["student_temp"],
        centre_momentum=settings["center_momentum"],
        clip=settings["clip_per_parameter"],
        freeze_last_layer_epochs=settings["freeze_last_layer_epochs"],
        cls_weight=settings["cls_weight"],
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_trajectory(variant: str) -> None:
    wanted = golden(variant)
    run = published_run(wanted)
    for i, (step, row) in enumerate(zip(wanted.steps, wanted.rows, strict=True)):
        found = run.settings.at(i) | run.step(step.global_crops, step.local_crops, step.masks)
        for name, number in found.items():
            tolerance = 1e-4 if name == "grad_norm_max" else 1e-5
            assert float(number) == pytest.approx(row[name], rel=tolerance, abs=1e-12), (i, name)
        torch.testing.assert_close(run.centre_cls, step.centre_cls, rtol=0, atol=1e-6)
        torch.testing.assert_close(run.centre_patch, step.centre_patch, rtol=0, atol=1e-6)
    for network, end in ((run.student, wanted.end_student), (run.teacher, wanted.end_teacher)):
        state = network.state_dict()
        assert set(state) == set(end)
        for name, tensor in end.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("size", ["64x64", "32x32", "48x80"])
def test_network_at_every_size(size: str) -> None:
    data = load_file(GOLDEN / "vit.safetensors")
    state = {name[6:]: tensor for name, tensor in data.items() if name.startswith("state/")}
    net = ViT(width=48, depth=4, heads=3, patch=8, positions=64, hidden=192)
    net.masked_embed = None
    net.load_state_dict(state)
    torch.testing.assert_close(net(data[f"image/{size}"]), data[f"tokens/{size}"], rtol=1e-5, atol=1e-5)


def test_last_layer_stands_still_in_the_first_epoch_only() -> None:
    wanted = golden("separate_student_head")
    run = published_run(wanted)
    moved = []
    for step in wanted.steps[:3]:
        before = {name: tensor.clone() for name, tensor in run.student.state_dict().items()}
        run.step(step.global_crops, step.local_crops, step.masks)
        moved.append({name for name, tensor in run.student.state_dict().items() if not tensor.equal(before[name])})
    last = {f"head.last_layer{i}.weight_{part}" for i in ("", "2") for part in "gv"}
    everything = set(run.student.state_dict())
    assert moved == [set(), everything - last, everything]


def test_nothing_masked_and_no_local_crops() -> None:
    wanted = golden("shared_head")
    run = published_run(wanted)
    found = run.step(wanted.steps[0].global_crops, [], [torch.zeros_like(mask) for mask in wanted.steps[0].masks])
    assert found["patch"] == 0
    assert found["cls"] > 0
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in run.student.parameters())


def test_a_fixed_gain_takes_no_part() -> None:
    wanted = golden("shared_head")
    run = published_run(wanted, train_gain=False, freeze_last_layer_epochs=0, warmup_epochs=0)
    for step in wanted.steps[:2]:
        run.step(step.global_crops, step.local_crops, step.masks)
    assert (run.student.head.last_layer.weight_g == 1).all()
    assert not run.student.head.last_layer.weight_v.equal(wanted.start_student["head.last_layer.weight_v"])


def test_a_single_masked_token_counts_in_full() -> None:
    wanted = golden("shared_head")
    crops, masks = wanted.steps[0].global_crops, [torch.zeros_like(mask) for mask in wanted.steps[0].masks]
    masks[0][1, 2, 3] = True
    run = published_run(wanted)
    with torch.no_grad():
        student = run.student(crops[0], masks[0])[1][1, 2 * 8 + 3]
        teacher = run.teacher(crops[0])[1][1, 2 * 8 + 3]
    token = torch.nn.functional.cross_entropy(student[None] / 0.1, (teacher[None] / 0.04).softmax(-1))
    torch.testing.assert_close(run.step(crops, [], masks)["patch"], token / 6)  # six masked crops, five of them empty


def test_schedules_after_the_golden_steps() -> None:
    settings = StepSettings(steps_per_epoch=2, epochs=40, temp_warmup_epochs=30, teacher_temp=(0.04, 0.07))
    temperatures = [settings.at(2 * epoch)["teacher_temp"] for epoch in range(40)]
    assert temperatures == pytest.approx([*np.linspace(0.04, 0.07, 30), *[0.07] * 10])
    for name, end in (("lr", 1e-6), ("wd", 0.4), ("momentum", 1.0)):
        assert settings.at(80)[name] == pytest.approx(end)


@needs_shared
def test_the_copy_is_what_the_whole_files_make() -> None:
    made, text = golden_train.make(SHARED / "golden")
    stored = load_file(GOLDEN / "train.safetensors")
    assert set(stored) == set(made)
    assert all(tensor.dtype == made[name].dtype and tensor.equal(made[name]) for name, tensor in stored.items())
    assert text == golden_train._copy()[1]


@needs_shared
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_copy_loads_as_the_whole_file(variant: str) -> None:
    whole = load_file(SHARED / "golden" / f"train_{variant}.safetensors")
    found = golden(variant)
    names = {"student0": found.start_student, "teacher0": found.start_teacher}
    names |= {"student6": found.end_student, "teacher6": found.end_teacher}
    for role, state in names.items():
        wanted = {name[9:]: tensor for name, tensor in whole.items() if name.startswith(f"{role}/")}
        missing = set(wanted) - set(state)
        own = variant == "separate_student_head" and role.startswith("student")
        assert missing == (set() if own else {f"head.last_layer2.weight_{part}" for part in "gv"})
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=6e-6 if role.endswith("6") else 0.0)
    for i, step in enumerate(found.steps):
        for j, crop in enumerate(step.global_crops + step.local_crops):
            assert crop.equal(whole[f"step{i}/crop{j}"].float())
        assert step.centre_patch.equal(whole[f"step{i}/center_patch"])
