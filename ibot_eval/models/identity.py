"""What a network computes besides its tensors, as facts that can be compared and hashed."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, nn

from ibot_eval.backbone import Backbone


def identity_of(backbone: Backbone, **more: Any) -> dict[str, Any]:
    """What shapes the function of a network besides its tensors, so that equal tensors in unlike networks differ.

    Args:
        backbone: as it is evaluated.
        more: further facts, e.g. timm's name of the network.

    Returns:
        JSON-ready: family, resize rule, heads, eps of norms, trained grid, patch size, depth, width, prefix tokens,
        classes, and the SHA-256 of the printed structure, which shows kinds, widths, activations and options of layers.
    """
    net = next((part for name in ("net", "module") if (part := getattr(backbone, name, None)) is not None), backbone)
    positions, grid = getattr(net, "pos_embed", None), getattr(backbone, "trained_grid", None)
    return {
        "family": backbone.family,
        "architecture": backbone.architecture,
        "resize": getattr(backbone, "resize", None),
        "heads": backbone.num_heads,
        "eps": sorted({module.eps for module in backbone.modules() if isinstance(module, nn.LayerNorm)}),
        "grid": list(grid) if grid else None,
        "patch_size": backbone.patch_size,
        "depth": backbone.depth,
        "width": backbone.dims[-1],
        "cls": backbone.has_cls,
        "registers": backbone.num_registers,
        "stored_positions": positions.shape[1] if isinstance(positions, Tensor) and positions.ndim == 3 else None,
        "mean_pooled": bool(getattr(backbone, "mean_pooled", False)),
        "adapter": f"{type(backbone).__module__}.{type(backbone).__qualname__}",
        "network": f"{type(net).__module__}.{type(net).__qualname__}",
        "structure": hashlib.sha256(repr(backbone).encode()).hexdigest(),
        **more,
    }
