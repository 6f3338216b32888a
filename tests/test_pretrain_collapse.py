"""pretrain.collapse: which runs raise an alarm, when, how often, and what it says."""

from __future__ import annotations

import math

import pytest
import torch

from pretrain.collapse import FIRST_STEP, KL_NEAR_ZERO, PATIENCE, CollapseAlarm

K = 512
UNIFORM = math.log(K)
HEALTHY = {
    "teacher_entropy": 3.1,
    "kl": 0.9,
    "cls_loss": 4.0,
    "patch_entropy": 2.2,
    "patch_kl": 0.6,
    "patch_loss_per_token": 2.8,
    "patch_loss": 1.4,
}


def alarm(**changes):
    return CollapseAlarm(**({"cls_prototypes": K, "patch_prototypes": K, "warmup_end": 300} | changes))


def feed(watch, steps, **changes):
    """Texts, over all reports."""
    return [text for step in steps for text in watch.check({"step": step, **HEALTHY, **changes})]


def test_a_run_that_learns_raises_none():
    assert feed(alarm(), range(0, 5000, 10)) == []


def test_the_digits_run_whose_cls_loss_stayed_at_ln_k():
    # Issue 3, failed run (c): the patch loss had fallen to 0.7, the [CLS] loss stood at ln K.
    stuck = {"teacher_entropy": 0.999 * UNIFORM, "kl": 0.002, "cls_loss": UNIFORM, "patch_loss": 0.7}
    (text,) = feed(alarm(), range(0, 1000, 10), **stuck, patch_loss_per_token=1.4, patch_entropy=0.9)
    assert text.startswith("step 320: the [CLS] output is uniform")
    assert "ln K = 6.24 for K = 512" in text
    assert "teacher's entropy 6.23 and loss 6.24" in text
    assert "--teacher-temp-start" in text
    assert "--centre-momentum" in text


def test_the_cls_loss_alone_shows_it_too():
    # A student that has given up, behind a teacher whose output still varies; and where the entropy was not measured.
    for entropy in (0.9 * UNIFORM, None):
        (text,) = feed(alarm(), range(0, 500, 10), teacher_entropy=entropy, kl=0.5, cls_loss=0.995 * UNIFORM)
        assert "[CLS] output is uniform" in text


def test_a_uniform_patch_output_is_told_by_the_loss_per_masked_token():
    uniform = {"patch_entropy": None, "patch_loss_per_token": UNIFORM, "patch_loss": UNIFORM / 2}
    (text,) = feed(alarm(), range(0, 500, 10), **uniform)
    assert "the patch output is uniform" in text
    assert "averaged over crops it reads 3.12" in text
    assert "half of the masks are empty" in text
    assert "--patch-teacher-temp-start" in text


@pytest.mark.parametrize(("warmup_end", "first"), [(0, FIRST_STEP), (FIRST_STEP - 1, FIRST_STEP), (700, 700)])
def test_the_start_of_a_run_is_not_judged(warmup_end, first):
    watch = alarm(warmup_end=warmup_end)
    start = {"teacher_entropy": UNIFORM, "kl": 1e-4, "cls_loss": UNIFORM}
    assert feed(watch, range(0, first, 10), **start) == []
    assert feed(watch, [first, first + 10], **start) == []
    assert len(feed(watch, [first + 20], **start)) == 1


def test_a_run_that_warms_up_until_its_end_is_judged_after_a_quarter():
    stuck = {"teacher_entropy": UNIFORM, "cls_loss": UNIFORM}
    assert feed(alarm(warmup_end=1600, steps=1600), range(0, 400, 10), **stuck) == []
    assert len(feed(alarm(warmup_end=1600, steps=1600), range(0, 430, 10), **stuck)) == 1
    assert feed(alarm(warmup_end=300, steps=100_000), range(0, 310, 10), **stuck) == []


def test_one_hot_targets_need_no_warm_up():
    one_hot = {"teacher_entropy": 0.001, "kl": 0.005, "cls_loss": 0.006}
    assert feed(alarm(warmup_end=5000), range(0, FIRST_STEP + 20, 10), **one_hot) == []
    assert "one-hot" in feed(alarm(warmup_end=5000), range(0, FIRST_STEP + 30, 10), **one_hot)[0]


def test_a_sign_that_comes_and_goes_is_none():
    watch = alarm()
    for step in range(300, 3000, 10):
        values = {} if step // 10 % PATIENCE == 0 else {"teacher_entropy": UNIFORM, "cls_loss": UNIFORM}
        assert feed(watch, [step], **values) == []


def test_once_until_it_has_recovered():
    watch = alarm()
    stuck = {"teacher_entropy": UNIFORM, "cls_loss": UNIFORM}
    assert len(feed(watch, range(300, 2000, 10), **stuck)) == 1
    assert feed(watch, range(2000, 2000 + 10 * (PATIENCE - 1), 10)) == []
    assert feed(watch, range(2100, 3000, 10), **stuck) == []
    assert feed(watch, range(3000, 3000 + 10 * PATIENCE, 10)) == []
    assert len(feed(watch, range(4000, 5000, 10), **stuck)) == 1


def test_one_prototype_takes_all():
    (text,) = feed(alarm(), range(300, 500, 10), teacher_entropy=0.001, kl=0.0005, cls_loss=0.0015)
    assert "the [CLS] output of the teacher is one-hot, one prototype takes every image" in text
    assert "--centring" in text
    (text,) = feed(alarm(), range(300, 500, 10), patch_entropy=0.001, patch_kl=0.5)
    assert "the patch output of the teacher is one-hot, every target is a single prototype" in text


def test_a_constant_output_between_the_ends():
    (text,) = feed(alarm(), range(300, 500, 10), kl=KL_NEAR_ZERO / 2, cls_loss=3.1)
    assert "the [CLS] output is the same for every image" in text
    assert "KL 0.005 at entropy 3.1 of at most 6.24" in text


def test_hard_targets_have_no_entropy():
    hard = {"patch_entropy": 0.0, "patch_kl": 2.8}
    assert feed(alarm(hard_patch_targets=True), range(300, 500, 10), **hard) == []
    assert len(feed(alarm(), range(300, 500, 10), **hard)) == 1
    stuck = {**hard, "patch_loss_per_token": UNIFORM}
    assert "patch output is uniform" in feed(alarm(hard_patch_targets=True), range(300, 500, 10), **stuck)[0]


def test_what_is_not_trained_is_not_judged():
    collapsed = {"teacher_entropy": UNIFORM, "kl": 0.0, "patch_entropy": UNIFORM, "patch_kl": 0.0}
    assert ["patch" in t for t in feed(alarm(cls_prototypes=None), range(300, 500, 10), **collapsed)] == [True]
    assert ["[CLS]" in t for t in feed(alarm(patch_prototypes=None), range(300, 500, 10), **collapsed)] == [True]


def test_what_is_not_measured_is_not_judged():
    absent = dict.fromkeys(HEALTHY)
    assert feed(alarm(), range(300, 500, 10), **absent) == []
    assert feed(alarm(), range(300, 500, 10), **dict.fromkeys(HEALTHY, math.nan)) == []
    assert alarm().check({"event": "epoch", "nmi": 80.0}) == []


def test_each_part_has_its_own_k():
    watch = alarm(patch_prototypes=8)
    (text,) = feed(watch, range(300, 500, 10), patch_entropy=math.log(8), patch_loss_per_token=math.log(8))
    assert "K = 8" in text
    assert "the patch output" in text


def test_entropy_and_kl_of_collapsed_logits_are_what_the_limits_are_for():
    # Targets computed as in training, from outputs that are the same for every image up to noise.
    generator = torch.Generator().manual_seed(0)
    noise = 1e-3 * torch.randn(64, K, generator=generator)

    def measured(teacher, student):
        target = (teacher / 0.04).softmax(-1)
        entropy = -(target * target.log()).sum(-1).mean().item()
        loss = -(target * (student / 0.1).log_softmax(-1)).sum(-1).mean().item()
        return {"teacher_entropy": entropy, "kl": loss - entropy, "cls_loss": loss}

    (text,) = feed(alarm(), range(300, 500, 10), **measured(noise, noise))
    assert "uniform" in text
    peak = torch.nn.functional.one_hot(torch.zeros(64, dtype=torch.int64), K).float() + noise
    (text,) = feed(alarm(), range(300, 500, 10), **measured(peak, 3 * peak))
    assert "one prototype takes every image" in text
