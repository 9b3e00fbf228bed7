"""Gradient buckets and their sum over ranks."""

import sys
from types import ModuleType

import pytest
import torch
from made_transports import over
from mpirunner.transport import needs_mpi
from test_exact import config
from torch import nn

from distseg.comm import reducer
from distseg.comm.mesh import Mesh
from distseg.comm.reducer import (
    Gradients,
    HorovodReducer,
    LoneReducer,
    TransportReducer,
    horovod_works,
    make_reducer,
)
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.training.engine import Engine
from distseg.training.verify import own_pieces, prepare


def parameters(dtypes=(torch.float32,)) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(4, 3, 3, 3), (4,), (2, 4, 1, 1)]
    found = [nn.Parameter(torch.randn(s).to(d)) for d in dtypes for s in shapes]
    found[0].data = found[0].data.contiguous(memory_format=torch.channels_last)
    return found


def test_gradients_are_views_of_one_bucket_with_the_parameters_strides():
    params = parameters()
    gradients = Gradients(params)
    (bucket,) = gradients.buckets
    assert bucket.numel() == sum(p.numel() for p in params)
    assert [p.grad.stride() for p in params] == [p.stride() for p in params]
    sum((i + 1) * p.sum() for i, p in enumerate(params)).backward()
    assert sorted(bucket.tolist()) == [1.0] * 108 + [2.0] * 4 + [3.0] * 8
    bucket[0] = 7
    assert params[-1].grad.flatten()[0] == 7, "the last layer's gradients are complete first"
    gradients.zero()
    assert not any(p.grad.any() for p in params)


def test_gradients_that_are_taken_in_replace_those_of_the_last_step():
    params = parameters()
    gradients = Gradients(params)
    sum(p.sum() for p in params).backward()
    gradients.detach()
    (2 * params[1].sum()).backward()
    gradients.take_in()
    assert [p.grad.unique().tolist() for p in params] == [[0.0], [2.0], [0.0]]
    assert sorted(gradients.buckets[0].tolist()) == [0.0] * 116 + [2.0] * 4


def test_a_bucket_for_each_dtype_and_no_larger_than_its_bound(monkeypatch):
    assert [b.dtype for b in Gradients(parameters((torch.float32, torch.bfloat16))).buckets] == [
        torch.bfloat16,
        torch.float32,
    ]
    monkeypatch.setattr(reducer, "_BUCKET", 4 * 112)
    assert [b.numel() for b in Gradients(parameters()).buckets] == [12, 108]
    monkeypatch.setattr(reducer, "_BUCKET", 1)
    assert [b.numel() for b in Gradients(parameters()).buckets] == [8, 4, 108], (
        "a parameter is never cut"
    )


def test_gradients_of_a_lone_replica_are_autograds():
    params = parameters()
    gradients = Gradients(params, flat=False)
    for _ in range(2):
        gradients.zero()
        assert not gradients.buckets and all(p.grad is None for p in params)
        (params[0].sum() + params[2].sum()).backward()
        gradients.finish()
        assert [float(p.grad.sum()) for p in params] == [108, 0, 8] and [
            p.grad.stride() for p in params
        ] == [p.stride() for p in params]


def test_gradients_in_another_layout_are_copied_into_the_parameters():
    params = parameters()
    params[0].grad = torch.arange(108.0).view(4, 3, 3, 3)
    Gradients(params, flat=False).finish()
    assert params[0].grad.stride() == params[0].stride() and torch.equal(
        params[0].grad, torch.arange(108.0).view(4, 3, 3, 3)
    )


@pytest.mark.parametrize("largest", [0.1, 1e6])
@pytest.mark.parametrize("flat", [True, False])
def test_clip_is_torchs(largest, flat, monkeypatch):
    monkeypatch.setattr(reducer, "_BUCKET", 4 * 112)
    ours, theirs = parameters(), parameters()
    gradients = Gradients(ours, flat)
    for params in (ours, theirs):
        sum((i + 1) * (p**2).sum() for i, p in enumerate(params)).backward()
    assert gradients.norm().item() == pytest.approx(
        nn.utils.get_total_norm([p.grad for p in theirs]).item()
    )
    norm = gradients.norm().item()
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(theirs, largest).item())
    gradients.clip(largest, norm)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def reducer_of(kind: str, comm, fp16: bool = False):
    if kind == "horovod" and not horovod_works():
        pytest.skip("Horovod is not installed")
    ranks = over("torch" if kind == "torch" else "mpi", comm)
    return make_reducer(kind, Mesh(ranks, tiles=(1, comm.size)), fp16)


@needs_mpi
@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reducers_agree(comm, dtype):
    """MPI and torch.distributed to the last bit, on all ranks alike; Horovod, which adds in another order, to rounding."""
    generator, sums = torch.Generator().manual_seed(comm.rank), {}
    mine = torch.randn(100_003, generator=generator, dtype=dtype)
    for kind in ("mpi", "torch", "horovod")[: 3 if horovod_works() else 2]:
        sums[kind] = mine.clone()
        reducer_of(kind, comm).sum([sums[kind]])
        assert (
            comm.allgather(sums[kind].numpy().tobytes())
            == [sums[kind].numpy().tobytes()] * comm.size
        )
    assert torch.equal(sums["mpi"], sums["torch"])
    exact = sums["mpi"].double()
    if "horovod" in sums:
        error = (sums["horovod"].double() - exact).norm() / exact.norm()
        assert error <= (1e-15 if dtype == torch.float64 else 1e-6)


MESHES_OF_A_STEP = {  # by number of ranks
    1: dict(tiles="1x1"),
    2: dict(samples=2),
    3: dict(tiles="1x3", norm="batch"),
    4: dict(samples=2, tiles="1x2", norm="batch", norm_scope="step"),
    5: dict(samples=5, loss="dice"),
    6: dict(samples=3, stages=2, accumulate=2),
    7: dict(tiles="7x1", exchange_every="1"),
    8: dict(samples=2, tiles="1x2", stages=2, loss="dice"),
}


def gradients_of_a_step(kind: str, comm, **settings) -> list[torch.Tensor]:
    """Return the gradients of a step in float64, whose messages and sums a library carries."""
    found = prepare(config(**settings, depth=2, reducer=kind), Size("96x64"))
    ranks = over("torch" if kind == "torch" else "mpi", comm)
    axes = found.config.mesh
    mesh = Mesh(ranks, axes.samples, axes.tiles, axes.stages)
    images = found.images()
    engine = Engine(found.config, mesh, as_network(found.model), images.size, precision="fp64")
    engine.backward(own_pieces(engine, images))
    return [p.grad.clone() for p in engine.parameters]


@needs_mpi
@pytest.mark.slow
@pytest.mark.parallel([*MESHES_OF_A_STEP])
def test_reducers_agree_on_the_gradients_of_a_step(comm):
    """To the last bit between MPI and torch.distributed; Horovod adds in another order."""
    mesh = MESHES_OF_A_STEP[comm.size]
    wanted = gradients_of_a_step("mpi", comm, **mesh)
    assert all(g.norm() > 0 for g in wanted)
    assert all(map(torch.equal, gradients_of_a_step("torch", comm, **mesh), wanted))
    if horovod_works():
        found = gradients_of_a_step("horovod", comm, **mesh)
        assert max((a - b).norm() / b.norm() for a, b in zip(found, wanted)) <= 1e-15


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["mpi", "horovod", "torch"])
@pytest.mark.parametrize(
    "dtype, fp16, rtol",
    [
        (torch.float64, False, 0),
        (torch.float32, False, 1e-7),
        (torch.float32, True, 2e-3),
        (torch.bfloat16, False, 1e-2),
    ],
)
def test_the_sum_over_ranks(comm, kind, dtype, fp16, rtol):
    found = reducer_of(kind, comm, fp16)
    kinds = {"mpi": TransportReducer, "torch": TransportReducer, "horovod": HorovodReducer}
    assert (found.name, type(found)) == (kind, kinds[kind])
    params = parameters((dtype,))
    gradients = Gradients(params)

    def part(n, rank):
        """Return the gradient of parameter ``n`` on a rank."""
        shape = params[n].shape
        return torch.arange(1, shape.numel() + 1).view(shape).to(dtype) * (rank + 1) / (n + 3)

    for n, p in enumerate(params):
        p.grad += part(n, comm.rank)
    found.sum(gradients.buckets)
    if fp16 and kind != "horovod":
        rtol = 1e-7  # rounded before the sum, but not after it
    for n, p in enumerate(params):
        parts = [part(n, rank) for rank in range(comm.size)]
        wanted = sum((one.half() if fp16 else one).double() for one in parts)
        torch.testing.assert_close(p.grad.double(), wanted, rtol=max(rtol, 1e-15), atol=0)


@needs_mpi
@pytest.mark.parallel(2)
def test_auto_takes_what_is_there(comm, monkeypatch, capsys):
    mesh = Mesh(comm, tiles=(2, 1))
    monkeypatch.setattr(reducer, "horovod_works", lambda: False)
    assert make_reducer("auto", mesh).name == "mpi"
    assert (
        "Horovod with PyTorch is not installed, gradients are summed by MPI"
        in capsys.readouterr().out
    ) == (comm.rank == 0)
    with pytest.raises(
        ValueError,
        match="mesh.reducer is horovod, but Horovod with PyTorch is not installed: set it to mpi or auto",
    ):
        make_reducer("horovod", mesh)


class Builds:
    """In the place of horovod.torch, as it was built."""

    def __init__(self, nccl: bool, cuda: bool):
        self.nccl_built, self.cuda_built = lambda: int(nccl), lambda: cuda


@pytest.fixture
def horovod_built(monkeypatch):
    """Horovod is there, built like this; it is not started."""

    def built(nccl: bool, cuda: bool) -> None:
        monkeypatch.setattr(reducer, "horovod_works", lambda: True)
        monkeypatch.setattr(reducer, "_process_set", lambda mesh, device: None)
        package = ModuleType("horovod")
        package.torch = Builds(nccl, cuda)
        monkeypatch.setitem(sys.modules, "horovod", package)
        monkeypatch.setitem(sys.modules, "horovod.torch", package.torch)

    return built


@needs_mpi
@pytest.mark.parallel(2)
@pytest.mark.parametrize("nccl, cuda", [(True, True), (True, False), (False, True), (False, False)])
def test_horovod_sums_gradients_of_gpus_only_if_it_was_built_for_them(
    comm, nccl, cuda, horovod_built, capsys
):
    """Built for MPI alone it would send a GPU's gradients before they are computed."""
    horovod_built(nccl, cuda)
    mesh = Mesh(comm, tiles=(2, 1))
    of_cpu = make_reducer("auto", mesh, device="cpu")
    assert (of_cpu.name, of_cpu.early) == ("horovod", False), "its thread would take cores"
    lacks = "Horovod is built without NCCL and CUDA and cannot sum gradients on GPUs"
    if nccl or cuda:
        assert (
            make_reducer("auto", mesh, device="cuda").name
            == make_reducer("horovod", mesh, device="cuda").name
            == "horovod"
        )
        assert lacks not in capsys.readouterr().out
        assert make_reducer("auto", mesh, device="cuda").early
        return
    of_gpu = make_reducer("auto", mesh, device="cuda")
    assert (of_gpu.name, of_gpu.early) == ("mpi", False), "its copies would wait for kernels"
    assert capsys.readouterr().out.count(
        f"distseg: {lacks}, gradients are summed by MPI (mesh.reducer: mpi)"
    ) == (comm.rank == 0)
    with pytest.raises(
        ValueError,
        match=f"mesh.reducer is horovod, but {lacks}: set it to mpi or auto, or install Horovod",
    ):
        make_reducer("horovod", mesh, device="cuda")


@needs_mpi
@pytest.mark.parallel(2)
def test_one_rank_without_horovod_is_enough(comm, monkeypatch, horovod_built):
    horovod_built(True, True)
    monkeypatch.setattr(reducer, "horovod_works", lambda: comm.rank == 0)
    mesh = Mesh(comm, tiles=(2, 1))
    assert make_reducer("auto", mesh).name == "mpi"
    with pytest.raises(
        ValueError, match="mesh.reducer is horovod, but Horovod with PyTorch is not installed"
    ):
        make_reducer("horovod", mesh)


@pytest.mark.parallel(1)
def test_one_replica_needs_no_reducer(comm):
    assert isinstance(make_reducer("auto", Mesh(comm)), LoneReducer)
