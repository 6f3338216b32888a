"""The states of all generators that a training loop may draw from, as plain values that ``weights_only`` loads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Starts the global generators of Python, NumPy and torch (all devices) from ``seed``."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


@contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """What the block draws from the global generators of Python, NumPy and torch (CPU) depends on ``numbers`` alone.

    For libraries that take no generator of their own. The generators are put back afterwards.

    Args:
        numbers: at least 0. Neighbours do not give related draws.
    """
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    # torch.manual_seed would start the generators of all devices anew.
    torch.default_generator.manual_seed(int(words[2]))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)


def random_state(device: torch.device) -> dict[str, Any]:
    """This process's states of Python's, NumPy's and torch's global generators, and of ``device``'s own (CUDA, MPS).

    Returns:
        tensors on the CPU, numbers and text, to be gathered from all ranks (``distributed.gather_objects``) and saved.
    """
    name, keys, *numbers = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *numbers),
        "cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts the generators where they were when ``random_state`` was called.

    A state saved on another kind of device has nothing for this one's generator, which then stays as it is: steps
    after such a move are sound, but not the ones that the old device would have made.
    """
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, *numbers = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *numbers))
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
