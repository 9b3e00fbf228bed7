"""What carries messages: every method of the Protocol, alike over MPI, torch.distributed and on one rank; and jobs of torchrun
in which mpi4py is not installed.

``DISTSEG_TEST_TRANSPORT=torch pytest`` runs any test on ranks of torchrun. A sample runs so in the default suite, the exact ones
as slow tests.
"""

import copy
import inspect
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from made_store import random_store
from made_transports import over
from mpirunner import transport

from distseg.comm.alone import Alone
from distseg.comm.communicator import Communicator
from distseg.comm.gloo import CollectiveRequest, TorchCommunicator, _Message, _unpickled
from distseg.comm.launch import gathered
from distseg.comm.transports import Choice, address, choose, first_host
from distseg.comm.waits import Waits

RANKS = [1, 2, 3, 4]
KINDS = ["mpi", "torch"]
METHODS = [
    name
    for name, found in vars(Communicator).items()
    if inspect.isfunction(found) and not name.startswith("_")
]


@pytest.fixture(params=KINDS)
def ranks_by(request, comm):
    made = over(request.param, comm)
    yield made
    gathered(comm)  # no rank closes its connections before the others are done


def wait(request) -> None:
    Waits(60).wait(request)


def received(request):
    start = time.monotonic()
    while time.monotonic() < start + 60:
        done, what = request.test()
        if done:
            return what
        time.sleep(1e-4)
    raise TimeoutError


@pytest.mark.parametrize("name", METHODS)
def test_every_implementation_has_every_method_with_the_protocols_arguments(name):
    from distseg.comm.mpi import MpiCommunicator

    wanted = [*inspect.signature(getattr(Communicator, name)).parameters]
    kinds = [TorchCommunicator, MpiCommunicator, Alone]
    messages = {"Isend", "Irecv", "Isend_part", "Irecv_part", "isend", "irecv"}
    for kind in kinds:
        found = getattr(kind, name, None)
        if found is None and kind is Alone:
            assert name in messages, "one rank has nobody to send to"
        elif found is None:
            assert kind is MpiCommunicator and name[0] in "abgBIiF", "mpi4py's own"
        else:
            assert [*inspect.signature(found).parameters] == wanted, kind


@pytest.mark.parallel(RANKS)
def test_rank_size_and_the_kind(ranks_by, comm, request):
    assert (ranks_by.rank, ranks_by.size) == (comm.rank, comm.size)
    kind = request.node.callspec.params["ranks_by"]
    assert ranks_by.transport == ("alone" if kind == "torch" and comm.size == 1 else kind)
    assert ranks_by.takes_gpu_memory is False


@pytest.mark.parallel(RANKS)
def test_objects_come_in_the_order_of_the_ranks(ranks_by):
    size, rank = ranks_by.size, ranks_by.rank
    mine = {"rank": rank, "text": "x" * 1000 * rank, "none": None}
    every = [{"rank": n, "text": "x" * 1000 * n, "none": None} for n in range(size)]
    assert ranks_by.allgather(mine) == every
    for root in range(size):
        assert ranks_by.gather(mine, root) == (every if rank == root else None)
        assert ranks_by.bcast(mine if rank == root else "other", root) == every[root]
    assert ranks_by.gather(mine) == (every if rank == 0 else None)
    assert ranks_by.bcast(mine) == every[0]


@pytest.mark.parallel(RANKS)
def test_objects_are_added_in_the_order_of_the_ranks(ranks_by):
    assert ranks_by.allreduce([ranks_by.rank]) == [*range(ranks_by.size)]
    # The sum of floats depends on the order: 1e16 + 1 - 1e16.
    part = [1e16, 1.0, -1e16, 1.0][ranks_by.rank]
    assert ranks_by.allreduce(part) == sum([1e16, 1.0, -1e16, 1.0][: ranks_by.size])


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8])
def test_memory_in_collectives(ranks_by, dtype):
    size, rank = ranks_by.size, ranks_by.rank
    mine = np.arange(6, dtype=dtype).reshape(2, 3) + rank
    every = np.empty((size, 2, 3), dtype)
    wait(ranks_by.Iallgather(mine, every))
    wanted = np.stack([np.arange(6).reshape(2, 3) + n for n in range(size)]).astype(dtype)
    assert (every == wanted).all()
    total, largest = mine.copy(), mine.copy()
    wait(ranks_by.Isum(total))
    wait(ranks_by.Imaximum(largest))
    assert (total == wanted.sum(0, dtype=dtype)).all() and (largest == wanted.max(0)).all()
    for root in range(size):
        there = mine.copy()
        ranks_by.Bcast(there, root)
        assert (there == wanted[root]).all()


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("length", [1, 3, 1000, 40_001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_memory_are_added_in_the_order_of_the_ranks(ranks_by, length, dtype):
    """So they have the same bits over any transport: those of one addition after another."""
    every = [np.random.default_rng(n).normal(size=length).astype(dtype) for n in range(9)]
    under_way = [every[ranks_by.rank].copy(), every[ranks_by.rank + 5].copy()]
    requests = [ranks_by.Isum(memory) for memory in under_way]
    for request, memory, first in zip(requests[::-1], under_way[::-1], (5, 0)):
        wait(request)
        wanted = every[first].copy()
        for part in every[first + 1 : first + ranks_by.size]:
            wanted += part
        assert memory.tobytes() == wanted.tobytes()
        assert request.Test(), "a complete request stays complete"


@pytest.mark.parallel([1, 3])
def test_empty_memory_in_collectives(ranks_by):
    none = np.empty((0, 4))
    ranks_by.Bcast(none, 0)
    wait(ranks_by.Isum(none))
    wait(ranks_by.Imaximum(none))
    wait(ranks_by.Iallgather(none, np.empty((ranks_by.size, 0, 4))))


@pytest.mark.parallel(RANKS)
def test_a_barrier_waits_for_all(ranks_by, shared_path):
    ranks_by.Barrier()
    if ranks_by.rank == ranks_by.size - 1:
        time.sleep(0.2)
        (shared_path / "here").touch()
    wait(ranks_by.Ibarrier())
    assert (shared_path / "here").exists()


@pytest.mark.parallel([2, 3, 4])
def test_messages_with_a_tag_come_in_the_order_in_which_they_were_sent(ranks_by):
    """To both neighbours in a ring, with two tags of which the receiver asks the later one first."""
    size, rank = ranks_by.size, ranks_by.rank
    sent = []
    for to in range(size):
        if to == rank:
            continue
        for number in range(4):
            for tag in (7, 2**20):
                memory = torch.full((1000 + number,), 100 * rank + number + tag / 2**21)
                sent.append(ranks_by.Isend(memory.view(torch.uint8), to, tag))
    for source in range(size):
        if source == rank:
            continue
        for tag in (2**20, 7):
            for number in range(4):
                memory = torch.empty(1000 + number)
                wait(ranks_by.Irecv(memory.view(torch.uint8), source, tag))
                assert (memory == 100 * source + number + tag / 2**21).all()
    for request in sent:
        wait(request)


@pytest.mark.parallel([2, 3])
def test_receives_that_are_posted_before_the_message_is_sent(ranks_by):
    size, rank = ranks_by.size, ranks_by.rank
    memory = [torch.empty(3) for _ in range(5)]
    posted = [ranks_by.Irecv(m.view(torch.uint8), (rank - 1) % size, 3) for m in memory]
    assert not any(request.Test() for request in posted)
    ranks_by.Barrier()
    sent = [
        ranks_by.Isend(torch.full((3,), float(n)).view(torch.uint8), (rank + 1) % size, 3)
        for n in range(5)
    ]
    for request in [*posted, *sent]:
        wait(request)
        assert request.Test(), "a complete request stays complete"
    assert [m.tolist() for m in memory] == [[n] * 3 for n in range(5)]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("length", [0, 1, 100, 4096])
def test_parts_of_unknown_length(ranks_by, length):
    size, rank = ranks_by.size, ranks_by.rank
    memory = torch.full((4096,), 9, dtype=torch.uint8)
    receive = ranks_by.Irecv_part(memory, (rank - 1) % size, 5)
    payload = torch.arange(length, dtype=torch.int64).to(torch.uint8)
    send = ranks_by.Isend_part(payload, (rank + 1) % size, 5)
    wait(receive)
    wait(send)
    assert receive.bytes == length
    assert torch.equal(memory[:length], payload) and (memory[length:] == 9).all()


@pytest.mark.parallel([2, 3])
def test_objects_as_messages(ranks_by):
    size, rank = ranks_by.size, ranks_by.rank
    send = [ranks_by.isend({"from": rank, "n": n}, (rank + 1) % size, 6) for n in range(3)]
    for n in range(3):
        found = received(ranks_by.irecv(1 << 16, (rank - 1) % size, 6))
        assert found == {"from": (rank - 1) % size, "n": n}
    for request in send:
        wait(request)


@pytest.mark.parallel(RANKS)
def test_split_by_color_in_the_order_of_the_keys(ranks_by):
    size, rank = ranks_by.size, ranks_by.rank
    part = ranks_by.Split(rank % 2, -rank)
    members = sorted((n for n in range(size) if n % 2 == rank % 2), reverse=True)
    assert (part.size, part.rank) == (len(members), members.index(rank))
    assert part.allgather(rank) == members
    inner = part.Split(0, part.rank)
    assert inner.allgather(rank) == members
    inner.Free()
    part.Free()
    again = ranks_by.Split()
    assert again.allgather(rank) == [*range(size)]
    node = ranks_by.split_by_node()
    assert node.size == size


@pytest.mark.parallel([2, 4])
def test_messages_of_parts_and_of_all_ranks_do_not_meet(ranks_by):
    """The same tag in a communicator and in its part, received in the other order."""
    size, rank = ranks_by.size, ranks_by.rank
    part, other = ranks_by.Split(0, rank), (rank + size // 2) % size
    a, b = torch.empty(1), torch.empty(1)
    sent = [
        ranks_by.Isend(torch.tensor([1.0]).view(torch.uint8), other, 4),
        part.Isend(torch.tensor([2.0]).view(torch.uint8), other, 4),
    ]
    wait(part.Irecv(b.view(torch.uint8), other, 4))
    wait(ranks_by.Irecv(a.view(torch.uint8), other, 4))
    for request in sent:
        wait(request)
    assert (a.item(), b.item()) == (1.0, 2.0)


@pytest.mark.parallel([1, 2])
def test_a_communicator_cannot_be_copied_by_accident(ranks_by):
    """A copy of the connection would be another object of the same ranks; deepcopy gives the same one."""
    if isinstance(ranks_by, Alone):
        copy.deepcopy(ranks_by)
        return
    assert copy.deepcopy(ranks_by) is ranks_by


def test_an_object_that_was_pickled_ends_where_its_pickle_ends():
    memory = torch.zeros(100, dtype=torch.uint8)
    memory[:5] = torch.frombuffer(bytearray(b"\x80\x04K\x07."), dtype=torch.uint8)
    assert _unpickled(memory) == 7


class Broken:
    """Stand-in for the work of gloo whose connection was closed."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("[pair.cc:534] Connection closed by peer. This is typically a crash")


@pytest.mark.parametrize(
    "begin, who",
    [
        (lambda: _Message(None, Broken(), torch.zeros(3), peer=2), "rank 2 of its group"),
        (lambda: CollectiveRequest(Broken()), "another rank"),
    ],
)
def test_a_message_over_a_closed_connection_never_counts_as_complete(begin, who):
    request = begin()
    with pytest.raises(ConnectionError, match=rf"to {who} is lost \(Connection closed by peer\):"):
        while not request.Test():
            time.sleep(1e-3)
        pytest.fail("the message is complete")


ENDS_EARLY = """
import sys, time, torch
from distseg.comm.launch import leave, world
ranks = world()
received = [ranks.Irecv(torch.empty(10), 1 - ranks.rank, 5) for _ in range(20)]
leave()
time.sleep(ranks.rank * float(sys.argv[1]))
"""


@pytest.mark.last
@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_process_that_ends_while_messages_are_under_way_does_not_abort(late):
    done = torchrun(2, "-c", ENDS_EARLY, late, ends_well=False)
    assert done.returncode == 1
    assert "SIGABRT" not in done.stderr and "terminate called" not in done.stderr, done.stderr


# Which transport


TORCHRUN = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
MPIRUN = dict(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
SRUN = dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_JOB_ID="7")
LONE_TORCHRUN = dict(RANK="0", WORLD_SIZE="1")


@pytest.mark.parametrize(
    "setting, environment, mpi, chosen",
    [
        ("auto", {}, True, ("mpi", "no launcher")),
        ("auto", {}, False, ("alone", "no launcher, no mpi4py")),
        ("auto", TORCHRUN, True, ("torch", "started by torchrun")),
        ("auto", TORCHRUN, False, ("torch", "started by torchrun")),
        ("auto", LONE_TORCHRUN, True, ("alone", "started by torchrun")),
        ("auto", MPIRUN, True, ("mpi", "started by Open MPI's mpirun")),
        ("auto", MPIRUN, False, ("mpi", "started by Open MPI's mpirun")),
        ("auto", SRUN, True, ("torch", "started by srun without PMI")),
        ("auto", SRUN, False, ("torch", "started by srun, no mpi4py")),
        ("auto", SRUN | {"PMIX_RANK": "1"}, True, ("mpi", "started by srun")),
        ("torch", MPIRUN, True, ("torch", "run.transport")),
        ("torch", {}, True, ("alone", "run.transport")),
        ("mpi", TORCHRUN, True, ("mpi", "run.transport")),
    ],
)
def test_auto_follows_the_launcher(setting, environment, mpi, chosen):
    assert choose(setting, environment, mpi) == Choice(*chosen)


def test_where_the_ranks_meet():
    given = {"MASTER_ADDR": "n7", "MASTER_PORT": "1234"}
    assert address(TORCHRUN | given) == ("n7", 1234, False)
    assert address(TORCHRUN | given | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).hosted
    host, port, hosted = address(SRUN | {"SLURM_STEP_NODELIST": "n[03-05,9]-ib,login1"})
    assert (host, hosted) == ("n03-ib", False) and 15000 <= port < 30000
    with pytest.raises(ValueError, match="torchrun do not know where to meet: set MASTER_ADDR"):
        address(TORCHRUN)
    for port in ("x", "0", "65536"):
        with pytest.raises(ValueError, match=f"MASTER_PORT is '{port}': .* from 1 to 65535"):
            address(TORCHRUN | {"MASTER_ADDR": "n7", "MASTER_PORT": port})
    assert [first_host(n) for n in ("n1", "n[1,3]", "a-[01-9],b", "r[1-2]n[3-4],c")] == [
        "n1",
        "n1",
        "a-01",
        "r1n3",
    ]


# Jobs without MPI


def torchrun(ranks: int, *argv, ends_well=True, timeout=150) -> subprocess.CompletedProcess:
    """Run `python argv...` on ranks of torchrun that find no mpi4py."""
    found = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_COMM")}
    done = subprocess.run(
        transport.torchrun(ranks, [str(arg) for arg in argv]),
        env=transport.without_mpi(found) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert not ends_well or done.returncode == 0, done.stdout + done.stderr
    return done


TINY = ["--model.depth", 1, "--model.base_channels", 2, "--mesh.tiles", "1x2"]


@pytest.mark.last
@pytest.mark.timeout(240)
def test_a_job_without_mpi_is_exact():
    exchange = ["--image", "41x52", "--spatial.exchange_every", 1, "--model.norm", "batch"]
    said = torchrun(2, "-m", "distseg", "verify", *TINY, *exchange).stdout
    assert "gradients summed by torch" in said
    assert "exact: largest relative error" in said


@pytest.mark.slow
@pytest.mark.last
@pytest.mark.timeout(240)
def test_a_job_without_mpi_trains(tmp_path):
    random_store(tmp_path / "store.h5", train=[(33, 46)] * 2, val=[(33, 46)])
    given = ["--data.store", tmp_path / "store.h5", "--train.output", tmp_path / "run"]
    said = torchrun(2, "-m", "distseg", "train", *TINY, *given, "--train.epochs", 1).stdout
    assert "transport: torch.distributed (gloo), started by torchrun" in said
    assert "gradients summed by torch" in said


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_without_mpi_predicts(tmp_path):
    random_store(tmp_path / "store.h5", train=[(33, 46)] * 2, test=[(33, 46)])
    given = ["--data.store", tmp_path / "store.h5", "--train.output", tmp_path / "run"]
    torchrun(2, "-m", "distseg", "train", *TINY, *given, "--train.epochs", 1)
    torchrun(2, "-m", "distseg", "predict", tmp_path / "run", "--output", tmp_path / "maps")
    assert [path.name for path in (tmp_path / "maps").glob("*.h5")] == ["test0.h5"]


@transport.needs_mpi
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_has_the_same_weights_under_mpirun_and_torchrun(mpirun, tmp_path, ranks):
    """To the last bit: losses, norms of gradients, weights, momenta and running statistics."""
    random_store(tmp_path / "store.h5", train=[(33, 46)] * 4, val=[(33, 46)])
    given = ["--data.store", tmp_path / "store.h5", "--train.epochs", 2, "--model.norm", "batch"]
    given += [*TINY, "--mesh.samples", ranks // 2, "--train.output"]
    started = mpirun(
        ranks, "-m", "distseg", "train", *given, tmp_path / "m", "--mesh.reducer", "mpi"
    )
    assert started.returncode == 0, str(started)
    torchrun(ranks, "-m", "distseg", "train", *given, tmp_path / "t")
    logs = [(tmp_path / run / "log.jsonl").read_text() for run in "mt"]
    of_mpi, of_torch = [re.findall(r'"(?:loss|gradient_norm)": [^,}]*', log) for log in logs]
    assert of_mpi == of_torch and len(of_mpi) >= 8
    for path in sorted((tmp_path / "m/checkpoints").glob("*/*.safetensors")):
        other = tmp_path / "t" / path.relative_to(tmp_path / "m")
        assert path.read_bytes() == other.read_bytes(), path.name


@pytest.mark.last
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tasks_of_srun_meet_without_mpi():
    """With the variables of srun, which is not started here."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_COMM")}
    command = [sys.executable, "-m", "distseg", "verify", "--image", "33x46", *map(str, TINY)]
    tasks = [
        subprocess.Popen(
            command,
            env=transport.without_mpi(found) | step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    said = [task.communicate(timeout=100) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "gradients summed by torch" in said[0][0] and "exact: largest" in said[0][0], said


def test_mpi_and_horovod_are_no_requirements():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    required = text[text.index("dependencies = [") : text.index("[project.optional-dependencies]")]
    assert "mpi4py" not in required and "horovod" not in required
    assert re.search(r'^mpi = \["mpi4py"\]', text, re.M)


# The tests of other files on ranks of torchrun

FILES = [
    "api", "attention", "checkpoint", "collective", "consistency", "exact", "exchange", "finetune", "frozen",
    "hidden_state", "images", "lines", "mesh", "moved", "networks", "norm", "outputs", "own_networks", "pairs",
    "patch_heads", "patch_maps", "patchgd", "pipeline", "places", "positioned", "predict", "predictor", "reducer",
    "reductions", "resume", "step", "streaming", "streams", "transfer", "verify", "waits", "weights",
]  # fmt: skip


SAMPLE = [
    "exact.py::test_samples_times_tiles", "exact.py::test_optimizers_and_reducers",
    "exchange.py::test_the_exchange_and_its_adjoint", "norm.py::test_adjoint",
    "pipeline.py::test_the_union_of_samples_tiles_and_stages", "step.py::test_two_sample_groups_are_one_step",
    "streaming.py::test_stages_times_tiles_streaming",
]  # fmt: skip


def suite(*arguments, timeout: float, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env=os.environ | {"DISTSEG_TEST_TRANSPORT": "torch"} | environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.last
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sample_of_the_exact_tests_without_mpi(ranks):
    names = [f"tests/test_{name}" for name in SAMPLE]
    suite(*names, "-m", "parallel and not slow", timeout=170, DISTSEG_TEST_RANKS=str(ranks))


@pytest.mark.last
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", FILES)
def test_all_tests_on_ranks_without_mpi(name):
    suite(f"tests/test_{name}.py", "-m", "parallel", timeout=1490)
