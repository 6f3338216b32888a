"""Correspondences: the identity, known geometry, brute force; and what is drawn of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ibot_eval.errors import ConfigError
from ibot_eval.models import wrap
from ibot_eval.visual.correspondence import Matches, Tokens, accuracy, match, similarity_map, strongest, tokens_of
from ibot_eval.visual.correspondence_figures import correspondence_figure
from ibot_eval.visual.pictures import Box, prepare, view
from ibot_eval.visual.views import accuracy_in_words, true_places, with_geometry
from tests import layouts, looking

BACKBONE = looking.PixelBackbone(patch=8)
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


def random_tokens(h: int, w: int, seed: int, width: int = 5) -> Tokens:
    generator = np.random.default_rng(seed)
    return Tokens(generator.normal(size=(h, w, width)).astype(np.float32), generator.random((h, w)).astype(np.float32))


@pytest.mark.parametrize("mutual", [True, False])
def test_by_cosine_a_picture_with_itself_is_the_identity(mutual: bool) -> None:
    backbone = wrap(layouts.vit()).eval()
    picture = prepare(looking.noise(64, 96), backbone, 64)
    tokens = tokens_of(backbone, picture)
    h, w = picture.grid
    assert tokens.attention is not None
    assert tokens.attention.shape == tokens.tokens.shape[:2] == (h, w)
    # Of any length: to the cosine it is no matter.
    lengths = np.random.default_rng(0).uniform(0.2, 5, (h, w, 1)).astype(np.float32)
    found = match(Tokens(tokens.tokens * lengths, None), tokens, "cosine", mutual=mutual)
    assert len(found) == h * w
    assert np.array_equal(found.left, found.right)
    known = with_geometry(found, picture, picture)
    assert known.errors is not None
    np.testing.assert_allclose(known.errors, 0, atol=1e-9)
    assert accuracy(known, 0) == (100.0, h * w)


def test_by_dot_product_long_tokens_are_favoured() -> None:
    tokens = Tokens(np.array([[[1, 0], [2, 1], [0, 1.5]]], np.float32), None)
    # Rows of dot products: 1 2 0, 2 5 1.5, 0 1.5 2.25. The first patch is most like the second, longer one.
    found = match(tokens, tokens, "dot")
    assert found.right.tolist() == [[0, 1], [0, 1], [0, 2]]
    assert found.scores.tolist() == [2, 5, 2.25]
    assert match(tokens, tokens, "dot", mutual=True).left.tolist() == [[0, 1], [0, 2]]
    assert similarity_map(tokens, tokens, (0, 1), "dot").tolist() == [[2, 5, 1.5]]
    assert match(tokens, tokens, "cosine").right.tolist() == [[0, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize("make", [layouts.resnet, layouts.swin])
def test_early_blocks_of_pyramids_are_refused(make: Any) -> None:
    """Their tokens are no patches: places, lines and clicks would be wrong."""
    backbone = wrap(make()).eval()
    picture = prepare(looking.noise(70, 90), backbone, 64)
    early, last = (tokens_of(backbone, picture, block) for block in (0, -1))
    assert early.tokens.shape[:2] != picture.grid
    assert len(match(last, last)) == picture.grid[0] * picture.grid[1]
    for given in ((early, early), (early, last), (last, early)):
        with pytest.raises(ConfigError, match="choose the last block"):
            match(*given)
        with pytest.raises(ConfigError, match="choose the last block"):
            similarity_map(*given, (0, 0))


VIEWS: list[tuple[Box, Box, bool]] = [
    ((0.0, 0.0, 0.75, 0.75), (0.25, 0.25, 1.0, 1.0), False),
    ((0.0, 0.0, 0.75, 0.75), (0.25, 0.25, 1.0, 1.0), True),
    (WHOLE, (0.5, 0.0, 1.0, 0.5), False),
    (WHOLE, WHOLE, True),
    ((0.0, 0.25, 1.0, 0.75), (0.25, 0.0, 0.75, 1.0), False),
]


@pytest.mark.parametrize(("left_box", "right_box", "flip"), VIEWS)
def test_two_views_of_a_checkerboard(left_box: Box, right_box: Box, flip: bool) -> None:
    """Cells of a patch each, in shades of their own: every patch of the overlap is found within one patch."""
    source = looking.source(looking.checkerboard(16, 16, 16))

    class Colours(looking.PixelBackbone):
        """Tokens are mean colours, which a mirrored view does not change."""

        def outputs(self, images: Any, *arguments: Any, **keywords: Any) -> Any:
            found = super().outputs(images, *arguments, **keywords)
            mean = images.unfold(2, 8, 8).unfold(3, 8, 8).mean((-1, -2)).permute(0, 2, 3, 1)
            return type(found)(tuple(o._replace(patches=mean) for o in found.blocks), None)

    backbone = Colours()
    # Patches of the left are cells, so are those of the right where its zoom is the same.
    left = view(source, backbone, left_box, side=round(128 * min(left_box[2] - left_box[0], left_box[3] - left_box[1])))
    right = view(
        source,
        backbone,
        right_box,
        flip=flip,
        side=round(128 * min(right_box[2] - right_box[0], right_box[3] - right_box[1])),
    )
    a, b = tokens_of(backbone, left), tokens_of(backbone, right)
    nearest = _by_distance(a), _by_distance(b, right=True)
    found = with_geometry(match(*nearest), left, right)
    percent, among = accuracy(found, 1.0)
    assert percent == 100.0
    assert among > 20


def _by_distance(tokens: Tokens, right: bool = False) -> Tokens:
    """Tokens whose dot product is minus half of the squared distance of the given ones, up to a constant per left."""
    flat = tokens.tokens
    last = np.full((*flat.shape[:2], 1), 1.0) if not right else -0.5 * (flat**2).sum(-1, keepdims=True)
    return Tokens(np.concatenate([flat, last], axis=-1).astype(np.float32), None)


def test_true_places_by_hand() -> None:
    source = looking.noise(64, 64)
    left = view(source, BACKBONE, (0.0, 0.0, 0.5, 0.5), side=32)
    right = view(source, BACKBONE, (0.25, 0.0, 0.75, 0.5), flip=True, side=32)
    # Both have 4x4 patches of 8 source pixels; the right begins 16 pixels = 2 patches later and runs backwards.
    places = true_places(left, right, np.array([[0, 2], [3, 3], [0, 0], [1, 1]]))
    np.testing.assert_allclose(places, [[0, 3], [3, 2], [np.nan] * 2, [np.nan] * 2], atol=1e-9)


def test_overlap_is_tolerant_by_half_a_patch() -> None:
    source = looking.noise(64, 64)
    left = view(source, BACKBONE, WHOLE, side=64)
    # It begins half a patch into column 2: the centre of column 2 is on its border, that of column 1 is outside.
    right = view(source, BACKBONE, (20 / 64, 0.0, 52 / 64, 0.5), side=32)
    places = true_places(left, right, np.array([[0, 2], [0, 1], [0, 6], [0, 7]]))
    np.testing.assert_allclose(places[[0, 2]], [[0, -0.5], [0, 3.5]], atol=1e-9)
    assert np.isnan(places[[1, 3]]).all()


def test_geometry_of_two_pictures_is_unknown() -> None:
    a, b = (prepare(looking.noise(32, 32, seed), BACKBONE, 32) for seed in (0, 1))
    found = match(tokens_of(BACKBONE, a), tokens_of(BACKBONE, b))
    with pytest.raises(ConfigError, match="not views of one picture"):
        with_geometry(found, a, b)
    with pytest.raises(ConfigError, match="two views of one picture only"):
        accuracy(found)


def test_accuracy_by_hand() -> None:
    patches = np.zeros((5, 2), np.int64)
    found = Matches(patches, patches, np.ones(5), None, np.array([0.0, 1.0, 1.5, np.nan, 3.0]))
    assert accuracy(found, 1.0) == (50.0, 4)
    assert accuracy(found, 0.5) == (25.0, 4)
    assert accuracy(found, 3.0) == (100.0, 4)
    nothing = Matches(patches, patches, np.ones(5), None, np.full(5, np.nan))
    assert np.isnan(accuracy(nothing)[0])
    assert accuracy(nothing)[1] == 0


def test_accuracy_is_said_of_what_is_counted() -> None:
    source = looking.noise(64, 64)
    left, right, beside = (
        view(source, BACKBONE, box, side=32) for box in ((0, 0, 0.5, 0.5), (0.25, 0, 0.75, 0.5), (0.5, 0.5, 1, 1))
    )
    # Patch (0, 2) lies at (0, 0) of the right view, (0, 3) at (0, 1); (0, 0) is not shown there.
    found = Matches(np.array([[0, 2], [0, 3], [0, 0]]), np.array([[0, 0], [3, 3], [0, 0]]), np.ones(3), None)
    known = with_geometry(found, left, right)
    assert accuracy_in_words(known, left, right).startswith("50.0 % of 2 patches that both views show")
    words = accuracy_in_words(known.take(np.array([0])), left, right, mutual=True)
    assert words.startswith("100.0 % of 1 mutual matches that both views show")
    none = accuracy_in_words(known.take(np.array([2])), left, right, mutual=True)
    assert none == "no match of a patch that both views show is mutual"
    assert "the views do not overlap" in accuracy_in_words(with_geometry(found, left, beside), left, beside)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_matches_and_mutual_ones_by_brute_force(similarity: Any) -> None:
    left, right = random_tokens(3, 4, 0), random_tokens(2, 5, 1)
    # Of unequal lengths, so that the two similarities choose differently.
    right.tokens[0] *= 3
    other = match(left, right, "cosine" if similarity == "dot" else "dot")
    assert (match(left, right, similarity).right != other.right).any()

    def like(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / (1 if similarity == "dot" else np.linalg.norm(a) * np.linalg.norm(b)))

    best: dict[tuple[int, int], tuple[int, int]] = {}
    back: dict[tuple[int, int], tuple[int, int]] = {}
    lefts, rights = list(np.ndindex(3, 4)), list(np.ndindex(2, 5))
    for p in lefts:
        best[p] = max(rights, key=lambda q: like(left.tokens[p], right.tokens[q]))
    for q in rights:
        back[q] = max(lefts, key=lambda p: like(left.tokens[p], right.tokens[q]))
    found = match(left, right, similarity)
    assert [tuple(p) for p in found.left] == lefts
    assert [tuple(q) for q in found.right] == [best[p] for p in lefts]
    wanted = [like(left.tokens[p], right.tokens[best[p]]) for p in lefts]
    np.testing.assert_allclose(found.scores, wanted, rtol=1e-5)
    mutual = match(left, right, similarity, mutual=True)
    assert [tuple(p) for p in mutual.left] == [p for p in lefts if back[best[p]] == p]
    assert 0 < len(mutual) < len(found)
    values = similarity_map(left, right, (2, 1), similarity)
    np.testing.assert_allclose(
        values, [[like(left.tokens[2, 1], right.tokens[r, c]) for c in range(5)] for r in range(2)], rtol=1e-5
    )


def test_strongest_are_the_most_attended_of_the_overlap() -> None:
    places = np.arange(10).reshape(5, 2)
    attention = np.array([0.1, 0.5, 0.3, 0.9, 0.2], np.float32)
    scores = np.array([5.0, 4.0, 3.0, 2.0, 1.0], np.float32)
    assert strongest(Matches(places, places, scores, attention), 3).left[:, 0].tolist() == [6, 2, 4]
    assert strongest(Matches(places, places, scores, None), 2).left[:, 0].tolist() == [0, 2]
    errors = np.array([0.0, 2.0, 0.0, np.nan, 0.0])
    assert strongest(Matches(places, places, scores, attention, errors), 2).left[:, 0].tolist() == [2, 4]
    assert len(strongest(Matches(places, places, scores, attention), 12)) == 5
    with pytest.raises(ConfigError, match="at least 1 match"):
        strongest(Matches(places, places, scores, attention), 0)


def test_tokens_of_two_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 and 6 numbers"):
        match(random_tokens(2, 2, 0), random_tokens(2, 2, 0, width=6))
    with pytest.raises(ConfigError, match="no patch 2 0"):
        similarity_map(random_tokens(2, 2, 0), random_tokens(2, 2, 1), (2, 0))


def test_attention_is_the_mean_over_heads() -> None:
    from ibot_eval.visual.attention import attention_maps

    backbone = wrap(layouts.eva()).eval()
    picture = prepare(looking.noise(40, 63), backbone, 32)
    found = tokens_of(backbone, picture, 0).attention
    np.testing.assert_allclose(found, attention_maps(backbone, picture, -1).mean, rtol=1e-5)
    cnn = wrap(layouts.resnet()).eval()
    assert tokens_of(cnn, prepare(looking.noise(70, 90), cnn, 64)).attention is None


def test_lines_end_in_the_middle_of_their_patches() -> None:
    source = looking.noise(64, 64)
    left = view(source, BACKBONE, WHOLE, side=64)
    right = view(source, BACKBONE, (0, 0, 0.5, 0.5), side=32)
    found = Matches(np.array([[1, 2], [0, 0]]), np.array([[3, 1], [0, 0]]), np.ones(2), None, np.array([5.0, 0.0]))
    figure = correspondence_figure([(left, right, found)])
    lines = figure.axes[0].lines
    # The right picture is enlarged to 64 pixels and begins 64 + 6 % of 64 (4) pixels later.
    assert lines[0].get_xydata().tolist() == [[20, 12], [68 + 24, 56]]
    assert lines[0].get_linestyle() == "--"
    assert lines[2].get_linestyle() == "-"
    assert "two views" in figure.axes[0].get_title()
    figure.canvas.draw()
