"""Published numbers are found for the right experiment and for no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ibot_eval.published import FAMILY_METHODS, entries, lookup
from tests.conftest import SHARED, needs_shared

KNN = {"data": "ImageNet-1K", "method": "iBOT", "arch": "vit-s/16"}


def test_the_headline_number_is_shown_with_its_source() -> None:
    found = lookup("knn", "top1", **KNN, params={"k": 20}, headline=True)
    assert found == {"value": 75.2, "source": "published iBOT README, model table"}


@pytest.mark.parametrize(
    "changes",
    [{"data": None}, {"data": "CIFAR-10"}, {"method": None}, {"method": "MAE"}, {"arch": "vit-s/8"}, {"arch": None}],
    ids=str,
)
def test_another_experiment_has_no_number(changes: dict[str, Any]) -> None:
    assert lookup("knn", "top1", **(KNN | changes), headline=True) is None


def test_a_number_without_parameters_belongs_to_the_headline_only() -> None:
    assert lookup("knn", "top1", **KNN, params={"k": 200}) is None


def test_a_number_with_parameters_belongs_to_them() -> None:
    one_percent = {"data": "ImageNet-1K 1%", "method": "DINO", "arch": "vit-s/16"}
    values = {k: lookup("knn", "top1", **one_percent, params={"k": k, "T": 0.07}) for k in (10, 20, 50, 100, 200)}
    assert {k: v and v["value"] for k, v in values.items()} == {10: 60.27, 20: 60.84, 50: 61.1, 100: 61.18, 200: 61.26}
    assert lookup("knn", "top1", **one_percent, params={"k": 7}, headline=True) is None
    large = {"data": "ImageNet-1K", "method": "iBOT ImageNet-22K", "arch": "vit-l/16"}
    at_512 = lookup("finetune", "top1", **large, params={"image_size": 512})
    assert at_512 is not None
    assert at_512["value"] == 87.8
    # Also where there is an entry without parameters, which stands first.
    headline = {
        size: lookup("finetune", "top1", **large, params={"image_size": size}, headline=True) for size in (224, 384)
    }
    assert {size: found and found["value"] for size, found in headline.items()} == {224: 86.6, 384: 87.5}


def test_a_number_without_a_size_is_of_the_usual_one() -> None:
    vit_l = {"data": "ImageNet-1K", "method": "iBOT", "arch": "vit-l/16", "headline": True}
    assert lookup("finetune", "top1", **vit_l, params={"image_size": 224}) == lookup("finetune", "top1", **vit_l)
    assert lookup("finetune", "top1", **vit_l) is not None
    assert lookup("finetune", "top1", **vit_l, params={"image_size": 384}) is None


def test_methods_that_checkpoints_tell_are_spelt_as_published() -> None:
    assert set(FAMILY_METHODS.values()) <= {entry["method"] for entry in entries()}


@needs_shared
def test_the_file_is_the_shared_one() -> None:
    assert list(entries()) == json.loads((SHARED / "published.json").read_text())
