"""Installs the built wheel beside the development one and runs ibot-eval from it in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(wheels: str) -> None:
    (wheel,) = Path(wheels).resolve().glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "ibot_eval/record.schema.json",
        "ibot_eval/published.json",
        "ibot_eval/configs/knn/",
        "ibot_eval/configs/pretrain/digits.yaml",
        "ibot_eval/demo.safetensors",
        "pretrain/train.py",
        "protocols/knn.py",
    ):
        assert any(name.startswith(needed) for name in names), f"the wheel lacks {needed}"
    assert not any(name.startswith("tests/") for name in names), "the wheel holds the tests"
    weights = {f"ibot_eval/{path.name}" for path in Path(__file__).parent.parent.glob("ibot_eval/*.safetensors")}
    assert weights <= {*names}, f"the wheel lacks {', '.join(weights - {*names})}"
    with tempfile.TemporaryDirectory() as folder:
        target, empty = Path(folder, "site"), Path(folder, "empty")
        empty.mkdir()
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
        subprocess.run(install, check=True)
        environment = os.environ | {"PYTHONPATH": str(target), "IBOT_EVAL_CACHE": str(Path(folder, "cache"))}

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=empty, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            return done.stdout

        origin = run(sys.executable, "-c", "import ibot_eval; print(ibot_eval.__file__)").strip()
        assert Path(origin).is_relative_to(target), f"ran {origin} instead of the wheel"
        script = str(target / "bin" / "ibot-eval")
        assert "--recipe knn/imagenet_vits16" in run(script, "list")
        output = run(script, "knn")
        print(output)
        assert "top1" in output
        assert list(empty.glob("runs/*/record.json")), "no record was written"
    print(f"{wheel.name}: built, installed and run in an empty folder")


if __name__ == "__main__":
    main(sys.argv[1])
