"""Settings of the protocols that damage images: which classifier, how often, what is drawn; and their checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ibot_eval.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ibot_eval.data.splits import Data
    from ibot_eval.settings import DataSettings

Grid = tuple[int, int]
Kind = Literal["random", "salient", "non-salient"]
Fill = Literal["mean", "black", "noise"]
Offset = Literal["none", "random", "half"]


@dataclass(frozen=True)
class DamageSettings:
    """What occlusion and shuffling share."""

    head: str = "auto"
    """Who classifies: a head file or run of linear --save-head, own (the checkpoint's classifier), knn (neighbours
    in the train split), or auto: own where there is one, else knn."""
    k: int = 20
    """Neighbours that vote, with knn."""
    temperature: float = 0.07
    """A neighbour's vote weighs exp(similarity / temperature), with knn."""
    repeats: int = 1
    """Number of times that what is random is drawn anew, each with its own seed; from 2 on, intervals are over these,
    not over images."""
    sheet: int = 4
    """Number of test images that are drawn at every level; 0 for none."""


def roles_for(head: str) -> tuple[str, ...]:
    """The splits that a classifier needs: that of the neighbours only where they may vote."""
    return ("train", "test") if head in ("auto", "knn") else ("test",)


def open_for(head: str, settings: DataSettings) -> Data:
    """The images that ``settings`` name.

    With ``auto``, data without a train split are opened without it: who needs it is found out later.

    Raises:
        UserError: as :func:`ibot_eval.data.opening.open_data`.
    """
    from ibot_eval.data.opening import open_data

    if head != "auto":
        return open_data(settings, roles=roles_for(head))
    try:
        return open_data(settings, roles=("train", "test"))
    except DataError as error:
        try:
            return open_data(settings, roles=("test",))
        except DataError:
            raise error from None


def check_damage(settings: DamageSettings) -> None:
    """Raises ConfigError for numbers that are out of range."""
    if settings.k < 1:
        raise ConfigError(f"{settings.k} neighbours cannot vote", where="--k", todo="give a number from 1")
    if not settings.temperature > 0 or math.isinf(settings.temperature):
        raise ConfigError(f"the temperature must be positive, not {settings.temperature}", where="--temperature")
    if settings.repeats < 1:
        raise ConfigError(f"{settings.repeats} repeats measure nothing", where="--repeats", todo="give 1 or more")
    if settings.sheet < 0:
        raise ConfigError(f"{settings.sheet} images cannot be drawn", where="--sheet", todo="give 0 or more")


def check_levels(levels: Sequence[int]) -> None:
    """Raises ConfigError unless ``levels`` are different percentages, ascending from 0, at least two."""
    if len(levels) < 2 or levels[0] != 0 or list(levels) != sorted(set(levels)) or levels[-1] > 100:
        given = " ".join(map(str, levels)) or "none"
        raise ConfigError(
            f"levels must be percentages that ascend from 0, and at least two; given: {given}",
            where="--levels",
            todo="0 is the clean image, which all other levels are compared with",
        )


def parse_grids(texts: Sequence[str]) -> list[Grid]:
    """``2x4`` -> (2, 4), rows first, ascending by the number of cells.

    Raises:
        ConfigError: another form, a grid named twice, or 1x1, the clean image, missing.
    """
    grids: list[Grid] = []
    for text in texts:
        rows, _, columns = text.lower().partition("x")
        if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
            raise ConfigError(f"{text!r} is not a grid", where="--grids", todo="write ROWSxCOLUMNS, such as 4x8")
        grids.append((int(rows), int(columns)))
    if len(set(grids)) < len(grids):
        raise ConfigError(f"a grid is named twice: {' '.join(texts)}", where="--grids")
    if (1, 1) not in grids or len(grids) < 2:
        raise ConfigError(
            "the grids need 1x1, the image as it is, and another",
            where="--grids",
            todo="1x1 is what all other grids are compared with",
        )
    return sorted(grids, key=lambda grid: (grid[0] * grid[1], grid))


def divides(grid: Grid, side: int) -> bool:
    """Whether an image of ``side`` x ``side`` pixels can be cut into ``grid`` equal cells."""
    return side % grid[0] == 0 and side % grid[1] == 0


def on_patch_grid(grid: Grid, side: int, patch: int) -> bool:
    """Whether every cell of ``grid`` holds whole patches of ``patch`` pixels, so that none is cut."""
    return divides(grid, side) and side // grid[0] % patch == 0 and side // grid[1] % patch == 0
