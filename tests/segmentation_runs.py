"""Small segmentation runs, on ranks and broken off too. Imports little, for processes that start often."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ibot_eval.record import EvalRecord
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings

CONFIG: dict[str, Any] = {
    **{"iterations": 8, "train_batch": 2, "lr": 2e-3, "crop_size": 64, "short_side": 80, "random_scale": (0.8, 1.2)},
    **{"channels": 16, "eval_every": 4, "log_every": 1, "draw": 2, "bootstrap": 40, "save_minutes": 0.0},
}


def run(folder: str, name: str, ckpt: str, data: str, *arguments: Any, **changes: Any) -> EvalRecord:
    """As :func:`carry_out`; the record as it is read back."""
    carry_out(folder, name, ckpt, data, *arguments, **changes)
    return EvalRecord.load(Path(folder) / name)


def carry_out(
    folder: str, name: str, ckpt: str, data: str, die_in: int | None = None, number: int = 0, **changes: Any
) -> EvalRecord:
    """Through the runner; a signal comes in step ``die_in``, from 1."""
    from ibot_eval import runner
    from protocols.segment import Segment, SegmentConfig

    engine = {key: changes.pop(key) for key in ("seed", "workers") if key in changes}
    settings = RunSettings(
        CheckpointSettings(ckpt=ckpt),
        DataSettings(data=data),
        EngineSettings(**({"device": "cpu", "workers": 0} | engine)),
        OutputSettings(output=Path(folder), name=name),
    )
    protocol = Segment(SegmentConfig(**{**CONFIG, **changes}))
    if die_in is None:
        signalled: Any = nullcontext()
    else:
        from protocols.openmmlab import ready

        ready.prepare()
        from tests.dense_training import signalled as signalled_run

        signalled = signalled_run(die_in, number)
    with signalled:
        return runner.run("segment", protocol, settings, asked=frozenset(changes))


def run_quietly(*arguments: Any, **changes: Any) -> dict[str, Any]:
    """What of :func:`run` fits between processes."""
    return run(*arguments, **changes).as_dict()


def on_ranks(folder: str, ckpt: str, data: str, changes: dict[str, Any]) -> list[Any]:
    """Name, class and value of each metric."""
    record = carry_out(folder, "run", ckpt, data, **changes)
    return [[m["name"], m["params"].get("class"), m["value"]] for m in record.metrics]
