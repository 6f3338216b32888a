"""What a run of detection and one of segmentation have in common, from the configuration to the trained model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.extraction import default_workers
from ibot_eval.protocol import Artifact, Event, Session, Warning
from ibot_eval.settings import CheckpointSettings
from protocols.openmmlab import backbone, training
from protocols.openmmlab.configuration import FILE, finish, replace_everywhere, write
from protocols.openmmlab.dense_config import DenseConfig, identity_of
from protocols.openmmlab.layer_decay import LayerDecayConstructor

BACKBONE = backbone.CheckpointBackbone.__name__
LOG = "log.jsonl"


@dataclass(frozen=True)
class DenseRun:
    """What a protocol asks for."""

    protocol: str
    version: int
    configuration: Mapping[str, Any]
    """Of mmengine, as the flags describe it."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value that holds whatever ``--config`` and ``--set`` say."""
    fit: Callable[[Any], None] | None = None
    """Changes a user's configuration, which ``--set`` has changed already, so that it fits the checkpoint's network."""


@dataclass(frozen=True)
class Outcome:
    """What a run has come to."""

    results: Mapping[str, Any]
    """What the metrics returned for the test split."""
    artifacts: Sequence[Artifact]
    """The model, the configuration and the log."""


def carry_out(run: DenseRun, config: DenseConfig, session: Session) -> Generator[Event, None, Outcome]:
    """Trains and tests, or with ``config.trained`` only tests. A collective.

    Training states stay; :func:`protocols.openmmlab.training.discard_states` deletes them when all is written.

    Yields:
        warnings.

    Raises:
        UserError: as :func:`protocols.openmmlab.training.train`, and for a configuration that cannot be read or built.
    """
    assert session.loaded is not None
    assert session.data is not None
    names, settings = session.class_names, checkpoint_of(session)
    cfg = finish(run.configuration, file=config.config, overrides=config.set, fixed=run.fixed)
    check_values(cfg)
    if config.config is not None and run.fit is not None:
        run.fit(cfg)
    yield from _put_in(cfg, run, settings, len(names))
    path = session.output / FILE
    distributed.from_main(lambda: write(cfg, path))

    # The checkpoint's own network only takes up memory while a copy is trained.
    session.loaded.backbone.cpu()
    backbone.hand_over(settings, session.loaded)
    artifacts = [Artifact(path, "log")]
    if config.trained is not None:
        with _explain_changes(config, path):
            results = training.test(cfg, session, config.trained).results
        return Outcome(results, artifacts)
    with _explain_changes(config, path):
        trained = training.train(
            cfg,
            session,
            identity=_identity(run, config, session),
            keep=config.keep,
            save_minutes=config.save_minutes,
            log_every=config.log_every,
        )
    if trained.replaced:
        yield Warning(f"{trained.replaced:,} times an image of train could not be decoded and another took its place")
    files = [Artifact(trained.path, "checkpoint"), *artifacts, Artifact(session.output / LOG, "log")]
    return Outcome(trained.results, files)


_OF_VALUES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    cv2.error,
)
"""What wrong values in a configuration lead to."""


@contextmanager
def _explain_changes(config: DenseConfig, written: Path) -> Iterator[None]:
    """What only shows in a step of training or testing, where the configuration was changed by hand.

    Raises:
        ConfigError: in place of an error that a wrong value leads to.
    """
    try:
        yield
    except _OF_VALUES as error:
        if config.config is None and not config.set:
            raise
        raise ConfigError(
            f"the run broke off with a configuration that was changed by hand: {type(error).__name__}: {error}",
            where=str(written),
            todo="look at --config and --set; --debug shows where it fails",
        ) from error


def check_values(cfg: Any) -> None:
    """Raises ConfigError where values of a configuration that are used before OpenMMLab sees them are of no use."""
    for key, kind in {**_DICTS, **_NUMBERS}.items():
        *path, last = key.split(".")
        node: Any = cfg
        for part in path:
            node = node.get(part)
        value = node.get(last)
        if value is None and key in _OPTIONAL:
            continue
        if kind is dict:
            fits, wanted = isinstance(value, dict), "a dict"
        else:
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= kind
            wanted = f"a whole number, {kind} or above"
        if not fits:
            given = "not there" if value is None else repr(value)
            raise ConfigError(f"the configuration's {key} is {given}", todo=f"make it {wanted}: see --config and --set")


_DICTS: Mapping[str, Any] = {
    **dict.fromkeys(("model", "optim_wrapper", "train_cfg"), dict),
    **{f"{role}_dataloader{part}": dict for role in ("train", "test") for part in ("", ".dataset")},
}
_NUMBERS: Mapping[str, Any] = {
    **{f"{role}_dataloader.batch_size": 1 for role in ("train", "test")},
    **{f"{role}_dataloader.num_workers": 0 for role in ("train", "test")},
    **{"train_cfg.max_iters": 1, "train_cfg.max_epochs": 1, "train_cfg.val_interval": 1},
    "optim_wrapper.accumulative_counts": 1,
}
"""Key -> least value."""
_OPTIONAL = {key for key in _NUMBERS if not key.endswith("batch_size")}


def _put_in(cfg: Any, run: DenseRun, settings: CheckpointSettings, classes: int) -> Generator[Event, None, None]:
    """The checkpoint and the number of classes, whatever the configuration had."""
    given = cfg.model.get("backbone") or {}
    if given.get("type") == BACKBONE:
        given["checkpoint"] = fields_of(settings)
    else:
        own: Any = run.configuration["model"]
        cfg.model["backbone"] = own["backbone"]
        if isinstance(cfg.model.get("neck"), dict) and "neck" in own:
            cfg.model["neck"]["in_channels"] = own["neck"]["in_channels"]
        yield Warning(f"the configuration's backbone ({given.get('type')}) gives way to that of --ckpt")
    before = sorted(set(replace_everywhere(cfg, "num_classes", classes)))
    if before:
        yield Warning(
            f"the configuration was made for {' or '.join(map(str, before))} classes, and the data have {classes}: "
            "the layers follow the data"
        )


def _identity(run: DenseRun, config: DenseConfig, session: Session) -> dict[str, Any]:
    assert session.data is not None
    return {
        **identity_of(config),
        "protocol": run.protocol,
        "version": run.version,
        "classes": list(session.class_names),
        "images": {role: split.fingerprint for role, split in session.data.splits.items()},
        "checkpoint": {name: session.checkpoint.get(name) for name in ("sha256", "key", "overrides", "identity")},
    }


def checkpoint_of(session: Session) -> CheckpointSettings:
    """The settings that the run's checkpoint was read with; a file by its whole path, so that it is found again."""
    about = session.checkpoint
    reference = str(about.get("reference") or "")
    path = Path(reference).expanduser()
    overrides = dict(about.get("overrides") or {})
    if overrides.get("grid"):
        overrides["grid"] = tuple(overrides["grid"])
    ckpt = str(path.resolve()) if reference and path.exists() else reference
    return CheckpointSettings(ckpt=ckpt, key=about.get("key"), **overrides)


def fields_of(settings: CheckpointSettings) -> dict[str, Any]:
    """What was given by hand, as plain values."""
    usual = CheckpointSettings()
    return {name: value for name, value in vars(settings).items() if value != getattr(usual, name)}


@dataclass(frozen=True)
class Parts:
    """Parts of a configuration that do not depend on what is predicted."""

    config: DenseConfig
    session: Session
    norm: bool
    """Whether every level goes through the network's last norm."""

    def backbone(self, drop_path: float) -> dict[str, Any]:
        """The checkpoint's network with four levels."""
        return {
            "type": BACKBONE,
            "checkpoint": fields_of(checkpoint_of(self.session)),
            "drop_path": drop_path,
            "checkpoint_blocks": self.config.checkpoint_blocks,
            "frozen": self.config.freeze_blocks or -1,
            "norm": self.norm,
            "window": self.config.window,
        }

    def widths(self) -> tuple[int, ...]:
        """Channels of its four levels."""
        assert self.session.loaded is not None
        return backbone.level_widths(self.session.loaded.backbone)

    def loader(self, dataset: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
        """A data loader; order and augmentation are those of ``seeded_data``."""
        engine = self.session.engine
        asked = None if engine is None else engine.workers
        return {
            "batch_size": batch_size,
            "num_workers": default_workers(self.session.device) if asked is None else asked,
            "dataset": dict(dataset),
        }

    def optim_wrapper(self, lr: float, weight_decay: float, layer_decay: float) -> dict[str, Any]:
        """AdamW with a learning rate for each layer; training makes it mixed precision where that is asked for."""
        wrapper = {
            "type": "OptimWrapper",
            "optimizer": {"type": "AdamW", "lr": lr, "betas": (0.9, 0.999), "weight_decay": weight_decay},
            "constructor": LayerDecayConstructor.__name__,
            "paramwise_cfg": {"layer_decay": layer_decay},
        }
        clip = {"clip_grad": {"max_norm": self.config.clip_grad}} if self.config.clip_grad else {}
        return {**wrapper, **clip}

    @property
    def mean(self) -> tuple[float, float, float]:
        """Per channel, 0 to 1."""
        assert self.session.transform is not None
        return self.session.transform.mean

    @property
    def std(self) -> tuple[float, float, float]:
        """Per channel, 0 to 1."""
        assert self.session.transform is not None
        return self.session.transform.std
