"""What is asked before memory of a GPU is handed to MPI, and the buffers of messages, as far as a CPU can tell (see test_fake_cuda.py)."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch
from mpirunner.transport import needs_mpi
from torch import nn

import distseg
from distseg.comm.collective import Alone
from distseg.comm.cuda_aware import cuda_aware, says
from distseg.comm.mail import Form
from distseg.comm.staging import Buffers, upload, wait_for_device
from distseg.config.settings import TrainConfig
from distseg.runtime import precision
from distseg.runtime.precision import choose, emulation, gpu_lines

CPU = torch.device("cpu")


def open_mpi(answer: int):
    return SimpleNamespace(MPIX_Query_cuda_support=lambda: answer)


def mpich(answer: int, fails: bool = False):
    def query(kind: int, found) -> int:
        found._obj.value = answer if kind == 0 else 1
        return int(fails)

    return SimpleNamespace(MPIX_GPU_query_support=query)


OPEN, MPICH, CRAY, MVAPICH = (
    "Open MPI v5.0.7, package: ...",
    "MPICH Version: 4.2",
    "MPI VERSION    : CRAY MPICH version 8.1.29",
    "MVAPICH2-GDR Version: 2.3.7",
)
NOTHING = SimpleNamespace()


@pytest.mark.parametrize(
    "library, version, environment, wanted",
    [
        (open_mpi(1), OPEN, {}, True),
        (open_mpi(0), OPEN, {}, False),
        (
            open_mpi(0),
            OPEN,
            {"MPICH_GPU_SUPPORT_ENABLED": "1"},
            False,
        ),  # of another MPI of the site
        (NOTHING, OPEN, {}, False),
        (mpich(1), MPICH, {}, True),
        (mpich(0), MPICH, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False),
        (mpich(1, fails=True), MPICH, {}, False),
        (NOTHING, CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        (NOTHING, CRAY, {}, False),
        (NOTHING, MPICH, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False),
        (open_mpi(1), MVAPICH, {}, False),
        (open_mpi(1), MVAPICH, {"MV2_USE_CUDA": "1"}, True),
        (open_mpi(1), OPEN, {"DISTSEG_CUDA_AWARE": "0"}, False),
        (NOTHING, OPEN, {"DISTSEG_CUDA_AWARE": "1"}, True),
    ],
)
def test_what_a_running_mpi_says_of_gpus(library, version, environment, wanted):
    assert says(library, version, environment) is wanted


def test_an_answer_of_ours_that_is_none():
    with pytest.raises(
        ValueError, match="DISTSEG_CUDA_AWARE is 'yes': set it to 1 .*, to 0 if not, or unset it"
    ):
        says(NOTHING, OPEN, {"DISTSEG_CUDA_AWARE": "yes"})


@needs_mpi
@pytest.mark.parallel(1)
def test_the_mpi_that_runs_is_asked(comm, monkeypatch):
    """... and not one that was built for GPUs and lies on PATH."""
    from mpi4py import MPI

    monkeypatch.delenv("DISTSEG_CUDA_AWARE", raising=False)
    cuda_aware.cache_clear()
    asked = ctypes.CDLL(MPI.__file__)
    if MPI.Get_library_version().startswith("Open MPI"):
        assert asked.MPIX_Query_cuda_support() in (0, 1)
    assert cuda_aware() is False, "there is no GPU here"
    monkeypatch.setenv("DISTSEG_CUDA_AWARE", "1")
    cuda_aware.cache_clear()
    assert cuda_aware() is True
    cuda_aware.cache_clear()


def test_on_a_cpu_nothing_waits_and_nothing_is_copied():
    x = torch.arange(3.0)
    assert (
        upload(x, CPU) is x
        and upload(x, CPU, torch.float32) is x
        and upload(x, CPU, torch.float64).dtype == torch.float64
    )
    wait_for_device(CPU)
    buffers = Buffers(CPU)
    a, b = buffers.take(10), buffers.take(10)
    assert (a.numel(), a.dtype, a.data_ptr() == b.data_ptr()) == (10, torch.uint8, False)


def test_buffers_are_used_again_also_for_messages_of_other_sizes():
    buffers = Buffers(CPU)
    a = buffers.take(10)
    place = a.data_ptr()
    buffers.give(a, read_by_stream=True)
    b, c = buffers.take(16), buffers.take(9)
    assert (b.data_ptr(), b.numel(), c.data_ptr() == place, c.numel()) == (place, 16, False, 9)
    buffers.give(b)
    assert buffers.take(17).data_ptr() != place and buffers.take(9).data_ptr() == place
    assert [buffers.take(n).numel() for n in (0, 1, 2, 1000)] == [0, 1, 2, 1000]


class Mark:
    """A mark of a stream that has, or has not, come so far."""

    def __init__(self, there: bool):
        self.there = there

    def query(self) -> bool:
        return self.there


def test_a_buffer_is_taken_whose_readers_are_done_else_made():
    buffers = Buffers(CPU)
    first, second, third = (torch.empty(4, dtype=torch.uint8) for _ in range(3))
    marks = [Mark(False), Mark(True), Mark(False)]
    buffers._free[4] = list(zip((first, second, third), marks))

    def taken():
        return buffers.take(4).data_ptr()

    busy = {first.data_ptr(), third.data_ptr()}
    assert taken() == second.data_ptr() and taken() not in busy
    marks[0].there = True
    assert taken() == first.data_ptr() and taken() not in busy


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
def test_a_form_within_a_buffer_is_the_tensors(last, dtype):
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    form = Form.from_tensor(x)
    buffer = torch.empty(form.bytes, dtype=torch.uint8)
    made = form.within(buffer).copy_(x)
    assert (
        torch.equal(made, x)
        and made.stride() == x.stride()
        and made.data_ptr() == buffer.data_ptr()
    )
    assert form.empty(CPU).stride() == x.stride() and form.fit(x) is x


GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Of a generation."""
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    return lambda *capability: monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability
    )


@pytest.mark.parametrize(
    "capability, asked, found",
    [
        ((8, 0), "auto", ("bf16", True)),
        ((7, 0), "auto", ("fp32", True)),
        ((7, 5), "auto", ("fp32", True)),
        ((7, 0), "bf16", ("bf16", True)),
        ((9, 0), "fp32", ("fp32", True)),
        ((9, 0), "fp64", ("fp64", False)),
    ],
)
def test_precision_and_format_of_a_gpu(gpu, capability, asked, found):
    gpu(*capability)
    assert choose(TrainConfig(precision=asked), GPU, Alone()) == found


def test_a_gpu_that_emulates_bf16_is_named(gpu, monkeypatch):
    """PyTorch says of a V100, too, that bf16 is supported."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    gpu(7, 0)
    assert emulation("fp32", GPU) is None
    wanted = r"bf16 is emulated on this GPU \(compute capability 7.0, below 8.0\).*to fp32"
    assert re.match(wanted, emulation("bf16", GPU))
    gpu(8, 0)
    assert emulation("bf16", GPU) is None
    monkeypatch.setattr(precision, "fast_bf16", lambda device: False)
    network = nn.Conv2d(3, 2, 1)
    with pytest.warns(UserWarning, match="bf16 is emulated on this CPU"):
        distseg.distribute(network, distseg.init_mesh(), precision="bf16")
    assert next(network.parameters()).dtype == torch.float32


def test_what_is_said_of_a_gpu(gpu, monkeypatch):
    gpu(8, 0)
    mpi = SimpleNamespace(size=2, transport="mpi", takes_gpu_memory=False)
    gloo = SimpleNamespace(size=2, transport="torch", takes_gpu_memory=False)
    one = Alone()
    assert gpu_lines(CPU, "fp32", mpi) == []
    assert gpu_lines(GPU, "bf16", one) == gpu_lines(GPU, "fp64", one) == []
    assert gpu_lines(GPU, "bf16", mpi) == [
        "MPI takes messages of a GPU through the memory of the host (DISTSEG_CUDA_AWARE)"
    ]
    assert gpu_lines(GPU, "bf16", gloo) == [
        "gloo takes messages of a GPU through the memory of the host"
    ]
    assert gpu_lines(GPU, "fp32", one) == [
        "float32 convolutions in TF32, PyTorch's default: 10 bits of mantissa (NVIDIA_TF32_OVERRIDE=0 for all of float32)"
    ]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert gpu_lines(GPU, "fp32", one) == ["float32 convolutions in float32"]
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    gpu(7, 0)
    assert gpu_lines(GPU, "fp32", one) == ["float32 convolutions in float32"]
    gpu(8, 0)
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        assert gpu_lines(GPU, "fp32", one) == ["float32 convolutions in float32"]
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
