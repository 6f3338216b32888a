"""Puts the repository first on the path: mmsegmentation installs a package that is called ``tests`` as well.

Benchmarks that use the tests' makers import this before them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
