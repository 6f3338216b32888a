"""A model on the test data of an mmengine configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from tqdm import tqdm

from ibot_eval import distributed
from ibot_eval.data.loading import explain_worker_death
from ibot_eval.protocol import Session
from protocols.openmmlab.parallel import autocast
from protocols.openmmlab.seeded_data import EvaluationData


class Evaluation:
    """The test data of a configuration and what judges predictions on them.

    Results of a metric are gathered from all ranks in the order of the data, none of them twice, and its
    ``compute_metrics`` is called on rank 0.

    Args:
        cfg: with ``test_dataloader`` and ``test_evaluator``.
        session: of a run.
        precision: of the forward passes: fp32, or bf16 on a GPU.
    """

    def __init__(self, cfg: Config, session: Session, precision: str) -> None:
        self.data = EvaluationData(cfg.test_dataloader, session.seed, distributed.rank(), distributed.world_size())
        self.evaluator: Any = Evaluator(cfg.test_evaluator)
        self.evaluator.dataset_meta = self.data.dataset.metainfo
        self.device, self.precision = session.device, precision
        self.shown = session.progress and distributed.is_main()

    def of(self, model: Any, *, bar: bool = True) -> dict[str, Any]:
        """Results for ``model``, which is then in evaluation mode. A collective.

        Args:
            bar: whether the line for a progress bar is free.
        """
        model.eval()
        distributed.everywhere(lambda: self._predict(model, bar and self.shown))
        results: dict[str, Any] = {}
        for metric in self.evaluator.metrics:
            parts = distributed.gather_objects(list(metric.results))
            metric.results.clear()
            found = distributed.from_main(lambda m=metric, p=parts: m.compute_metrics(self._ordered(p)))
            prefix = f"{metric.prefix}/" if metric.prefix else ""
            results |= {prefix + name: value for name, value in found.items()}
        return results

    @torch.no_grad()
    def try_out(self, model: Any) -> None:
        """Takes the first batch through ``model`` and forgets it, so that settings which do not work in testing are
        found before hours of training. A collective; leaves ``model`` in the mode that it was in."""
        training = model.training
        model.eval()

        def first() -> None:
            with explain_worker_death(), closing(self.data.batches()) as batches, autocast(self.precision, self.device):
                for batch in batches:
                    model.test_step(batch)
                    return

        distributed.everywhere(first)
        model.train(training)

    @torch.no_grad()
    def _predict(self, model: Any, shown: bool) -> None:
        bar = tqdm(total=len(self.data.indices), desc="testing", unit="image", leave=False, disable=not shown)
        with explain_worker_death(), bar:
            for batch in self.data.batches():
                with autocast(self.precision, self.device):
                    outputs = model.test_step(batch)
                self.evaluator.process(data_samples=outputs, data_batch=batch)
                bar.update(len(outputs))

    def _ordered(self, parts: list[list[Any]]) -> list[Any]:
        """Results of all ranks as one process would have them, if a metric keeps one for each image."""
        images, world = len(self.data.dataset), self.data.world_size
        if [len(part) for part in parts] != [len(range(rank, images, world)) for rank in range(world)]:
            return [result for part in parts for result in part]
        return [parts[index % world][index // world] for index in range(images)]


def scalars(results: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers among an evaluator's results."""
    return {
        name: float(value)
        for name, value in results.items()
        if not isinstance(value, (str, bytes)) and getattr(value, "ndim", 0) == 0 and hasattr(value, "__float__")
    }
