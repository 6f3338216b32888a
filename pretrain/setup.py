"""From settings to the parts of a run."""

from __future__ import annotations

import torch

from ibot_eval.backbone import IMAGENET_MEAN, IMAGENET_STD
from ibot_eval.checkpoint import load_checkpoint
from ibot_eval.errors import ConfigError
from ibot_eval.extraction import default_workers
from ibot_eval.settings import CheckpointSettings
from pretrain.augment import Augmentation
from pretrain.config import PretrainSettings
from pretrain.masking import Masking
from pretrain.networks import Network, Student, mask_cell
from pretrain.tokenizers import FrozenTokenizer, OnlineTokenizer, Tokenizer


def augmentation_of(settings: PretrainSettings) -> Augmentation:
    """What happens to images. ``--no-colour`` leaves geometry and blur."""
    crops, data = settings.crops, settings.data
    coloured = {} if crops.colour else {"jitter_probability": 0.0, "grey": 0.0, "solarise": (0.0, 0.0, 0.0)}
    return Augmentation(
        global_crops=crops.global_crops,
        global_size=crops.global_size,
        local_crops=crops.local_crops,
        local_size=crops.local_size,
        global_scale=crops.global_scale,
        local_scale=crops.local_scale,
        aspect=crops.aspect,
        flip=crops.flip,
        blur=crops.blur,
        rotation=crops.rotation,
        shift=crops.shift,
        shear=crops.shear,
        stretch=crops.stretch,
        zoom=crops.zoom,
        elastic=crops.elastic,
        mean=data.mean or IMAGENET_MEAN,
        std=data.std or IMAGENET_STD,
        **coloured,
    )


def masking_of(settings: PretrainSettings) -> Masking | None:
    """The masks, or None where the objective has none or no crop would ever get one."""
    masks = settings.masks
    if settings.objective.patch_objective != "mim" or max(masks.pred_ratio) <= 0:
        return None
    return Masking(
        ratios=masks.pred_ratio,
        variances=masks.pred_ratio_var,
        shape=masks.mask_shape,
        start_epoch=masks.mask_start_epoch,
        at_least_one=masks.mask_at_least_one,
    )


def tokenizer_of(settings: PretrainSettings, device: torch.device) -> FrozenTokenizer | None:
    """The frozen tokenizer asked for."""
    if settings.objective.tokenizer is None or settings.objective.patch_weight == 0:
        return None
    loaded = load_checkpoint(CheckpointSettings(ckpt=settings.objective.tokenizer))
    images = augmentation_of(settings)
    return FrozenTokenizer(loaded, device, images.mean, images.std)


def check_cells(tokenizer: Tokenizer | None, student: Student) -> Tokenizer | None:
    """Raises ConfigError where the tokenizer's patches are not the student's."""
    if isinstance(tokenizer, FrozenTokenizer) and tokenizer.cell != mask_cell(student.backbone):
        raise ConfigError(
            f"the tokenizer cuts images into cells of {tokenizer.cell} px and the student into "
            f"{mask_cell(student.backbone)} px",
            todo=f"--patch-size {tokenizer.cell}, or another tokenizer",
        )
    return tokenizer


def online_tokenizer(settings: PretrainSettings, teacher: Network) -> Tokenizer | None:
    """The teacher as tokenizer, where patches have a loss."""
    return OnlineTokenizer(teacher) if settings.objective.patch_weight > 0 else None


def precision_of(settings: PretrainSettings, device: torch.device) -> str:
    """fp32 or bf16.

    Raises:
        ConfigError: bf16 on a GPU that has none.
    """
    asked = settings.engine.precision
    has = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if asked == "auto":
        return "bf16" if has else "fp32"
    if asked == "bf16" and device.type == "cuda" and not has:
        raise ConfigError("this GPU has no bfloat16", todo="--precision fp32")
    return asked


def autocast_of(precision: str, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def workers_of(settings: PretrainSettings, device: torch.device) -> int:
    """Data-loading processes of this process."""
    return default_workers(device) if settings.engine.workers is None else settings.engine.workers
