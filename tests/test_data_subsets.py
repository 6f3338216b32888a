"""ibot_eval.data.subsets: what is drawn from each class, and lists of images as people write them."""

from __future__ import annotations

import hashlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ibot_eval.data import subsets
from ibot_eval.data.subsets import (
    KNOWN_LISTS,
    KnownList,
    LabelSubset,
    altered,
    fraction,
    identify,
    listed,
    per_class,
)
from ibot_eval.errors import ConfigError, DataError

IDS = ["train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "train/dog/b.c.JPEG", "train/dog/odd", "train/e/2.jpg"]


def _sizes(labels, rows):
    return {int(c): int((labels[rows] == c).sum()) for c in np.unique(labels)}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_each_class_gives_its_share(data):
    sizes = data.draw(st.dictionaries(st.integers(0, 50), st.integers(1, 60), min_size=1, max_size=8))
    labels = np.repeat(list(sizes), list(sizes.values()))
    np.random.default_rng(data.draw(st.integers(0, 99))).shuffle(labels)
    n, percent = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 1000)) / 10
    rows = per_class(labels, n, seed=3)
    assert np.all(np.diff(rows) > 0), "ascending, none twice"
    assert _sizes(labels, rows) == {c: min(n, size) for c, size in sizes.items()}
    rows = fraction(labels, percent / 100, seed=3)
    assert np.all(np.diff(rows) > 0)
    exact = Fraction(str(percent)) / 100
    assert _sizes(labels, rows) == {c: max(1, math.floor(exact * s + Fraction(1, 2))) for c, s in sizes.items()}


def test_every_image_of_a_class_is_equally_likely():
    labels = np.repeat([0, 1], [10, 30])
    times = np.zeros(40)
    for draw in range(1000):
        times[per_class(labels, 3, seed=0, draw=draw)] += 1
    expected = np.repeat([300, 100], [10, 30])
    # Ten standard deviations of a binomial would be a fault of the draw, not of chance.
    assert np.all(np.abs(times - expected) < 10 * np.sqrt(expected))
    assert times.std() > 0


def test_draws_and_seeds_differ_and_repeat():
    labels = np.arange(300) % 3
    drawn = [tuple(per_class(labels, 5, seed, draw)) for seed in (0, 1, 2**62) for draw in (0, 1, 2)]
    assert len(set(drawn)) == 9
    assert drawn[4] == tuple(per_class(labels, 5, 1, 1))
    assert tuple(per_class(labels, 5, 0)) == drawn[0], "the first draw is number 0"


def test_a_class_is_drawn_whatever_the_others_are_and_smaller_subsets_lie_within_larger_ones():
    labels = np.repeat([4, 7, 9], [20, 30, 40])
    for draw in range(3):
        whole = [set(per_class(labels, n, 5, draw).tolist()) for n in (1, 4, 20)]
        shares = [set(fraction(labels, share, 5, draw).tolist()) for share in (0.01, 0.1, 0.5, 1)]
        for sets in (whole, shares):
            assert all(a < b for a, b in itertools.pairwise(sets))
        alone = per_class(labels[20:50], 4, 5, draw) + 20
        np.testing.assert_array_equal(alone, [r for r in per_class(labels, 4, 5, draw) if 20 <= r < 50])


def _file(tmp_path, text, name="list.txt"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("train/cat/1.png\ntrain/dog/1.png\n", [0, 2]),
        ("dog/1.png\r\n\r\ncat/1.png", [0, 2]),
        ("\ufeff# chosen by hand\n./cat/2.png\n  dog\\odd  \n", [1, 4]),
        ("b.c.JPEG\nodd.png\n", [3, 4]),
        ("b.c\nodd\n", [3, 4]),
        ("2.jpg\n2.png\n", [1, 5]),
        ("/home/me/set/train/e/2\n", [5]),
        ("e/2.png\n", [5]),
    ],
)
def test_lists_as_people_write_them(tmp_path, text, rows):
    assert listed(_file(tmp_path, text), IDS).tolist() == rows


def test_ids_of_shards_have_no_ending(tmp_path):
    ids = [f"imagenet-train-{i % 3:04d}/n01440764_{i}" for i in range(50)]
    assert listed(_file(tmp_path, "n01440764_7.JPEG\nn01440764_40.JPEG\n"), ids).tolist() == [7, 40]


def test_a_whole_id_is_never_ambiguous(tmp_path):
    assert listed(_file(tmp_path, "a.png\n"), ["x/a.png", "a.png", "a.jpg"]).tolist() == [1]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("cat/1.png\ncat/3.png\nbird/2.png\n", ["2 of the 3 images", "'cat/3.png', 'bird/2.png'", "6 images"]),
        ("dog/1.png\nfox/1.png\n", ["1 of the 2 images", "'fox/1.png'", "'train/cat/1.png'"]),
        ("cat/1.png\ndog/1.png\ntrain/cat/1.png\n", ["1 images more than once: 'train/cat/1.png'"]),
        ("cat/1.png,0\ndog/1.png,1\n", ["2 of the 2 images", "'cat/1.png,0'", "and nothing else, in each line"]),
        ("odd\nodd\n", ["'odd'", "more than once"]),
        ("1.png\n", ["'1.png'", "fits 2 images: 'train/cat/1.png', 'train/dog/1.png'"]),
        ("2\n", ["'2'", "'train/cat/2.png', 'train/e/2.jpg'"]),
        ("# nothing\n\n", ["names no image"]),
        ("", ["names no image"]),
        (b"\xff\xfe\x00", ["is not text"]),
    ],
)
def test_faults_of_lists_are_named(tmp_path, text, messages):
    path = _file(tmp_path, text)
    with pytest.raises(DataError) as caught:
        listed(path, IDS)
    for message in [*messages, "list.txt"]:
        assert message in str(caught.value)


def test_a_list_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the list .*nowhere\.txt: No such file"):
        listed(tmp_path / "nowhere.txt", IDS)


def test_the_published_lists_are_known():
    one, ten = KNOWN_LISTS["SimCLR 1%"], KNOWN_LISTS["SimCLR 10%"]
    assert (one.images, ten.images) == (12_811, 128_116)
    assert one.sha256 == "71e82a48ba78252683ae334c4d019ebd5c6e855b9599c1389fbe83eb9549cf17"
    assert ten.sha256 == "6d09de11e7bdaf5b1f3b1f249b6183695f97310cdd20f0c03e7235b6b9392091"


def test_lists_are_recognised_by_their_content(tmp_path, monkeypatch):
    text = "".join(f"n01440764_{i}.JPEG\n" for i in range(30))
    known = KnownList("1percent.txt", hashlib.sha256(text.encode()).hexdigest(), 30)
    monkeypatch.setattr(subsets, "KNOWN_LISTS", {"SimCLR 1%": known})
    for name, content in (("1percent.txt", text), ("mine.txt", text), ("dos.txt", text.replace("\n", "\r\n"))):
        path = _file(tmp_path, content, name)
        assert identify(path) == "SimCLR 1%"
        assert altered(path) is None
    other = text.replace("_7.", "_99.")
    for name, content, likeness in (
        ("1percent.txt", other, "the name 1percent.txt and the 30 images of the SimCLR 1% list"),
        ("1percent.txt", other + "more\n", "the name 1percent.txt of the"),
        ("mine.txt", other, "the 30 images of the SimCLR 1% list"),
    ):
        path = _file(tmp_path, content, name)
        assert identify(path) is None
        warning = altered(path)
        assert warning is not None
        assert likeness in warning
        assert str(path) in warning
    path = _file(tmp_path, other + "more\n", "mine.txt")
    assert (identify(path), altered(path)) == (None, None)


def test_subsets_are_named_as_results_call_them(tmp_path):
    path = _file(tmp_path, "1.png\n", "5")
    for text, name in (("1%", "1%"), ("1.50 %", "1.5%"), ("05", "5"), (str(path), "5")):
        assert LabelSubset.parse(text).name == name
    assert LabelSubset.parse("5").path is None, "a number is a number, ./5 is a file"
    assert LabelSubset.parse(str(path)).path == path
    for text in ("", "%", "0", "0%", "100.1%", "-1", "1.5", "1e2", "nan%", "nowhere.txt", str(tmp_path)):
        with pytest.raises(ConfigError, match="neither a percentage"):
            LabelSubset.parse(text)
    assert identify(_file(tmp_path, "")) is None


def test_a_subset_draws_what_its_name_says(tmp_path):
    labels = np.repeat([0, 1], [40, 20])
    ids = [f"{i}.png" for i in range(60)]
    np.testing.assert_array_equal(LabelSubset.parse("7").rows(labels, ids, 3, 2), per_class(labels, 7, 3, 2))
    np.testing.assert_array_equal(LabelSubset.parse("25%").rows(labels, ids, 3, 2), fraction(labels, 0.25, 3, 2))
    path = _file(tmp_path, "9\n4\n")
    assert LabelSubset.parse(str(path)).rows(labels, ids, 3, 2).tolist() == [4, 9]
