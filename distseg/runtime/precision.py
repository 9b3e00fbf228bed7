"""Which number type and memory format a device computes convolutions fastest in."""

from __future__ import annotations

import os

import torch

from distseg.comm.cuda_aware import cuda_aware
from distseg.config.settings import TrainConfig


def choose(config: TrainConfig, device: torch.device, world) -> tuple[str, bool]:
    """(precision, channels_last) of a config's ``auto`` values, the same on all ranks (collective).

    bf16 needs AVX512-BF16 or AMX on a CPU, an Ampere or later GPU; without them it is emulated and slower. It pays
    together with channels_last only (docs/performance.md).
    """
    fast = all(world.allgather(fast_bf16(device)))
    precision = config.precision if config.precision != "auto" else ("bf16" if fast else "fp32")
    last = config.channels_last
    if last is None:
        last = precision == "bf16" or (
            device.type == "cuda" and precision != "fp64"
        )  # cuDNN has no float64 kernels for it
    return precision, last


def fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def gpu_lines(device: torch.device, precision: str, ranks: int) -> list[str]:
    """What a user of a GPU should know of a run's numbers and messages, a line each."""
    if device.type != "cuda":
        return []
    lines = [f"float32 convolutions in {_tf32(device)}"] if precision == "fp32" else []
    if ranks > 1:
        way = "straight from the GPU" if cuda_aware() else "of a GPU through the memory of the host"
        lines.append(f"MPI takes messages {way} (DISTSEG_CUDA_AWARE)")
    return lines


def _tf32(device: torch.device) -> str:
    """distseg leaves this as PyTorch has it."""
    conv = getattr(
        torch.backends.cudnn, "conv", None
    )  # the older setting can't be asked once the newer was set
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
