"""mmengine configurations: ours or the user's, changed by ``--set``, with what only a run knows put in."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict, DictAction
from mmengine.runner import Runner

from ibot_eval.errors import ConfigError, UserError, suggest
from ibot_eval.files import atomic_write_text

IMPORTS = ("protocols.openmmlab.backbone", "protocols.openmmlab.layer_decay")
"""Modules that register what our configurations name, for OpenMMLab's own tools."""
FILE = "mmengine_config.py"
"""In the run's folder."""
_TOP = frozenset(inspect.signature(Runner.__init__).parameters) | {
    *("find_unused_parameters", "model_wrapper_cfg", "sync_bn", "activation_checkpointing", "custom_imports"),
    *("test_cfg", "val_cfg", "vis_backends", "log_level"),
}
"""Keys that mmengine knows at the top, whether a configuration has them or not."""
_PLACES = frozenset({"data_root", "ann_file", "data_prefix", "work_dir", "checkpoint", "img_dir", "seg_map_path"})
"""Where things lie, which may move; fingerprints tell what they are."""
_SPEED = frozenset({"num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "checkpoint_blocks"})
_ASIDE = frozenset(
    {
        *("default_hooks", "visualizer", "vis_backends", "log_level", "log_processor", "env_cfg", "launcher"),
        *("resume", "val_dataloader", "val_evaluator", "val_cfg", "test_evaluator", "custom_imports"),
    }
)
"""What training does not use."""
_THEIRS, _OURS = {"mmengine", "mmcv", "mmdet", "mmseg"}, {"protocols", "ibot_eval"}
"""Folders of code."""


def finish(
    cfg_dict: Mapping[str, Any],
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of a run.

    Args:
        cfg_dict: ours.
        file: the user's, in its place; Python files run their code.
        overrides: ``key.key=value`` in mmengine's syntax (``--cfg-options``), list items by number.
        fixed: dotted key -> value that the configuration has in any case, made where it is absent. A key below
            ``…dataloader.dataset`` means the data set proper, inside of wrappers such as RepeatDataset.

    Raises:
        ConfigError: a file that cannot be read, a key that is not there, with those that are near, or ``load_from``,
            which would take the place of ``--ckpt``.
    """
    cfg = Config(_plain(cfg_dict)) if file is None else _read(file)
    for text in overrides:
        _override(cfg, text)
    for key, value in (fixed or {}).items():
        _fix(cfg, key, value)
    own = cfg.get("custom_imports") or {}
    ours = (cfg_dict.get("custom_imports") or {}).get("imports", ())
    imports = dict.fromkeys([*IMPORTS, *ours, *own.get("imports", ())])
    cfg.custom_imports = ConfigDict(imports=list(imports), allow_failed_imports=False)
    if cfg.get("load_from"):
        raise ConfigError(
            f"the configuration starts from the weights in {cfg.load_from}, and a run starts from --ckpt",
            todo="add --set load_from=None",
        )
    _for_their_tools(cfg)
    return cfg


def write(cfg: Config, path: Path) -> None:
    """Writes ``cfg`` as a Python file that :func:`finish` and OpenMMLab's tools read, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = (
        "# Written by ibot-eval; give it back with --config. For OpenMMLab's own tools, which need mmcv's operators,\n"
        "# call protocols.openmmlab.ready.prepare() first.\n" + cfg.pretty_text
    )
    try:
        atomic_write_text(path, text)
    except OSError as error:
        raise ConfigError(f"the configuration cannot be written: {error.strerror}", where=str(path)) from error


def replace_everywhere(cfg: Config, key: str, value: Any, where: str = "model") -> list[Any]:
    """Puts ``value`` wherever ``cfg.where`` has ``key``; what stood there and was something else, in order.

    For the number of classes, which every head has for itself.
    """
    before: list[Any] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if key in node:
                before.append(node[key])
                node[key] = value
            for child in node.values():
                walk(child)
        elif isinstance(node, (list, tuple)):
            for child in node:
                walk(child)

    walk(cfg.get(where))
    return [old for old in before if old != value]


def identity_of(cfg: Config) -> dict[str, Any]:
    """What of ``cfg`` a run that is gone on with must have in common with its beginning, JSON-like.

    Left out is where files lie, what only makes it faster or slower, and what mmengine would log.
    """

    def kept(node: Any) -> Any:
        if isinstance(node, dict):
            return {str(k): kept(v) for k, v in node.items() if k not in _PLACES and k not in _SPEED}
        if isinstance(node, (list, tuple)):
            return [kept(child) for child in node]
        return node if node is None or isinstance(node, (str, bool, int, float)) else str(node)

    return kept({key: value for key, value in cfg.to_dict().items() if key not in _ASIDE})


@contextmanager
def explain_failure(written: Path) -> Iterator[None]:
    """What a configuration names and OpenMMLab's code refuses, as an error for people; faults of ours stay as they are.

    Args:
        written: the file that the configuration is in.

    Raises:
        ConfigError: in place of an error that came up in code of mmengine, mmcv, mmdet or mmsegmentation, or in what
            that called.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        folders = [
            part
            for frame in traceback.extract_tb(error.__traceback__)
            for part in Path(frame.filename).parts
            if part in _THEIRS | _OURS
        ]
        if folders[-1] in _OURS:
            raise
        reason = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
        raise ConfigError(
            f"the configuration cannot be built: {reason or type(error).__name__}",
            where=str(written),
            todo="look at --config and --set; --debug shows where it fails",
        ) from error


def _for_their_tools(cfg: Config) -> None:
    """What mmengine's own runner asks for and ours does without."""
    by_epoch = (cfg.get("train_cfg") or {}).get("max_epochs") is not None
    samplers = {"train_dataloader": ("DefaultSampler" if by_epoch else "InfiniteSampler", True)}
    for name, (kind, shuffle) in {**samplers, "test_dataloader": ("DefaultSampler", False)}.items():
        if isinstance(cfg.get(name), dict):
            cfg[name].setdefault("sampler", ConfigDict(type=kind, shuffle=shuffle))
    if isinstance(cfg.get("test_dataloader"), dict):
        cfg.test_cfg = cfg.get("test_cfg") or ConfigDict()
        # Ours looks at the test data while it trains.
        if (cfg.get("train_cfg") or {}).get("val_interval"):
            cfg.val_dataloader, cfg.val_evaluator = map(copy.deepcopy, (cfg.test_dataloader, cfg.test_evaluator))
            cfg.val_cfg = cfg.get("val_cfg") or ConfigDict()
        else:
            cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None


def _read(file: Path) -> Config:
    try:
        return Config.fromfile(str(file))
    except Exception as error:
        raise ConfigError(
            f"the configuration cannot be read: {type(error).__name__}: {error}",
            where=str(file),
            todo="--config wants a file of mmengine: .py, .json or .yaml",
        ) from error


def _override(cfg: Config, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text}: it is key=value", todo="for example --set optim_wrapper.optimizer.lr=1e-4")
    *path, last = key.split(".")
    node: Any = cfg._cfg_dict
    for depth, part in enumerate(path):
        node = _child(node, part, ".".join(path[:depth]), text)
    known = sorted(node) if isinstance(node, dict) else [str(i) for i in range(len(node))] if _listed(node) else []
    # A class that the configuration names may take arguments that it does not give; mmengine refuses unknown ones.
    allowed = isinstance(node, dict) and (last in node or "type" in node or (not path and last in _TOP))
    if not allowed and last not in known:
        raise ConfigError(
            f"--set {text}: {'.'.join(path) or 'the configuration'} has no {last!r}",
            todo=suggest(last, known if path else {*known, *_TOP}),
        )
    try:
        parsed = _plain(DictAction._parse_iterable(value))
    except AssertionError as error:
        raise ConfigError(f"--set {text}: {error}") from error
    if isinstance(node, dict):
        node[last] = parsed
    else:
        node[int(last)] = parsed


def _child(node: Any, part: str, where: str, text: str) -> Any:
    known = sorted(node) if isinstance(node, dict) else [str(i) for i in range(len(node))] if _listed(node) else []
    if part not in known:
        raise ConfigError(
            f"--set {text}: {where or 'the configuration'} has no {part!r}", todo=suggest(part, map(str, known))
        )
    child = node[part] if isinstance(node, dict) else node[int(part)]
    if not isinstance(child, (dict, list)):
        raise ConfigError(f"--set {text}: {'.'.join(filter(None, [where, part]))} is {child!r}, and has no parts")
    return child


def _listed(node: Any) -> bool:
    return isinstance(node, list)


def _fix(cfg: Config, key: str, value: Any) -> None:
    *path, last = key.split(".")
    node: Any = cfg._cfg_dict
    for depth, part in enumerate(path):
        if not isinstance(node.get(part), dict):
            node[part] = ConfigDict()
        node = node[part]
        if part == "dataset" and depth == 1:
            node = _innermost(node)
    node[last] = _plain(value)


def _innermost(dataset: Any) -> Any:
    """The data set inside of wrappers.

    Raises:
        ConfigError: several data sets, of which one run has but one.
    """
    if "datasets" in dataset:
        raise ConfigError("the configuration joins several data sets", todo="join them on the disk; --data names one")
    return _innermost(dataset["dataset"]) if isinstance(dataset.get("dataset"), dict) else dataset


def _plain(value: Any) -> Any:
    """With paths as text, since the configuration becomes a file."""
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(child) for child in value)
    return str(value) if isinstance(value, Path) else copy.deepcopy(value)
