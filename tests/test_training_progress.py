from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ibot_eval.training.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def batches(clock: Clock, waits: list[float]) -> Iterator[int]:
    for i, wait in enumerate(waits):
        clock.now += wait
        yield i


def test_speed_and_data_wait_over_the_window():
    clock = Clock()
    progress = Progress(10, 64, window=2, shown=False, clock=clock)
    assert (progress.images_per_second, progress.data_wait) == (0.0, 0.0)
    seen = []
    for i in progress.over(batches(clock, [50.0, 1.0, 3.0])):
        seen.append((i, progress.images_per_second, progress.data_wait))
        clock.now += 3.0
    # Step 0 takes 53 s, step 1 takes 4 s, step 2 takes 6 s; the last two count.
    assert seen == [(0, 0.0, 0.0), (1, 64 / 53, 50 / 53), (2, 128 / 57, 51 / 57)]
    assert (progress.images_per_second, progress.data_wait) == (12.8, 0.4)


def test_work_between_steps_is_not_waiting():
    clock = Clock()
    progress = Progress(1, 1, shown=False, clock=clock)
    for _ in progress.over(batches(clock, [0.0])):
        clock.now += 8.0
    assert progress.data_wait == 0


def test_steps_with_other_work_are_left_out():
    clock = Clock()
    progress = Progress(10, 64, shown=False, clock=clock)
    for i in progress.over(batches(clock, [1.0, 5.0, 3.0])):
        if i == 1:
            clock.now += 1000.0  # a checkpoint
            progress.leave_out()
        clock.now += 3.0
    # Steps 0 and 2 take 4 s and 6 s.
    assert (progress.images_per_second, progress.data_wait) == (12.8, 0.4)


def test_the_bar(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    clock = Clock()
    progress = Progress(20, 8, done=5, shown=True, clock=clock)
    for i in progress.over(batches(clock, [1.0] * 3)):
        progress.show(epoch=i, loss=1.23456)
        clock.now += 3.0
        progress.write(f"line {i}")
    text = capsys.readouterr().err
    last = re.split(r"[\r\n]", text.strip())[-1]
    assert "64.0/160" in last, "the images of the whole run, those before the resume included"
    for part in ("training:  40%", "image/s", "data wait=25%", "epoch=2", "loss=1.23"):
        assert part in last
    assert "\rline 1\n" in text


def test_ranks_without_a_bar_are_silent(capsys):
    progress = Progress(2, 1, shown=False)
    for _ in progress.over(range(2)):
        progress.show(loss=1.0)
        progress.write("line")
    progress.close()
    assert capsys.readouterr().err == ""


def test_a_loop_that_fails_closes_the_bar(capsys):
    progress = Progress(5, 1, shown=True)
    steps = progress.over(range(5))
    next(steps)
    with pytest.raises(RuntimeError, match="broken"):
        steps.throw(RuntimeError("broken"))  # type: ignore[attr-defined]
    assert capsys.readouterr().err.endswith("\n")
