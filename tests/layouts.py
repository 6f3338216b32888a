"""Makers of small checkpoints in the published layouts, written from the layouts' descriptions, not from the reader.

Each takes a timm network (or its state dict) and returns what ``torch.save`` would be given.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.resnet import Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

State = dict[str, Tensor]


def scrambled(net: nn.Module, seed: int = 0) -> Any:
    """The network in eval mode with every parameter and statistic random, so that no term of it can be lost unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if not tensor.is_floating_point():
                continue
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
            if name.endswith("running_var"):
                tensor.copy_(1 + tensor.abs())
            elif name.endswith("weight") and tensor.ndim == 1:
                tensor.add_(1)
    return net.eval()


def vit(seed: int = 0, **changes: Any) -> VisionTransformer:
    """48 wide, 2 deep, 3 heads, 8-px patches at 32 px, LayerNorms with timm's eps 1e-6."""
    arguments: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return scrambled(VisionTransformer(**{**arguments, "num_classes": 0, **changes}), seed)


def beit(seed: int = 0, **changes: Any) -> Beit:
    arguments: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    arguments |= {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": 0.1, "num_classes": 0}
    return scrambled(Beit(**{**arguments, **changes}), seed)


def swin(seed: int = 0, **changes: Any) -> SwinTransformer:
    arguments: dict[str, Any] = {"embed_dim": 8, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8), "num_classes": 0}
    return scrambled(SwinTransformer(**{**arguments, **changes}), seed)


def resnet(seed: int = 0, **changes: Any) -> ResNet:
    arguments: dict[str, Any] = {"block": Bottleneck, "layers": (1, 1, 1, 1), "num_classes": 0}
    return scrambled(ResNet(**{**arguments, **changes}), seed)


def eva(seed: int = 0, **changes: Any) -> Eva:
    """The shape of DINOv3: rotary positions, LayerScale, four registers, eps 1e-5."""
    arguments: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 0,
        "global_pool": "token",
        "qkv_bias": False,
        "init_values": 1e-5,
        "rope_type": "dinov3",
        "rope_temperature": 100,
        "rope_rotate_half": True,
        "use_rot_pos_emb": True,
        "use_abs_pos_emb": False,
        "num_reg_tokens": 4,
        "use_fc_norm": False,
        "dynamic_img_size": True,
        "norm_layer": lambda width, **rest: nn.LayerNorm(width, eps=1e-5, **rest),
    }
    return scrambled(Eva(**{**arguments, **changes}), seed)


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def projection_head(width: int = 48, k: int = 10, shared: bool = True, seed: int = 0) -> State:
    """iBOT's head: three linear layers at 0, 2, 4, bottleneck 6, weight-normalised last layers."""
    g = torch.Generator().manual_seed(100 + seed)
    shapes = {"mlp.0": (16, width), "mlp.2": (16, 16), "mlp.4": (6, 16)}
    state = {}
    for name, shape in shapes.items():
        state[f"{name}.weight"] = torch.randn(shape, generator=g)
        state[f"{name}.bias"] = torch.randn(shape[0], generator=g)
    state["last_layer.weight_g"] = torch.ones(k, 1)
    state["last_layer.weight_v"] = torch.randn(k, 6, generator=g)
    if shared:
        state["last_layer2.weight_g"] = state["last_layer.weight_g"]
        state["last_layer2.weight_v"] = state["last_layer.weight_v"]
    else:
        state["last_layer2.weight_g"] = torch.full((k + 2, 1), 2.0)
        state["last_layer2.weight_v"] = torch.randn(k + 2, 6, generator=g)
    return state


def ibot_full(student: nn.Module, teacher: nn.Module) -> dict[str, Any]:
    """Training file: student under DDP's module., teacher without it, arguments, epoch, loss, optimiser."""
    return {
        "student": {
            **prefixed(student.state_dict(), "module.backbone."),
            "module.backbone.masked_embed": torch.zeros(1, 48),
            **prefixed(projection_head(seed=1), "module.head."),
        },
        "teacher": {
            **prefixed(teacher.state_dict(), "backbone."),
            **prefixed(projection_head(seed=2), "head."),
        },
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        "epoch": 3,
        "args": argparse.Namespace(arch="vit_small", patch_size=8, lr=np.float64(0.1), seeds=np.arange(3)),
        "fp16_scaler": {"scale": 1.0},
        "ibot_loss": {"center": torch.zeros(1, 10), "center2": torch.zeros(1, 1, 10)},
    }


def dino_full(net: nn.Module) -> dict[str, Any]:
    head = {name: tensor for name, tensor in projection_head().items() if "last_layer2" not in name}
    wrapped = {**prefixed(net.state_dict(), "module.backbone."), **prefixed(head, "module.head.")}
    return {"student": wrapped, "teacher": dict(wrapped), "dino_loss": {"center": torch.zeros(1, 10)}}


def dinov2(net: VisionTransformer) -> State:
    """From a timm network with LayerScale; one with registers must store no positions for prefix tokens."""
    state = {**net.state_dict(), "mask_token": torch.zeros(1, net.embed_dim)}
    if "reg_token" in state:
        state["register_tokens"] = state.pop("reg_token")
        # The published [CLS] has a position; any split of the sum will do.
        position = torch.full((1, 1, net.embed_dim), 0.25)
        state["cls_token"] = state["cls_token"] - position
        state["pos_embed"] = torch.cat([position, state["pos_embed"]], dim=1)
    if net.blocks[0].mlp.fc1.out_features == 2 * net.blocks[0].mlp.fc2.in_features:
        state = {n.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): t for n, t in state.items()}
    return state


def chunked(state: State, per_chunk: int = 1) -> State:
    """DINOv2's block chunks: blocks.CHUNK.BLOCK.…"""
    renamed = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            parts.insert(1, str(int(parts[1]) // per_chunk))
        renamed[".".join(parts)] = tensor
    return renamed


def dinov3(net: Eva) -> State:
    """Published names, with biases whose key part is masked out."""
    state: State = {}
    for name, tensor in net.state_dict().items():
        name = name.replace("reg_token", "storage_tokens")
        name = name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")
        name = name.replace("fc1_g", "w1").replace("fc1_x", "w2")
        name = name.replace("mlp.fc2", "mlp.w3") if "blocks.0.mlp.fc1_g.weight" in net.state_dict() else name
        if name.endswith(("q_bias", "v_bias")):
            continue
        state[name] = tensor
    width = net.embed_dim
    for index, block in enumerate(net.blocks):
        query = torch.zeros(width) if block.attn.q_bias is None else block.attn.q_bias.detach()
        value = torch.zeros(width) if block.attn.v_bias is None else block.attn.v_bias.detach()
        state[f"blocks.{index}.attn.qkv.bias"] = torch.cat([query, torch.zeros(width), value])
        state[f"blocks.{index}.attn.qkv.bias_mask"] = torch.full((3 * width,), float("nan"))
    return {**state, "mask_token": torch.zeros(1, 1, width), "rope_embed.periods": torch.ones(4)}


def beit_pretrained(net: Beit) -> dict[str, Any]:
    state = {**net.state_dict(), "mask_token": torch.zeros(1, 1, 48)}
    state |= {"lm_head.weight": torch.zeros(20, 48), "lm_head.bias": torch.zeros(20)}
    return {"model": state}


def beit_indices(state: State, tokens: int = 17) -> State:
    extra = {f"blocks.{i}.attn.relative_position_index": torch.zeros(tokens, tokens, dtype=torch.long) for i in (0, 1)}
    return {**state, **extra}


def sincos(rows: int, columns: int, width: int, first: str) -> Tensor:
    """Element by element: quarter by quarter sine and cosine of one coordinate, then of the other."""
    table = torch.zeros(1, rows * columns, width)
    quarter = width // 4
    for row in range(rows):
        for column in range(columns):
            one, two = (column, row) if first == "column" else (row, column)
            for i in range(quarter):
                frequency = 1 / 10000 ** (i / quarter)
                values = (np.sin(one * frequency), np.cos(one * frequency))
                values += (np.sin(two * frequency), np.cos(two * frequency))
                for part, value in enumerate(values):
                    table[0, row * columns + column, part * quarter + i] = float(value)
    return table


def with_sincos(net: VisionTransformer, first: str) -> VisionTransformer:
    """[CLS] has position zero in both MAE and MoCo v3."""
    rows, columns = net.patch_embed.grid_size
    with torch.no_grad():
        net.pos_embed[:, :1] = 0
        net.pos_embed[:, 1:] = sincos(rows, columns, net.embed_dim, first)
    return net


def mae_pretrained(net: VisionTransformer) -> dict[str, Any]:
    decoder = {
        "mask_token": torch.zeros(1, 1, 16),
        "decoder_pos_embed": torch.zeros(1, 17, 16),
        "decoder_embed.weight": torch.zeros(16, 48),
        "decoder_blocks.0.norm1.weight": torch.zeros(16),
        "decoder_norm.weight": torch.zeros(16),
        "decoder_pred.weight": torch.zeros(192, 16),
    }
    return {"model": {**net.state_dict(), **decoder}}


def mocov3(base: nn.Module, momentum: nn.Module) -> dict[str, Any]:
    head = {"head.0.weight": torch.zeros(8, 48), "head.1.running_mean": torch.zeros(8)}
    state = prefixed({**base.state_dict(), **head}, "module.base_encoder.")
    state |= prefixed({**momentum.state_dict(), **head}, "module.momentum_encoder.")
    state |= {"module.predictor.0.weight": torch.zeros(8, 8)}
    return {"epoch": 300, "arch": "vit_small", "state_dict": state, "optimizer": {"state": {}}}


def swin_published(net: SwinTransformer, head: bool = False) -> State:
    """Microsoft's and iBOT's names: merging at the end of a stage, index buffers kept, plain ``head``."""
    state: State = {}
    for name, tensor in net.state_dict().items():
        parts = name.split(".")
        if "downsample" in parts:
            parts[1] = str(int(parts[1]) - 1)
        state[".".join(parts)] = tensor
    state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(4, 4, dtype=torch.long)
    state["layers.0.blocks.1.attn_mask"] = torch.zeros(1, 4, 4)
    if head:
        state |= {"head.weight": torch.ones(3, net.num_features), "head.bias": torch.zeros(3)}
    return state


def with_classifier(state: State, width: int = 48, classes: int = 5, name: str = "head") -> State:
    g = torch.Generator().manual_seed(7)
    weight = torch.randn(classes, width, generator=g)
    return {**state, f"{name}.weight": weight, f"{name}.bias": torch.randn(classes, generator=g)}
