"""Pre-train an iBOT teacher on images: student, moving-average teacher, [CLS] and masked-patch losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ibot_eval.settings import DataSettings
from pretrain.config import (
    CropSettings,
    HeadSettings,
    MaskSettings,
    NetworkSettings,
    ObjectiveSettings,
    OptimiserSettings,
    PretrainEngine,
    PretrainOutput,
    PretrainSettings,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ibot_eval.record import EvalRecord


@dataclass(frozen=True)
class Pretrain:
    """Train an iBOT teacher on images, no labels needed.

    The run's folder is a checkpoint for every protocol: ibot-eval knn --ckpt runs/NAME --data …"""

    recipe: str | None = None
    """Name of a recipe that ships with ibot-eval (ibot-eval list shows them) or path of a YAML file. Flags win."""
    network: NetworkSettings = field(default_factory=NetworkSettings)
    head: HeadSettings = field(default_factory=HeadSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    masks: MaskSettings = field(default_factory=MaskSettings)
    crops: CropSettings = field(default_factory=CropSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    data: DataSettings = field(default_factory=DataSettings)
    engine: PretrainEngine = field(default_factory=PretrainEngine)
    output: PretrainOutput = field(default_factory=PretrainOutput)

    def settings(self) -> PretrainSettings:
        """Without the recipe, which has become flags."""
        names = ("network", "head", "objective", "masks", "crops", "optimiser", "data", "engine", "output")
        return PretrainSettings(**{name: getattr(self, name) for name in names})

    def run(self) -> int:
        from ibot_eval import distributed
        from pretrain.report import summary
        from pretrain.run import run

        try:
            record = run(self.settings())
            if distributed.is_main():
                folder = self.output.output / record.run
                print(record.as_json() if self.output.json else summary(record, folder))
        finally:
            distributed.shutdown()
        return 143 if (record.error or {}).get("kind") == "Interrupted" else 0

    @classmethod
    def figures(cls, *records: EvalRecord) -> dict[str, Figure]:
        """For ``ibot-eval plot``: the training curves of one or several runs."""
        from pretrain.curves import figures

        return figures(*records)
