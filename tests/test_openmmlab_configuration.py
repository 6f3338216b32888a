"""mmengine configurations that are given, changed and written."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from ibot_eval.errors import ConfigError

pytest.importorskip("mmengine")

from mmengine.config import Config
from mmengine.runner import Runner

from protocols.openmmlab import configuration
from tests.dense_training import described, run


def finish(*overrides: str, **arguments: Any) -> Config:
    return configuration.finish(described(), overrides=overrides, **arguments)


@pytest.mark.parametrize(
    ("text", "place", "value"),
    [
        ("optim_wrapper.optimizer.lr=1e-4", "optim_wrapper.optimizer.lr", 1e-4),
        ("param_scheduler.1.power=0.9", "param_scheduler.1.power", 0.9),
        ("train_cfg.max_iters=20", "train_cfg.max_iters", 20),
        ("train_dataloader.dataset.bad=[1,2]", "train_dataloader.dataset.bad", [1, 2]),
        ("optim_wrapper.optimizer.betas=(0.9,0.95)", "optim_wrapper.optimizer.betas", (0.9, 0.95)),
        ("model.num_classes=7", "model.num_classes", 7),
        ("find_unused_parameters=True", "find_unused_parameters", True),
        ("test_evaluator.prefix=a=b", "test_evaluator.prefix", "a=b"),
    ],
)
def test_a_setting_is_changed(text: str, place: str, value: Any) -> None:
    node: Any = finish(text)
    for part in place.split("."):
        node = node[int(part)] if part.isdecimal() else node[part]
    assert node == value
    assert type(node) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim_wraper.optimizer.lr=1", r"the configuration has no 'optim_wraper'[\s\S]*did you mean 'optim_wrapper'"),
        ("optim_wrapper.clip_grad.max_nrm=1", r"optim_wrapper.clip_grad has no 'max_nrm'[\s\S]*'max_norm'"),
        ("train_cfgs=1", r"has no 'train_cfgs'[\s\S]*'train_cfg'"),
        ("param_scheduler.2.power=1", "param_scheduler has no '2'"),
        ("train_cfg.max_iters.x=1", "train_cfg.max_iters is 14"),
        ("train_cfg.max_iters", "key=value"),
        ("train_dataloader.dataset.bad=[1,2", "[Ii]mbalanced"),
        ("load_from=weights.pth", "load_from=None"),
    ],
)
def test_a_setting_that_is_not_there_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        finish(text)


def test_what_only_the_run_knows_is_put_in() -> None:
    wrapped = described()
    wrapped["train_dataloader"]["dataset"] = {"type": "RepeatDataset", "times": 2, "dataset": {"type": "TinyData"}}
    before = copy.deepcopy(wrapped)
    fixed = {
        "train_dataloader.dataset.data_root": Path("/data"),
        "test_dataloader.dataset.ann_file": "test.json",
        "model.backbone.checkpoint": {"ckpt": Path("vit.pth")},
    }
    cfg = configuration.finish(wrapped, overrides=["train_dataloader.dataset.dataset.images=5"], fixed=fixed)
    assert wrapped == before
    assert cfg.train_dataloader.dataset.dataset.to_dict() == {"type": "TinyData", "images": 5, "data_root": "/data"}
    assert "data_root" not in cfg.train_dataloader.dataset
    assert cfg.test_dataloader.dataset.ann_file == cfg.val_dataloader.dataset.ann_file == "test.json"
    assert cfg.model.backbone.checkpoint == {"ckpt": "vit.pth"}
    joined = described(train_dataloader__dataset={"type": "ConcatDataset", "datasets": []})
    with pytest.raises(ConfigError, match="several data sets"):
        configuration.finish(joined, fixed=fixed)


def test_the_number_of_classes_follows_everywhere() -> None:
    cfg = finish()
    cfg.model = {"heads": [{"num_classes": 80}, {"num_classes": 3, "mask": {"num_classes": 80}}], "num_classes": 3}
    assert configuration.replace_everywhere(cfg, "num_classes", 3) == [80, 80]
    assert configuration.replace_everywhere(cfg, "num_classes", 3) == []
    assert cfg.model.heads[1].mask.num_classes == 3


def test_a_configuration_given_back_is_the_same_run(tmp_path: Path) -> None:
    first = finish("optim_wrapper.optimizer.betas=(0.8,0.95)", "model.width=5")
    configuration.write(first, tmp_path / "one" / configuration.FILE)
    again = configuration.finish(described(model__width=50), file=tmp_path / "one" / configuration.FILE)
    assert again.to_dict() == first.to_dict()
    assert configuration.identity_of(again) == configuration.identity_of(first)
    run(tmp_path / "one", first)
    run(tmp_path / "other", again)
    one, other = (torch.load(tmp_path / n / "model.pth", weights_only=True)["state_dict"] for n in ("one", "other"))
    assert one["conv.weight"].shape[0] == 5
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_openmmlabs_own_runner_takes_the_file(tmp_path: Path) -> None:
    cfg = finish("train_cfg.max_iters=2", "train_cfg.val_interval=2")
    configuration.write(cfg, tmp_path / configuration.FILE)
    theirs = Config.fromfile(str(tmp_path / configuration.FILE))
    theirs.work_dir = str(tmp_path / "theirs")
    runner = Runner.from_cfg(theirs)
    runner.train()
    assert runner.iter == 2
    assert "tiny/right" in runner.test()


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.py", "model = dict("), ("a.py", "_base_ = ['nothing.py']"), ("a.py", "model = 1 / 0"), ("a.toml", "")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read[\s\S]*" + name):
        finish(file=tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        finish(file=tmp_path / "absent.py")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        configuration.write(finish(), tmp_path / "file" / configuration.FILE)


def test_moved_data_and_speed_are_the_same_run() -> None:
    fixed = {"train_dataloader.dataset.data_root": "/elsewhere", "train_dataloader.num_workers": 7}
    assert configuration.identity_of(finish(fixed=fixed)) == configuration.identity_of(finish())
    assert configuration.identity_of(finish("model.width=7")) != configuration.identity_of(finish())
