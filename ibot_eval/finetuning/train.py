"""Fine-tuning, from a checkpoint's weights to a classifier: the whole loop, top to bottom."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor

from ibot_eval import distributed, provenance
from ibot_eval.data.loading import explain_worker_death
from ibot_eval.finetuning.config import FinetuneConfig
from ibot_eval.finetuning.evaluation import Evaluation
from ibot_eval.finetuning.layer_decay import optimiser_groups
from ibot_eval.finetuning.loader import Batch, finish, training_loader
from ibot_eval.finetuning.looking import Images, Look, Looks
from ibot_eval.finetuning.memory import explain_out_of_memory
from ibot_eval.finetuning.mixing import Mixing
from ibot_eval.finetuning.network import Classifier
from ibot_eval.finetuning.parallel import Parallel
from ibot_eval.finetuning.plan import Plan
from ibot_eval.interruption import Interrupted
from ibot_eval.settings import EngineSettings
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.finite import FiniteWatch
from ibot_eval.training.logs import TrainingLog
from ibot_eval.training.progress import Progress
from ibot_eval.training.random_states import random_state, restore_random_state, seed_generators
from ibot_eval.training.resuming import state_to_go_on_from
from ibot_eval.training.stopping import StopRequest
from ibot_eval.training.updates import adamw

FORMAT = 1
"""Of the training states; raised whenever an older one can no longer be read."""


class Outcome(NamedTuple):
    """What a run has come to."""

    tested: Evaluation
    """Of the reported weights, on test."""
    weights: dict[str, Tensor]
    """The reported ones, as ``Classifier.state_dict()`` names them; on rank 0."""
    reported: Look
    """After the epoch that these weights are of."""
    looks: list[Look]
    """All that were taken, in order."""
    seconds: float
    """Spent in the loop, over all resumptions."""
    replaced: int
    """Times that a train image could not be decoded and another took its place."""


def train(
    classifier: Classifier,
    images: Images,
    config: FinetuneConfig,
    plan: Plan,
    mixing: Mixing,
    engine: EngineSettings,
    device: torch.device,
    folder: Path,
    *,
    states: TrainingCheckpoints,
    identity: Mapping[str, Any],
    progress: bool = True,
    say: Callable[[str], None],
) -> Outcome:
    """Trains ``classifier`` end to end, going on from the newest training state if there is one. Every rank calls it.

    A run that is broken off anywhere and gone on with has the weights, to the last bit, that it would have had.

    Args:
        classifier: on ``device``, or on the CPU where it is to be shared out; is changed.
        images: what to train and look at.
        config: checked already.
        plan: made from it for these images and processes.
        mixing: of a batch, with the loss.
        engine: precision, seed, and images per forward pass of evaluations.
        device: of this process.
        folder: of the run; log.jsonl goes there.
        states: where training states are kept.
        identity: JSON-like: what a run that is gone on with must have in common with its beginning.
        progress: whether rank 0 shows a bar.
        say: tells the user something, once for all ranks.

    Raises:
        UserError: images that cannot be read, a loss that is not finite, too little memory, a full disk, a state of
            another run. The newest training state is then still there.
        Interrupted, KeyboardInterrupt: the run was asked to stop, and its state has been saved.
    """
    rank, world, seed, passes = distributed.rank(), distributed.world_size(), engine.seed, plan.passes
    precision = engine.precision

    # What a step does: rates by schedule and layer, AdamW, perhaps a moving average that is then what counts.
    classifier.backbone.checkpoint_blocks = config.checkpoint_blocks
    # By parameters: a backbone's last norm has two names, under which a state dict would have it averaged twice.
    average = ModelEmaV3(classifier, config.ema, exclude_buffers=True) if config.ema else None
    judged = classifier if average is None else average.module
    network = Parallel(classifier, device, sharded=config.fsdp)
    optimiser = adamw(optimiser_groups(classifier, config.layer_decay, config.weight_decay))
    targets_of = _positions(images.classes)

    # Where the run stands: at its start, or where its newest state left it.
    log = TrainingLog(folder, tensorboard=config.tensorboard)
    looks = Looks(images, device, precision, engine.batch_size)
    first, seconds_before, generators, replaced = 0, 0.0, None, 0
    seed_generators(seed + rank)  # drop path differs between ranks
    found = state_to_go_on_from(states, FORMAT, identity, _may_differ)
    if found is not None:
        first, state = found
        network.load_weights(state["weights"])
        network.load_optimiser(optimiser, state["optimiser"])
        if average is not None:
            average.module.load_state_dict(state["average"])
        looks.load_state_dict(state["looks"])
        generators, replaced, seconds_before = state["random"][rank], state["replaced"][rank], state["seconds"]
        del found, state  # three or four times the size of all weights
        say(f"resumed after step {first} of {plan.steps}")
    log.truncate(first)

    def weights() -> Mapping[str, Tensor]:
        return network.weights() if average is None else average.module.state_dict()

    def save(step: int) -> None:
        watch.settle()
        state = {
            "format": FORMAT,
            "step": step,
            "identity": dict(identity),
            "weights": network.weights(),
            "optimiser": network.optimiser_state(optimiser),
            "average": None if average is None else average.module.state_dict(),
            "looks": looks.state_dict(),
            "random": distributed.gather_objects(random_state(device)),
            "replaced": distributed.gather_objects(replaced),
            "seconds": seconds_before + time.perf_counter() - begin,
        }
        states.save(step, state)

    # One loader for the rest of the run; its batches depend on (seed, epoch, image) alone.
    loader = training_loader(
        images.train,
        images.augmentation,
        batch_size=plan.batch_size,
        accumulate=passes,
        repeats=config.repeats,
        seed=seed,
        epochs=config.epochs,
        start_step=first * passes,
        rank=rank,
        world_size=world,
        workers=images.workers,
        bad_images=images.bad_images,
        pin_memory=device.type == "cuda",
    )
    if config.compile:
        classifier.compile()
    watch = FiniteWatch(device, todo="use a smaller --lr, or --precision fp32 if this was half precision")
    bar = Progress(
        plan.steps * passes,
        plan.images_per_step // passes,
        done=first * passes,
        shown=progress and distributed.is_main(),
    )
    classifier.train()
    begin = saved = time.perf_counter()
    if generators is not None:
        restore_random_state(generators, device)

    stop, stopping, step = StopRequest(), False, first
    with (
        explain_worker_death(),
        explain_out_of_memory(plan.batch_size, passes, precision, config.checkpoint_blocks),
        closing(loader),
        closing(bar.over(loader)) as batches,
        stop,
    ):
        while step < plan.steps and not stopping:
            epoch, rate = step // plan.steps_per_epoch, float(plan.lr[step])
            for group in optimiser.param_groups:
                group["lr"] = rate * group["lr_scale"]

            # Gradients of the mean loss over all accumulated passes; ranks exchange them in the last.
            loss = torch.zeros((), device=device)
            for part in range(passes):
                batch: Batch = distributed.everywhere(lambda: next(batches))
                replaced += batch.replaced
                targets = targets_of[batch.labels].to(device, non_blocking=True)
                pixels = finish(batch.to(device, non_blocking=True), images.augmentation)
                pixels, targets = mixing(pixels, targets, seed=seed, step=step * passes + part, rank=rank)
                network.exchange(part == passes - 1)
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                    part_loss = mixing.loss(network(pixels), targets) / passes
                part_loss.backward()
                loss += part_loss.detach()
            norm = network.clip_(config.clip_grad)
            watch.check(step + 1, [("the loss", loss.isfinite()), ("the norm of the gradients", norm.isfinite())])
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            if average is not None:
                average.update(classifier)
            step += 1

            if step % config.log_every == 0 or step == plan.steps:
                row = {
                    "epoch": epoch,
                    "loss": loss.item(),
                    "lr": rate,
                    "gradient_norm": norm.item(),
                    "images_per_second": bar.images_per_second,
                    "data_wait": bar.data_wait,
                    "peak_memory_gb": provenance.peak_memory(device),
                }
                log.write(step, row)
                bar.show(epoch=f"{epoch + 1}/{plan.epochs}", loss=f"{row['loss']:.3f}")

            ended, rest = divmod(step, plan.steps_per_epoch)
            if rest == 0 and (ended % config.eval_every == 0 or step == plan.steps):
                watch.settle()
                with network.whole():
                    values = looks.take(judged, ended, weights)
                log.write(step, {"event": "epoch", "epoch": ended, **values})
                bar.show(top1=f"{values['test_top1']:.1f}")
                bar.leave_out()
            stopping = stop.agreed()
            # Clocks differ, and all ranks save together.
            due = distributed.broadcast_object(time.perf_counter() - saved >= 60 * config.save_minutes)
            if due or stopping or step == plan.steps:
                save(step)
                saved = time.perf_counter()
                bar.leave_out()
    log.close()
    seconds = seconds_before + time.perf_counter() - begin
    if step < plan.steps:
        said = f"stopped after step {step} of {plan.steps}; the same command goes on from there"
        raise KeyboardInterrupt(said) if stop.received == signal.SIGINT else Interrupted(said)

    if looks.best_weights is not None:
        network.load_weights(looks.best_weights)
    elif average is not None:
        network.load_weights(average.module.state_dict())
    with network.whole():
        tested = looks.at(classifier, images.test)
    return Outcome(
        tested=tested,
        weights=network.weights(),
        reported=looks.reported,
        looks=looks.all,
        seconds=seconds,
        replaced=sum(distributed.gather_objects(replaced)),
    )


def _may_differ(state: Mapping[str, Any]) -> set[str]:
    """What the steps of a training state have not depended on, so that a run may go on with another."""
    # A run that stopped at a broken image would else have to be begun anew, although all before was sound. How it
    # treats such images mattered to no image that could be decoded, and test images are only looked at.
    return {"bad_images"} if state["looks"]["all"] else {"bad_images", "images.test"}


def _positions(classes: np.ndarray) -> Tensor:
    """(largest label + 1,) int64 on the CPU: the place of each label among ``classes``."""
    positions = torch.full((int(classes[-1]) + 1,), -1)
    positions[torch.from_numpy(classes)] = torch.arange(len(classes))
    return positions
