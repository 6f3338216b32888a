"""A bank of patterns: what every prototype stands for in a data set, in one file that opens at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ibot_eval.errors import CacheError, ConfigError
from ibot_eval.files import atomic_write_bytes

if TYPE_CHECKING:
    from ibot_eval.checkpoint import LoadedCheckpoint

FORMAT = 1
SUFFIX = ".safetensors"
KIND = "ibot-eval patterns"
_ARRAYS = ("counts", "image_counts", "images", "positions", "confidences", "brightness")


@dataclass
class PatternBank:
    """K prototypes and the m most confident items of each: patches, or whole images at level cls."""

    counts: np.ndarray
    """(K,) int64, items whose largest output is this prototype."""
    image_counts: np.ndarray
    """(K,) int64, images that these items come from."""
    images: np.ndarray
    """(K, m) int32, indices into ``image_ids``, best first; -1 where there are fewer."""
    positions: np.ndarray
    """(K, m) int32, row * w + column of the patch; 0 at level cls."""
    confidences: np.ndarray
    """(K, m) float32, the largest output; NaN where there are fewer."""
    brightness: np.ndarray
    """(K, m) float32, mean V (HSV, 0 to 255) of the item's pixels."""
    class_counts: np.ndarray | None
    """(K, C) int64, items by the label of their image; None without labels."""
    image_ids: list[str]
    """Of the images that are pointed to, no others."""
    class_names: tuple[str, ...]
    about: dict[str, Any]
    """JSON-ready: level, prototypes, K, top, grid, patch, transform, checkpoint, data, notes …"""
    mean: np.ndarray | None = None
    """(D,) float32, of k-means."""
    centroids: np.ndarray | None = None
    """(K, D) float32, of k-means."""
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of items in an image."""
        return tuple(self.about["grid"])

    @property
    def items(self) -> str:
        """What is counted."""
        return "images" if self.about["level"] == "cls" else "patches"

    @property
    def purity(self) -> np.ndarray | None:
        """(K,) float64, percent of each prototype's labelled items that are of its most frequent class; NaN without
        any. None without labels."""
        if self.class_counts is None:
            return None
        totals = self.class_counts.sum(axis=1)
        return np.where(totals > 0, 100 * self.class_counts.max(axis=1) / np.maximum(totals, 1), np.nan)

    def majority(self, prototype: int) -> str | None:
        """The most frequent class of a prototype; None without labels."""
        if self.class_counts is None or not self.class_counts[prototype].any():
            return None
        return self.class_names[int(self.class_counts[prototype].argmax())]

    def by_size(self) -> np.ndarray:
        """Prototypes that any item chose, the largest first."""
        order = np.argsort(-self.counts, kind="stable")
        return order[self.counts[order] > 0]

    def by_purity(self, least: int = 10) -> np.ndarray:
        """Prototypes of items from at least ``least`` images, the purest first, of equal ones the larger.

        All patches of one image are of one class, so that few images would be pure by themselves.

        Raises:
            ConfigError: there are no labels.
        """
        purity = self.purity
        if purity is None:
            raise ConfigError("these patterns have no labels to be pure in", todo="sort by size")
        order = np.lexsort((-self.counts, -np.nan_to_num(purity, nan=-1)))
        return order[(self.image_counts[order] >= max(least, 1)) & ~np.isnan(purity[order])]

    def check_prototype(self, prototype: int) -> int:
        """``prototype``, or a ConfigError where there is none of this number."""
        if not 0 <= prototype < len(self):
            raise ConfigError(f"there is no prototype {prototype}", todo=f"they run from 0 to {len(self) - 1}")
        return prototype

    def check(self, loaded: LoadedCheckpoint) -> None:
        """Raises ConfigError unless the bank was made with this very network, read in the same way."""
        made, given = self.about["checkpoint"], describe_checkpoint(loaded)
        different = [name for name in ("sha256", "key", "overrides", "identity") if made[name] != given[name]]
        if different:
            raise ConfigError(
                f"the patterns{f' in {self.path}' if self.path else ''} are those of another checkpoint: "
                f"{made['reference']} ({made['architecture']}, sha256 {made['sha256'][:12]}), not of "
                f"{given['reference']} ({given['architecture']}, sha256 {given['sha256'][:12]})",
                where=f"they differ in: {', '.join(different)}",
                todo="name that checkpoint, or make patterns of this one: ibot-eval patterns",
            )


def describe_checkpoint(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """What tells one network from another, JSON-ready."""
    report = loaded.report
    described = {
        "reference": report.reference,
        "sha256": report.sha256,
        "key": report.key,
        "architecture": loaded.backbone.architecture,
        "overrides": report.overrides,
        "identity": report.identity,
    }
    return json.loads(json.dumps(described))


def save_bank(bank: PatternBank, path: Path) -> None:
    """Writes ``bank``, whole or not at all. Raises OSError where that cannot be."""
    arrays = {name: getattr(bank, name) for name in _ARRAYS}
    arrays |= {
        name: value for name in ("class_counts", "mean", "centroids") if (value := getattr(bank, name)) is not None
    }
    # Names of files may hold bytes that are not UTF-8; JSON escapes them.
    arrays["image_ids"] = np.frombuffer(json.dumps(bank.image_ids).encode(), np.uint8)
    about = {**bank.about, "class_names": list(bank.class_names)}
    metadata = {"kind": KIND, "format": str(FORMAT), "about": json.dumps(about)}
    contiguous = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    atomic_write_bytes(path, save(contiguous, metadata=metadata))


def open_bank(path: Path) -> PatternBank:
    """What :func:`save_bank` wrote.

    Raises:
        CacheError: the file is missing, damaged, or something else.
    """
    again = "make it again with ibot-eval patterns"
    if not path.is_file():
        raise CacheError(f"there is no file {path}", todo="make it with ibot-eval patterns --output FILE")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise CacheError(f"{path} holds no patterns", todo="name a file that ibot-eval patterns wrote")
            if metadata.get("format") != str(FORMAT):
                raise CacheError(f"{path} is of format {metadata.get('format')}, not {FORMAT}", todo=again)
            arrays: dict[str, np.ndarray] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(metadata["about"])
        image_ids = json.loads(arrays.pop("image_ids").tobytes())
        class_names = tuple(about.pop("class_names"))
        tables: dict[str, Any] = {name: arrays[name] for name in _ARRAYS}
        tables |= {name: arrays.get(name) for name in ("class_counts", "mean", "centroids")}
        bank = PatternBank(
            **tables,
            image_ids=image_ids,
            class_names=class_names,
            about=about,
            path=path,
        )
        shapes = {getattr(bank, name).shape for name in _ARRAYS[2:]}
        if len(shapes) != 1 or len(bank.counts) != len(bank.images) or bank.images.max(initial=-1) >= len(image_ids):
            raise ValueError("its tables do not fit together")
    except (SafetensorError, KeyError, ValueError) as error:
        raise CacheError(f"{path} is damaged: {error}", todo=again) from error
    return bank
