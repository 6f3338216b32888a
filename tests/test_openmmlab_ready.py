"""Without OpenMMLab's packages, with ones that do not fit, and where their output goes."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from ibot_eval.errors import ConfigError, MissingExtra
from protocols.openmmlab import extension, ready
from tests.dense import prepared
from tests.images import tree

WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
{code}
"""
ALL = ("mmengine", "mmcv", "mmdet", "mmseg", "pycocotools", "ftfy", "pkg_resources")


def without(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a process where the modules are not installed."""
    program = WITHOUT.format(blocked=set(blocked or ALL), code=code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)


def test_without_the_extra_the_two_commands_say_what_to_install_and_the_others_work(tmp_path: Path) -> None:
    data = tree(tmp_path / "data", {"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1})
    shared = [
        "--ckpt",
        "random:test_vit",
        "--data",
        str(data),
        "--cache",
        str(tmp_path / "cache"),
        "--resize",
        "160",
        "--crop",
        "160",
    ]
    code = f"""
from ibot_eval.cli import main
shared = {shared!r}
codes = [main([name, *shared[:4], "--output", {str(tmp_path)!r} + "/" + name]) for name in ("detect", "segment")]
assert codes == [2, 2], codes
assert main(["--help"]) == 0
assert main(["detect", "--help"]) == 0
assert main(["knn", *shared, "--output", {str(tmp_path / "knn")!r}]) == 0
assert not [name for name in sys.modules if name.partition(".")[0] in {ALL!r}]
"""
    done = without(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("need mmengine, mmcv-lite, mmdet and mmsegmentation") == 2
    assert done.stderr.count("pip install 'ibot-eval[dense]'") == 2
    assert "Traceback" not in done.stderr
    for name in ("detect", "segment"):
        assert any(line.split()[:1] == [name] for line in done.stdout.splitlines())
    assert (tmp_path / "knn").is_dir()
    # It was said before the checkpoint was read and a folder made.
    assert not [name for name in ("detect", "segment") if (tmp_path / name).exists()]


@pytest.mark.parametrize("module", ["mmdet", "mmseg"])
def test_one_missing_package_is_named(module: str) -> None:
    prepared()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready, "_done", False)
        patch.setattr(ready, "PACKAGES", {**ready.PACKAGES, module: "its-name", "no_such_module": "another"})
        patch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtra) as raised:
            ready.prepare()
    assert raised.value.where == "not installed: its-name, another"
    assert raised.value.todo == "pip install 'ibot-eval[dense]'"


def test_what_the_packages_need_is_named() -> None:
    def fails(**_: Any) -> None:
        raise ModuleNotFoundError("No module named 'ftfy'", name="ftfy")

    with pytest.raises(MissingExtra, match="mmseg needs ftfy") as raised:
        ready._explained(fails, "mmseg.utils")
    assert raised.value.todo == "pip install 'ibot-eval[dense]'"


def test_versions_that_do_not_fit_are_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise AssertionError("MMCV==2.2.0 is used but incompatible. Please install mmcv>=2.0.0rc4, <2.2.0.")

    def is_of_another_torch() -> None:
        raise ImportError("_ext.so: undefined symbol: _ZN2at4_ops5zeros")

    with pytest.raises(ConfigError, match=r"mmdet does not fit: MMCV==2\.2\.0"):
        ready._explained(refuses, "mmdet.utils")
    monkeypatch.setattr(extension, "compiled", lambda: Path("_ext.so"))
    with pytest.raises(ConfigError, match="undefined symbol") as raised:
        ready._explained(is_of_another_torch, "mmcv._ext")
    assert raised.value.todo is not None
    assert "pip uninstall -y mmcv mmcv-lite" in raised.value.todo


def test_preparing_registers_both_libraries_and_is_idempotent() -> None:
    prepared()
    before = sys.modules["mmcv._ext"]
    ready.prepare()
    assert sys.modules["mmcv._ext"] is before
    if extension.compiled() is None:
        assert isinstance(before, extension.StandIn)
    registry = importlib.import_module("mmengine.registry")
    for name in ("mmdet.CascadeRCNN", "mmseg.EncoderDecoder"):
        assert registry.MODELS.get(name) is not None
    for name in ("mmdet.CocoDataset", "mmseg.ADE20KDataset"):
        assert registry.DATASETS.get(name) is not None


def test_nothing_reaches_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepared()
    mm: Any = importlib.import_module("mmengine.logging")
    # One that has standard output already, as those have that are made when the packages are imported.
    older = mm.MMLogger.get_instance("older")
    log = tmp_path / "run" / "mmengine.log"
    with ready.quietly(log):
        print("printed")
        warnings.warn("warned of", UserWarning, stacklevel=1)
        logging.getLogger("some.library").warning("logged by a library")
        mm.print_log("printed by mmengine")
        mm.MMLogger.get_instance("newer").info("logged by a new logger")
        older.info("logged by an old logger")
        with ready.quietly(log):
            print("printed further in")
        print("printed further out")
        sys.stderr.write("the bar\n")
    # Loggers outlive the file.
    older.info("logged too late")
    captured = capfd.readouterr()
    assert captured.err == "the bar\n"
    assert captured.out == ""
    text = log.read_text()
    for said in ("printed", "UserWarning: warned of", "logged by a library", "printed by mmengine"):
        assert said in text
    for said in ("by a new logger", "by an old logger", "further in", "further out"):
        assert text.count(said) == 1
    print("open again")
    assert capfd.readouterr().out == "open again\n"


def test_output_and_warnings_are_as_before_after_a_failure(tmp_path: Path) -> None:
    before = (sys.stdout, warnings.showwarning, list(logging.getLogger().handlers))
    with pytest.raises(ValueError, match="inside"), ready.quietly(tmp_path / "log"):
        raise ValueError("inside")
    assert (sys.stdout, warnings.showwarning, list(logging.getLogger().handlers)) == before
