"""Pre-train an iBOT teacher on images: student, moving-average teacher, [CLS] and masked-patch losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain.config import PretrainSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.record import EvalRecord


@dataclass(frozen=True)
class Pretrain(PretrainSettings):
    """Train an iBOT teacher on images, no labels needed. The run's folder is a checkpoint for every protocol
    (--ckpt runs/NAME)."""

    recipe: str | None = None
    """Name of a recipe that ships with ibot-eval (ibot-eval list shows them) or path of a YAML file. Flags win."""

    def run(self) -> int:
        from ibot_eval import distributed
        from pretrain.report import summary
        from pretrain.run import run

        try:
            record = run(self)
            if distributed.is_main():
                assert record.folder is not None  # it was saved
                print(record.as_json() if self.output.json else summary(record, record.folder))
        finally:
            distributed.shutdown()
        # As shells tell of a process that a signal ended.
        numbers = {"SIGINT": 130, "SIGTERM": 143}
        return numbers.get((record.error or {}).get("kind", ""), 0)

    @classmethod
    def figures(cls, *records: EvalRecord) -> dict[str, Figure]:
        """For ``ibot-eval plot``: the training curves of one or several runs."""
        from pretrain.curves import figures

        return figures(*records)
