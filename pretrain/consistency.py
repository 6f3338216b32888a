"""Settings that contradict each other, found before anything is read or built."""

from __future__ import annotations

import math

from ibot_eval.errors import ConfigError
from pretrain.config import PretrainSettings


def check(settings: PretrainSettings) -> None:
    """Raises ConfigError for settings that contradict each other, before anything is read or built."""
    net, head, goal = settings.network, settings.head, settings.objective
    crops = settings.crops
    own = [name for name in ("width", "depth", "heads") if getattr(net, name) is not None]
    if net.arch == "vit" and len(own) < 3:
        raise ConfigError("--arch vit needs --width, --depth and --heads")
    if net.arch != "vit" and own:
        raise ConfigError(f"--{own[0]} belongs to --arch vit; {net.arch} has its own")
    if net.width and net.heads and net.width % net.heads:
        raise ConfigError(f"--width {net.width} is not a multiple of --heads {net.heads}")
    _check_ranges(settings)
    if crops.local_crops and crops.local_size % net.patch:
        raise ConfigError(f"--local-size {crops.local_size} is not a multiple of the patch size {net.patch}")
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


def _check_ranges(settings: PretrainSettings) -> None:
    given = {name: value for name, value in settings.flat().items() if value is not None}
    for names, fits, needed in (
        (_COUNTS, lambda value: value >= 1, "at least 1 is needed"),
        (_NATURAL, lambda value: value >= 0, "it is 0 or above"),
        (_POSITIVE, lambda value: 0 < value < math.inf, "it must be above 0"),
        (_AMOUNTS, lambda value: 0 <= value < math.inf, "it is 0 or above"),
        (_SHARES, lambda value: 0 <= value <= 1, "it lies between 0 and 1"),
        ({"drop_path"}, lambda value: 0 <= value < 1, "it lies between 0 and 1, which would drop every path"),
    ):
        for name in sorted(names & given.keys()):
            for value in given[name] if isinstance(given[name], list) else [given[name]]:
                if not fits(value):
                    raise ConfigError(f"--{name.replace('_', '-')} {value}: {needed}")
    if settings.head.prototypes < 2:
        raise ConfigError("--prototypes 1: a single prototype leaves nothing to tell apart", todo="use 2 or more")


_COUNTS = {
    *("hidden", "bottleneck", "patch_size", "window", "width", "depth", "heads", "prototypes", "patch_prototypes"),
    *("global_crops", "global_size", "local_size", "epochs", "batch_size", "accumulate"),
    *("log_every", "keep", "save_every", "knn_per_class", "stop_after"),
}
_NATURAL = {
    *("local_crops", "mask_start_epoch", "save_steps", "knn_every", "lr_warmup", "teacher_temp_warmup", "workers"),
    "freeze_last_layer",
}
_POSITIVE = {
    *("lr", "student_temp", "teacher_temp", "teacher_temp_start", "patch_teacher_temp", "patch_teacher_temp_start"),
    *("position_std", "aspect"),
}
_AMOUNTS = {"cls_weight", "patch_weight", "clip", "lr_end", "weight_decay", "weight_decay_end", "init_gain"}
_SHARES = {
    *("momentum", "centre_momentum", "patch_centre_momentum"),
    *("pred_ratio", "pred_ratio_var", "flip", "blur"),
}
