"""The published networks once more, for the second witness: an explicit ViT and the three-layer projection head.

Nothing here comes from the product or from timm. Parameters are named as in the published checkpoints, so that states
move freely between the two. There is no drop path: a comparison step for step needs it off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.proj((attention @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbedding(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images)


class ViT(nn.Module):
    """Images (B, 3, H, W) and, for the student, masks bool (B, h, w) -> tokens (B, 1 + h*w, D) after the last norm."""

    def __init__(self, width: int, depth: int, heads: int, patch: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(width, patch)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + positions, width))
        self.masked_embed: nn.Parameter | None = nn.Parameter(torch.zeros(1, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def positions(self, h: int, w: int) -> Tensor:
        """(1, 1 + h*w, D). The published resize goes by a scale factor with a nudge of 0.1, without antialiasing."""
        side = math.isqrt(self.pos_embed.shape[1] - 1)
        if (h, w) == (side, side):
            return self.pos_embed
        grid = self.pos_embed[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, scale_factor=((h + 0.1) / side, (w + 0.1) / side), mode="bicubic")
        assert grid.shape[-2:] == (h, w)
        return torch.cat([self.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, images: Tensor, masks: Tensor | None = None) -> Tensor:
        patches = self.patch_embed(images)
        h, w = patches.shape[-2:]
        patches = patches.flatten(2).transpose(1, 2)
        if masks is not None:
            assert self.masked_embed is not None, "this network takes no masks"
            patches = torch.where(masks.flatten(1)[..., None], self.masked_embed, patches)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.positions(h, w)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class LastLayer(nn.Module):
    """Linear without bias whose row k is ``weight_g[k]`` times the direction of ``weight_v[k]``."""

    def __init__(self, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(prototypes, 1))
        self.weight_v = nn.Parameter(nn.Linear(bottleneck, prototypes, bias=False).weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight_g * self.weight_v / self.weight_v.norm(dim=1, keepdim=True)).T


class Head(nn.Module):
    """Tokens (B, 1 + N, D) -> logits of [CLS] (B, K) and of the patch tokens (B, N, K)."""

    def __init__(self, width: int, hidden: int, bottleneck: int, prototypes: int, patch_prototypes: int | None) -> None:
        super().__init__()
        hidden_layers = [nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()]
        self.mlp = nn.Sequential(*hidden_layers, nn.Linear(hidden, bottleneck))
        self.last_layer = LastLayer(bottleneck, prototypes)
        self.last_layer2 = None if patch_prototypes is None else LastLayer(bottleneck, patch_prototypes)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = F.normalize(self.mlp(tokens), dim=-1)
        return self.last_layer(x[:, 0]), (self.last_layer2 or self.last_layer)(x[:, 1:])


class Network(nn.Module):
    """Student or teacher: a ViT and its projection head; ``last_layer2`` exists only where patches have their own."""

    def __init__(
        self,
        *,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        patch: int = 16,
        positions: int = 196,
        mlp_hidden: int = 1536,
        head_hidden: int = 2048,
        bottleneck: int = 256,
        prototypes: int = 8192,
        patch_prototypes: int | None = None,
        masked: bool = True,
    ) -> None:
        super().__init__()
        self.backbone = ViT(width, depth, heads, patch, positions, mlp_hidden)
        self.head = Head(width, head_hidden, bottleneck, prototypes, patch_prototypes)
        if not masked:
            self.backbone.masked_embed = None

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], *, heads: int, masked: bool | None = None) -> Network:
        """A network of the state's own shape and weights (copies).

        Args:
            state: tensors by published name. ``head.last_layer2`` means a last layer of the patches' own, so it has to
                be left out where it only repeats ``head.last_layer``.
            heads: attention heads, which no tensor tells.
            masked: whether there is a masked embedding; False leaves it out of a state that has one (a teacher made
                from a student's state).
        """
        masked = "backbone.masked_embed" in state if masked is None else masked
        if not masked:
            state = {name: tensor for name, tensor in state.items() if name != "backbone.masked_embed"}
        own = state.get("head.last_layer2.weight_v")
        net = cls(
            width=state["backbone.cls_token"].shape[-1],
            depth=len({name.split(".")[2] for name in state if name.startswith("backbone.blocks.")}),
            heads=heads,
            patch=state["backbone.patch_embed.proj.weight"].shape[-1],
            positions=state["backbone.pos_embed"].shape[1] - 1,
            mlp_hidden=state["backbone.blocks.0.mlp.fc1.weight"].shape[0],
            head_hidden=state["head.mlp.0.weight"].shape[0],
            bottleneck=state["head.mlp.4.weight"].shape[0],
            prototypes=state["head.last_layer.weight_v"].shape[0],
            patch_prototypes=None if own is None else own.shape[0],
            masked=masked,
        )
        net.load_state_dict(dict(state))
        return net

    def forward(self, images: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.head(self.backbone(images, masks))
