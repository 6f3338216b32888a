"""Attention maps from timm networks, whose fused kernels never form them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ibot_eval.errors import ConfigError


class _Enough(Exception):
    """The map is there; the rest of the block need not run."""


def attention_of(block: nn.Module, tokens: Tensor, **arguments: Any) -> Tensor:
    """Softmax weights of one Transformer block, (B, heads, T, T), for the tokens (B, T, D) that go into it.

    The block is run up to its softmax, without its fused kernel, and no further. What it makes of the tokens is not
    taken from here: the two ways differ in the last digits, and features must not depend on who else asks for a map.

    Args:
        arguments: what the block takes besides tokens.

    Raises:
        ConfigError: the block's attention is of a kind that does not form softmax weights.
    """
    attention: Any = block.attn
    dropout, fused = getattr(attention, "attn_drop", None), getattr(attention, "fused_attn", None)
    if not isinstance(dropout, nn.Module) or fused is None:
        raise ConfigError(
            f"attention maps cannot be read from {type(attention).__name__}",
            todo="choose a checkpoint with plain attention blocks",
        )
    kept: list[Tensor] = []

    # The dropout's input, not its output, so that rows sum to one in training mode too.
    def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        kept.append(inputs[0])
        raise _Enough

    handle = dropout.register_forward_pre_hook(stop)
    attention.fused_attn = False
    try:
        block(tokens, **arguments)
    except _Enough:
        pass
    finally:
        attention.fused_attn = fused
        handle.remove()
    return kept[0]
