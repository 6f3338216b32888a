"""Published numbers beside one's own: a lookup in published.json, which quotes only what was published."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAMILY_METHODS = {"ibot": "iBOT", "dino": "DINO", "beit": "BEiT", "mocov3": "MoCo v3"}
"""Checkpoint family -> the method's name in published.json; other families have no entry there."""

USUAL_SIZE = 224
"""Pixels of the images behind a published number that names no size."""

_IDENTITY = frozenset({"protocol", "metric", "data", "method", "arch", "value", "unit", "source", "params"})


@functools.cache
def entries() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8")))


def lookup(
    protocol: str,
    metric: str,
    *,
    data: str | None,
    method: str | None,
    arch: str | None,
    params: Mapping[str, Any] | None = None,
    headline: bool = False,
) -> dict[str, Any] | None:
    """``{"value", "source"}`` of the published number for this metric, or None when none is known.

    An entry that names parameters (k, head, image size) matches only a metric with those parameters; one that names
    none belongs to the experiment's headline number and is shown there only, unless another names its parameters; its
    images have 224 pixels, as is usual, so a metric that says it was measured at another size has none of these.
    """
    if not (data and method and arch):
        return None
    params, found = params or {}, None
    for entry in entries():
        same = (entry["protocol"], entry["metric"], entry["data"], entry["method"], entry["arch"])
        if _folded(same) != _folded((protocol, metric, data, method, arch)):
            continue
        wanted = {**entry.get("params", {}), **{k: v for k, v in entry.items() if k not in _IDENTITY}}
        number = {"value": entry["value"], "source": entry["source"]}
        if wanted and all(params.get(name) == value for name, value in wanted.items()):
            return number
        if not wanted and headline and found is None and params.get("image_size", USUAL_SIZE) == USUAL_SIZE:
            found = number
    return found


def _folded(names: tuple[str, ...]) -> tuple[str, ...]:
    """Spelling of capitals is no reason to miss a number."""
    return tuple(name.casefold() for name in names)
