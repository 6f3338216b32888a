"""From a checkpoint in any published layout to (backbone, projection head or None, classifier or None) and a report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ibot_eval.backbone import IMAGENET_MEAN, IMAGENET_STD, Backbone
from ibot_eval.errors import CheckpointError
from ibot_eval.files import sha256_file
from ibot_eval.heads import ProjectionHead
from ibot_eval.layouts import named
from ibot_eval.layouts.beit import has_relative_bias, read_beit
from ibot_eval.layouts.blueprint import Blueprint, Hints
from ibot_eval.layouts.cnn import is_resnet, read_resnet
from ibot_eval.layouts.dinov3 import is_dinov3, read_dinov3
from ibot_eval.layouts.huggingface import is_hugging_face, republish
from ibot_eval.layouts.matching import Match, fill, may_be_left_over
from ibot_eval.layouts.reading import Location, hints_beside, locate, read_file
from ibot_eval.layouts.swin import is_swin, read_swin
from ibot_eval.layouts.tops import find_classifier, find_projection_head
from ibot_eval.layouts.unwrapping import Network, choose, find_networks, passed_over
from ibot_eval.layouts.vit import read_vit
from ibot_eval.models import wrap
from ibot_eval.models.identity import identity_of
from ibot_eval.settings import CheckpointSettings

NAMED = ("timm:", "hf-hub:", "random:")

GUESS_NOTE = (
    "the file does not tell what its inputs are normalised with: ImageNet's mean and deviation are a guess (Google's "
    "supervised ViTs take 0.5 / 0.5); --mean and --std change them"
)


@dataclass
class LoadReport:
    """What was found in a checkpoint and what became of it."""

    reference: str
    """As given by the user."""
    path: str | None
    sha256: str
    """Of the file; of the tensors where there is none."""
    key: str | None
    """The network taken, where the file names several or one by a key."""
    available_keys: list[str]
    family: str
    architecture: str
    image_size: tuple[int, int] | None
    """Height and width in pixels it was trained at, where known."""
    patch_size: int
    width: int
    depth: int
    num_heads: int
    num_registers: int
    matched: int
    """Tensors of the backbone that the file filled: all of them, or loading fails."""
    parameters: int
    """Numbers in them."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Left over, and on the allow-list of what may be (layouts.matching)."""
    projection_head: dict[str, Any] | None = None
    classifier: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    """Remarks in plain words."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """What the user set by hand that changes the network or its outputs."""
    identity: dict[str, Any] = field(default_factory=dict)
    """All that shapes what the network computes besides its tensors, JSON-ready; see ``models.identity``."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        values = asdict(self)
        values["image_size"] = list(self.image_size) if self.image_size else None
        return values


@dataclass
class LoadedCheckpoint:
    """A network ready for evaluation: eval mode, float32 on the CPU, nothing to be trained."""

    backbone: Backbone
    projection_head: ProjectionHead | None
    classifier: nn.Module | None
    """Maps what ``report.classifier["input"]`` says (cls, norm_patch_mean, cls+patch_mean) to logits."""
    report: LoadReport
    cacheable: bool = True
    """Whether its features may be kept: not where its code is somebody's own, which no hash of ours covers."""
    masked_embed: Tensor | None = None
    """(1, D) float32, what iBOT's pre-training put in place of masked patches, if the file holds it."""


def load_checkpoint(
    settings: CheckpointSettings, *, sha256: Callable[[Path], str] | None = None, seed: int = 0
) -> LoadedCheckpoint:
    """Reads the checkpoint that ``settings`` name.

    Args:
        settings: file, run folder, Hugging Face folder, ``timm:NAME``, ``hf-hub:ID``, ``random:NAME`` or ``demo``.
        sha256: gives the hash of a file, e.g. a remembered one; by default the file is hashed.
        seed: of random weights.

    Raises:
        CheckpointError: it cannot be found, opened, understood, or does not fill the whole backbone.
    """
    if not settings.ckpt:
        raise CheckpointError("no checkpoint was given", todo="--ckpt FILE, or --ckpt demo to try the program out")
    demo = settings.ckpt == "demo"
    if demo or settings.ckpt.startswith(NAMED):
        _refuse_flags_of_files(settings)
    if demo and named.DEMO_FILE.is_file():
        loaded = _load_file(settings, Location(named.DEMO_FILE, "teacher", ("teacher",)), sha256 or sha256_file)
        loaded.report.notes.insert(0, named.DEMO_NOTE)
    elif demo or settings.ckpt.startswith(NAMED):
        loaded = _load_named(settings, seed)
    else:
        loaded = _load_file(settings, locate(settings.ckpt, settings.key), sha256 or sha256_file)
    for module in (loaded.backbone, loaded.projection_head, loaded.classifier):
        if module is not None:
            module.float().eval().requires_grad_(False)
    return loaded


def _refuse_flags_of_files(settings: CheckpointSettings) -> None:
    ignored = [flag for flag in ("key", "arch", "patch_size", "heads", "grid") if getattr(settings, flag) is not None]
    if ignored:
        raise CheckpointError(
            f"--{ignored[0].replace('_', '-')} is for files; {settings.ckpt!r} names its network in full",
            todo="leave it out",
        )


def _load_named(settings: CheckpointSettings, seed: int) -> LoadedCheckpoint:
    reference = settings.ckpt or ""
    kind, _, name = reference.partition(":")
    notes = []
    if kind in ("random", "demo"):
        net = named.random_network(name if kind == "random" else "demo", seed)
        family, notes = named.family_of_name(name), [named.RANDOM_NOTE]
    else:
        full = name if kind == "timm" else reference
        net, family = named.pretrained_network(full), named.family_of_name(full)
    sha256 = named.tensors_sha256(net.state_dict())
    classifier = _detach_classifier(net)
    backbone = wrap(net, family=family, resize=_resize(settings))
    match = Match.whole(net.state_dict())
    grid = getattr(backbone, "trained_grid", None)
    report = report_of(backbone, match, reference, sha256, grid=grid, notes=notes, overrides=_overrides(settings))
    if name and kind != "demo":
        report.identity |= {"name": name, "timm": timm.__version__}
    rule = getattr(backbone, "resize", None)
    if rule not in (None, "size-antialias") and settings.pos_embed_resize == "published" and kind != "demo":
        report.notes.append(
            f"position embeddings are resized as {family}'s published code does ({rule}); timm's own way is "
            "--pos-embed-resize size-antialias"
        )
    if classifier is not None:
        report.classifier = _described(classifier, backbone)
        report.notes.append(_classifier_note(report.classifier))
    return LoadedCheckpoint(backbone, None, classifier, report)


def _detach_classifier(net: nn.Module) -> nn.Module | None:
    get, reset = getattr(net, "get_classifier", None), getattr(net, "reset_classifier", None)
    if get is None or reset is None:
        return None
    classifier = get()
    reset(0)
    return classifier if isinstance(classifier, nn.Linear) else None


def _load_file(settings: CheckpointSettings, location: Location, sha256: Callable[[Path], str]) -> LoadedCheckpoint:
    before = location.path.stat()
    contents, metadata = read_file(location.path, trust_pickle=settings.trust_pickle)
    networks = find_networks(contents)
    network = choose(networks, None if location.key else settings.key)
    roles = list(location.keys) or sorted(other.role for other in networks if other.role)
    key = location.key or network.role or None
    notes = []
    remark = passed_over(contents, network) if settings.key is None else None
    if remark is not None:
        notes.append(remark)
    if len(roles) > 1:
        others = ", ".join(role for role in roles if role != key)
        notes.append(f"the {key} was taken; the checkpoint also holds {others} (choose with --key)")

    asked = Hints(heads=settings.heads, patch_size=settings.patch_size, grid=settings.grid)
    hints = asked.over(hints_beside(location.path, metadata))
    if is_hugging_face(network):
        network, hints = republish(network, hints)
    blueprint = _blueprint(network, hints, settings.arch)
    match = fill(blueprint.net, blueprint.tensors)
    head, head_names = find_projection_head(network)
    classifier, classifier_names = find_classifier(network)
    beside = [name for name in network.siblings if name not in blueprint.tensors]
    match.unexpected += [name for name in beside if not may_be_left_over(name)]
    match.ignored += [name for name in beside if may_be_left_over(name)]
    used = head_names | classifier_names
    match.unexpected = [name for name in match.unexpected if name not in used]
    match.ignored = [name for name in match.ignored if name not in used]
    if match.unexpected:
        notes.append(f"{len(match.unexpected)} tensors are unknown and were left out, e.g. {match.unexpected[0]}")

    backbone = wrap(blueprint.net, family=blueprint.family, resize=_resize(settings) or blueprint.resize)
    backbone.mean, backbone.std = blueprint.mean or IMAGENET_MEAN, blueprint.std or IMAGENET_STD
    if blueprint.mean is None and blueprint.family in ("hf-vit", "supervised", "timm"):
        notes.append(GUESS_NOTE)
    digest, overrides = sha256(location.path), _overrides(settings)
    report = report_of(
        backbone, match, settings.ckpt or "", digest, grid=blueprint.grid, notes=notes, overrides=overrides
    )
    _refuse_change(location.path, before)
    report.path, report.key, report.available_keys = str(location.path), key, roles
    report.notes += blueprint.notes
    if head is not None:
        report.projection_head = {
            "K": head.num_prototypes,
            "hidden": head.hidden,
            "bottleneck": head.bottleneck,
            "shared": head.sharing == "shared",
        }
        report.notes.append(f"a projection head with {head.num_prototypes} prototypes was found")
    if classifier is not None:
        report.classifier = _described(classifier, backbone)
        report.notes.append(_classifier_note(report.classifier))
    masked_embed = network.trunk.get("masked_embed")
    if masked_embed is not None:
        masked_embed = masked_embed.to(torch.float32, copy=True)
    return LoadedCheckpoint(backbone, head, classifier, report, masked_embed=masked_embed)


def _refuse_change(path: Path, before: os.stat_result) -> None:
    """The hash must be of the tensors that were read, or results would be stored under the name of others."""
    try:
        after = path.stat()
        same = all(getattr(before, part) == getattr(after, part) for part in ("st_ino", "st_size", "st_mtime_ns"))
    except FileNotFoundError:
        same = False
    if not same:
        raise CheckpointError(
            f"checkpoint {str(path)!r} changed while it was read", todo="run again once it is no longer being written"
        )


def _blueprint(network: Network, hints: Hints, arch: str | None) -> Blueprint:
    if arch is not None:
        return named.read_as(arch, network, replace(hints, arch=None))
    if hints.arch is not None:
        return named.read_as(hints.arch, network, hints)
    if is_resnet(network):
        return read_resnet(network, hints)
    if is_swin(network):
        return read_swin(network, hints)
    if has_relative_bias(network):
        return read_beit(network, hints)
    if is_dinov3(network):
        return read_dinov3(network, hints)
    return read_vit(network, hints)


def _resize(settings: CheckpointSettings) -> Any:
    return None if settings.pos_embed_resize == "published" else settings.pos_embed_resize


def _overrides(settings: CheckpointSettings) -> dict[str, Any]:
    overrides = {name: getattr(settings, name) for name in ("arch", "patch_size", "heads", "grid")}
    overrides["pos_embed_resize"] = _resize(settings)
    return {name: value for name, value in overrides.items() if value is not None}


def report_of(
    backbone: Backbone,
    match: Match,
    reference: str,
    sha256: str,
    *,
    grid: tuple[int, int] | None = None,
    notes: list[str],
    overrides: dict[str, Any] | None = None,
) -> LoadReport:
    """The report of a network, without what only some sources have (path, key, heads).

    Args:
        grid: rows and columns of patches it was trained with, where known.
        overrides: what the user set by hand.
    """
    patch = getattr(backbone, "embed_patch_size", backbone.patch_size)
    return LoadReport(
        reference=reference,
        path=None,
        sha256=sha256,
        key=None,
        available_keys=[],
        family=backbone.family,
        architecture=backbone.architecture,
        image_size=(grid[0] * patch, grid[1] * patch) if grid else None,
        patch_size=backbone.patch_size,
        width=backbone.dims[-1],
        depth=backbone.depth,
        num_heads=backbone.num_heads,
        num_registers=backbone.num_registers,
        matched=match.matched,
        parameters=match.parameters,
        missing=match.missing,
        unexpected=match.unexpected,
        ignored=match.ignored,
        notes=notes,
        overrides=overrides or {},
        identity=identity_of(backbone),
    )


def _described(classifier: nn.Module, backbone: Backbone) -> dict[str, Any]:
    if isinstance(classifier, nn.Sequential):
        classifier = classifier[-1]
    if not isinstance(classifier, nn.Linear):
        return {"classes": None, "input": "unknown"}
    inputs = {backbone.dims[-1]: "cls", 2 * backbone.dims[-1]: "cls+patch_mean"}
    if getattr(backbone, "mean_pooled", False):
        inputs[backbone.dims[-1]] = "norm_patch_mean"
    return {"classes": classifier.out_features, "input": inputs.get(classifier.in_features, "unknown")}


def _classifier_note(classifier: dict[str, Any]) -> str:
    return (
        f"the checkpoint has a classifier of {classifier['classes']} classes: its backbone may have been fine-tuned "
        "with labels"
    )
