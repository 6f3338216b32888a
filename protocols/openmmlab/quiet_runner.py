"""mmengine's runner without what it would print, write and wait for, since ours is the loop."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.hooks import RuntimeInfoHook
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from mmengine.visualization import Visualizer
from torch import nn

from ibot_eval import distributed
from ibot_eval.training.random_states import seed_generators
from protocols.openmmlab.configuration import FILE, explain_failure
from protocols.openmmlab.parallel import spread

LOG = "mmengine.log"
"""In the run's folder: what mmengine, mmdet and mmsegmentation have to say."""

_numbers = itertools.count()


class RuntimeInfo(RuntimeInfoHook):
    """Tells mmengine's parts the iteration, but not the losses: each of them would wait for the device."""

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Nothing."""


class QuietRunner(Runner):
    """Builds what a configuration names, calls hooks, and leaves the console, checkpoints and the device to us.

    Args:
        cfg: a configuration; its loops, seed, log, checkpoint and visualisation settings are not used.
        folder: of the run.
        device: of this process.
        seed: of first weights.
        training: build what training needs.
    """

    def __init__(self, cfg: Config, folder: Path, device: torch.device, seed: int, *, training: bool) -> None:
        self._folder, self._place, self._first_seed = folder, device, seed
        trains: dict[str, Any] = {}
        if training:
            trains = {
                "train_dataloader": cfg.train_dataloader,
                "train_cfg": {"by_epoch": False, "max_iters": 1},
                "optim_wrapper": cfg.optim_wrapper,
                "param_scheduler": cfg.get("param_scheduler"),
                "custom_hooks": cfg.get("custom_hooks"),
                "auto_scale_lr": cfg.get("auto_scale_lr"),
            }
        super().__init__(
            model=cfg.model,
            work_dir=str(folder),
            default_hooks=_default_hooks(cfg.get("default_hooks") or {}),
            data_preprocessor=cfg.get("data_preprocessor"),
            # The group is there already, as the core has made it.
            launcher="none" if distributed.world_size() == 1 else "pytorch",
            env_cfg=cfg.get("env_cfg") or {},
            log_level=cfg.get("log_level") or "INFO",
            default_scope=cfg.get("default_scope") or "mmengine",
            randomness={
                "seed": seed % (1 << 32),
                "deterministic": bool((cfg.get("randomness") or {}).get("deterministic", False)),
            },
            # Things of the same name share their state.
            experiment_name=f"ibot-eval-{next(_numbers)}",
            cfg=cfg,
            **trains,
        )

    def build_logger(self, log_level: int | str = "INFO", log_file: str | None = None, **kwargs: Any) -> MMLogger:
        """The log of rank 0, in a file only."""
        # The parent has made a folder for it.
        with suppress(OSError):
            Path(self._log_dir).rmdir()
        self._log_dir = str(self._folder)
        log: Any = MMLogger.get_instance(
            self._experiment_name, log_file=str(self._folder / LOG), log_level=log_level, file_mode="a"
        )
        log.handlers = [handler for handler in log.handlers if hasattr(handler, "baseFilename")]
        return log

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Raises ConfigError for one that cannot be built."""
        with explain_failure(self._folder / FILE):
            return super().build_optim_wrapper(optim_wrapper)

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Raises ConfigError for one that cannot be built."""
        with explain_failure(self._folder / FILE):
            return super().build_param_scheduler(scheduler)

    def build_visualizer(self, visualizer: Any = None) -> Visualizer:
        """One that writes nothing."""
        return Visualizer.get_instance(self._experiment_name, vis_backends=None, save_dir=None)

    def wrap_model(self, model_wrapper_cfg: Mapping[str, Any] | None, model: nn.Module) -> nn.Module:
        """On the session's device, which need not be the one that mmengine would choose."""
        unused = bool((model_wrapper_cfg or self.cfg).get("find_unused_parameters", False))
        return spread(model, self._place, find_unused_parameters=unused)

    def dump_config(self) -> None:
        """Nothing: the configuration was written before."""

    def _log_env(self, env_cfg: Mapping[str, Any]) -> None:
        self.logger.info(f"configuration:\n{self.cfg.pretty_text}")

    def _init_model_weights(self) -> None:
        # Whatever was drawn while the data set was built.
        seed_generators(self._first_seed)
        super()._init_model_weights()

    def load_or_resume(self) -> None:
        """Where mmengine would load a checkpoint, with weights made and the optimiser built."""
        self.train_loop.restore()  # type: ignore[attr-defined]


def _default_hooks(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the configuration, but for what the loop does itself."""
    others = {name: hook for name, hook in asked.items() if name not in ("visualization", "checkpoint")}
    return {**others, "runtime_info": RuntimeInfo(), "timer": None, "logger": None, "checkpoint": None}
