"""NCCL's process groups, replaced by groups of gloo with CPU tensors. NCCL itself does not run."""

import pytest
import test_exchange
import torch
import torch.distributed as dist
from made_transports import over
from mpirunner.transport import needs_mpi
from test_exact import TOLERANCE, config

import distseg
from distseg.comm import mail, nccl
from distseg.comm.gloo import NO_LIMIT
from distseg.comm.mesh import Mesh, MeshShape
from distseg.comm.reducer import LoneReducer, NcclReducer, make_reducer
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.runtime.message_order import HALOS_IN_STREAM, Start, check_order
from distseg.training.programs import StepPrograms
from distseg.training.step_messages import messages_of_all_ranks
from distseg.training.verify import prepare, verify


class Group:
    """Process group of gloo that keeps NCCL's rules and notes what it starts.

    Sends and receives are taken in batches only, and a batch is complete before the next operation
    starts, as on a stream. Messages have no tags.
    """

    def __init__(self, store, rank, size):
        self.gloo = dist.ProcessGroupGloo(store, rank, size, NO_LIMIT)
        self.started, self.aborted, self.batch = [], False, None

    def size(self):
        return self.gloo.size()

    def allreduce(self, tensors):
        assert self.batch is None
        self.started.append(tensors[0].numel())
        return self.gloo.allreduce(tensors)

    def _allgather_base(self, found, x):
        assert self.batch is None
        self.started.append("gather")
        return self.gloo._allgather_base(found, x)

    def _start_coalescing(self):
        assert self.batch is None
        self.batch = []

    def send(self, tensors, rank, tag):
        self.batch.append(("send", rank, tensors, self.gloo.send))

    def recv(self, tensors, rank, tag):
        self.batch.append(("recv", rank, tensors, self.gloo.recv))

    def _end_coalescing(self):
        batch, self.batch = self.batch, None
        self.started.append([(kind, rank) for kind, rank, *_ in batch])
        return Batch([start(tensors, rank, 0) for _, rank, tensors, start in batch])

    def abort(self):
        self.aborted = True


class Batch:
    """Messages that started together and are complete at once."""

    def __init__(self, works):
        self.waited = False
        for work in works:
            work.wait()

    def wait(self):
        self.waited = True


@pytest.fixture
def groups(comm, monkeypatch):
    """Return the list of process groups that a test makes in place of NCCL's."""
    made = []

    def new_group(*arguments):
        made.append(Group(*arguments))
        return made[-1]

    monkeypatch.setattr(nccl, "_GROUPS", {})
    monkeypatch.setattr(nccl, "lacks", lambda device: None)
    monkeypatch.setattr(nccl, "gpu", lambda: f"GPU {comm.rank}")
    monkeypatch.setattr(nccl, "new_group", new_group)
    return made


# Sums of gradients


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "dtype, fp16, rtol",
    [
        (torch.float64, False, 1e-15),
        (torch.float32, False, 2e-7),
        (torch.float32, True, 2e-3),
        (torch.bfloat16, False, 1e-2),
    ],
)
def test_buckets_are_replaced_by_their_sums_in_order(comm, groups, dtype, fp16, rtol):
    mesh = Mesh(over("torch", comm), samples=comm.size)
    reducer = make_reducer("nccl", mesh, fp16)
    assert (type(reducer), reducer.name, reducer.early) == (NcclReducer, "nccl", True)
    buckets = [torch.arange(1.0, n + 1).to(dtype) * (comm.rank + 1) / 3 for n in (5, 300, 1)]
    parts = [comm.allgather(bucket.clone()) for bucket in buckets]
    versions = [bucket._version for bucket in buckets]
    reducer.sum(buckets)
    assert groups[0].started == [1, 5, 300, 1], "a sum of ones at the start, then the buckets"
    assert [bucket._version for bucket in buckets] == versions
    for bucket, summands in zip(buckets, parts):
        wanted = sum(x.double() for x in summands)
        torch.testing.assert_close(bucket.double(), wanted, rtol=rtol, atol=0)


LAYOUTS = {  # by number of ranks
    2: dict(samples=2, accumulate=2),
    3: dict(tiles="1x3", exchange_every="1", norm="batch"),
    4: dict(tiles="1x2", stages=2, exchange_every="1", loss="dice"),
}


@pytest.mark.parallel(4)
def test_only_ranks_that_split_samples_sum_during_the_backward_pass(comm, groups):
    for axes in (dict(samples=2, tiles=(1, 2)), dict(samples=2, stages=2)):
        assert not make_reducer("nccl", Mesh(over("torch", comm), **axes)).early


@pytest.mark.parallel([*LAYOUTS])
def test_steps_are_exact(comm, groups):
    settings = config(**LAYOUTS[comm.size], reducer="nccl", base_channels=2, num_convs=1)
    report = verify(settings, over("torch", comm), Size("32x40"))
    assert comm.bcast(report and report["reducer"]) == "nccl"
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE
    assert len(groups) == 1, "one communicator of NCCL on each rank"


# Halos and statistics

SMALL = dict(base_channels=2, num_convs=1)
IN_STREAM = {  # by number of ranks: (image, settings)
    2: [
        ("48x64", dict(tiles="1x2", norm="batch")),
        ("37x52", dict(tiles="2x1", exchange_every="1", accumulate=2)),
        ("48x64", dict(tiles="2x1", norm="group", dropout=0.5)),
    ],
    3: [
        ("41x96", dict(tiles="1x3", exchange_every="level", norm="group")),
        ("41x97", dict(tiles="1x3", exchange_every="1", norm="batch", frozen_norm=True)),
    ],
    4: [
        ("70x58", dict(tiles="2x2", exchange_every="2", norm="batch", loss="dice")),
        (
            "40x64",
            dict(samples=2, tiles="1x2", exchange_every="1", norm="batch", norm_scope="step"),
        ),
        ("40x64", dict(samples=2, tiles="2x1", exchange_every="1", reducer="nccl", norm="batch")),
        ("40x64", dict(tiles="1x2", stages=2, exchange_every="1", accumulate=3, schedule="1f1b")),
        ("40x64", dict(tiles="1x2", stages=2, exchange_every="1", accumulate=3, schedule="zb-h1")),
        ("72x96", dict(tiles="2x2", tiles_per_rank=Size("2x1"), exchange_every="1")),
    ],
    8: [
        (
            "48x64",
            dict(
                samples=2, tiles="1x2", stages=2, exchange_every="1", norm="batch", reducer="nccl"
            ),
        ),
        ("64x32", dict(tiles="8x1", exchange_every="all")),
        ("64x32", dict(tiles="8x1", exchange_every="3", norm="none")),
    ],
}


@pytest.mark.parallel([*IN_STREAM])
def test_steps_with_halos_by_nccl_are_exact(comm, groups, monkeypatch):
    monkeypatch.setattr(mail.Mail, "exchange", None)  # no halo goes over gloo
    for image, settings in IN_STREAM[comm.size]:
        settings = config(**SMALL, **settings, messages="nccl")
        report = verify(settings, over("torch", comm), Size(image))
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE, settings
        kinds = {type(each) for group in groups for each in group.started}
        assert (list in kinds) == settings.spatial.exchanges
        assert len(groups) <= 2, "at most two communicators of NCCL on each rank"
        groups.clear()
        nccl._GROUPS.clear()


@pytest.mark.parallel([2, 4])
def test_halos_by_nccl_and_their_adjoint(comm, groups, monkeypatch):
    monkeypatch.setattr(mail.Mail, "exchange", None)
    mesh = Mesh(over("torch", comm), tiles=test_exchange.GRIDS[comm.size])
    mesh = nccl.with_stream_groups(mesh, torch.device("cpu"))
    test_exchange.test_the_exchange_and_its_adjoint(mesh.tiles)
    assert len(groups[0].started) > 6


ORDERS = {  # by number of ranks
    2: [dict(tiles="1x2", exchange_every="1")],
    4: [
        dict(tiles="2x2", exchange_every="1", norm="batch", accumulate=2),
        dict(tiles="1x2", stages=2, exchange_every="level", accumulate=2, schedule="1f1b"),
    ],
}


@pytest.mark.parallel([*ORDERS])
def test_batches_start_in_the_order_that_was_proved(comm, groups):
    for settings in ORDERS[comm.size]:
        settings = config(**SMALL, **settings, dropout=0.0, messages="nccl")
        prepared = prepare(settings, Size("48x64"))
        programs = StepPrograms(prepared.config, as_network(prepared.model), prepared.size)
        messages = messages_of_all_ranks(programs)
        check_order(messages, HALOS_IN_STREAM)
        verify(settings, over("torch", comm), Size("48x64"))
        shape = MeshShape(tiles=settings.mesh.tiles, stages=settings.mesh.stages)
        tiles = shape.members(comm.rank).tiles
        proved = [
            sorted(
                ("send", tiles.index(m.target))
                if m.source == comm.rank
                else ("recv", tiles.index(m.source))
                for m in step.messages
            )
            for step in messages[comm.rank]
            if isinstance(step, Start) and step.messages[0].comm == "tiles"
        ]
        started = [sorted(each) for group in groups for each in group.started if type(each) is list]
        # `verify` makes the first of the two steps that were proved.
        assert started and started == proved[: len(proved) // 2]
        groups.clear()
        nccl._GROUPS.clear()


@pytest.mark.parallel(2)
def test_the_python_api_takes_nccl(comm, groups):
    mesh = Mesh(over("torch", comm), tiles=(1, 2))
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.InstanceNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 3, 3, padding=1),
    ).double()
    image, target = torch.randn(1, 1, 24, 30).double(), torch.randint(3, (1, 24, 30))
    torch.nn.functional.cross_entropy(module(image), target).backward()
    wanted = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    model = distseg.distribute(module, mesh, exchange=1, messages="nccl")
    model.backward(image, target, torch.nn.CrossEntropyLoss())
    for p, g in zip(module.parameters(), wanted):
        assert (p.grad - g).abs().max() <= 1e-14
    assert [list, "gather"] == [
        next(type(x) for x in groups[0].started if type(x) is list),
        next(x for x in groups[0].started if x == "gather"),
    ]


def test_more_messages_than_nccl_takes_are_refused():
    group = nccl.StreamGroup(None, torch.device("cpu"))
    one = torch.zeros(1)
    with pytest.raises(
        ValueError, match="has 257 messages, but NCCL takes at most 256 at a time: use fewer tiles"
    ):
        group.exchange(dict.fromkeys(range(128), one), dict.fromkeys(range(129), one))


@pytest.mark.parallel(2)
def test_a_batch_without_receives_is_waited_for(comm, groups):
    mesh = nccl.with_stream_groups(Mesh(over("torch", comm), tiles=(1, 2)), torch.device("cpu"))
    sender = mail.halo_mail(mesh.tiles, torch.device("cpu"))
    mine, buffer = comm.rank, sender.buffer(4)
    buffer.fill_(7)
    batches = []
    end = groups[0]._end_coalescing
    groups[0]._end_coalescing = lambda: batches.append(end()) or batches[-1]
    if mine == 0:
        assert sender.exchange({}, lambda: {1: buffer}, 0) == {}
    else:
        (arriving,) = sender.exchange({0: 4}, dict, 0).values()
        assert not batches[0].waited and arriving.tensor().tolist() == [7] * 4
    assert batches[0].waited
    assert sender.exchange({}, dict, 0) == {} and len(batches) == 1, "no messages, no batch"


# Process groups and refusals


@pytest.mark.parallel(3)
def test_only_meshes_of_the_same_processes_share_a_communicator(comm, groups):
    ranks = over("torch", comm)
    for _ in range(2):
        make_reducer("nccl", Mesh(ranks, samples=3))
    nccl.with_stream_groups(Mesh(ranks, tiles=(3, 1)), torch.device("cpu"))
    assert len(groups) == 1
    # The ranks of both pairs have the numbers 0 and 1.
    for pair in ((0, 1), (1, 2)):
        if comm.rank in pair:
            reducer = make_reducer("nccl", Mesh(ranks.group(pair), samples=2))
            bucket = torch.tensor([2.0**comm.rank])
            reducer.sum([bucket])
            assert bucket.item() == sum(2**rank for rank in pair)
    assert len(groups) == (3 if comm.rank == 1 else 2)
    nccl.abort_groups()
    assert all(group.aborted for group in groups) and not nccl._GROUPS


@pytest.mark.parallel(2)
def test_one_replica_opens_no_communicator(comm, groups):
    mesh = Mesh(over("torch", comm), stages=2)
    assert isinstance(make_reducer("nccl", mesh), LoneReducer)
    assert nccl.with_stream_groups(mesh, torch.device("cpu")).tiles.stream is None
    assert not groups


@pytest.mark.parallel(2)
def test_ranks_that_share_a_gpu_are_refused(comm, groups, monkeypatch):
    monkeypatch.setattr(nccl, "gpu", lambda: "GPU-1f")
    mesh = Mesh(over("torch", comm), samples=2)
    with pytest.raises(
        ValueError,
        match="mesh.reducer is nccl, but ranks 0 and 1 share the GPU GPU-1f, .* give each rank",
    ):
        make_reducer("nccl", mesh, device="cuda")
    with pytest.raises(ValueError, match="spatial.messages is nccl, but .*: set it to transport"):
        nccl.with_stream_groups(mesh, torch.device("cuda"))


@pytest.mark.parallel(2)
def test_a_wrong_first_sum_is_found(comm, groups, monkeypatch):
    monkeypatch.setattr(Group, "allreduce", lambda group, tensors: group.gloo.barrier())
    with pytest.raises(
        RuntimeError, match="NCCL gave 1 in a test, .* over 2 ranks: set mesh.reducer to torch"
    ):
        make_reducer("nccl", Mesh(over("torch", comm), samples=2))


@pytest.mark.parallel(2)
def test_cpus_are_refused(comm):
    mesh = Mesh(over("torch", comm), samples=2)
    with pytest.raises(ValueError, match="nccl, but the ranks compute on cpu, .*run.device: cuda"):
        make_reducer("nccl", mesh)
    with pytest.raises(ValueError, match="spatial.messages is nccl, .* on cpu, .*to transport"):
        verify(config(samples=2, messages="nccl"), over("torch", comm), Size("32x32"))


def test_a_pytorch_without_nccl_is_named(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert nccl.lacks("cuda") == "PyTorch is built without NCCL"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert nccl.lacks("cuda") is None


@needs_mpi
@pytest.mark.parallel(2)
def test_ranks_of_mpi_are_refused(comm):
    mesh = Mesh(over("mpi", comm), samples=2)
    with pytest.raises(
        ValueError, match="mesh.reducer is nccl, but .* MPI, .* start with torchrun"
    ):
        make_reducer("nccl", mesh)
    with pytest.raises(ValueError, match="spatial.messages is nccl, but .* connected by MPI"):
        nccl.with_stream_groups(mesh, torch.device("cpu"))
