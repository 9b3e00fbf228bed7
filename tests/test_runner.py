"""The runner of the `parallel` tests, itself under test: whatever a rank does, each test gets the right verdict."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpirunner import launch, marks
from mpirunner.effort import EVERY, SLOWEST, Effort, Look, lost

pytestmark = pytest.mark.last

ODD_ONES = """
import os, time, pytest

@pytest.mark.parallel(3)
def test_sum(comm, ranks):
    assert comm.allreduce(1) == comm.size == ranks == 3

@pytest.mark.parallel(3)
def test_all_ranks_fail(comm):
    assert comm.size == 4

@pytest.mark.parallel(3)
def test_one_rank_fails(comm):
    assert comm.rank != 1, "rank one is bad"

@pytest.mark.parallel(3)
def test_one_rank_fails_and_the_others_wait(comm):
    assert comm.rank != 1, "rank one is bad"
    comm.Barrier()

@pytest.mark.parallel(3)
@pytest.mark.timeout(1)
def test_hang(comm):
    if comm.rank == 2:
        time.sleep(1000)
    comm.Barrier()

@pytest.mark.parallel(3)
def test_death(comm):
    comm.Barrier()  # all have come through setup
    if comm.rank == 2:
        os.kill(os.getpid(), 11)
    comm.Barrier()

@pytest.mark.parallel(3)
def test_silent_exit(comm):
    comm.Barrier()
    if comm.rank == 0:
        os._exit(0)
    comm.Barrier()

@pytest.mark.parallel(3)
def test_skipped_on_some(comm):
    if comm.rank == 0:
        pytest.skip("not here")

@pytest.mark.parallel([1, 3])
def test_folders(comm, ranks, tmp_path, shared_path):
    (shared_path / str(comm.rank)).touch()
    comm.Barrier()
    assert len(list(shared_path.iterdir())) == ranks
    assert len(set(comm.allgather(str(tmp_path)))) == ranks
"""

STUCK = """
import os, pytest

@pytest.mark.parallel(2)
def test_stuck(comm):
    if comm.rank == 0:
        with open("writing", "w") as file:
            file.write(os.environ["MPIRUNNER_JOB"])
        os.rename("writing", "started")
        comm.recv()
    comm.Barrier()
"""

SERIAL = """
import time, pytest

@pytest.mark.timeout(0.5)
def test_hang():
    time.sleep(1000)

def test_without_ranks(comm):
    pass

def test_command(mpirun):
    done = mpirun(2, "-c", "from mpi4py.MPI import COMM_WORLD as c; print(c.size); raise SystemExit(3 * c.rank)")
    assert (done.returncode, done.stdout.split()) == (3, ["2", "2"]), str(done)

def test_command_hangs(mpirun):
    mpirun(2, "-c", "import time; time.sleep(1000)", timeout=1)
"""

PROGRAMS = """
import os, time, pytest

pytestmark = pytest.mark.last

def ran():
    with open("ran") as file:
        return file.read().splitlines()

@pytest.mark.parametrize("n", range(9))
def test_program(n):
    with open("ran", "a") as file:
        file.write(f"{n} {os.getpid()}\\n")
    while n == 0 and not any(line.startswith("8") for line in ran()):
        time.sleep(0.02)
    assert n != 8
    assert os.environ.get("MPIRUNNER_JOB") is None
"""

STARVED = """
import time, pytest

def work(seconds):
    while time.process_time() < seconds:
        pass

@pytest.mark.timeout(LIMIT)
def test_works():
    work(time.process_time() + WORK)

@pytest.mark.timeout(LIMIT)
def test_sleeps():
    time.sleep(1000)

@pytest.mark.timeout(LIMIT)
def test_spins():
    work(float("inf"))

@pytest.mark.parallel(2)
@pytest.mark.timeout(LIMIT)
def test_ranks_work(comm):
    work(time.process_time() + WORK / 2)
    comm.Barrier()

@pytest.mark.parallel(2)
@pytest.mark.timeout(LIMIT)
def test_ranks_wait(comm):
    if comm.rank == 0:
        time.sleep(1000)
    comm.Barrier()

def test_command(mpirun):
    mpirun(1, "-c", "import time\\nwhile time.process_time() < WORK: pass", timeout=LIMIT)
"""


def start(folder: Path, *args: str) -> subprocess.Popen:
    env = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "mpirunner.plugin",
        "-p",
        "no:cacheprovider",
        "-v",
        *args,
    ]
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def pytest_on(folder: Path, *args: str) -> str:
    return start(folder, *args).communicate()[0]


def wait_for(happened) -> None:
    """The test's own limit ends the wait."""
    while not happened():
        time.sleep(0.02)


def verdicts(output: str) -> list[tuple[str, str]]:
    return re.findall(r"^\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", output, re.MULTILINE)


def about(output: str, test: str) -> str:
    """What the output tells about one failed test."""
    return re.search(rf"\n_+ {re.escape(test)} _+\n(.*?)\n(?:_+ test|=====)", output, re.DOTALL)[1]


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "test_odd.py").write_text(ODD_ONES)
    return pytest_on(folder)


@pytest.mark.slow
def test_every_test_has_its_own_verdict(odd):
    assert verdicts(odd) == [
        ("test_folders[ranks=1]", "PASSED"),
        ("test_sum[ranks=3]", "PASSED"),
        ("test_all_ranks_fail[ranks=3]", "FAILED"),
        ("test_one_rank_fails[ranks=3]", "FAILED"),
        ("test_one_rank_fails_and_the_others_wait[ranks=3]", "FAILED"),
        ("test_hang[ranks=3]", "FAILED"),
        ("test_death[ranks=3]", "FAILED"),
        ("test_silent_exit[ranks=3]", "FAILED"),
        ("test_skipped_on_some[ranks=3]", "FAILED"),
        ("test_folders[ranks=3]", "PASSED"),
    ], odd


@pytest.mark.slow
@pytest.mark.parametrize(
    "test, told",
    [
        ("test_all_ranks_fail", ["all 3 ranks", "assert 3 == 4"]),
        ("test_one_rank_fails", ["rank 1 of 3", "rank one is bad"]),
        (
            "test_one_rank_fails_and_the_others_wait",
            ["rank 1 of 3", "rank one is bad", "stack of ranks 0, 2 of 3"],
        ),
        (
            "test_hang",
            [
                "timed out after 1 s",
                "stack of ranks 0, 1 of 3",
                "stack of rank 2 of 3",
                "in test_hang",
            ],
        ),
        ("test_death", ["died (status 139)", "Segmentation fault", "stack of rank 2 of 3"]),
        ("test_silent_exit", ["died", "process rank 0"]),
        ("test_skipped_on_some", ["passed on ranks 1, 2 of 3", "skipped on rank 0 of 3"]),
    ],
)
def test_a_failure_says_which_ranks_and_where(odd, test, told):
    text = about(odd, f"{test}[ranks=3]")
    assert [part for part in told if part not in text] == [], text


@pytest.mark.slow
def test_a_message_is_shown_once_not_once_a_rank(odd):
    assert about(odd, "test_all_ranks_fail[ranks=3]").count("E       assert 3 == 4") == 1


def test_ordinary_tests_and_command_lines(tmp_path):
    (tmp_path / "test_serial.py").write_text(SERIAL)
    output = pytest_on(tmp_path)
    assert verdicts(output) == [
        ("test_hang", "FAILED"), ("test_without_ranks", "ERROR"), ("test_command", "PASSED"), ("test_command_hangs", "FAILED"),
    ], output  # fmt: skip
    assert "timed out after 0.5 s" in about(output, "test_hang")
    assert "in <module>" in about(output, "test_command_hangs"), "the stack of every rank"
    assert "mark the test with @pytest.mark.parallel(n)" in output


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="a helper runs where there are two cores"
)
def test_a_helper_takes_command_lines_from_the_end(tmp_path):
    (tmp_path / "test_programs.py").write_text(PROGRAMS)
    output = pytest_on(tmp_path)
    expected = [(f"test_program[{n}]", "FAILED" if n == 8 else "PASSED") for n in range(9)]
    assert verdicts(output) == expected, output
    assert "assert 8 != 8" in about(output, "test_program[8]")
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(n for n, _ in ran) == [*"012345678"]  # each once
    process = dict(ran)
    assert len({process["0"], process["8"]}) == len({*process.values()}) == 2


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="a helper runs where there are two cores"
)
def test_a_helper_that_dies_fails_its_test_and_leaves_the_others(tmp_path):
    dies = "    if n == 8:\n        os._exit(1)\n    assert n != 8"
    (tmp_path / "test_programs.py").write_text(PROGRAMS.replace("    assert n != 8", dies))
    output = pytest_on(tmp_path)
    expected = [(f"test_program[{n}]", "FAILED" if n == 8 else "PASSED") for n in range(9)]
    assert verdicts(output) == expected, output
    assert "died (status 1)" in about(output, "test_program[8]")


def test_nothing_survives_a_killed_run(tmp_path):
    (tmp_path / "test_stuck.py").write_text(STUCK)
    process = start(tmp_path)
    try:
        wait_for(lambda: list(tmp_path.glob("started")))
        job = Path((tmp_path / "started").read_text())
        assert len(launch.members(job)) >= 2
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not launch.members(job))  # mpirun ends its ranks when its parent is gone
    launch.remove(job)


def test_a_selection_runs_as_selected(tmp_path):
    (tmp_path / "test_odd.py").write_text(ODD_ONES)
    output = pytest_on(
        tmp_path, "-x", "test_odd.py::test_one_rank_fails[ranks=3]", "test_odd.py::test_folders"
    )
    assert verdicts(output) == [
        ("test_folders[ranks=1]", "PASSED"),
        ("test_one_rank_fails[ranks=3]", "FAILED"),
    ], output


def test_marks_are_read_as_written():
    mark = pytest.mark.parallel
    assert marks.sizes(mark.mark) == [1, 2, 4, 6]
    assert marks.sizes(mark(4).mark) == [4]
    assert marks.sizes(mark(1, 2).mark) == marks.sizes(mark([1, 2]).mark) == [1, 2]
    with pytest.raises(ValueError, match=r"not \[0\]: write parallel\(4\)"):
        marks.sizes(mark(0).mark)


# limits beside other work


def looks(seconds: float, cores: int, idle: float, **threads: tuple[float, float]) -> float:
    """The seconds lost between two looks, of which the first found the same threads."""
    before = Look(100.0, cores, 7.0, dict.fromkeys(threads, (5.0, 3.0)))
    after = Look(
        100.0 + seconds,
        cores,
        7.0 + idle,
        {name: (5.0 + ran, 3.0 + waited) for name, (ran, waited) in threads.items()},
    )
    return lost(before, after)


@pytest.mark.parametrize(
    "seconds, found",
    [  # cores, idle seconds of all of them, each thread's seconds (on a core, in wait for one)
        (0, dict(cores=2, idle=12, a=(0, 0))),  # asleep, nobody else
        (0, dict(cores=1, idle=0, a=(0, 0))),  # asleep, beside others
        (0, dict(cores=2, idle=12, a=(12, 0))),  # at work, nobody else
        (0, dict(cores=2, idle=0, a=(12, 0))),  # at work, and others on the other core
        (
            0,
            dict(cores=2, idle=0, **{k: (4, 8) for k in "abcdef"}),
        ),  # 6 ranks, nobody else: they wait for each other
        (9, dict(cores=1, idle=0, a=(3, 9))),  # at work, beside 3 others
        (6, dict(cores=1, idle=0, a=(2, 6))),  # so too, and asleep for 4 s
        (6, dict(cores=2, idle=0, **{k: (2, 10) for k in "abcdef"})),  # 6 ranks, beside 6 others
        (
            6,
            dict(cores=1, idle=0, a=(3, 6), **{k: (0, 0) for k in "bcdef"}),
        ),  # 5 of the ranks wait asleep
        (
            0,
            dict(cores=2, idle=11.4, **{k: (0.1, 0) for k in "abcdef"}),
        ),  # all ask again and again, asleep in between: a hang
    ],
)
def test_seconds_are_lost_only_where_others_take_a_core_that_the_job_wants(seconds, found):
    assert looks(12, **found) == pytest.approx(seconds)


def test_threads_come_and_go_and_disks_take_their_time():
    before = Look(0, 1, 0, {1: (5, 5), 2: (50, 50)})
    assert lost(before, Look(4, 1, 0, {1: (6, 8)})) == 3, (
        "of a thread that has ended nothing is known"
    )
    assert lost(before, Look(4, 1, 0, {1: (5, 5), 2: (50, 50), 3: (1, 3)})) == 3, (
        "a new one has all that it has from these seconds"
    )
    assert lost(before, Look(4, 1, 4, {1: (5, 5), 2: (50, 50)}, disk=True)) == 4
    assert lost(Look(0), Look(4)) == 0, "where nothing can be known"


def test_even_who_gets_nothing_comes_to_the_limit(monkeypatch):
    seen = iter([Look(0, 1, 0, {1: (0, 0)}), Look(400, 1, 0, {1: (0, 400)})])
    monkeypatch.setattr("mpirunner.effort.look", lambda pids: next(seen))
    assert Effort(1).look() == 400 / SLOWEST


def test_a_sleeping_process_has_the_walls_clock():
    """It is not this process, below which are the jobs of other tests, which compete with others on a busy machine."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        began, clock = time.monotonic(), Effort(sleeper.pid)
        time.sleep(2 * EVERY)
        assert clock.look() == pytest.approx(time.monotonic() - began, rel=0.2)
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.slow
def test_limits_stretch_for_who_is_starved_but_not_for_who_hangs(tmp_path):
    """All on one core, beside three others: a quarter of it is left, so that honest work takes longer than its limit."""
    (tmp_path / "test_starved.py").write_text(
        STARVED.replace("LIMIT", "1.5").replace("WORK", "0.9")
    )
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # as will be theirs
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        output = pytest_on(tmp_path, "--durations=0")
    finally:
        os.sched_setaffinity(0, cores)
        for process in others:
            process.kill()
            process.wait()
    assert verdicts(output) == [
        ("test_works", "PASSED"), ("test_sleeps", "FAILED"), ("test_spins", "FAILED"),
        ("test_ranks_work[ranks=2]", "PASSED"), ("test_ranks_wait[ranks=2]", "FAILED"), ("test_command", "PASSED"),
    ], output  # fmt: skip
    assert output.count("timed out after 1.5 s") >= 3, output
