"""Names of the columns of saved predictions: a metric's name and some of its params, ``top1@k=20,order=reverse``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def column_parts(column: str) -> tuple[str, dict[str, str]]:
    """``top1@k=20,order=reverse`` as ``("top1", {"k": "20", "order": "reverse"})``."""
    name, _, rest = column.partition("@")
    pairs = re.split(r",(?=\w+=)", rest) if rest else []
    return name, {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def column_of(metric: Mapping[str, Any], columns: Iterable[str]) -> str | None:
    """The column of the predictions that ``metric`` was computed from, by name and params; None where there is none.

    Params that the column does not name may be anything. A column that names others than the metric, as where the
    metric is a mean over draws, is taken if there is no better one.
    """
    found = []
    own = {key: _bare(value) for key, value in metric["params"].items()}
    for column in columns:
        name, params = column_parts(column)
        if name == metric["name"] and all(own.get(key, _bare(v)) == _bare(v) for key, v in params.items()):
            found.append((len(params.keys() - own.keys()), -len(params), column))
    return min(found, key=lambda f: f[:2])[2] if found else None


def _bare(value: Any) -> str:
    """A tuple in a column's name is a list in the record."""
    return re.sub(r"[()\[\]' ]", "", str(value)).rstrip(",")
