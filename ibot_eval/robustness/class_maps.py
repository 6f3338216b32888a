"""From the classes that a classifier knows to those of a test set: read from a file, or matched by name."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ibot_eval.data.splits import few
from ibot_eval.errors import ConfigError, DataError

NOWHERE = -1
"""In a map: the class has no counterpart."""


def read_class_map(path: Path | str, sources: int, targets: int, names: Sequence[str] | None = None) -> np.ndarray:
    """Reads ``{"0": 0, "1": -1, …}``: from the index of each class of the classifier to one of the test set, or -1.

    This is the form of ``in_to_in9.json``, which belongs to the public ImageNet-9 challenge.

    Args:
        path: the file.
        sources: number of the classifier's classes.
        targets: number of the test set's.
        names: of the classifier's classes, where they are known. Where these are ImageNet's 1000 in another order than
            the usual one, which a map of 1000 follows, names tell which is which.

    Returns:
        (sources,) int64.

    Raises:
        ConfigError: no such file, or one of another form.
        DataError: a class of the classifier that the map misses, one that the classifier does not have, or a class of
            the test set that nothing maps to.
    """
    where = str(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the class map {path}: {error.strerror}",
            where="--class-map",
            todo="give the in_to_in9.json of the public challenge",
        ) from None
    except ValueError as error:
        raise ConfigError(f"the class map {path} is not JSON: {error}", where="--class-map") from None
    try:
        pairs = {int(source): int(target) for source, target in content.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"the class map {path} is not of the form {{index: index}}",
            where="--class-map",
            todo='write {"0": 0, "1": -1, …}: the classifier\'s class, then that of the test set or -1',
        ) from None
    missing = [str(index) for index in range(sources) if index not in pairs]
    if missing:
        raise DataError(
            f"the class map misses {len(missing)} of the classifier's {sources} classes: {few(missing, 10)}",
            where=where,
            todo="map each to a class of the test set, or to -1",
        )
    surplus = sorted(set(pairs) - set(range(sources)))
    if surplus:
        raise DataError(
            f"the class map is for {len(pairs)} classes, and the classifier has {sources}: it lacks "
            f"{few(map(str, surplus), 5)}",
            where=where,
            todo="give the map of this classifier's classes",
        )
    outside = sorted({target for target in pairs.values() if not NOWHERE <= target < targets})
    if outside:
        raise DataError(
            f"the class map leads to {few(map(str, outside), 10)}, but the test set has {targets} classes", where=where
        )
    order = _imagenet_order(names, sources)
    class_map = np.array([pairs[index] for index in (range(sources) if order is None else order.tolist())], np.int64)
    unreached = np.setdiff1d(np.arange(targets), class_map)
    if len(unreached):
        raise DataError(
            f"nothing in the class map leads to {len(unreached)} of the test set's {targets} classes: "
            f"{few(map(str, unreached), 10)}",
            where=where,
        )
    return class_map


def _imagenet_order(names: Sequence[str] | None, count: int) -> np.ndarray | None:
    """Place of each name among ImageNet's 1000 classes; None unless they are these, each once."""
    usual = imagenet_classes(count) if count == 1000 else None
    if names is None or usual is None:
        return None
    places = match_by_name(names, usual)
    return places if len(np.setdiff1d(places, [NOWHERE])) == count else None


def match_by_name(known: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
    """Which class of a test set each class of a classifier is.

    Equal names are the same class. Of ImageNet's classes, an id such as n01440764 is the same class as a name of it
    (tench), as long as no other class of ImageNet-1K has that name.

    Args:
        known: names of the classifier's classes.
        wanted: names of the test set's.

    Returns:
        (len(known),) int64, places in ``wanted``; :data:`NOWHERE` for classes that are not there.
    """
    place = {name: index for index, name in enumerate(wanted)}
    found = [place.get(name, NOWHERE) for name in known]
    taken = set(found)
    open_places = {_synset(name): index for index, name in enumerate(wanted) if index not in taken}
    open_places.pop(None, None)
    if open_places:
        found = [
            open_places.get(_synset(n), NOWHERE) if at == NOWHERE else at for n, at in zip(known, found, strict=True)
        ]
    return np.array(found, np.int64)


def imagenet_classes(count: int) -> list[str] | None:
    """WordNet ids of ImageNet's classes in the usual order of a classifier of so many; None where none is usual."""
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    return None if subset is None else list(ImageNetInfo(subset).label_names())


def _synset(name: str) -> str | None:
    """``n01440764`` for itself and for names of that class of ImageNet-1K; None for any other text."""
    if re.fullmatch(r"n\d{8}", name):
        return name
    found = {_synsets().get(lemma) for lemma in _lemmas(name)} - {None}
    return found.pop() if len(found) == 1 else None


@functools.cache
def _synsets() -> dict[str, str | None]:
    """Name -> WordNet id of the classes of ImageNet-1K; None for a name that several of them have."""
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    synsets: dict[str, str | None] = {}
    for wnid in info.label_names():
        for lemma in _lemmas(info.label_name_to_description(wnid)):
            synsets[lemma] = wnid if synsets.get(lemma, wnid) == wnid else None
    return synsets


def _lemmas(text: str) -> list[str]:
    """The names in ``tench, Tinca tinca``, in ``('tench', 'Tinca tinca')`` as torchvision gives them, or golf_ball."""
    return [part.strip(" '\"()[]").replace("_", " ").lower() for part in text.split(",")]
