"""pretrain.curves: what is drawn of a log, and `ibot-eval plot` on runs of a command."""

from __future__ import annotations

import itertools
import json
import math
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from ibot_eval import registry
from ibot_eval.commands.plot import Plot
from ibot_eval.errors import ConfigError, DataError
from ibot_eval.record import EvalRecord
from pretrain import curves

STEPS = 20
"""Per epoch."""
EVERYTHING = ("losses", "collapse", "clustering", "knn", "schedules", "throughput")


def row(step: int) -> dict[str, object]:
    values = {
        "loss": 9.0,
        "cls_loss": 6.0 - step / 100,
        "patch_loss": 3.0,
        "patch_loss_per_token": None if step % 20 else 5.5,
        "lr": 5e-4,
        "weight_decay": 0.04,
        "momentum": 0.996,
        "teacher_temp": 0.04,
        "patch_teacher_temp": 0.05,
        "teacher_entropy": 4.0,
        "kl": 0.9,
        "patch_entropy": 3.5,
        "patch_kl": 0.8,
        "gradient_norm": 1.0 + step,
        "mask_fraction": 0.15,
        "images_per_second": 100.0,
        "data_wait": 0.02,
        "mfu": 41.0,
        "peak_memory_gb": 11.0,
        "effective_epochs": 3.84 * step / STEPS,
    }
    return {"step": step, "epoch": (step - 1) // STEPS, **values}


def log(epochs: int = 3, every: int = 5, labels: bool = True) -> list[dict[str, object]]:
    rows = []
    for step in range(every, epochs * STEPS + 1, every):
        rows.append(row(step))
        if step % STEPS == 0:
            epoch = step // STEPS
            found = {"nmi": 10.0 * epoch, "ari": 1.0, "fmi": 2.0, "knn_top1": 50.0} if labels else {}
            rows.append({"step": step, "event": "epoch", "epoch": epoch, "agreement": 30.0, **found})
    return rows


def run(folder: Path, rows: list[dict[str, object]] | None = None, **config: object) -> EvalRecord:
    folder.mkdir(parents=True, exist_ok=True)
    if rows is not None:
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"prototypes": 512, "patch_prototypes": None, "tokenizer": None} | config
    EvalRecord(folder.name, "pretrain", 1, config=settings).save(folder)
    return EvalRecord.load(folder)


def axes_named(figure: Figure, title: str):
    return next(axes for axes in figure.axes if axes.get_title() == title)


def line_of(axes, colour: str = "C0", style: str = "-"):
    return next(line for line in axes.lines if line.get_color() == colour and line.get_linestyle() == style)


def levels(axes) -> list[float]:
    """Heights of the ln K lines."""
    return [line.get_ydata()[0] for line in axes.lines if line.get_color() == "grey"]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_a_run_is_drawn_over_its_epochs(tmp_path: Path) -> None:
    drawn = curves.figures(run(tmp_path / "a", log()))
    assert tuple(drawn) == EVERYTHING
    nmi = axes_named(drawn["clustering"], "NMI of the teacher's arg-max against labels")
    np.testing.assert_array_equal(line_of(nmi).get_xydata(), [[1, 10], [2, 20], [3, 30]])
    assert (nmi.get_xlabel(), nmi.get_ylabel()) == ("epoch", "%")
    cls = axes_named(drawn["losses"], "[CLS] loss")
    np.testing.assert_allclose(line_of(cls).get_xydata(), [[step / STEPS, 6 - step / 100] for step in range(5, 61, 5)])
    per_token = line_of(axes_named(drawn["losses"], "patch loss"))
    np.testing.assert_array_equal(per_token.get_xydata(), [[1, 5.5], [2, 5.5], [3, 5.5]])
    assert line_of(axes_named(drawn["throughput"], "time waiting for data")).get_ydata()[0] == pytest.approx(2)
    assert line_of(axes_named(drawn["schedules"], "masked patches of a batch")).get_ydata()[0] == pytest.approx(15)


def test_every_logged_number_has_its_curve() -> None:
    drawn = {curve.field for panels in curves.FIGURES.values() for panel in panels for curve in panel.curves}
    # The sum of the losses says nothing that its parts do not; effective epochs are epochs on another scale.
    assert drawn == ({*row(5), "nmi", "ari", "fmi", "agreement", "knn_top1"} - {"step", "epoch", "loss"}) - {
        "effective_epochs"
    }


def test_every_panel_says_what_it_shows(tmp_path: Path) -> None:
    for figure in curves.figures(run(tmp_path / "a", log())).values():
        for axes in figure.axes:
            assert axes.get_title()
            assert axes.get_xlabel()
            assert axes.get_ylabel()


def test_ln_k_stands_where_entropies_and_losses_would_collapse(tmp_path: Path) -> None:
    drawn = curves.figures(run(tmp_path / "a", log(), patch_prototypes=64))
    for figure, title, k in (
        ("losses", "[CLS] loss", 512),
        ("losses", "patch loss", 64),
        ("collapse", "entropy of the teacher, [CLS]", 512),
        ("collapse", "entropy of the teacher, patches", 64),
    ):
        axes = axes_named(drawn[figure], title)
        assert levels(axes) == pytest.approx([math.log(k)])
        assert axes.get_ylim()[0] <= math.log(k) <= axes.get_ylim()[1]
    assert "ln K = 6.24, uniform over K = 512" in texts(drawn["losses"])
    assert levels(axes_named(drawn["collapse"], "KL of student from teacher, [CLS]")) == []
    of_tokenizer = curves.figures(run(tmp_path / "b", log(), tokenizer="dino.pth"))
    assert levels(axes_named(of_tokenizer["losses"], "patch loss")) == []
    assert levels(axes_named(of_tokenizer["losses"], "[CLS] loss")) == pytest.approx([math.log(512)])


def test_several_runs_share_axes_and_have_a_colour_each(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first", log()), run(tmp_path / "second", log(epochs=2), prototypes=64)
    drawn = curves.figures(first, second)
    cls = axes_named(drawn["losses"], "[CLS] loss")
    assert [len(line_of(cls, colour).get_xdata()) for colour in ("C0", "C1")] == [12, 8]
    assert levels(cls) == pytest.approx([math.log(64), math.log(512)])
    assert texts(drawn["throughput"]) == ["first", "second"]


def test_legends_lie_outside_of_the_axes(tmp_path: Path) -> None:
    names = [f"{'a-long-name-' * 4}{i}" for i in range(12)]
    drawn = curves.figures(*(run(tmp_path / name, log(epochs=1)) for name in names))
    for name in ("losses", "collapse"):
        figure = drawn[name]
        figure.draw_without_rendering()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert box.y0 >= 0
        assert box.y1 <= min(axes.get_tightbbox().y0 for axes in figure.axes)
        assert min(axes.get_position().height * figure.get_figheight() for axes in figure.axes) > 1
        assert texts(figure)[:12] == names


def test_values_that_are_all_alike_do_not_lie_on_the_frame(tmp_path: Path) -> None:
    drawn = curves.figures(run(tmp_path / "a", log()))
    assert axes_named(drawn["throughput"], "peak memory of a process").get_ylim() == pytest.approx((0, 1.05 * 11))


def test_alarms_are_marked_where_they_belong(tmp_path: Path) -> None:
    rows = log()
    rows.insert(6, {"step": 30, "event": "alarm", "text": "the [CLS] output is uniform"})
    drawn = curves.figures(run(tmp_path / "a", rows))
    marks = [line for line in drawn["collapse"].axes[0].lines if list(line.get_xdata()) == [1.5, 1.5]]
    assert len(marks) == 1
    assert "alarm" in texts(drawn["collapse"])
    assert "alarm" not in texts(drawn["losses"])


def test_before_the_first_epoch_has_ended_steps_count(tmp_path: Path) -> None:
    drawn = curves.figures(run(tmp_path / "a", log()[:3]))
    assert set(drawn) == {"losses", "collapse", "schedules", "throughput"}
    axes = axes_named(drawn["losses"], "[CLS] loss")
    assert (axes.get_xlabel(), list(line_of(axes).get_xdata())) == ("step", [5, 10, 15])
    both = curves.figures(run(tmp_path / "b", log()), run(tmp_path / "c", log()[:2]))
    assert {axes.get_xlabel() for figure in both.values() for axes in figure.axes} == {"step"}


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    rows = log(labels=False)
    for entry in rows:
        for field in ("patch_loss", "patch_loss_per_token", "patch_entropy", "patch_kl"):
            entry.pop(field, None)
    drawn = curves.figures(run(tmp_path / "dino", rows))
    assert "knn" not in drawn
    assert [axes.get_title() for axes in drawn["losses"].axes] == ["[CLS] loss"]
    assert [axes.get_title() for axes in drawn["clustering"].axes] == ["student and teacher agree on the arg-max"]


def test_long_runs_are_drawn_as_means_in_front_of_their_range() -> None:
    x, values = np.arange(1007.0), np.random.default_rng(0).normal(size=1007)
    where, mean, low, high = curves._stretches(x, values)
    parts = [values[a : a + n] for a, n in _stretches_by_hand(1007)]
    assert len(parts) == curves.POINTS
    np.testing.assert_allclose(mean, [part.mean() for part in parts])
    np.testing.assert_allclose(where, [a + (n - 1) / 2 for a, n in _stretches_by_hand(1007)])
    np.testing.assert_array_equal([low, high], [[f(part) for part in parts] for f in (np.min, np.max)])


def _stretches_by_hand(total: int) -> list[tuple[int, int]]:
    edges = [math.floor(i * total / curves.POINTS) for i in range(curves.POINTS + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


def test_runs_without_a_log_yet(tmp_path: Path) -> None:
    started, empty, drawn = run(tmp_path / "started"), run(tmp_path / "empty", []), run(tmp_path / "drawn", log())
    with pytest.raises(DataError, match="nothing is logged yet in started, empty"):
        curves.figures(started, empty)
    with pytest.raises(DataError, match="nothing is logged yet"):
        curves.figures(EvalRecord("unsaved", "pretrain", 1))
    assert texts(curves.figures(started, drawn)["losses"])[0].startswith("patch loss")


class Drawing:
    """As the pre-training command will offer it."""

    figures = staticmethod(curves.figures)


class Silent:
    """A command without figures."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.test_pretrain_curves"
    points = {
        "commands": [EntryPoint("pretrain", f"{here}:Drawing", "x"), EntryPoint("silent", f"{here}:Silent", "x")],
        "protocols": [EntryPoint("knn", "protocols.knn:KNN", "x")],
    }
    monkeypatch.setattr(registry, "entries", lambda group: {point.name: point for point in points.get(group, ())})


@pytest.mark.usefixtures("commands")
def test_plot_draws_the_runs_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The record's status is "interrupted": a run that is under way is what one wants to look at.
    few = ("step", "event", "epoch", "cls_loss", "knn_top1")
    run(tmp_path / "runs" / "a", [{name: row[name] for name in few if name in row} for row in log()])
    assert Plot((tmp_path / "runs" / "a",)).run() == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert paths == [tmp_path / "runs" / "a" / "figures" / f"pretrain-{name}.png" for name in ("losses", "knn")]
    for path in paths:
        with Image.open(path) as image:
            assert min(image.size) > 400


@pytest.mark.usefixtures("commands")
def test_plot_of_what_offers_no_figures(tmp_path: Path) -> None:
    EvalRecord("x", "silent", 1).save(tmp_path)
    with pytest.raises(ConfigError, match="no protocol is called 'silent'"):
        Plot((tmp_path,)).run()
    EvalRecord("x", "knn", 1).save(tmp_path)
    with pytest.raises(ConfigError, match="none of the 1 given ended well"):
        Plot((tmp_path,)).run()
