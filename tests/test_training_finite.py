from __future__ import annotations

import math
import pickle

import pytest
import torch

from ibot_eval.training.finite import FiniteWatch, NotFinite

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def flags(cls: float = 1.0, patch: float = 1.0, norms: tuple[float, ...] = (1.0, 2.0), device: torch.device = CPU):
    return [
        ("[CLS] loss", torch.tensor(cls, device=device).isfinite()),
        ("patch logits", torch.tensor([[0.0, patch]], device=device).isfinite()),
        (["gradient of a.weight", "gradient of b.bias"], torch.tensor(norms, device=device).isfinite()),
    ]


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"cls": math.nan}, r"\[CLS\] loss"),
        ({"patch": math.inf}, "patch logits"),
        ({"norms": (math.nan, 1.0)}, r"gradient of a\.weight"),
        ({"norms": (1.0, -math.inf)}, r"gradient of b\.bias"),
    ],
)
def test_the_cpu_stops_at_once(bad, name):
    watch = FiniteWatch(CPU)
    watch.check(3, flags())
    with pytest.raises(NotFinite, match=rf"^{name} is NaN or infinite at step 4\n  to do: "):
        watch.check(4, flags(**bad))
    watch.settle()


def test_the_first_of_several_is_named():
    with pytest.raises(NotFinite, match=r"^patch logits is NaN or infinite at step 0, and so are 2 after it"):
        FiniteWatch(CPU).check(0, flags(patch=math.nan, norms=(math.nan, math.nan)))


@pytest.mark.parametrize("device", DEVICES)
def test_deferred_by_one_step(device):
    watch = FiniteWatch(device, deferred=True)
    watch.check(0, flags(device=device))
    watch.check(1, flags(cls=math.nan, device=device))
    with pytest.raises(NotFinite, match="at step 1"):
        watch.check(2, flags(norms=(math.nan, math.nan), device=device))
    watch.settle()  # step 2 is bad because step 1 was, and is not reported after it


def test_settling_looks_at_the_last_step():
    watch = FiniteWatch(CPU, deferred=True)
    watch.settle()
    watch.check(0, flags())
    watch.settle()
    watch.check(1, flags(patch=math.nan))
    with pytest.raises(NotFinite, match=r"patch logits .* step 1"):
        watch.settle()
    watch.settle()


def test_deferred_flags_are_those_of_their_step():
    """The tensor behind a flag is reused by the next step."""
    watch = FiniteWatch(CPU, deferred=True)
    flag = torch.tensor([True])
    watch.check(0, [("loss", flag)])
    flag.fill_(False)
    watch.settle()


def test_deferred_on_cuda_only():
    assert not FiniteWatch(CPU).deferred
    assert FiniteWatch(torch.device("cuda")).deferred


def test_names_must_match_the_elements():
    with pytest.raises(ValueError, match="zip"):
        FiniteWatch(CPU).check(0, [(["a", "b"], torch.tensor([True]))])


def test_the_error_travels_between_ranks():
    error = NotFinite("loss is NaN", todo="stop")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (NotFinite, str(error))
