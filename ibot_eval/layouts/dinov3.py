"""DINOv3, as timm's Eva."""

from __future__ import annotations

from functools import partial

from timm.models.eva import Eva, checkpoint_filter_fn
from torch import nn

from ibot_eval.layouts.blueprint import Blueprint, Hints, Tensors, mlp_ratio, need, number_of
from ibot_eval.layouts.families import number_of_heads
from ibot_eval.layouts.unwrapping import Network
from ibot_eval.layouts.vit import patch_size

EPS = 1e-5


def is_dinov3(network: Network) -> bool:
    """Published layout (storage tokens), or timm's (registers, LayerScale, and no position embeddings)."""
    trunk = network.trunk
    return "storage_tokens" in trunk or (
        "reg_token" in trunk and "blocks.0.gamma_1" in trunk and "pos_embed" not in trunk
    )


def read_dinov3(network: Network, hints: Hints) -> Blueprint:
    """A DINOv3 ViT. Rotary positions have no weights, so any number of them is read at any size.

    Raises:
        CheckpointError: the number of heads cannot be inferred, or flags contradict the tensors.
    """
    tensors = dict(network.trunk)
    biases = [name for name in tensors if name.endswith(".attn.qkv.bias")]
    if biases and not any(tensors[name].nan_to_num().any() for name in biases):
        # The distilled models publish biases of zero; timm's networks for them have none.
        for name in biases:
            del tensors[name]
    has_bias = any(name.endswith((".attn.qkv.bias", ".attn.q_bias")) for name in tensors)
    width, depth = tensors["patch_embed.proj.weight"].shape[0], number_of(tensors, "blocks.")
    patch = patch_size(tensors, hints.patch_size)
    gated = next((tensors[f"blocks.0.mlp.{name}.weight"] for name in ("w1", "fc1_g") if _has(tensors, name)), None)
    first = gated if gated is not None else need(tensors, "blocks.0.mlp.fc1.weight")
    registers = tensors["storage_tokens" if "storage_tokens" in tensors else "reg_token"].shape[1]
    side = hints.grid or (256 // patch, 256 // patch)
    net = Eva(
        img_size=(side[0] * patch, side[1] * patch),
        patch_size=patch,
        num_classes=0,
        global_pool="token",
        embed_dim=width,
        depth=depth,
        num_heads=number_of_heads("dinov3", width, depth, hints.heads),
        qkv_bias=has_bias,
        mlp_ratio=mlp_ratio(first.shape[0], width),
        swiglu_mlp=gated is not None,
        swiglu_align_to=1,  # Keeps gate and value apart, as the published tensors are.
        init_values=1e-5,
        num_reg_tokens=registers,
        use_abs_pos_emb=False,
        use_rot_pos_emb=True,
        rope_type="dinov3",
        rope_temperature=100,
        rope_rotate_half=True,
        use_fc_norm=False,
        dynamic_img_size=True,
        norm_layer=partial(nn.LayerNorm, eps=hints.eps or EPS),
        device="meta",
    )
    return Blueprint(net, checkpoint_filter_fn(tensors, net), "dinov3", hints.grid, hints.mean, hints.std)


def _has(tensors: Tensors, layer: str) -> bool:
    return f"blocks.0.mlp.{layer}.weight" in tensors
