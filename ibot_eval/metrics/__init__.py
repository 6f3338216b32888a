"""Metrics: pure functions of predictions and labels. Percent, never fractions."""
