"""What the settings of detection and segmentation have in common. Imports no mm*, so that help needs none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ibot_eval.errors import ConfigError


@dataclass(frozen=True)
class DenseConfig:
    """Settings of training a network for dense prediction, and of what is done beside it."""

    freeze_blocks: int = 0
    """Blocks, from the first, that are not trained, nor is what comes before them."""
    checkpoint_blocks: bool = False
    """Recompute the backbone's activations in the backward pass: less memory, about a third more time."""
    window: int = 0
    """Side in patches of the windows that blocks attend in, but for those whose outputs are used; 0 for none. For
    images so large that attention over all of them does not fit."""
    clip_grad: float = 0.0
    """Largest joint norm of the gradients; 0 for none."""
    eval_every: int = 0
    """Iterations between two looks at the test images; 0 looks at the end only."""
    log_every: int = 50
    """Iterations between lines of log.jsonl."""
    keep: int = 2
    """Training states to keep while the run goes on, the newest ones."""
    save_minutes: float = 10.0
    """Minutes of training between two states to go on from, all that can be lost when a run is broken off."""
    bootstrap: int = 1000
    """Draws of test images that the 95 % intervals come from; 0 for no intervals."""
    draw: int = 8
    """Test images that are drawn with predictions beside the annotations, in RUN/pictures."""
    trained: Path | None = None
    """Only test: the model.pth of an earlier run with the same settings."""
    check_data: bool = False
    """Only check the annotations and show how often each class occurs."""
    config: Path | None = None
    """Configuration in the format of OpenMMLab, such as the mmengine_config.py of an earlier run, in place of the one
    these flags describe. Data, classes, checkpoint, seed and evaluation still come from the flags. A .py file is code
    that is run: give only files that you trust."""
    set: tuple[str, ...] = ()
    """Changes to that configuration, such as model.neck.num_outs=4 train_dataloader.batch_size=2."""


MAY_CHANGE = frozenset(
    {"checkpoint_blocks", "log_every", "keep", "save_minutes", "bootstrap", "draw", "check_data"},
)
"""Settings that a run may be gone on with others of: none changes what is trained but by rounding."""

Range = tuple[Callable[[Any], bool], str]


def at_least(least: float) -> Range:
    return (lambda value: least <= value < math.inf), f"it is {least} or above"


RATE: Range = (lambda value: 0 < value <= 1), "it is above 0, and at most 1"
PART: Range = (lambda value: 0 <= value < 1), "it is at least 0 and below 1"
POSITIVE: Range = (lambda value: 0 < value < math.inf), "it must be above 0"

_RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("freeze_blocks", "window", "clip_grad", "eval_every", "save_minutes"), at_least(0)),
    **dict.fromkeys(("bootstrap", "draw"), at_least(0)),
    **dict.fromkeys(("log_every", "keep"), at_least(1)),
}


def check(config: DenseConfig, ranges: Mapping[str, Range]) -> None:
    """Raises ConfigError for settings that are out of range or name no file.

    Args:
        ranges: name of a setting -> whether a value (each, of a tuple) will do, and what is said if not.
    """
    given = asdict(config)
    for name, (fits, needed) in {**_RANGES, **ranges}.items():
        for value in given[name] if isinstance(given[name], tuple) else [given[name]]:
            if not fits(value):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: {needed}")
    for name in ("config", "trained"):
        path = given[name]
        if path is not None and not path.is_file():
            raise ConfigError(f"--{name} {path}: there is no such file")


def identity_of(config: DenseConfig) -> dict[str, Any]:
    """The settings, JSON-like, that a run which is gone on with must have in common with its beginning."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
        if name not in MAY_CHANGE
    }
