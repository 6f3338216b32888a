"""The demonstration checkpoint that ships: what it says about itself, and that it learnt the digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score

import ibot_eval
from ibot_eval import cli, recipes
from ibot_eval.data.arrays import open_demo
from ibot_eval.data.transforms import eval_transform
from ibot_eval.export import own_metadata
from ibot_eval.layouts.named import DEMO_FILE
from ibot_eval.settings import DataSettings
from pretrain.command import Pretrain
from pretrain.config import MAY_CHANGE


def test_it_is_small_and_tells_the_recipe_that_made_it() -> None:
    assert DEMO_FILE.stat().st_size < 2_000_000
    about = own_metadata(DEMO_FILE)
    assert about["role"] == "teacher"
    settings = cli.parse(Pretrain, recipes.flags(recipes.find("pretrain/digits")), "pretrain").flat()
    assert about["recipe"] == {n: v for n, v in settings.items() if n not in MAY_CHANGE or n == "data"}
    assert about["recipe"]["seed"] == 0


def test_it_beats_raw_pixels_where_they_are_weak(tmp_path: Path) -> None:
    """k-means NMI above 0.85 (raw pixels: 0.74), and k-NN above what raw pixels reach."""
    data = open_demo(["train", "test"])
    backbone = ibot_eval.load_backbone("demo")
    transform = eval_transform(DataSettings(data="demo"), backbone)
    splits = [data.splits["train"], data.splits["test"]]
    images = torch.stack([transform(split.load(i)) for split in splits for i in range(len(split))])
    with torch.inference_mode():
        features = backbone.outputs(transform.normalize(images)).blocks[-1].cls.numpy()
    labels = np.concatenate([split.labels for split in splits])
    pixels = np.stack([np.asarray(split.load(i))[..., 0].ravel() for split in splits for i in range(len(split))])
    scores = []
    for rows in (features, pixels.astype(np.float32)):
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        clusters = KMeans(10, n_init=5, random_state=0).fit_predict(rows)
        scores.append(normalized_mutual_info_score(labels, clusters))
    assert scores[1] < 0.8 < 0.85 < scores[0]
    record = ibot_eval.evaluate("demo", "knn", "demo", k=(20,), output=tmp_path)
    top1 = next(metric["value"] for metric in record.metrics if metric["name"] == "top1")
    assert top1 > 97.5
