"""How soon a second run of a frozen protocol starts to score, counted from the end of the imports.

Runs k-NN twice on imagenette128 with the shared ViT-S/14; the second run must make no forward pass.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ibot_eval import api
from ibot_eval.backbone import Backbone
from ibot_eval.models.vit import ViTBackbone
from protocols.knn import KNN

SHARED = Path(__file__).resolve().parents[3] / "shared"


def main() -> None:
    if not SHARED.is_dir():
        print("left out: ../shared is not here")
        return
    forwards = 0
    begin = scoring = 0.0
    original_outputs, original_score = ViTBackbone.outputs, KNN.score

    def outputs(self: Backbone, *arguments: Any, **settings: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return original_outputs(self, *arguments, **settings)  # type: ignore[arg-type]

    def score(self: KNN, *arguments: Any) -> Iterator[Any]:
        nonlocal scoring
        scoring = time.perf_counter() - begin
        yield from original_score(self, *arguments)

    ViTBackbone.outputs, KNN.score = outputs, score  # type: ignore[method-assign,assignment]
    with tempfile.TemporaryDirectory() as folder:
        for attempt in ("first", "second"):
            forwards, begin = 0, time.perf_counter()
            with contextlib.redirect_stderr(io.StringIO()) if "-q" in sys.argv else contextlib.nullcontext():
                record = api.evaluate(
                    SHARED / "weights" / "vits14_focus_fp16.safetensors",
                    "knn",
                    SHARED / "data" / "imagenette128",
                    k=(5, 10, 20, 100),
                    **{"resize": 128, "crop": 112, "train_per_class": 150, "test_per_class": 80},
                    output=Path(folder, "runs"),
                    cache=Path(folder, "cache"),
                )
            seconds = record.timing["seconds"]
            print(f"{attempt} run: scoring starts after {scoring:.2f} s, {forwards} forward passes, phases {seconds}")
        values = {m["params"]["k"]: m["value"] for m in record.metrics if m["name"] == "top1"}
        print(f"top-1 at k = 5 / 10 / 20 / 100: {values} (reference 68.00 / 68.25 / 65.75 / 59.00)")


if __name__ == "__main__":
    main()
