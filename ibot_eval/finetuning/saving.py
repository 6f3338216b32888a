"""Fine-tuned networks as files that timm and ``load_checkpoint`` read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ibot_eval.checkpoint import LoadedCheckpoint
from ibot_eval.errors import CheckpointError
from ibot_eval.export import described, own_metadata
from ibot_eval.files import atomic_write_bytes, canonical_json
from ibot_eval.finetuning.network import Classifier
from ibot_eval.layouts.matching import check_finite
from ibot_eval.models import SwinBackbone

PROJECTION = "projection_head."
"""Stands before the names of projection layers; a network of timm's has none."""


def save_classifier(
    path: Path | str,
    classifier: Classifier,
    metadata: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes a fine-tuned network as safetensors under timm's names, whole or not at all.

    ``timm.create_model(…, num_classes=…).load_state_dict`` takes the tensors of a classifier without projection layers
    (``global_pool="avg"`` where it pools the mean), and ``load_checkpoint`` reads backbone and classifier back bit for
    bit; :func:`classifier_of` makes a :class:`Classifier` of that. Equal networks and metadata give equal bytes.

    Args:
        path: of a file called .safetensors.
        classifier: on any device.
        metadata: JSON-ready, e.g. ``class_names`` and ``image_size``; is kept beside what the readers need, which are
            the fields of ``layouts.blueprint.Hints``, ``pooling``, ``classes`` and ``head_layers``, and wins over it.
        state: all tensors, named as in ``classifier.state_dict()``, where the classifier itself holds only a part of
            them or others are meant.

    Raises:
        CheckpointError: a value is NaN or infinite.
        OSError: the file cannot be written; what was there before is left as it was.
    """
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in timm_tensors(classifier, classifier.state_dict() if state is None else state).items()
    }
    check_finite(tensors)
    about = described(classifier.backbone) | {
        "pooling": classifier.pooling,
        "classes": classifier.classes,
        "head_layers": _linear_layers(classifier.projection),
    }
    # One key only: safetensors writes several in an order that changes from run to run.
    atomic_write_bytes(path, save(tensors, {"ibot_eval": canonical_json(about | dict(metadata or {}))}))


def timm_tensors(classifier: Classifier, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of ``classifier.state_dict()`` under timm's names; no copies.

    Args:
        classifier: of whose kind the tensors are.
        state: named as in its ``state_dict()``.
    """
    head = "head.fc." if isinstance(classifier.backbone, SwinBackbone) else "head."
    renamed = {"backbone.net.": "", "projection.": PROJECTION, "head.": head}
    tensors = {}
    for name, tensor in state.items():
        # The adapter's second name of its last norm is left out.
        before = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        if before is not None:
            tensors[renamed[before] + name.removeprefix(before)] = tensor
    return tensors


def classifier_of(loaded: LoadedCheckpoint) -> Classifier:
    """The classifier that :func:`save_classifier` wrote, from what ``load_checkpoint`` made of the file.

    Args:
        loaded: its backbone and classifier are shared, not copied. Files of other programs are taken too, as long as
            their classifier is linear and takes the pooled output of their backbone.

    Returns:
        In evaluation mode, nothing to be trained.

    Raises:
        CheckpointError: the file has no linear classifier that fits its backbone.
    """
    backbone, head = loaded.backbone, loaded.classifier
    if not isinstance(head, nn.Linear):
        raise CheckpointError("the checkpoint has no linear classifier", where=loaded.report.reference)
    about = own_metadata(loaded.report.path)
    projection = _read_projection(loaded, about.get("head_layers", 0))
    width = backbone.dims[-1] if projection is None else _last_linear(projection).out_features
    if head.in_features != width:
        raise CheckpointError(
            f"the classifier takes {head.in_features} features and the network gives {width}",
            where=loaded.report.reference,
        )
    pooling = "mean" if getattr(backbone, "mean_pooled", False) or about.get("pooling") == "mean" else "cls"
    return Classifier(backbone, head, projection=projection, pooling=pooling).eval().requires_grad_(False)


def _read_projection(loaded: LoadedCheckpoint, layers: int) -> nn.Sequential | None:
    if not layers:
        return None
    with safe_open(str(loaded.report.path), "pt") as file:
        names = [name for name in file.keys() if name.startswith(PROJECTION)]  # noqa: SIM118
        tensors = {name.removeprefix(PROJECTION): file.get_tensor(name) for name in names}
    return projection_from(tensors)


def projection_from(tensors: Mapping[str, Tensor]) -> nn.Sequential:
    """Linear layers, batch norms where there are some, and a GELU after each pair, filled with ``N.weight`` …"""
    parts: list[nn.Module] = []
    for index in sorted({int(name.split(".")[0]) for name in tensors}):
        weight = tensors[f"{index}.weight"]
        while len(parts) < index:
            parts.append(nn.GELU())
        if weight.ndim == 2:
            parts.append(nn.Linear(weight.shape[1], weight.shape[0], device="meta"))
        else:
            parts.append(nn.BatchNorm1d(len(weight), device="meta"))
    layers = nn.Sequential(*parts, nn.GELU())
    layers.load_state_dict(dict(tensors), assign=True)
    return layers


def _linear_layers(projection: nn.Sequential | None) -> int:
    return 0 if projection is None else sum(isinstance(layer, nn.Linear) for layer in projection)


def _last_linear(projection: nn.Sequential) -> nn.Linear:
    return [layer for layer in projection if isinstance(layer, nn.Linear)][-1]
