"""One optimiser step of ours and of the published style, on the same inputs, masks and weights: for the benchmarks."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ibot_eval.training.parameter_groups import parameter_groups
from ibot_eval.training.updates import adamw, clip_each_, ema_, set_rates
from pretrain.config import CropSettings, HeadSettings, NetworkSettings, ObjectiveSettings, PretrainSettings
from pretrain.ibot import IBOT, StepResult, Temperatures, Views
from pretrain.masking import Masking, masked_positions
from pretrain.networks import build, freeze_unused
from pretrain.setup import autocast_of, online_tokenizer
from tests.published_network import Network as PublishedNetwork
from tests.published_step import PublishedStep, StepSettings


class Inputs(NamedTuple):
    """Crop-major, as a loader gives them."""

    globals: Tensor
    """(2 * B, 3, S, S)."""
    locals: Tensor | None
    masks: Tensor
    """(2 * B, h, w) bool."""
    positions: Tensor
    weights: Tensor
    batch: int


def settings_of(arch: str, batch: int, *, dino: bool = False, tiny: bool = False) -> PretrainSettings:
    """The published ones without drop path, whose draws could not be the same; ``tiny`` shrinks everything."""
    settings = PretrainSettings(NetworkSettings(arch=arch, drop_path=0.0))  # pyright: ignore[reportArgumentType]
    if tiny:
        settings = replace(
            settings,
            network=NetworkSettings(arch="vit", width=96, depth=3, heads=3, drop_path=0.0),
            head=HeadSettings(prototypes=512, hidden=256, bottleneck=64),
            crops=CropSettings(global_size=96, local_size=48, local_crops=4),
        )
    if dino:
        settings = replace(settings, objective=ObjectiveSettings(patch_weight=0.0))
    return replace(settings, optimiser=replace(settings.optimiser, batch_size=batch))


def inputs_of(settings: PretrainSettings, device: torch.device) -> Inputs:
    """Noise for images, and masks that cover the published mean share, so that no lucky draw helps."""
    crops, batch = settings.crops, settings.optimiser.batch_size
    side = crops.global_size // 16
    drawn = torch.Generator().manual_seed(0)
    noise = [
        torch.randn(number * batch, 3, size, size, generator=drawn).to(device)
        for number, size in ((crops.global_crops, crops.global_size), (crops.local_crops, crops.local_size))
    ]
    for seed in count():
        rng = np.random.default_rng(seed)
        masks = np.stack([Masking().sample(rng, (side, side), 0) for _ in range(crops.global_crops * batch)])
        if abs(masks.mean() - 0.15) < 0.02:
            break
    masked = masked_positions(masks, 16)
    where = (torch.from_numpy(masks), masked.index, masked.weight)
    return Inputs(noise[0], noise[1] if crops.local_crops else None, *(t.to(device) for t in where), batch=batch)


class OurStep:
    """What ``pretrain/train.py`` does between two batches, with its calls, and nothing of its watching."""

    def __init__(
        self, settings: PretrainSettings, device: torch.device, *, precision: str = "fp32", compiled: bool = False
    ) -> None:
        self.settings, self.device, self.precision = settings, device, precision
        student, teacher = build(settings)
        freeze_unused(student, settings)
        self.student, self.teacher = student.to(device).train(), teacher.to(device).eval()
        self.ibot = IBOT(
            self.student, self.teacher, online_tokenizer(settings, self.teacher), settings.objective, device
        )
        self.optimiser = adamw(parameter_groups(self.student))
        self.trained = [p for p in self.student.parameters() if p.requires_grad]
        self.prototypes = [p for name, p in self.student.named_parameters() if p.requires_grad and "last_layer" in name]
        averages = dict(self.teacher.named_parameters())
        self.pairs = [(averages[name], p) for name, p in self.student.named_parameters() if name in averages]
        self.plan = StepSettings()
        self.done = 0
        if compiled:
            self.student.trunk.compile()
            self.teacher.trunk.compile()

    def published(self) -> PublishedStep:
        """The published-style step from the same weights."""
        student, teacher = (
            PublishedNetwork.from_state(published_names(net), heads=net.backbone.num_heads).to(self.device)
            for net in (self.student, self.teacher)
        )
        teacher.backbone.masked_embed = None
        return PublishedStep(student, teacher, StepSettings(train_gain=not self.settings.head.norm_last_layer))

    def forward(self, inputs: Inputs) -> StepResult:
        now = self.plan.at(self.done)
        masked = self.ibot.tokenizer is not None
        views = Views(inputs.globals, inputs.batch, inputs.locals)
        if masked:
            views = replace(views, masks=inputs.masks, positions=inputs.positions, weights=inputs.weights)
        with autocast_of(self.precision, self.device):
            return self.ibot.losses(views, Temperatures(now["teacher_temp"], now["teacher_patch_temp"]))

    def step(self, inputs: Inputs) -> Tensor:
        """One optimiser step; its loss."""
        now = self.plan.at(self.done)
        set_rates(self.optimiser, now["lr"], now["wd"])
        result = self.forward(inputs)
        result.loss.backward()
        clip_each_(self.trained, self.settings.optimiser.clip)
        if now["epoch"] < self.settings.optimiser.freeze_last_layer:
            for parameter in self.prototypes:
                parameter.grad = None
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        ema_([t for t, _ in self.pairs], [s for _, s in self.pairs], now["momentum"])
        self.ibot.update_centres(result.cls_mean, result.patch_mean)
        self.done += 1
        return result.loss.detach()


def published_step(run: PublishedStep, inputs: Inputs) -> Tensor:
    """One step of the published style; its loss."""
    local = () if inputs.locals is None else inputs.locals.split(inputs.batch)
    return run.step(inputs.globals.split(inputs.batch), local, inputs.masks.split(inputs.batch))["loss"]


def published_names(network: nn.Module) -> dict[str, Tensor]:
    """Copies of a network's weights by published name."""
    named = {}
    for name, tensor in network.named_parameters():
        name = name.replace("trunk.backbone.net.", "backbone.").replace("trunk.masked_embed", "backbone.masked_embed")
        named[name] = tensor.detach().cpu().clone()
    return named
