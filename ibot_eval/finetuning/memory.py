"""What to do when training does not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ibot_eval.errors import ConfigError


@contextmanager
def explain_out_of_memory(batch_size: int, accumulate: int, precision: str, checkpointed: bool) -> Iterator[None]:
    """Turns torch's report of too little memory into a ConfigError that says what took it and what takes less.

    Args:
        batch_size: images per process and forward pass.
        accumulate: forward passes per step.
        precision: of the forward pass.
        checkpointed: whether activations are recomputed already.
    """
    try:
        yield
    except RuntimeError as error:
        # The CPU's allocator has no exception of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "not enough memory" not in str(error):
            raise
        ways = []
        if batch_size > 1:
            ways.append(f"--train-batch {batch_size // 2} --accumulate {2 * accumulate} (the same steps)")
        if precision == "fp32":
            ways.append("--precision bf16")
        if not checkpointed:
            ways.append("--checkpoint-blocks")
        ways.append("--fsdp on more processes")
        raise ConfigError(
            f"memory ran out with --train-batch {batch_size}, --precision {precision} and "
            f"{'' if checkpointed else 'no '}--checkpoint-blocks: {str(error).splitlines()[0]}",
            todo="use less: " + ", or ".join(ways) + "; settings that change the numbers need a run of another --name",
        ) from error
