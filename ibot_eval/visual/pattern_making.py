"""From settings to a pattern bank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ibot_eval import distributed
from ibot_eval.data.opening import open_data
from ibot_eval.data.transforms import eval_transform
from ibot_eval.extraction import check_loading, default_workers
from ibot_eval.image_pass import Engine
from ibot_eval.recording import say
from ibot_eval.settings import DataSettings, EngineSettings
from ibot_eval.visual.pattern_bank import PatternBank
from ibot_eval.visual.patterns import TOP, K, make_bank
from ibot_eval.visual.prototypes import Level

if TYPE_CHECKING:
    from ibot_eval.checkpoint import LoadedCheckpoint


def make(
    loaded: LoadedCheckpoint,
    data: DataSettings,
    device: torch.device,
    *,
    engine: EngineSettings | None = None,
    split: Literal["train", "test"] = "test",
    level: Level = "patch",
    top: int = TOP,
    k: int = K,
    progress_file: Path | None = None,
) -> PatternBank:
    """The bank of a split of ``data``, the demonstration's digits where it names none; remarks go to stderr.

    Raises:
        UserError: as :func:`ibot_eval.visual.patterns.make_bank`, or data that cannot be opened.
    """
    engine = engine or EngineSettings()
    check_loading(engine.batch_size, engine.workers)
    data = _anywhere(replace(data, data=data.data or "demo"))
    transform = eval_transform(data, loaded.backbone)
    opened = distributed.everywhere(lambda: open_data(data, roles=(split,), labelled=False))
    say([f"warning: {warning}" for warning in opened.warnings])
    return make_bank(
        Engine(
            loaded,
            transform,
            device,
            engine.precision,
            engine.batch_size,
            default_workers(device) if engine.workers is None else engine.workers,
            data.bad_images,
            progress=True,
        ),
        opened,
        role=split,
        level=level,
        top=top,
        k=k,
        seed=engine.seed,
        settings=data,
        progress_file=progress_file,
    )


def _anywhere(settings: DataSettings) -> DataSettings:
    """``settings`` with absolute paths, so that the bank finds its images from any folder."""
    paths: dict[str, Any] = {
        name: value.absolute()
        for name in ("data_root", "test_labels")
        if isinstance(value := getattr(settings, name), Path)
    }
    if settings.data and Path(settings.data).is_dir() and settings.data != "demo":
        paths["data"] = str(Path(settings.data).absolute())
    return replace(settings, **paths)
