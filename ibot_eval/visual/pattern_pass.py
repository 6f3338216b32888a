"""A pass over a data set: the prototype of every patch, by batches; and the sample that k-means learns from."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ibot_eval import reducers
from ibot_eval.data.loading import explain_worker_death, image_loader
from ibot_eval.data.splits import ImageSplit
from ibot_eval.errors import DataError
from ibot_eval.image_pass import Engine, autocast, evaluating
from ibot_eval.visual.prototypes import Level, Prototypes

SAMPLE_IMAGES, SAMPLE_PATCHES = 500, 64
"""k-means learns from so many images, and so many patches of each; at level cls from the images below."""
SAMPLE_CLS = 20_000


class Pass(NamedTuple):
    """One batch, on the host once ``ready`` has happened."""

    images: np.ndarray
    bad: list[tuple[int, str]]
    values: list[Tensor]
    ready: torch.cuda.Event | None


def passes(
    engine: Engine, split: ImageSplit, prototypes: Prototypes, level: Level, batches: Sequence[range]
) -> Generator[Pass, None, None]:
    """(index, confidence, brightness), each (B, N), per batch; on CUDA the next pass runs while one is handed out."""
    device, backbone = engine.device, engine.loaded.backbone
    cuda = device.type == "cuda"
    patch = backbone.patch_size
    loader = image_loader(
        split, engine.transform, batches, engine.workers, bad_images=engine.bad_images, pin_memory=cuda
    )
    waiting = None
    backbone.to(device)
    prototypes.to(device)
    with closing(loader), evaluating(backbone, prototypes):
        for batch in loader:
            values: list[Tensor] = []
            if len(batch.indices):
                pixels = batch.images.to(device, non_blocking=True)
                with torch.inference_mode():
                    bright = pixels.amax(dim=1, keepdim=True).float()
                    bright = bright.mean(dim=(1, 2, 3))[:, None] if level == "cls" else F.avg_pool2d(bright, patch)
                    with autocast(device, engine.precision):
                        output = backbone.outputs(engine.transform.normalize(pixels)).blocks[0]
                        tokens = output.cls[:, None] if level == "cls" else output.patches.flatten(1, 2)
                        index, confidence = prototypes.nearest(tokens)
                    values = [_to_host(v, cuda) for v in (index.to(torch.int32), confidence, bright.flatten(1))]
            event = torch.cuda.Event() if cuda else None
            if event is not None:
                event.record()
            ready = Pass(batch.indices.numpy(), list(batch.bad), values, event)
            if cuda:
                ready, waiting = waiting, ready
            if ready is not None:
                yield ready
    if waiting is not None:
        yield waiting


def _to_host(values: Tensor, cuda: bool) -> Tensor:
    if not cuda:
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def sample(engine: Engine, split: ImageSplit, level: Level) -> np.ndarray:
    """(n, D) float32: tokens of images spread evenly over the split, and of each the patches that its index draws."""
    count = min(len(split), SAMPLE_CLS if level == "cls" else SAMPLE_IMAGES)
    chosen = np.linspace(0, len(split) - 1, count).round().astype(int)
    batches = [chosen[i : i + engine.batch_size].tolist() for i in range(0, count, engine.batch_size)]
    backbone, device = engine.loaded.backbone.to(engine.device), engine.device
    rows: list[np.ndarray] = []
    loader = image_loader(split, engine.transform, batches, engine.workers, bad_images=engine.bad_images)
    with explain_worker_death(), closing(loader), evaluating(backbone):
        for batch in loader:
            if not len(batch.indices):
                continue
            with torch.inference_mode(), autocast(device, engine.precision):
                output = backbone.outputs(engine.transform.normalize(batch.images.to(device))).blocks[0]
                tokens = output.cls[:, None] if level == "cls" else output.patches.flatten(1, 2)
                if tokens.shape[1] > SAMPLE_PATCHES:
                    order = reducers.drawn(batch.indices.tolist(), tokens.shape[1], device)[:, :SAMPLE_PATCHES]
                    tokens = tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[2]))
            rows.append(tokens.flatten(0, 1).float().cpu().numpy())
    if not rows:
        raise DataError(f"no image of {split.name} can be used")
    sample = np.concatenate(rows)
    if not np.isfinite(sample).all():
        raise DataError(
            f"tokens of {split.name} are NaN or infinite", todo="check the checkpoint's weights: ibot-eval inspect"
        )
    return sample
