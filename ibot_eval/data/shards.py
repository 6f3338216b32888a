"""WebDataset shards (`wds/FOLDER`) read at random places, so that extraction can resume and be divided exactly.

The tar files are indexed once by their headers; nothing is unpacked and no order is shuffled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from ibot_eval.data.folders import TEST_NAMES
from ibot_eval.data.images import load_rgb, unreadable
from ibot_eval.data.splits import Data, ImageSplit, few, hash_lines, natural_key
from ibot_eval.errors import DataError
from ibot_eval.settings import DataSettings

_IMAGES = {"jpg", "jpeg", "png", "webp"}
_LAYOUT = "shards are FOLDER/train-000.tar … or FOLDER/train/000.tar …"


class Member(NamedTuple):
    """Where an image lies."""

    shard: int
    offset: int
    """Bytes from the start of the tar file."""
    size: int
    """Bytes."""


class ShardSplit(ImageSplit):
    """Images inside tar files."""

    def __init__(
        self,
        name: str,
        folder: Path,
        shards: Sequence[str],
        image_ids: Sequence[str],
        labels: np.ndarray,
        members: np.ndarray,
        *,
        content: bool = False,
    ) -> None:
        """
        Args:
            name: the split's own name.
            folder: where the shards lie.
            shards: paths of the tar files below ``folder``.
            image_ids: n unique names.
            labels: (n,) int64.
            members: (n, 3) int64, rows as in :class:`Member`.
            content: fingerprint the shards' bytes rather than their size and modification time.
        """
        self.name, self.folder, self.shards, self.content = name, folder, list(shards), content
        self.image_ids = list(image_ids)
        self.source = str(folder.absolute() / name)
        self.labels, self.members = np.asarray(labels, np.int64), np.asarray(members, np.int64).reshape(-1, 3)

    def load(self, i: int) -> Image.Image:
        shard, offset, size = map(int, self.members[i])
        path = self.folder / self.shards[shard]
        name = f"{self.image_ids[i]} ({path})"
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise unreadable(name, error) from error
        return load_rgb(io.BytesIO(data), name)

    def take(self, indices: Sequence[int] | np.ndarray) -> ShardSplit:
        ids = [self.image_ids[i] for i in indices]
        return ShardSplit(
            self.name, self.folder, self.shards, ids, self.labels[indices], self.members[indices], content=self.content
        )

    def _fingerprint(self) -> str:
        marks = []
        for shard in self.shards:
            path = self.folder / shard
            stat = os.stat(path)
            if self.content:
                with open(path, "rb") as file:
                    mark = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                mark = str(stat.st_mtime_ns)
            marks.append(f"{shard}\0{stat.st_size}\0{mark}")
        items = (
            f"{image_id}\0{label}\0{member.tolist()}"
            for image_id, label, member in zip(self.image_ids, self.labels, self.members, strict=True)
        )
        return hash_lines("shards by content" if self.content else "shards by stat", [*marks, *items])


def open_shards(reference: str, settings: DataSettings, roles: Sequence[str]) -> Data:
    """Data from `wds/FOLDER`: images .jpg .jpeg .png .webp, labels from .cls (an integer) or .json (key 'label').

    Labels are -1 where a sample has none. Classes are numbered; an optional ``classes.txt`` in the folder names them,
    one a line.

    Raises:
        DataError: no such folder or shards, a damaged or compressed tar file, a label that is not an integer, or a
            sample key that occurs twice.
    """
    name = reference.partition("/")[2]
    folder = Path(name) if Path(name).is_dir() else (settings.data_root or Path()) / name
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {str(folder)!r} for --data {reference}",
            todo=f"give wds/FOLDER, or its parent as --data-root; {_LAYOUT}",
        )
    test = settings.test_split or next((s for s in TEST_NAMES if _shards(folder, s)), TEST_NAMES[0])
    names = {role: settings.train_split if role == "train" else test for role in roles}
    splits: dict[str, ImageSplit] = {}
    for role, split in names.items():
        splits[role] = _index(split, folder, settings.fingerprint == "content")
    listed = folder / "classes.txt"
    if listed.is_file():
        class_names = tuple(line.strip() for line in listed.read_text("utf-8").splitlines() if line.strip())
    else:
        top = max((int(split.labels.max(initial=-1)) for split in splits.values()), default=-1)
        class_names = tuple(map(str, range(top + 1)))
    return Data(reference, class_names, splits, names)


def _shards(folder: Path, split: str) -> list[str]:
    found = [*folder.glob(f"{split}-*.tar"), *folder.glob(f"{split}.tar"), *(folder / split).glob("*.tar")]
    return sorted((path.relative_to(folder).as_posix() for path in found), key=natural_key)


def _index(split: str, folder: Path, content: bool) -> ShardSplit:
    shards = _shards(folder, split)
    if not shards:
        there = sorted(p.name for p in folder.iterdir())
        raise DataError(f"{folder} has no shards of {split!r}; it holds {few(there, 10) or 'nothing'}", todo=_LAYOUT)
    image_ids: list[str] = []
    labels: list[int] = []
    members: list[Member] = []
    for number, shard in enumerate(shards):
        for key, (member, label) in _samples(folder / shard, number).items():
            if member is not None:
                image_ids.append(f"{shard.removesuffix('.tar')}/{key}")
                labels.append(label)
                members.append(member)
    return ShardSplit(split, folder, shards, image_ids, np.array(labels, np.int64), np.array(members), content=content)


def _samples(path: Path, shard: int) -> dict[str, tuple[Member | None, int]]:
    """Key -> (image, label), in the tar file's order. A key is the name up to the first dot behind the last '/'."""
    samples: dict[str, tuple[Member | None, int]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                head, slash, base = info.name.rpartition("/")
                key, _, kind = base.partition(".")
                if not info.isfile() or not key:
                    continue
                key, kind = head + slash + key, kind.lower()
                member, label = samples.get(key, (None, -1))
                if kind in _IMAGES:
                    if member is not None:
                        raise DataError(f"the sample {key!r} occurs twice in {path}", todo="make the keys unique")
                    member = Member(shard, info.offset_data, info.size)
                elif kind in {"cls", "json"}:
                    file = tar.extractfile(info)
                    label = _label(file.read() if file else b"", kind, f"{path}, {info.name}", label)
                else:
                    continue
                samples[key] = member, label
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"cannot read the shard {path}: {error}",
            todo="it must be a whole, uncompressed tar file; copy or make it again",
        ) from error
    return samples


def _label(text: bytes, kind: str, where: str, before: int) -> int:
    try:
        value = json.loads(text)
        if kind == "json":
            value = value.get("label", before)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(value)
        return value
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"the label {text[:40]!r} is not an integer", where=where, todo="labels are integers that count from 0"
        ) from error
