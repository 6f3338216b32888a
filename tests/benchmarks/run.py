"""Runs every benchmark, each in a process of its own: ``make bench``. Figures are ratios within one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    failed = []
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"== {path.stem}", flush=True)
        if subprocess.run([sys.executable, path, *sys.argv[1:]]).returncode:
            failed.append(path.stem)
    if failed:
        print(f"did not finish: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
