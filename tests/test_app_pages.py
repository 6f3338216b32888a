"""The pages of patterns, correspondences, components, results and the checkpoint, without a browser."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("streamlit_image_coordinates")

from dashboards.given import Given
from ibot_eval import cli, registry
from ibot_eval.visual.export import read_metadata
from tests.app_pages import TINY, command, link_of, opened, own_caches, photos, run, text
from tests.conftest import REPOSITORY

__all__ = ["own_caches", "photos"]  # fixtures

RECORD = REPOSITORY / "tests" / "records" / "schema1_knn.json"


def test_patterns_of_the_demonstration(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "patterns")
    assert r"64 prototypes \(projection head\)" in text(app)
    assert "Click a patch" in app.info[0].value
    numbers = [int(n) for n in re.findall(r"^prototype (\d+) ", text(app), re.MULTILINE)]
    sizes = [
        int(n.replace(",", "")) for n in re.findall(r"^prototype \d+ \\\(([\d\\,]+) patches", text(app), re.MULTILINE)
    ]
    assert len(numbers) == 6
    assert sizes == sorted(sizes, reverse=True)
    assert f"--prototypes {' '.join(map(str, numbers))} " in command(app) + " "
    app.selectbox(key="patterns.order").set_value("purity")
    run(app)
    purities = [int(n) for n in re.findall(r"(\d+) \\% of them", text(app))]
    assert len(purities) == 6
    assert purities == sorted(purities, reverse=True)


def test_a_patch_says_which_prototype_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "patterns", query="0.3,0.5")
    assert re.search(r"patch in row 14\\, column 12 belongs to prototype \d+ ", text(app))
    assert not app.info


def test_without_patterns_the_page_says_how_to_make_them(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    app = opened(monkeypatch, "patterns", Given(ckpt=("demo", TINY), data=str(photos), device="cpu"))
    assert command(app).startswith("ibot-eval patterns --ckpt demo")
    assert str(photos) in command(app)
    assert "has no projection head" in text(app)
    assert "k\\-means" in text(app)


def test_correspondences_of_two_views(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {f"{view}-{axis}": "0-100" for view in ("left", "right") for axis in "xy"}
    app = opened(monkeypatch, "correspondences", similarity="cosine", query="0.5,0.5", **whole)
    # An image and itself: each patch is its own best match.
    assert "100.0 % of 1176 patches" in text(app)
    assert "patch 14, 21 on the left is most like patch 14, 21 here (cosine 1)" in text(app)
    app.slider(key="correspondences.left-x").set_value((0, 50))
    app.toggle(key="correspondences.flip").set_value(True)
    run(app)
    assert link_of(app)["left-x"] == "0-50"
    assert "--similarity cosine --left-box 0 0 0.5 1 --flip --ckpt demo" in command(app)


def test_views_that_do_not_overlap_have_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = {"left-x": "0-20", "right-x": "80-100", "left-y": "0-100", "right-y": "0-100"}
    app = opened(monkeypatch, "correspondences", **apart)
    assert "no patch that both views show" in text(app)
    assert "The 0 patches" in text(app)


def test_correspondences_of_two_images(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "correspondences", mode="two images")
    assert re.search(r"china\.jpg \S*flower\.jpg ", command(app))
    assert "true place" not in text(app)


def test_components_of_several_images(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    given = Given(data=str(photos), device="cpu")
    chosen = json.dumps(["cats/a.png", "dogs/c.png", "../x.png", 7])
    app = opened(monkeypatch, "components", given, images=chosen)
    assert re.search(r"cats/a\.png \S*dogs/c\.png ", command(app))
    assert json.loads(link_of(app)["images"]) == ["cats/a.png", "dogs/c.png"]
    app.multiselect(key="components.images").set_value([])
    run(app)
    assert "no image is chosen" in app.error[0].value


@pytest.mark.parametrize("images", ["[" * 3000, "[" * 100_000, "{", "7", "[1e999, null]", "9" * 5000])
def test_images_of_a_link_that_make_no_sense_are_not_taken(images: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "components", images=images)
    assert json.loads(link_of(app)["images"]) == ["china.jpg", "flower.jpg"]


@pytest.mark.parametrize(
    ("page", "given", "link"),
    [
        ("attention", {}, {"query": "0.3,0.4", "head": "2", "smooth": "True", "side": "112"}),
        ("attention", {}, {"style": "overlay", "mass": "45"}),
        ("attention", {"ckpt": ("random:resnet18",)}, {}),
        ("patterns", {}, {"dark": "True", "page": "2"}),
        ("patterns", {"ckpt": (TINY,)}, {}),
        ("correspondences", {}, {"mutual": "True", "flip": "True", "top": "5", "similarity": "cosine"}),
        ("components", {}, {"foreground": "False"}),
        ("checkpoint", {}, {}),
    ],
)
def test_the_commands_shown_are_understood(
    page: str, given: dict[str, Any], link: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command(opened(monkeypatch, page, Given(device="cpu", **given), **link)))
    assert words[0] == "ibot-eval"
    parsed = cli.parse(registry.load("commands", words[1]), words[2:], words[1])
    assert parsed.checkpoint.ckpt == given.get("ckpt", ("demo",))[0]


def test_the_command_draws_the_patterns_that_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = opened(monkeypatch, "patterns")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*shlex.split(command(app))[1:], "--dpi", "30"]) == 0
    about = read_metadata((tmp_path / "figures" / "patterns-patch.png").read_bytes())
    assert [f"prototype {p} " in text(app) for p in about["settings"]["prototypes"]] == [True] * 6


def test_results_beside_published_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    record = json.loads(RECORD.read_text())
    record["metrics"][0]["published"] = {"value": 75.2, "source": "somewhere"}
    for name in ("first", "<b>second</b>"):
        (runs / name.strip("<b>/")).mkdir(parents=True)
        (runs / name.strip("<b>/") / "record.json").write_text(json.dumps({**record, "run": name}))
    (runs / "damaged").mkdir()
    (runs / "damaged" / "record.json").write_text("{")
    app = opened(monkeypatch, "results", Given(runs=str(runs), device="cpu"), all="True")
    table = app.dataframe[0].value
    rows = [row for _, row in table.iterrows() if row["metric"] == "top1" and row["settings"].startswith("k=10 ")]
    assert {row["run"] for row in rows} == {"first", "<b>second</b>"}
    assert rows[0]["published"] == 75.2
    assert rows[0]["value"] == pytest.approx(39.7752808988764)
    assert "1 records cannot be read" in app.expander[0].label
    assert command(app, 0) == f"ibot-eval report {runs} --all"
    assert command(app, 1) == f"ibot-eval plot {runs / 'first'} {runs / 'second'}"
    app.multiselect(key="results.runs.knn").set_value([str(runs / "first")])
    run(app)
    assert command(app, 1) == f"ibot-eval plot {runs / 'first'}"


def test_results_without_runs_show_published_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = opened(monkeypatch, "results")
    table = app.dataframe[0].value
    known = table[(table["protocol"] == "knn") & (table["method"] == "iBOT") & (table["arch"] == "vit-s/16")]
    assert 75.2 in set(known["value"])
    empty = opened(monkeypatch, "results", Given(runs=str(tmp_path), device="cpu"))
    assert "no record" in empty.info[0].value


def test_the_checkpoint_page_says_what_inspect_says(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, "checkpoint", Given(ckpt=("demo", TINY), device="cpu"))
    table = dict(app.dataframe[0].value.itertuples(index=False))
    assert (table["architecture"], table["projection head: K"], table["patch size"]) == ("vit-96x3/8", "64", "8")
    assert command(app) == "ibot-eval inspect --ckpt demo"
    app.selectbox(key="checkpoint.ckpt").set_value(TINY)
    run(app)
    table = dict(app.dataframe[0].value.itertuples(index=False))
    assert (table["depth"], table["projection head"]) == ("12", "-")


def test_a_link_cannot_name_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    shutil_path = shutil.which("python3") or "/bin/sh"
    app = opened(monkeypatch, "checkpoint", ckpt=shutil_path)
    assert command(app) == "ibot-eval inspect --ckpt demo"
    assert not app.error
