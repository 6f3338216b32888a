"""Mean IoU and its kin against a plain second loop, against mmseg, and against resampled images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ibot_eval.metrics.regions import count_pixels, region_intervals, region_scores

IGNORE = 255


def maps(images: int = 6, classes: int = 5, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of predicted and true maps of several sizes; class 4 is never labelled, class 3 in one image only."""
    generator = np.random.default_rng(seed)
    pairs = []
    for i in range(images):
        size = (7 + i, 9)
        label = generator.integers(0, 3, size)
        if i == 2:
            label[:3] = 3
        label[generator.random(size) < 0.1] = IGNORE
        predicted = np.where(generator.random(size) < 0.6, label, generator.integers(0, classes, size))
        predicted[predicted == IGNORE] = 1
        pairs.append((predicted.astype(np.uint8), label.astype(np.uint8)))
    return pairs


def counts(pairs: list[tuple[np.ndarray, np.ndarray]], classes: int = 5) -> np.ndarray:
    return np.stack([count_pixels(predicted, label, classes, IGNORE) for predicted, label in pairs])


def plain(pairs: list[tuple[np.ndarray, np.ndarray]], classes: int) -> dict[str, Any]:
    """All pixels of all images, one by one."""
    right, all_predicted, all_labelled = [0] * classes, [0] * classes, [0] * classes
    for predicted, label in pairs:
        for p, t in zip(predicted.ravel().tolist(), label.ravel().tolist(), strict=True):
            if t == IGNORE:
                continue
            all_predicted[p] += 1
            all_labelled[t] += 1
            right[t] += p == t
    ious, accuracies = {}, {}
    for c in range(classes):
        union = all_predicted[c] + all_labelled[c] - right[c]
        if union:
            ious[c] = 100 * right[c] / union
        if all_labelled[c]:
            accuracies[c] = 100 * right[c] / all_labelled[c]
    return {
        "iou": ious,
        "miou": sum(ious.values()) / len(ious),
        "macc": sum(accuracies.values()) / len(accuracies),
        "aacc": 100 * sum(right) / sum(all_labelled),
    }


def test_a_map_by_hand() -> None:
    """Right are 2 of three pixels of class 0 and the one of class 1; one ignored."""
    predicted, label = np.array([[0, 0, 1], [1, 2, 0]]), np.array([[0, 0, 0], [1, IGNORE, 0]])
    got = count_pixels(predicted, label, 4, IGNORE)
    np.testing.assert_array_equal(got, [[3, 1, 0, 0], [3, 2, 0, 0], [4, 1, 0, 0]])
    scores = region_scores(got)
    np.testing.assert_allclose(scores.iou, [75, 50, np.nan, np.nan])
    np.testing.assert_allclose(scores.accuracy, [75, 100, np.nan, np.nan])
    assert (scores.miou, scores.macc, scores.aacc) == (62.5, 87.5, 80)


def test_scores_equal_a_plain_loop() -> None:
    pairs = maps()
    scores, expected = region_scores(counts(pairs).sum(0)), plain(pairs, 5)
    assert {c: float(scores.iou[c]) for c in range(5)} == pytest.approx(expected["iou"])
    for name in ("miou", "macc", "aacc"):
        assert float(getattr(scores, name)) == pytest.approx(expected[name]), name
    # Class 4 is predicted but nowhere true: an IoU of 0, and no accuracy.
    assert scores.iou[4] == 0
    assert np.isnan(scores.accuracy[4])


def test_scores_equal_those_of_mmseg() -> None:
    from tests import dense

    dense.prepared()
    from mmseg.evaluation.metrics import IoUMetric

    pairs = maps(classes=6)
    areas = [
        IoUMetric.intersect_and_union(
            torch.from_numpy(p.astype(np.int64)), torch.from_numpy(t.astype(np.int64)), 6, 255
        )
        for p, t in pairs
    ]
    whole: list[Any] = [sum(area) for area in zip(*areas, strict=True)]
    theirs = IoUMetric.total_area_to_metrics(*whole)
    ours = region_scores(counts(pairs, 6).sum(0))
    np.testing.assert_allclose(ours.iou, 100 * theirs["IoU"], rtol=1e-5)
    np.testing.assert_allclose(ours.accuracy, 100 * theirs["Acc"], rtol=1e-5)
    np.testing.assert_allclose(ours.aacc, 100 * theirs["aAcc"], rtol=1e-5)
    np.testing.assert_allclose(ours.miou, 100 * np.nanmean(theirs["IoU"]), rtol=1e-5)


def test_absent_classes_do_not_move_the_means() -> None:
    pairs = maps()
    few, many = region_scores(counts(pairs, 5).sum(0)), region_scores(counts(pairs, 9).sum(0))
    assert (few.miou, few.macc, few.aacc) == (many.miou, many.macc, many.aacc)
    assert np.isnan(many.iou[5:]).all()


def test_no_labelled_pixel_gives_nan() -> None:
    label = np.full((3, 3), IGNORE)
    scores = region_scores(count_pixels(np.zeros((3, 3), int), label, 2, IGNORE))
    assert np.isnan([scores.miou, scores.macc, scores.aacc]).all()


def test_intervals_are_those_of_resampled_images() -> None:
    """The same resamples, drawn image by image."""
    table = counts(maps(8))
    got = region_intervals(table, resamples=150, seed=3)
    generator = np.random.default_rng(3)
    n = len(table)
    times = np.concatenate([generator.multinomial(n, np.full(n, 1 / n), size=size) for size in (100, 50)])
    values = []
    for row in times:
        drawn = np.repeat(np.arange(n), row)
        values.append(region_scores(table[drawn].sum(0)))
    for name in ("miou", "macc", "aacc"):
        expected = np.percentile([float(getattr(v, name)) for v in values], [2.5, 97.5])
        np.testing.assert_allclose(got[name], expected)
    # Class 3 has pixels in one image only, which many resamples lack.
    expected = np.nanpercentile([v.iou[3] for v in values], [2.5, 97.5])
    np.testing.assert_allclose(got["iou"][:, 3], expected)
    low, high = got["miou"]
    assert low < region_scores(table.sum(0)).miou < high


def test_one_image_has_an_interval_without_width() -> None:
    table = counts(maps(1))
    low, high = region_intervals(table, resamples=10)["miou"]
    assert low == high == pytest.approx(float(region_scores(table[0]).miou))


@pytest.mark.parametrize(
    ("predicted", "label", "said"),
    [
        (np.zeros((2, 3), int), np.zeros((3, 2), int), "not of one image"),
        (np.zeros((2, 2), int), np.full((2, 2), 7), "7 to 7"),
        (np.full((2, 2), 3), np.zeros((2, 2), int), "3 to 3"),
        (np.full((2, 2), -1), np.zeros((2, 2), int), "-1 to -1"),
    ],
)
def test_maps_that_do_not_fit_are_refused(predicted: np.ndarray, label: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        count_pixels(predicted, label, 3, IGNORE)


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="of 0 images"):
        region_intervals(np.zeros((0, 3, 2), int))
