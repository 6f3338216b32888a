"""From tokens to the prototype that each is most like: by a projection head, or by k-means where there is none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ibot_eval.heads import ProjectionHead
from ibot_eval.kmeans import kmeans

Level = Literal["patch", "cls"]

TILE_VALUES = 1 << 25
"""Outputs held at a time: 128 MB."""


class Prototypes(nn.Module, ABC):
    """K prototypes that tokens are compared with."""

    kind: str
    """projection head or k-means."""
    count: int
    """K."""

    @abstractmethod
    def outputs(self, tokens: Tensor) -> Tensor:
        """(n, D) -> (n, K), larger being more alike."""

    def nearest(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The prototype with the largest output, and that output: the published 'confidence'.

        Args:
            tokens: (…, D).

        Returns:
            (…,) int64 and (…,) float32; the first of equal outputs. An output that is not finite makes the confidence
            not finite.
        """
        flat = tokens.flatten(0, -2)
        step = max(1, TILE_VALUES // self.count)
        found = [self.outputs(part).float().max(dim=1) for part in flat.split(step)]
        confidence, index = (torch.cat([one[i] for one in found]).view(tokens.shape[:-1]) for i in (0, 1))
        return index, confidence


class HeadPrototypes(Prototypes):
    """The outputs of a projection head: its patch branch, or its [CLS] branch."""

    kind = "projection head"

    def __init__(self, head: ProjectionHead, level: Level) -> None:
        super().__init__()
        self.head, self.level = head, level
        self.count = head.patch_prototypes if level == "patch" else head.num_prototypes

    def outputs(self, tokens: Tensor) -> Tensor:
        return self.head.forward_patches(tokens) if self.level == "patch" else self.head.forward_cls(tokens)


class CentroidPrototypes(Prototypes):
    """Cosines with the centroids of spherical k-means, of tokens less the mean of the sample that it was fitted to."""

    kind = "k-means"
    mean: Tensor
    centroids: Tensor

    def __init__(self, mean: np.ndarray, centroids: np.ndarray) -> None:
        """
        Args:
            mean: (D,) float32.
            centroids: (K, D) float32, of unit length.
        """
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(np.ascontiguousarray(mean)))
        self.register_buffer("centroids", torch.from_numpy(np.ascontiguousarray(centroids)))
        self.count = len(centroids)

    def outputs(self, tokens: Tensor) -> Tensor:
        # In full precision, also within a pass of less: the differences of cosines are small.
        with torch.autocast(tokens.device.type, enabled=False):
            return F.normalize(tokens.float() - self.mean, dim=1) @ self.centroids.T


def fit(sample: np.ndarray, k: int, seed: int) -> tuple[CentroidPrototypes, dict[str, Any]]:
    """Prototypes of a sample of tokens (n, D), and how they came about (JSON-ready).

    Args:
        k: number of prototypes; n where there are fewer tokens.

    Raises:
        DataError: tokens that are not finite.
        ConfigError: k below 1.
    """
    mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
    found = kmeans(sample - mean, min(k, len(sample)), restarts=1, spherical=True, seed=seed)
    about = {"k": len(found.centroids), "points": len(sample), "seed": seed, "backend": found.backend}
    return CentroidPrototypes(mean, found.centroids.astype(np.float32)), about
