"""Reads checkpoints of mmdet, mmsegmentation and our own runs without running code from them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.reading import read_file


def read(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint as mmengine writes them, on the CPU.

    Args:
        path: a file of mmengine's Runner, of mmdet's and mmsegmentation's model zoos, or RUN/model.pth.

    Returns:
        ``state_dict`` (name -> tensor) and, where the file has them, ``meta``, ``optimizer``, ``message_hub`` and so
        on. Curves of past losses come as :class:`PastValues`.

    Raises:
        CheckpointError: there is no such file, it cannot be read, it needs Python objects other than those, or it
            has no ``state_dict`` of tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {str(path)!r}", todo="give a file, such as RUN/model.pth")
    with torch.serialization.safe_globals(_allowed()):
        try:
            contents, _ = read_file(path)
        except CheckpointError as error:
            # Its advice for backbones is to trust the file.
            todo = "fetch it again, or save its state_dict alone: torch.save({'state_dict': …}, FILE)"
            raise CheckpointError(error.what, where=error.where, todo=todo) from error
    weights = contents.get("state_dict") if isinstance(contents, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(
            f"{str(path)!r} is no checkpoint of a detector or a segmentor: it has no state_dict of tensors",
            todo="give RUN/model.pth, or a file of mmdet's or mmsegmentation's; a backbone goes to --ckpt",
        )
    return contents


class PastValues:
    """Stands for mmengine's HistoryBuffer: the values are attributes, and nothing can be called."""


class _Method:
    """Stands for a method of mmengine's HistoryBuffer, which each of them stores by name."""

    def __init__(self, name: str) -> None:
        self.name = name


def _named(owner: object, name: object) -> _Method:
    """What a file may ask of ``getattr``: the real one would reach any function from any object that is allowed."""
    if owner is not PastValues or not isinstance(name, str) or name.startswith("_"):
        raise pickle.UnpicklingError("builtins.getattr is allowed for methods of mmengine's HistoryBuffer only")
    return _Method(name)


def _allowed() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Names in the files -> what is made in their place."""
    return [
        (PastValues, "mmengine.logging.history_buffer.HistoryBuffer"),
        (_named, "builtins.getattr"),
        (_named, "__builtin__.getattr"),
    ]
