"""Who classifies: a linear head from a file, the classifier of a checkpoint, or the nearest training images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ibot_eval import distributed
from ibot_eval.atoms import Atom, atomic_outputs, resolve
from ibot_eval.backbone import Backbone, Norm
from ibot_eval.data.splits import few
from ibot_eval.errors import ConfigError
from ibot_eval.export import own_metadata
from ibot_eval.features import FeatureRequest
from ibot_eval.finetuning.run import CLASSIFIER
from ibot_eval.finetuning.saving import classifier_of
from ibot_eval.image_pass import Precision, autocast, evaluating
from ibot_eval.probes.head_file import HEAD_FILE, ClassifierHead, load_head
from ibot_eval.robustness.class_maps import NOWHERE, imagenet_classes, match_by_name
from ibot_eval.robustness.voting import neighbours_of_train

if TYPE_CHECKING:
    from ibot_eval.checkpoint import LoadedCheckpoint
    from ibot_eval.protocol import Session

Among = Literal["all", "data", "mapped"]
"""Between which classes a protocol lets a classifier decide: all that it knows, where answers that the data lack are
wrong; those of the data only; or those of the protocol's own map, which then need not be the data's."""

VOTES_ON = FeatureRequest("train")
"""What neighbours are compared by: [CLS] of the last block, as in the k-NN protocol."""
WORDS = ("own", "knn", "auto")
_REDUCERS = {"cls": ("cls",), "norm_patch_mean": ("norm_patch_mean",), "cls+patch_mean": ("cls", "patch_mean")}


@dataclass
class Classifier:
    """Features of a frozen network, and a head that makes logits of them."""

    backbone: Backbone
    """On the session's device."""
    atoms: Sequence[Atom]
    """Atomic outputs that are concatenated, in this order."""
    head: Callable[[Tensor], Tensor]
    """(B, D) float32 features -> (B, C) logits."""
    classes: np.ndarray
    """(C,) int64: index into ``session.class_names`` of each logit; -1 where the data lack that class."""
    about: dict[str, Any]
    """Which classifier it is, JSON-ready: ``head`` is linear, own or knn."""
    warnings: list[str] = field(default_factory=list)
    """What a reader of its numbers should know."""
    precision: Precision = "fp32"
    """Of the network; the head computes in float32."""
    class_names: Sequence[str] | None = None
    """C names of its classes, where they are known."""

    def logits(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) float, normalised, on the backbone's device -> (B, C) float32 there."""
        return self.from_features(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Images as for :meth:`logits` -> (B, D) float32, what the head takes."""
        with evaluating(self.backbone), torch.inference_mode(), autocast(images.device, self.precision):
            outputs = atomic_outputs(self.backbone, None, images, self.atoms)
        return torch.cat([outputs[atom].float() for atom in self.atoms], dim=1)

    def from_features(self, features: Tensor) -> Tensor:
        """(B, D) features, however they were made -> (B, C) float32 logits."""
        with torch.inference_mode():
            return self.head(features).float()


def open_classifier(
    session: Session, head: str, *, k: int = 20, temperature: float = 0.07, among: Among = "all"
) -> Classifier:
    """The classifier that ``head`` names. A collective call: the features of neighbours are extracted, or reused.

    Args:
        session: with a loaded checkpoint, data, a transform and an engine; its network may be one that drops tokens.
        head: a file or run folder of ``linear --save-head`` (or logreg, linear-augment), made for this checkpoint;
            own, the checkpoint's classifier; knn, the weighted vote of the nearest images of the train split, as the
            k-NN protocol counts it (logits are logarithms of votes); or auto: own where it fits, else knn.
        k, temperature: of the vote.
        among: between which classes it decides.

    Raises:
        ConfigError: no such head, or one that fits neither the network nor the classes of the data; or knn without a
            train split.
        CheckpointError: a damaged head.
        DataError: a train split without labels, or with images that cannot be read.
    """
    assert session.loaded is not None
    assert session.data is not None
    if head == "own":
        return _own(session, among)
    if head == "knn":
        return _neighbours(session, k, temperature)
    if head != "auto":
        return distributed.everywhere(lambda: _from_file(session, head, among))
    reason = "the checkpoint has no classifier"
    if session.loaded.classifier is not None:
        try:
            return _own(session, among)
        except ConfigError as error:
            reason = error.what
    if "train" not in session.data.splits:
        raise ConfigError(
            f"{reason}, and the data have no train split whose images could vote",
            where="--head auto",
            todo="train a head with `ibot-eval linear --save-head` and give its run folder: --head RUN",
        )
    found = _neighbours(session, k, temperature)
    if session.loaded.classifier is not None:
        found.warnings.insert(0, f"neighbours vote instead of the checkpoint's classifier: {reason}")
    return found


def _own(session: Session, among: Among) -> Classifier:
    loaded = session.loaded
    assert loaded is not None
    if loaded.classifier is None:
        raise ConfigError(
            f"{loaded.report.reference} has no classifier",
            where="--head own",
            todo="give a head of `ibot-eval linear --save-head`, or a fine-tuned file or timm:NAME as --ckpt",
        )
    reducers, layers = _own_layers(loaded)
    atoms = _atoms(loaded.backbone, [(-1, "final", reducer) for reducer in reducers])
    count = int((loaded.report.classifier or {})["classes"])
    names = _own_names(loaded, count, session.class_names)
    classes, warnings = _match(names, count, session, among, "own")
    about = {"head": "own", "classes": count, "input": list(reducers)}
    return _assembled(session, atoms, layers.to(session.device), classes, about, warnings, names)


def _own_layers(loaded: LoadedCheckpoint) -> tuple[Sequence[str], nn.Module]:
    """The reducers of the last block that a checkpoint's classifier takes, and the layers that follow."""
    assert loaded.classifier is not None
    if own_metadata(loaded.report.path).get("head_layers"):
        whole = classifier_of(loaded)
        assert whole.projection is not None
        return _REDUCERS["norm_patch_mean" if whole.pooling == "mean" else "cls"], nn.Sequential(
            whole.projection, whole.head
        )
    kind = (loaded.report.classifier or {}).get("input")
    if kind not in _REDUCERS:
        raise ConfigError(
            f"the classifier of {loaded.report.reference} takes neither [CLS] nor the mean of the patches",
            where="--head own",
            todo="train a head with `ibot-eval linear --save-head` and give its run folder",
        )
    return _REDUCERS[kind], loaded.classifier


def _own_names(loaded: LoadedCheckpoint, count: int, wanted: Sequence[str]) -> Sequence[str] | None:
    """Names of the classes in the file, or ImageNet's where the number of classes is ImageNet's and the data's fit."""
    names = own_metadata(loaded.report.path).get("class_names")
    if isinstance(names, list) and len(names) == count:
        return names
    names = imagenet_classes(count)
    return names if names is not None and (match_by_name(names, wanted) != NOWHERE).any() else None


def _from_file(session: Session, path: str, among: Among) -> Classifier:
    if not Path(path).exists():
        raise ConfigError(
            f"there is no head {path!r}",
            where="--head",
            todo=f"give the run folder of `ibot-eval linear --save-head`, or one of {', '.join(WORDS)}",
        )
    loaded = session.loaded
    assert loaded is not None
    _refuse_network(Path(path))
    head = load_head(path)
    _check_backbone(head, loaded, path)
    atoms = _atoms(loaded.backbone, [(f["block"], f["norm"], f["reducer"]) for f in head.features])
    width = sum(loaded.backbone.dims[atom.block] for atom in atoms)
    if width != head.weight.shape[1]:
        raise ConfigError(
            f"the head {path} takes {head.weight.shape[1]} features, and {loaded.backbone.architecture} gives {width}",
            where="--head",
            todo=f"give the checkpoint that it was trained on: {head.backbone.get('reference')}",
        )
    classes, warnings = _match(head.class_names, len(head.weight), session, among, path)
    about = {"head": "linear", "classes": len(head.weight), "input": [dict(f) for f in head.features]}
    head = replace(head, weight=head.weight.to(session.device), bias=head.bias.to(session.device))
    warnings += _other_images(head, session)
    about["protocol"] = head.protocol
    return _assembled(session, atoms, head.logits, classes, about, warnings, head.class_names)


def _refuse_network(path: Path) -> None:
    """Raises ConfigError for a file or run of fine-tuning: its head takes the features of its own network."""
    file = path / CLASSIFIER if path.is_dir() and not (path / HEAD_FILE).exists() else path
    if not file.is_file():
        return
    with suppress(SafetensorError, OSError, ValueError):
        if own_metadata(file).get("classes"):
            raise ConfigError(
                f"{file} is a whole fine-tuned network, not a head",
                where="--head",
                todo=f"use --ckpt {file} --head own",
            )


def _check_backbone(head: ClassifierHead, loaded: LoadedCheckpoint, path: str) -> None:
    """Raises ConfigError for a head of other features: those of a network of equal width fit, and mean nothing."""
    report, of = loaded.report, head.backbone
    if not of.get("sha256"):
        return
    keys = {of.get("key"), report.key}
    if of["sha256"] != report.sha256:
        what = f"the head {path} was trained on the features of another checkpoint, {of.get('reference')}"
    elif None not in keys and len(keys) > 1:
        what = f"the head {path} was trained on the features of the {of['key']}, not the {report.key}"
    else:
        return
    raise ConfigError(
        what,
        where=f"sha256 {str(of['sha256'])[:12]}, and that of --ckpt {report.reference} is {report.sha256[:12]}",
        todo="give the checkpoint and --key that it was trained on, or train another head with "
        "`ibot-eval linear --save-head`",
    )


def _other_images(head: ClassifierHead, session: Session) -> list[str]:
    """A warning where images are cropped or normalised otherwise than those that the head was trained on."""
    assert session.transform is not None
    now = session.transform.describe()
    changed = [n for n in ("crop", "mean", "std") if n in head.transform and head.transform[n] != now[n]]
    if not changed:
        return []
    pairs = ", ".join(f"{name} {head.transform[name]} instead of {now[name]}" for name in changed)
    return [f"the head was trained on images with {pairs}"]


def _neighbours(session: Session, k: int, temperature: float) -> Classifier:
    assert session.loaded is not None
    vote, classes, warnings = neighbours_of_train(session, VOTES_ON, k, temperature)
    about = {"head": "knn", "classes": len(classes), "k": vote.k, "temperature": temperature}
    return _assembled(session, [resolve(VOTES_ON, session.loaded.backbone, None)], vote, classes, about, warnings)


def _atoms(backbone: Backbone, outputs: Sequence[tuple[int, Norm, str]]) -> list[Atom]:
    """Raises ConfigError for what the network does not have."""
    return [resolve(FeatureRequest("test", block, norm, reducer), backbone, None) for block, norm, reducer in outputs]


def _match(
    names: Sequence[str] | None, count: int, session: Session, among: Among, head: str
) -> tuple[np.ndarray, list[str]]:
    """``Classifier.classes`` and what there is to say about them.

    Args:
        names: of the classifier's ``count`` classes, where they are known.

    Raises:
        ConfigError: none of its classes is one of the data.
    """
    wanted = session.class_names
    classes = match_by_name(names, wanted) if names is not None else np.full(count, NOWHERE, np.int64)
    known = len(np.setdiff1d(classes, [NOWHERE]))
    if names is None and count == len(wanted):
        return np.arange(count), [
            f"the {count} classes of the classifier are taken in the order of the data's ({few(wanted, 2)} …), since "
            "it does not name them"
        ]
    if among == "mapped":
        return classes, []
    if known:
        outside = int((classes == NOWHERE).sum())
        if not outside or among == "data":
            return classes, []
        return classes, [
            f"the classifier knows {count} classes, {outside} of which the data lack: such answers count as wrong"
        ]
    shown = f" ({few(names, 3)})" if names is not None else ""
    raise ConfigError(
        f"none of the classifier's {count} classes{shown} is one of the data's {len(wanted)} ({few(wanted, 3)})",
        where=f"--head {head}",
        todo="choose a head or a classifier of the same classes",
    )


def _assembled(
    session: Session,
    atoms: Sequence[Atom],
    head: Callable[[Tensor], Tensor],
    classes: np.ndarray,
    about: dict[str, Any],
    warnings: list[str],
    names: Sequence[str] | None = None,
) -> Classifier:
    assert session.loaded is not None
    assert session.engine is not None
    backbone = session.loaded.backbone.to(session.device)
    return Classifier(backbone, atoms, head, classes, about, warnings, session.engine.precision, names)
