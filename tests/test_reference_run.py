"""The whole program against a reference computed outside this project: a real trained ViT on real photographs."""

from __future__ import annotations

import json

from tests.conftest import SHARED, Run, needs_shared

# ../shared/weights/README.md: timm network, published k-NN code, temperature 0.07.
REFERENCE = {5: (68.00, 88.75), 10: (68.25, 93.13), 20: (65.75, 94.00), 100: (59.00, 91.50)}


@needs_shared
def test_knn_reaches_the_reference(ibot_eval: Run) -> None:
    weights, images = SHARED / "weights" / "vits14_focus_fp16.safetensors", SHARED / "data" / "imagenette128"
    subset = ("--resize", 128, "--crop", 112, "--train-per-class", 150, "--test-per-class", 80)
    done = ibot_eval("knn", "--ckpt", weights, "--data", images, *subset, "--k", 5, 10, 20, 100, "--json", timeout=900)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    found = {(m["name"], m["params"]["k"]): m["value"] for m in record["metrics"]}
    for k, (top1, top5) in REFERENCE.items():
        assert abs(found["top1", k] - top1) <= 0.4
        assert abs(found["top5", k] - top5) <= 0.4
    assert record["data"]["splits"]["train"]["images"] == 1500
    assert record["checkpoint"]["architecture"] == "vit-s/14"
    assert record["checkpoint"]["num_heads"] == 6
