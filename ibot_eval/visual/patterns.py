"""What prototypes stand for: all patches of a data set, streamed through the backbone and compared with them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.data.loading import explain_worker_death
from ibot_eval.data.splits import Data, ImageSplit
from ibot_eval.errors import CacheError, ConfigError, DataError
from ibot_eval.files import canonical_json
from ibot_eval.image_pass import Engine, evaluating
from ibot_eval.settings import DataSettings
from ibot_eval.visual.pattern_bank import PatternBank, describe_checkpoint
from ibot_eval.visual.pattern_pass import passes, sample
from ibot_eval.visual.pattern_progress import Progress
from ibot_eval.visual.pictures import Picture
from ibot_eval.visual.prototypes import CentroidPrototypes, HeadPrototypes, Level, Prototypes, fit
from ibot_eval.visual.top_patches import TopPatches

if TYPE_CHECKING:
    from ibot_eval.checkpoint import LoadedCheckpoint

TOP = 72
"""Items kept of each prototype: twice what a layout shows, since near-black ones are skipped there."""
K = 256
"""Prototypes of k-means."""
COUNTED_VALUES = 1 << 26
"""Prototypes x classes up to which classes are counted: 512 MB."""


@dataclass(frozen=True)
class Assignment:
    """Which prototype each patch of a picture chose."""

    prototypes: np.ndarray
    """(h, w) int64; (1, 1) at level cls."""
    confidences: np.ndarray
    """(h, w) float32, the largest output."""


def make_bank(
    engine: Engine,
    data: Data,
    *,
    role: str = "test",
    level: Level = "patch",
    top: int = TOP,
    k: int = K,
    seed: int = 0,
    settings: DataSettings | None = None,
    progress_file: Path | None = None,
) -> PatternBank:
    """Runs every image of a split through the network once and keeps, per prototype, a count and the best items.

    With a projection head its outputs are the prototypes; without one, ``k`` prototypes of spherical k-means on a
    sample of the tokens. The network's last block is used, after the family's norm. Memory does not grow with the
    number of images. With several processes each takes some of the images, and all get the same bank.

    Args:
        engine: the checkpoint, its transform, and how to compute.
        data: with the split ``role``.
        level: patch tokens, or [CLS] (or what stands for it) of whole images.
        top: items kept of each prototype.
        seed: of k-means.
        settings: how ``data`` was opened, so that the bank can open it again.
        progress_file: where an interrupted run leaves what it has, and a later one of the same settings goes on.
            Remove it once the bank is saved.

    Raises:
        ConfigError: a number below 1, or a network without patch tokens.
        DataError: images that cannot be read, or outputs that are not finite.
    """
    for name, value in (("--top", top), ("--k", k), ("--batch-size", engine.batch_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    begin = time.perf_counter()
    split, loaded = data.splits[role], engine.loaded
    h, w = _grid(engine, level)
    about: dict[str, Any] = {
        "level": level,
        "top": top,
        "grid": [h, w],
        "patch": loaded.backbone.patch_size,
        "block": loaded.backbone.depth - 1,
        "transform": engine.transform.describe(),
        "precision": engine.precision,
        "checkpoint": describe_checkpoint(loaded),
        "data": {
            "reference": data.reference,
            "role": role,
            "split": data.split_names.get(role, split.name),
            "images": len(split),
            "fingerprint": split.fingerprint,
            "settings": None if settings is None else json.loads(json.dumps(asdict(settings), default=str)),
        },
        "notes": [],
    }
    head = loaded.projection_head
    same = {"about": about, "k": None if head else k, "seed": None if head else seed, "batch": engine.batch_size}
    progress = Progress(progress_file, canonical_json(same))
    before = progress.read()
    if head is not None:
        prototypes: Prototypes = HeadPrototypes(head, level)
    elif "centroids" in before:
        prototypes = CentroidPrototypes(before["mean"], before["centroids"])
        about["kmeans"] = progress.remarks
    else:
        prototypes, about["kmeans"] = fit(sample(engine, split, level), k, seed)
        progress.remarks = about["kmeans"]
    about |= {"prototypes": prototypes.kind, "K": prototypes.count}
    if head is None:
        about["notes"].append(
            f"the checkpoint has no projection head: these are {prototypes.count} prototypes of spherical k-means on "
            f"{about['kmeans']['points']:,} {'images' if level == 'cls' else 'patches'}"
        )
    classes = len(data.class_names) if (split.labels >= 0).any() else 0
    if prototypes.count * classes > COUNTED_VALUES:
        about["notes"].append(f"classes are not counted: {prototypes.count} prototypes of {classes} classes are many")
        classes = 0
    best = TopPatches(prototypes.count, top, classes)
    constant = {} if head is not None else _constants(prototypes)
    skipped = _stream(engine, split, prototypes, level, best, progress, before, constant)
    for other in distributed.gather_objects((distributed.rank(), best, skipped)):
        if other[0] != distributed.rank():
            best.merge(other[1])
            skipped = [*skipped, *other[2]]
    about["data"]["skipped"] = sorted(skipped)
    if len(skipped) == len(split):
        raise DataError(f"no image of {about['data']['split']} can be used", where=data.reference)
    bank = _bank(best, split, data.class_names if classes else (), about, constant)
    bank.about["seconds"] = round(time.perf_counter() - begin, 1)
    return bank


def assign(bank: PatternBank, loaded: LoadedCheckpoint, picture: Picture) -> Assignment:
    """Which prototype is each patch of ``picture``? At level cls: which one is the whole picture?

    Raises:
        ConfigError: the bank was made with another checkpoint.
        DataError: outputs that are not finite.
    """
    bank.check(loaded)
    level: Level = bank.about["level"]
    if bank.centroids is not None and bank.mean is not None:
        prototypes: Prototypes = CentroidPrototypes(bank.mean, bank.centroids)
    elif loaded.projection_head is not None:
        prototypes = HeadPrototypes(loaded.projection_head, level)
    else:
        raise CacheError(f"{bank.path or 'the bank'} names a projection head that the checkpoint lacks")
    pixels = picture.tensor(loaded.backbone)
    prototypes.to(pixels.device)
    with evaluating(loaded.backbone, prototypes), torch.inference_mode():
        output = loaded.backbone.outputs(pixels).blocks[0]
        tokens = output.cls[:, None] if level == "cls" else output.patches.flatten(1, 2)
        index, confidence = prototypes.nearest(tokens)
    _check_finite(confidence.cpu().numpy(), [picture.name])
    grid = (1, 1) if level == "cls" else picture.grid
    return Assignment(index[0].view(grid).cpu().numpy(), confidence[0].view(grid).cpu().numpy())


def _stream(
    engine: Engine,
    split: ImageSplit,
    prototypes: Prototypes,
    level: Level,
    best: TopPatches,
    progress: Progress,
    before: dict[str, np.ndarray],
    constant: dict[str, np.ndarray],
) -> list[str]:
    """Fills ``best`` with this rank's batches; the ids of images that were left out."""
    size, n = engine.batch_size, len(split)
    batches = [range(i, min(i + size, n)) for i in range(0, n, size)][distributed.rank() :: distributed.world_size()]
    names: Sequence[str] = split.image_ids
    done = 0
    skipped: list[str] = []
    if "counts" in before:
        best.restore(before)
        done, skipped = progress.batches, list(progress.skipped)
    shown = engine.progress and distributed.is_main()
    label = f"patterns of {split.name}"
    # A file gets a line now and then instead of a redrawn bar.
    interval = 0.2 if sys.stderr.isatty() else 30
    total = sum(map(len, batches))
    with (
        explain_worker_death(),
        closing(passes(engine, split, prototypes, level, batches[done:])) as results,
        tqdm(total=total, desc=label, unit="image", file=sys.stderr, disable=not shown, mininterval=interval) as bar,
    ):
        bar.update(sum(map(len, batches[:done])))
        for batch, asked in zip(results, batches[done:], strict=True):
            if batch.ready is not None:
                batch.ready.synchronize()
            skipped += [names[i] for i, _ in batch.bad]
            if len(batch.images):
                index, confidence, brightness = (value.numpy() for value in batch.values)
                _check_finite(confidence, [names[int(i)] for i in batch.images])
                best.add(batch.images, index, confidence, brightness, split.labels[batch.images])
            done += 1
            bar.update(len(asked))
            progress.save(lambda: best.arrays() | constant, done, skipped)
    best.settle()
    return skipped


def _grid(engine: Engine, level: Level) -> tuple[int, int]:
    """Rows and columns of items in an image."""
    backbone = engine.loaded.backbone
    if level == "cls":
        return 1, 1
    if not backbone.has_patches:
        raise ConfigError(f"{backbone.architecture} gives no patch tokens", todo="use --level cls")
    side = engine.transform.crop // backbone.patch_size
    return side, side


def _constants(prototypes: Prototypes) -> dict[str, np.ndarray]:
    assert isinstance(prototypes, CentroidPrototypes)
    return {"mean": prototypes.mean.cpu().numpy(), "centroids": prototypes.centroids.cpu().numpy()}


def _check_finite(confidence: np.ndarray, names: Sequence[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(confidence).all(axis=1))
    if len(bad):
        raise DataError(
            f"the outputs of {names[int(bad[0])]} are NaN or infinite",
            todo="use --precision fp32, or check the checkpoint's weights: ibot-eval inspect",
        )


def _bank(
    best: TopPatches, split: ImageSplit, class_names: Sequence[str], about: dict[str, Any], constant: dict[str, Any]
) -> PatternBank:
    pointed = np.unique(best.images[best.images >= 0])
    empty = best.images < 0
    images = np.where(empty, -1, np.searchsorted(pointed, best.images)).astype(np.int32)
    return PatternBank(
        counts=best.counts,
        image_counts=best.image_counts,
        images=images,
        positions=best.positions,
        confidences=np.where(empty, np.float32("nan"), best.confidences),
        brightness=best.brightness,
        class_counts=best.class_counts,
        image_ids=[split.image_ids[int(i)] for i in pointed],
        class_names=tuple(class_names),
        about=about,
        **constant,
    )
