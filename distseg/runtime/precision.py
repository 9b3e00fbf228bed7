"""Chooses the dtype and memory format in which a device computes convolutions fastest."""

from __future__ import annotations

import os

import torch

from distseg.comm.launch import largest
from distseg.config.settings import TrainConfig


def choose(config: TrainConfig, device: torch.device, world) -> tuple[str, bool]:
    """Return (precision, channels_last) of a config, with ``auto`` replaced by a choice.

    The values are equal on all ranks. All ranks of ``world`` must call this function together. Fast
    bf16 needs AVX512-BF16 or AMX on a CPU, or an Ampere or later GPU. On other devices bf16 is
    emulated, which is slower than fp32. bf16 is faster than fp32 only together with channels_last
    (benchmarks/performance.md).

    Args:
        config: the settings ``precision`` and ``channels_last``.
        device: the device of this rank.
        world: the communicator of all ranks.
    """
    fast = not largest(world, [not fast_bf16(device)])[0]
    precision = config.precision if config.precision != "auto" else ("bf16" if fast else "fp32")
    last = config.channels_last
    if last is None:
        # cuDNN has no channels_last kernels for float64.
        last = precision == "bf16" or (device.type == "cuda" and precision != "fp64")
    return precision, last


def fast_bf16(device: torch.device) -> bool:
    """Return True if the device computes in bf16 without emulation."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def emulation(precision: str, device: torch.device) -> str | None:
    """Return a warning text if the precision is bf16 and the device only emulates it, else None.

    ``torch.cuda.is_bf16_supported()`` also returns True if PyTorch only emulates bf16.

    Args:
        precision: fp64, fp32, bf16 or fp16.
        device: the device of this rank.
    """
    if precision != "bf16" or fast_bf16(device):
        return None
    where = "this CPU (no AVX512-BF16 and no AMX)"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = f"this GPU (compute capability {major}.{minor}, below 8.0)"
    return f"bf16 is emulated on {where}, which is slower than fp32: set the precision to fp32"


def gpu_lines(device: torch.device, precision: str, world) -> list[str]:
    """Return log lines about a run on GPUs; the list is empty on a CPU.

    With precision fp32, the lines say whether convolutions are computed in TF32 or fp32. With
    several ranks, they say whether messages are sent from GPU memory or through host memory.

    Args:
        device: the device of this rank.
        precision: fp64, fp32 or bf16.
        world: the communicator of all ranks.
    """
    if device.type != "cuda":
        return []
    lines = [f"float32 convolutions in {_tf32(device)}"] if precision == "fp32" else []
    if world.size > 1:
        straight = world.takes_gpu_memory
        way = "straight from the GPU" if straight else "of a GPU through the memory of the host"
        taker = {"mpi": "MPI", "torch": "gloo"}[world.transport]
        hint = " (DISTSEG_CUDA_AWARE)" if world.transport == "mpi" else ""
        lines.append(f"{taker} takes messages {way}{hint}")
    return lines


def _tf32(device: torch.device) -> str:
    """Return the name of the precision in which PyTorch computes float32 convolutions.

    distseg does not change PyTorch's setting.
    """
    # PyTorch raises if the older setting is read after the newer one was set.
    conv = getattr(torch.backends.cudnn, "conv", None)
    on = torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"
    if (
        not on
        or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
        or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return "float32"
    return (
        "TF32, PyTorch's default: 10 bits of mantissa (NVIDIA_TF32_OVERRIDE=0 for all of float32)"
    )
