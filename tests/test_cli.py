"""The command line: help without torch, errors for people, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ibot_eval import cli
from ibot_eval.launch import without_launch
from tests.conftest import Run


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["list", "--json"], ["--version"], []])
def test_light_commands_do_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from ibot_eval.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'timm', 'sklearn', 'matplotlib'} & sys.modules.keys(); "
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_names_every_command() -> None:
    text = cli.overview()
    for name in ("knn", "list", "inspect", "doctor", "extract", "cache", "report", "plot"):
        assert f"\n  {name} " in text


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["knnn"], ["no command 'knnn'", "did you mean 'knn'"]),
        (["knn", "--ckpt", "demo"], ["--ckpt is given, but no --data"]),
        (["knn", "--data", "demo"], ["--data is given, but no --ckpt"]),
        (["knn", "--recipe", "knn/imagenet"], ["no recipe 'knn/imagenet'", "did you mean"]),
        (["knn", "--launch", "slurm:2"], ["--launch 'slurm:2'", "local:N"]),
        (["knn", "--launch", "local:0"], ["--launch 'local:0'"]),
        (["inspect"], ["--ckpt is missing"]),
        (["inspect", "--ckpt", "nowhere.pth"], ["nowhere.pth"]),
        (["extract", "--ckpt", "demo", "--data", "demo"], ["--out is missing"]),
        (["extract", "--out", "x.csv"], ["x.csv", ".safetensors or .npz"]),
        (["report", "nowhere"], ["no such folder: nowhere"]),
        (["plot"], ["no run is named"]),
        (["cache", "rm"], ["--all"]),
        (["cache", "ls", "--cache", "nowhere"], ["no folder nowhere"]),
        (["inspect", "--ckpt", "random:"], ["timm has no network ''"]),
        (["inspect", "--ckpt", "timm:zzzz"], ["zzzz", "more"]),
        (["knn", "--mean", "nan", "0", "0"], ["--mean nan 0.0 0.0", "must be numbers"]),
        (["knn", "--batch-size", "0"], ["--batch-size 0"]),
        (["knn", "--name", "../up"], ["'../up' cannot name a run"]),
        (["knn", "--output", "/dev/null/runs"], ["cannot create the run folder"]),
        (["knn", "--device", "cuda:17"], ["cuda"]),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_mistakes_are_explained(
    arguments: list[str],
    messages: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert [line for line in captured.err.splitlines() if line.startswith("ibot-eval: error: ")]
    assert captured.out == ""
    for message in messages:
        assert message in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tempature", "0.1"], "--temperature"),
        (["--temperature", "warm"], "warm"),
        (["--precision", "fp8"], "fp8"),
        (["--k", "ten"], "ten"),
    ],
)
def test_flags_with_wrong_names_or_types_are_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["knn", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_a_recipe_fails_like_the_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    for content, message in (("tempature: 0.1\n", "--temperature"), ("temperature: warm\n", "warm")):
        recipe.write_text(content)
        assert cli.main(["knn", "--recipe", str(recipe)]) == 2
        captured = capsys.readouterr()
        assert message in captured.err + captured.out


def test_later_flags_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("k: [1, 2]\ntemperature: 0.5\ncrop: 32\nblocks: [-1, -2]\n")
    call = cli.parse_protocol("knn", ["--k", "3", "--recipe", str(recipe), "--crop", "64"])
    assert call.config.k == (3,)
    assert call.config.temperature == 0.5
    assert call.config.blocks == (-1, -2)
    assert call.settings.data.crop == 64


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (b"root:x:0:0:root:/root:/bin/bash\n", b"", b"{}", b"PK\x03\x04 not a zip", b"\x80\x02]q\x00."):
        path = tmp_path / "x.pth"
        path.write_bytes(content)
        assert cli.main(["inspect", "--ckpt", str(path)]) == 2
        errors = capsys.readouterr().err
        assert str(path) in errors
        assert "Traceback" not in errors


def test_a_checkpoint_is_shown_without_a_cache_that_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--ckpt", "random:test_vit", "--cache", "/proc/nowhere"]) == 0
    assert "the weights are random" in capsys.readouterr().out


def test_inspect_shows_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--ckpt", "random:test_vit"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["family"] == "timm"
    assert shown["depth"] == "6"
    assert shown["missing"] == "none"
    assert cli.main(["inspect", "--ckpt", "random:test_vit", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identity"]["heads"] == report["num_heads"] == 2


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--ckpt", "nowhere.pth", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_flags_that_were_given_are_known() -> None:
    names = cli.flag_names(["--k", "10", "--leave-one-out", "--no-download", "--train-per-class=3", "value"])
    assert {"k", "leave_one_out", "download", "train_per_class"} <= names
    assert "value" not in names


def test_the_launch_flag_is_not_passed_on() -> None:
    assert without_launch(["knn", "--launch", "local:2", "--k", "5"]) == ["knn", "--k", "5"]
    assert without_launch(["knn", "--launch=local:2", "--k", "5"]) == ["knn", "--k", "5"]


def test_every_command_has_a_help_text_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for name, flag in (("knn", "--temperature"), ("extract", "--reducer"), ("cache", "--all"), ("report", "--format")):
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert flag in text
        assert "(default" in text


def test_help_says_no_default_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\(default:\s+table\)", text)
    assert not re.search(r"\(default:\s*\)", text)


def test_doctor_checks_the_installation(ibot_eval: Run) -> None:
    done = ibot_eval("doctor", "--json")
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["torch"]["state"] == "ok"
    assert checks["knn"]["state"] == "ok"
    assert checks["cache"]["state"] == "ok"
    assert "knn --backend faiss" in checks["faiss"]["serves"]


def test_doctor_says_what_is_missing_for_what(ibot_eval: Run, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'faiss': raise ModuleNotFoundError('hidden', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    done = ibot_eval("doctor", PYTHONPATH=str(tmp_path / "hidden"))
    assert done.returncode == 0, done.stderr
    assert "faiss: pip install 'ibot-eval[faiss]'" in done.stdout
    blocked = ibot_eval("doctor", "--cache", "/dev/null/cache")
    assert blocked.returncode == 2
    assert "choose another folder" in blocked.stdout
