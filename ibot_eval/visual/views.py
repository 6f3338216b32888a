"""Two views of one picture: where a patch of one lies in the other."""

from __future__ import annotations

import numpy as np

from ibot_eval.errors import ConfigError
from ibot_eval.visual.correspondence import Matches, accuracy, with_errors
from ibot_eval.visual.pictures import Picture


def true_places(left: Picture, right: Picture, patches: np.ndarray) -> np.ndarray:
    """Where the centres of left patches lie in the right view.

    Args:
        patches: (M, 2) int64 (row, column) of the left view.

    Returns:
        (M, 2) float64 (row, column) in patches of the right view, a patch's own centre being its whole number; NaN
        where the place is more than half a patch from every centre, so outside of the view.

    Raises:
        ConfigError: the views are of two different pictures.
    """
    if left.source.sha256 != right.source.sha256:
        raise ConfigError(f"{left.name} and {right.name} are not views of one picture")
    x, y = _to_source(left, patches)
    x0, y0, x1, y1 = right.box
    across, down = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
    if right.flip:
        across = 1 - across
    h, w = right.grid
    places = np.stack([down * h - 0.5, across * w - 0.5], axis=1)
    tolerance = 0.5 + 1e-9
    beyond = np.maximum(-places, places - np.array([h - 1, w - 1])).max(axis=1)
    return np.where((beyond <= tolerance)[:, None], places, np.nan)


def with_geometry(matches: Matches, left: Picture, right: Picture) -> Matches:
    """``matches`` with their distances (Euclidean, in patches of the right view) from the true places.

    Raises:
        ConfigError: the views are of two different pictures.
    """
    return with_errors(matches, np.linalg.norm(matches.right - true_places(left, right, matches.left), axis=1))


def accuracy_in_words(matches: Matches, left: Picture, right: Picture, *, mutual: bool = False) -> str:
    """A clause that says how many matches of two views are right, or why that cannot be said.

    Args:
        matches: with the distances of :func:`with_geometry`.
        mutual: whether ``matches`` are only those that are mutual.

    Raises:
        ConfigError: the geometry is not known.
    """
    percent, among = accuracy(matches)
    if among:
        what = "mutual matches" if mutual else "patches"
        return f"{percent:.1f} % of {among} {what} that both views show lie within 1 patch of their true place"
    every = np.argwhere(np.ones(left.grid, bool))
    if np.isnan(true_places(left, right, every)).all():
        return "the views do not overlap: there is no patch that both views show"
    return "no match of a patch that both views show is mutual"


def _to_source(picture: Picture, patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and y of the patches' centres, as fractions of the source."""
    h, w = picture.grid
    across, down = (patches[:, 1] + 0.5) / w, (patches[:, 0] + 0.5) / h
    if picture.flip:
        across = 1 - across
    x0, y0, x1, y1 = picture.box
    return x0 + across * (x1 - x0), y0 + down * (y1 - y0)
