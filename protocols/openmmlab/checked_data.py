"""Annotated data of a run, checked before a GPU-hour is spent. Imports no mm*."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ibot_eval import distributed
from ibot_eval.data.annotated import AnnotatedSplit
from ibot_eval.data.headers import check_decodable
from ibot_eval.recording import say

if TYPE_CHECKING:
    from ibot_eval.data.annotation_report import Report
    from ibot_eval.data.splits import Data
    from ibot_eval.settings import DataSettings

Check = Callable[["Data"], "Report"]
"""What there is to say of the annotations."""


def checked(data: Data, settings: DataSettings, check: Check) -> Data:
    """``data`` with the notes of the check, and without the test images that cannot be decoded; says what there is.

    A collective: one process reads the head of every image and decodes those of the test.

    Raises:
        DataError: annotations that cannot be trained on, or test images that cannot be decoded, unless ``settings``
            skip them.
    """
    report, broken = distributed.from_main(lambda: _look(data, settings, check))
    report.stop_at_errors(str(settings.data))
    say([report.overview()])
    data.warnings += report.notes
    test = data.splits["test"]
    data.splits["test"] = test.take([index for index in range(len(test)) if index not in broken])
    return data


def said_of(data: Data, settings: DataSettings, check: Check) -> str:
    """All that the check has to say. Raises DataError, which says it too, as :func:`checked`."""
    report, _ = _look(data, settings, check)
    report.stop_at_errors(str(settings.data), whole=True)
    return report.text()


def _look(data: Data, settings: DataSettings, check: Check) -> tuple[Report, frozenset[int]]:
    test = data.splits["test"]
    assert isinstance(test, AnnotatedSplit)
    decoded, broken = check_decodable(test, settings.bad_images)
    return check(data) + decoded, broken
