"""pretrain.throughput: work counted by hand, peak rates, the paper's effective epochs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain import throughput
from pretrain.throughput import PeakRate, count_flops, effective_epochs, mfu, peak_rate, product_rate, sheet_rate

CPU = torch.device("cpu")


def crops(n=2, size=224, locals_=10, local=96):
    return SimpleNamespace(global_crops=n, global_size=size, local_crops=locals_, local_size=local)


def test_effective_epochs_of_the_paper():
    # 2 + 10 * (96 / 224)^2; the paper rounds it to 4, and so 800 epochs to 3200.
    assert effective_epochs(1, crops()) == pytest.approx(3.8367, abs=1e-4)
    assert round(effective_epochs(1, crops())) == 4
    assert effective_epochs(300, crops(locals_=0)) == 600
    assert effective_epochs(0.5, crops(2, 32, 4, 16)) == 0.5 * 3


def attention_step(n=2, heads=3, tokens=50, width=16):
    query, key, value = (torch.randn(n, heads, tokens, width, requires_grad=True) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value).sum().backward()


def test_a_linear_layer_is_six_per_weight_and_row_less_the_gradient_of_the_input():
    layer, images = nn.Linear(24, 40), torch.randn(7, 24)
    assert count_flops(lambda: layer(images)) == 2 * 7 * 24 * 40
    assert count_flops(lambda: layer(images).sum().backward()) == 4 * 7 * 24 * 40
    images.requires_grad_()
    assert count_flops(lambda: layer(images).sum().backward()) == 6 * 7 * 24 * 40


def test_fused_attention_counts_as_the_two_products_it_stands_for():
    # Two products forward, four backward, whatever the kernel.
    expected = 6 * (2 * 2 * 3 * 50 * 50 * 16)
    assert count_flops(attention_step()) == expected
    with sdpa_kernel(SDPBackend.MATH):
        assert count_flops(attention_step()) == expected
    with torch.no_grad():
        query = torch.randn(2, 3, 50, 16)
        assert count_flops(lambda: F.scaled_dot_product_attention(query, query, query)) == expected / 3


@pytest.mark.parametrize(
    "kernel",
    ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"],
)
def test_every_fused_kernel_is_known_by_its_arguments(kernel):
    # Kernels of GPUs do not run here, but their order of arguments is what the count depends on.
    for name, first in ((f"_scaled_dot_product_{kernel}", 0), (f"_scaled_dot_product_{kernel}_backward", 1)):
        operator = getattr(torch.ops.aten, name)
        arguments = [argument.name for argument in operator.default._schema.arguments]
        assert arguments[first : first + 3] == ["query", "key", "value"]
        assert operator in throughput._attention()


def test_a_vision_transformer_by_hand():
    from timm.models.vision_transformer import VisionTransformer

    net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=0)
    images, n, tokens, width = torch.randn(5, 3, 32, 32), 5, 17, 48
    block = 12 * width * width * tokens + 2 * tokens * tokens * width
    expected = 2 * n * (2 * block + 16 * 3 * 64 * width)
    with torch.no_grad():
        assert count_flops(lambda: net(images)) == expected


@pytest.mark.parametrize(
    ("name", "arithmetic", "tera"),
    [
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A10", "bf16", None),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ],
)
def test_gpus_are_known_by_their_whole_name(name, arithmetic, tera):
    assert sheet_rate(name, arithmetic) == (None if tera is None else pytest.approx(1e12 * tera))


def test_an_unknown_device_is_measured(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: 0.5 * next(ticks))
    # A product takes one tick of half a second.
    assert product_rate(CPU, "fp32", (8, 16, 32), seconds=0) == 2 * 8 * 16 * 32 / 0.5
    peak = peak_rate(CPU, "bf16", (8, 16, 32), seconds=0)
    assert peak.source == "product of 8x16x32 timed here, bf16"
    assert peak.flops == 2 * 8 * 16 * 32 / 0.5


def test_measuring_draws_no_random_numbers():
    state = torch.get_rng_state()
    assert product_rate(CPU, "fp32", (8, 8, 8), seconds=0) > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_mfu_is_in_percent():
    assert mfu(2e12, 0.5, PeakRate(1e13, "x")) == pytest.approx(40)
