"""What happens to gradients and weights at the end of a step: clipping, AdamW, moving average.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def clip_each_(tensors: Iterable[Tensor], limit: float) -> Tensor:
    """Scales each gradient by itself to at most the norm ``limit``, in place (DINO's clipping, not the joint norm).

    A gradient g becomes g * min(1, limit / (|g| + 1e-6)), and an infinity in it becomes a NaN.

    Args:
        tensors: parameters, whose ``.grad`` is meant, or gradients. All on one device.
        limit: 0 leaves the gradients as they are.

    Returns:
        (n,) float32 norms before clipping, on the device; 0 for a parameter without a gradient.
    """
    gradients = [tensor.grad if isinstance(tensor, nn.Parameter) else tensor for tensor in tensors]
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return torch.zeros(len(gradients))
    norms = torch.stack(torch._foreach_norm(present, dtype=torch.float32))  # pyright: ignore[reportPrivateImportUsage]
    if limit > 0:
        factors = (limit / (norms + 1e-6)).clamp_(max=1)
        torch._foreach_mul_(present, factors.unbind())  # pyright: ignore[reportPrivateImportUsage]
    if len(present) == len(gradients):
        return norms
    nothing, found = norms.new_zeros(()), iter(norms)
    return torch.stack([nothing if gradient is None else next(found) for gradient in gradients])


@torch.no_grad()
def ema_(teacher: Sequence[Tensor], student: Sequence[Tensor], momentum: float) -> None:
    """teacher = momentum * teacher + (1 - momentum) * student, tensor by tensor, in place.

    As teacher + (1 - momentum) * (student - teacher): one pass over the memory, and nothing is lost where a momentum
    near 1 has no float32.
    """
    torch._foreach_lerp_(list(teacher), list(student), 1 - momentum)  # pyright: ignore[reportPrivateImportUsage]


def adamw(
    groups: list[dict[str, Any]], lr: float = 0.0, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over ``parameter_groups``, in one kernel where the device has one."""
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    # None: torch chooses between its loops, foreach where that is faster.
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True if kinds <= {"cpu", "cuda"} else None)


def set_rates(optimiser: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """This step's learning rate, and weight decay for the groups that are decayed."""
    for group in optimiser.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decayed"] else 0.0
