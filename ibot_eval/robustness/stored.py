"""Images that go to the network as they are stored: cropped, never resized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as F

from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import DataError

if TYPE_CHECKING:
    from ibot_eval.protocol import Session
    from ibot_eval.settings import DataSettings


@dataclass(frozen=True)
class CropOnly(EvalTransform):
    """Centre crop, then normalise; ``resize`` and ``interpolation`` have no effect."""

    def __call__(self, image: Image.Image) -> Tensor:
        """RGB image of at least ``crop`` pixels each way -> (3, crop, crop) uint8."""
        pil: Any = image  # torchvision's annotations know tensors only
        return F.pil_to_tensor(F.center_crop(pil, [self.crop, self.crop]))

    def describe(self) -> dict[str, Any]:
        return {"resize": None, "crop": self.crop, "mean": list(self.mean), "std": list(self.std)}


def crop_only(transform: EvalTransform) -> CropOnly:
    """``transform`` without its resize."""
    return CropOnly(transform.resize, transform.crop, transform.interpolation, transform.mean, transform.std)


class StoredSplit(ImageSplit):
    """The images of a split, which must have the size that the network is to see."""

    def __init__(self, split: ImageSplit, side: int, *, exact: bool) -> None:
        """
        Args:
            split: the images.
            side: pixels.
            exact: whether every image must be ``side`` x ``side``, or at least so large.
        """
        self.split, self.side, self.exact = split, side, exact
        self.name, self.image_ids, self.labels, self.source = split.name, split.image_ids, split.labels, split.source

    def load(self, i: int) -> Image.Image:
        """As that of the split. Raises DataError for an image of another size, naming it."""
        image = self.split.load(i)
        if image.size != (self.side, self.side) if self.exact else min(image.size) < self.side:
            wanted = f"{self.side} x {self.side} pixels" + ("" if self.exact else " at least")
            raise DataError(
                f"the image {self.image_ids[i]} has {image.width} x {image.height} pixels, not {wanted}",
                where="images are taken as they are stored, without a resize",
                todo="give --crop SIDE where all are SIDE x SIDE, or have them resized: --resize SIDE"
                if self.exact
                else "give a smaller --crop, or have the images resized: --resize SIDE",
            )
        return image

    def take(self, indices: Sequence[int] | np.ndarray) -> StoredSplit:
        return StoredSplit(self.split.take(indices), self.side, exact=self.exact)

    def _fingerprint(self) -> str:
        return self.split.fingerprint


def as_stored(session: Session) -> Session:
    """The session with a transform that never resizes, unless --resize was given by hand."""
    assert session.transform is not None
    if is_resized(session):
        return session
    return replace(session, transform=crop_only(session.transform))


def checked(split: ImageSplit, session: Session, *, exact: bool) -> ImageSplit:
    """``split``, whose images are refused where they have another size, unless --resize was given by hand."""
    assert session.transform is not None
    return split if is_resized(session) else StoredSplit(split, session.transform.crop, exact=exact)


def is_resized(session: Session) -> bool:
    """Whether the user asked for a resize."""
    return session.data_settings is not None and session.data_settings.resize is not None


def note_resized(session: Session) -> list[str]:
    """A warning where the user asked for a resize."""
    if not is_resized(session):
        return []
    return ["images are resized, as --resize asks for; published numbers are of images as they are stored"]


def describe_stored(transform: EvalTransform | None, settings: DataSettings) -> dict[str, Any] | None:
    """What a record says of the way of stored images to the network; None for what it says of others."""
    return None if transform is None or settings.resize is not None else crop_only(transform).describe()
