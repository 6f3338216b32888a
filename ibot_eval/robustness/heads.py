"""What records and readers are told about the classifier of damaged images."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ibot_eval.robustness.classifier import Classifier


def head_params(classifier: Classifier) -> dict[str, Any]:
    """For metrics' params: who classifies, and how neighbours vote. Files are named in the record's settings."""
    return {name: classifier.about[name] for name in ("head", "k", "temperature") if name in classifier.about}


def head_notes(classifier: Classifier, asked: Set[str]) -> list[str]:
    """Warnings of the classifier itself, and of settings given by hand that it does not use.

    Args:
        asked: names of the settings that were given by hand.
    """
    unused = [f"--{name}" for name in ("k", "temperature") if name in asked and name not in classifier.about]
    return [*classifier.warnings, *([f"{', '.join(unused)}: no effect, since no neighbours vote"] if unused else [])]
