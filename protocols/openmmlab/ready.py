"""Makes mmengine, mmdet and mmsegmentation importable, and keeps what they print off the terminal."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ibot_eval.errors import ConfigError, MissingExtra
from protocols.openmmlab import extension

PACKAGES = {"mmengine": "mmengine", "mmcv": "mmcv-lite", "mmdet": "mmdet", "mmseg": "mmsegmentation"}
"""Module -> name of its distribution."""

INSTALL = "pip install 'ibot-eval[dense]'"

_done = False
_while_importing: list[str] = []


def prepare() -> None:
    """Imports mmengine, mmdet and mmsegmentation, with our operators where mmcv has no compiled ones. Idempotent.

    Their models, data sets and transforms are registered afterwards. Call it in every process before anything else of
    theirs is imported: one that was spawned, not forked, starts without our operators.

    Raises:
        MissingExtra: one of them, or something that they need, is not installed.
        ConfigError: they do not fit each other or this torch.
    """
    global _done
    if _done:
        return
    require()
    extension.install()
    printed = io.StringIO()
    with _stray_output_to(printed):
        for module in ("mmcv._ext", "mmcv", "mmdet.utils", "mmseg.utils"):
            _import(module)
        # Scopes are set by each configuration.
        for module in ("mmdet.utils", "mmseg.utils"):
            _explained(sys.modules[module].register_all_modules, module, init_default_scope=False)
    _while_importing.append(printed.getvalue())
    _done = True


def require() -> None:
    """Raises MissingExtra where one of the packages is not installed; imports none, so that it takes no time."""
    missing = [name for module, name in PACKAGES.items() if not _is_installed(module)]
    if missing:
        raise MissingExtra(
            "detection and segmentation need mmengine, mmcv-lite, mmdet and mmsegmentation",
            where="not installed: " + ", ".join(missing),
            todo=INSTALL,
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _import(module: str) -> None:
    _explained(importlib.import_module, module, module)


def _explained(call: Callable[..., object], module: str, *args: object, **kwargs: object) -> None:
    """Calls, and says what is to be done where ``module`` cannot be imported."""
    try:
        call(*args, **kwargs)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{module.partition('.')[0]} needs {error.name}, which is not installed", todo=INSTALL
        ) from error
    except (ImportError, OSError) as error:
        todo = INSTALL
        if extension.compiled() is not None:
            todo = "pip uninstall -y mmcv mmcv-lite; " + INSTALL + ": it does without mmcv's compiled operators"
        raise ConfigError(f"{module} cannot be imported: {error}", todo=todo) from error
    except AssertionError as error:
        # mmdet and mmsegmentation check the versions of the others in this way.
        raise ConfigError(f"{module.partition('.')[0]} does not fit: {error}", todo=INSTALL) from error


@contextlib.contextmanager
def quietly(log: Path) -> Iterator[None]:
    """Inside, what is printed or warned of, and what no logger of its own takes, goes to ``log`` and nowhere else.

    Standard error stays open to the progress bar and to our own messages.

    Args:
        log: a text file, appended to; its folder is made.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1, encoding="utf-8", errors="replace") as file, _stray_output_to(file):
        while _while_importing:
            file.write(_while_importing.pop(0))
        yield


class _StrayOutput(io.TextIOBase):
    """Stands in for standard output. Loggers keep it for good, so that what it writes to may change."""

    def __init__(self) -> None:
        self.target: TextIO | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if self.target is not None:
            self.target.write(text)
        return len(text)

    def flush(self) -> None:
        if self.target is not None:
            self.target.flush()


_STRAY_OUTPUT = _StrayOutput()


@contextlib.contextmanager
def _stray_output_to(file: TextIO) -> Iterator[None]:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        _STRAY_OUTPUT.write(warnings.formatwarning(message, category, filename, lineno, line))

    before, _STRAY_OUTPUT.target = _STRAY_OUTPUT.target, file
    # Without a handler, logging writes warnings to standard error.
    handler = logging.StreamHandler(_STRAY_OUTPUT)
    logging.getLogger().addHandler(handler)
    _quieten_loggers()
    try:
        with contextlib.redirect_stdout(_STRAY_OUTPUT), warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        _STRAY_OUTPUT.target = before


def _quieten_loggers() -> None:
    """mmengine's loggers that were made while standard output was open go on writing to it."""
    logging_module: Any = sys.modules.get("mmengine.logging")
    for logger in logging_module.MMLogger._instance_dict.values() if logging_module else ():
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stdout__, sys.stdout):
                handler.setStream(_STRAY_OUTPUT)
