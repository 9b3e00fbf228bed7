"""Stored maps from rank to rank: rows arrive as they are final, in order, while both sides do something else."""

import pytest
import torch

from distseg.comm.waits import Ranks, Waits
from distseg.runtime import transfer
from distseg.runtime.offload import Map, VectorMap
from distseg.runtime.transfer import Receiving, Sending, Transfers
from distseg.tiling.tile import Box, strips

BOX = Box((3, 10), (20, 41))
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


@pytest.fixture(autouse=True)
def small_strips(monkeypatch):
    monkeypatch.setattr(transfer, "_STRIP", 5000.0)  # bytes: two rows in float64


def whole(seed: int, dtype=torch.float64, layout="NHWC") -> torch.Tensor:
    found = torch.randn(
        2, 5, *BOX.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return found.to(dtype).contiguous(memory_format=FORMATS[layout])


def receiving(stored: list, folder) -> Receiving:
    def make(like):
        stored.append(Map(BOX, like, folder))
        return stored[-1]

    return Receiving(BOX, make)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_map_comes_as_it_is(comm, tmp_path, dtype, layout):
    transfers, x = Transfers(comm), whole(0, dtype, layout)
    if comm.rank == 0:
        stored = Map(BOX, x, tmp_path)
        stored.write(BOX, x)
        transfers.begin(Sending(stored), 1, 7).final = BOX.stop[0]
        transfers.flush()
    else:
        found = []
        coming = transfers.begin(receiving(found, tmp_path), 0, 7)
        transfers.wait_for(coming, 20, "it")
        assert (found[0].read(BOX) == x).all() and (found[0].dtype, found[0].last) == (
            dtype,
            layout == "NHWC",
        )


@pytest.mark.parallel(2)
def test_a_vector_comes_once_it_is_final(comm):
    transfers, x = (
        Transfers(comm),
        torch.randn(2, 5, 1, 1, generator=torch.Generator().manual_seed(3)),
    )
    if comm.rank == 0:
        stored = VectorMap(BOX, x)
        sending = transfers.begin(Sending(stored), 1, 7)
        sending.final = BOX.stop[0] - 1
        transfers.progress()
        stored.write(BOX, x)
        sending.final = BOX.stop[0]
        transfers.flush()
    else:
        coming = transfers.begin(Receiving(BOX, lambda like: VectorMap(BOX, like)), 0, 7)
        transfers.wait_for(coming, 5, "it")
        assert torch.equal(coming.stored.read(BOX), x) and coming.next_row == BOX.stop[0]


@pytest.mark.parallel(2)
def test_rows_come_once_they_are_final(comm):
    """The sender writes rows 3 to 8, 8 to 13, ...; those of a block are final when the next one is written."""
    comm = Ranks(comm, Waits())
    transfers, x, found = Transfers(comm), whole(0), []
    stored = Map(BOX, x)
    sending = transfers.begin(Sending(stored), 1, 0) if comm.rank == 0 else None
    coming = transfers.begin(receiving(found, None), 0, 0) if comm.rank == 1 else None
    for row in (3, 8, 13, 18, 20):
        if comm.rank == 0:
            block = Box((row, 10), (min(row + 5, 20), 41))
            if row < 20:
                stored.write(block, x[:, :, row - 3 : block.stop[0] - 3])
            sending.final = row
        elif row > 3:
            transfers.wait_for(
                coming, row, "rows"
            )  # all that is final, however many rows a message may have
            assert (
                found[0].read(Box((3, 10), (coming.next_row, 41))) == x[:, :, : coming.next_row - 3]
            ).all()
        with transfers.moving():
            comm.waits.wait(comm.Ibarrier())
        assert comm.rank == 0 or coming.next_row <= row
        comm.Barrier()  # before it the other may make no more rows final
    transfers.flush()


@pytest.mark.parallel(2)
def test_maps_of_a_tag_keep_their_order_and_are_let_go_of(comm):
    transfers, found, let_go = Transfers(comm), [], []
    if comm.rank == 1:
        for k in range(3):
            stored = Map(BOX, whole(0))
            stored.write(BOX, whole(k))
            sending = transfers.begin(Sending(stored, then=lambda k=k: let_go.append(k)), 0, 1)
            sending.final = BOX.stop[0]
        transfers.wait_sent(sending, "the last")
        assert let_go == [0, 1, 2] and sending.done
        return
    coming = [transfers.begin(receiving(found, None), 1, 1) for _ in range(3)]
    for k, c in enumerate(coming):
        transfers.wait_for(c, 20, "it")
        assert c.stored is found[k] and (c.stored.read(BOX) == whole(k)).all()


@pytest.mark.parallel(2)
def test_what_does_not_come_in_time_is_an_error(comm):
    """It comes afterwards: torch.distributed lets no process end well while a message is under way."""
    waits = Waits(0.5)
    transfers, x, found = Transfers(Ranks(comm, waits)), whole(0), []
    if comm.rank == 0:
        coming = transfers.begin(receiving(found, None), 1, 99)
        with pytest.raises(TimeoutError, match="the map before conv did not come within 0.5 s"):
            transfers.wait_for(coming, 20, "the map before conv")
        waits.timeout = 0.0
        comm.Barrier()
        transfers.wait_for(coming, 20, "the map before conv")
        assert (found[0].read(BOX) == x).all()
    else:
        waits.timeout = 0.0
        comm.Barrier()
        stored = Map(BOX, x)
        stored.write(BOX, x)
        transfers.begin(Sending(stored), 0, 99).final = BOX.stop[0]
        transfers.flush()


def test_strips():
    assert [b.start[0] for b in strips(BOX, 31 * 4)] == [3, 7, 11, 15, 19] and list(
        strips(BOX, 1e9)
    ) == [BOX]
    assert len(list(strips(BOX, 1))) == 17
    assert [b.start[0] for b in strips(BOX, 31 * 13, 6)] == [3, 15] and [
        b.start[0] for b in strips(BOX, 0, 6)
    ] == [3, 9, 15]
