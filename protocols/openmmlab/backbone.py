"""A checkpoint's network as a backbone that mmdet and mmsegmentation can build: images in, four maps out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from mmengine.logging import MMLogger
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn

from ibot_eval.backbone import Backbone
from ibot_eval.checkpoint import LoadedCheckpoint, load_checkpoint
from ibot_eval.errors import ConfigError
from ibot_eval.finetuning.adaptation import blocks_of, set_drop_path
from ibot_eval.finetuning.layer_decay import layer_of
from ibot_eval.models import ResNetBackbone, SwinBackbone
from ibot_eval.models.transformer import TransformerBackbone
from ibot_eval.settings import CheckpointSettings
from protocols.openmmlab.levels import STRIDES, BatchNorm, Pyramid, at_patch_stride, level_blocks, pad_to
from protocols.openmmlab.window_attention import BlocksAtSize

Staged = SwinBackbone | ResNetBackbone
"""Networks whose stages have the strides of the levels by themselves."""

_handed: list[tuple[CheckpointSettings, LoadedCheckpoint]] = []
"""At most one: what this process has loaded already."""


def hand_over(settings: CheckpointSettings, loaded: LoadedCheckpoint) -> None:
    """Backbones built from equal settings will be copies of ``loaded`` instead of reading the file again."""
    _handed[:] = [(settings, loaded)]


def level_widths(backbone: Backbone, blocks: Sequence[int] | None = None) -> tuple[int, ...]:
    """Channels of the four levels that :class:`CheckpointBackbone` makes of ``backbone``; ConfigError as there."""
    return tuple(backbone.dims[block] for block in _sources(backbone, blocks))


@MODELS.register_module()
class CheckpointBackbone(BaseModule):
    """The network of a checkpoint, with four maps as output.

    A ViT's maps come from four of its blocks. A Swin's and a ResNet's are the outputs of their four stages, a Swin's
    through a new LayerNorm each, as in mmdet's Swin; batch norms of a ResNet keep the checkpoint's statistics, as in
    mmdet's detectors.

    Args:
        checkpoint: fields of :class:`CheckpointSettings`. The network that :func:`hand_over` gave for equal settings is
            copied; else the file is read, and what was found goes to mmengine's log.
        blocks: see :func:`protocols.openmmlab.levels.level_blocks`; of ViTs only.
        drop_path: stochastic depth of the last block, growing linearly from 0 at the first.
        checkpoint_blocks: whether training recomputes each block in the backward pass.
        frozen: how many of the first blocks, and with them what comes before, are not trained and run in evaluation
            mode; -1 for none. With all of them only the deconvolutions are trained.
        norm: whether every level of a ViT goes through the network's last norm.
        level_maps: whether a ViT's maps are brought to strides 4, 8, 16 and 32 (see :class:`Pyramid`); else they stay
            at the patch's.
        window: side in patches of the windows that the attention of a ViT is confined to, except in the blocks that the
            levels come from; 0 for none.
        pyramid_norm: batch norm between deconvolutions.

    Attributes:
        out_channels: widths of the levels.
        strides: pixels between their cells.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the network has no such maps, or an argument does not fit it.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        blocks: Sequence[int] | None = None,
        drop_path: float = 0.0,
        checkpoint_blocks: bool = False,
        frozen: int = -1,
        norm: bool = False,
        level_maps: bool = True,
        window: int = 0,
        pyramid_norm: BatchNorm = "SyncBN",
    ) -> None:
        super().__init__()
        self.body = _network(_settings(checkpoint))
        self.blocks = _sources(self.body, blocks)
        self.out_channels = tuple(self.body.dims[block] for block in self.blocks)
        self.norm, self.window, self.frozen = norm, window, frozen
        self._check(drop_path, checkpoint_blocks)
        self.body.keep_positions, self.body.checkpoint_blocks = False, checkpoint_blocks
        if not isinstance(self.body, ResNetBackbone):
            set_drop_path(cast(Any, self.body), drop_path)
        staged = isinstance(self.body, Staged)
        self.norms, self.pyramid = None, None
        if isinstance(self.body, SwinBackbone):
            self.norms = nn.ModuleList(nn.LayerNorm(width) for width in self.out_channels)
        if level_maps and not staged:
            self.pyramid = Pyramid(self.out_channels, self.body.patch_size, pyramid_norm)
        self.strides = STRIDES if staged or level_maps else (self.body.patch_size,) * len(STRIDES)
        self._choose_trained()
        self.train()

    def _check(self, drop_path: float, checkpoint_blocks: bool) -> None:
        depth, name = self.body.depth, self.body.architecture
        if not -1 <= self.frozen <= depth:
            raise ConfigError(
                f"{self.frozen} blocks cannot be frozen: {name} has {depth}", todo=f"--freeze-blocks 0 to {depth}"
            )
        if self.window < 0:
            raise ConfigError(f"windows of {self.window} patches do not exist", todo="--window 14, or 0 for none")
        if self.window and not isinstance(self.body, TransformerBackbone):
            raise ConfigError(f"{name} cannot be given windows: only plain ViTs can", todo="--window 0")
        if isinstance(self.body, ResNetBackbone) and (drop_path or checkpoint_blocks):
            what = "--drop-path 0" if drop_path else "leave --checkpoint-blocks out"
            raise ConfigError(f"{name} has neither drop path nor recomputed blocks here", todo=what)

    def _choose_trained(self) -> None:
        """What no level depends on gets no gradient, which data-parallel training would wait for."""
        for name, parameter in self.body.named_parameters():
            layer = layer_in(self.body, name)
            used = layer <= self.blocks[-1] + 1 or name.startswith("net.rel_pos_bias.")
            if layer > self.body.depth and self.norm and isinstance(self.body, TransformerBackbone):
                used = used or any(parameter is own for own in self.body._last_norm.parameters())
            frozen = layer <= self.frozen or self.frozen == self.body.depth
            parameter.requires_grad_(used and not frozen and name != "net.mask_token")
        if self.norms is not None:
            self.norms.requires_grad_(self.frozen < self.body.depth)

    def init_weights(self) -> None:
        """Nothing: mmengine would have new weights made, and these are the checkpoint's."""

    def train(self, mode: bool = True) -> CheckpointBackbone:
        """Frozen blocks and a ResNet's batch norms stay in evaluation mode."""
        super().train(mode)
        if self.frozen == self.body.depth:
            self.body.eval()
        for block in _blocks(self.body)[: max(self.frozen, 0)]:
            block.eval()
        if isinstance(self.body, ResNetBackbone):
            for module in self.body.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Images (B, 3, H, W) of any size, normalised -> four maps.

        With level maps, and of stages, level of stride s is (B, D, ceil(H / s), ceil(W / s)) and its cells are s pixels
        apart; else each is (B, D, ceil(H / patch), ceil(W / patch)), and its cells divide the image evenly.
        """
        height, width = (int(side) for side in images.shape[-2:])
        multiple = self.body.patch_size
        if self.pyramid is not None and STRIDES[-1] % multiple == 0:
            multiple = STRIDES[-1]
        padded = pad_to(images, multiple)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.frozen < self.body.depth):
            maps = [features.permute(0, 3, 1, 2).contiguous() for features in self._maps(padded)]
        if self.pyramid is not None:
            return self.pyramid(maps, (height, width))
        if not isinstance(self.body, Staged):
            return at_patch_stride(maps, multiple, (height, width))
        return tuple(
            features[..., : -(-height // stride), : -(-width // stride)]
            for features, stride in zip(maps, STRIDES, strict=True)
        )

    def _maps(self, images: Tensor) -> list[Tensor]:
        """(B, h, w, D) of every level."""
        if isinstance(self.body, TransformerBackbone):
            return self._of_blocks(self.body, images)
        if isinstance(self.body, SwinBackbone):
            assert self.norms is not None
            maps = self._of_stages(self.body, images)
            return [norm(features) for norm, features in zip(self.norms, maps, strict=True)]
        return [output.patches for output in self.body.outputs(images, self.blocks, "none").blocks]

    def _of_blocks(self, body: TransformerBackbone, images: Tensor) -> list[Tensor]:
        patches = body.embed(images)
        grid = (patches.shape[1], patches.shape[2])
        tokens = body._tokens(patches.flatten(1, 2), grid)
        blocks = BlocksAtSize(body, grid)
        kept: dict[int, Tensor] = {}
        for index in range(self.blocks[-1] + 1):
            window = 0 if index in self.blocks else self.window

            def run(tokens: Tensor, index: int = index, window: int = window) -> Tensor:
                return blocks.run(index, tokens, window)

            tokens = body.run_block(run, tokens)
            if index in self.blocks:
                features = tokens[:, blocks.prefix :]
                kept[index] = (body.final_norm(features) if self.norm else features).unflatten(1, grid)
        return [kept[index] for index in self.blocks]

    def _of_stages(self, body: SwinBackbone, images: Tensor) -> list[Tensor]:
        features, maps = body.embed(images), []
        for stage in body.net.layers:
            features = stage.downsample(features)
            for block in stage.blocks:
                features = body.run_block(block, features)
            maps.append(features)
        return maps


def _settings(checkpoint: Mapping[str, Any]) -> CheckpointSettings:
    known = {field.name for field in fields(CheckpointSettings)}
    unknown = sorted(set(checkpoint) - known)
    if unknown:
        raise ConfigError(f"a checkpoint has no setting {unknown[0]!r}", todo=f"known are {', '.join(sorted(known))}")
    values = dict(checkpoint)
    if values.get("grid") is not None:
        values["grid"] = tuple(values["grid"])
    return CheckpointSettings(**values)


def _network(settings: CheckpointSettings) -> Backbone:
    """A float32 network on the CPU that nobody else has."""
    for given, loaded in _handed:
        if given == settings:
            return copy.deepcopy(loaded.backbone).cpu()
    loaded = load_checkpoint(settings)
    report = loaded.report
    MMLogger.get_current_instance().info(
        f"{report.architecture} ({report.family}) from {report.reference}: {report.matched} tensors filled, "
        f"{len(report.unexpected)} unknown, {len(report.ignored)} left out; " + "; ".join(report.notes)
    )
    return loaded.backbone


def _sources(backbone: Backbone, blocks: Sequence[int] | None) -> tuple[int, ...]:
    """The blocks, counted from 0, that the levels come from."""
    if isinstance(backbone, TransformerBackbone):
        return level_blocks(backbone.depth, blocks)
    if not isinstance(backbone, Staged):
        raise ConfigError(
            f"{backbone.architecture} has no maps at four depths", todo="choose a ViT, BEiT, Swin or ResNet checkpoint"
        )
    if blocks is not None:
        raise ConfigError(f"the levels of {backbone.architecture} are its stages", todo="leave the blocks out")
    lengths = [len(stage) for stage in _stages(backbone)]
    embedding = backbone.embed_patch_size if isinstance(backbone, SwinBackbone) else STRIDES[0]
    if len(lengths) != len(STRIDES) or embedding != STRIDES[0]:
        raise ConfigError(
            f"{backbone.architecture} has {len(lengths)} stages of which the first has stride {embedding}; "
            f"{len(STRIDES)} from stride {STRIDES[0]} on are needed",
            todo="choose another checkpoint",
        )
    return tuple(sum(lengths[: stage + 1]) - 1 for stage in range(len(STRIDES)))


def _stages(backbone: Staged) -> list[list[Any]]:
    if isinstance(backbone, SwinBackbone):
        return [list(stage.blocks) for stage in backbone.net.layers]
    return [list(getattr(backbone.net, stage)) for stage in backbone.stages]


def _blocks(backbone: Backbone) -> list[Any]:
    if isinstance(backbone, ResNetBackbone):
        return [block for stage in _stages(backbone) for block in stage]
    return blocks_of(backbone)


def layer_in(backbone: Backbone, name: str) -> int:
    """The layer of a parameter of ``backbone``, as :func:`ibot_eval.finetuning.layer_decay.layer_of` counts it.

    The stem of a ResNet is 0, and its residual blocks count through all stages.
    """
    name = name.removeprefix("net.")
    if not isinstance(backbone, ResNetBackbone):
        return layer_of(backbone, name)
    stage, _, rest = name.partition(".")
    if stage not in backbone.stages:
        return 0
    lengths = [len(blocks) for blocks in _stages(backbone)]
    return sum(lengths[: backbone.stages.index(stage)]) + int(rest.split(".")[0]) + 1
