"""A tiny deterministic network, images and checkpoint, for tests of what stands between networks and protocols."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ibot_eval.backbone import Backbone, BlockOutput, Norm, Outputs
from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import BadImage

SIDE, PATCH, WIDTH, DEPTH, HEADS = 8, 4, 6, 3, 2
TRANSFORM = EvalTransform(SIDE, SIDE, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


class FakeBackbone(Backbone):
    """Three blocks over a 2x2 grid. It counts the images it sees, and can be told to die, dawdle or give NaN."""

    architecture, family = "fake", "fake"
    depth, num_heads, patch_size = DEPTH, HEADS, PATCH

    def __init__(
        self,
        *,
        has_cls: bool = True,
        registers: int = 1,
        dims: tuple[int, ...] = (WIDTH,) * DEPTH,
        kill_after: int | None = None,
        seconds_per_pass: float = 0.0,
        nan_at: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.has_cls, self.num_registers, self.dims = has_cls, registers, dims
        self.kill_after, self.seconds_per_pass, self.nan_at, self.scale = kill_after, seconds_per_pass, nan_at, scale
        self.forwarded, self.passes = 0, 0
        generator = torch.Generator().manual_seed(0)
        widths = [3 * PATCH * PATCH, *dims]
        self.mix = nn.ParameterList(
            torch.randn(a, b, generator=generator) / a**0.5 for a, b in itertools.pairwise(widths)
        )
        self.first = nn.Parameter(torch.randn(1, registers + has_cls, widths[0], generator=generator))
        self.norm = nn.LayerNorm(dims[-1])
        nn.init.normal_(self.norm.weight, generator=generator)
        nn.init.normal_(self.norm.bias, generator=generator)

    def final_norm(self, tokens: Tensor) -> Tensor:
        return self.norm(tokens)

    def outputs(
        self,
        images: Tensor,
        blocks: Sequence[int] = (-1,),
        norm: Norm = "published",
        attention_block: int | None = None,
    ) -> Outputs:
        assert not self.training
        self.passes += 1
        self.forwarded += len(images)
        time.sleep(self.seconds_per_pass)
        if self.kill_after is not None and self.forwarded > self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        height, width = images.shape[-2] // PATCH, images.shape[-1] // PATCH
        patches = nn.functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), patches], dim=1)
        states, attention = [], None
        for index, mix in enumerate(self.mix):
            # One small product per image, so that a batch's size cannot change the last bit.
            tokens = torch.stack([torch.tanh(t @ mix) for t in tokens])
            if self.has_cls:
                tokens = torch.cat([tokens[:, :1] + tokens.mean(1, keepdim=True), tokens[:, 1:]], dim=1)
            states.append(tokens * self.scale)
            if attention_block is not None and index == self.resolve_block(attention_block):
                scores = tokens @ tokens.transpose(1, 2)
                attention = torch.stack([scores, -scores], dim=1).softmax(-1)
        result = []
        for block in blocks:
            index = self.resolve_block(block)
            kind = self.published_norm(index) if norm == "published" else norm
            state = self.final_norm(states[index]) if kind == "final" else states[index]
            start = self.has_cls + self.num_registers
            if self.nan_at is not None and self.nan_at < len(state):
                state = state.index_fill(0, torch.tensor([self.nan_at]), float("nan"))
            grid = state[:, start:].unflatten(1, (height, width))
            cls = state[:, 0] if self.has_cls else grid.mean(dim=(1, 2))
            result.append(BlockOutput(cls, state[:, int(self.has_cls) : start], grid))
        return Outputs(tuple(result), attention)


class FakeSplit(ImageSplit):
    """n images of noise, the same in every process."""

    def __init__(self, n: int, name: str = "train", bad: Sequence[int] = ()) -> None:
        self.name, self.bad = name, set(bad)
        self.image_ids = [f"{name}/{i:03d}.png" for i in range(n)]
        self.labels = np.arange(n, dtype=np.int64) % 3

    def _fingerprint(self) -> str:
        return f"{self.name}-{len(self)}"

    def pixels(self, i: int) -> np.ndarray:
        """(8, 8, 3) uint8."""
        return np.random.default_rng([i, len(self.name)]).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)

    def load(self, i: int) -> Image.Image:
        if i in self.bad:
            raise BadImage(f"{self.image_ids[i]} cannot be decoded")
        return Image.fromarray(self.pixels(i))

    def take(self, indices: Sequence[int] | np.ndarray) -> ImageSplit:
        raise NotImplementedError


class Suicidal(ImageSplit):
    """Image 5 ends the process that loads it, the hard way."""

    def __init__(self, n: int) -> None:
        self.name, self.labels = "suicidal", np.zeros(n, np.int64)
        self.image_ids = [str(i) for i in range(n)]

    def load(self, i: int) -> Image.Image:
        if i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return Image.new("RGB", (40, 40))

    def take(self, indices: Sequence[int] | np.ndarray) -> ImageSplit:
        raise NotImplementedError

    def _fingerprint(self) -> str:
        return ""


def fake_loaded(backbone: Backbone | None = None, head: nn.Module | None = None, sha256: str = "a" * 64) -> Any:
    """What ``load_checkpoint`` would give."""
    report = SimpleNamespace(sha256=sha256, key="teacher", overrides={}, identity={}, reference="fake.pth")
    return SimpleNamespace(backbone=backbone or FakeBackbone(), projection_head=head, classifier=None, report=report)


def fake_images(split: FakeSplit, indices: Sequence[int]) -> Tensor:
    """(B, 3, 8, 8) float32, normalised by hand rather than by the transform under test."""
    pixels = np.stack([split.pixels(i) for i in indices]).astype(np.float32)
    return torch.from_numpy(((pixels / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2).copy())
