"""A job that hangs is ended, wherever it hangs, and says where each of its ranks stood."""

import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_transport import torchrun

import distseg
from distseg.comm import guardian, progress
from distseg.comm.alone import Alone
from distseg.comm.guardian import ALONE_AFTER, GONE_AFTER, PAGE, Member, Rank, report, verdict
from distseg.comm.waits import Ranks, Waits

ROOT = Path(distseg.__file__).parents[1]


def members(*told, **fields):
    """``(still, state)`` of each rank."""
    found = []
    for rank, (still, state) in enumerate(told):
        member = Member(rank, "node1")
        member.hear({"still": still, "where": f"step {rank}", "state": state})
        found.append(member)
    for name, (rank, value) in fields.items():
        setattr(found[rank], name, value)
    return found


@pytest.mark.parametrize(
    "ranks, found",
    [
        (members((0, "R"), (0, "R")), None),
        (members((31, "S"), (0, "R")), None),  # one waits while the other works
        (members((31, "S"), (29, "R")), None),
        (members((31, "S"), (32, "R")), "nothing has moved for 30 s"),
        (
            members((31, "S"), (32, "R"), said_bye=(1, True)),
            "nothing has moved for 30 s",
        ),  # the other has ended
        (members((0, "S"), (31, "T")), "rank 1 is stopped for 30 s"),
        (members((0, "S"), (29, "T")), None),
        (members((0, "S"), (0, "R"), unheard=(1, 31.0)), "rank 1 has not been heard of for 30 s"),
        (members((0, "S"), (0, "R"), lost=(1, True)), None),  # its launcher may still notice
        ([*members((0, "S"), (0, "R"), lost=(1, True), unheard=(1, GONE_AFTER + 1))], None),
        (members((0, "S"), (0, "R"), said_bye=(1, True), unheard=(1, 100.0)), None),
        ([Member(0, "node1"), Member(1, "node1")], None),  # not there yet
    ],
)
def test_when_a_job_has_to_be_ended(ranks, found):
    if any(m.lost and m.unheard for m in ranks):
        found = "rank 1 ended without an error message"
    said = verdict(ranks, 30.0)
    assert said is None if found is None else said.startswith(found)


def standing(*ranks):
    """Members of a job of the Python interface: ``left``, ``waits``, ``works`` or ``gone``, of each rank."""
    found = members(*[(ALONE_AFTER + 1, "S")] * len(ranks))
    for member, what in zip(found, ranks):
        member.has_left, member.waits = what == "left", what == "waits"
        if what == "gone":
            member.lost, member.unheard = True, GONE_AFTER + 1
    return found


@pytest.mark.parametrize(
    "ranks, found",
    [
        (("waits", "left"), "rank 1 has left the job, but rank 0 waits for all ranks"),
        (("left", "waits", "waits"), "rank 0 has left the job, but ranks 1, 2 wait for all ranks"),
        (("left", "waits", "gone"), "ranks 0, 2 have left the job, but rank 1 waits for all ranks"),
        (("left", "waits", "works"), None),  # it may leave too, or call distseg
        (("left", "left"), None),  # the end of the job
        (("waits", "waits"), None),  # a slow message
        (("works", "gone"), None),
    ],
)
def test_when_a_job_has_to_be_ended_because_a_rank_has_left(ranks, found):
    assert verdict(standing(*ranks), 0.0) == found


def test_ranks_that_have_just_begun_to_wait_go_on():
    ranks = standing("left", "waits", "waits")
    ranks[2].still = 1.0
    assert verdict(ranks, 0.0) is None


@pytest.mark.parametrize(
    "still, patience, found",
    [
        ((36, 36), (30, 0), "rank 0 waits for other ranks, and nothing has moved for 30 s"),
        ((36, 36), (30, 40), "ranks 0, 1 wait for other ranks, and nothing has moved for 30 s"),
        ((36, 0), (30, 0), None),  # the other rank makes progress
        ((34, 34), (30, 0), None),  # the waiting rank may raise an error by itself
        ((1e4, 1e4), (0, 0), None),  # both are in the program's own code, or may wait for ever
    ],
)
def test_when_a_program_has_to_be_ended_because_ranks_wait(still, patience, found):
    ranks = members(*[(seconds, "S") for seconds in still])
    for member, seconds in zip(ranks, patience):
        member.patience = seconds
    said = verdict(ranks, 0.0)
    assert said is None if found is None else said.startswith(found)
    if found:
        text = report(said, ranks, None)
        assert "give init_mesh and distribute a larger timeout" in text
        assert "run.timeout" not in text


def test_a_silent_node_makes_no_progress():
    ranks = members((40, "S"), (0, "R"))
    ranks[0].patience, ranks[1].unheard = 30.0, 36.0
    assert verdict(ranks, 0.0).startswith("rank 0 waits for other ranks")


def test_calls_that_block_are_reported_with_their_timeout(monkeypatch):
    page = mmap.mmap(-1, PAGE)
    rank, found = Rank(page, 0, 0), []

    class Comm(Alone):
        def look(self, what=None, root=0):
            found.append((rank.where, rank.patience))

        allgather = allreduce = gather = bcast = Bcast = Barrier = Split = split_by_node = look

    monkeypatch.setattr(progress, "_page", page)
    ranks = Ranks(Comm(), Waits(7.0))
    ranks.Bcast(None, root=0)
    ranks.Barrier()
    for name in ("allgather", "allreduce", "gather", "bcast", "split_by_node"):
        getattr(ranks, name)(1)
    with pytest.raises(ZeroDivisionError), ranks.waits.reported("a sum"):
        raise ZeroDivisionError
    assert found == [("starting, waits for all ranks to make the same call", 7.0)] * 7
    assert rank.where == "starting" and rank.patience == 0 and not rank.waits


def test_a_timeout_below_zero_is_refused():
    with pytest.raises(ValueError, match="timeout is -1: give seconds of at least 0"):
        distseg.init_mesh(timeout=-1)


def test_a_report_of_a_rank_that_has_left_says_what_to_do():
    said = report("rank 1 has left the job", standing("waits", "left"), None)
    assert "as by sys.exit() on one rank" in said and "run.timeout" not in said


def test_ranks_that_stand_at_one_place_share_a_line():
    text = report(
        "nothing has moved",
        [*members((40, "S"), (40, "S"), (41, "T")), Member(3, "node2")],
        "runs/mine/hang",
    )
    assert (
        "rank 0 on node1: step 0, no progress for 40 s" in text
        and "rank 2 on node1: step 2, is stopped (SIGSTOP), no progress for 41 s" in text
    )
    assert "node2" not in text and "runs/mine/hang" in text
    same = members((40, "S"), (40, "S"))
    for m in same:
        m.where = "validation"
    assert "ranks 0, 1 on node1: validation, no progress for 40 s" in report(
        "nothing has moved", same, None
    )


# The limit is short only once all ranks are at work: on a busy machine a single import may take seconds.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from distseg.comm import progress, watch
from distseg.comm.launch import end_as_one, identify, world

def stop(rank, how, last=False):
    if identify().rank == rank:
        while last and len(list(Path(__file__).parent.glob("end-*"))) < identify().size - 1:
            progress.heartbeat("until the others wait")
            time.sleep(0.05)
        progress.limit({limit})
        {{"stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP), "sleeps": lambda: time.sleep(1000), "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
          "spins": lambda: [None for _ in iter(int, 1)]}}[how]()

def main():
    with watch.guarded(identify().rank, 100):
        progress.phase("before MPI")
        {before}
        comm = world()
        watch.join(comm, {folder!r})
        progress.phase("at work")
        comm.Barrier()
        progress.limit({limit})
        {body}
        progress.phase("at the end")
        Path(__file__).with_name(f"end-{{comm.rank}}").touch()
        comm.Barrier()
    print("through")

end_as_one(main)
"""


def program(path, limit, body="pass", before="pass", folder=None):
    path.write_text(
        textwrap.dedent(PROGRAM).format(limit=limit, body=body, before=before, folder=folder)
    )
    return path


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "how, said",
    [
        ("sleeps", "nothing has moved for 2 s"),
        ("spins", "nothing has moved for 2 s"),
        ("stopped", "nothing has moved for 2 s"),
    ],
)
def test_a_lone_process_that_hangs_is_ended_with_its_stack(tmp_path, how, said):
    script = program(
        tmp_path / "program.py",
        2,
        f"progress.heartbeat('the last operation'); stop(0, {how!r})",
        folder=str(tmp_path / "run"),
    )
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))
    } | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=50
    )
    assert (
        done.returncode == -signal.SIGKILL
        and said in done.stderr
        and "at work, the last operation" in done.stderr
    ), done.stderr
    (stack,) = (tmp_path / "run").glob("hang-*/rank-0000.txt")
    assert "in stop" in stack.read_text() and "in main" in stack.read_text()


@pytest.mark.parametrize(
    "where, how, said",
    [
        ("before", "stopped", "rank 0: nothing|rank 0 on|nothing has moved"),
        ("before", "sleeps", "nothing has moved"),
        ("body", "stopped", "rank 1 is stopped for 2 s|nothing has moved for 2 s"),
        ("body", "sleeps", "nothing has moved for 2 s"),
        ("body", "killed", ""),
    ],
)
@pytest.mark.timeout(60)
@pytest.mark.covering(cases=1)
def test_a_job_with_a_rank_that_hangs_is_ended(mpirun, tmp_path, where, how, said):
    stop = f"stop(1, {how!r}, last={where == 'body'})"
    script = program(tmp_path / "program.py", 2, **{where: stop}, folder=str(tmp_path / "run"))
    done = mpirun(3, script, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0 and "through" not in done.stdout, str(done)
    assert any(one in done.stderr for one in said.split("|")), str(done)
    assert done.stderr.count("distseg: error") <= 3
    if where == "body" and how != "killed":
        at = {
            rank: text
            for ranks, text in re.findall(r"^  ranks? ([\d, ]+) on \S+: (.*)", done.stderr, re.M)
            for rank in ranks.split(", ")
        }
        assert "at work" in at["1"] and "at the end" in at["0"] and "at the end" in at["2"], str(
            done
        )
        # A process of its own writes each file, and may outlive the job on a busy machine.
        stacks, deadline = [], time.monotonic() + 20
        while len(stacks) < 3 and time.monotonic() < deadline:
            stacks = list((tmp_path / "run").glob("hang-*/rank-*.txt"))
            time.sleep(0.05)
        assert len(stacks) == 3


@pytest.mark.parametrize(
    "state, limit, after", [("T", 2.0, 2), ("S", 2.0, 60), ("S", 90.0, 90), ("T", 0.0, None)]
)
def test_a_process_that_does_not_end_is_killed_at_the_limit(
    state, limit, after, monkeypatch, capfd
):
    """Stopped, or still at work, for which it has a minute at least; without a limit it may stay."""
    slept, killed = [], []
    guarded = SimpleNamespace(
        state=state,
        limit=limit,
        is_there=lambda: len(slept) < 2000,
        kill=lambda: killed.append(round(sum(slept))),
    )
    ending = object.__new__(guardian.Guardian)
    ending.monitors, ending.guests, ending.strangers = (), {}, ()
    ending.number, ending.rank = 3, guarded
    monkeypatch.setattr(guardian.time, "sleep", slept.append)
    ending._see_off()
    assert killed == ([] if after is None else [after])
    said = capfd.readouterr().err
    assert ("rank 3 on" in said and f"killed after {after} s" in said) == (after is not None)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_job_that_hangs_in_its_end_is_ended(mpirun, tmp_path):
    """MPI's own end waits for all ranks, after Python's."""
    script = program(tmp_path / "program.py", 2, folder=str(tmp_path / "run"))
    head = "import atexit\nfrom distseg.comm.launch import as_program\nas_program()\natexit.register(lambda: stop(1, 'stopped'))\n"
    script.write_text(head + script.read_text())
    done = mpirun(3, script, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0 and done.stdout.count("through") == 3, str(done)
    assert (
        "rank 1 on" in done.stderr
        and "does not end, is stopped (SIGSTOP); it is killed after 2 s" in done.stderr
    ), str(done)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ranks_that_wait_for_one_that_works_are_left_alone(mpirun, tmp_path):
    busy = "[(time.sleep(0.3), progress.heartbeat(str(k))) for k in range(9)] if comm.rank == 1 else None"
    done = mpirun(3, program(tmp_path / "program.py", 2, busy), env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stdout.count("through") == 3, str(done)


def test_no_guardian_is_left_behind():
    from distseg.comm import progress, watch

    with watch.guarded(0, 100.0):
        assert progress.watched()
        guardian = watch._guardian
        progress.phase("a" * 5000)
        progress.heartbeat("naïve")
        progress.waits("")
    assert guardian is not None and guardian.poll() == 0 and not progress.watched()
    with watch.guarded(0, 0):  # 0: for ever
        pass


def test_a_process_that_ends_before_its_guardian_has_begun_leaves_none_behind():
    """Who waits for all that the process's output reaches, as a pipe to another program does, waits for its guardian too."""
    code = """
        import os
        from distseg.comm import progress, watch
        from distseg.comm.guardian import FOR_GOOD
        watch._start(0)
        progress.ending(FOR_GOOD)
        os._exit(2)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, timeout=60
    )
    assert ended.returncode == 2


# Programs that call distseg from their own loops

OWN_LOOP = """
import sys, time
import torch
import distseg

from distseg.comm.launch import identify

place, how = sys.argv[1:3]
timeout = float(sys.argv[3]) if len(sys.argv) > 3 else 1800.0

def at(now):
    if now == place and identify().rank == 1:
        if how == "raises":
            raise RuntimeError("a mistake")
        if how == "sleeps":
            time.sleep(1000)
        sys.exit(0 if how == "leaves" else 3)

at("start")
mesh = distseg.init_mesh(tiles=(1, -1), timeout=timeout)
at("distribution")
model = distseg.distribute(torch.nn.Conv2d(3, 2, 3, padding=1), mesh, timeout=timeout)
criterion = distseg.PixelLoss(lambda x, y: torch.nn.functional.cross_entropy(x, y, reduction="none"))
image, target = torch.zeros(1, 3, 16, 24), torch.zeros(1, 16, 24).long()
for number in range(2):
    at(f"step {number}")
    model.backward(image, target, criterion)
at("prediction")
model.predict(image)
if place == "end":
    time.sleep(mesh.rank * float(how))
print("through")
"""
LEFT = (
    r"rank 1 has left the job, but rank 0 waits for all ranks, so the job is ended[\s\S]*"
    r"rank 0 on .* waits for [\s\S]*rank 1 on .*: has left, because its program has ended"
)


@pytest.fixture
def own_loop(tmp_path, mpirun):
    (tmp_path / "loop.py").write_text(OWN_LOOP)

    def run(by: str, *arguments):
        if by == "mpirun":
            return mpirun(2, tmp_path / "loop.py", *arguments, env={"PYTHONPATH": str(ROOT)})
        return torchrun(2, tmp_path / "loop.py", *arguments, ends_well=False)

    return run


def ways_to_leave():
    """Yield the ways of a rank to leave a job.

    Open MPI's mpirun hangs about once in forty times after the other rank was killed.
    """
    yield from product(
        ("torchrun", "mpirun"), ("step 0", "step 1", "prediction"), ("leaves", "fails")
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("by, place, how", list(ways_to_leave()))
def test_a_rank_that_leaves_between_two_calls_ends_the_job(own_loop, by, place, how):
    start = time.monotonic()
    done = own_loop(by, place, how)
    assert done.returncode != 0 and "through" not in done.stdout, str(done)
    assert re.search(LEFT, done.stderr), str(done)
    assert time.monotonic() < start + 100


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
@pytest.mark.parametrize(
    "place, how", [("start", "sleeps"), ("start", "leaves"), ("distribution", "sleeps")]
)
def test_a_rank_that_never_makes_a_call_ends_the_job(own_loop, by, place, how):
    """Wait in calls inside the transport, where only the guardian can end the rank."""
    done = own_loop(by, place, how, 2.0)
    assert done.returncode != 0 and "through" not in done.stdout, str(done)
    if (by, how) == ("mpirun", "leaves"):  # Open MPI ends such a job by itself, at once
        return
    assert "rank 0 waits for other ranks, and nothing has moved for 2 s" in done.stderr, str(done)
    where = "all ranks to call init_mesh" if place == "start" else "all ranks to make the same call"
    assert f"waits for {where}" in done.stderr, str(done)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_an_error_of_one_rank_names_the_rank(own_loop, by):
    done = own_loop(by, "step 1", "raises")
    assert done.returncode != 0 and "RuntimeError: a mistake" in done.stderr, str(done)
    assert "rank 1 has failed with this RuntimeError, so all 2 ranks are ended" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_ranks_may_end_at_different_times(own_loop, by):
    done = own_loop(by, "end", 2 * ALONE_AFTER)
    assert done.returncode == 0 and done.stdout.count("through") == 2, str(done)
    assert "distseg: error" not in done.stderr


def test_a_process_alone_has_no_guardian():
    from distseg.comm import progress

    mesh = distseg.init_mesh()
    assert mesh.size == 1 and not progress.shared()
