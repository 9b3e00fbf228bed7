"""Small collectives: rank order, float64, and replicas that start and stay alike."""

import pytest
import torch
from torch import nn

from distseg.comm.collective import Alone, add, gather
from distseg.comm.replicas import broadcast, check_same


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_gather_in_rank_order_add_in_float64(comm, dtype):
    x = (torch.arange(6).view(2, 3) + 10 * comm.rank).to(dtype).t()  # not contiguous
    found = gather(x, comm)
    assert found.dtype == torch.float64 and found.shape == (comm.size, 3, 2)
    assert found[:, 0, 0].tolist() == [10.0 * r for r in range(comm.size)]
    assert (
        found[comm.size - 1].tolist()
        == (x.double() - 10 * comm.rank + 10 * (comm.size - 1)).tolist()
    )
    total = add(x, comm)
    assert total.dtype == torch.float64 and torch.equal(total, found.sum(0))


@pytest.mark.parallel(2)
def test_more_digits_than_float32(comm):
    x = torch.tensor([1.0, 1 + 2.0**-40][comm.rank], dtype=torch.float64)
    assert gather(x, comm).tolist() == [1.0, 1 + 2.0**-40]
    assert add(torch.tensor([1.0, 2.0**-40][comm.rank]), comm).item() == 1 + 2.0**-40


@pytest.mark.parallel(2)
def test_inputs_stay_as_they_were(comm):
    x = torch.full((3,), float(comm.rank), dtype=torch.float64, requires_grad=True)
    assert not add(x, comm).requires_grad and not gather(x, comm).requires_grad
    assert x.tolist() == [comm.rank] * 3


def test_alone():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert gather(x, Alone()).tolist() == [[1, 2]] and add(x, Alone()).tolist() == [1, 2]
    assert not add(x, Alone()).requires_grad
    assert (Alone().allgather(3), Alone().bcast(3), Alone().rank, Alone().size) == ([3], 3, 0, 1)


def model_of(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    model[1].running_mean.fill_(rank)
    model[1].num_batches_tracked.fill_(rank)
    return model


@pytest.mark.parallel([1, 3])
def test_broadcast_makes_replicas_alike_bit_by_bit(comm):
    model, first = model_of(comm.rank), model_of(0)
    broadcast(model, comm)
    check_same(model, comm)
    for (name, found), wanted in zip(model.state_dict().items(), first.state_dict().values()):
        assert torch.equal(found, wanted), name
        assert found.stride() == wanted.stride()


@pytest.mark.parallel(3)
def test_a_replica_that_differs_in_one_bit_is_named_on_every_rank(comm):
    model = model_of(0)
    check_same(model, comm)
    if comm.rank == 1:
        model[0].weight.data[0, 0, 0, 0] = torch.nextafter(
            model[0].weight.data[0, 0, 0, 0], torch.tensor(9.0)
        )
    with pytest.raises(
        ValueError,
        match=r"0.weight on ranks \[1\] .* differs from rank 0's; .*resume from the last checkpoint",
    ):
        check_same(model, comm)
