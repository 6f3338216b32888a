"""Networks that come from no checkpoint: modules of one's own, and backbones of plug-ins."""

from __future__ import annotations

from torch import nn

from ibot_eval.backbone import Backbone
from ibot_eval.checkpoint import LoadedCheckpoint, report_of
from ibot_eval.layouts.matching import Match
from ibot_eval.layouts.named import tensors_sha256
from ibot_eval.models import ModuleBackbone, wrap


def from_module(module: nn.Module, reference: str | None = None, image_size: int | None = None) -> LoadedCheckpoint:
    """``module`` as if it had been read from a checkpoint; its weights are shared, and it is left as it is.

    Args:
        module: a Backbone, a timm network, or any module that maps images (B, 3, H, W) to features (B, D).
        reference: what records call it; by default the name of its class.
        image_size: side in pixels of the images that a plain module takes, for a trial pass. Default: 224.

    Raises:
        ConfigError: a plain module that cannot take such images, or returns something else.
    """
    backbone = wrap(module)
    if isinstance(backbone, ModuleBackbone) and backbone is not module and image_size is not None:
        backbone = ModuleBackbone(module, image_size=image_size)
    tensors = backbone.state_dict()
    report = report_of(
        backbone,
        Match.whole(tensors),
        reference or f"{type(module).__module__}.{type(module).__qualname__}",
        tensors_sha256(tensors),
        notes=[f"the network is {'a backbone' if isinstance(module, Backbone) else 'a module'} given from Python"],
    )
    return LoadedCheckpoint(backbone, None, None, report, cacheable=False)
