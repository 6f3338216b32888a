"""iBOT pre-training, from random weights to a teacher: the whole loop, top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ibot_eval import distributed, provenance
from ibot_eval.data.loading import explain_worker_death
from ibot_eval.data.splits import Data, hash_lines
from ibot_eval.errors import CheckpointError
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.finite import FiniteWatch
from ibot_eval.training.logs import TrainingLog
from ibot_eval.training.parameter_groups import parameter_groups
from ibot_eval.training.progress import Progress
from ibot_eval.training.random_states import random_state, restore_random_state, seed_generators
from ibot_eval.training.resuming import compare_settings
from ibot_eval.training.stopping import StopRequest
from ibot_eval.training.updates import adamw, clip_each_, ema_, set_rates
from pretrain import setup
from pretrain.collapse import CollapseAlarm
from pretrain.config import MAY_CHANGE, PretrainSettings
from pretrain.ibot import IBOT, StepResult
from pretrain.loader import CropBatch, crop_loader, steps_per_epoch
from pretrain.measures import EpochPredictions, finite_flags, measures
from pretrain.networks import Network, build, freeze_unused, mask_cell
from pretrain.probe import logged_knn
from pretrain.saving import export_networks
from pretrain.schedule import schedule
from pretrain.throughput import effective_epochs
from pretrain.utilisation import Utilisation
from pretrain.views import mask_fraction, next_batch, views_of

CHECKPOINTS = "checkpoints"
REPLACED = "times an image could not be decoded and another took its place"
FORMAT = 1
"""Of the training states; raised whenever an older one can no longer be read."""


class Outcome(NamedTuple):
    """How a run ended."""

    steps: int
    """Steps done, those before a resumption included."""
    finished: bool
    """Whether these are all of the run's."""
    seconds: float
    """Spent in the loop, over all resumptions."""
    last: dict[str, Any]
    """Last value of everything that was logged."""
    signal: int | None
    """Number of the signal that ended it before its end."""


def train(
    settings: PretrainSettings,
    data: Data,
    folder: Path,
    device: torch.device,
    *,
    resume: bool,
    say: Callable[..., None],
    evaluate: Callable[[Network], dict[str, float]] | None = None,
    ready: Callable[[dict[str, Any]], None] = lambda effective: None,
) -> Outcome:
    """Pre-trains on ``data.splits["train"]`` and writes everything into ``folder``. Every rank calls it.

    Args:
        settings: checked already.
        data: labels are only watched.
        folder: of the run; checkpoints, log.jsonl, teacher.safetensors and student.safetensors go there.
        device: of this process.
        resume: whether to go on from the newest checkpoint in ``folder``.
        say: tells the user something, once; with ``warning=True`` what the record is to keep.
        evaluate: k-NN of the teacher, called every ``--knn-every`` epochs.
        ready: told what the settings come to, once all is set up and read, just before the first step.

    Raises:
        UserError: settings that do not fit the data or the run that is resumed, a loss that is not finite, a disk that
            is full. The newest checkpoint is then still there.
    """
    split, opt, output = data.splits["train"], settings.optimiser, settings.output
    rank, world = distributed.rank(), distributed.world_size()

    # Networks: a student that learns, and a teacher that is its moving average.
    frozen = setup.tokenizer_of(settings, device)
    student, teacher = build(settings, None if frozen is None else frozen.num_words)
    freeze_unused(student, settings)
    student, teacher = student.to(device), teacher.to(device).eval()
    tokenizer = setup.check_cells(frozen, student) or setup.online_tokenizer(settings, teacher)
    precision = setup.precision_of(settings, device)
    if precision == "bf16":
        torch.set_float32_matmul_precision("high")  # of the last layer, the one product that stays in float32
    student.backbone.checkpoint_blocks = settings.engine.checkpoint_blocks

    # What a step does: rates by schedule, gradients clipped one by one, AdamW, moving average of shared names.
    images_per_step = opt.batch_size * opt.accumulate * world
    plan = schedule(settings, steps_per_epoch(len(split), opt.batch_size * opt.accumulate, world), images_per_step)
    optimiser = adamw(parameter_groups(student))
    trained = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    gradients = [f"the gradient of {name}" for name, _ in trained]
    prototypes = [p for name, p in trained if "last_layer" in name]
    averages = dict(teacher.named_parameters())
    pairs = [(averages[name], p) for name, p in student.named_parameters() if name in averages]
    ibot = IBOT(student, teacher, tokenizer, settings.objective, device)

    # Where the run stands: at its start, or where its newest checkpoint left it.
    checkpoints = TrainingCheckpoints(folder / CHECKPOINTS, output.keep)
    log = TrainingLog(folder, tensorboard=output.tensorboard)
    predictions = EpochPredictions()
    data_id = {"images": len(split), "names": hash_lines("names", split.image_ids)}
    first, seconds_before, last, generators, replaced = 0, 0.0, {}, None, 0
    seed_generators(settings.engine.seed + rank)  # drop path differs between ranks
    found = checkpoints.latest() if resume else None
    if found is not None:
        first, state = found
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"the training state has format {state.get('format')}, and this version of ibot-eval reads {FORMAT}",
                where=str(checkpoints.path(first)),
                todo="go on with the version that wrote it, or start a new run",
            )
        compare_settings(state["settings"], settings.flat() | {"processes": world}, MAY_CHANGE)
        compare_settings(state["data"], data_id)
        student.load_state_dict(state["student"])
        teacher.load_state_dict(state["teacher"])
        ibot.centres.load_state_dict(state["centres"])
        optimiser.load_state_dict(state["optimiser"])
        predictions.restore(state["predictions"][rank])
        generators, seconds_before, last = state["random"][rank], state["seconds"], state["last"]
        replaced = state["replaced"][rank]
        del found, state  # twice the size of all weights
        say(f"resumed after step {first} of {plan.steps}")
    log.truncate(first)
    # The checkpoint of an epoch comes before its k-NN, which only the log can know.
    known = distributed.from_main(lambda: logged_knn(log.path)) if first else {}
    for values in known.values():
        last |= values
    for notice in plan.notices if first == 0 else ():
        say(notice)
    if first == 0 and (left := len(split) - plan.steps_per_epoch * images_per_step):
        say(f"{left:,} of {len(split):,} images, others each time, sit every epoch out: they do not fill a batch")

    def save(step: int) -> None:
        watch.settle()
        state = {
            "format": FORMAT,
            "step": step,
            "settings": settings.flat() | {"processes": world},
            "data": data_id,
            "student": student.state_dict(),
            "teacher": teacher.state_dict(),
            "centres": ibot.centres.state_dict(),
            "optimiser": optimiser.state_dict(),
            "random": distributed.gather_objects(random_state(device)),
            "predictions": distributed.gather_objects(predictions.state()),
            "replaced": distributed.gather_objects(replaced),
            "seconds": seconds_before + time.perf_counter() - begin,
            "last": last,
        }
        checkpoints.save(step, state)
        distributed.from_main(lambda: export_networks(folder, student, teacher, settings, step))

    def probe(step: int) -> None:
        assert evaluate is not None
        values = evaluate(teacher)
        student.train()
        last.update(values)
        log.write(step, {"event": "knn", "epoch": step // plan.steps_per_epoch, **values})

    def probed_at(step: int) -> bool:
        ended, rest = divmod(step, plan.steps_per_epoch)
        return evaluate is not None and rest == 0 and (ended % output.knn_every == 0 or step == plan.steps)

    # One loader for the rest of the run; its batches depend on (seed, epoch, image, crop) alone.
    augmentation = setup.augmentation_of(settings)
    loader = crop_loader(
        split,
        augmentation,
        setup.masking_of(settings),
        mask_crops=settings.masks.mask_crops,
        mask_cell=mask_cell(student.backbone),
        batch_size=opt.batch_size,
        accumulate=opt.accumulate,
        seed=settings.engine.seed,
        epochs=opt.epochs,
        start_step=first * opt.accumulate,
        rank=rank,
        world_size=world,
        workers=setup.workers_of(settings, device),
        bad_images=settings.data.bad_images,
        pin_memory=device.type == "cuda",
    )
    use = Utilisation(ibot, settings, device, precision)
    if settings.engine.compile:
        student.trunk.compile()
        teacher.trunk.compile()
    wrapped = student
    if world > 1:
        wrapped = DistributedDataParallel(student, gradient_as_bucket_view=True)
        ibot.student = wrapped
    alarm = CollapseAlarm(
        cls_prototypes=settings.head.prototypes if settings.objective.cls_weight > 0 else None,
        patch_prototypes=None if tokenizer is None else tokenizer.num_words,
        warmup_end=plan.lr_warmup * plan.steps_per_epoch,
        steps=plan.steps,
        hard_patch_targets=settings.objective.targets == "hardmax",
    )
    watch = FiniteWatch(device)
    end = plan.steps if output.stop_after is None else min(plan.steps, output.stop_after * plan.steps_per_epoch)
    passes = opt.accumulate
    progress = Progress(end * passes, images_per_step // passes, done=first * passes)
    ready({"lr": opt.lr * images_per_step / 256, "images_per_step": images_per_step, "steps": plan.steps})
    begin = time.perf_counter()
    student.train()
    stopping = False
    if generators is not None:
        restore_random_state(generators, device)
    if first >= end:
        # The end was reached before; the networks' files may not have been.
        distributed.from_main(lambda: export_networks(folder, student, teacher, settings, first))
    if first and probed_at(first) and first not in known:
        probe(first)  # the run ended before it could be done

    with explain_worker_death(), closing(loader), closing(progress.over(loader)) as batches, StopRequest() as stop:
        step = first
        while step < end:
            epoch = step // plan.steps_per_epoch
            set_rates(optimiser, float(plan.lr[step]), float(plan.weight_decay[step]))
            temperatures = plan.temperatures(step)

            # Gradients of the mean loss over all accumulated passes; ranks exchange them in the last.
            means: list[tuple[Tensor, Tensor | None]] = []
            for part in range(passes):
                batch: CropBatch = next_batch(batches, folder)
                replaced += batch.replaced
                views = views_of(batch, augmentation, device)
                exchange = part == passes - 1
                if isinstance(wrapped, DistributedDataParallel):
                    wrapped.require_backward_grad_sync = exchange
                with setup.autocast_of(precision, device):
                    result: StepResult = ibot.losses(views, temperatures)
                (result.loss / passes).backward()
                means.append((result.cls_mean, result.patch_mean))
                predictions.add(result, batch.labels)
            norms = clip_each_([p for _, p in trained], opt.clip)
            watch.check(step + 1, [*finite_flags(result, views.globals), (gradients, torch.isfinite(norms))])
            if epoch < opt.freeze_last_layer:
                for parameter in prototypes:
                    parameter.grad = None
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            ema_([t for t, _ in pairs], [s for _, s in pairs], float(plan.momentum[step]))
            ibot.update_centres(*_mean(means))
            step += 1

            if step % output.log_every == 0 or step == end:
                row = measures(result, norms, settings.objective.student_temp) | {
                    "epoch": epoch,
                    "lr": float(plan.lr[step - 1]),
                    "weight_decay": float(plan.weight_decay[step - 1]),
                    "momentum": float(plan.momentum[step - 1]),
                    "teacher_temp": temperatures.cls,
                    "patch_teacher_temp": temperatures.patch,
                    "mask_fraction": mask_fraction(batch),
                    "images_per_second": progress.images_per_second,
                    "data_wait": progress.data_wait,
                    "mfu": use.percent(progress.images_per_second / world),
                    "peak_memory_gb": provenance.peak_memory(device),
                    "effective_epochs": effective_epochs(step / plan.steps_per_epoch, settings.crops),
                }
                last |= row
                log.write(step, row)
                progress.show(epoch=f"{epoch + 1}/{plan.epochs}", loss=f"{row['loss']:.3f}")
                for diagnosis in alarm.check({"step": step, **row}):
                    say(f"alarm: {diagnosis}", warning=True)
                    log.write(step, {"event": "alarm", "text": diagnosis})

            stopping = stop.agreed()
            ended, rest = divmod(step, plan.steps_per_epoch)
            due = output.save_steps > 0 and step % output.save_steps == 0
            if rest == 0:
                watch.settle()
                figures = predictions.finish()
                last |= figures
                log.write(step, {"event": "epoch", "epoch": ended, **figures})
                due = due or probed_at(step) or ended % output.save_every == 0
            if due or stopping or step == end:
                save(step)
                progress.leave_out()
            if probed_at(step) and not stopping:
                # After the checkpoint, which an image that cannot be read must not cost.
                probe(step)
            del result, views, batch  # or they would add to the next step's peak of memory
            if stopping:
                break
    log.close()
    if total := sum(distributed.gather_objects(replaced)):
        say(f"{total:,} {REPLACED} (--bad-images skip)", warning=True)
    seconds = seconds_before + time.perf_counter() - begin
    return Outcome(step, step == plan.steps, seconds, last, stop.received if stopping and step < end else None)


def _mean(means: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Means over the accumulated passes, which have equally many images."""
    cls = torch.stack([mean for mean, _ in means]).mean(0)
    patches = [mean for _, mean in means if mean is not None]
    return cls, torch.stack(patches).mean(0) if patches else None
