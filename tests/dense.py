"""What all tests of detection and segmentation need: OpenMMLab's packages, and a checkpoint that trains in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from protocols.openmmlab import ready

HEADS = 2


def prepared() -> None:
    """Skips the module or test where a package of the extra ``dense`` is missing; else makes mm* importable."""
    for module in (*ready.PACKAGES, "pycocotools"):
        pytest.importorskip(module)
    ready.prepare()


def tiny_checkpoint(folder: Path, patch: int = 16, width: int = 32, depth: int = 4, image_size: int = 64) -> Path:
    """Random weights of a plain ViT with two heads; the file says so itself, and is read without further flags."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = VisionTransformer(image_size, patch, embed_dim=width, depth=depth, num_heads=HEADS, num_classes=0)
    about = {
        "family": "ibot",
        "eps": 1e-6,
        "heads": HEADS,
        "grid": [image_size // patch] * 2,
        "patch_size": patch,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }
    path = folder / f"vit_patch{patch}_width{width}_depth{depth}.safetensors"
    save_file(net.state_dict(), path, {"ibot_eval": json.dumps(about)})
    return path
