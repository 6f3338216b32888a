"""Work per image of this run's step, for MFU."""

from __future__ import annotations

import torch

from pretrain.config import PretrainSettings
from pretrain.ibot import IBOT, Temperatures, Views
from pretrain.networks import mask_cell
from pretrain.setup import autocast_of, masking_of
from pretrain.throughput import Arithmetic, PeakRate, count_flops, mfu, peak_rate


class Utilisation:
    """Counts the matrix products of one image's forward and backward passes, at the mean share of masked patches.

    Args:
        ibot: with networks that are neither compiled nor wrapped yet; their gradients must be clear, and are left so.
        settings: of the run.
        device: of the networks.
        precision: fp32 or bf16.
    """

    def __init__(self, ibot: IBOT, settings: PretrainSettings, device: torch.device, precision: str) -> None:
        crops, opt = settings.crops, settings.optimiser
        # Activations that are computed again are no work of the model's.
        backbone = ibot.student.backbone  # type: ignore[attr-defined]
        before, backbone.checkpoint_blocks = backbone.checkpoint_blocks, False
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            views = _blank_views(settings, mask_cell(ibot.teacher.backbone), device)

            def step() -> None:
                with autocast_of(precision, device):
                    ibot.losses(views, Temperatures(0.04, 0.04)).loss.backward()

            self.flops_per_image = count_flops(step)
        backbone.checkpoint_blocks = before
        for parameter in backbone.parameters():
            parameter.grad = None
        ibot.student.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
        arithmetic: Arithmetic = "fp32"
        if precision == "bf16":
            arithmetic = "bf16"
        elif device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            arithmetic = "tf32"
        tokens = opt.batch_size * crops.global_crops * (crops.global_size // mask_cell(backbone)) ** 2
        width = backbone.dims[-1]
        self.peak: PeakRate = peak_rate(device, arithmetic, (min(tokens, 4096), width, 4 * width))

    def percent(self, images_per_second: float) -> float:
        """MFU at this many images per second and process."""
        return mfu(self.flops_per_image * images_per_second, 1.0, self.peak)


def _blank_views(settings: PretrainSettings, cell: int, device: torch.device) -> Views:
    crops = settings.crops
    side = crops.global_size // cell
    images = torch.zeros(crops.global_crops, 3, crops.global_size, crops.global_size, device=device)
    local = torch.zeros(crops.local_crops, 3, crops.local_size, crops.local_size, device=device)
    views = Views(images, 1, local if crops.local_crops else None)
    if masking_of(settings) is not None:
        ratios = settings.masks.pred_ratio
        count = max(1, round(crops.global_crops * side * side * sum(ratios) / len(ratios)))
        views.masks = torch.zeros(crops.global_crops, side, side, dtype=torch.bool, device=device)
        views.positions = torch.arange(count, device=device)
        views.weights = torch.full((count,), 1 / count, device=device)
    if settings.objective.patch_objective == "position":
        views.boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0]], device=device).expand(crops.global_crops, -1)
    return views
