"""Stops a training run at its first NaN or infinity, without making the device wait for the answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ibot_eval.errors import UserError

Flags = Sequence[tuple[str | Sequence[str], Tensor]]


class NotFinite(UserError):
    """A NaN or an infinity where training cannot go on with one."""


class FiniteWatch:
    """Looks at flags such as ``loss.isfinite()`` of every step, in the order in which they were computed.

    On a GPU the flags are copied to the host behind the step's work and looked at when the next step has been queued,
    so the device never idles; the step after a bad one is then lost as well. Call :meth:`settle` before anything is
    saved. In several processes every rank looks at its own flags: give them after the gradients have been averaged,
    which spreads a NaN to all ranks, or a rank that is fine waits for one that has stopped.

    Args:
        device: where the flags lie.
        deferred: look one step later. Default: on CUDA only.
        todo: what the error tells the user to do.
    """

    def __init__(self, device: torch.device, *, deferred: bool | None = None, todo: str | None = None) -> None:
        self.deferred = device.type == "cuda" if deferred is None else deferred
        self.todo = (
            todo or "go on from the last checkpoint with a smaller learning rate, or in fp32 if this was half precision"
        )
        self._pending: tuple[int, list[str], Tensor, torch.cuda.Event | None] | None = None

    def check(self, step: int, flags: Flags) -> None:
        """Takes the flags of ``step`` and looks at them, or at those of the step before where that is deferred.

        Args:
            flags: (name, bool tensor that is True where the value is finite). One name stands for the whole tensor;
                a sequence of names for its elements, one each (all norms of the gradients, for example).

        Raises:
            NotFinite: names the first bad value and its step.
        """
        names = [name for names, _ in flags for name in ([names] if isinstance(names, str) else names)]
        parts = [
            flag.detach().all().reshape(1) if isinstance(name, str) else flag.detach().reshape(-1)
            for name, flag in flags
        ]
        before, self._pending = self._pending, (step, names, *_to_host(torch.cat(parts)))
        if before is not None:
            self._examine(*before)
        if not self.deferred:
            self.settle()

    def settle(self) -> None:
        """Looks at what has been taken and not looked at yet. Raises as :meth:`check` does."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._examine(*pending)

    def _examine(self, step: int, names: list[str], flags: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        bad = [name for name, fine in zip(names, flags.tolist(), strict=True) if not fine]
        if not bad:
            return
        # Later flags are bad because the first is; settling after the error must not report one of them.
        self._pending = None
        others = f", and so are {len(bad) - 1} after it" if len(bad) > 1 else ""
        raise NotFinite(f"{bad[0]} is NaN or infinite at step {step}{others}", todo=self.todo)


def _to_host(flags: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if flags.device.type != "cuda":
        return flags.cpu(), None
    host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(flags.device))
    return host, copied
