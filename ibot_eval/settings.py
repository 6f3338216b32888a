"""Settings that every command shares. Each field is a flag; its docstring is the flag's help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class CheckpointSettings:
    """Which network to evaluate."""

    ckpt: str | None = None
    """File (.pth .pt .bin .safetensors), run folder, timm:NAME, hf-hub:ID, random:TIMM_NAME, or demo."""
    key: str | None = None
    """Which network of the file: teacher, student, … Default: teacher when both exist."""
    arch: str | None = None
    """timm name that overrides the architecture inferred from the tensors, e.g. vit_small_patch16_224."""
    patch_size: int | None = None
    """Patch size in pixels, where the tensors do not say."""
    heads: int | None = None
    """Number of attention heads, where the family does not say."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the stored position embeddings, where they are not square and the file does not say."""
    pos_embed_resize: Literal["published", "scale", "size", "size-antialias"] = "published"
    """How position embeddings are resized: published (as the family's own code does), scale (by the factor
    (n + 0.1) / N), or to the target size, without or with antialiasing."""
    trust_pickle: bool = False
    """Open files that need arbitrary Python objects. This runs code from the file: only for files you trust."""


@dataclass(frozen=True)
class DataSettings:
    """Which images to use."""

    data: str | None = None
    """Folder with a sub-folder per split, torch/NAME, hfds/NAME, wds/FOLDER, or demo."""
    data_root: Path | None = None
    """Where torch/… and wds/… data sets lie."""
    train_split: str = "train"
    """Name of the training split (the gallery of k-NN)."""
    test_split: str | None = None
    """Name of the test split (the queries of k-NN). Default: the first of val, validation, test that exists."""
    test_labels: Path | None = None
    """Labels of a flat test folder: a text or CSV file with a line 'image label' per image."""
    train_per_class: int | None = None
    """Take only the first N images of each class by sorted file name."""
    test_per_class: int | None = None
    """Likewise for the test split."""
    bad_images: Literal["stop", "skip"] = "stop"
    """What to do with an image that cannot be decoded: stop and name it, or leave it out and count it."""
    fingerprint: Literal["stat", "content"] = "stat"
    """Recognise files by path, size and modification time, or by their bytes (slower)."""
    download: bool = False
    """Let torch/… data sets download themselves."""
    resize: int | None = None
    """Shorter side in pixels after resizing. Default: 256 (for demo, what the network was trained at)."""
    crop: int | None = None
    """Side of the centre crop in pixels. Default: 224 (for demo, what the network was trained at)."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Resampling filter (PIL, antialiased)."""
    mean: tuple[float, float, float] | None = None
    """Per-channel mean of the inputs, 0 to 1. Default: the checkpoint family's; ImageNet's in pre-training."""
    std: tuple[float, float, float] | None = None
    """Per-channel deviation of the inputs. Default: the checkpoint family's."""


@dataclass(frozen=True)
class EngineSettings:
    """How to compute."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the backbone's forward pass; features are stored as float32."""
    batch_size: int = 64
    """Images per forward pass, per process."""
    workers: int | None = None
    """Data-loading processes per process. Default: one per core up to 8 (1 when computing on the CPU)."""
    cache: Path | None = None
    """Folder for feature banks. Default: $IBOT_EVAL_CACHE, else ~/.cache/ibot-eval."""
    seed: int = 0
    """Seed of everything random."""
    launch: str | None = None
    """local:N starts N processes on this machine through torch's launcher."""


@dataclass(frozen=True)
class OutputSettings:
    """What to do with the results."""

    output: Path = Path("runs")
    """Folder that holds a folder per run."""
    name: str | None = None
    """Name of the run. Default: protocol, checkpoint, data and time; of a suite: checkpoint, data and a hash."""
    data_name: str | None = None
    """Name of the data set as publications call it (ImageNet-1K), to show published numbers beside yours."""
    method: str | None = None
    """Name of the method as publications call it (iBOT). Default: what the checkpoint's layout tells."""
    json: bool = False
    """Print the record (of a suite: a list of all) as JSON on stdout instead of the table."""
    debug: bool = False
    """Show tracebacks."""


@dataclass(frozen=True)
class RunSettings:
    """Everything that a run needs besides its protocol's own settings."""

    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    data: DataSettings = field(default_factory=DataSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    def groups(self) -> Iterator[Any]:
        """The four groups, in order."""
        yield from (self.checkpoint, self.data, self.engine, self.output)
