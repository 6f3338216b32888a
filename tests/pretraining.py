"""Small pre-training settings and batches, and the product's own training loop on batches that a test chooses."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ibot_eval.cli import main
from ibot_eval.data.splits import Data
from ibot_eval.training.logs import read_log
from pretrain import networks, utilisation
from pretrain import train as loop
from pretrain.config import PretrainSettings
from pretrain.ibot import IBOT, Views
from pretrain.masking import masked_positions
from pretrain.setup import masking_of, online_tokenizer
from pretrain.throughput import PeakRate
from tests.fakes import FakeSplit

TINY: dict[str, Any] = {
    "arch": "vit",
    "width": 24,
    "depth": 2,
    "heads": 3,
    "patch_size": 8,
    "drop_path": 0.0,
    "prototypes": 32,
    "hidden": 40,
    "bottleneck": 16,
    "global_size": 32,
    "local_size": 16,
    "local_crops": 2,
    "workers": 0,
    "device": "cpu",
    "tensorboard": False,
}
"""Flags of a network that takes milliseconds."""

FLAGS = ["--data", "demo", "--train-per-class", "3", "--arch", "vit", "--width", "24", "--depth", "2", "--heads", "3"]
FLAGS += ["--patch-size", "8", "--global-size", "32", "--local-size", "16", "--local-crops", "2", "--prototypes", "32"]
FLAGS += ["--hidden", "40", "--bottleneck", "16", "--epochs", "2", "--batch-size", "2", "--workers", "0"]
FLAGS += ["--no-colour", "--flip", "0", "--no-tensorboard", "--device", "cpu"]
"""The same as arguments of the command, on 30 of the embedded digits."""

SWIN = {"arch": "swin_tiny", "width": None, "depth": None, "heads": None, "patch_size": None, "local_crops": 0}
SHARINGS = ("vanilla", "shared", "semi-shared", "semi-shared-2")

PEAK = PeakRate(1e12, "a test's")

State = dict[str, Tensor]


class AfterStep(NamedTuple):
    row: dict[str, Any]
    """Of log.jsonl."""
    state: dict[str, Any]
    """What the checkpoint after this step holds."""


def quick() -> AbstractContextManager[Any]:
    """Runs do not measure the machine."""
    return mock.patch.object(utilisation, "peak_rate", return_value=PEAK)


def run(folder: str | Path, *arguments: object, command: str = "pretrain") -> dict[str, Any]:
    """``ibot-eval pretrain`` in this process, in a folder: exit code, stdout and stderr."""
    texts = io.StringIO(), io.StringIO()
    with quick(), contextlib.chdir(folder), contextlib.redirect_stdout(texts[0]), contextlib.redirect_stderr(texts[1]):
        code = main([command, *map(str, arguments)])
    return {"code": code, "stdout": texts[0].getvalue(), "stderr": texts[1].getvalue()}


def tiny(**flags: Any) -> PretrainSettings:
    """:data:`TINY` with some flags changed."""
    return PretrainSettings().with_flags(TINY | flags)


def views(global_crops: Sequence[Tensor], local_crops: Sequence[Tensor], masks: Sequence[Tensor] | None) -> Views:
    """Crops (B, 3, S, S) kind by kind, and a mask (B, h, w) for each global one, as the loader would give them."""
    assembled = Views(
        torch.cat(list(global_crops)), len(global_crops[0]), torch.cat(list(local_crops)) if local_crops else None
    )
    if masks is not None:
        assembled.masks = torch.cat(list(masks))
        assembled.positions, assembled.weights, _ = masked_positions(assembled.masks.numpy(), 16)
    return assembled


def published(state: Mapping[str, Tensor]) -> State:
    """Tensors of a student or teacher under the names of the published code."""
    # The adapter has a second name for the last norm.
    return {_published(name): tensor for name, tensor in state.items() if "._last_norm." not in name}


def _published(name: str) -> str:
    return name.replace("trunk.backbone.net.", "backbone.").replace("trunk.", "backbone.")


def fill(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts tensors under published names into a student or teacher; what they lack stays."""
    for name, parameter in network.named_parameters():
        if _published(name) in tensors:
            parameter.data.copy_(tensors[_published(name)].reshape(parameter.shape))


def run_loop(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    settings: PretrainSettings,
    batches: Sequence[Views],
    *,
    steps_per_epoch: int,
    start: tuple[State, State] | None = None,
) -> list[AfterStep]:
    """``pretrain.train.train`` itself, but for its loader, on ``batches``, the passes of a step one after the other.

    Args:
        settings: must log and save after every step.
        start: student and teacher by published names; default: what the seed gives.
    """

    def loader(*arguments: Any, **named: Any) -> Iterator[SimpleNamespace]:
        for batch in batches:
            labels = torch.full((batch.batch,), -1)
            yield SimpleNamespace(views=batch, labels=labels, global_masks=None, global_masked=None, replaced=0)

    def build(*arguments: Any) -> tuple[networks.Student, networks.Network]:
        student, teacher = networks.build(*arguments)
        for network, tensors in zip((student, teacher), start or ({}, {}), strict=True):
            fill(network, tensors)
        return student, teacher

    monkeypatch.setattr(utilisation, "peak_rate", lambda *_: PEAK)
    monkeypatch.setattr(loop, "crop_loader", loader)
    monkeypatch.setattr(loop, "views_of", lambda batch, *_: batch.views)
    monkeypatch.setattr(loop, "build", build)
    images = steps_per_epoch * settings.optimiser.batch_size * settings.optimiser.accumulate
    data = Data("fake", (), {"train": FakeSplit(images)}, {})
    folder.mkdir()
    loop.train(settings, data, folder, torch.device("cpu"), resume=False, say=lambda *_, **__: None)
    rows = [row for row in read_log(folder / "log.jsonl") if "event" not in row]
    return [
        AfterStep(row, torch.load(folder / loop.CHECKPOINTS / f"step_{row['step']:08d}.pt", weights_only=True))
        for row in rows
    ]


def ready(settings: PretrainSettings) -> tuple[networks.Student, IBOT]:
    """Networks as a run prepares them, and their objective."""
    student, teacher = networks.build(settings)
    networks.freeze_unused(student, settings)
    teacher.eval()
    tokenizer = online_tokenizer(settings, teacher)
    return student, IBOT(student, teacher, tokenizer, settings.objective, torch.device("cpu"))


def noise(settings: PretrainSettings, *, empty: bool = False) -> Views:
    """Two images' crops as the loader would give them, some or no patches masked."""
    generator = torch.Generator().manual_seed(1)
    crops = settings.crops
    cell = (settings.network.patch_size or 16) if settings.network.arch == "vit" else 32

    def images(count: int, side: int) -> list[Tensor]:
        return [torch.randn(2, 3, side, side, generator=generator) for _ in range(count)]

    def masks(count: int, side: int) -> list[Tensor] | None:
        if masking_of(settings) is None:
            return None
        grid = side // cell
        drawn = [torch.rand(2, grid, grid, generator=generator) < 0.5 for _ in range(count)]
        for mask in drawn:
            mask[0, 0, 0] = True
        return [mask & False for mask in drawn] if empty else drawn

    batch = views(
        images(crops.global_crops, crops.global_size),
        images(crops.local_crops, crops.local_size),
        masks(crops.global_crops, crops.global_size),
    )
    if settings.masks.mask_crops == "all":
        small = views(images(crops.local_crops, crops.local_size), [], masks(crops.local_crops, crops.local_size))
        batch.locals, batch.local_masks = small.globals, small.masks
        batch.local_positions, batch.local_weights = small.positions, small.weights
    if settings.objective.patch_objective == "position":
        # Generic places, so that no two patches are equally far.
        batch.boxes = 32 * torch.rand(2 * crops.global_crops, 5, generator=generator)
        batch.boxes[:, 4] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    return batch
