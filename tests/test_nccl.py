"""Sums of gradients by NCCL, whose process group is replaced by one of gloo with CPU tensors. NCCL itself does not run."""

import pytest
import torch
import torch.distributed as dist
from made_transports import over
from mpirunner.transport import needs_mpi
from test_exact import TOLERANCE, config

from distseg.comm import nccl
from distseg.comm.gloo import NO_LIMIT
from distseg.comm.mesh import Mesh
from distseg.comm.reducer import LoneReducer, NcclReducer, make_reducer
from distseg.config.sizes import Size
from distseg.training.verify import verify


class Group:
    """Process group of gloo that notes which sums it starts."""

    def __init__(self, store, rank, size):
        self.gloo = dist.ProcessGroupGloo(store, rank, size, NO_LIMIT)
        self.started, self.aborted = [], False

    def allreduce(self, tensors):
        self.started.append(tensors[0].numel())
        return self.gloo.allreduce(tensors)

    def abort(self):
        self.aborted = True


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
    assert (type(reducer), reducer.name, reducer.early) == (NcclReducer, "nccl", False)
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


@pytest.mark.parallel([*LAYOUTS])
def test_steps_are_exact(comm, groups):
    settings = config(**LAYOUTS[comm.size], reducer="nccl", base_channels=2, num_convs=1)
    report = verify(settings, over("torch", comm), Size("32x40"))
    assert comm.bcast(report and report["reducer"]) == "nccl"
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE
    assert len(groups) == 1, "one communicator of NCCL on each rank"


@pytest.mark.parallel(3)
def test_only_meshes_of_the_same_processes_share_a_communicator(comm, groups):
    ranks = over("torch", comm)
    for _ in range(2):
        make_reducer("nccl", Mesh(ranks, samples=3))
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
    assert isinstance(make_reducer("nccl", Mesh(over("torch", comm), stages=2)), LoneReducer)
    assert not groups


@pytest.mark.parallel(2)
def test_ranks_that_share_a_gpu_are_refused(comm, groups, monkeypatch):
    monkeypatch.setattr(nccl, "gpu", lambda: "GPU-1f")
    with pytest.raises(
        ValueError,
        match="mesh.reducer is nccl, but ranks 0 and 1 share the GPU GPU-1f, .* give each rank",
    ):
        make_reducer("nccl", Mesh(over("torch", comm), samples=2), device="cuda")


@pytest.mark.parallel(2)
def test_a_wrong_first_sum_is_found(comm, groups, monkeypatch):
    monkeypatch.setattr(Group, "allreduce", lambda group, tensors: group.gloo.barrier())
    with pytest.raises(
        RuntimeError, match="NCCL gave 1 in a test, .* over 2 ranks: set mesh.reducer to torch"
    ):
        make_reducer("nccl", Mesh(over("torch", comm), samples=2))


@pytest.mark.parallel(2)
def test_cpus_are_refused(comm):
    with pytest.raises(ValueError, match="nccl, but the ranks compute on cpu, .*run.device: cuda"):
        make_reducer("nccl", Mesh(over("torch", comm), samples=2))


def test_a_pytorch_without_nccl_is_named(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert nccl.lacks("cuda") == "PyTorch is built without NCCL"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert nccl.lacks("cuda") is None


@needs_mpi
@pytest.mark.parallel(2)
def test_ranks_of_mpi_are_refused(comm):
    with pytest.raises(
        ValueError, match="mesh.reducer is nccl, but .* MPI, .* start with torchrun"
    ):
        make_reducer("nccl", Mesh(over("mpi", comm), samples=2))
