"""Each benchmark runs, at sizes that show nothing, and leaves its JSON file; what they compute of their own is right."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.halo_error import by_distance  # noqa: E402
from benchmarks.steps import Setting, distributed_step, plain_step  # noqa: E402
from distseg.extents import Extents  # noqa: E402

BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\nQUESTION = " in path.read_text())


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_all_are_found():
    assert BENCHMARKS == [
        "balance", "freed_memory", "gigapixel", "halo", "halo_error", "horovod_cycle", "in_time", "norm", "overhead", "overlap", "peers", "pipeline_bubble",
        "pipeline_devices", "pipeline_model", "precision", "scaling", "stage_memory", "step_time", "strong",
    ]  # fmt: skip


def quick(name: str, folder: Path, capsys) -> dict:
    """The results of a quick run, after a look at what it said."""
    benchmark = import_module(f"benchmarks.{name}")
    benchmark.main(["--quick", "--repeats", "1", "--output", str(folder)])
    printed = capsys.readouterr().out
    assert printed.startswith(benchmark.QUESTION) and "reproduce: " in printed
    written = json.loads((folder / f"{name}.json").read_text())
    assert written["name"] == name and written["quick"]
    return written["results"]


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "halo_error"])
def test_quick(name, tmp_path, capsys):
    results = quick(name, tmp_path, capsys)
    assert results.get("rows") or results["cases"]


def test_the_exact_halo_shows_nothing_and_a_smaller_one_does(tmp_path, capsys):
    for row in quick("halo_error", tmp_path, capsys)["rows"]:
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
    setting = Setting(Extents((32, 32)), depth=2, num_convs=1, base_channels=4, dropout=0.0)
    assert plain_step(setting)() == pytest.approx(distributed_step(setting)[0](), rel=1e-5)
