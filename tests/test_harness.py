"""The benchmarks' harness: turns, ratios, reports, jobs on several ranks."""

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEVER = 3600.0  # seconds of the wall; the test's own limit comes first, and makes allowance for a busy machine
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    Reading,
    Results,
    Spread,
    last_json,
    measure,
    parent,
    repeats_of,
    report,
    run_ranks,
)
from benchmarks.machine import command_line, environment, portable, summary  # noqa: E402


class Machine:
    """Cases that cost seconds on a clock of their own, and note who ran when."""

    def __init__(self):
        self.now, self.order = 0.0, ""

    def clock(self) -> float:
        return self.now

    def case(self, name: str, *seconds: float):
        turns = iter(seconds)

        def run() -> float:
            self.order += name
            self.now += next(turns)
            return 17.0  # a plain number is no Reading

        return run


def test_cases_take_turns_and_the_warm_up_does_not_count():
    machine = Machine()
    results = measure(
        {"a": machine.case("a", 9, 1, 2), "b": machine.case("b", 9, 3, 4)},
        repeats=2,
        warmup=1,
        clock=machine.clock,
    )
    assert machine.order == "ababab"
    assert results.samples == {"a": [1, 2], "b": [3, 4]} and results.baseline == "a"


def test_ratios_are_taken_turn_by_turn():
    """The machine gets ten times slower in the second turn: b is twice a in both, whatever their medians."""
    results = Results({"a": [1, 10, 3], "b": [2, 20, 3]}, "a")
    assert results.ratio("b") == Spread(1, 2, 2)
    assert results.speedup("b") == Spread(0.5, 0.5, 1)
    assert results.spread("b") == Spread(2, 3, 20)
    assert results.rows()[1] == {
        "case": "b",
        "min [s]": 2,
        "median [s]": 3,
        "max [s]": 20,
        "/ a": 2,
        "from": 1,
        "to": 2,
    }


def test_a_reading_counts_instead_of_the_clock():
    results = measure({"a": lambda: Reading(5.0)}, repeats=2, warmup=0, unit="GiB")
    assert results.samples == {"a": [5.0, 5.0]} and results.unit == "GiB"


@pytest.mark.parametrize(
    "given",
    [{"cases": {}}, {"cases": {"a": int}, "baseline": "b"}, {"cases": {"a": int}, "repeats": 0}],
)
def test_measure_refuses_what_can_not_be_compared(given):
    with pytest.raises(
        ValueError, match="give a case, a baseline among them and at least one repeat"
    ):
        measure(**given)


def options(*arguments: str) -> argparse.Namespace:
    return argparse.ArgumentParser(parents=[parent(repeats=7)]).parse_args(arguments)


def test_options():
    assert (
        repeats_of(options()),
        repeats_of(options("--quick")),
        repeats_of(options("--quick", "--repeats", "1")),
    ) == (7, 2, 1)


def test_report_prints_the_question_and_writes_json(tmp_path, capsys):
    results = Results({"a": [1.0, 2.0], "b": [2.0, 8.0]}, "a")
    drawn = []
    path = report(
        "x",
        "Is b slower?",
        results,
        options("--output", str(tmp_path)),
        {"size": 8},
        "A note.",
        drawn.append,
    )
    printed = capsys.readouterr().out
    assert (
        printed.startswith("Is b slower?\n")
        and "machine: " in printed
        and "reproduce: python" in printed
        and "A note." in printed
    )
    written = json.loads((tmp_path / "x.json").read_text())
    assert path == tmp_path / "x.json" and drawn == [tmp_path / "x.png"]
    assert (
        written["question"] == "Is b slower?"
        and written["parameters"] == {"size": 8}
        and written["environment"]["cores"] >= 1
    )
    assert written["results"]["cases"]["b"] == {
        "samples": [2.0, 8.0], "min": 2.0, "median": 5.0, "max": 8.0, "ratio": {"min": 2.0, "median": 3.0, "max": 4.0},
    }  # fmt: skip


def test_a_quick_result_does_not_replace_a_real_one(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    results = Results({"a": [1.0]}, "a")
    assert report("x", "?", results, options()) == tmp_path / "x.json"
    assert report("x", "?", results, options("--quick")) == tmp_path / "quick" / "x.json"


def test_environment_is_complete_and_has_no_path(monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            str(ROOT / "benchmarks" / "x.py"),
            "--output=/somewhere/else",
            "/data/world.h5",
            str(ROOT / "runs"),
        ],
    )
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    machine = environment()
    assert (
        machine["command"] == command_line() == "python benchmarks/x.py --output=else world.h5 runs"
    )
    assert (
        machine["cores"] >= 1
        and machine["memory_gib"] > 0
        and machine["packages"]["torch"]
        and machine["threads"] >= 1
    )
    assert str(ROOT) not in json.dumps(machine) and machine["cpu"] in summary(machine)


@pytest.mark.parametrize("argument", ["--quick", "2x2", "a/b.yaml", "--sizes=1,2"])
def test_other_arguments_stay_as_they_are(argument):
    assert portable(argument) == argument


WORKER = """
import json, os
from mpi4py import MPI
ranks = MPI.COMM_WORLD.allreduce(1)
if MPI.COMM_WORLD.rank == 0:
    print("some words before")
    print(json.dumps({"ranks": ranks, "threads": os.environ["OMP_NUM_THREADS"], "more": os.environ["MORE"], "rank": os.environ.get("RANK")}))
"""


def test_one_and_two_ranks_return_their_last_line(monkeypatch):
    monkeypatch.setenv("RANK", "5")  # another launcher's, which must not reach the job
    for ranks in (1, 2):
        found = run_ranks(ranks, ["-c", WORKER], timeout=NEVER, environment={"MORE": "x"})
        assert found == {"ranks": ranks, "threads": "1", "more": "x", "rank": None}


def test_a_job_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)on 2 ranks ended with status 3.*too few tiles"):
        run_ranks(
            2,
            ["-c", "import sys; print('too few tiles', file=sys.stderr); sys.exit(3)"],
            timeout=NEVER,
        )


def test_a_job_that_hangs_is_ended():
    with pytest.raises(RuntimeError, match="took more than 0.5 s and was ended"):
        run_ranks(1, ["-c", "import time; time.sleep(100)"], timeout=0.5)


@pytest.mark.parametrize("text", ["", "seconds 3", '{"seconds": 3}\nbye', "[3]"])
def test_a_last_line_that_is_no_object_is_refused(text):
    with pytest.raises(RuntimeError, match="not a JSON object: print"):
        last_json(text)
