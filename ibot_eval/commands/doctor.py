"""Check the installation and say what is missing for what."""

from __future__ import annotations

import importlib
import json as jsonlib
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

State = Literal["ok", "missing", "broken"]

REQUIRED = {
    "torch": "everything",
    "torchvision": "reading and resizing images",
    "timm": "every network",
    "sklearn": "metrics, the digits data set",
    "scipy": "intervals",
    "safetensors": "checkpoints",
    "PIL": "reading images",
    "matplotlib": "figures",
}
OPTIONAL = {
    "faiss": (
        "k-means (scikit-learn without it), and knn --backend faiss, where torch was as exact and faster",
        "faiss",
    ),
    "datasets": ("--data hfds/NAME", "hfds"),
    "imagecorruptions": ("corruptions --on-the-fly", "corruptions"),
    "streamlit": ("ibot-eval app", "app"),
}


@dataclass(frozen=True)
class Check:
    name: str
    state: State
    found: str
    serves: str
    todo: str = ""


@dataclass(frozen=True)
class Doctor:
    """Check Python, torch, the device, optional packages, the cache and the plug-ins."""

    cache: Path | None = None
    """Folder of the cache. Default: $IBOT_EVAL_CACHE, else ~/.cache/ibot-eval."""
    json: bool = False
    """Print JSON."""
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        checks = [*_packages(), *_devices(), _cache(self.cache), *_plugins()]
        if self.json:
            print(jsonlib.dumps([asdict(check) for check in checks], indent=2))
        else:
            from tabulate import tabulate

            print(tabulate([(c.state, c.name, c.found, c.serves) for c in checks], tablefmt="plain"))
            for check in checks:
                if check.todo:
                    print(f"{check.name}: {check.todo}")
        return 2 if any(check.state == "broken" for check in checks) else 0


def _packages() -> Iterator[Check]:
    yield Check("python", "ok", platform.python_version(), sys.executable)
    for module, serves in REQUIRED.items():
        yield _package(module, serves, "broken", "pip install ibot-eval again")
    for module, (serves, extra) in OPTIONAL.items():
        yield _package(module, serves, "missing", f"pip install 'ibot-eval[{extra}]'")


def _package(module: str, serves: str, absent: State, todo: str) -> Check:
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return Check(module, absent, "not installed", serves, todo)
        return Check(module, "broken", f"needs {error.name}", serves, todo)
    except Exception as error:  # noqa: BLE001 - a package that cannot be imported fails in its own ways
        return Check(module, "broken", f"cannot be imported: {error}", serves, todo)
    version = getattr(imported, "__version__", None)
    if version is None:
        # A package may be installed under another name than its module has.
        version = metadata.version(metadata.packages_distributions().get(module, [module])[0])
    return Check(module, "ok", str(version), serves)


def _devices() -> Iterator[Check]:
    try:
        import torch
    except Exception:  # noqa: BLE001 - already reported above
        return
    yield Check("cpu", "ok", f"{torch.get_num_threads()} threads", "--device cpu")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(index)
            memory = torch.cuda.get_device_properties(index).total_memory / 1e9
            bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
            yield Check(f"cuda:{index}", "ok", f"{name}, {memory:.0f} GB, {bf16}", "--device cuda")
    else:
        built = torch.version.cuda
        yield Check("cuda", "missing", f"torch is built for CUDA {built}" if built else "CPU build", "--device cuda")
    if torch.backends.mps.is_available():
        yield Check("mps", "ok", "available", "--device mps")


def _cache(folder: Path | None) -> Check:
    from ibot_eval.cache import BankCache

    cache = BankCache(folder)
    try:
        cache.root.mkdir(parents=True, exist_ok=True)
        probe = cache.root / ".doctor"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        todo = "choose another folder with --cache or $IBOT_EVAL_CACHE"
        return Check("cache", "broken", f"{cache.root}: {error.strerror}", "feature banks", todo)
    size = sum(bank.bytes for bank in cache.ls()) / 1e6
    return Check("cache", "ok", f"{cache.root}, {size:,.1f} MB in banks", "feature banks")


def _plugins() -> Iterator[Check]:
    from ibot_eval import registry
    from ibot_eval.errors import UserError

    for group in ("protocols", "commands", "backbones"):
        for name, point in registry.entries(group).items():
            try:
                registry.load(group, name)
            except (UserError, Exception) as error:  # noqa: BLE001 - whatever a plug-in's import raises
                yield Check(name, "broken", str(error).splitlines()[0], f"{group[:-1]} {point.value}")
            else:
                yield Check(name, "ok", point.value, group[:-1])
