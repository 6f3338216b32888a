"""Attention maps from timm networks, whose fused kernels never form them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ibot_eval.errors import ConfigError


@contextmanager
def captured_attention(attention: nn.Module) -> Iterator[list[Tensor]]:
    """Makes one attention module keep its softmax weights while the context lasts.

    The list that is yielded holds, after a pass, one tensor (B, heads, T, T). The fused kernel is switched off for
    this module only, and back on however the context ends, so one block's map is all the memory it takes.

    Raises:
        ConfigError: the module is of a kind that does not form softmax weights.
    """
    dropout, fused = getattr(attention, "attn_drop", None), getattr(attention, "fused_attn", None)
    if not isinstance(dropout, nn.Module) or fused is None:
        raise ConfigError(
            f"attention maps cannot be read from {type(attention).__name__}",
            todo="choose a checkpoint with plain attention blocks",
        )
    kept: list[Tensor] = []
    # The dropout's input, not its output, so that rows sum to one in training mode too.
    handle = dropout.register_forward_hook(lambda module, inputs, output: kept.append(inputs[0]))
    setattr(attention, "fused_attn", False)  # noqa: B010 - nn.Module is typed to hold modules and tensors only
    try:
        yield kept
    finally:
        setattr(attention, "fused_attn", fused)  # noqa: B010
        handle.remove()
