"""The backgrounds challenge of ImageNet-9: every foreground on every background, of which the worst counts.

The public code of the challenge (Xiao et al. 2020) takes each mask ``fg_mask/val/CLASS/NAME.npy``, cuts the object out
of ``original/val/CLASS/NAME.*`` and pastes it onto every image of ``only_bg_t/val``, also those of the object's class.
A foreground counts as right only if the classifier is right on all of these. The result does not depend on the order,
so a foreground is given up at the first background that fools the classifier.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.data.folders import scan
from ibot_eval.data.loading import LoadedBatch, explain_worker_death, image_loader
from ibot_eval.data.splits import ImageSplit, few
from ibot_eval.errors import DataError
from ibot_eval.extraction import check_loading, default_workers
from ibot_eval.robustness.answers import Classifies, Reading, check_finite, explain_memory, own_share

if TYPE_CHECKING:
    from ibot_eval.protocol import Session

MASKS = "fg_mask/val"
"""Where the masks lie below --data."""


@dataclass(frozen=True)
class Foregrounds:
    """Objects with their masks."""

    split: ImageSplit
    """The images that they are cut out of, with labels."""
    masks: list[Path]
    """(H, W) arrays of 0 and 1, one for each image, 1 on the object."""
    ids: list[str]
    """Names of the masks below --data."""


@dataclass(frozen=True)
class Challenged:
    """Of the n foregrounds that could be read; the same on every rank."""

    indices: np.ndarray
    """(n,) int64, into the foregrounds."""
    labels: np.ndarray
    """(n,) int64, the right ones."""
    predicted: np.ndarray
    """(n,) int64: the right label where no background fools the classifier, else what it takes the first of those
    that do for (-1 for none of the test set's classes)."""
    unreadable: list[str]
    """Ids of images and backgrounds that could not be decoded."""


def find_foregrounds(root: Path, original: ImageSplit, *, part: bool = False) -> Foregrounds:
    """The foregrounds below ``root``, in the order of their masks' names.

    Args:
        root: the folder that ``--data`` names.
        original: the variant that they are cut out of; ids are ``original/val/CLASS/NAME.EXTENSION``.
        part: whether ``original`` holds some images only; the masks of others are left out then.

    Raises:
        DataError: no masks, or a mask without its image.
    """
    folder = root / MASKS
    files = scan(folder).other if folder.is_dir() else []
    names = sorted(f.removesuffix(".npy") for f in files if f.endswith(".npy") and f.count("/") == 1)
    places = {image_id.rpartition(".")[0].split("/", 2)[-1]: i for i, image_id in enumerate(original.image_ids)}
    missing = [name for name in names if name not in places]
    if missing and not part:
        raise DataError(
            f"{len(missing)} of {len(names)} masks have no image of their name in original/val: {few(missing)}",
            where=str(folder),
        )
    names = [name for name in names if name in places]
    if not names:
        raise DataError(
            f"there are no masks {MASKS}/CLASS/NAME.npy of the images in original/val below {root}",
            where="--challenge",
            todo="take the folder fg_mask of the public data set along, or leave --challenge out",
        )
    split = original.take([places[name] for name in names])
    ids = [f"{name}.npy" for name in names]
    return Foregrounds(split, [folder / name for name in ids], [f"{MASKS}/{name}" for name in ids])


def read_mask(path: Path, side: int) -> np.ndarray:
    """(side, side) bool.

    Raises:
        DataError: a file that is not an array, an array of another shape, or values other than 0 and 1.
    """
    try:
        mask = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read the mask {path}: {str(error).splitlines()[0]}") from None
    if not isinstance(mask, np.ndarray) or mask.shape != (side, side):
        shape = " x ".join(map(str, np.shape(mask)))
        raise DataError(f"the mask {path} is {shape}, and the images are {side} x {side} pixels")
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"the mask {path} holds values other than 0 and 1")
    return mask.astype(bool)


def challenge(
    classifier: Classifies, foregrounds: Foregrounds, backgrounds: ImageSplit, reading: Reading, session: Session
) -> Challenged:
    """Classify every foreground on every background. A collective call: each process takes a share of the foregrounds.

    Its foregrounds stay in the memory of the device, 0.2 MB each at 224 pixels. At most foregrounds times backgrounds
    images are classified, 16 millions for ImageNet-9; that foregrounds are given up early saves most of them.

    Raises:
        BadImage: an image that cannot be decoded, unless --bad-images is skip.
        DataError: a mask that does not fit, or logits that are not finite.
        ConfigError: batches of no images, or too little memory for them.
    """
    engine = session.engine
    assert engine is not None
    check_loading(engine.batch_size, engine.workers)
    own = own_share(len(foregrounds.ids))
    truth = np.asarray(foregrounds.split.labels)

    def classified() -> tuple[Tensor, list[str]]:
        with explain_memory(engine.batch_size), explain_worker_death(), torch.inference_mode():
            images, masks, read = _load(foregrounds, own, session)
            there = torch.from_numpy(np.isin(own, read))
            labels = torch.from_numpy(truth[read]).to(session.device)
            ids = [foregrounds.ids[int(i)] for i in read]
            pasting = _Pasting(classifier, images, masks, labels, ids, reading, session)
            rows = torch.zeros(len(own), 2, dtype=torch.int64)
            rows[there, 0], rows[there, 1] = 1, pasting.worst(backgrounds).cpu()
        return rows, pasting.bad

    rows, bad = distributed.everywhere(classified)
    gathered = distributed.gather_rows(rows, torch.tensor(own, dtype=torch.int64), len(truth)).numpy()
    read = np.flatnonzero(gathered[:, 0])
    unread = [foregrounds.split.image_ids[int(i)] for i in np.flatnonzero(gathered[:, 0] == 0)]
    bad = sorted({name for names in distributed.gather_objects(bad) for name in names})
    return Challenged(read, truth[read], gathered[read, 1], unread + bad)


class _Pasting:
    """This process's foregrounds, on the device."""

    def __init__(
        self,
        classifier: Classifies,
        images: Tensor,
        masks: Tensor,
        labels: Tensor,
        ids: list[str],
        reading: Reading,
        session: Session,
    ) -> None:
        """
        Args:
            images: (n, 3, H, W) uint8.
            masks: (n, 1, H, W) bool.
            labels: (n,) int64.
            ids: n names.
        """
        self.classifier, self.reading, self.session = classifier, reading, session
        self.images, self.masks, self.labels, self.ids = images, masks, labels, ids
        self.bad: list[str] = []

    def worst(self, backgrounds: ImageSplit) -> Tensor:
        """(n,) int64: the right label, or what the first background that fools the classifier makes of it."""
        session, predicted = self.session, self.labels.clone()
        assert session.engine is not None
        alive = torch.arange(len(self.labels), device=session.device)
        show = session.progress and distributed.is_main()
        bar = tqdm(total=len(backgrounds), desc="challenge", unit="background", disable=not show, leave=False, delay=1)
        with closing(_batches(backgrounds, list(range(len(backgrounds))), session)) as batches, bar:
            for batch in batches:
                names = [backgrounds.image_ids[int(i)] for i in batch.indices]
                self.bad += [backgrounds.image_ids[i] for i, _ in batch.bad]
                start = 0
                while start < len(names) and len(alive):
                    # Few foregrounds are left at the end: several backgrounds then fill a batch.
                    stop = start + max(1, session.engine.batch_size // len(alive))
                    found = self._answers(batch.images[start:stop], names[start:stop], alive)
                    wrong = found != self.labels[alive]
                    fooled = wrong.any(0)
                    predicted[alive[fooled]] = found.gather(0, wrong.int().argmax(0)[None])[0, fooled]
                    alive, start = alive[~fooled], stop
                bar.update(len(names) + len(batch.bad))
                if not len(alive):
                    break
        return predicted

    def _answers(self, backgrounds: Tensor, names: list[str], alive: Tensor) -> Tensor:
        """(k, 3, H, W) uint8 backgrounds and (m,) foregrounds -> (k, m) labels."""
        session, found = self.session, []
        assert session.engine is not None
        assert session.transform is not None
        backgrounds = backgrounds.to(session.device)
        pairs = torch.cartesian_prod(torch.arange(len(backgrounds), device=session.device), alive)
        for part in pairs.split(session.engine.batch_size):
            behind, front = part.unbind(1)
            pasted = torch.where(self.masks[front], self.images[front], backgrounds[behind])
            logits = self.classifier.logits(session.transform.normalize(pasted))
            ids = [f"{self.ids[f]} on {names[b]}" for b, f in part.tolist()]
            check_finite(logits, ids, session.engine.precision)
            found.append(self.reading.decide(logits)[0])
        return torch.cat(found).view(len(backgrounds), len(alive))


def _load(foregrounds: Foregrounds, own: list[int], session: Session) -> tuple[Tensor, Tensor, np.ndarray]:
    """(n, 3, H, W) uint8 images and (n, 1, H, W) bool masks on the device, and the (n,) indices that could be read."""
    assert session.transform is not None
    side, read = session.transform.crop, []
    images = [torch.zeros(0, 3, side, side, dtype=torch.uint8, device=session.device)]
    masks = [torch.zeros(0, 1, side, side, dtype=torch.bool, device=session.device)]
    with closing(_batches(foregrounds.split, own, session)) as batches:
        for batch in batches:
            if len(batch.indices):
                here = batch.indices.tolist()
                read += here
                images.append(batch.images.to(session.device))
                arrays = np.stack([read_mask(foregrounds.masks[i], side) for i in here])
                masks.append(torch.from_numpy(arrays)[:, None].to(session.device))
    return torch.cat(images), torch.cat(masks), np.array(read, np.int64)


def _batches(split: ImageSplit, indices: list[int], session: Session) -> Generator[LoadedBatch, None, None]:
    engine, settings, transform = session.engine, session.data_settings, session.transform
    assert engine is not None
    assert settings is not None
    assert transform is not None
    size = engine.batch_size
    batches = [indices[start : start + size] for start in range(0, len(indices), size)]
    workers = default_workers(session.device) if engine.workers is None else engine.workers
    return image_loader(split, transform, batches, workers, bad_images=settings.bad_images)
