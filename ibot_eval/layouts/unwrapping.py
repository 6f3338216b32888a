"""Finding the networks in a file, whatever dictionaries and prefixes they are wrapped in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.blueprint import Tensors

MARKERS = (
    "patch_embed.proj.weight",  # ViT, BEiT, Swin
    "embeddings.patch_embeddings.projection.weight",  # Hugging Face
    "layer1.0.conv1.weight",  # ResNet
)
"""Names that every network of a layout has; what stands before one is the network's prefix."""

WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
"""Modules that torch puts around others anywhere in a name."""

UNNAMING = {"module", "backbone", "encoder", "net", "network", "vit", "dinov2", "beit"}
"""Parts of a prefix that say nothing about which network it is."""
PREFERRED = ("teacher", "base_encoder", "encoder_q", "model", "state_dict", "model_state", "model_ema", "student")
"""Which network is taken when several match, best first. MoCo v3's evaluation takes the base encoder, and a fine-tuned
model's takes the model itself, not its average."""


@dataclass
class Network:
    """One network of a file."""

    prefix: str
    role: str
    trunk: Tensors
    """Names without prefix."""
    siblings: Tensors
    """Other tensors of the same dictionary that belong to no network, named from the network's parent."""

    @property
    def parts(self) -> list[str]:
        return [part for part in self.prefix.split(".") if part]


def find_networks(contents: Any) -> list[Network]:
    """All networks of a file's contents (nested mappings, or a module).

    Raises:
        CheckpointError: there is none; says what there is instead.
    """
    flat: Tensors = {}
    containers: dict[str, str] = {}
    for container, name, tensor in _tensors(contents, ""):
        full = WRAPPERS.sub("", f"{container}{name}").lstrip(".")
        flat[full], containers[full] = tensor, container
    prefixes = {
        full[: -len(marker)]
        for full in flat
        for marker in MARKERS
        if full.endswith(marker) and (len(full) == len(marker) or full[-len(marker) - 1] == ".")
    }
    if not prefixes:
        raise _nothing_found(flat, contents)
    names = _roles(prefixes)
    return [_network(prefix, names[prefix], flat, containers, prefixes) for prefix in sorted(prefixes)]


def _tensors(value: Any, path: str) -> Iterator[tuple[str, str, Tensor]]:
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if isinstance(inner, Tensor):
            yield path, str(name), inner
        else:
            yield from _tensors(inner, f"{path}{name}.")


def _network(prefix: str, role: str, flat: Tensors, containers: dict[str, str], prefixes: set[str]) -> Network:
    parts = prefix.rstrip(".").split(".") if prefix else []
    parent = "".join(f"{part}." for part in parts[:-1])
    inner = {other for other in prefixes if other != prefix and other.startswith(prefix)}
    home = {containers[name] for name in flat if name.startswith(prefix)}
    trunk, siblings = {}, {}
    for name, tensor in flat.items():
        if name.startswith(prefix) and not any(name.startswith(other) for other in inner):
            trunk[name[len(prefix) :]] = tensor
        elif name.startswith(parent) and not any(name.startswith(other) for other in prefixes):
            beside = name[len(parent) :]
            if containers[name] in home or beside.startswith("head."):
                siblings[beside] = tensor
    return Network(prefix, role, trunk, siblings)


def _roles(prefixes: set[str]) -> dict[str, str]:
    """A short name for each network, its whole prefix where short names clash."""
    roles = {}
    for prefix in prefixes:
        parts = [part for part in prefix.split(".") if part]
        telling = [part for part in parts if part not in UNNAMING]
        specific = [part for part in telling if part not in ("model", "state_dict")]
        roles[prefix] = (specific or telling or parts or [""])[0]
    values = list(roles.values())
    return {prefix: role if values.count(role) == 1 else prefix.rstrip(".") for prefix, role in roles.items()}


def choose(networks: list[Network], key: str | None) -> Network:
    """The network that ``key`` names, or the preferred one.

    ``key`` may be the network's role, any part of its prefix, or a dotted beginning of it.

    Raises:
        CheckpointError: no network has that key, or several do and none is preferred.
    """
    roles = [network.role for network in networks if network.role]
    matching = networks
    if key is not None:
        exact = [network for network in networks if network.role == key]
        matching = exact or [n for n in networks if key in n.parts or f"{n.prefix}.".startswith(f"{key}.")]
        if not matching:
            raise CheckpointError(
                f"the checkpoint has no network under the key {key!r}",
                todo=f"choose one of: {', '.join(sorted(roles))}" if roles else "leave --key out: it holds one network",
            )
    if len(matching) == 1:
        return matching[0]
    for preferred in PREFERRED:
        best = [network for network in matching if preferred in (network.role, *network.parts)]
        if len(best) == 1:
            return best[0]
    raise CheckpointError(
        f"the checkpoint holds {len(matching)} networks: {', '.join(sorted(n.role for n in matching))}",
        todo="choose one with --key",
    )


def passed_over(contents: Any, network: Network) -> str | None:
    """A remark where the file has a teacher, but another network is taken because that holds none."""
    names = {str(name).split(".")[0] for name in contents} if isinstance(contents, Mapping) else set()
    if "teacher" not in names or "teacher" in (network.role, *network.parts):
        return None
    return f"no whole network was found under teacher, so {network.role or 'the only network'} was taken"


def _nothing_found(flat: Tensors, contents: Any) -> CheckpointError:
    names = sorted(flat)
    if not names:
        keys = ", ".join(map(str, list(contents)[:8])) if isinstance(contents, Mapping) else type(contents).__name__
        return CheckpointError("the checkpoint holds no tensors", where=keys or "an empty dictionary")
    ends = re.compile(r"(^|\.)(linear\w*|head|fc|classifier|classifiers?_\w+|lin)(\.\d+)?\.(weight|bias)$")
    own = [name for name in names if not name.startswith(("optimizer", "scheduler"))]
    if own and all(ends.search(name) for name in own):
        return CheckpointError(
            "the checkpoint holds only a linear classifier, no backbone",
            where=", ".join(own[:5]),
            todo="give the self-supervised checkpoint that the classifier was trained on",
        )
    return CheckpointError(
        "no known network layout was found in the checkpoint",
        where=f"{len(names)} tensors, the first: {', '.join(names[:5])}",
        todo="supported: iBOT, DINO, DINOv2, DINOv3, BEiT, MAE, MoCo v3, DeiT, timm, Hugging Face ViT / DINOv2 / BEiT "
        "/ MAE, Swin, ResNet; any other network can be evaluated from Python with ibot_eval.models.wrap(module)",
    )
