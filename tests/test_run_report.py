"""distseg report: one HTML file about a run, with all that it has, escaped, without anything from elsewhere."""

import base64
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import h5py
import numpy as np
import pytest
from made_store import random_store
from PIL import Image
from test_images import write_store
from test_validation import config

from distseg.cli import pictures
from distseg.cli import report as gathering
from distseg.cli.evaluate import run_evaluate
from distseg.cli.main import main
from distseg.cli.planned_memory import planned_memory
from distseg.cli.planned_training import SLACK
from distseg.comm.alone import Alone
from distseg.config.settings import LossConfig, ModelConfig, PredictConfig
from distseg.config.sizes import Size
from distseg.config.units import si
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.report.chart import Line, condensed, line_chart, ticks
from distseg.report.log import read_log
from distseg.report.page import RunPage, data_uri, run_page
from distseg.tiling.tile import Box
from distseg.training.checkpoint.files import find, read_manifest
from distseg.training.loop import train

VOID = {"meta", "img", "br"}  # tags without an end tag
NASTY = ["<b>sea</b>", 'land & "lake"', "</script><script>alert(1)</script>"]
PLAN = config(Path(), norm="batch", lr=0.02, epochs=2)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Texts and attributes of a page; it fails if tags are not closed in order."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.found, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if data.strip() and self.open[-1] not in ("style", "script"):
            self.texts.append(data.strip())

    def tags(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.found if name == tag]


def check_page(text: str) -> Page:
    """Check what holds for every page: well formed, self-contained, and each picture has a text."""
    page = Page(text)
    for _, attributes in page.found:
        assert not {name for name in attributes if name.startswith("on")}
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("src", "data:image/").startswith("data:image/")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    assert all(picture["alt"] for picture in page.tags("img"))
    assert all(chart["aria-label"] for chart in page.tags("svg") if chart.get("role") == "img")
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {a["href"][1:] for a in page.tags("a")} <= set(ids)
    return page


@pytest.mark.parametrize(
    "low, high, found",
    [
        (0, 1.04, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 7, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0, 80, [0, 20, 40, 60, 80]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_numbers(low, high, found):
    assert ticks(low, high) == pytest.approx(found)


def test_a_long_line_is_condensed_between_its_extremes():
    x, y = np.arange(1000.0), np.tile([0.0, 4.0], 500)
    y[7] = np.nan
    line = condensed("loss", x, y)
    assert len(line.x) == 300 and (line.low.min(), line.high.max()) == (0, 4)
    assert line.y.mean() == pytest.approx(2, abs=0.1) and (np.diff(line.x) > 0).all()
    assert (
        condensed("loss", x[:20], y[:20]).low is None
        and len(condensed("a", x[:20], y[:20]).y) == 19
    )


def test_a_chart_has_gaps_bands_marks_and_escaped_names():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    gap = Line("<i>", x, np.array([1, np.nan, 2, 3]), style=3, points=True)
    text = line_chart([gap, Line("b", x, x, low=x - 1, high=x + 1)], 'a "quoted" text', "step")
    page = Page(text)
    (path,) = [p["d"] for p in page.tags("path") if p.get("class") == "line s3"]
    assert path.count("M") == 2 and path.count("L") == 1
    assert len([p for p in page.tags("g") if p["class"] == "mark s3"]) == 3
    assert "<i>: 2 at 3" in page.texts and page.tags("svg")[0]["aria-label"] == 'a "quoted" text'
    assert [p for p in page.tags("path") if p.get("class") == "band s0"]


@pytest.mark.parametrize("values", [[5.0], [2.0, 2.0], [0.0, 0.0], [1e-4, 1e3]])
def test_few_equal_and_steep_values_are_drawn_inside_of_the_chart(values):
    line = Line("a", np.arange(1.0, 1 + len(values)), np.array(values), points=True)
    for logarithmic in (False, min(values) > 0):
        text = line_chart([line], "a", "step", logarithmic)
        (path,) = [p["d"] for p in Page(text).tags("path") if p.get("class") == "line s0"]
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", path)]
        assert all(0 <= x <= 640 and 0 <= y <= 240 for x, y in zip(numbers[::2], numbers[1::2]))


def test_a_picture_of_classes_has_exactly_their_colours():
    palette = np.array([[255, 0, 0], [0, 0, 255], [9, 9, 9]], np.uint8)
    numbers = np.array([[0, 1, 2], [2, 1, 0]], np.uint8)
    kind, _, data = data_uri(numbers, palette).partition(";base64,")
    picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    assert kind == "data:image/png" and np.array_equal(np.asarray(picture), palette[numbers])


def test_a_run_without_anything_has_a_page():
    empty = dict(summary="", figures=[], facts=[], settings={}, charts=[], evaluations=[])
    page = check_page(run_page(RunPage(name=NASTY[2], notes=["no log"], **empty)))
    assert NASTY[2] in page.texts and "no log" in page.texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a store and an evaluated run, whose classes and images have names that a page must escape."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("trained")
    with StoreWriter(folder / "s.h5", NASTY, 4) as writer:
        for k in range(8):
            size = (20 + 4 * (k % 3), 28)
            labels = random.integers(0, 3, size).astype(np.uint8)
            labels[:2, :3] = 255
            pixels = (random.normal(0, 300, (4, *size)) + 400.0 * labels).astype(np.int16)
            name = f"<u>{k}" if k == 7 else f"image{k}"
            split = "train" if k < 3 else "val" if k < 4 else "test"
            image = writer.add_image(name, size, np.int16, split, True)
            image.write(Box.whole(size), pixels, labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(PLAN, Alone())
        run_evaluate("run", PLAN, Alone(), "test", None, 3)
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the trained run, as the working directory."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "copy"))
    return tmp_path / "copy"


def report(*arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["report", *arguments])
    assert not end.value.code
    return arguments[0]


def test_the_report_of_a_run(folder, monkeypatch):
    report("run")
    text = (folder / "run/report.html").read_text()
    page = check_page(text)
    for head in (
        "Curves",
        "Evaluation: test",
        "Confusion matrix",
        "Worst and best images",
        "Images",
        "Settings",
    ):
        assert head in page.texts
    for title in ("Loss", "Validation IoU", "Learning rate", "Norm of the gradient"):
        assert title in page.texts
    assert all(page.texts.count(name) >= 4 for name in NASTY), (
        "in curves, scores, matrix and legend"
    )
    assert len(page.tags("script")) == 1
    record = json.loads((folder / "run/evaluation/test.json").read_text())
    cells = {t for row in record["confusion"] for t in (f"{n:,}" for n in row)}
    assert cells <= set(page.texts)
    names = [row["image"] for row in record["images"]]
    assert len(page.tags("img")) == 4 * 4
    alts = [picture["alt"] for picture in page.tags("img")]
    assert (
        alts[1] == f"True classes of {names[0]}"
        and alts[-1] == f"Wrong pixels in magenta of {names[-1]}"
    )
    assert str(PLAN.optim.lr) in page.texts and "peak memory of each rank" in page.texts
    start, *_, end = read_log("run")
    (planned,) = planned_memory(PLAN, read_manifest(find("run")), start)
    assert start["base_memory"][0] + SLACK < planned < start["base_memory"][0] + SLACK + 2e7
    words = f"{si(planned, 'B')}, {si(end['peak_memory_of_steps'][0], 'B')}"
    label = "memory of each rank in steps: planned, measured"
    assert page.texts[page.texts.index(label) + 1].startswith(words)
    report("run", "--pictures", "0", "--output", "deep/r.html")
    assert not check_page((folder / "deep/r.html").read_text()).tags("img")
    monkeypatch.setattr(gathering, "_ROWS", 2)
    report("run", "--pictures", "0")
    assert "2 more images are left out" in (folder / "run/report.html").read_text()


def test_pictures_come_from_predictions_of_this_network_only(folder, monkeypatch):
    """A map with other scores is not shown; then the network computes the image, if it is small enough."""
    with pytest.raises(SystemExit):
        main(["predict", "run", "--output", "maps", "--predict.formats", "[hdf5]"])
    monkeypatch.setattr(pictures, "_COMPUTED", 0)
    monkeypatch.setattr(pictures, "_STRIP", 200)
    report("run", "--predictions", "maps")
    with_maps = check_page((folder / "run/report.html").read_text())
    assert len(with_maps.tags("img")) == 4 * 4
    for path in Path("maps").glob("*.h5"):
        with h5py.File(path, "r+") as f:
            f["classes"][5, 5] = (f["classes"][5, 5] + 1) % 3
    report("run", "--predictions", "maps")
    refused = check_page((folder / "run/report.html").read_text())
    assert (
        not refused.tags("img")
        and sum("has no picture, because maps" in t for t in refused.texts) == 4
    )
    monkeypatch.setattr(pictures, "_COMPUTED", 10**6)
    report("run", "--predictions", "maps")
    again = check_page((folder / "run/report.html").read_text())
    assert [p["src"] for p in again.tags("img")] == [p["src"] for p in with_maps.tags("img")]
    Path("s.h5").unlink()
    report("run")
    gone = check_page((folder / "run/report.html").read_text())
    assert not gone.tags("img") and any("no pictures, because" in t for t in gone.texts)


def test_what_is_missing_or_old_is_told(folder, refused):
    train(replace(PLAN, train=replace(PLAN.train, seed=1)), Alone())
    report("run")
    assert (
        "was written anew or removed after this evaluation" in Path("run/report.html").read_text()
    )
    shutil.rmtree("run/evaluation")
    Path("run/log.jsonl").unlink()
    report("run")
    page = check_page(Path("run/report.html").read_text())
    assert "The run has no log.jsonl, so there are no curves." in page.texts
    assert any(
        text.startswith("Not evaluated yet: run distseg evaluate run") for text in page.texts
    )
    Path("run/evaluation").mkdir()
    Path("run/evaluation/test.json").write_text("{}")
    assert "run/evaluation/test.json is damaged, or was not written by distseg evaluate" in refused(
        "report", "run"
    )
    assert "--pictures must be a whole number from 0" in refused(
        "report", "run", "--pictures", "-1"
    )
    assert "is a folder" in refused("report", "run", "--output", "run")
    assert "name a file that ends in .json" in refused("evaluate", "run", "--output", "scores.csv")


@pytest.mark.slow
def test_a_volume_is_drawn_by_three_cuts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random_store(tmp_path / "s.h5", train=[(8, 12, 10)], val=[(8, 8, 12)], test=[(8, 12, 12)])
    plan = replace(PLAN, predict=PredictConfig(tile=Size("8x8x8")))
    train(plan, Alone())
    run_evaluate("run", plan, Alone(), "test", None, 3)
    report("run")
    assert [
        picture["alt"] for picture in check_page(Path("run/report.html").read_text()).tags("img")
    ] == [
        f"{what} of test0"
        for what in ("Image", "True classes", "Predicted classes", "Wrong pixels in magenta")
    ]


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("classes", [("dark", "bright"), ("height",)])
def test_labels_of_whole_images_have_a_table_and_pictures_of_images(tmp_path, monkeypatch, classes):
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "s.h5", classes=classes)
    plan = replace(PLAN, model=ModelConfig("test_validation:classifier"))
    plan = replace(plan, loss=LossConfig("mse" if len(classes) == 1 else "cross_entropy"))
    train(plan, Alone())
    run_evaluate("run", plan, Alone(), "test", None, 3)
    report("run")
    page = check_page(Path("run/report.html").read_text())
    rows = json.loads(Path("run/evaluation/test.json").read_text())["images"]
    assert {row["image"] for row in rows} <= set(page.texts)
    titles = [title(row) for row in rows]
    assert [picture["alt"] for picture in page.tags("img")] == [f"Image {one}" for one in titles]
    assert set(titles) <= set(page.texts) and "no label" not in page.texts
    assert opened(page.tags("img")[0]["src"]).size == (43, 29)
    assert ("Confusion matrix" in page.texts) == (len(classes) > 1)
    assert "predicted" in page.texts and "Loss" in page.texts


def title(row: dict) -> str:
    true, found = (f"{v:.4g}" if type(v) is float else v for v in (row["label"], row["predicted"]))
    return f"{row['image']}: true {true}, predicted {found}"


def opened(source: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2])))


@pytest.mark.parametrize("size, shown", [((5, 20, 30), (30, 20)), ((600, 290), (97, 200))])
def test_a_labelled_picture_is_small_and_of_the_middle(tmp_path, monkeypatch, size, shown):
    """The middle slice of a volume; a large image shrunk in several strips."""
    monkeypatch.setattr(pictures, "_STRIP", 2000)
    middle = np.full(size[-2:], 90, np.uint8)
    middle[: size[-2] // 2] = 200
    pixels = np.zeros((1, *size), np.uint8)
    pixels[(0, *(n // 2 for n in size[:-2]))] = middle
    with StoreWriter(tmp_path / "s.h5", ["dark", "bright"], 1) as writer:
        image = writer.add_image("a", size, np.uint8, "train", False, label=1)
        image.write(Box.whole(size), pixels)
    gallery = pictures.Gallery(Store(tmp_path / "s.h5"), np.zeros((2, 3)), tmp_path, None)
    rows = [{"image": "a", "label": "dark", "predicted": "bright", "probability": 0.2}] * 7
    worst, best = gallery.labelled(rows, 1)
    assert (len(worst.panels), len(best.panels)) == (6, 1)
    picture = opened(best.panels[0].source)
    assert picture.size == shown and best.panels[0].title == title(rows[0])
    upper, lower = np.split(np.asarray(picture)[:, :, 0].astype(int), 2)
    assert upper.mean() > lower.mean() + 50 and upper.std() < 20


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_sorts_the_table_and_meets_no_error(folder):
    report("run")
    text = Path("run/report.html").read_text()
    click = (
        "<script>addEventListener('error', e => document.body.dataset.error = e.message);</script>"
    )
    after = (
        "<script>const head = document.querySelectorAll('table.sortable th button')[3];"
        "head.click(); head.click();"
        "document.body.dataset.order = [...document.querySelectorAll('table.sortable tbody th')]"
        ".map(cell => cell.textContent).join('|');"
        "const root = document.documentElement;"
        "document.body.dataset.wide = root.scrollWidth > root.clientWidth;</script></body>"
    )
    Path("clicked.html").write_text(
        text.replace("<body>", "<body>" + click).replace("</body>", after)
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    flags.append("--window-size=500,900")  # as narrow as it goes, about a phone
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", f"file://{folder}/clicked.html"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    (body,) = Page(done.stdout).tags("body")
    assert "data-error" not in body and body["data-wide"] == "false"
    rows = json.loads(Path("run/evaluation/test.json").read_text())["images"]
    dice = {row["image"]: row["mean_dice"] for row in rows}
    assert body["data-order"].split("|") == sorted(dice, key=lambda name: -dice[name])
