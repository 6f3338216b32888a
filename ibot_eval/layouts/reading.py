"""Opening checkpoint files without running code from them."""

from __future__ import annotations

import argparse
import difflib
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors import SafetensorError, safe_open

from ibot_eval.errors import CheckpointError
from ibot_eval.layouts.blueprint import Hints

WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".ckpt")
RUN_FILES = ("teacher", "student")
"""Networks of a pre-training run folder, each in NAME.safetensors; the first that exists is the default."""
HUGGING_FACE_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Location:
    """Where the weights lie."""

    path: Path
    key: str | None = None
    """Network of a run folder that the file holds."""
    keys: tuple[str, ...] = ()
    """All networks of the run folder."""


# What unpickling raises for bytes that are no pickle: nearly anything.
DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    OSError,
    AttributeError,
    ImportError,
)


def locate(reference: str, key: str | None) -> Location:
    """The weight file of a path given by the user: a file, a run folder or a Hugging Face folder.

    Raises:
        CheckpointError: nothing there; names the closest entries of the folder.
    """
    path = Path(reference).expanduser()
    if path.is_file():
        return Location(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {reference!r}", todo=_near(path))
    networks = tuple(name for name in RUN_FILES if (path / f"{name}.safetensors").is_file())
    if networks:
        if key is not None and key not in networks:
            raise CheckpointError(
                f"run folder {reference!r} has no network {key!r}", todo=f"--key {' or --key '.join(networks)}"
            )
        return Location(path / f"{key or networks[0]}.safetensors", key or networks[0], networks)
    for name in HUGGING_FACE_FILES:
        if (path / name).is_file():
            return Location(path / name)
    files = sorted(entry.name for entry in path.iterdir() if entry.suffix in WEIGHT_SUFFIXES)
    if any((path / f"{name}.index.json").is_file() for name in HUGGING_FACE_FILES):
        raise CheckpointError(
            f"the checkpoint in {reference!r} is cut into several files, which is not supported",
            todo="save it as one file: model.save_pretrained(folder, max_shard_size='100GB')",
        )
    raise CheckpointError(
        f"folder {reference!r} holds no checkpoint under a known name",
        where="looked for teacher.safetensors, student.safetensors, " + ", ".join(HUGGING_FACE_FILES),
        todo=f"name one of its files: {', '.join(files)}" if files else "give the file itself",
    )


def _near(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"folder {str(parent)!r} does not exist either; check the path"
    if timm.is_model(path.name.split(".")[0]):
        return f"for timm's network of that name: timm:{path.name}, or random:{path.name} with random weights"
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix in WEIGHT_SUFFIXES)
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4)
    if near:
        return "did you mean " + " or ".join(repr(str(parent / name)) for name in near) + "?"
    return f"checkpoints in {str(parent)!r}: {', '.join(names[:10]) or 'none'}"


def read_file(path: Path, *, trust_pickle: bool = False) -> tuple[Any, Mapping[str, str]]:
    """Contents of a weight file (nested mappings of CPU tensors), and its metadata if it is a safetensors file.

    Raises:
        CheckpointError: empty, truncated, of another kind, or in need of Python objects outside the allow-list.
    """
    if path.stat().st_size == 0:
        raise CheckpointError(f"checkpoint {str(path)!r} is empty (0 bytes)", todo="fetch or copy it again")
    if path.suffix == ".safetensors":
        try:
            with safe_open(str(path), "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
    return _read_torch(path, trust_pickle), {}


def _read_torch(path: Path, trust_pickle: bool) -> Any:
    mapped = zipfile.is_zipfile(path)  # Files of torch < 1.6 are bare pickles, which cannot be memory-mapped.
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle, mmap=mapped)
    except DAMAGED as error:
        needed = [] if trust_pickle else _needed(path, str(error), mapped)
        if not needed:
            raise _unreadable(path, error) from error
        raise CheckpointError(
            f"checkpoint {str(path)!r} holds Python objects that could run code when loaded: {', '.join(needed)}",
            todo="if you trust where the file comes from, repeat with --trust-pickle",
        ) from error


def _needed(path: Path, message: str, mapped: bool) -> list[str]:
    """Names outside the allow-list that the pickle refers to."""
    if mapped:
        try:
            with torch.serialization.safe_globals(_allowed()):
                found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if found:
                return sorted(map(str, found))
        except DAMAGED:
            pass
    return sorted(set(re.findall(r"GLOBAL ([\w.]+)", message)))


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    # torch opens with advice to switch its safety off; what it stumbled over comes later.
    text = re.split(r"WeightsUnpickler error:|trusted source\.", str(error))[-1]
    reason = (text.strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"checkpoint {str(path)!r} ({path.stat().st_size} bytes) is truncated, or not a checkpoint",
        where=reason[:200],
        todo="fetch or copy it again, and compare its size or checksum with the source's",
    )


def _allowed() -> list[Any]:
    """argparse.Namespace, and numpy's scalars, arrays and dtypes under the module paths of numpy 1 and 2."""
    # Asked of an object, since numpy 2 moved these functions to a private module.
    functions = {"scalar": np.float64(0).__reduce__()[0], "_reconstruct": np.empty(0).__reduce__()[0]}
    allowed: list[Any] = [argparse.Namespace, np.ndarray, np.dtype]
    for name, function in functions.items():
        allowed += [(function, f"numpy.core.multiarray.{name}"), (function, f"numpy._core.multiarray.{name}")]
    kinds = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
    kinds += [np.float16, np.float32, np.float64]
    return [*allowed, *kinds, *{type(np.dtype(kind)) for kind in kinds}, type(np.dtype("U1")), type(np.dtype("S1"))]


def hints_beside(path: Path, metadata: Mapping[str, str]) -> Hints:
    """What our own metadata, or config.json (timm's or Hugging Face's) and preprocessor_config.json beside it, tell.

    Files written by this project carry a JSON object under the metadata key ``ibot_eval`` with any of the fields of
    :class:`Hints`, e.g. ``{"family": "ibot", "heads": 6}``.
    """
    try:
        own = json.loads(metadata.get("ibot_eval", "{}"))
        config = _json(path.parent / "config.json")
        images = _json(path.parent / "preprocessor_config.json")
    except ValueError as error:
        raise CheckpointError(f"the configuration of {str(path)!r} is not valid JSON", where=str(error)) from error
    hints = Hints(**{name: _tuple(own[name]) for name in Hints.__dataclass_fields__ if own.get(name) is not None})
    if path.name in HUGGING_FACE_FILES and "model_type" in config:
        hints = hints.over(_hugging_face(config, images, path))
    elif path.name in HUGGING_FACE_FILES and "architecture" in config:
        hints = hints.over(_timm(config))
    return hints


def _timm(config: Mapping[str, Any]) -> Hints:
    """Mean, deviation and name; the name only where it tells the whole network and this timm knows it."""
    name, images = config["architecture"], config.get("pretrained_cfg") or {}
    known = isinstance(name, str) and timm.is_model(name) and not config.get("model_args")
    return Hints(arch=name if known else None, mean=_tuple(images.get("mean")), std=_tuple(images.get("std")))


def _hugging_face(config: Mapping[str, Any], images: Mapping[str, Any], path: Path) -> Hints:
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu" and not config.get("use_swiglu_ffn"):
        raise CheckpointError(
            f"the network uses the activation {activation!r}; only gelu is supported",
            where=str(path.parent / "config.json"),
        )
    grid, patch, size = None, config.get("patch_size"), config.get("image_size")
    if isinstance(patch, int) and size is not None:
        height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        grid = (height // patch, width // patch)
    return Hints(
        heads=config.get("num_attention_heads"),
        eps=config.get("layer_norm_eps"),
        grid=grid,
        mean=_tuple(images.get("image_mean")),
        std=_tuple(images.get("image_std")),
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
