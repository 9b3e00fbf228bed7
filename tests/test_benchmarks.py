"""Each benchmark runs, at sizes that show nothing, and leaves its JSON file; what they compute of their own is right."""

import io
import json
import signal
import sys
from contextlib import redirect_stdout
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.geo_gigapixel import Stop  # noqa: E402
from benchmarks.gigapixel import _line  # noqa: E402
from benchmarks.halo_error import by_distance  # noqa: E402
from benchmarks.mutants import MUTANTS  # noqa: E402
from benchmarks.steps import Setting, distributed_step, plain_step  # noqa: E402
from distseg.config.sizes import Size  # noqa: E402

BENCHMARKS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\nQUESTION = " in path.read_text()
)


def test_all_are_found():
    assert BENCHMARKS == [
        "augmentation", "balance", "checkpoints", "faults", "freed_memory", "geo_gigapixel", "gigapixel", "gpu_step", "halo", "halo_error", "horovod_cycle", "layout_memory", "layouts", "mutants", "networks", "norm", "overhead", "overlap", "peers", "pipeline_bubble", "pipeline_devices", "pipeline_model", "precision", "prediction", "reading", "reducers", "referring",
        "research_networks", "scaling", "seal2020", "stage_memory", "stages_streaming", "start_up", "step_time", "streaming", "strong", "weak_scaling", "whole_images",
    ]  # fmt: skip


def quick(name: str, folder: Path) -> dict:
    """The results of a quick run, after a look at what it said."""
    benchmark, printed = import_module(f"benchmarks.{name}"), io.StringIO()
    torch.set_num_threads(1)  # whatever the benchmark before it has set
    with redirect_stdout(printed):
        benchmark.main(["--quick", "--repeats", "1", "--output", str(folder)])
    assert printed.getvalue().startswith(benchmark.QUESTION) and "reproduce: " in printed.getvalue()
    written = json.loads((folder / f"{name}.json").read_text())
    assert written["name"] == name and written["quick"]
    return written["results"]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Of all benchmarks that are asked for, two at a time: most of them wait for a job on one core."""
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module and "runs" in item.fixturenames
    ]
    default = (
        signal.SIGTERM,
        signal.SIG_DFL,
    )  # by which a pool ends its processes; pytest's own handler, which they are born with, raises an exception
    with get_context("fork").Pool(2, signal.signal, default) as pool:
        yield {
            name: pool.apply_async(quick, (name, tmp_path_factory.mktemp(name))) for name in asked
        }


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "halo_error"])
def test_quick(name, runs):
    results = runs[name].get()
    assert results.get("rows") or results["cases"]


@pytest.mark.parametrize("name", ["halo_error"])
def test_the_exact_halo_shows_nothing_and_a_smaller_one_does(name, runs):
    for row in runs[name].get()["rows"]:
        exact = row["halo"] == 11 and row["statistics"] == "image"
        assert (row["gradient"] < 1e-12, row["output max"] < 1e-12) == (exact, exact), row


def test_error_by_distance():
    """The border lies between columns 15 and 16: distance bins of 8 pixels to both sides."""
    difference = torch.zeros(1, 1, 32)
    difference[..., 15], difference[..., 23], difference[..., 24] = 3.0, -1.0, 2.0
    largest, rms = by_distance(difference, 16)
    assert largest == [3.0, 2.0]
    assert rms == pytest.approx([(10 / 16) ** 0.5, (4 / 16) ** 0.5])


def test_both_steps_have_the_same_loss():
    """Without dropout: the masks are drawn in other ways."""
    setting = Setting(Size((32, 32)), depth=2, num_convs=1, base_channels=4, dropout=0.0)
    assert plain_step(setting)() == pytest.approx(distributed_step(setting)[0](), rel=1e-5)


@pytest.mark.parametrize("text", ["INT:0.25", "KILL:cog+5", "TERM:gpkg+0"])
def test_a_stop_is_read_as_it_is_written(text):
    assert str(Stop.parse(text)) == text


def test_a_stop_between_tiles_waits_for_its_share(tmp_path):
    stop, record = Stop.parse("INT:0.5"), tmp_path / "image.partial" / "done"
    assert not stop.reached(tmp_path, 7)
    record.parent.mkdir()
    for finished, there in ((0, False), (1, False), (2, True)):
        np.array([1] * finished + [0] * (4 - finished), np.uint64).tofile(record)
        assert stop.reached(tmp_path, 7) == there


def test_a_stop_in_a_file_waits_for_this_file_of_this_process(tmp_path):
    stop = Stop.parse("KILL:cog")
    for name, there in (
        ("image.cog.tif", False),
        (".image.gpkg.0a-7-0a.writing", False),
        (".image.cog.tif.0a-8-0a.writing", False),
        (".image.cog.tif.0a-7-0a.writing", True),
    ):
        (tmp_path / name).touch()
        assert stop.reached(tmp_path, 7) == there


def test_line_through_peaks():
    rows = [{"pixels": n * 1e6, "peak [GB]": 0.5 + 0.1 * n} for n in (1, 4, 9)]
    assert _line(rows) == pytest.approx({"GB": 0.5, "bytes per pixel": 100})


def test_each_planted_fault_has_its_place():
    """Code that is changed takes its fault along: change ``MUTANTS`` in the same commit."""
    lost = [
        mutant.name
        for mutant in MUTANTS
        if (ROOT / "distseg" / mutant.file).read_text().count(mutant.before) != 1
        or not all((ROOT / f"tests/test_{name}.py").exists() for name in mutant.tests.split())
    ]
    assert not lost
