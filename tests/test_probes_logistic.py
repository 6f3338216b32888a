"""ibot_eval.probes.logistic: the published objective, minimised by scipy and by scikit-learn as references."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression

from ibot_eval.probes import logistic
from ibot_eval.probes.logistic import fit_logistic, log_loss, normalise


@pytest.fixture(autouse=True)
def one_thread():
    """Inputs this small gain nothing from threads, and lose much where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _data(n, width, classes, seed=0):
    """Overlapping classes of unequal size."""
    generator = np.random.default_rng(seed)
    targets = np.concatenate([np.arange(classes), generator.integers(0, classes, n - classes) // 2 * 2 % classes])
    centres = generator.normal(size=(classes, width))
    return normalise(centres[targets] + generator.normal(size=(n, width)) + 1), targets


def _published(weight, features, targets, lam):
    """(1/n) sum log-loss + lambda/2 |W|^2, term by term."""
    shares = log_softmax(features.astype(np.float64) @ weight.T, axis=1)
    return -np.mean([row[t] for row, t in zip(shares, targets, strict=True)]) + lam / 2 * np.sum(weight**2)


def _minimum(features, targets, classes, lam):
    """Its minimum by scipy, with a gradient by hand that scipy checks against differences."""
    shape, n = (classes, features.shape[1]), len(features)

    def loss(flat):
        return _published(flat.reshape(shape), features, targets, lam)

    def slope(flat):
        weight = flat.reshape(shape)
        excess = np.exp(log_softmax(features.astype(np.float64) @ weight.T, axis=1)) - np.eye(classes)[targets]
        return (excess.T @ features / n + lam * weight).ravel()

    somewhere = np.random.default_rng(1).normal(size=shape).ravel()
    assert scipy.optimize.check_grad(loss, slope, somewhere) < 1e-6
    found = scipy.optimize.minimize(loss, somewhere, jac=slope, method="BFGS", options={"gtol": 1e-9})
    return found.x.reshape(shape), found.fun


@pytest.mark.parametrize("backend", ["sklearn", "torch"])
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("multiple", [0.01, 0.1, 1.0])
def test_minimises_the_published_objective(backend, classes, multiple):
    features, targets = _data(60, 6, classes)
    lam = multiple / len(features)
    weight, loss = _minimum(features, targets, classes, lam)
    fit = fit_logistic(features, targets, classes, lam, tolerance=1e-7, backend=backend)
    assert fit.converged
    assert fit.weight.shape == (classes, 6)
    assert fit.weight.dtype == np.float32
    assert fit.loss == pytest.approx(loss, abs=1e-9)
    assert _published(fit.weight.astype(np.float64), features, targets, lam) == pytest.approx(fit.loss, abs=1e-8)
    np.testing.assert_allclose(fit.weight, weight, atol=1e-4)


@pytest.mark.parametrize(("multiple", "c"), [(0.01, 100.0), (0.1, 10.0), (1.0, 1.0)])
def test_published_lambdas_are_these_c_of_sklearn(multiple, c):
    features, targets = _data(80, 5, 4)
    model = LogisticRegression(C=c, fit_intercept=False, tol=1e-9, max_iter=10_000).fit(
        features.astype(np.float64), targets
    )
    fit = fit_logistic(features, targets, 4, multiple / 80, tolerance=1e-7, backend="torch")
    np.testing.assert_allclose(fit.weight, model.coef_, atol=1e-4)


@pytest.mark.parametrize("backend", ["sklearn", "torch"])
def test_every_image_twice_changes_nothing(backend):
    features, targets = _data(40, 5, 3)
    once = fit_logistic(features, targets, 3, 0.01, tolerance=1e-7, backend=backend)
    twice = fit_logistic(np.tile(features, (2, 1)), np.tile(targets, 2), 3, 0.01, tolerance=1e-7, backend=backend)
    np.testing.assert_allclose(twice.weight, once.weight, atol=1e-5)
    assert twice.loss == pytest.approx(once.loss, abs=1e-9)


@pytest.mark.parametrize("backend", ["sklearn", "torch"])
def test_tiny_gradients_are_no_convergence(backend):
    # 300 classes: no entry of the gradient at W = 0 reaches 1e-3, and scikit-learn's own tolerance ends the fit early.
    generator, targets = np.random.default_rng(0), np.arange(900) % 300
    features = normalise(generator.normal(size=(300, 64))[targets] + 0.5 * generator.normal(size=(900, 64)))
    fit = fit_logistic(features, targets, 300, 0.1 / 900, backend=backend)
    hasty = LogisticRegression(C=10, fit_intercept=False, tol=1e-3).fit(features, targets)
    assert hasty.n_iter_[0] <= 1
    assert fit.converged
    assert fit.gradient_norm < 1.01e-4
    assert fit.iterations > 5
    assert fit.loss < _published(hasty.coef_, features, targets, 0.1 / 900) - 0.1


@pytest.mark.parametrize("backend", ["sklearn", "torch"])
@pytest.mark.parametrize("classes", [2, 4])
def test_a_fit_that_is_cut_short_says_so(backend, classes):
    features, targets = _data(80, 6, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = fit_logistic(features, targets, classes, 1e-4, max_iterations=2, backend=backend)
    assert not fit.converged
    assert fit.iterations == 2
    assert 1e-4 < fit.gradient_norm < 1
    assert fit_logistic(features, targets, classes, 1e-4, backend=backend).loss < fit.loss


@pytest.mark.parametrize("backend", ["sklearn", "torch"])
@pytest.mark.parametrize("classes", [1, 3])
def test_nothing_to_tell_classes_apart_by(backend, classes):
    # One class; or a collapsed backbone, which gives every image the same features.
    features, targets = normalise(np.tile(np.arange(1.0, 6.0), (33, 1))), np.arange(33) % classes
    fit = fit_logistic(features, targets, classes, 0.01, backend=backend)
    np.testing.assert_array_equal(fit.weight, np.zeros((classes, 5)))
    assert (fit.converged, fit.iterations, fit.gradient_norm) == (True, 0, 0.0)
    assert fit.loss == pytest.approx(np.log(classes))


@pytest.mark.parametrize("lam", [0.0, -1.0, float("nan")])
def test_lambda_must_be_positive(lam):
    with pytest.raises(ValueError, match="lambda"):
        fit_logistic(*_data(20, 3, 2), 2, lam)


def test_every_class_needs_a_sample():
    features, targets = _data(20, 3, 2)
    with pytest.raises(ValueError, match="in 3 classes"):
        fit_logistic(features, targets, 3, 0.1)
    with pytest.raises(ValueError, match="0 features"):
        fit_logistic(features[:0], targets[:0], 0, 0.1)


def test_tiles_change_nothing(monkeypatch):
    features, targets = _data(53, 6, 4)
    whole = fit_logistic(features, targets, 4, 0.01, tolerance=1e-7, backend="torch")
    loss = log_loss(whole.weight, features, targets)
    for values in (1, 40, 53 * 4):
        monkeypatch.setattr(logistic, "TILE_VALUES", values)
        tiled = fit_logistic(features, targets, 4, 0.01, tolerance=1e-7, backend="torch")
        np.testing.assert_allclose(tiled.weight, whole.weight, atol=1e-5)
        assert log_loss(whole.weight, features, targets) == pytest.approx(loss, abs=1e-12)


def test_log_loss_is_that_without_the_penalty():
    (features, targets), weight = _data(53, 6, 4), np.random.default_rng(2).normal(size=(4, 6)).astype(np.float32)
    assert log_loss(weight, features, targets) == pytest.approx(_published(weight, features, targets, 0.0), abs=1e-12)


def test_auto_takes_sklearn_on_the_cpu_unless_its_logits_would_fill_the_memory(monkeypatch):
    features, targets = _data(30, 4, 3)
    used = []
    for name in ("_with_sklearn", "_with_torch"):
        real = getattr(logistic, name)
        monkeypatch.setattr(logistic, name, lambda *a, real=real, name=name: used.append(name) or real(*a))
    fit_logistic(features, targets, 3, 0.1)
    # A device without float64 hands over to the CPU.
    fit_logistic(features, targets, 3, 0.1, device="mps")
    monkeypatch.setattr(logistic, "SKLEARN_LOGITS", 89)
    fit_logistic(features, targets, 3, 0.1)
    fit_logistic(features, targets, 3, 0.1, backend="sklearn")
    assert used == ["_with_sklearn", "_with_sklearn", "_with_torch", "_with_sklearn"]


def test_read_only_features_are_taken_as_they_are():
    features, targets = _data(30, 4, 3)
    kept = features.copy()
    features.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = fit_logistic(features, targets, 3, 0.1, backend="torch")
        log_loss(fit.weight, features, targets)
    np.testing.assert_array_equal(features, kept)


@pytest.mark.parametrize("part", [1, 2, 1 << 14])
def test_normalise(monkeypatch, part):
    monkeypatch.setattr(logistic, "NORMALISED_ROWS", part)
    rows = np.array([[3, 4], [0, 0], [-5e-30, 0], [1e30, -1e30], [2e-42, 0]], np.float32)
    kept = rows.copy()
    unit = normalise(rows)
    assert unit.dtype == np.float32
    np.testing.assert_allclose(unit[:4], [[0.6, 0.8], [0, 0], [-1, 0], [0.5**0.5, -(0.5**0.5)]], rtol=1e-6)
    assert np.isfinite(unit).all()
    np.testing.assert_array_equal(rows, kept)
    assert normalise(rows[:2].astype(np.float16)).dtype == np.float32
