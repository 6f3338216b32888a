"""A model of mmengine as processes train it together, on the device of the session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from mmengine.model import MMDistributedDataParallel, is_model_wrapper, revert_sync_batchnorm
from torch import Tensor, nn

from ibot_eval import distributed
from ibot_eval.errors import ConfigError


def spread(model: nn.Module, device: torch.device, *, find_unused_parameters: bool = False) -> nn.Module:
    """``model`` on ``device``, wrapped for data-parallel training where there are several processes.

    Statistics of batch norm are shared by SyncBN layers where these work: on GPUs, in several processes. Elsewhere
    they become plain batch norm, and every rank starts each iteration from rank 0's running averages, as DDP does.
    """
    world, cuda = distributed.world_size(), device.type == "cuda"
    if world == 1 or not cuda:
        model = revert_sync_batchnorm(model)
    model = model.to(device)
    if world == 1:
        return model
    return MMDistributedDataParallel(
        module=model,
        device_ids=[device.index if device.index is not None else torch.cuda.current_device()] if cuda else None,
        find_unused_parameters=find_unused_parameters,
    )


def plain(model: nn.Module) -> Any:
    """The model inside of what :func:`spread` gave."""
    return model.module if is_model_wrapper(model) else model


def share_running_averages(model: nn.Module) -> None:
    """Every rank takes rank 0's running averages of batch norm, which are those that are saved. A collective."""
    if distributed.world_size() > 1:
        for buffer in _running(plain(model)):
            torch.distributed.broadcast(buffer, src=0)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context of forward passes: bfloat16 where it was asked for and a GPU does it, else nothing."""
    return torch.autocast("cuda", torch.bfloat16) if in_bf16(precision, device) else nullcontext()


def in_bf16(precision: str, device: torch.device) -> bool:
    """Whether forward passes are to be in bfloat16: on GPUs only, since CPUs are many times slower in it.

    Raises:
        ConfigError: fp16, in which training overflows, or a GPU that has no bfloat16.
    """
    if precision == "fp16":
        raise ConfigError("training in fp16 overflows", todo="--precision bf16, or fp32")
    if precision != "bf16" or device.type != "cuda":
        return False
    if not torch.cuda.is_bf16_supported():
        raise ConfigError("this GPU has no bfloat16", todo="--precision fp32")
    return True


def _running(model: nn.Module) -> list[Tensor]:
    def buffers() -> Iterator[Tensor]:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                yield from module.buffers(recurse=False)

    return list(buffers())
