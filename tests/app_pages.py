"""Pages of the app in streamlit's AppTest, for the tests of several files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streamlit as st
from PIL import Image
from streamlit.testing.v1 import AppTest

from dashboards.given import VARIABLE, Given

TINY = "random:vit_tiny_patch16_224"


@pytest.fixture(autouse=True)
def own_caches() -> Iterator[None]:
    """Nothing that a test loaded is there for the next, whose command line is another."""
    yield
    st.cache_resource.clear()
    st.cache_data.clear()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two folders of pictures, one of them called like markup."""
    folder = tmp_path / "photos"
    for name, colour in {"cats/a.png": 10, "cats/<b>*x*.png": 120, "dogs/c.png": 240}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(colour).integers(0, colour + 1, (48, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def _page(name: str) -> None:
    from dashboards.frame import page

    page(name)()


def opened(monkeypatch: pytest.MonkeyPatch, name: str, given: Given | None = None, **link: str) -> AppTest:
    """The page ``name`` as a link opens it; fails where there is an exception box."""
    monkeypatch.setenv(VARIABLE, (given or Given(device="cpu")).as_json())
    app = AppTest.from_function(_page, args=(name,), default_timeout=60)
    for key, value in link.items():
        app.query_params[key] = value
    return run(app)


def run(app: AppTest) -> AppTest:
    app.run()
    assert not app.exception, [box.message for box in app.exception]
    return app


def command(app: AppTest, number: int = 0) -> str:
    return app.code[number].value


def text(app: AppTest) -> str:
    """All that is written, as streamlit gets it: Markdown."""
    kinds = ("title", "subheader", "markdown", "caption", "info", "warning", "error", "text")
    return "\n".join(str(element.value) for kind in kinds for element in getattr(app, kind))


def link_of(app: AppTest) -> dict[str, str]:
    return {key: value if isinstance(value, str) else value[0] for key, value in app.query_params.items()}


def upload(app: AppTest, key: str, data: bytes, name: str) -> AppTest:
    app.file_uploader(key=key).upload(name, data, "image/png")
    return run(app)


def png(size: tuple[int, int], **settings: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (90, 120, 30)).save(buffer, "PNG", **settings)
    return buffer.getvalue()
