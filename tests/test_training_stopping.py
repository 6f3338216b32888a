from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from ibot_eval import distributed
from ibot_eval.training import stopping
from ibot_eval.training.stopping import StopRequest
from tests.ranks import run_ranks


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # the handler runs before the next line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_only_asks(number, capfd):
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    with StopRequest() as stop:
        assert not stop.requested
        send(number)
        assert stop.requested
        assert stop.received == number
        assert stop.agreed()
    assert capfd.readouterr().err.count(f"{number.name}: stopping after this step") == 1
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_second_interrupt_stops_at_once(monkeypatch):
    monkeypatch.setattr(stopping, "_SAME_KEYSTROKE", -1.0)
    with StopRequest():
        send(signal.SIGINT)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_keystroke_may_arrive_twice(monkeypatch):
    monkeypatch.setattr(stopping, "_SAME_KEYSTROKE", 1000.0)
    with StopRequest() as stop:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert stop.requested


def test_termination_twice_still_saves():
    with StopRequest() as stop:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop.received == signal.SIGTERM


def test_outside_of_the_main_thread():
    results = []

    def work() -> None:
        with StopRequest() as stop:
            results.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [False]


def stop_one_rank() -> list[Any]:
    distributed.init("cpu")
    with StopRequest() as stop:
        first = stop.agreed()
        if distributed.rank() == 1:
            send(signal.SIGTERM)
        return [first, stop.requested, stop.agreed()]


def test_ranks_agree():
    assert run_ranks(2, stop_one_rank) == [[False, False, True], [False, True, True]]
