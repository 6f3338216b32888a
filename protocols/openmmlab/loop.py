"""The training loop for models of mmdet and mmsegmentation, top to bottom."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mmengine.runner import BaseLoop

from ibot_eval import distributed, provenance
from ibot_eval.data.loading import explain_worker_death
from ibot_eval.interruption import Interrupted
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.finite import FiniteWatch
from ibot_eval.training.logs import TrainingLog
from ibot_eval.training.progress import Progress
from ibot_eval.training.resuming import state_to_go_on_from
from ibot_eval.training.stopping import StopRequest
from protocols.openmmlab.parallel import plain
from protocols.openmmlab.seeded_data import TrainingData

FORMAT = 1
"""Of the training states; raised whenever an older one can no longer be read."""
_ITERATION = 100
"""First number of the iterations' seeds, which keeps them apart from those of the data."""


@dataclass(frozen=True)
class Plan:
    """How long a run is and what is done how often, in iterations."""

    steps: int
    by_epoch: bool
    """Whether hooks and schedulers are told of epochs, or take the whole run for one."""
    eval_every: int
    """0 for never."""
    accumulate: int
    """Iterations whose gradients make one step of the optimiser; states are saved between such steps only."""
    log_every: int
    save_minutes: float


class TrainLoop(BaseLoop):
    """Trains a runner's model, going on from the newest training state if there is one.

    A run that is broken off anywhere and gone on with has the weights, to the last bit, that it would have had: an
    iteration's batch and all that it draws depend on (seed, iteration, rank) alone. mmengine's hooks are called as its
    own loops call them.

    Args:
        runner: of mmengine.
        data: what is trained on.
        plan: how long and how often.
        device: of this process.
        states: where training states are kept.
        identity: JSON-like: what a run that is gone on with must have in common with its beginning.
        log: of the run.
        look: evaluates the model as it is; what it returns goes into the log.
        say: tells the user something, once for all ranks.
        progress: whether rank 0 shows a bar.
    """

    def __init__(
        self,
        runner: Any,
        data: TrainingData,
        plan: Plan,
        *,
        device: torch.device,
        states: TrainingCheckpoints,
        identity: Mapping[str, Any],
        log: TrainingLog,
        look: Callable[[], Mapping[str, float]],
        say: Callable[[str], None],
        progress: bool,
    ) -> None:
        super().__init__(runner, data)  # type: ignore[arg-type]
        self.data, self.plan, self.device, self.states, self.log = data, plan, device, states, log
        self.identity, self.look, self.say, self.progress = dict(identity), look, say, progress
        self.iter = self.replaced = 0
        self.epoch = 0
        """From 0; stays at 0 where hooks are not told of epochs."""
        self.seconds = 0.0
        """Of training, over all resumptions."""

    @property
    def max_iters(self) -> int:
        """Iterations of the whole run."""
        return self.plan.steps

    @property
    def max_epochs(self) -> int:
        """Epochs of the whole run, or 1, as in mmengine's loop over iterations."""
        return -(-self.plan.steps // len(self.data)) if self.plan.by_epoch else 1

    def restore(self) -> None:
        """Puts model, optimiser and schedules where the newest training state left them. A collective.

        Raises:
            CheckpointError, ConfigError: a state that cannot be read, or one of another run.
        """
        found = state_to_go_on_from(self.states, FORMAT, self.identity)
        if found is not None:
            self.iter, state = found
            runner = self.runner
            # mmengine's moving average keeps its weights there, and asks this attribute.
            runner._resume = True
            runner.call_hook("after_load_checkpoint", checkpoint=state)
            plain(runner.model).load_state_dict(state["state_dict"])
            runner.optim_wrapper.load_state_dict(state["optimizer"])
            for scheduler, saved in zip(runner.param_schedulers or (), state["param_schedulers"], strict=True):
                scheduler.load_state_dict(saved)
            self.replaced, self.seconds = state["replaced"][distributed.rank()], state["seconds"]
            self.say(f"resumed after iteration {self.iter} of {self.plan.steps}")
        self.log.truncate(self.iter)

    def run(self) -> Any:
        """Raises:
        UserError: images that cannot be read, a loss that is not finite, a full disk.
        Interrupted, KeyboardInterrupt: the run was asked to stop, and its state has been saved.
        """
        runner, data, plan, rank = self.runner, self.data, self.plan, distributed.rank()
        batches = data.batches(self.iter, plan.steps)
        watch = FiniteWatch(self.device, todo="use a smaller --lr, or --precision fp32 if this was bf16")
        bar = Progress(
            plan.steps,
            data.images_per_step,
            done=self.iter,
            shown=self.progress and distributed.is_main(),
        )
        begin = saved = time.perf_counter()
        stop, stopping = StopRequest(), False
        runner.call_hook("before_train")
        with explain_worker_death(), closing(batches), closing(bar.over(batches)) as stream, stop:
            self._begin_epoch()
            runner.model.train()
            while self.iter < plan.steps and not stopping:
                batch, replaced = distributed.everywhere(lambda: next(stream))
                self.replaced += replaced
                place = self.iter % len(data) if plan.by_epoch else self.iter

                # Drop path, sampled regions and whatever else a model draws.
                _draw_from(self.device, _ITERATION, data.seed, self.iter, rank)
                runner.call_hook("before_train_iter", batch_idx=place, data_batch=batch)
                rate = _rate(runner.optim_wrapper)
                losses: dict[str, Any] = runner.model.train_step(batch, optim_wrapper=runner.optim_wrapper)
                runner.call_hook("after_train_iter", batch_idx=place, data_batch=batch, outputs=losses)
                self.iter += 1
                # A rank that went on alone would wait for the other at the next exchange of gradients.
                flag = torch.as_tensor(losses["loss"]).isfinite()
                distributed.everywhere(partial(watch.check, self.iter, [("the loss", flag)]))

                if self.iter % plan.log_every == 0 or self.iter == plan.steps:
                    row = {
                        "epoch": (self.iter - 1) // len(data),
                        **{name: _number(value) for name, value in losses.items()},
                        "lr": rate,
                        **_gradient_norm(runner),
                        "images_per_second": bar.images_per_second,
                        "data_wait": bar.data_wait,
                        "peak_memory_gb": provenance.peak_memory(self.device),
                    }
                    self.log.write(self.iter, row)
                    bar.show(iteration=self.iter, loss=f"{row['loss']:.3f}")

                if plan.by_epoch and (self.iter % len(data) == 0 or self.iter == plan.steps):
                    runner.call_hook("after_train_epoch")
                    if self.iter < plan.steps:
                        self._begin_epoch()

                # After the last iteration the state is saved first: the look at the end may be repeated.
                if plan.eval_every and self.iter % plan.eval_every == 0 and self.iter < plan.steps:
                    distributed.everywhere(watch.settle)
                    self._take_a_look(bar)
                whole = self.iter % plan.accumulate == 0 or self.iter == plan.steps
                stopping = whole and stop.agreed()
                # Clocks differ, and all ranks save together.
                due = whole and distributed.broadcast_object(time.perf_counter() - saved >= 60 * plan.save_minutes)
                if due or stopping or self.iter == plan.steps:
                    distributed.everywhere(watch.settle)
                    self._save(self.seconds + time.perf_counter() - begin)
                    saved = time.perf_counter()
                    bar.leave_out()
        self.seconds += time.perf_counter() - begin
        self.log.close()
        if self.iter < plan.steps:
            said = f"stopped after iteration {self.iter} of {plan.steps}; the same command goes on from there"
            raise KeyboardInterrupt(said) if stop.received == signal.SIGINT else Interrupted(said)
        if not plan.by_epoch:
            runner.call_hook("after_train_epoch")
        runner.call_hook("after_train")
        return runner.model

    def _begin_epoch(self) -> None:
        self.epoch = self.iter // len(self.data) if self.plan.by_epoch else 0
        self.runner.call_hook("before_train_epoch")

    def _take_a_look(self, bar: Progress) -> None:
        values = self.look()
        self.log.write(self.iter, {"event": "test", **values})
        bar.leave_out()
        self.runner.model.train()

    def _save(self, seconds: float) -> None:
        runner = self.runner
        state: dict[str, Any] = {
            "format": FORMAT,
            "step": self.iter,
            "identity": self.identity,
            # The names that mmengine's hooks know.
            "state_dict": plain(runner.model).state_dict(),
            "optimizer": runner.optim_wrapper.state_dict(),
            "param_schedulers": [scheduler.state_dict() for scheduler in runner.param_schedulers or ()],
            "replaced": distributed.gather_objects(self.replaced),
            "seconds": seconds,
        }
        runner.call_hook("before_save_checkpoint", checkpoint=state)
        self.states.save(self.iter, state)


def _draw_from(device: torch.device, *numbers: int) -> None:
    """Starts all generators that a model on ``device`` draws from, anew; ``numbers`` are at least 0."""
    words = [int(word) for word in np.random.SeedSequence(numbers).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    # torch.manual_seed sees to every kind of device, which takes milliseconds where there is none of them.
    torch.default_generator.manual_seed(words[2])
    if device.type == "cuda":
        torch.cuda.manual_seed(words[2])
    elif device.type == "mps":
        torch.mps.manual_seed(words[2])


def _rate(optim_wrapper: Any) -> float:
    """The learning rate that the schedule gives to layers which have it undiminished."""
    rates = optim_wrapper.get_lr()
    return float(rates["base_lr"][0] if "base_lr" in rates else max(rates["lr"]))


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def _gradient_norm(runner: Any) -> dict[str, float]:
    """Before clipping; nothing where gradients are not clipped, since it is not computed then."""
    scalars: Mapping[str, Any] = runner.message_hub.log_scalars
    return {"gradient_norm": scalars["train/grad_norm"].current()} if "train/grad_norm" in scalars else {}
