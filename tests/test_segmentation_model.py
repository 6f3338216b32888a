"""Heads, augmentation and schedule of segmentation as mmsegmentation builds them from our configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from ibot_eval.data.label_maps import open_label_maps
from ibot_eval.settings import DataSettings
from tests import dense
from tests.dense_data import label_map_folder

dense.prepared()

from mmengine.config import Config  # noqa: E402
from mmengine.model import BaseModule  # noqa: E402
from mmengine.registry import DATASETS, MODELS, PARAM_SCHEDULERS, DefaultScope  # noqa: E402

from protocols.openmmlab.segmentation_data import (  # noqa: E402
    LabelMaps,
    evaluation_pipeline,
    training_pipeline,
    write_split,
)
from protocols.openmmlab.segmentation_model import schedule, segmentor  # noqa: E402

WIDTH, CLASSES, SIDE = 16, 4, 64


@MODELS.register_module()
class FourMaps(BaseModule):
    """Maps of strides 4, 8, 16 and 32, or all of 16: a convolution of the shrunken image each."""

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.strides = [16] * 4 if raw else [4, 8, 16, 32]
        self.layers = nn.ModuleList(nn.Conv2d(3, WIDTH, 3, padding=1) for _ in range(4))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        height, width = images.shape[-2:]
        return tuple(
            layer(F.adaptive_avg_pool2d(images, (-(-height // stride), -(-width // stride))))
            for layer, stride in zip(self.layers, self.strides, strict=True)
        )


@pytest.fixture(autouse=True)
def scope() -> Any:
    with DefaultScope.overwrite_default_scope("mmseg"):
        yield


def build(head: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        **{"channels": 0, "dropout": 0.1, "norm": "BN", "mean": (0.5, 0.4, 0.3), "std": (0.25, 0.2, 0.1)},
        **{"crop_size": SIDE, "inference": "slide", "stride": 43},
        **changes,
    }
    backbone = {"type": "FourMaps", "raw": head != "upernet"}
    model = MODELS.build(Config({"model": segmentor(head, backbone, [WIDTH] * 4, CLASSES, **settings)}).model)
    model.init_weights()
    return model


def features(model: Any, height: int = SIDE, width: int = SIDE) -> tuple[Tensor, ...]:
    return model.backbone(torch.rand(2, 3, height, width))


def test_upernet_is_as_wide_as_the_backbone_and_gives_the_finest_map() -> None:
    model = build("upernet")
    assert model.decode_head.channels == WIDTH
    assert model.decode_head(features(model, 64, 96)).shape == (2, CLASSES, 16, 24)
    assert model.auxiliary_head(features(model, 64, 96)).shape == (2, CLASSES, 4, 6)
    assert model.auxiliary_head.loss_decode.loss_weight == 0.4
    assert build("upernet", channels=8).decode_head.conv_seg.in_channels == 8


def test_linear_is_one_convolution_over_the_concatenated_levels() -> None:
    model = build("linear").eval()
    maps = features(model)
    (weight, bias) = list(model.decode_head.parameters())
    assert weight.shape == (CLASSES, 4 * WIDTH, 1, 1)
    expected = torch.einsum("bchw,kc->bkhw", torch.cat(maps, 1), weight[:, :, 0, 0]) + bias[None, :, None, None]
    torch.testing.assert_close(model.decode_head(maps), expected)
    assert not model.with_auxiliary_head


def test_linear_resizes_levels_to_the_first_ones_size() -> None:
    model = build("linear").eval()
    maps = tuple(torch.rand(1, WIDTH, side, side) for side in (8, 4, 2, 1))
    resized = [F.interpolate(one, (8, 8), mode="bilinear", align_corners=False) for one in maps]
    torch.testing.assert_close(model.decode_head(maps), model.decode_head(tuple(resized)))


def test_setr_pup_doubles_the_last_map_four_times() -> None:
    model = build("setr-pup", channels=8)
    maps = features(model)
    assert model.decode_head(maps).shape == (2, CLASSES, 64, 64)
    assert len(model.decode_head.up_convs) == 4
    assert [head.in_index for head in model.auxiliary_head] == [0, 1, 2]
    assert {head(maps).shape for head in model.auxiliary_head} == {(2, CLASSES, 16, 16)}
    assert build("setr-pup").decode_head.channels == 256


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """train and test of a small data set, as files for the data set's class; one image each is grey or tiny."""
    root = label_map_folder(tmp_path_factory.mktemp("label_maps"))
    path = root / "images" / "training" / "0000.jpg"
    Image.open(path).convert("L").save(path)
    data: Any = open_label_maps(DataSettings(data=str(root)))
    files = [write_split(data.splits[role], root / f"{role}.json") for role in ("train", "test")]
    return files[0], files[1]


def samples(file: Path, pipeline: list[dict[str, Any]], *, test: bool = False) -> Any:
    return DATASETS.build({"type": "LabelMaps", "ann_file": str(file), "pipeline": pipeline, "test_mode": test})


def test_labels_and_colours_are_those_of_the_split(listed: tuple[Path, Path]) -> None:
    data = samples(listed[0], [{"type": "LoadUprightImage"}, {"type": "LoadLabelMap"}])
    assert isinstance(data, LabelMaps)
    assert data.metainfo["classes"] == ["background", "square", "disc", "bar"]
    assert len({tuple(colour) for colour in data.metainfo["palette"]}) == CLASSES
    for i in range(len(data)):
        one = data[i]
        stored = np.asarray(Image.open(one["seg_map_path"]))
        np.testing.assert_array_equal(one["gt_seg_map"], stored)
        assert one["img"].shape == (*stored.shape, 3)


def test_labels_that_count_from_one_are_shifted(tmp_path: Path) -> None:
    root = label_map_folder(tmp_path, classes=False)
    data: Any = open_label_maps(DataSettings(data=str(root)), reduce_zero=True)
    file = write_split(data.splits["train"], tmp_path / "train.json")
    ours = samples(file, [{"type": "LoadUprightImage"}, {"type": "LoadLabelMap"}])
    for i in range(len(ours)):
        stored = np.asarray(Image.open(ours[i]["seg_map_path"])).astype(int)
        expected = np.where((stored == 0) | (stored == 255), 255, stored - 1)
        np.testing.assert_array_equal(ours[i]["gt_seg_map"], expected)


def test_pipelines_of_mmsegmentation_open_files_as_the_core_does(listed: tuple[Path, Path]) -> None:
    """Even those that would shift the labels, and those within a transform; sizes stay tuples."""
    load = [{"type": "LoadImageFromFile", "to_float32": True}, {"type": "LoadAnnotations", "reduce_zero_label": True}]
    crop = {"type": "RandomCrop", "crop_size": (32, 32)}
    theirs = samples(listed[0], [*load, crop])
    ours = samples(listed[0], [{"type": "LoadUprightImage"}, {"type": "LoadLabelMap"}, crop])
    for data in (theirs, ours):
        np.random.seed(0)
        assert data[1]["img"].shape == (32, 32, 3)
    np.random.seed(0)
    first = theirs[1]
    np.random.seed(0)
    second = ours[1]
    for key in ("img", "gt_seg_map"):
        np.testing.assert_array_equal(first[key], second[key])
        assert first[key].dtype == second[key].dtype
    looks = {"type": "TestTimeAug", "transforms": [[{"type": "LoadAnnotations"}], [{"type": "PackSegInputs"}]]}
    several = samples(listed[0], [load[0], looks])[1]
    np.testing.assert_array_equal(several["data_samples"][0].gt_sem_seg.data[0], ours_whole(listed[0], 1))


def ours_whole(file: Path, index: int) -> np.ndarray:
    return samples(file, [{"type": "LoadUprightImage"}, {"type": "LoadLabelMap"}])[index]["gt_seg_map"]


@pytest.mark.parametrize("head", ["upernet", "linear", "setr-pup"])
def test_crops_train_whatever_their_size(listed: tuple[Path, Path], head: str) -> None:
    """Images at half their size are smaller than the crop, and are padded with the mean colour and no class."""
    model = build(head)
    data = samples(listed[0], training_pipeline(SIDE, SIDE, (0.5, 0.6), photometric=True))
    np.random.seed(0)
    items = [data[i] for i in range(3)]
    assert max(item["inputs"].shape[1] for item in items) < SIDE
    batch = {key: [item[key] for item in items] for key in ("inputs", "data_samples")}
    prepared = model.data_preprocessor(batch, True)
    assert prepared["inputs"].shape == (3, 3, SIDE, SIDE)
    assert float(prepared["inputs"][:, :, -1].abs().max()) == 0
    assert {int(v) for v in prepared["data_samples"][0].gt_sem_seg.data[0, -1].unique()} == {255}
    losses = model(**prepared, mode="loss")
    total = torch.stack([value for name, value in losses.items() if "loss" in name]).sum()
    total.backward()
    assert torch.isfinite(total)
    assert all(p.grad is not None for p in model.decode_head.parameters())


def test_inputs_are_normalised_rgb(listed: tuple[Path, Path]) -> None:
    model = build("linear")
    data = samples(listed[1], evaluation_pipeline(96), test=True)
    item = data[0]
    inputs = model.data_preprocessor({"inputs": [item["inputs"]], "data_samples": [item["data_samples"]]})["inputs"]
    pixels = np.asarray(Image.open(item["data_samples"].img_path)).astype(np.float64) / 255
    expected = (pixels - (0.5, 0.4, 0.3)) / (0.25, 0.2, 0.1)
    np.testing.assert_allclose(inputs[0].permute(1, 2, 0)[:96, :128], expected, atol=1e-5)


@pytest.mark.parametrize("inference", ["slide", "whole"])
@pytest.mark.parametrize("size", [(70, 101), (40, 50), (129, 64)])
def test_predictions_have_the_images_size(tmp_path: Path, inference: str, size: tuple[int, int]) -> None:
    root = label_map_folder(tmp_path, height=size[0], width=size[1])
    data: Any = open_label_maps(DataSettings(data=str(root)))
    file = write_split(data.splits["test"], tmp_path / "test.json")
    model = build("upernet", inference=inference).eval()
    item = samples(file, evaluation_pipeline(SIDE), test=True)[0]
    with torch.no_grad():
        (out,) = model.test_step({"inputs": [item["inputs"]], "data_samples": [item["data_samples"]]})
    assert out.pred_sem_seg.shape == out.gt_sem_seg.shape == size
    assert out.seg_logits.data.shape == (CLASSES, *size)


def test_windows_lie_where_the_published_ones_do(tmp_path: Path) -> None:
    """The last ones end at the image's edge, with nothing in them that is not of the image."""
    root = label_map_folder(tmp_path, height=64, width=85)
    data: Any = open_label_maps(DataSettings(data=str(root)))
    item = samples(write_split(data.splits["test"], tmp_path / "test.json"), evaluation_pipeline(SIDE), test=True)[0]
    model, seen = build("upernet").eval(), []
    model.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.test_step({"inputs": [item["inputs"]], "data_samples": [item["data_samples"]]})
    mean, std = torch.tensor((0.5, 0.4, 0.3)).view(3, 1, 1), torch.tensor((0.25, 0.2, 0.1)).view(3, 1, 1)
    image = (item["inputs"].flip(0) / 255 - mean) / std
    assert len(seen) == 2
    for window, left in zip(seen, (0, 85 - SIDE), strict=True):
        torch.testing.assert_close(window[0], image[:, :, left : left + SIDE], atol=1e-5, rtol=0)


def test_several_looks_are_averaged(listed: tuple[Path, Path]) -> None:
    """Two sizes, mirrored and not, against a second loop."""
    model = build("linear", inference="whole").eval()
    item = samples(listed[1], evaluation_pipeline(SIDE, (0.75, 1.5), flip=True), test=True)[0]
    assert [sample.shape[1] for sample in item["inputs"]] == [48, 48, 96, 96]
    assert [bool(sample.flip) for sample in item["data_samples"]] == [False, True] * 2
    tta = MODELS.build({"type": "SegTTAModel", "module": model})
    with torch.no_grad():
        (out,) = tta.test_step({key: [[one] for one in item[key]] for key in item})
        mean = torch.zeros(CLASSES, 96, 128)
        for image in item["inputs"]:
            inputs = model.data_preprocessor({"inputs": [image], "data_samples": [item["data_samples"][0].clone()]})
            scores = model.decode_head(model.backbone(inputs["inputs"]))
            scores = F.interpolate(scores, inputs["inputs"].shape[-2:], mode="bilinear")
            scores = scores[..., : image.shape[1], : image.shape[2]]
            if image is item["inputs"][1] or image is item["inputs"][3]:
                scores = scores.flip(-1)
            mean += F.interpolate(scores, (96, 128), mode="bilinear")[0].softmax(0) / 4
    agreed = (out.pred_sem_seg.data == mean.argmax(0)).float().mean()
    assert agreed > 0.999


def test_the_rate_rises_and_falls_at_once() -> None:
    """mmsegmentation 0's schedule: the fall goes on under the warm-up, and neither reaches its end early."""
    steps, warmup, ratio = 50, 8, 1e-3
    weight = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=0.5)
    schedulers = [PARAM_SCHEDULERS.build({**one, "optimizer": optimiser}) for one in schedule(steps, warmup, ratio)]
    for t in range(steps):
        expected = 0.5 * (1 - t / steps)
        if t < warmup:
            expected *= 1 - (1 - t / warmup) * (1 - ratio)
        assert optimiser.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9), t
        optimiser.step()
        for one in schedulers:
            one.step()


def test_no_warm_up() -> None:
    assert [one["type"] for one in schedule(10, 0)] == ["PolyLR"]


@pytest.mark.parametrize("width", [384, 768, 1024])
@pytest.mark.parametrize(("head", "side", "last"), [("upernet", 128, 16), ("linear", 32, 32), ("setr-pup", 512, 32)])
def test_published_sizes(head: Any, side: int, last: int, width: int) -> None:
    """150 classes and crops of 512 over ViT-S, ViT-B and ViT-L, without computing anything."""
    described = segmentor(
        head,
        {"type": "FourMaps", "raw": head != "upernet"},
        [width] * 4,
        150,
        **{"channels": 0, "dropout": 0.1, "norm": "SyncBN", "mean": (0.5,) * 3, "std": (0.25,) * 3},
        **{"crop_size": 512, "inference": "slide", "stride": 341},
    )
    sides = [128, 64, 32, last] if head == "upernet" else [32] * 4
    with torch.device("meta"):
        model = MODELS.build(Config({"head": described["decode_head"]}).head).eval()
        maps = [torch.rand(2, width, size, size) for size in sides]
        assert model(maps).shape == (2, 150, side, side)
    weights = sum(parameter.numel() for parameter in model.parameters())
    if head == "linear":
        assert weights == 150 * (4 * width + 1)
    elif head == "upernet":
        assert model.channels == width
        # Three laterals, four poolings, a bottleneck, three and one convolutions of the pyramid, each with two norms
        # per channel, and the classifier.
        convolutions = 3 * width**2 + 4 * width**2 + 9 * 5 * width**2 + 3 * 9 * width**2 + 9 * 4 * width**2
        assert weights == convolutions + 12 * 2 * width + 150 * (width + 1)
