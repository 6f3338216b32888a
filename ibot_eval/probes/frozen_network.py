"""A frozen network as a maker of features, for probes that cannot do with banks since their images change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.atoms import atomic_outputs, resolve
from ibot_eval.backbone import Backbone
from ibot_eval.data.loading import LoadedBatch, image_loader
from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.extraction import check_loading
from ibot_eval.features import FeatureBank, FeatureRequest
from ibot_eval.image_pass import Precision, autocast, evaluating
from ibot_eval.probes.labelled import Labelled, labelled


class FrozenNetwork:
    """A network that gives features of image batches. With several processes each forwards a share of every batch.

    Args:
        backbone: on ``device``.
        requests: atomic outputs to concatenate, in this order; their split does not matter.
        transform: of evaluation images; all images are normalised as it says.
        device: of the backbone.
        precision: of the forward pass.
        batch_size: images per forward pass and process.
        workers: data-loading processes per process.
        bad_images: whether an image that cannot be decoded stops everything or is left out.
        progress: whether rank 0 shows bars.

    Raises:
        ConfigError: an output that the network does not have, or a batch of no images.
    """

    def __init__(
        self,
        backbone: Backbone,
        requests: Sequence[FeatureRequest],
        transform: EvalTransform,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        batch_size: int = 64,
        workers: int = 0,
        bad_images: Literal["stop", "skip"] = "stop",
        progress: bool = False,
    ) -> None:
        check_loading(batch_size, workers)
        self.backbone, self.transform, self.device, self.progress = backbone, transform, device, progress
        self.precision: Precision = precision
        self.bad_images: Literal["stop", "skip"] = bad_images
        self.batch_size, self.workers = batch_size, workers
        self.atoms = [resolve(request, backbone, None) for request in requests]
        self.width = sum(backbone.dims[atom.block] for atom in self.atoms)

    def evaluating(self) -> AbstractContextManager[None]:
        """The backbone in evaluation mode; a module of the user's own is given back in its own mode."""
        return evaluating(self.backbone)

    def loader(
        self, split: ImageSplit, transform: Callable[[Image.Image], Tensor], batches: Sequence[np.ndarray]
    ) -> Generator[LoadedBatch, None, None]:
        """This rank's shares of ``batches`` (indices into ``split``), for :meth:`features`, which takes one by one.

        Args:
            transform: RGB image -> (3, H, W) uint8.
        """
        return image_loader(
            split,
            transform,
            [rows.tolist() for batch in batches for rows in self._passes(batch)],
            self.workers,
            bad_images=self.bad_images,
            pin_memory=self.device.type == "cuda",
        )

    def features(
        self, loader: Iterator[LoadedBatch], batch: np.ndarray, keep: torch.device, bar: tqdm[Any]
    ) -> tuple[Tensor, Tensor]:
        """Features of the loader's next batch, from all ranks. A collective.

        Args:
            loader: this rank's, of whose batches ``batch`` is the next.
            batch: (B,) indices, each once; the same on every rank.
            keep: where the features are gathered.
            bar: is moved on by the images done.

        Returns:
            (B, D) float32 on ``keep``, zeros for images that cannot be decoded; and (B,) bool, which can be.
        """

        def own() -> tuple[Tensor, Tensor]:
            # One column more tells which images there are.
            parts, rows = [torch.zeros(0, self.width + 1, device=keep)], []
            for _ in self._passes(batch):
                loaded = next(loader)
                if len(loaded.indices):
                    parts.append(F.pad(self._forward(loaded.images), (0, 1), value=1).to(keep))
                parts.append(torch.zeros(len(loaded.bad), self.width + 1, device=keep))
                rows += [*loaded.indices.tolist(), *(index for index, _ in loaded.bad)]
                # Rank 0 speaks for all.
                bar.update(min((len(loaded.indices) + len(loaded.bad)) * distributed.world_size(), bar.total - bar.n))
            return torch.cat(parts), torch.tensor([position[row] for row in rows], dtype=torch.int64)

        position = {int(row): place for place, row in enumerate(batch)}
        gathered = distributed.gather_rows(*distributed.everywhere(own), len(batch))
        return gathered[:, :-1], gathered[:, -1] > 0

    def labelled(self, split: ImageSplit, rows: np.ndarray, role: str) -> Labelled:
        """Features of the images ``rows`` (indices) through the evaluation transform, but for unreadable ones.

        Raises:
            DataError: as :func:`ibot_eval.probes.labelled.labelled`, and none of the images can be read.
        """
        with (
            closing(self.loader(split, self.transform, [rows])) as loader,
            self.bar(f"features of {role}", len(rows)) as bar,
        ):
            features, usable = self.features(loader, rows, torch.device("cpu"), bar)
        read = rows[usable.numpy()]
        ids = [split.image_ids[int(i)] for i in read]
        request = FeatureRequest("train")
        bank = FeatureBank(features[usable].numpy(), split.labels[read], ids)
        return labelled({request: bank}, [request], role, "linear probing")

    def bar(self, name: str, images: int, done: int = 0) -> tqdm[Any]:
        """A progress bar over images."""
        return tqdm(
            total=images,
            initial=done,
            desc=name,
            unit="image",
            unit_scale=True,
            file=sys.stderr,
            disable=not (self.progress and distributed.is_main()),
            leave=False,
            # A log file gets a line now and then instead of a redrawn bar.
            mininterval=0.2 if sys.stderr.isatty() else 30,
            smoothing=0.05,
            dynamic_ncols=True,
        )

    def _passes(self, batch: np.ndarray) -> list[np.ndarray]:
        own = batch[distributed.rank() :: distributed.world_size()]
        return [own[a : a + self.batch_size] for a in range(0, len(own), self.batch_size)]

    def _forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 -> (B, D) float32."""
        with torch.inference_mode(), autocast(self.device, self.precision):
            normalised = self.transform.normalize(images.to(self.device, non_blocking=True))
            outputs = atomic_outputs(self.backbone, None, normalised, self.atoms)
            return torch.cat([outputs[atom] for atom in self.atoms], dim=1)
