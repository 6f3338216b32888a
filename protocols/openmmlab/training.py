"""Training and testing what an mmengine configuration describes, under the rules of every other run of ours."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from torch import Tensor, nn

from ibot_eval import distributed
from ibot_eval.errors import ConfigError
from ibot_eval.protocol import Session
from ibot_eval.recording import say
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.holding import hold
from ibot_eval.training.logs import TrainingLog, read_log
from ibot_eval.training.resuming import check_same_on_ranks
from protocols.openmmlab import state_files
from protocols.openmmlab.configuration import FILE, explain_failure, identity_of
from protocols.openmmlab.evaluation import Evaluation, scalars
from protocols.openmmlab.loop import Plan, TrainLoop
from protocols.openmmlab.model_file import load_weights, save_model
from protocols.openmmlab.parallel import in_bf16, plain, share_running_averages
from protocols.openmmlab.quiet_runner import LOG, QuietRunner
from protocols.openmmlab.ready import quietly
from protocols.openmmlab.seeded_data import TrainingData

STATES = "checkpoints"
"""Folder of the training states in the run's."""
MODEL = "model.pth"
"""The trained model, in mmengine's layout."""


class Tested(NamedTuple):
    """A model and what the evaluators of the configuration made of it."""

    results: dict[str, Any]
    """As the metrics' ``compute_metrics`` gave it, under ``PREFIX/NAME`` for metrics with a prefix; on every rank."""
    model: Any
    """In evaluation mode, on the session's device."""


class Trained(NamedTuple):
    """What a run has come to."""

    results: dict[str, Any]
    """Of the test at the end, as :class:`Tested` has it; {} if there was none."""
    model: Any
    """In evaluation mode, on the session's device."""
    path: Path
    """Of the trained model."""
    seconds: float
    """Spent training, over all resumptions."""
    replaced: int
    """Times that an image could not be decoded and another took its place."""


def train(
    cfg: Config,
    session: Session,
    *,
    identity: Mapping[str, Any],
    keep: int = 3,
    save_minutes: float = 10.0,
    log_every: int = 50,
    train_only: bool = False,
) -> Trained:
    """Trains what ``cfg`` describes, writes RUN/model.pth, and tests it. A collective.

    Goes on from the training states in RUN/checkpoints, if there are some; :func:`discard_states` deletes them once
    the results are safe. Of ``cfg`` the model, the optimiser with its schedules, the data sets and evaluators and the
    custom hooks are used as mmengine's runner would use them. The run is as long as ``train_cfg`` says, by iterations
    or by epochs, and looks at the test data every ``train_cfg.val_interval`` of them (none or 0: at the end only).
    Order and augmentation, checkpoints and the log are ours: RUN/log.jsonl has a row of the losses every ``log_every``
    iterations and one with ``"event": "test"`` for each look.

    Args:
        cfg: from ``configuration.finish``.
        session: of a run with a device, an output folder and engine settings.
        identity: JSON-like: what else a run that is gone on with must have in common with its beginning.
        keep: training states that stay.
        save_minutes: minutes between two of them.
        log_every: iterations.
        train_only: leave out all tests.

    Raises:
        UserError: images that cannot be read, a loss that is not finite, too little memory, a full disk, a run that
            another process writes or that was begun with other settings, a configuration that cannot be built.
        Interrupted, KeyboardInterrupt: the run was asked to stop, and its state has been saved.
    """
    folder, device, precision = session.output, session.device, _precision(session)
    cfg = copy.deepcopy(cfg)
    _fit_precision(cfg, precision, device)
    whole = {
        **identity,
        "mmengine": identity_of(cfg),
        "precision": precision,
        "seed": session.seed,
        "processes": distributed.world_size(),
    }
    check_same_on_ranks(whole)
    lock = hold(folder)
    try:
        with quietly(folder / LOG), explain_failure(folder / FILE):
            runner = QuietRunner(cfg, folder, device, session.seed, training=True)
            data = TrainingData(
                cfg.train_dataloader,
                session.seed,
                distributed.rank(),
                distributed.world_size(),
                skip=session.data_settings is not None and session.data_settings.bad_images == "skip",
            )
            tests = None if train_only else Evaluation(cfg, session, precision)
            log = TrainingLog(folder)
            loop = TrainLoop(
                runner,
                data,
                plan_of(cfg, len(data), log_every, save_minutes, evaluate=tests is not None),
                device=device,
                states=TrainingCheckpoints(folder / STATES, keep),
                identity=whole,
                log=log,
                look=lambda: scalars(_look(runner, tests)),
                say=_say,
                progress=session.progress,
            )
        if data.batch_size < data.asked_batch_size:
            _say(
                f"notice: {len(data.dataset)} images make batches of {data.batch_size}, not of {data.asked_batch_size}"
            )
        runner._train_loop = loop
        with quietly(folder / LOG), _explain_torch(data.batch_size, precision):
            if tests is not None:
                tests.try_out(plain(runner.model))
            runner.train()
            path, model = folder / MODEL, _settle_on_reported(runner)
            distributed.from_main(lambda: save_model(path, model, cfg, data.dataset.metainfo))
            results = {} if tests is None else tests.of(model)
        rows = read_log(log.path) if distributed.is_main() and log.path.exists() else []
        # A run that was killed after its last look has this row.
        if tests is not None and not any(r["step"] == loop.iter and r.get("event") == "test" for r in rows):
            log.write(loop.iter, {"event": "test", **scalars(results)})
        log.close()
        return Trained(results, model, path, loop.seconds, sum(distributed.gather_objects(loop.replaced)))
    finally:
        lock.release()


def test(cfg: Config, session: Session, state: Path | Mapping[str, Tensor]) -> Tested:
    """Evaluates a trained model on the test data of ``cfg``. A collective.

    Args:
        cfg: from ``configuration.finish``.
        session: as in :func:`train`.
        state: a file such as RUN/model.pth or one of mmdet's or mmsegmentation's, or the weights by name.

    Raises:
        CheckpointError: a file that cannot be read, or weights of another model.
        UserError: as in :func:`train`.
    """
    precision = _precision(session)
    cfg = copy.deepcopy(cfg)
    with quietly(session.output / LOG):
        with explain_failure(session.output / FILE):
            runner = QuietRunner(cfg, session.output, session.device, session.seed, training=False)
            tests = Evaluation(cfg, session, precision)
        model = plain(runner.model)
        if isinstance(state, Path):
            distributed.everywhere(lambda: load_weights(model, state_files.read(state)["state_dict"], str(state)))
        else:
            load_weights(model, state, "the weights given")
        with _explain_torch(tests.data.batch_size, precision):
            results = tests.of(model)
    return Tested(results, model)


def discard_states(session: Session) -> None:
    """Deletes the training states of a run whose results have been written. A collective."""
    distributed.from_main(lambda: shutil.rmtree(session.output / STATES, ignore_errors=True))


def plan_of(cfg: Config, epoch: int, log_every: int, save_minutes: float, *, evaluate: bool) -> Plan:
    """How long the run of a configuration is whose epochs have ``epoch`` iterations.

    Raises:
        ConfigError: neither iterations nor epochs are given.
    """
    wanted = cfg.train_cfg
    by_epoch = wanted.get("max_epochs") is not None
    length = wanted.get("max_epochs") if by_epoch else wanted.get("max_iters")
    if not length or length < 1:
        raise ConfigError(
            "the configuration does not say how long to train",
            where="train_cfg",
            todo="set train_cfg.max_iters or train_cfg.max_epochs to 1 or more",
        )
    unit = epoch if by_epoch else 1
    return Plan(
        steps=int(length) * unit,
        by_epoch=by_epoch,
        eval_every=int(wanted.get("val_interval") or 0) * unit if evaluate else 0,
        accumulate=int(cfg.optim_wrapper.get("accumulative_counts", 1)),
        log_every=log_every,
        save_minutes=save_minutes,
    )


def _look(runner: Any, tests: Evaluation | None) -> dict[str, Any]:
    assert tests is not None
    share_running_averages(runner.model)
    # mmengine's moving average puts itself in the model's place in between.
    runner.call_hook("before_val_epoch")
    results = tests.of(plain(runner.model), bar=False)
    runner.call_hook("after_val_epoch", metrics=scalars(results))
    return results


def _settle_on_reported(runner: Any) -> nn.Module:
    """The model with the weights that a run is to be judged by: its moving average, where mmengine's hook keeps one."""
    model = plain(runner.model)
    share_running_averages(model)
    state: dict[str, Any] = {"state_dict": model.state_dict()}
    runner.call_hook("before_save_checkpoint", checkpoint=state)
    model.load_state_dict(state["state_dict"])
    return model.eval()


def _precision(session: Session) -> str:
    precision = "fp32" if session.engine is None else session.engine.precision
    if in_bf16(precision, session.device) or precision == "fp32":
        return precision
    _say(f"notice: {precision} is slower than fp32 on the {session.device.type.upper()}, which is used instead")
    return "fp32"


def _fit_precision(cfg: Config, precision: str, device: torch.device) -> None:
    """The optimiser's wrapper as the precision wants it."""
    wrapper = cfg.optim_wrapper
    if in_bf16(precision, device):
        # bfloat16 has the range of float32, so losses need no scaling.
        wrapper.update(type="AmpOptimWrapper", dtype="bfloat16", loss_scale={"enabled": False})
    elif wrapper.get("type") == "AmpOptimWrapper":
        for name in ("dtype", "loss_scale", "use_fp64"):
            wrapper.pop(name, None)
        wrapper["type"] = "OptimWrapper"


def _say(text: str) -> None:
    say([text])


@contextmanager
def _explain_torch(batch_size: int, precision: str) -> Iterator[None]:
    """What torch says of too little memory, and of weights that an iteration of data-parallel training left out."""
    try:
        yield
    except RuntimeError as error:
        if "find_unused_parameters" in str(error):
            raise ConfigError(
                "some of the model's weights had no part in an iteration, which processes have to be told beforehand",
                todo="add --set find_unused_parameters=True",
            ) from error
        # The CPU's allocator has no exception of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "not enough memory" not in str(error):
            raise
        raise ConfigError(
            f"memory ran out with batches of {batch_size} in {precision}: {str(error).splitlines()[0]}",
            todo="use less: a smaller --train-batch, --precision bf16 on a GPU, or --checkpoint-blocks; settings that "
            "change the numbers need a run of another --name",
        ) from error
