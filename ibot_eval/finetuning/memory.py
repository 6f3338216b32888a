"""What to do when something does not fit into memory: a training step, an evaluation, or the weights alone."""

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
    ways = []
    if batch_size > 1:
        ways.append(f"--train-batch {batch_size // 2} --accumulate {2 * accumulate} (the same steps)")
    if precision == "fp32":
        ways.append("--precision bf16")
    if not checkpointed:
        ways.append("--checkpoint-blocks")
    ways.append("--fsdp on more processes")
    with _explained(
        f"with --train-batch {batch_size}, --precision {precision} and {'' if checkpointed else 'no '}"
        "--checkpoint-blocks",
        "use less: " + ", or ".join(ways) + "; settings that change the numbers need a run of another --name",
    ):
        yield


@contextmanager
def explain_out_of_memory_in_evaluation(batch_size: int) -> Iterator[None]:
    """Likewise, for forward passes of ``batch_size`` images without gradients."""
    smaller = f"--batch-size {batch_size // 2}" if batch_size > 1 else "a device with more free memory"
    with _explained(
        f"in the evaluation, with --batch-size {batch_size}",
        f"{smaller}; the same command with it goes on from the newest training state",
    ):
        yield


@contextmanager
def explain_out_of_memory_for_weights() -> Iterator[None]:
    """Likewise, for all that training needs beside its steps: the weights, copies of them and the optimiser's state."""
    with _explained(
        "for the weights, their moving average or the optimiser's state",
        "choose a device with more free memory (other programs may hold it), or share the weights out: --fsdp on more "
        "processes",
    ):
        yield


@contextmanager
def _explained(what: str, todo: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"memory ran out {what}: {str(error).splitlines()[0]}", todo=todo) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether ``error`` is torch's report of too little memory."""
    # The CPU's allocator has no exception of its own, and other words on Linux than on Windows.
    on_cpu = any(words in str(error) for words in ("can't allocate memory", "not enough memory"))
    return isinstance(error, torch.OutOfMemoryError) or on_cpu
