"""The page of attention, and what all pages share: links, images, uploads, mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("streamlit_image_coordinates")

from streamlit.testing.v1 import AppTest

from dashboards.choosing import uploads
from dashboards.given import VARIABLE, Given
from dashboards.uploads import KEPT
from tests.app_pages import TINY, command, link_of, opened, own_caches, photos, png, run, text, upload
from tests.conftest import REPOSITORY

__all__ = ["own_caches", "photos"]  # fixtures


def test_the_app_opens_on_attention_with_all_pages_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, Given(device="cpu").as_json())
    app = run(AppTest.from_file(str(REPOSITORY / "dashboards" / "app.py"), default_timeout=60))
    assert app.title[0].value == "Attention"
    assert not app.error
    assert command(app).startswith("ibot-eval draw attention ")


def test_attention_of_cls_and_of_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "attention")
    # scikit-learn's 640 x 427 pixels at 224: 42 x 28 patches of 8.
    assert r"Query\: \[CLS\], of 28 x 42 patches of 8 pixels" in text(app)
    assert command(app).endswith("china.jpg --block 2 --ckpt demo")
    app.slider(key="attention.block").set_value(0)
    app.select_slider(key="attention.head").set_value("1")
    app.slider(key="attention.mass").set_value(80)
    app.number_input(key="attention.row0").set_value(5)
    run(app)
    # The column that is offered first is the middle one.
    assert "--block 0 --query 5 21 --mass 0.8 --show-heads 1 --ckpt demo" in command(app)
    assert "Block 0, head 1." in text(app)
    assert link_of(app)["query"] == "0.5119,0.1964"
    app.button(key="attention.cls0").click()
    run(app)
    assert "--query" not in command(app)


def test_a_link_reopens_the_same_view(monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"image": "flower.jpg", "block": "1", "head": "3", "mass": "35", "side": "112", "query": "0.5000,0.5000"}
    app = opened(monkeypatch, "attention", **link)
    assert "flower.jpg --side 112 --block 1 --query 7 10 --mass 0.35 --show-heads 3" in command(app)
    assert link.items() <= link_of(app).items()
    again = opened(monkeypatch, "attention", **link_of(app))
    assert command(again) == command(app)


@pytest.mark.parametrize(
    "link",
    [
        {"block": "99", "head": "-1", "mass": "1e9", "side": "x", "smooth": "maybe", "query": "2,2", "style": "<b>"},
        {"image": "../../../../etc/passwd"},
        {"image": "/etc/passwd"},
        {"unknown": "1"},
    ],
)
def test_links_that_make_no_sense_show_the_defaults(link: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "attention", **link)
    assert command(app).endswith("china.jpg --block 2 --ckpt demo")
    assert bool(app.warning) == ("image" in link)
    assert not link_of(app).keys() & {"unknown"}


def test_a_link_to_an_upload_that_is_gone_says_so_and_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "attention", image="upload:0123456789abcdef0123456789abcdef")
    assert "no longer here" in app.warning[0].value
    assert not app.error
    assert command(app).endswith("china.jpg --block 2 --ckpt demo")
    assert not run(app).warning


def test_an_upload_that_others_pushed_out_does_not_lock_the_session_out(monkeypatch: pytest.MonkeyPatch) -> None:
    app = upload(opened(monkeypatch, "attention"), "attention.image.upload", png((8, 8)), "first.png")
    several = upload(opened(monkeypatch, "components"), "components.images.upload", png((8, 8)), "first.png")
    several.multiselect(key="components.images").set_value([link_of(app)["image"]])
    assert "first.png" in command(run(several))
    for side in range(KEPT):
        uploads().add(png((side + 9, 9)), "other.png")
    for session, key in ((app, "attention.image"), (several, "components.images")):
        run(session)
        assert "no longer here" in session.warning[0].value
        assert not session.error
        assert "china.jpg" in command(session)
        assert session.file_uploader(key=f"{key}.upload")
        assert not run(session).warning
    app = upload(app, "attention.image.upload", png((8, 8)), "again.png")
    assert "again.png" in command(app)
    again = link_of(app)["image"]
    app = upload(app, "attention.image.upload", png((7, 7)), "more.png")
    more = link_of(app)["image"]
    app.selectbox(key="attention.image").set_value(again)
    assert "again.png" in command(run(app))
    # Another picture that is chosen meanwhile is not taken back.
    uploads().add(png((7, 7)), "more.png")
    for side in range(KEPT - 1):
        uploads().add(png((side + 9, 9)), "other.png")
    app.selectbox(key="attention.image").set_value(more)
    assert "more.png" in command(run(app))
    assert not app.warning


def test_a_session_calls_an_upload_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    first = upload(opened(monkeypatch, "attention"), "attention.image.upload", png((8, 8)), "first.png")
    second = upload(opened(monkeypatch, "attention"), "attention.image.upload", png((8, 8)), "second.png")
    assert "draw attention second.png" in command(second)
    assert "draw attention first.png" in command(run(first))


def test_a_folder_called_uploads_is_a_folder(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    (photos / "dogs").rename(photos / "uploads")
    given = Given(data=str(photos), device="cpu")
    app = upload(opened(monkeypatch, "attention", given), "attention.image.upload", png((8, 8)), "mine.png")
    assert "draw attention mine.png" in command(app)
    folders = app.selectbox(key="attention.image.folder")
    assert sorted(folders.options) == ["cats", "uploads", "uploads (2)"]
    folders.set_value("uploads")
    assert f"{photos}/uploads/c.png" in command(run(app))


def test_images_that_are_called_alike_can_be_told_apart(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    (photos / "dogs" / "c.png").rename(photos / "dogs" / "a.png")
    chosen = json.dumps(["cats/a.png", "dogs/a.png"])
    app = opened(monkeypatch, "components", Given(data=str(photos), device="cpu"), images=chosen)
    options = app.multiselect(key="components.images").options
    assert {"cats/a.png", "dogs/a.png", "<b>*x*.png"} == set(options)


def test_two_checkpoints_of_different_patch_sizes_side_by_side(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    given = Given(ckpt=("demo", TINY), data=str(photos), device="cpu")
    app = opened(monkeypatch, "attention", given, image="dogs/c.png", query="0.4,0.6", head="4")
    # 64 x 48 pixels at 224: 37 x 28 patches of 8, 19 x 14 of 16; the same place in both.
    assert "--block 2 --query 16 14 --show-heads 4 --ckpt demo" in command(app, 0)
    assert f"--block 11 --query 8 7 --ckpt {TINY}" in command(app, 1)
    assert "It has 3 blocks only." in text(app)
    assert "It has 3 heads only." in text(app)


def test_a_network_without_attention_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "attention", Given(ckpt=("random:resnet18",), device="cpu"))
    assert "There are no attention maps here" in app.info[0].value
    assert "convolution" in app.info[0].value
    assert "--style activation" in command(app)


def test_names_of_files_are_never_markup(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    given = Given(data=str(photos), device="cpu")
    app = opened(monkeypatch, "correspondences", given, image="cats/<b>*x*.png", query="0.5,0.5")
    assert r"\<b\>\*x\*\.png" in text(app)
    assert not re.search(r"(?<!\\)<b", text(app))
    # The command is code, and what the shell would take for its own is quoted.
    assert f"'{photos}/cats/<b>*x*.png'" in command(app)


def test_images_are_chosen_by_folder(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    given = Given(data=str(photos), device="cpu")
    app = opened(monkeypatch, "attention", given)
    folder = app.selectbox(key="attention.image.folder")
    assert folder.options == ["cats", "dogs"]
    folder.set_value("dogs")
    run(app)
    assert link_of(app)["image"] == "dogs/c.png"


def test_an_image_that_cannot_be_decoded_is_named(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    (photos / "dogs" / "c.png").write_text("just text")
    app = opened(monkeypatch, "attention", Given(data=str(photos), device="cpu"), image="dogs/c.png")
    assert "cannot decode the image" in app.error[0].value
    assert "choose another image" in app.error[0].value
    app.selectbox(key="attention.image.folder").set_value("cats")
    assert not run(app).error


def test_a_checkpoint_that_cannot_be_read_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.pth").write_text("no weights")
    for page in ("attention", "patterns", "correspondences", "components", "checkpoint"):
        app = opened(monkeypatch, page, Given(ckpt=(str(tmp_path / "broken.pth"),), device="cpu"))
        assert r"broken\.pth" in app.error[0].value
        assert "To do" in app.error[0].value


@pytest.mark.parametrize("size", [(1, 1), (3000, 150)])
def test_an_upload_is_shown_and_its_link_opens_elsewhere(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = upload(opened(monkeypatch, "attention"), "attention.image.upload", png(size), "<i>mine</i>.png")
    assert not app.error
    assert link_of(app)["image"].startswith("upload:")
    assert r"saved as i\>\.png" in text(app)
    assert "'i>.png'" in command(app)
    # Another session of the same server.
    other = opened(monkeypatch, "attention", **link_of(app))
    assert not other.error
    assert command(other) == command(app)


def test_an_upload_that_is_no_picture_leaves_the_page_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    app = upload(opened(monkeypatch, "attention"), "attention.image.upload", b"just text", "notes.png")
    assert "is not a picture" in app.error[0].value
    assert command(app).endswith("china.jpg --block 2 --ckpt demo")
