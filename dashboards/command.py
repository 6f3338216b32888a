"""Look at what a backbone sees: attention, patterns, correspondences and results in a browser."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ibot_eval.cli import Repeatable
from ibot_eval.errors import ConfigError, MissingExtra

PACKAGES = {"streamlit": "streamlit", "streamlit_image_coordinates": "streamlit-image-coordinates"}
"""Modules of the extra ``app`` -> the packages that bring them."""


@dataclass(frozen=True)
class App:
    """Open the app in a browser. Without arguments: the demonstration checkpoint and scikit-learn's sample pictures.

    Its pages read what is named here and nothing else."""

    ckpt: Repeatable[tuple[str, ...]] = ()
    """Checkpoint (FILE, run folder, timm:NAME, hf-hub:ID, random:NAME or demo). Give --ckpt again for another, to see
    them side by side."""
    key: str | None = None
    """Which network of the files: teacher, student, … Default: teacher when both exist."""
    arch: str | None = None
    """timm name that overrides the architecture inferred from the tensors."""
    patch_size: int | None = None
    """Patch size in pixels, where the tensors do not say."""
    heads: int | None = None
    """Number of attention heads, where the family does not say."""
    trust_pickle: bool = False
    """Open files that need arbitrary Python objects. This runs code from the file: only for files you trust."""
    data: Path | None = None
    """Folder of images to choose from, sub-folders included."""
    runs: Path | None = None
    """Folder that holds runs, for the page of results."""
    patterns: Path | None = None
    """Pattern bank that ibot-eval patterns wrote."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    cache: Path | None = None
    """Folder where the hashes of checkpoints are remembered. Default: $IBOT_EVAL_CACHE, else ~/.cache/ibot-eval."""
    host: str = "localhost"
    """Address to listen on. Another than localhost lets everyone who reaches it see the pictures and results."""
    port: int | None = None
    """Port to listen on; 0 takes any that is free. Default: the first free one from 8501."""
    browser: bool = True
    """Open the page in a browser."""
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ConfigError(f"--port {self.port} is no port", todo="use 0 to 65535")
        from dashboards.given import Given

        given = Given(
            ckpt=self.ckpt or ("demo",),
            key=self.key,
            arch=self.arch,
            patch_size=self.patch_size,
            heads=self.heads,
            trust_pickle=self.trust_pickle,
            data=_text(self.data),
            runs=_text(self.runs),
            patterns=_text(self.patterns),
            device=self.device,
            cache=_text(self.cache),
            parent=os.getpid(),
        )
        given.check()
        check_installed()
        from dashboards.server import serve

        return serve(given, self.host, self.port, browser=self.browser)


def check_installed() -> None:
    """Raises MissingExtra, naming the packages of the extra ``app`` that are not installed."""
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingExtra(
            f"ibot-eval app needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            todo="pip install 'ibot-eval[app]'",
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
