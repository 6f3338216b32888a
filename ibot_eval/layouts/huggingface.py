"""Hugging Face transformers' ViT, DINOv2, MAE, DeiT and BEiT, renamed to the published layouts."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from ibot_eval.layouts.blueprint import Hints, Tensors, in_beits_layout
from ibot_eval.layouts.unwrapping import Network

MARK = "embeddings.patch_embeddings.projection.weight"
VIT_EPS = 1e-12
"""transformers' default for ViT; DINOv2 keeps 1e-6."""

NAMES = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.", ""),
    (r"^encoder\.layer\.", "blocks."),
    (r"^encoder\.relative_position_bias\.", "rel_pos_bias."),
    (r"\.attention\.attention\.relative_position_bias\.", ".attn."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"^(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.mlp\.weights_in\.", ".mlp.w12."),
    (r"\.mlp\.weights_out\.", ".mlp.w3."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.lambda_([12])$", r".gamma_\1"),
    (r"^layernorm\.", "norm."),
    (r"^pooler\.layernorm\.", "fc_norm."),
)


def is_hugging_face(network: Network) -> bool:
    """Whether a network has transformers' names."""
    return MARK in network.trunk


def republish(network: Network, hints: Hints) -> tuple[Network, Hints]:
    """The network under published names, separate query, key and value fused, and hints completed by its defaults."""
    trunk: Tensors = {}
    for name, tensor in network.trunk.items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        trunk[name] = tensor
    for name in [name for name in trunk if re.fullmatch(r"blocks\.\d+\.attn\.query\.weight", name)]:
        stem = name.removesuffix("query.weight")
        if f"{stem}key.weight" not in trunk or f"{stem}value.weight" not in trunk:
            continue  # Reported as missing, with the fused name, when the network is filled.
        parts = ("query", "key", "value")
        trunk[f"{stem}qkv.weight"] = torch.cat([trunk.pop(f"{stem}{part}.weight") for part in parts])
        biases = [trunk.pop(f"{stem}{part}.bias", None) for part in parts]
        query, key, value = biases
        if query is not None and value is not None:
            if key is None:
                trunk[f"{stem}q_bias"], trunk[f"{stem}v_bias"] = query, value
            else:
                trunk[f"{stem}qkv.bias"] = torch.cat([query, key, value])
    siblings = dict(network.siblings)
    if not any(name in trunk for name in ("norm.weight", "fc_norm.weight")):
        # BEiT's masked image modelling keeps the last norm of its mean-pooled trunk beside the trunk.
        for part in ("weight", "bias"):
            if f"layernorm.{part}" in siblings:
                trunk[f"norm.{part}"] = siblings.pop(f"layernorm.{part}")
    own = Hints(eps=VIT_EPS, family="hf-vit")
    if "blocks.0.ls1.gamma" in trunk or "register_tokens" in trunk:
        own = Hints(family="dinov2")
    elif any(name.startswith("decoder.decoder_") for name in network.siblings):
        own = replace(own, family="mae")
    elif in_beits_layout(trunk):
        own = replace(own, family="beit")
    return replace(network, trunk=trunk, siblings=siblings), hints.over(own)
