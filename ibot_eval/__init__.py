"""Evaluation of self-supervised Vision Transformers.

>>> record = ibot_eval.evaluate(my_module, "knn", "path/to/images", k=(10, 20))

Names are imported when first used, so that ``ibot-eval --help`` need not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ibot_eval.api import evaluate as evaluate
    from ibot_eval.api import load_backbone as load_backbone
    from ibot_eval.record import EvalRecord as EvalRecord
    from ibot_eval.record import load_records as load_records

_LAZY = {
    "evaluate": "ibot_eval.api",
    "load_backbone": "ibot_eval.api",
    "load_records": "ibot_eval.record",
    "EvalRecord": "ibot_eval.record",
}
__all__ = ["EvalRecord", "evaluate", "load_backbone", "load_records"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ibot_eval' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
