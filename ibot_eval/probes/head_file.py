"""Linear classifiers in files: the weights, and all that is needed to feed them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from ibot_eval.errors import CheckpointError
from ibot_eval.files import atomic_write_bytes, canonical_json

FORMAT = 1
METADATA_KEY = "ibot_eval_head"
HEAD_FILE = "head.safetensors"
"""In a run's folder."""


@dataclass
class ClassifierHead:
    """A linear classifier of frozen features."""

    weight: Tensor
    """(C, D) float32."""
    bias: Tensor
    """(C,) float32; zeros where the classifier has none."""
    class_names: Sequence[str]
    """C names, in the order of the rows."""
    labels: Sequence[int]
    """C labels that the rows stand for in the data set they were learnt on, ascending."""
    features: Sequence[Mapping[str, Any]]
    """What it takes, concatenated in this order: ``{"block", "norm", "reducer"}`` of each atomic output."""
    normalised: bool = False
    """Whether the concatenated features are divided by their l2 norm first."""
    protocol: str = ""
    """Which protocol trained it."""
    backbone: Mapping[str, Any] = field(default_factory=dict)
    """Whose features: reference, sha256, key, architecture."""
    transform: Mapping[str, Any] = field(default_factory=dict)
    """What images went through before (``EvalTransform.describe()``)."""

    def __post_init__(self) -> None:
        shapes = (tuple(self.weight.shape[:1]), tuple(self.bias.shape), (len(self.class_names),), (len(self.labels),))
        if self.weight.ndim != 2 or len(set(shapes)) > 1:
            raise ValueError(f"weight, bias, class names and labels of a head do not fit together: {shapes}")

    def logits(self, features: Tensor) -> Tensor:
        """(…, D) features, as concatenated from ``self.features`` -> (…, C) on the same device."""
        features = features.float()
        if self.normalised:
            features = F.normalize(features, dim=-1)
        return F.linear(features, self.weight.to(features.device), self.bias.to(features.device))

    def save(self, path: Path | str) -> Path:
        """Writes a safetensors file, whole or not at all, and returns its path."""
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("weight", "bias")}
        about |= {"labels": [int(label) for label in self.labels], "class_names": [str(c) for c in self.class_names]}
        tensors = {"weight": self.weight, "bias": self.bias}
        tensors = {name: t.detach().cpu().float().contiguous() for name, t in tensors.items()}
        text = canonical_json({"format": FORMAT, **about})
        atomic_write_bytes(path, save(tensors, {METADATA_KEY: text}))
        return Path(path)


def load_head(path: Path | str) -> ClassifierHead:
    """Reads what :meth:`ClassifierHead.save` wrote; ``path`` may be the run folder that holds ``head.safetensors``.

    Raises:
        CheckpointError: no such file, or one that does not hold a head.
    """
    path = Path(path)
    file = path / HEAD_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(
            f"no classifier head at {file}",
            todo="train one with `ibot-eval linear --save-head`, and give its run folder",
        )
    try:
        with safe_open(str(file), "pt") as opened:
            about = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
            if not about:
                raise CheckpointError(
                    f"{file} is not a classifier head of ibot-eval",
                    todo="give the head.safetensors of a run with --save-head",
                )
            tensors = {name: opened.get_tensor(name) for name in ("weight", "bias")}
        if about.pop("format", None) != FORMAT:
            raise CheckpointError(f"{file} has another format than {FORMAT}", todo="upgrade ibot-eval")
        known = {f.name for f in fields(ClassifierHead)}
        return ClassifierHead(**tensors, **{name: value for name, value in about.items() if name in known})
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"the classifier head {file} is damaged: {error}") from None
