"""ibot_eval.training.holding: one process, or one group, has a run."""

from __future__ import annotations

from pathlib import Path

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.training.holding import hold
from tests.ranks import Running, run_ranks


def attempt(folder: str) -> str:
    try:
        hold(Path(folder)).release()
    except ConfigError as error:
        return error.what
    return ""


def attempt_together(folder: str) -> str:
    distributed.init("cpu")
    return attempt(folder)


def test_another_process_is_refused_until_the_lock_is_released(tmp_path: Path) -> None:
    lock = hold(tmp_path)
    wanted = f"another process is writing the run {tmp_path}"
    assert Running(attempt, str(tmp_path)).done().value == wanted
    assert run_ranks(2, attempt_together, str(tmp_path)) == [wanted, wanted]
    lock.release()
    assert attempt(str(tmp_path)) == ""


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write into" in attempt(str(tmp_path / "file" / "run"))
