"""The best patches of every prototype so far, in memory that does not grow with the number of images."""

from __future__ import annotations

import numpy as np

WAITING = 1 << 18
"""Items that are gathered before they are sorted in: 6 MB. Sorting is much of the work, however few are new."""


class TopPatches:
    """Per prototype how many items chose it, and the ``top`` most confident of them, one an image at most.

    Order: by confidence, of equal ones by the image's index, then by the place in the image, so that the result does
    not depend on how images were batched or divided among processes.
    """

    def __init__(self, prototypes: int, top: int, classes: int = 0) -> None:
        """
        Args:
            prototypes: K.
            top: items kept of each.
            classes: number of classes to count by; 0 for none.
        """
        self.counts = np.zeros(prototypes, np.int64)
        self.image_counts = np.zeros(prototypes, np.int64)
        self.class_counts = np.zeros((prototypes, classes), np.int64) if classes else None
        self.images = np.full((prototypes, top), -1, np.int64)
        self.positions = np.zeros((prototypes, top), np.int32)
        self.confidences = np.full((prototypes, top), -np.inf, np.float32)
        self.brightness = np.zeros((prototypes, top), np.float32)
        self._waiting: list[tuple[np.ndarray, ...]] = []

    def add(
        self,
        images: np.ndarray,
        prototypes: np.ndarray,
        confidences: np.ndarray,
        brightness: np.ndarray,
        labels: np.ndarray | None = None,
    ) -> None:
        """Takes the N items of each of B images, none of which was given before.

        Args:
            images: (B,) integer, index of each image.
            prototypes: (B, N) integer, the prototype each item chose.
            confidences: (B, N) float32, finite.
            brightness: (B, N) float32.
            labels: (B,) integer; items of images without a label (-1) are counted in no class.
        """
        b, n = prototypes.shape
        chosen = prototypes.reshape(-1).astype(np.int64)
        k = len(self.counts)
        self.counts += np.bincount(chosen, minlength=k)
        if self.class_counts is not None and labels is not None:
            classes = self.class_counts.shape[1]
            keys = (prototypes * np.int64(classes) + labels[:, None])[labels >= 0]
            # Not a bincount, which would make a table of all prototypes and classes for every batch.
            found, times = np.unique(keys, return_counts=True)
            self.class_counts.reshape(-1)[found] += times
        image = np.repeat(images.astype(np.int64), n)
        position = np.tile(np.arange(n, dtype=np.int32), b)
        confidence = confidences.reshape(-1)
        best = _first_of_each(chosen, image, confidence, position)
        self.image_counts += np.bincount(chosen[best], minlength=k)
        # What cannot be among the best is most of it after the first batches.
        able = best[confidence[best] >= self.confidences[chosen[best], -1]]
        parts = (chosen[able], image[able], position[able], confidence[able], brightness.reshape(-1)[able])
        self._waiting.append(parts)
        if sum(len(waiting[0]) for waiting in self._waiting) >= WAITING:
            self.settle()

    def merge(self, other: TopPatches) -> None:
        """Takes what another process found in other images."""
        self.counts += other.counts
        self.image_counts += other.image_counts
        if self.class_counts is not None and other.class_counts is not None:
            self.class_counts += other.class_counts
        other.settle()
        rows, columns = np.nonzero(other.images >= 0)
        at = (rows, columns)
        self._waiting.append((rows, other.images[at], other.positions[at], other.confidences[at], other.brightness[at]))
        self.settle()

    def settle(self) -> None:
        """Sorts what was added lately into the tables; call it before reading them."""
        if not self._waiting:
            return
        prototype, *parts = (np.concatenate(columns) for columns in zip(*self._waiting, strict=True))
        self._waiting.clear()
        if not len(prototype):
            return
        tables = (self.images, self.positions, self.confidences, self.brightness)
        touched = np.unique(prototype)
        rows, columns = np.nonzero(self.images[touched] >= 0)
        kept = (touched[rows], columns)
        prototype = np.concatenate([prototype, kept[0]])
        image, position, confidence, brightness = (
            np.concatenate([new, table[kept]]) for new, table in zip(parts, tables, strict=True)
        )
        by_image = np.left_shift(image.astype(np.int64), 32) + position
        order = np.lexsort((by_image, prototype << 32 | _descending(confidence)))
        ordered = prototype[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        rank = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
        within = rank < self.images.shape[1]
        order, place = order[within], (ordered[within], rank[within])
        for table, values in zip(tables, (image, position, confidence, brightness), strict=True):
            table[place] = values[order]

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it, for a file."""
        self.settle()
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Continues from what :meth:`arrays` gave."""
        for name in self.arrays():
            setattr(self, name, arrays[name].copy())


def _first_of_each(
    prototype: np.ndarray, image: np.ndarray, confidence: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Indices of the most confident item of each pair of prototype and image."""
    order = np.lexsort((position, -confidence, image, prototype))
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(prototype[order]) != 0) | (np.diff(image[order]) != 0)
    return order[first]


def _descending(confidence: np.ndarray) -> np.ndarray:
    """(n,) float32 -> int64 from 0 to 2^32 - 1, the smaller the larger the number; equal for 0 and -0."""
    bits = (confidence + np.float32(0)).view(np.int32).astype(np.int64)
    ascending = np.where(bits < 0, ~bits & 0x7FFFFFFF | -0x80000000, bits)
    return 0x7FFFFFFF - ascending
