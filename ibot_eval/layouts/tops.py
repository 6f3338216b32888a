"""What sits on top of a backbone in a file: projection heads and classifiers."""

from __future__ import annotations

from torch import nn

from ibot_eval.heads import ProjectionHead
from ibot_eval.layouts.blueprint import Tensors
from ibot_eval.layouts.matching import check_finite
from ibot_eval.layouts.unwrapping import Network

CLASSIFIERS = ("head", "head.fc", "fc", "classifier", "linear", "linear_head", "cls_head")
"""Names of classifiers, after the backbone's own prefix or beside the backbone."""


def find_projection_head(network: Network) -> tuple[ProjectionHead | None, set[str]]:
    """The head of DINO, iBOT or DINOv2 (whose two heads become one with separate layers), if the file holds one.

    Returns:
        The head and the names of its tensors.

    Raises:
        CheckpointError: it is there, but its tensors do not fit together or are not finite.
    """
    for tensors in (network.siblings, network.trunk):
        for first in ("head.", "dino_head."):
            state = _below(tensors, first)
            if "mlp.0.weight" not in state or not any(name.startswith("last_layer.") for name in state):
                continue
            patches = _below(tensors, "ibot_head.")
            if patches and first == "dino_head.":
                renamed = {
                    name.replace("mlp.", "mlp2.").replace("last_layer.", "last_layer2."): t
                    for name, t in patches.items()
                }
                state = {**state, **renamed}
            check_finite({f"{first}{name}": tensor for name, tensor in state.items()})
            return ProjectionHead.from_state_dict(state), {n for n in tensors if n.startswith((first, "ibot_head."))}
    return None, set()


def find_classifier(network: Network) -> tuple[nn.Linear | nn.Sequential | None, set[str]]:
    """The linear classifier of a supervised, fine-tuned or probed network, if there is one, and its tensors' names.

    MAE's linear probe has a batch norm without weights before it (main_linprobe.py; eps 1e-6).
    """
    for tensors in (network.trunk, network.siblings):
        for name in CLASSIFIERS:
            classifier, names = _linear(tensors, name)
            if classifier is not None:
                return classifier, names
        if "head.0.running_mean" in tensors and "head.0.running_var" in tensors:
            classifier, names = _linear(tensors, "head.1")
            if classifier is not None:
                norm = nn.BatchNorm1d(classifier.in_features, affine=False, eps=1e-6)
                statistics = {part: tensors[f"head.0.{part}"].float() for part in ("running_mean", "running_var")}
                norm.load_state_dict(statistics, strict=False)
                statistics_names = {f"head.0.{part}" for part in (*statistics, "num_batches_tracked")}
                return nn.Sequential(norm, classifier), names | statistics_names
    return None, set()


def _linear(tensors: Tensors, name: str) -> tuple[nn.Linear | None, set[str]]:
    weight, bias = tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")
    if weight is None or weight.ndim != 2:
        return None, set()
    check_finite({f"{name}.{part}": t for part, t in (("weight", weight), ("bias", bias)) if t is not None})
    # Of shape only: the weights come from the file, and torch's generator is nobody's to advance here.
    classifier = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    state = {"weight": weight.float().clone()} | ({} if bias is None else {"bias": bias.float().clone()})
    classifier.load_state_dict(state, assign=True)
    return classifier, {f"{name}.weight", f"{name}.bias"}


def _below(tensors: Tensors, prefix: str) -> Tensors:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
