"""How well clusters agree with classes, whatever the clusters are called and however many there are."""

from __future__ import annotations

import numpy as np


def nmi(labels: np.ndarray, clusters: np.ndarray) -> float:
    """Normalised mutual information in percent: mutual information over the mean of the two entropies.

    scikit-learn's, with its arithmetic mean. A single cluster gives 0 where there are several classes.

    Args:
        labels: (n,) integers, the class of each sample.
        clusters: (n,) integers, the cluster of each sample; as many or as few different ones as they like.

    Raises:
        ValueError: no samples, arrays of different lengths, or numbers that are not integers.
    """
    from sklearn.metrics import normalized_mutual_info_score

    return 100 * float(normalized_mutual_info_score(*_checked(labels, clusters)))


def ari(labels: np.ndarray, clusters: np.ndarray) -> float:
    """Adjusted Rand index in percent: 0 for chance (and below it for worse), 100 for the same partition.

    Hubert and Arabie 1985, by scikit-learn; arguments and errors as in :func:`nmi`.
    """
    from sklearn.metrics import adjusted_rand_score

    return 100 * float(adjusted_rand_score(*_checked(labels, clusters)))


def fmi(labels: np.ndarray, clusters: np.ndarray) -> float:
    """Fowlkes-Mallows index in percent: geometric mean of the precision and recall of pairs in one cluster.

    By scikit-learn; arguments and errors as in :func:`nmi`. Unlike the others it is far above 0 for a single cluster.
    """
    from sklearn.metrics import fowlkes_mallows_score

    return 100 * float(fowlkes_mallows_score(*_checked(labels, clusters)))


def clustering_accuracy(labels: np.ndarray, clusters: np.ndarray) -> float:
    """Percent of the samples that are right when each cluster is given the class that suits the whole best.

    The assignment is one to one (Hungarian method, Kuhn 1955, by scipy). With more clusters than classes the samples of
    those left over count as wrong; with fewer, those of the classes left over do.

    Arguments and errors as in :func:`nmi`.
    """
    from scipy.optimize import linear_sum_assignment
    from sklearn.metrics.cluster import contingency_matrix

    labels, clusters = _checked(labels, clusters)
    counts = contingency_matrix(labels, clusters)
    matched = linear_sum_assignment(counts, maximize=True)
    return 100 * int(counts[matched].sum()) / len(labels)


def _checked(labels: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pair = np.asarray(labels), np.asarray(clusters)
    if any(array.ndim != 1 for array in pair) or len(pair[0]) != len(pair[1]):
        raise ValueError(f"labels and clusters must be (n,) each: {pair[0].shape} and {pair[1].shape}")
    if not len(pair[0]):
        raise ValueError("agreement of no samples")
    if any(array.dtype.kind not in "iub" for array in pair):
        raise ValueError(f"labels and clusters must be integers: {pair[0].dtype} and {pair[1].dtype}")
    return pair
