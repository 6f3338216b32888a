"""Puts our operators in the place of mmcv's compiled module, where mmcv was installed without one."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from protocols.openmmlab import operators

NAME = "mmcv._ext"
IMPLEMENTED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (operators.nms, operators.roi_align_forward, operators.roi_align_backward, operators.softnms)
}


class StandIn(ModuleType):
    """A module that has every operator's name: mmcv asks for all of them when it is imported."""

    def __init__(self) -> None:
        super().__init__(NAME, "Operators over torchvision, from ibot-eval.")
        # Python's own look for a module asks a loaded one for its spec.
        self.__spec__ = importlib.machinery.ModuleSpec(NAME, loader=None)
        self.__dict__.update(IMPLEMENTED)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(
                f"mmcv's operator {name!r} is not in ibot-eval's stand-in, which has {', '.join(IMPLEMENTED)}; "
                "a model that needs it needs a compiled mmcv"
            )

        missing.__name__ = name
        return missing


def compiled() -> Path | None:
    """The file of mmcv's own operators, where mmcv has some. Imports nothing."""
    package = importlib.util.find_spec("mmcv")
    if package is None or package.submodule_search_locations is None:
        return None
    spec = importlib.machinery.PathFinder.find_spec(NAME, list(package.submodule_search_locations))
    return None if spec is None or spec.origin is None else Path(spec.origin)


def install() -> bool:
    """Makes ``import mmcv._ext`` find our operators, unless mmcv has its own. True where ours are in place."""
    if compiled() is None:
        sys.modules.setdefault(NAME, StandIn())
    return isinstance(sys.modules.get(NAME), StandIn)
