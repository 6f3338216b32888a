"""Classifiers trained on frozen features: what linear, logistic, low-shot and part-wise protocols share."""
