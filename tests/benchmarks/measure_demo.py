"""What the demonstration checkpoint learnt from the digits, against raw pixels: k-means NMI, and k-NN from few labels.

    python tests/benchmarks/measure_demo.py [--ckpt demo]

Both are computed on l2-normalised features of the [CLS] token: k-means (scikit-learn, K = 10, best of 20 starts) on the
test split and on all images, NMI with the arithmetic mean; and 5-NN by the protocol's weighted vote from 10 labelled
train images per class, mean and deviation over 20 draws, on the test split.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.cluster import KMeans

from ibot_eval.api import load_backbone
from ibot_eval.data.arrays import open_demo
from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import eval_transform
from ibot_eval.metrics.clustering import nmi
from ibot_eval.metrics.votes import cumulative_votes
from ibot_eval.neighbors import search
from ibot_eval.settings import DataSettings

DRAWS, PER_CLASS, K = 20, 10, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", default="demo")
    arguments = parser.parse_args()
    train, test = (open_demo(["train", "test"]).splits[role] for role in ("train", "test"))
    backbone = load_backbone(arguments.ckpt)
    transform = eval_transform(DataSettings(data="demo"), backbone)

    def tokens(split: ImageSplit) -> np.ndarray:
        images = torch.stack([transform(split.load(i)) for i in range(len(split))])
        with torch.inference_mode():
            return backbone.outputs(transform.normalize(images)).blocks[-1].cls.numpy()

    def pixels(split: ImageSplit) -> np.ndarray:
        grey = [np.asarray(split.load(i))[..., 0] for i in range(len(split))]
        return np.stack(grey).reshape(len(split), -1).astype(np.float32)

    labels = train.labels, test.labels
    print(f"{'features':<14}{'NMI test':>10}{'NMI all':>10}{'5-NN, 10 labels per class':>30}")
    for name, features in (("raw pixels", pixels), (arguments.ckpt[-13:], tokens)):
        print(row(name, normalised(features(train)), normalised(features(test)), *labels))


def normalised(features: np.ndarray) -> np.ndarray:
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def row(name: str, train: np.ndarray, test: np.ndarray, train_labels: np.ndarray, test_labels: np.ndarray) -> str:
    whole, whole_labels = np.concatenate([train, test]), np.concatenate([train_labels, test_labels])
    scores = []
    for features, labels in ((test, test_labels), (whole, whole_labels)):
        clusters = KMeans(10, n_init=20, random_state=0).fit_predict(features)
        scores.append(nmi(labels, clusters))
    few = []
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        chosen = np.concatenate(
            [rng.choice(np.flatnonzero(train_labels == label), PER_CLASS, replace=False) for label in range(10)]
        )
        similarities, indices = search(test, train[chosen], K)
        votes_for = torch.from_numpy(train_labels[chosen][indices])
        (votes,) = cumulative_votes(torch.from_numpy(similarities), votes_for, [K], 0.07, 10)
        few.append(100 * float((votes.argmax(1).numpy() == test_labels).mean()))
    return f"{name:<14}{scores[0]:>10.1f}{scores[1]:>10.1f}{np.mean(few):>22.1f} ± {np.std(few):.1f} %"


if __name__ == "__main__":
    main()
