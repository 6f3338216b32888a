"""What the released segmentation configurations have of their own. Imports no mm*."""

from __future__ import annotations

from collections.abc import Mapping

from ibot_eval.backbone import IMAGENET_MEAN, IMAGENET_STD

PUBLISHED_BATCH = 16
PUBLISHED: Mapping[tuple[str, str], tuple[float, float]] = {
    ("upernet", "vit-s/16"): (3e-5, 0.9),
    ("upernet", "vit-b/16"): (8e-5, 0.65),
    ("upernet", "vit-l/16"): (2e-5, 0.95),
    ("linear", "vit-s/16"): (3e-5, 1.0),
    ("linear", "vit-b/16"): (8e-4, 1.0),
    ("setr-pup", "vit-b/16"): (1e-3, 0.65),
}
"""Learning rate and layer decay of the released configurations by head and network; of SETR-PUP, BEiT's."""
OTHERWISE: Mapping[str, tuple[float, float]] = {
    "upernet": (8e-5, 0.65),
    "linear": (8e-4, 1.0),
    "setr-pup": (1e-3, 0.65),
}
"""Of other networks: those of ViT-B/16."""
DROPOUT: Mapping[str, float] = {"upernet": 0.1, "linear": 0.0, "setr-pup": 0.0}
DROP_PATH, DROP_PATH_OF_LARGE = 0.1, 0.2
INPUTS = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
"""ImageNet's, of all released segmentation configurations."""
CLASSES_OF_ADE20K = 150


def drop_path(architecture: str | None) -> float:
    """Of the released configurations."""
    return DROP_PATH_OF_LARGE if (architecture or "").startswith("vit-l") else DROP_PATH
