"""What a user sees of a run: progress, log, tables, pictures."""

import io
import json
import math
import sys

import numpy as np
import pytest
import torch

from distseg.config.sizes import Size
from distseg.config.units import duration, many, si
from distseg.report.log import RunLog, SilentLog, open_log, read_log
from distseg.report.overlay import iou_per_class, plot_overlay
from distseg.report.plots import (
    _draw_loss,
    _draw_validation,
    plot_curves,
    plot_scaling,
    series,
    smooth,
)
from distseg.report.progress import BarProgress, LineProgress, SilentProgress, progress
from distseg.report.shrink import shrink_image, shrink_labels
from distseg.report.style import NATURAL, class_colors
from distseg.report.tables import folded_table, table

# progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of_work(steps: int, total: int) -> list[str]:
    """Four seconds and 2 Mpx a step."""
    clock, stream = Clock(), io.StringIO()
    with LineProgress(total, "step", "epoch 3", stream, clock) as work:
        for step in range(steps):
            clock.now += 4
            work.advance(pixels=2_000_000, loss=1 / (step + 1))
    return stream.getvalue().splitlines()


def test_a_line_every_ten_seconds_and_one_at_the_end():
    assert lines_of_work(6, 6) == [
        "epoch 3: 3/6 steps (50%), 500 kpx/s, 0:12 left, loss 0.3333",
        "epoch 3: 6/6 steps in 0:24, 500 kpx/s, loss 0.1667",
    ]


def test_work_that_ends_early_says_so():
    assert lines_of_work(2, 5) == ["epoch 3: stopped at 2/5 steps after 0:08, 500 kpx/s, loss 0.5"]


def test_the_factory_chooses_by_rank_and_terminal():
    assert type(progress(3, "step", "x", enabled=False, stream=Terminal())) is SilentProgress
    assert type(progress(3, "step", "x", enabled=True, stream=io.StringIO())) is LineProgress
    assert type(progress(3, "step", "x", enabled=True, stream=Terminal())) is BarProgress


def test_the_bar_ends_full_with_the_last_loss():
    stream = Terminal()
    with progress(3, "step", "epoch 3", stream=stream) as bar:
        for loss in (3.0, 2.0, 1.25):
            bar.advance(pixels=10, loss=loss)
    last = stream.getvalue().strip().split("\r")[-1]
    assert "3/3 steps" in last and "px/s" in last and "loss 1.25" in last


def test_silent_progress_shows_nothing(capsys):
    with progress(3, "step", "x", enabled=False) as silent:
        silent.advance(pixels=3, loss=1.0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "value, text", [(0.5, "0.5 px"), (999.6, "1 kpx"), (12_345_678, "12.3 Mpx"), (0, "0 px")]
)
def test_si(value, text):
    assert si(value, "px") == text


def test_duration():
    assert [duration(s) for s in (7.4, 59.6, 754, 3723)] == ["0:07", "1:00", "12:34", "1:02:03"]


def test_many():
    found = [many(1, "epoch"), many(2, "epoch"), many(1024, "micro-batch"), many(0, "rank")]
    assert found == ["1 epoch", "2 epochs", "1,024 micro-batches", "0 ranks"]


# log


def test_lines_are_whole_before_the_log_is_closed(tmp_path):
    log = RunLog(tmp_path)
    log.write("step", 1, 0, loss=torch.tensor(0.5), tile=Size("2x3"), sizes=np.array([1, 2]))
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert line.pop("time") > 1e9
    assert line == {
        "kind": "step",
        "step": 1,
        "epoch": 0,
        "loss": 0.5,
        "tile": "2x3",
        "sizes": [1, 2],
    }
    log.close()


def test_nan_is_null_at_any_depth(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(
            "validation", 1, 0, loss=math.inf, iou={"land": 0.5, "lake": torch.tensor(math.nan)}
        )
    assert "NaN" not in (tmp_path / "log.jsonl").read_text()
    [line] = read_log(tmp_path)
    assert line["loss"] is None and line["iou"] == {"land": 0.5, "lake": None}


def steps(path) -> list[int]:
    return [line["step"] for line in read_log(path)]


def test_a_resumed_run_drops_later_lines_and_a_cut_one(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(1, 6):
            log.write("step", step, 0)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    with RunLog(tmp_path, resumed_step=3) as log:
        assert steps(tmp_path) == [1, 2, 3]
        log.write("step", 4, 1)
    assert steps(tmp_path) == [1, 2, 3, 4] and read_log(tmp_path)[-1]["epoch"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_what_a_resumed_runs_log_lacks_is_told_and_a_damaged_one_kept(tmp_path, capsys):
    with RunLog(tmp_path) as log:
        for step in range(1, 6):
            log.write("step", step, 0)
    file = tmp_path / "log.jsonl"
    damaged = file.read_bytes().replace(b'"step": 2', b'"step"\0 2')
    file.write_bytes(damaged)
    RunLog(tmp_path, resumed_step=5).close()
    told = capsys.readouterr().err
    assert (
        "is damaged in line 2, which is left out; the file as it was is log.1.jsonl" in told
        and "has no entry for 1 of the first 5 steps, beginning with step 2" in told
    )
    assert steps(tmp_path) == [1, 3, 4, 5] and (tmp_path / "log.1.jsonl").read_bytes() == damaged
    file.unlink()
    RunLog(tmp_path, resumed_step=5).close()
    assert (
        "has no entry for 5 of the first 5 steps, beginning with step 1" in capsys.readouterr().err
    )


def test_a_new_run_keeps_the_old_log_aside(tmp_path):
    for step in (1, 2, 3):
        with RunLog(tmp_path) as log:
            log.write("step", step, 0)
    assert [steps(tmp_path / name) for name in ("log.1.jsonl", "log.2.jsonl", "log.jsonl")] == [
        [1],
        [2],
        [3],
    ]


def test_reading_tolerates_only_a_cut_last_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    assert read_log(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        read_log(path)
    with pytest.raises(ValueError, match="no log at .*nowhere.*give the folder"):
        read_log(tmp_path / "nowhere")


def test_a_new_run_keeps_tables_and_events_aside(tmp_path):
    RunLog(tmp_path).close()
    (tmp_path / "steps.csv").touch()
    (tmp_path / "tensorboard").mkdir()
    RunLog(tmp_path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("log.1.jsonl", "log.jsonl", "steps.1.csv", "tensorboard.1")
    ]


def test_other_ranks_write_nothing(tmp_path):
    with open_log(tmp_path / "run", ["tensorboard", "csv"], enabled=False) as log:
        log.write("step", 1, 0, loss=1.0)
        log.picture(1, "a", np.zeros((2, 2, 3), np.uint8))
    assert type(log) is SilentLog and not list(tmp_path.iterdir())


# tables

ROWS = [
    {"model": "small", "parameters": 72301856, "halo": 190, "time [s]": 1.25, "share": "45%"},
    {"model": "medium-1", "parameters": 232687904, "halo": None, "time [s]": 10.3, "share": "7.5%"},
]


def test_table():
    expected = """
model      parameters  halo  time [s]  share
--------  -----------  ----  --------  -----
small      72,301,856   190      1.25    45%
medium-1  232,687,904     -     10.30   7.5%"""
    assert "\n" + table(ROWS) == expected


def test_a_wide_table_is_folded():
    row = {"case": "a", "time [s]": 1.5, "nothing": None, "memory [MB]": 20}
    assert (
        folded_table([row], 20)
        == """\
case  time [s]
----  --------
a        1.500

case  memory [MB]
----  -----------
a              20"""
    )
    assert folded_table([row], 30) == table([row], ["case", "time [s]", "memory [MB]"])
    assert folded_table([row], 1).count("case") == 2


def test_floats_share_decimals_only_where_all_stay_readable():
    assert table([{"e": 0.5}, {"e": 0.25}]).split()[2:] == ["0.5000", "0.2500"]
    assert table([{"e": 0.5}, {"e": 1.2e-13}, {"e": math.nan}]).split()[2:] == [
        "0.5",
        "1.2e-13",
        "-",
    ]
    assert table([]) == "(no rows)"


# pictures


def png(path) -> np.ndarray:
    from matplotlib.image import imread

    return np.round(imread(path)[..., :3] * 255).astype(int)


def count(picture: np.ndarray, color) -> int:
    return int((np.abs(picture - class_colors(["x"], [color])[0]).max(-1) <= 1).sum())


def world(size: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ocean, land on the right half, a lake of 8x8 of which the prediction misses half."""
    truth = np.zeros((size, size), np.uint8)
    truth[:, size // 2 :] = 1
    truth[20:28, 40:48] = 2
    prediction = truth.copy()
    prediction[20:24, 40:48] = 0
    return np.full((size, size, 3), 90, np.uint8), truth, prediction


def test_iou_by_hand():
    _, truth, prediction = world()
    ocean, land, lake = 64 * 32, 64 * 32 - 64, 64
    assert iou_per_class(truth, prediction, 3) == pytest.approx(
        [ocean / (ocean + 32), land / land, 32 / lake]
    )
    truth[20:24, 40:48] = 255
    assert iou_per_class(truth, prediction, 4) == pytest.approx([1, 1, 1, math.nan], nan_ok=True)


def test_overlay_draws_each_pixel_of_each_panel(tmp_path):
    image, truth, prediction = world()
    plot_overlay(
        image, truth, prediction, ["ocean", "land", "lake"], None, tmp_path / "a" / "overlay.png"
    )
    picture, drawn = png(tmp_path / "a" / "overlay.png"), (640 // 64) ** 2
    margin = 3000  # the legend's swatches
    assert (64 + 32) * drawn <= count(picture, NATURAL["lake"]) <= (64 + 32) * drawn + margin
    assert 32 * drawn <= count(picture, "#D81B60") <= 32 * drawn + margin


def test_overlay_shows_the_scores_and_the_pixels_without_a_label(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "distseg.report.overlay._draw",
        lambda panels, legend, title, note, output: said.append((panels, legend, title)),
    )
    image, truth, prediction = world()
    truth[:8] = 255
    plot_overlay(
        image, truth, prediction, ["ocean", "land", "lake"], None, tmp_path / "x.png", title="here"
    )
    [(panels, legend, title)] = said
    assert [name for name, _ in panels] == ["image", "truth", "prediction", "errors: 0.89%"]
    assert [name for name, _ in legend] == ["ocean", "land", "lake", "error", "no label"]
    assert title == "here     IoU:  ocean 0.982 · land 1.000 · lake 0.500 · mean 0.827"


def test_a_long_title_stays_in_a_narrow_picture(tmp_path):
    image, truth, prediction = world()
    classes = [f"class {k} of a rather long list" for k in range(9)]
    plot_overlay(image[:16], truth[:16], prediction[:16], classes, None, tmp_path / "x.png")
    assert (png(tmp_path / "x.png")[:40, -8:] == 255).all()


def test_overlay_without_truth_has_two_panels(tmp_path):
    image, _, prediction = world()
    plot_overlay(
        image,
        None,
        prediction,
        ["ocean", "land", "lake"],
        [(255, 0, 0), (0, 255, 0), "#0000ff"],
        tmp_path / "x.png",
    )
    picture = png(tmp_path / "x.png")
    assert count(picture, "#0000ff") >= 32 * 100 and count(picture, "#D81B60") == 0


def test_a_shrunken_map_keeps_its_lakes():
    labels = np.zeros((1920, 3), np.uint8)  # blocks of 2x2; the last column stands alone
    labels[100, 0] = 2
    assert shrink_labels(labels, np.bincount(labels.ravel(), minlength=3)).tolist() == [
        [2, 0] if y == 50 else [0, 0] for y in range(960)
    ]


def test_a_shrunken_image_is_the_mean_of_its_blocks():
    image = np.zeros((1921, 4, 3), np.uint8)  # blocks of 3x3, the last row of blocks 1 high
    image[1920, 3] = 80
    image[0, 0] = 90
    small = shrink_image(image)
    assert small.shape == (641, 2, 3) and small[0, 0, 0] == 10 and small[640, 1, 0] == 80


@pytest.mark.parametrize(
    "change, message",
    [
        ({"image": np.zeros((64, 64), np.uint8)}, r"the image is uint8 of shape \(64, 64\)"),
        ({"truth": np.zeros((64, 60), np.uint8)}, r"the truth has shape \(64, 60\).*\(64, 64\)"),
        (
            {"prediction": np.full((64, 64), 3)},
            "the prediction has labels 3 to 3, but the 3 classes are 0 to 2",
        ),
        ({"colors": ["red"]}, "1 colours do not fit 3 classes"),
    ],
)
def test_overlay_refuses_what_does_not_fit(change, message, tmp_path):
    image, truth, prediction = world()
    given = {"image": image, "truth": truth, "prediction": prediction, "colors": None} | change
    with pytest.raises(ValueError, match=message):
        plot_overlay(**given, classes=["ocean", "land", "lake"], output=tmp_path / "x.png")


def test_smoothing_starts_at_the_first_value_and_skips_nan():
    assert smooth(np.array([4.0, 4.0, np.nan, 4.0]), 3) == pytest.approx([4, 4, 4, 4])
    assert smooth(np.array([0.0, 3.0]), 3) == pytest.approx([0, 2])  # weights 1/2 and 1


def training_log(folder) -> None:
    with RunLog(folder) as log:
        for step in range(1, 101):
            log.write("step", step, step // 50, loss=math.nan if step == 7 else 1 / step, lr=1e-3)
            if step % 50 == 0:
                log.write(
                    "validation", step, step // 50, loss=0.1, iou={"land": 0.9, "lake": step / 200}
                )


def test_curves_show_raw_beside_smooth_and_each_class(tmp_path):
    from matplotlib.figure import Figure

    training_log(tmp_path)
    log = read_log(tmp_path)
    axis = Figure().subplots()
    _draw_loss(axis, [log], ["run"])
    raw, smoothed, validation = axis.get_lines()
    assert np.isnan(raw.get_ydata()[6]) and raw.get_ydata()[99] == 0.01
    assert smoothed.get_ydata() == pytest.approx(smooth(series(log, "step", "loss")[1], 100 // 40))
    assert validation.get_xdata().tolist() == [50, 100]
    axis = Figure().subplots()
    _draw_validation(axis, [log], ["run"])
    assert [line.get_label() for line in axis.get_lines()] == ["land 0.900", "lake 0.500"]
    assert axis.get_lines()[1].get_ydata().tolist() == [0.25, 0.5]


def test_curves_of_two_runs_are_written_and_an_empty_log_is_refused(tmp_path):
    for name in ("a", "b"):
        training_log(tmp_path / name)
    plot_curves([tmp_path / "a", tmp_path / "b" / "log.jsonl"], tmp_path / "curves.png")
    assert png(tmp_path / "curves.png").std() > 5
    with RunLog(tmp_path / "c") as log:
        log.write("start", 0, 0)
    with pytest.raises(ValueError, match="c holds no line of kind 'step'"):
        plot_curves([tmp_path / "c"], tmp_path / "no.png")
    assert not (tmp_path / "no.png").exists()


def test_scaling(tmp_path):
    rows = [{"processes": n, "speedup": n**0.9, "low": n**0.8, "high": n} for n in (1, 2, 4)]
    plot_scaling(rows, tmp_path / "scaling.png")
    assert png(tmp_path / "scaling.png").std() > 5
    with pytest.raises(ValueError, match="must have the keys processes and speedup, got ranks"):
        plot_scaling([{"ranks": 2}], tmp_path / "scaling.png")


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_scaling([{"processes": 1, "speedup": 1.0}], tmp_path / "x.png")


def test_a_long_unit_shows_how_far_it_is():
    from distseg.report.progress import LineProgress

    now, stream = [0.0], io.StringIO()
    with LineProgress(2, "step", "epoch 1", stream, clock=lambda: now[0]) as bar:
        now[0] = 20.0
        bar.partly(0.5)
        now[0] = 40.0
        bar.advance(2)
    assert stream.getvalue().splitlines() == [
        "epoch 1: 0/2 steps (25%), 50% of the next step, 1:00 left",
        "epoch 1: 2/2 steps in 0:40",
    ]
