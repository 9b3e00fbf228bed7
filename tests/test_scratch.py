"""Maps in files and in memory: windows come back as they were written, room is reserved first, nothing is left behind."""

import os

import pytest
import torch

from distseg.comm.memory_format import as_bytes
from distseg.runtime import offload as scratch
from distseg.runtime.offload import Map, VectorMap, require_scratch_space
from distseg.tiling.tile import Box

BOX = Box((3, 10), (20, 41))
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def like(dtype, layout) -> torch.Tensor:
    return torch.empty(2, 5, 4, 4, dtype=dtype).contiguous(memory_format=FORMATS[layout])


@pytest.fixture(params=["file", "memory"])
def folder(request, tmp_path):
    return tmp_path if request.param == "file" else None


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "box",
    [
        BOX,
        Box((3, 10), (9, 41)),
        Box((4, 11), (9, 40)),
        Box((7, 12), (8, 13)),
        Box((5, 30), (20, 41)),
    ],
)
@pytest.mark.parametrize("rows", [False, True])
def test_windows(folder, layout, dtype, box, rows):
    stored, whole = (
        Map(BOX, like(dtype, layout), folder, rows=rows),
        torch.randn(2, 5, *BOX.size).to(dtype),
    )
    assert stored.bytes == whole.nbytes
    stored.write(BOX, whole)
    at = (..., *box.relative_to(BOX).slices)
    found = stored.read(box)
    assert (
        torch.equal(found, whole[at])
        and found.stride() == torch.empty_like(found, memory_format=FORMATS[layout]).stride()
    )
    more = torch.randn(2, 5, *box.size).to(dtype)
    stored.add(box, more)
    whole[at] += more
    assert torch.equal(stored.read(BOX), whole)
    stored.write(box, more)
    whole[at] = more
    assert torch.equal(stored.read(BOX), whole)
    stored.close()


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("rows", [False, True])
def test_what_goes_to_another_rank_lies_alike_in_files_and_in_memory(tmp_path, layout, rows):
    box, whole = Box((7, 12), (9, 41)), torch.randn(2, 5, *BOX.size)
    file, memory = (
        Map(BOX, like(torch.float32, layout), tmp_path, rows=rows),
        Map(BOX, like(torch.float32, layout)),
    )
    for stored in (file, memory):
        stored.write(BOX, whole)
    assert torch.equal(file.take(box).view(-1), memory.take(box).view(-1))
    memory.put(box, file.take(box).add_(1))
    file.put(box, memory.take(box))
    assert torch.equal(file.read(BOX), memory.read(BOX))


@pytest.mark.parametrize("rows", [False, True])
def test_volumes(folder, rows):
    box = Box((0, 0, 2), (4, 6, 9))
    stored, whole = (
        Map(box, torch.empty(1, 3, 2, 2, 2), folder, rows=rows),
        torch.randn(1, 3, *box.size),
    )
    for part in (Box((0, 0, 2), (2, 6, 9)), Box((2, 0, 2), (4, 5, 9)), Box((2, 5, 2), (4, 6, 9))):
        stored.write(part, whole[(..., *part.relative_to(box).slices)])
    assert torch.equal(stored.read(Box((1, 2, 4), (4, 5, 9))), whole[..., 1:4, 2:5, 2:7])


def test_it_begins_with_zeros(folder):
    assert not Map(BOX, like(torch.float32, "NHWC"), folder, zero=True).read(BOX).any()


def test_no_name_is_left_in_the_folder(tmp_path):
    stored = Map(BOX, like(torch.float32, "NHWC"), tmp_path)
    assert not os.listdir(tmp_path)
    stored.close()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError,
        match=r"a feature map of 0.00 GB does not fit the scratch folder .* \(No space left on device; .* GB are free\).*streaming.scratch",
    ):
        Map(BOX, like(torch.float32, "NHWC"), tmp_path)
    monkeypatch.setattr(scratch, "free_bytes", lambda folder: 10**9)
    with pytest.raises(
        OSError,
        match=r"feature maps of 3.00 GB must be stored in the scratch folder .*, where 1.00 GB are free: name a folder",
    ):
        require_scratch_space(tmp_path, 3 * 10**9)


@pytest.mark.parametrize("folder", ["/nowhere/at/all", "/proc"])
def test_a_folder_that_can_not_be_written(folder):
    with pytest.raises(OSError, match=f"{folder}.*streaming.scratch"):
        Map(BOX, like(torch.float32, "NCHW"), folder)
    with pytest.raises(OSError, match="streaming.scratch"):
        require_scratch_space("/nowhere/at/all", 1)


def test_a_vector_is_the_same_everywhere():
    stored, x = VectorMap(BOX, torch.empty(2, 5, 1, 1)), torch.randn(2, 5, 1, 1)
    for box in (BOX, Box((7, 12), (8, 13))):
        stored.write(box, x)
    assert (
        torch.equal(stored.read(Box((3, 10), (4, 12))), x) and stored.bytes == stored.in_memory == 0
    )


def test_the_gradient_of_a_vector_is_read_once():
    """So that tiles that each go back through it give the sum once."""
    stored, parts = (
        VectorMap(BOX, torch.empty(2, 5, 1, 1), gradient=True),
        [torch.randn(2, 5, 1, 1) for _ in range(3)],
    )
    for part in parts[:2]:
        stored.add(BOX, part)
    assert (
        torch.equal(stored.read(Box((3, 10), (4, 12))), parts[0] + parts[1])
        and not stored.read(BOX).any()
    )
    stored.write(BOX, parts[1])
    stored.write(BOX, parts[2])
    assert torch.equal(stored.take(BOX), parts[1] + parts[2]) and not stored.take(BOX).any()


@pytest.mark.parametrize(
    "box, reads", [(Box((3, 10), (9, 40)), 2 * 5), (Box((3, 10), (9, 30)), 2 * 6 * 5)]
)
def test_nearly_whole_rows_are_read_in_one_run(tmp_path, monkeypatch, box, reads):
    """Of each image and channel; a window that lacks a column, as strides leave one over, costs no more calls than one that does not."""
    stored, calls, whole = (
        Map(BOX, like(torch.float32, "NCHW"), tmp_path, rows=True),
        [],
        torch.randn(2, 5, *BOX.size),
    )
    stored.write(BOX, whole)
    monkeypatch.setattr(
        scratch,
        "_all",
        lambda how, file, buffer, place, what, done=scratch._all: (
            calls.append(place),
            done(how, file, buffer, place, what),
        ),
    )
    assert (
        torch.equal(stored.read(box), whole[(..., *box.relative_to(BOX).slices)])
        and len(calls) == reads
    )


@pytest.mark.parametrize("strides", [(4, 1, 1, 4), (1, 4, 4, 4), (3, 3, 3, 3)])
def test_a_single_number_of_any_strides(folder, strides):
    """PyTorch calls it contiguous, and yet views it as no bytes."""
    x = torch.full((9,), 7.0, dtype=torch.float64).as_strided((1, 1, 1, 1), strides)
    stored = Map(Box((0, 0), (1, 1)), x, folder)
    stored.write(stored.box, x)
    assert (
        stored.read(stored.box).item() == 7 and as_bytes(x).tolist() == as_bytes(x.clone()).tolist()
    )
