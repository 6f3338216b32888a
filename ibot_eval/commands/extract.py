"""Write a checkpoint's features and labels to a file for use elsewhere."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ibot_eval.errors import ConfigError
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, RunSettings

if TYPE_CHECKING:
    import numpy as np

    from ibot_eval.features import FeatureBank


@dataclass(frozen=True)
class Extract:
    """Write features of one split as .safetensors or .npz: features, labels, and the images' names."""

    out: Path | None = None
    """File to write; its ending chooses the format."""
    split: Literal["train", "test"] = "test"
    """Which of the two splits."""
    blocks: tuple[int, ...] = (-1,)
    """Blocks whose outputs are concatenated; negative ones count from the last."""
    norm: Literal["published", "final", "none"] = "published"
    """Whether the network's last norm is applied to each block."""
    reducer: str = "cls"
    """cls, patch_mean, norm_patch_mean, gem:P, topk:K, norm_topk:K, norm_bottomk:K, norm_randomk:K, head_argmax or
    patches."""
    overwrite: bool = False
    """Replace the file if it exists."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    data: DataSettings = field(default_factory=DataSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        if self.out is None or self.out.suffix not in (".safetensors", ".npz"):
            raise ConfigError(
                "--out is missing" if self.out is None else f"{self.out} has an unknown ending",
                todo="name a file that ends in .safetensors or .npz: --out features.safetensors",
            )
        try:
            # Found out now, and not after hours of extraction.
            if self.out.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            tempfile.TemporaryFile(dir=self.out.parent).close()
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.out}: {error.strerror}",
                todo="name a file in a folder that exists and can be written",
            ) from None
        if self.out.exists() and not self.overwrite:
            raise ConfigError(f"{self.out} exists already", todo="choose another name, or add --overwrite")
        from ibot_eval import distributed, runner
        from ibot_eval.cache import BankCache
        from ibot_eval.data.opening import open_data
        from ibot_eval.data.transforms import eval_transform
        from ibot_eval.features import FeatureRequest, compose

        settings = runner.with_defaults(RunSettings(checkpoint=self.checkpoint, data=self.data, engine=self.engine))
        requests = [FeatureRequest(self.split, block, self.norm, self.reducer) for block in self.blocks]
        if not requests or len(set(requests)) < len(requests):
            raise ConfigError(f"--blocks {self.blocks}: name each block once, and at least one")
        device = distributed.init(settings.engine.device)
        try:
            cache = BankCache(settings.engine.cache)
            loaded = runner.load_any(settings.checkpoint, cache, settings.engine.seed)
            loaded.backbone.to(device)
            data = open_data(settings.data, roles=(self.split,), labelled=False)
            transform = eval_transform(settings.data, loaded.backbone)
            runner.say([*loaded.report.notes, *(f"warning: {w}" for w in data.warnings)])
            banks, _ = runner.extract(requests, loaded, data, transform, cache, settings, device)
            if distributed.is_main():
                features = compose(banks, requests)
                _write(self.out, banks[requests[0]], features, data.class_names)
                print(f"{self.out}: {len(features):,} images, features {tuple(features.shape[1:])} {features.dtype}")
        finally:
            distributed.shutdown()
        return 0


def _write(out: Path, bank: FeatureBank, features: np.ndarray, class_names: tuple[str, ...]) -> None:
    import io
    import json

    import numpy as np
    from safetensors.numpy import save

    from ibot_eval.files import atomic_write_bytes

    image_ids = list(bank.image_ids)
    arrays: dict[str, Any] = {"features": np.ascontiguousarray(features), "labels": np.ascontiguousarray(bank.labels)}
    if out.suffix == ".npz":
        buffer = io.BytesIO()
        arrays |= {"image_ids": np.asarray(image_ids, np.str_), "class_names": np.asarray(class_names, np.str_)}
        np.savez(buffer, **arrays)
        atomic_write_bytes(out, buffer.getvalue())
        return
    metadata = {"image_ids": json.dumps(image_ids), "class_names": json.dumps(list(class_names))}
    atomic_write_bytes(out, save(arrays, metadata=metadata))
