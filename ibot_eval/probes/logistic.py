"""Multinomial logistic regression with an l2 penalty and without an intercept, as published for frozen features.

The objective over W (C, D), for n features x_i (D,) with classes y_i, is that of the cyanure package, which DINO's and
iBOT's published numbers come from (Mairal 2019, 'Cyanure: an open-source toolbox for empirical risk minimization')::

    F(W) = 1/n sum_i -log softmax(W x_i)[y_i]  +  lambda/2 |W|^2            |W|^2: sum of all squared entries

scikit-learn minimises ``C sum_i -log softmax(W x_i)[y_i] + 1/2 |W|^2``. Divided by C n, that is F with
lambda = 1/(C n), so

    C = 1 / (n lambda):   lambda = {0.01, 0.1, 1} x 1/n   <->   C = {100, 10, 1}, whatever n.

The 1/n is that of cyanure's author, who reproduced DINO's number with lambda = 0.1/n (issue 121 of its repository).
iBOT's released script leaves it out, with which a user got 58.0 instead of 65.9 % (issue 21 there).

Of two classes scikit-learn fits one vector w = W_1 - W_0, and penalises 1/2 |w|^2. At the minimum of F the rows of W
sum to zero, so W_1 = -W_0 = w/2 and |W|^2 = |w|^2 / 2: there C = 2 / (n lambda).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Backend = Literal["auto", "sklearn", "torch"]

TILE_VALUES = 1 << 24
"""Logits held at a time."""
NORMALISED_ROWS = 1 << 14
"""Rows that are divided at a time."""
SKLEARN_LOGITS = 1 << 28
"""Logits (n C) up to which ``auto`` uses scikit-learn, which holds all of them, several times."""


@dataclass(frozen=True)
class LogisticFit:
    """The minimum of F, as far as it was reached."""

    weight: np.ndarray
    """(C, D) float32; logits are ``features @ weight.T``."""
    loss: float
    """F(W) in nats, penalty included."""
    converged: bool
    """Whether ``gradient_norm`` came down to the tolerance."""
    iterations: int
    gradient_norm: float
    """Largest absolute entry of the gradient of F, as a share of that at W = 0."""


def normalise(features: np.ndarray) -> np.ndarray:
    """(n, D) float32: rows of length one in the l2 norm; rows of zeros stay zero."""
    rows = np.array(features, dtype=np.float32)
    # A part at a time, since each division holds another copy.
    for start in range(0, len(rows), NORMALISED_ROWS):
        part = rows[start : start + NORMALISED_ROWS]
        # Divided by the largest entry first, so that squares neither overflow nor vanish.
        part /= np.maximum(np.abs(part).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        part /= np.maximum(np.linalg.norm(part, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return rows


def fit_logistic(
    features: np.ndarray,
    targets: np.ndarray,
    classes: int,
    lam: float,
    *,
    device: torch.device | str = "cpu",
    tolerance: float = 1e-4,
    max_iterations: int = 1000,
    backend: Backend = "auto",
) -> LogisticFit:
    """Minimises F, which has one minimum, by L-BFGS from W = 0.

    The fit ends when no entry of the gradient is larger than ``tolerance`` times the largest one at W = 0: a share,
    since gradients of normalised features are small. With 1000 classes, W = 0 may meet scikit-learn's absolute 1e-4.

    Args:
        features: (n, D) float32.
        targets: (n,) integers; each of 0 … ``classes`` - 1 occurs.
        lam: lambda above, positive.
        device: what torch computes on; the CPU instead of MPS, which has no float64.
        backend: sklearn (on the CPU), torch, or auto: torch on a CUDA device and for more than 2^28 logits (n C),
            else sklearn. Both compute in float64.

    Raises:
        ValueError: no features, a class without any, or a lambda that is not positive.
    """
    if not len(features) or not lam > 0 or len(np.unique(targets)) != classes:
        raise ValueError(f"{len(features)} features of {len(np.unique(targets))} in {classes} classes, lambda {lam}")
    # Only CUDA devices and the CPU have float64.
    device = torch.device(device if torch.device(device).type == "cuda" else "cpu")
    small = len(features) * classes <= SKLEARN_LOGITS
    if backend == "auto":
        backend = "sklearn" if device.type == "cpu" and small else "torch"
    objective = _Objective(features, targets, lam, torch.device("cpu") if backend == "sklearn" else device)
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=objective.features.device)
    start = float(objective(weight)[1].abs().max())
    # Without a slope but for rounding, W = 0 is the minimum: one class, or the same features everywhere.
    flat = start <= 1e-14 * float(max(features.max(), -features.min()))
    iterations = 0
    if not flat and backend == "sklearn":
        weight, iterations = _with_sklearn(features, targets, lam, tolerance * start, max_iterations)
    elif not flat:
        weight, iterations = _with_torch(objective, weight, tolerance * start, max_iterations)
    loss, gradient = objective(weight)
    norm = 0.0 if flat else float(gradient.abs().max()) / start
    return LogisticFit(
        weight=weight.float().cpu().numpy(),
        loss=float(loss),
        # Computed anew, with other roundings than the fit's.
        converged=norm <= 1.01 * tolerance,
        iterations=iterations,
        gradient_norm=norm,
    )


def log_loss(weight: np.ndarray, features: np.ndarray, targets: np.ndarray) -> float:
    """Mean of -log softmax(W x)[y] in nats, without the penalty; arguments as in :func:`fit_logistic`."""
    loss, _ = _Objective(features, targets, 0.0, torch.device("cpu"))(torch.from_numpy(weight).double())
    return float(loss)


class _Objective:
    """F and its gradient in float64, the logits of a tile at a time."""

    def __init__(self, features: np.ndarray, targets: np.ndarray, lam: float, device: torch.device) -> None:
        self.features = torch.from_numpy(np.require(features, requirements=["C", "W"])).to(device)
        self.targets = torch.from_numpy(targets.astype(np.int64)).to(device)
        self.lam = lam

    def __call__(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(loss (), gradient (C, D)) at ``weight`` (C, D)."""
        loss, gradient = weight.new_zeros(()), torch.zeros_like(weight)
        step = max(1, TILE_VALUES // len(weight))
        for part, y in zip(self.features.split(step), self.targets.split(step), strict=True):
            x = part.double()
            log_shares = (x @ weight.T).log_softmax(1)
            loss -= log_shares.gather(1, y[:, None]).sum()
            excess = log_shares.exp_()
            excess[torch.arange(len(y), device=y.device), y] -= 1
            gradient.addmm_(excess.T, x)
        n = len(self.targets)
        return loss / n + self.lam / 2 * weight.square().sum(), gradient / n + self.lam * weight


def _with_sklearn(
    features: np.ndarray, targets: np.ndarray, lam: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, int]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    binary = targets.max() == 1
    model = LogisticRegression(
        # sklearn's own gradient is that of F too, so its tolerance means the same.
        C=(2 if binary else 1) / (len(features) * lam),
        fit_intercept=False,
        tol=tolerance,
        max_iter=max_iterations,
    )
    with warnings.catch_warnings():
        # Whether it converged is for the caller to report, by the same test for every backend.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features.astype(np.float64), targets)
    weight = torch.from_numpy(np.asarray(model.coef_, dtype=np.float64))
    return torch.cat([-weight / 2, weight / 2]) if binary else weight, int(np.max(model.n_iter_))


def _with_torch(objective: _Objective, start: Tensor, tolerance: float, max_iterations: int) -> tuple[Tensor, int]:
    weight = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [weight],
        max_iter=max_iterations,
        max_eval=25 * max_iterations,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        loss, weight.grad = objective(weight.detach())
        return loss

    optimiser.step(closure)
    return weight.detach(), int(optimiser.state[weight]["n_iter"])
