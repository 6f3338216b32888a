"""Settings of pre-training. Each field is a flag; its docstring is the flag's help.

Defaults are the published code's, but for the scale split of the crops, where they are the released ViT-S command's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ibot_eval.errors import ConfigError
from ibot_eval.settings import DataSettings

Sharing = Literal["vanilla", "shared", "semi-shared", "semi-shared-2"]


@dataclass(frozen=True)
class NetworkSettings:
    """Student and teacher."""

    arch: Literal["vit_tiny", "vit_small", "vit_base", "vit_large", "swin_tiny", "vit"] = "vit_small"
    """Backbone; 'vit' is a plain one of --width, --depth and --heads."""
    patch_size: int | None = None
    """Pixels of a patch. Default: 16 (4 for Swin)."""
    window: int = 7
    """Side of Swin's attention windows, in patches."""
    width: int | None = None
    """Width of the tokens, with --arch vit."""
    depth: int | None = None
    """Number of blocks, with --arch vit."""
    heads: int | None = None
    """Attention heads per block, with --arch vit."""
    drop_path: float = 0.1
    """Stochastic depth: probability of skipping the student's last block; it falls to 0 towards the first."""
    init_gain: float = 0.0
    """Start the blocks' weights with a deviation of this over the root of their inputs. 0 is the published 0.02, which
    suits wide networks; a narrow one then tells images apart from the start at 1 to 2."""
    position_std: float = 0.02
    """Deviation that position embeddings start with."""

    @property
    def patch(self) -> int:
        """Pixels of a patch, by default the published ones."""
        return self.patch_size or (4 if self.arch == "swin_tiny" else 16)


@dataclass(frozen=True)
class HeadSettings:
    """The projection head."""

    prototypes: int = 8192
    """K, the number of prototypes: outputs of the head."""
    patch_prototypes: int | None = None
    """K for patch tokens, where they have a last layer of their own. Default: as for [CLS]."""
    sharing: Sharing = "shared"
    """What [CLS] and patch tokens share: vanilla (nothing), shared (all), semi-shared (nothing in the student, all in
    the teacher), semi-shared-2 (all but the last layer in the student, all in the teacher)."""
    hidden: int = 2048
    """Width of the head's first two layers."""
    bottleneck: int = 256
    """Width of the layer before the prototypes."""
    norm_last_layer: bool = True
    """Whether the lengths of the student's prototypes stay at 1 instead of being trained."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """Losses and their targets."""

    cls_weight: float = 1.0
    """Weight of the [CLS] loss across views; 0 leaves masked image modelling alone."""
    patch_weight: float = 1.0
    """Weight of the loss on patch tokens; 0 leaves DINO."""
    patch_objective: Literal["mim", "position", "feature"] = "mim"
    """Loss on patch tokens: at masked positions, or on all of them against the other view's nearest patch by position
    or by feature (dense self-distillation, no masks)."""
    tokenizer: str | None = None
    """Checkpoint whose backbone and head give the targets of masked patches, frozen. Default: the teacher does."""
    targets: Literal["softmax", "hardmax"] = "softmax"
    """Whether a patch's target is the teacher's distribution or its largest output alone."""
    centring: bool = True
    """Whether the running mean is subtracted from the teacher's [CLS] outputs."""
    patch_centring: bool = True
    """The same for its patch outputs."""
    student_temp: float = 0.1
    """Temperature of the student's outputs."""
    teacher_temp: float = 0.07
    """Temperature of the teacher's [CLS] outputs after warm-up."""
    teacher_temp_start: float = 0.04
    """Temperature of the teacher's [CLS] outputs at the start."""
    patch_teacher_temp: float | None = None
    """Temperature of the teacher's patch outputs after warm-up. Default: as for [CLS]."""
    patch_teacher_temp_start: float | None = None
    """Temperature of the teacher's patch outputs at the start. Default: as for [CLS]."""
    teacher_temp_warmup: int = 30
    """Epochs over which the teacher's temperatures rise; a tenth of the run where that has fewer epochs."""
    centre_momentum: float = 0.9
    """Momentum of the running mean of the teacher's [CLS] outputs (the centre)."""
    patch_centre_momentum: float = 0.9
    """Momentum of the running mean of its patch outputs; 1 leaves that at 0, so that patches are not centred."""


@dataclass(frozen=True)
class MaskSettings:
    """Which patches of the student's views are masked."""

    pred_ratio: tuple[float, ...] = (0.0, 0.3)
    """Share of patches to mask; of several values one is drawn for each crop."""
    pred_ratio_var: tuple[float, ...] = (0.0, 0.2)
    """For each ratio, how far it varies up and down, uniformly."""
    mask_shape: Literal["block", "random"] = "block"
    """Blocks as in BEiT, or single patches."""
    mask_start_epoch: int = 0
    """First epoch with masks."""
    mask_at_least_one: bool = False
    """Never leave a crop without a masked patch when its ratio is above 0 (blocks do not fit small ratios)."""
    mask_crops: Literal["global", "one-global", "all"] = "global"
    """Which crops are masked: both global ones, the first only, or the local ones as well."""


@dataclass(frozen=True)
class CropSettings:
    """Views of an image."""

    global_crops: int = 2
    """Number of large views, which the teacher sees."""
    global_size: int = 224
    """Side of the large views in pixels."""
    global_scale: tuple[float, float] = (0.25, 1.0)
    """Least and largest share of the image's area that a large view covers."""
    local_crops: int = 10
    """Number of small views, which only the student sees."""
    local_size: int = 96
    """Side of the small views in pixels."""
    local_scale: tuple[float, float] = (0.05, 0.25)
    """Least and largest share of the image's area that a small view covers."""
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the crops' ratio of width to height."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    colour: bool = True
    """Colour jitter, greyscale and solarisation as published; --no-colour for images without colour."""
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    """Probability of a Gaussian blur: first global crop, other global crops, local crops."""
    rotation: float = 0.0
    """Largest rotation either way, degrees."""
    shift: float = 0.0
    """Largest shift either way, as a share of the side."""
    shear: float = 0.0
    """Largest shear either way: how far a row goes to the side per unit down."""
    stretch: float = 1.0
    """Largest ratio of the sides of the part of a crop that is shown, either way."""
    zoom: tuple[float, float] = (1.0, 1.0)
    """Side of the part that is shown, as a share of the crop's; above 1 makes room around it."""
    elastic: float = 0.0
    """Largest displacement by a smooth random field, as a share of the side. These six suit drawings such as digits."""


@dataclass(frozen=True)
class OptimiserSettings:
    """AdamW and its schedules."""

    epochs: int = 100
    """Passes over the data."""
    batch_size: int = 64
    """Images per process and forward pass."""
    accumulate: int = 1
    """Forward passes whose gradients make one step."""
    lr: float = 5e-4
    """Learning rate for a batch of 256 images; the one used is this times the whole batch / 256."""
    lr_warmup: int = 10
    """Epochs over which the learning rate rises from 0; a tenth of the run where that has fewer epochs."""
    lr_end: float = 1e-6
    """Learning rate at the end (not scaled)."""
    weight_decay: float = 0.04
    """Weight decay at the start; biases and norms have none."""
    weight_decay_end: float = 0.4
    """Weight decay at the end."""
    momentum: float = 0.996
    """Momentum of the teacher's moving average at the start; it rises to 1."""
    clip: float = 3.0
    """Largest norm of each parameter tensor's gradient; 0 for none."""
    freeze_last_layer: int = 1
    """Epochs during which the prototypes are not trained."""


@dataclass(frozen=True)
class PretrainEngine:
    """How to compute."""

    device: str = "auto"
    """Where to compute: auto (a GPU where there is one), cpu, cuda, cuda:N or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the forward pass: auto is bf16 on GPUs that have it, else fp32. Weights and losses are float32."""
    compile: bool = False
    """Compile the backbones with torch.compile."""
    checkpoint_blocks: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    workers: int | None = None
    """Data-loading processes per process. Default: one per core up to 8 (1 when computing on the CPU)."""
    seed: int = 0
    """Seed of everything random."""
    launch: str | None = None
    """local:N starts N processes on this machine through torch's launcher."""


@dataclass(frozen=True)
class PretrainOutput:
    """What to write, and when."""

    output: Path = Path("runs")
    """Folder that holds a folder per run."""
    name: str | None = None
    """Name of the run. Default: pretrain, architecture, data and time."""
    resume: str = "never"
    """What to continue: never (start anew), auto (the run of --name, where there is one) or the folder of a run."""
    save_every: int = 1
    """Epochs between checkpoints."""
    save_steps: int = 0
    """Also save every N steps; 0 for never."""
    keep: int = 3
    """Checkpoints to keep, the newest ones."""
    log_every: int = 10
    """Steps between lines of log.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard files as well, where tensorboard is installed."""
    knn_every: int = 0
    """Epochs between k-NN evaluations of the teacher (needs labels and a test split); 0 for never."""
    knn_per_class: int | None = None
    """Evaluate on the first N images of each class. Default: all."""
    stop_after: int | None = None
    """End after this many epochs, schedules unchanged, to be continued with --resume."""
    json: bool = False
    """Print the record as JSON on stdout instead of the summary."""
    debug: bool = False
    """Show tracebacks."""


@dataclass(frozen=True)
class PretrainSettings:
    """All of it."""

    network: NetworkSettings = field(default_factory=NetworkSettings)
    head: HeadSettings = field(default_factory=HeadSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    masks: MaskSettings = field(default_factory=MaskSettings)
    crops: CropSettings = field(default_factory=CropSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    data: DataSettings = field(default_factory=DataSettings)
    engine: PretrainEngine = field(default_factory=PretrainEngine)
    output: PretrainOutput = field(default_factory=PretrainOutput)

    def groups(self) -> Iterator[Any]:
        """The groups, in order."""
        for item in dataclasses.fields(PretrainSettings):
            yield getattr(self, item.name)

    def flat(self) -> dict[str, Any]:
        """Flag -> value, JSON-ready."""
        return {
            name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            for group in self.groups()
            for name, value in vars(group).items()
        }

    def with_flags(self, flags: Mapping[str, Any]) -> PretrainSettings:
        """These settings with some flags (names as in :meth:`flat`) changed."""
        changed: dict[str, Any] = {}
        left = dict(flags)
        for item in dataclasses.fields(PretrainSettings):
            group = getattr(self, item.name)
            own = {name: left.pop(name) for name in list(left) if name in vars(group)}
            changed[item.name] = dataclasses.replace(group, **own)
        if left:
            raise ConfigError(f"no setting {', '.join(map(repr, left))}")
        return PretrainSettings(**changed)


MAY_CHANGE = frozenset(
    [item.name for item in dataclasses.fields(PretrainOutput)]
    + ["device", "workers", "launch", "bad_images", "data", "data_root", "download", "resize", "crop"]
)
"""Flags that a resumed run may give another value: none touches the weights. A data set may have moved: its images are
compared by their names."""
