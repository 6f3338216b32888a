"""Means of parts of the patches: which patches they take, and that batches and ranks change none of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ibot_eval import reducers
from ibot_eval.atoms import Atom, atomic_outputs, resolve, row_bytes
from ibot_eval.cache import BankCache
from ibot_eval.errors import ConfigError
from ibot_eval.extraction import extract_banks
from ibot_eval.features import FeatureRequest, parse_reducer
from tests.fakes import SIDE, TRANSFORM, WIDTH, FakeBackbone, FakeSplit, fake_images, fake_loaded
from tests.ranks import run_ranks

KINDS = ("norm_topk", "norm_bottomk", "norm_randomk")
SPLIT = FakeSplit(7)
N = 4
ALL = [FeatureRequest("train", -1, "none", f"{kind}:{k}") for kind in KINDS for k in range(1, N + 1)]


def outputs(requests, batch: Sequence[int] = range(7), backbone=None):
    """Rows of every request for the images ``batch`` of the split, from one pass."""
    backbone = (backbone or FakeBackbone()).eval()
    atoms = {request: resolve(request, backbone, None) for request in requests}
    with torch.inference_mode():
        found = atomic_outputs(backbone, None, fake_images(SPLIT, batch), list(set(atoms.values())), list(batch))
    return {request: found[atom].numpy() for request, atom in atoms.items()}


def tokens_and_attention(block):
    """(7, 4, D) raw patch tokens of a block and (7, 4) attention of [CLS] in the last, averaged over heads."""
    with torch.inference_mode():
        raw = FakeBackbone().eval().outputs(fake_images(SPLIT, range(7)), (block,), "none", attention_block=-1)
    assert raw.attention is not None
    return raw.blocks[0].patches.flatten(1, 2).numpy(), raw.attention[:, :, 0, 2:].mean(1).numpy()


def layer_norm(row, backbone):
    """The network's last norm, in numpy and float64."""
    row = row.astype(np.float64)
    row = (row - row.mean()) / np.sqrt(row.var() + backbone.norm.eps)
    return row * backbone.norm.weight.detach().numpy() + backbone.norm.bias.detach().numpy()


@pytest.mark.parametrize("block", [-1, 0])
@pytest.mark.parametrize("k", range(1, N + 1))
def test_patches_are_chosen_by_attention_and_normed_after_the_mean(block, k):
    patches, attention = tokens_and_attention(block)
    kinds = {"norm_topk": lambda image: sorted(range(N), key=lambda i: -attention[image, i])[:k]}
    kinds["norm_bottomk"] = lambda image: sorted(range(N), key=lambda i: attention[image, i])[:k]
    for kind, chosen in kinds.items():
        request = FeatureRequest("train", block, "none", f"{kind}:{k}")
        got = outputs([request])[request]
        backbone = FakeBackbone()
        expected = [layer_norm(patches[image][chosen(image)].mean(0), backbone) for image in range(len(SPLIT))]
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=kind)
        assert got.dtype == np.float32


def test_random_patches_are_drawn_by_the_image_and_nested():
    patches, _ = tokens_and_attention(-1)
    backbone = FakeBackbone()
    sums = np.zeros_like(patches[:, 0], dtype=np.float64)
    drawn = []
    for k in range(1, N + 1):
        request = FeatureRequest("train", -1, "none", f"norm_randomk:{k}")
        got = outputs([request])[request]
        # The patch that k adds is the one that explains the row.
        candidates = (sums[:, None] + patches) / k
        expected = np.array([[layer_norm(row, backbone) for row in image] for image in candidates])
        distances = np.abs(expected - got[:, None]).max(-1)
        drawn.append(distances.argmin(1))
        assert distances.min(1).max() < 1e-5, k
        sums += patches[np.arange(len(SPLIT)), drawn[-1]]
    orders = np.stack(drawn, 1)
    assert (np.sort(orders, 1) == np.arange(N)).all(), "every patch once"
    assert len({tuple(order) for order in orders}) > 3, "each image has a draw of its own"


def test_draws_are_even():
    orders = reducers.drawn(range(4000), N, torch.device("cpu")).numpy()
    for place in range(N):
        assert np.bincount(orders[:, place], minlength=N).min() > 900, place


def test_all_patches_in_any_order_are_the_patch_mean():
    requests = [
        FeatureRequest("train", 0, "none", reducer) for reducer in ("norm_patch_mean", *(f"{k}:4" for k in KINDS))
    ]
    whole, *parts = outputs(requests).values()
    for part in parts:
        np.testing.assert_allclose(part, whole, atol=1e-5)


def test_top_and_bottom_share_no_patch_even_where_attention_is_equal():
    class Even(FakeBackbone):
        def outputs(self, *arguments, **settings):
            found = super().outputs(*arguments, **settings)
            assert found.attention is not None
            return found._replace(attention=torch.full_like(found.attention, 1 / found.attention.shape[-1]))

        def final_norm(self, tokens):
            return tokens

    patches, _ = tokens_and_attention(-1)
    found = outputs(ALL, backbone=Even())
    for k in range(1, N):
        top, bottom = (
            found[FeatureRequest("train", -1, "none", f"{kind}:{n}")]
            for kind, n in (("norm_topk", k), ("norm_bottomk", N - k))
        )
        np.testing.assert_allclose(k * top + (N - k) * bottom, patches.sum(1), atol=1e-5)
        np.testing.assert_allclose(top, patches[:, :k].mean(1), atol=1e-6)


def test_one_pass_and_any_batches_give_the_same_bits():
    backbone = FakeBackbone()
    together = outputs(
        [*ALL, FeatureRequest("train", -1, "published", "topk:3"), FeatureRequest("train")], backbone=backbone
    )
    assert backbone.passes == 1
    for request, rows in together.items():
        np.testing.assert_array_equal(outputs([request])[request], rows)
        for batch in ([0], [1, 2, 3], [6, 4, 5]):
            np.testing.assert_array_equal(outputs([request], batch)[request], rows[batch])


def test_attention_is_sorted_once_a_batch(monkeypatch):
    count = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda *a, **k: count.append(1) or sort(*a, **k))
    outputs([*ALL, FeatureRequest("train", -1, "published", "topk:3")])
    assert len(count) == 1


def test_the_norm_of_the_request_makes_no_other_bank():
    backbone = FakeBackbone()
    for kind in KINDS:
        atoms = {
            resolve(FeatureRequest("train", -1, norm, f"{kind}:2"), backbone, None) for norm in ("none", "published")
        }
        assert atoms == {Atom(2, "none", f"{kind}:2")}
        assert row_bytes(atoms.pop(), backbone, SIDE) == 4 * WIDTH


@pytest.mark.parametrize(
    ("backbone", "block", "reducer", "message"),
    [
        (FakeBackbone(has_cls=False), -1, "norm_topk:1", "norm_topk:1 ranks patches by the attention of \\[CLS\\]"),
        (FakeBackbone(has_cls=False), -1, "norm_bottomk:1", "attention of \\[CLS\\]"),
        (FakeBackbone(dims=(4, 6, 6)), 0, "norm_randomk:1", "4 wide"),
        (FakeBackbone(), -1, "norm_topk:5", "mean of 5 patches .* 2x2 = 4"),
        (FakeBackbone(), -1, "norm_randomk:5", "mean of 5 patches .* 2x2 = 4"),
    ],
)
def test_what_cannot_be_served(backbone, block, reducer, message):
    with pytest.raises(ConfigError, match=message):
        outputs([FeatureRequest("train", block, "none", reducer)], backbone=backbone)


def test_random_patches_need_no_cls_token():
    request = FeatureRequest("train", -1, "none", "norm_randomk:2")
    assert outputs([request], backbone=FakeBackbone(has_cls=False))[request].shape == (7, WIDTH)


def test_draws_without_indices_are_refused():
    backbone = FakeBackbone().eval()
    atoms = [resolve(FeatureRequest("train", -1, "none", "norm_randomk:2"), backbone, None)]
    with pytest.raises(ValueError, match="indices"):
        atomic_outputs(backbone, None, fake_images(SPLIT, [0]), atoms)


@pytest.mark.parametrize("reducer", ["norm_topk", "norm_topk:0", "norm_topk:1.5", "norm_randomk:-1", "randomk:2"])
def test_reducers_that_are_none(reducer):
    with pytest.raises(ConfigError, match="unknown reducer"):
        parse_reducer(reducer)
    assert parse_reducer("norm_bottomk:7") == ("norm_bottomk", 7.0)


def extract(folder, batch_size, split=SPLIT, **settings):
    banks, stats = extract_banks(
        ALL,
        fake_loaded(),
        {"train": split},
        TRANSFORM,
        BankCache(folder),
        device=torch.device("cpu"),
        batch_size=batch_size,
        workers=0,
        progress=False,
        **settings,
    )
    return {request.reducer: bank.features for request, bank in banks.items()}, stats


def test_banks_are_the_same_at_any_batch_size(tmp_path):
    whole, stats = extract(tmp_path / "7", 7)
    assert stats.images == len(SPLIT)
    for size in (1, 3):
        parts, _ = extract(tmp_path / str(size), size)
        for reducer, features in whole.items():
            np.testing.assert_array_equal(parts[reducer], features)
    direct = {request.reducer: rows for request, rows in outputs(ALL).items()}
    for reducer, features in whole.items():
        np.testing.assert_allclose(features, direct[reducer], atol=1e-5)


def test_images_left_out_change_no_draw(tmp_path):
    whole, _ = extract(tmp_path / "whole", 3)
    parts, _ = extract(tmp_path / "parts", 3, FakeSplit(7, bad=[0, 4]), bad_images="skip")
    for reducer, features in whole.items():
        np.testing.assert_array_equal(parts[reducer], np.delete(features, [0, 4], axis=0))


def features_of_a_rank(folder, batch_size):
    from ibot_eval import distributed

    distributed.init("cpu")
    try:
        return {reducer: features.tolist() for reducer, features in extract(folder, batch_size)[0].items()}
    finally:
        distributed.shutdown()


def test_ranks_change_no_draw(tmp_path):
    whole, _ = extract(tmp_path / "one", 3)
    for features in run_ranks(2, features_of_a_rank, str(tmp_path / "two"), 2):
        for reducer, rows in whole.items():
            np.testing.assert_array_equal(np.asarray(features[reducer], np.float32), rows)
