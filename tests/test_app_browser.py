"""The app in a real browser: started by its command, clicked through, with no exception box on the way."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from PIL import Image

from tests.conftest import REPOSITORY

pytest.importorskip("streamlit", reason="the extra `app` is not installed")
pytest.importorskip("streamlit_image_coordinates", reason="the extra `app` is not installed")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'ibot-eval[test]'")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WORD_JOINER = "\u2060"
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
if BROWSER is None:
    pytest.skip(f"no browser is installed ({', '.join(NAMES)}): apt-get install chromium", allow_module_level=True)

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE = 60_000
"""Milliseconds that any one step may take on a busy machine; most take a fraction of a second."""
NASTY = "<img src=x onerror=alert(1)> **b** $x$ [l](u) -- -> :material_home: .png"
"""Only text, wherever it is shown."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The app on this machine's own port, with a folder of one record."""
    folder = tmp_path_factory.mktemp("app")
    (folder / "runs" / "first").mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests" / "records" / "schema1_knn.json", folder / "runs" / "first" / "record.json")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "IBOT_EVAL_CACHE": str(folder / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ibot_eval", "app", "--no-browser", "--port", "0", "--device", "cpu", "--runs", "runs"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://localhost:\d+", process.stdout.readline())
        assert found
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[api.Browser]:
    with api.sync_playwright() as playwright:
        # Without a folder of its own for each start, playwright makes a fresh profile.
        started = playwright.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def page(browser: api.Browser, address: str) -> Iterator[api.Page]:
    """A window; afterwards nothing may have been asked of another machine, and no script of a name have run."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE)
    elsewhere: list[str] = []
    dialogs: list[str] = []
    context.on(
        "request", lambda r: None if r.url.startswith((address, "data:", "blob:", "ws:")) else elsewhere.append(r.url)
    )
    opened = context.new_page()
    opened.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    yield opened
    context.close()
    assert not elsewhere
    assert not dialogs


def settle(page: api.Page) -> None:
    """Waits until the page is drawn; fails on an exception box."""
    page.wait_for_function(
        """() => document.querySelector('[data-testid=stApp]')?.getAttribute('data-test-script-state') === 'notRunning'
        && document.querySelector('h1') && !document.querySelector('[data-testid=stSpinner]')"""
    )
    box = page.get_by_test_id("stException")
    assert box.count() == 0, box.first.inner_text()


def command(page: api.Page) -> str:
    return page.get_by_test_id("stCode").first.inner_text().replace("\n", " ")


def until(page: api.Page, words: str) -> None:
    """Waits until the command on the page holds ``words``."""
    page.get_by_test_id("stCode").filter(has_text=words).first.wait_for()
    settle(page)


def link_of(page: api.Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlparse(page.url).query).items()}


def picture(size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def alerts(page: api.Page) -> str:
    return "\n".join(page.get_by_test_id("stAlert").all_inner_texts())


def test_a_visit(page: api.Page, address: str, tmp_path: Path) -> None:
    """Upload, click, change head, block and outline, download, and open the link in a second tab."""
    page.goto(address)
    settle(page)
    assert command(page).endswith("china.jpg --block 2 --ckpt demo")

    chooser = page.locator("input[type=file]")
    chooser.set_input_files({"name": "notes.jpg", "mimeType": "image/jpeg", "buffer": b"just text"})
    page.get_by_text("is not a picture").wait_for()
    settle(page)
    # 320 x 224 pixels: 40 x 28 patches of 8.
    chooser.set_input_files({"name": NASTY, "mimeType": "image/png", "buffer": picture((320, 224))})
    until(page, "onerror")
    assert link_of(page)["image"].startswith("upload:")
    assert page.locator("img[src=x]").count() == 0
    told = page.get_by_test_id("stCaptionContainer").filter(has_text="once the upload is saved as")
    assert NASTY in told.inner_text().replace(WORD_JOINER, "")

    shown = page.frame_locator("iframe[title*=image_coordinates]").locator("#image")
    shown.wait_for()
    box = shown.bounding_box()
    assert box is not None
    assert box["width"] / box["height"] == pytest.approx(320 / 224, rel=0.02)
    # The middle of the patch in row 7, column 30.
    shown.click(position={"x": box["width"] * 30.5 / 40, "y": box["height"] * 7.5 / 28})
    until(page, "--query 7 30")

    for label, key, words in (
        ("Block", "ArrowLeft", "--block 1"),
        ("Head", "ArrowRight", "--show-heads 0"),
        ("Outline holds", "ArrowRight", "--mass 0.65"),
    ):
        slider = page.locator("[data-testid=stSlider], [data-testid=stSelectSlider]").filter(has_text=label)
        slider.get_by_role("slider").press(key)
        until(page, words)

    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download PNG").click()
    saved = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(saved)
    assert saved.name.startswith("attention-")
    with Image.open(saved) as image:
        about = json.loads(image.info["ibot-eval"])
    assert about["settings"]["query"] == [7, 30]
    assert "--query 7 30" in about["command"]

    second = page.context.new_page()
    second.goto(page.url)
    settle(second)
    until(second, "--mass 0.65")
    assert command(second) == command(page)
    assert alerts(second) == ""


def test_every_page_is_reached_by_clicking(page: api.Page, address: str) -> None:
    page.goto(address)
    settle(page)
    page.get_by_test_id("stSlider").filter(has_text="Block").get_by_role("slider").press("ArrowLeft")
    until(page, "--block 1")
    for title in ("Patterns", "Correspondences", "Components", "Results", "Checkpoint", "Attention"):
        page.get_by_test_id("stSidebarNavLink").filter(has_text=title).click()
        page.get_by_role("heading", level=1, name=title, exact=True).wait_for()
        settle(page)
        page.get_by_test_id("stDownloadButton").first.wait_for()
        assert command(page).startswith("ibot-eval ")
        assert alerts(page) == "" or title == "Patterns"
    # What was chosen on a page is still chosen when it is opened again.
    until(page, "--block 1")
