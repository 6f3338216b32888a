"""Find what each prototype of a checkpoint stands for in a data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ibot_eval.errors import ConfigError
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, RunSettings


@dataclass(frozen=True)
class Patterns:
    """Run all patches of a split through the projection head (k-means where there is none) and keep, per prototype, a
    count and the most confident patches: the bank that `ibot-eval draw patterns` and the app open."""

    output: Path = Path("patterns.safetensors")
    """File to write, ending in .safetensors."""
    split: Literal["train", "test"] = "test"
    """Which of the two splits."""
    level: Literal["patch", "cls"] = "patch"
    """Patches, or whole images by their [CLS] token."""
    top: int = 72
    """Items kept of each prototype. A layout shows 36, and skips near-black ones."""
    k: int = 256
    """Prototypes of k-means, for a checkpoint without a projection head."""
    overwrite: bool = False
    """Replace the file if it exists."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    data: DataSettings = field(default_factory=DataSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        if self.output.suffix != ".safetensors":
            raise ConfigError(
                f"--output {self.output} has an unknown ending", todo="name a file that ends in .safetensors"
            )
        if self.output.is_dir():
            raise ConfigError(f"{self.output} is a folder", todo="name a file")
        if self.output.exists() and not self.overwrite:
            raise ConfigError(f"{self.output} exists already", todo="choose another name, or add --overwrite")
        from ibot_eval import distributed, runner
        from ibot_eval.cache import BankCache
        from ibot_eval.visual.pattern_bank import save_bank
        from ibot_eval.visual.pattern_making import make

        settings = runner.with_defaults(RunSettings(checkpoint=self.checkpoint, data=self.data, engine=self.engine))
        device = distributed.init(settings.engine.device)
        try:
            loaded = distributed.everywhere(
                lambda: runner.load_any(settings.checkpoint, BankCache(settings.engine.cache), settings.engine.seed)
            )
            loaded.backbone.to(device)
            runner.say(loaded.report.notes)
            self.output.parent.mkdir(parents=True, exist_ok=True)
            share = f"{distributed.rank()}-of-{distributed.world_size()}"
            progress = self.output.with_name(f".{self.output.name}.partial-{share}")
            bank = make(
                loaded,
                settings.data,
                device,
                engine=settings.engine,
                split=self.split,
                level=self.level,
                top=self.top,
                k=self.k,
                progress_file=progress,
            )
            runner.say(bank.about["notes"])
            distributed.from_main(lambda: save_bank(bank, self.output))
            progress.unlink(missing_ok=True)
            if distributed.is_main():
                used = int((bank.counts > 0).sum())
                skipped = len(bank.about["data"]["skipped"])
                print(
                    f"{self.output}: {int(bank.counts.sum()):,} {bank.items} of "
                    f"{bank.about['data']['images'] - skipped:,} images, {used:,} of {len(bank):,} prototypes used "
                    f"({bank.about['prototypes']}), {bank.about['seconds']} s"
                )
        finally:
            distributed.shutdown()
        return 0
