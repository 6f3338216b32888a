"""Principal components as colours, against scikit-learn; the foreground; the same colours every time."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA

from ibot_eval.errors import ConfigError
from ibot_eval.visual.components import components, components_figure
from ibot_eval.visual.correspondence import Tokens
from ibot_eval.visual.pictures import prepare
from tests import looking


def tokens(h: int, w: int, seed: int) -> Tokens:
    generator = np.random.default_rng(seed)
    scale = np.array([9.0, 5.0, 3.0, 1.0, 0.5])
    return Tokens((generator.normal(size=(h, w, 5)) * scale).astype(np.float32), None)


def test_equal_to_scikit_learn_up_to_sign_and_scale() -> None:
    given = [tokens(6, 7, 0), tokens(4, 9, 1)]
    found = components(given, foreground=False)
    flat = np.concatenate([one.tokens.reshape(-1, 5) for one in given]).astype(np.float64)
    pca = PCA(3, svd_solver="full").fit(flat)
    np.testing.assert_allclose(found.explained, 100 * pca.explained_variance_ratio_, rtol=1e-6)
    colours = np.concatenate([part.reshape(-1, 3) for part in found.colours])
    for i, scores in enumerate(pca.transform(flat).T):
        inside = (colours[:, i] > 0) & (colours[:, i] < 1)
        assert inside.mean() > 0.9
        assert abs(np.corrcoef(colours[inside, i], scores[inside])[0, 1]) > 1 - 1e-6
    assert [part.shape for part in found.colours] == [(6, 7, 3), (4, 9, 3)]
    assert all(part.all() for part in found.foreground)


def test_signs_do_not_depend_on_the_solver() -> None:
    given = [tokens(6, 7, 0)]
    mirrored = [Tokens(given[0].tokens[::-1, ::-1].copy(), None)]
    first, second = components(given, foreground=False), components(mirrored, foreground=False)
    np.testing.assert_allclose(first.colours[0], second.colours[0][::-1, ::-1], atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_foreground_is_what_lies_inside(sign: int) -> None:
    given = []
    wanted = np.zeros((8, 8), bool)
    wanted[2:6, 3:7] = True
    for seed in range(2):
        one = np.random.default_rng(seed).normal(size=(8, 8, 5)) * 0.1
        one[..., 0] += np.where(wanted, 4, -4) * sign
        given.append(Tokens(one.astype(np.float32), None))
    found = components(given)
    for mask, colours in zip(found.foreground, found.colours, strict=True):
        assert np.array_equal(mask, wanted)
        assert (colours[~wanted] == 0).all()
        assert colours[wanted].std() > 0.1
    assert found.notes == ()


def test_pictures_of_one_colour_have_no_foreground() -> None:
    found = components([Tokens(np.ones((4, 4, 5), np.float32), None)])
    assert found.foreground[0].all()
    assert "no foreground" in found.notes[0]
    assert np.isfinite(found.colours[0]).all()
    assert found.explained.tolist() == [0, 0, 0]


def test_what_has_no_components() -> None:
    with pytest.raises(ConfigError, match="no picture"):
        components([])
    with pytest.raises(ConfigError, match="no three components"):
        components([tokens(1, 3, 0)])
    narrow = Tokens(np.ones((4, 4, 6), np.float32), None)
    with pytest.raises(ConfigError, match="no common components"):
        components([tokens(4, 4, 0), narrow])


def test_figure() -> None:
    backbone = looking.PixelBackbone(8)
    pictures = [prepare(looking.noise(32, 48, seed), backbone, 32) for seed in range(5)]
    found = components([tokens(4, 6, seed) for seed in range(5)])
    figure = components_figure(pictures, found)
    assert [ax.get_title() for ax in figure.axes[:2]] == ["noise0.png", "components"]
    shown = figure.axes[1].images[0].get_array()
    assert shown is not None
    np.testing.assert_array_equal(shown[::8, ::8], np.rint(255 * found.colours[0]))
    figure.canvas.draw()
