"""Settings that contradict each other, found before anything is read or built."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ibot_eval.errors import ConfigError
from pretrain.config import ObjectiveSettings, PretrainSettings


def check(settings: PretrainSettings) -> None:
    """Raises ConfigError for settings that contradict each other, before anything is read or built."""
    net, head, goal = settings.network, settings.head, settings.objective
    crops, opt = settings.crops, settings.optimiser
    own = [name for name in ("width", "depth", "heads") if getattr(net, name) is not None]
    if net.arch == "vit" and len(own) < 3:
        raise ConfigError("--arch vit needs --width, --depth and --heads")
    if net.arch != "vit" and own:
        raise ConfigError(f"--{own[0]} belongs to --arch vit; {net.arch} has its own")
    if net.width and net.heads and net.width % net.heads:
        raise ConfigError(f"--width {net.width} is not a multiple of --heads {net.heads}")
    for flag, value in (
        ("prototypes", head.prototypes),
        ("hidden", head.hidden),
        ("bottleneck", head.bottleneck),
        ("patch-size", 1 if net.patch_size is None else net.patch_size),
        ("global-crops", crops.global_crops),
        ("epochs", opt.epochs),
        ("batch-size", opt.batch_size),
        ("accumulate", opt.accumulate),
        ("log-every", settings.output.log_every),
        ("save-every", settings.output.save_every),
        ("keep", settings.output.keep),
    ):
        if value < 1:
            raise ConfigError(f"--{flag} {value}: at least 1 is needed")
    patch = net.patch_size or (4 if net.arch == "swin_tiny" else 16)
    if crops.local_crops and crops.local_size % patch:
        raise ConfigError(f"--local-size {crops.local_size} is not a multiple of the patch size {patch}")
    for flag, value in (("student-temp", goal.student_temp), *_temperatures(goal)):
        if not value > 0:
            raise ConfigError(f"--{flag} {value}: a temperature is above 0")
    for flag, value in (
        ("momentum", opt.momentum),
        ("centre-momentum", goal.centre_momentum),
        ("patch-centre-momentum", goal.patch_centre_momentum),
        ("drop-path", net.drop_path),
    ):
        if not 0 <= value < (1 if flag == "drop-path" else 1 + 1e-12):
            raise ConfigError(f"--{flag} {value}: it lies between 0 and 1")
    for flag, value in (("cls-weight", goal.cls_weight), ("patch-weight", goal.patch_weight), ("clip", opt.clip)):
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"--{flag} {value}: it is 0 or above")
    if goal.cls_weight == goal.patch_weight == 0:
        raise ConfigError("--cls-weight 0 with --patch-weight 0 leaves no loss")
    if goal.cls_weight > 0 and crops.global_crops + crops.local_crops < 2:
        raise ConfigError(
            "the [CLS] loss compares two views, and there is one", todo="--global-crops 2, or --cls-weight 0"
        )
    if goal.patch_objective != "mim" and crops.global_crops < 2:
        raise ConfigError(f"--patch-objective {goal.patch_objective} compares two global views: --global-crops 2")
    if goal.patch_objective != "mim" and goal.tokenizer:
        raise ConfigError(f"--tokenizer gives targets for masked patches, not for {goal.patch_objective}")
    if head.patch_prototypes not in (None, head.prototypes) and head.sharing != "vanilla" and not goal.tokenizer:
        raise ConfigError(
            f"--patch-prototypes {head.patch_prototypes} needs a last layer for patches in the teacher too",
            todo="--sharing vanilla",
        )
    if goal.patch_weight > 0 and goal.patch_objective == "mim" and max(settings.masks.pred_ratio, default=0) <= 0:
        raise ConfigError(
            "the patch loss needs masked patches", todo="--pred-ratio above 0, or --patch-weight 0 (DINO)"
        )


def _temperatures(goal: ObjectiveSettings) -> Iterator[tuple[str, float]]:
    for name in ("teacher_temp", "teacher_temp_start", "patch_teacher_temp", "patch_teacher_temp_start"):
        value = getattr(goal, name)
        if value is not None:
            yield name.replace("_", "-"), value
