"""pretrain.probe: the k-NN protocol's numbers, on any number of ranks, and no trace in the training."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from ibot_eval import distributed
from ibot_eval.data.arrays import ArraySplit, open_demo
from ibot_eval.data.splits import Data, ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import BadImage, DataError
from ibot_eval.features import FeatureBank
from ibot_eval.models import wrap
from ibot_eval.protocol import Metric, Session
from pretrain.probe import labelled_splits, teacher_knn
from protocols.knn import KNN, KNNConfig
from tests.fakes import TRANSFORM, FakeBackbone, FakeSplit
from tests.layouts import vit
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SETTINGS = {"device": CPU, "transform": TRANSFORM, "batch_size": 7}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def array_split(n: int, name: str, classes: int = 4, unlabelled: int = 0) -> ArraySplit:
    """Noise around a pattern per class, so that neighbours are right more often than not."""
    generator = np.random.default_rng([n, len(name)])
    patterns = np.random.default_rng(1).integers(0, 256, (classes, 8, 8, 3))
    labels = np.arange(n) % classes
    images = 0.25 * patterns[labels] + 0.75 * generator.integers(0, 256, (n, 8, 8, 3))
    labels[n - unlabelled :] = -1
    return ArraySplit(name, [f"{name}/{i}" for i in range(n)], labels, images.astype(np.uint8))


def noise(train: ImageSplit | None = None, test: ImageSplit | None = None) -> Data:
    splits = {"train": train or array_split(90, "train"), "test": test or array_split(41, "test")}
    return Data("noise", tuple("abcd"), splits, {role: role for role in splits})


def by_protocol(backbone: torch.nn.Module, data: Data, k: tuple[int, ...]) -> dict[str, float]:
    """Features image by image, and the numbers of the k-NN protocol."""
    banks, protocol = {}, KNN(KNNConfig(k=k))
    for request in protocol.features():
        split = data.splits[request.split]
        images = [TRANSFORM.normalize(TRANSFORM(split.load(i))[None]) for i in range(len(split))]
        features = [backbone.outputs(image).blocks[-1].cls[0].detach().numpy() for image in images]
        banks[request] = FeatureBank(np.stack(features), split.labels, list(split.image_ids))
    events = protocol.score(banks, Session(CPU, Path("unused"), data.class_names, progress=False))
    return {f"knn_top1@k={e.params['k']}": e.value for e in events if isinstance(e, Metric) and e.name == "top1"}


def test_the_protocols_numbers():
    data, backbone = noise(), FakeBackbone().eval()
    found = teacher_knn(backbone, data, **SETTINGS, ks=(1, 10, 20, 25))
    expected = by_protocol(backbone, data, (1, 10, 20, 25))
    assert len(set(expected.values())) > 1
    assert found == pytest.approx(expected | {"knn_top1": expected["knn_top1@k=20"]}, abs=1e-9)
    assert 30 < found["knn_top1"] < 100


def on_one_rank(count: int) -> dict[str, float]:
    torch.set_num_threads(1)
    distributed.init("cpu")
    return teacher_knn(FakeBackbone().eval(), noise(array_split(count, "train")), **SETTINGS, ks=(3, 10))


@pytest.mark.parametrize("count", [90, 5])
def test_ranks_get_what_one_process_gets(count):
    # Five images are one batch: the second rank has none.
    alone = on_one_rank(count)
    assert run_ranks(2, on_one_rank, count) == [alone, alone]


def fails_on_one_rank() -> str:
    distributed.init("cpu")
    split = FakeSplit(30, bad=[9])
    try:
        teacher_knn(FakeBackbone().eval(), noise(split), **SETTINGS)
    except BadImage as error:
        return error.what
    return "no error"


def test_an_unreadable_image_ends_it_on_every_rank():
    assert run_ranks(2, fails_on_one_rank) == ["train/009.png cannot be decoded"] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_no_trace_in_the_training(workers):
    backbone = wrap(vit(img_size=32, drop_path_rate=0.2))
    backbone.train()
    backbone.net.blocks[0].eval()
    modes = {name: module.training for name, module in backbone.named_modules()}
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    transform = EvalTransform(32, 32, "bicubic", (0.5,) * 3, (0.25,) * 3)
    teacher_knn(backbone, noise(), device=CPU, transform=transform, workers=workers)
    assert (random.getstate(), repr(np.random.get_state())) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert {name: module.training for name, module in backbone.named_modules()} == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    assert torch.is_grad_enabled()
    backbone.outputs(torch.zeros(2, 3, 32, 32)).blocks[-1].cls.sum().backward()


def test_a_failure_leaves_the_mode_as_well():
    backbone = FakeBackbone(nan_at=2).train()
    with pytest.raises(DataError, match=r"test/2 .*NaN"):
        teacher_knn(backbone, noise(), **SETTINGS)
    assert backbone.training


def test_few_images():
    data, backbone = noise(array_split(6, "train"), array_split(3, "test")), FakeBackbone().eval()
    found = teacher_knn(backbone, data, **SETTINGS, ks=(3, 10, 20))
    expected = by_protocol(backbone, data, (3, 6))
    assert found == pytest.approx(expected | {"knn_top1": expected["knn_top1@k=6"]})


def test_classes_that_the_gallery_lacks_count_as_wrong():
    train, test = array_split(40, "train", 2), array_split(40, "test", 4)
    whole = teacher_knn(FakeBackbone().eval(), noise(train, test), **SETTINGS)["knn_top1"]
    known = test.take(np.flatnonzero(test.labels < 2))
    assert whole == pytest.approx(teacher_knn(FakeBackbone().eval(), noise(train, known), **SETTINGS)["knn_top1"] / 2)


def test_images_per_class_and_unlabelled_ones():
    data = noise(array_split(90, "train", unlabelled=30))
    gallery, queries = labelled_splits(data)
    assert list(gallery.image_ids) == [f"train/{i}" for i in range(60)]
    assert queries is data.splits["test"]
    gallery, queries = labelled_splits(data, per_class=2)
    assert list(gallery.image_ids) == [f"train/{i}" for i in range(8)]
    assert list(queries.image_ids) == [f"test/{i}" for i in range(8)]
    backbone = FakeBackbone().eval()
    limited = teacher_knn(backbone, data, **SETTINGS, per_class=2)
    assert backbone.forwarded == 16
    assert limited == teacher_knn(FakeBackbone().eval(), noise(gallery, queries), **SETTINGS)


def test_data_that_cannot_be_probed_is_refused():
    with pytest.raises(DataError, match=r"no image of the test split has one\n.*noise\n.*--knn-every 0"):
        labelled_splits(noise(test=array_split(9, "test", unlabelled=9)))
    with pytest.raises(DataError, match="needs a test split"):
        labelled_splits(Data("d", ("a",), {"train": array_split(9, "train")}, {"train": "train"}))


def test_half_precision_reaches_the_network():
    seen = []

    class Watched(FakeBackbone):
        def outputs(self, images, *arguments, **named):
            seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
            return super().outputs(images, *arguments, **named)

    teacher_knn(Watched().eval(), noise(array_split(7, "train"), array_split(7, "test")), **SETTINGS)
    assert seen == [False, False]
    data = noise(array_split(7, "train"), array_split(7, "test"))
    teacher_knn(Watched().eval(), data, **SETTINGS, autocast=torch.bfloat16)
    assert seen[2:] == [torch.bfloat16] * 2


def test_digits_of_the_demonstration():
    transform = EvalTransform(32, 32, "bicubic", (0.5,) * 3, (0.25,) * 3)
    found = teacher_knn(wrap(vit()), open_demo(["train", "test"]), device=CPU, transform=transform, per_class=20)
    assert found["knn_top1"] > 25
