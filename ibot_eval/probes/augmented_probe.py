"""A linear classifier trained on random crops: every epoch takes the train images through the frozen network anew.

Which heads are trained, what they are chosen on and what is reported is as in :mod:`ibot_eval.probes.linear_probe`;
only the features of train differ from epoch to epoch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import functional as F

from ibot_eval import distributed
from ibot_eval.data.random_crops import RandomCrops
from ibot_eval.data.splits import ImageSplit, few
from ibot_eval.errors import DataError
from ibot_eval.probes.frozen_network import FrozenNetwork
from ibot_eval.probes.holdout import hold_out
from ibot_eval.probes.labelled import Labelled, require_labels
from ibot_eval.probes.linear_probe import ProbeResult, ProbeSettings, reported
from ibot_eval.probes.selection import Selection
from ibot_eval.probes.sweep import Sweep
from ibot_eval.training.checkpoints import TrainingCheckpoints
from ibot_eval.training.resuming import check_same_on_ranks, state_to_go_on_from
from ibot_eval.training.schedules import cosine

FORMAT = 1
"""Of the training states; raised whenever an older one can no longer be read."""


def train_augmented_probe(
    network: FrozenNetwork,
    train: ImageSplit,
    test: ImageSplit,
    settings: ProbeSettings,
    *,
    seed: int,
    states: TrainingCheckpoints,
    identity: Mapping[str, Any],
    save_minutes: float,
) -> tuple[ProbeResult, Labelled]:
    """Trains the heads of ``settings`` on random crops, going on from the newest training state if there is one.

    Held-out and test images go through the evaluation transform, once. With several processes each forwards its share
    of every batch and trains its share of the heads; a collective call then. A run that is broken off anywhere and
    gone on with gives the numbers, to the last bit, that it would have given undisturbed.

    Args:
        network: of the features; in evaluation mode.
        train, test: images with labels; classes that train lacks count as wrong.
        seed: of the held-out part, the initial weights, the order of images and the crops.
        states: where training states are kept; the last one is left there.
        identity: JSON-like: what a run that is gone on with must have in common with its beginning.
        save_minutes: minutes of training between two states; 0 saves after every step.

    Returns:
        the result, and the test images that it is about.

    Raises:
        DataError: an image without a label or, with bad_images "stop", one that cannot be decoded; features that are
            not finite. Wrap the call in :func:`ibot_eval.data.loading.explain_worker_death`.
        ConfigError: a state of a run with another identity, or ranks of different ones.
        CheckpointError: a state that cannot be read or written.
    """
    device, size = network.device, network.transform.crop
    check_same_on_ranks(identity)
    for role, split in (("train", train), ("test", test)):
        require_labels(split.labels, split.image_ids, role, "linear probing")
    # What stopped at a broken image of train may go on without it: it mattered to none that could be decoded.
    found = state_to_go_on_from(states, FORMAT, identity, lambda state: {"bad_images"})

    held, classes = hold_out(train.labels, settings.hold_out, seed), np.unique(train.labels)
    on_test = network.labelled(test, np.arange(len(test)), "test")
    on_held = network.labelled(train, np.flatnonzero(held), "held-out part of the train") if held.any() else None
    batch = settings.effective_batch(len(train))
    selection = Selection(settings.heads(batch), len(on_held or ()), len(on_test))
    heads = [selection.grid[i] for i in selection.own]
    sweep = Sweep(network.width, len(classes), heads, groups=selection.groups, seed=seed, device=device)
    # Targets of all images, and which group of heads learns from them.
    targets = torch.from_numpy(np.searchsorted(classes, train.labels)).to(device)
    counts = torch.from_numpy(np.stack([~held, np.ones_like(held)])[-selection.groups :]).to(device)

    steps = -(-len(train) // batch)
    total = settings.epochs * steps
    scales = cosine(1, 0, total)
    first, unreadable = 0, set[int]()
    if found is not None:
        first, state = found
        own = state["ranks"][distributed.rank()]
        sweep.load_state_dict(own["sweep"])
        selection.load_state_dict(own["selection"])
        unreadable |= set(state["unreadable"])
        del found, state, own
        if distributed.is_main():
            print(f"resumed after step {first} of {total}", file=sys.stderr)

    def look(epoch: int) -> None:
        if selection.own:
            held_out = None
            if on_held is not None:
                held_out = sweep.evaluate(on_held.features, torch.from_numpy(on_held.targets(classes)), 0)
            group = selection.groups - 1
            scores = sweep.evaluate(on_test.features, torch.from_numpy(on_test.targets(classes)), group)
            selection.watch(sweep, epoch, held_out, scores, last=epoch == settings.epochs)

    def save(step: int) -> None:
        own = {"sweep": _on_cpu(sweep.state_dict()), "selection": selection.state_dict()}
        ranks = distributed.gather_objects(own)
        states.save(
            step,
            {"format": FORMAT, "identity": dict(identity), "ranks": ranks, "unreadable": sorted(unreadable)},
        )

    step, saved = first, time.monotonic()
    done = round(first / steps * len(train))
    with network.bar("training", settings.epochs * len(train), done) as bar:
        for epoch in range(first // steps + 1, settings.epochs + 1):
            order = np.random.default_rng([seed, epoch]).permutation(len(train))
            rest = np.array_split(order, steps)[step - (epoch - 1) * steps :]
            crops = RandomCrops(train, size, seed, epoch)
            with closing(network.loader(crops, F.pil_to_tensor, rest)) as loader:
                for rows in rest:
                    features, usable = network.features(loader, rows, device, bar)
                    _check_finite(features, rows, train)
                    unreadable.update(rows[~usable.cpu().numpy()].tolist())
                    index = torch.from_numpy(rows).to(device)
                    weights = (counts[:, index] & usable).float()
                    sweep.step(features, targets[index], weights, float(scales[step]))
                    step += 1
                    if step % steps == 0 and (epoch % settings.eval_every == 0 or step == total):
                        look(epoch)
                    waited = time.monotonic() - saved >= 60 * save_minutes
                    # Clocks differ, and all ranks save together.
                    if step == total or distributed.broadcast_object(waited):
                        save(step)
                        saved = time.monotonic()
                    bar.set_postfix(epoch=f"{epoch}/{settings.epochs}", refresh=False)

    result = reported(selection, on_test, classes, settings, batch, device)
    read = set(on_test.image_ids)
    # Every rank knows the same, since features() gathers which images can be decoded.
    result.warnings += _left_out("train", [train.image_ids[i] for i in sorted(unreadable)])
    result.warnings += _left_out("test", [name for name in test.image_ids if name not in read])
    return result, on_test


def _check_finite(features: Tensor, rows: np.ndarray, split: ImageSplit) -> None:
    bad = ~torch.isfinite(features).all(dim=1)
    if bad.any():
        names = [split.image_ids[int(i)] for i in rows[bad.cpu().numpy()]]
        raise DataError(
            f"the features of a crop of {few(names)} (train split) are NaN or infinite",
            todo="look at the checkpoint with `ibot-eval inspect`, or use --precision fp32",
        )


def _left_out(role: str, ids: list[str]) -> list[str]:
    return [f"unreadable images of {role}, left out: {len(ids)} ({few(ids)})"] if ids else []


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
