"""How well a run uses its device, and how much training it amounts to: work per step, MFU, effective epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode

Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]
"""What matrix products are computed in."""

MATRIX = (4096, 4096, 4096)
"""Rows, inner size and columns of the product that measures a device which is in no table."""

MEASURING_SECONDS = 0.5

# Dense (not sparse) products with float32 sums, 10^12 operations per second, from the makers' data sheets. The first
# name that occurs in the device's name counts, so longer names stand before those that they contain.
PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("H200 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    ("H200", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67.0}),
    ("GH200", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67.0}),
    ("H100 PCIe", {"bf16": 756.5, "fp16": 756.5, "tf32": 378.0, "fp32": 51.0}),
    ("H100 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    ("H100", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67.0}),
    ("A100", {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    ("A30", {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3}),
    ("A40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("RTX A6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    ("L40S", {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6}),
    ("L4", {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3}),
    ("RTX 4090", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    ("RTX 3090", {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6}),
    ("V100", {"fp16": 125.0, "fp32": 15.7}),
)


class Crops(Protocol):
    """What decides how much of an image a step sees; the crop settings and the augmentation both say it."""

    @property
    def global_crops(self) -> int: ...
    @property
    def global_size(self) -> int: ...
    @property
    def local_crops(self) -> int: ...
    @property
    def local_size(self) -> int: ...


class PeakRate(NamedTuple):
    """The most that a device can compute."""

    flops: float
    """Operations per second; a multiplication and an addition are two."""
    source: str
    """Where the number comes from, for people: a data sheet, or the product that was timed."""


def effective_epochs(epochs: float, crops: Crops) -> float:
    """Epochs times the pixels seen per image, a global crop being one (iBOT, effective pre-training epochs).

    The paper counts r = 2 + 10 * (96 / 224)^2 = 3.84 for 2 crops of 224 and 10 of 96 pixels, which it rounds to 4;
    here it is not rounded.
    """
    area = (crops.local_size / crops.global_size) ** 2
    return epochs * (crops.global_crops + crops.local_crops * area)


def count_flops(step: Callable[[], object]) -> int:
    """Operations of the matrix products and convolutions of one call of ``step``; a multiply-add counts as two.

    Attention's backward pass counts as twice its forward pass on every device, as in the usual definition of MFU (PaLM,
    appendix B): fused kernels that recompute the scores get no credit for it. torch alone counts that recomputation,
    and nothing at all for the fused attention of the CPU.

    Args:
        step: forward and backward pass. It runs once and for real. Neither compiled (nothing would be seen) nor with
            checkpointed activations (they would count twice).
    """
    with FlopCounterMode(display=False, custom_mapping=_attention()) as counter:
        step()
    return counter.get_total_flops()


def peak_rate(
    device: torch.device,
    arithmetic: Arithmetic,
    shape: tuple[int, int, int] = MATRIX,
    *,
    seconds: float = MEASURING_SECONDS,
) -> PeakRate:
    """The data sheet's rate of a known GPU, else the rate of a matrix product timed here and now.

    Args:
        arithmetic: "tf32" on a device without it is a plain float32 product.
        shape: (rows, inner, columns) of the timed product: best one of the network's own, the batch's tokens by the
            width by four times the width.
        seconds: how long to time it.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = sheet_rate(name, arithmetic)
        if known is not None:
            return PeakRate(known, f"data sheet of {name}, {arithmetic}")
    size = "x".join(map(str, shape))
    return PeakRate(product_rate(device, arithmetic, shape, seconds), f"product of {size} timed here, {arithmetic}")


def sheet_rate(name: str, arithmetic: Arithmetic) -> float | None:
    """Operations per second of the GPU that torch calls ``name``; None for one that is not in the table."""
    # GH200 contains H200: whole words only, and a hyphen ends a word ("A100-SXM4-80GB").
    words = f" {name.replace('-', ' ')} "
    if " Laptop " in words:  # another chip, or a slower clock, under the same name
        return None
    rates = next((rates for model, rates in PEAKS if f" {model} " in words), {})
    return 1e12 * rates[arithmetic] if arithmetic in rates else None


def product_rate(
    device: torch.device, arithmetic: Arithmetic, shape: tuple[int, int, int], seconds: float = MEASURING_SECONDS
) -> float:
    """Operations per second of the fastest of several products (rows, inner) x (inner, columns)."""
    rows, inner, columns = shape
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arithmetic, torch.float32)
    # Ones, not random numbers: a probe must not draw from the generators of the run.
    left, right = (torch.ones(size, dtype=dtype, device=device) for size in ((rows, inner), (inner, columns)))
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    best, begin, count = math.inf, time.perf_counter(), 0
    # The first one warms up: it selects kernels and touches the memory.
    while count < 3 or time.perf_counter() - begin < seconds:
        _wait(device)
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        if count:
            best = min(best, time.perf_counter() - start)
        count += 1
    return 2 * rows * inner * columns / best


def mfu(flops: float, seconds: float, peak: PeakRate) -> float:
    """Model FLOP utilisation in percent: work of a step (see :func:`count_flops`) per second, over the peak rate.

    Args:
        flops: operations of one step of one process.
        seconds: wall time of a step, above 0.
        peak: of the process's device.
    """
    return 100 * flops / seconds / peak.flops


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _attention() -> dict[Any, Callable[..., int]]:
    """Fused attention kernel -> its count; the counter gives the arguments' shapes in place of tensors."""
    kernels = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    counts: dict[Any, Callable[..., int]] = {}
    for kernel in kernels:
        counts[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = _forward
        counts[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = _backward
    return counts


def _forward(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _backward(grad_out: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _forward(query, key, value)
