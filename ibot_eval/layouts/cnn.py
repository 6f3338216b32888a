"""Plain ResNets in torchvision's layout, which timm shares."""

from __future__ import annotations

from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck, ResNet

from ibot_eval.layouts.blueprint import Blueprint, Hints, need, number_of
from ibot_eval.layouts.unwrapping import Network


def is_resnet(network: Network) -> bool:
    """Whether a network has a ResNet's stages."""
    return "layer1.0.conv1.weight" in network.trunk


def read_resnet(network: Network, hints: Hints) -> Blueprint:
    """A ResNet (ResNeXt, wide ResNet), its blocks counted from the tensors."""
    trunk = network.trunk
    second = need(trunk, "layer1.0.conv2.weight")
    bottleneck = "layer1.0.conv3.weight" in trunk
    groups = second.shape[0] // second.shape[1]
    block: Any = Bottleneck if bottleneck else BasicBlock
    net = ResNet(
        block=block,
        layers=tuple(number_of(trunk, f"layer{stage}.") for stage in range(1, 5)),
        num_classes=0,
        cardinality=groups,
        base_width=second.shape[1] if bottleneck else 64,
        device="meta",
    )
    return Blueprint(net, dict(trunk), "resnet", None, hints.mean, hints.std)
