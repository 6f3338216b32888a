"""How fast a training run goes, what it waits for, and when it will be done."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from tqdm import tqdm

from ibot_eval import distributed

Batch = TypeVar("Batch")


class Progress:
    """A bar over the whole run on rank 0's stderr, and the speed of the last steps.

    Nothing here waits for the device. A loop that queues work on a GPU is held back by it after a few steps (by
    ``FiniteWatch`` if by nothing else), so over a window the host's clock shows the device's pace; time spent waiting
    for the next batch is then time in which the device may run dry.

    Args:
        steps: of the whole run, those before a resume included.
        images_per_step: over all ranks.
        done: steps that were done before.
        window: steps that the speeds are averaged over.
        shown: whether there is a bar. Default: on rank 0.
        clock: seconds from any start.
    """

    def __init__(
        self,
        steps: int,
        images_per_step: int,
        *,
        done: int = 0,
        window: int = 50,
        shown: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.images_per_step = images_per_step
        self._clock = clock
        self._recent: deque[tuple[float, float]] = deque(maxlen=window)
        self._values: dict[str, float | int | str] = {}
        self._left_out = False
        self._bar = tqdm(
            total=steps * images_per_step,
            initial=done * images_per_step,
            desc="training",
            unit="image",
            unit_scale=True,
            file=sys.stderr,
            disable=not (distributed.is_main() if shown is None else shown),
            # A log file gets a line now and then instead of a redrawn bar.
            mininterval=0.2 if sys.stderr.isatty() else 30,
            smoothing=0.05,
            dynamic_ncols=True,
        )

    def over(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """``batches``, one step each; the bar moves on when the loop comes back for the next, and closes at the end.

        To be told when a loop breaks off, close the iterator or call :meth:`close`.
        """
        iterator = iter(batches)
        try:
            while True:
                asked = self._clock()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                waited = self._clock() - asked
                yield batch
                if not self._left_out:
                    self._recent.append((self._clock() - asked, waited))
                self._left_out = False
                self._move()
        except GeneratorExit:
            self._move()  # a loop that breaks off has had its batch
            raise
        finally:
            self.close()

    def show(self, **values: float | int | str) -> None:
        """Puts values beside the bar, until others of the same name replace them. Numbers come with three digits."""
        self._values.update(values)

    def leave_out(self) -> None:
        """Keeps the present step out of the speeds: something besides training was done in it."""
        self._left_out = True

    @property
    def images_per_second(self) -> float:
        """Over the last steps and all ranks; 0 before the first step has ended."""
        seconds = sum(whole for whole, _ in self._recent)
        return len(self._recent) * self.images_per_step / seconds if seconds > 0 else 0.0

    @property
    def data_wait(self) -> float:
        """Fraction of the last steps' time that this rank waited for batches, 0 to 1."""
        seconds = sum(whole for whole, _ in self._recent)
        return sum(waited for _, waited in self._recent) / seconds if seconds > 0 else 0.0

    def write(self, text: str) -> None:
        """Prints a line to stderr above the bar, on rank 0 only."""
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()

    def _move(self) -> None:
        if not self._bar.disable:
            self._bar.set_postfix({"data wait": f"{self.data_wait:.0%}", **self._values}, refresh=False)
        self._bar.update(self.images_per_step)
