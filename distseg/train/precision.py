"""Which number type and memory format a device computes convolutions fastest in."""

from __future__ import annotations

import torch

from distseg.config import TrainConfig


def choose(config: TrainConfig, device: torch.device, world) -> tuple[str, bool]:
    """(precision, channels_last) of a config's ``auto`` values, the same on all ranks (collective).

    bf16 needs AVX512-BF16 or AMX on a CPU, an Ampere or later GPU; without them it is emulated and slower. It pays
    together with channels_last only (docs/performance.md).
    """
    fast = all(world.allgather(fast_bf16(device)))
    precision = config.precision if config.precision != "auto" else ("bf16" if fast else "fp32")
    last = config.channels_last
    if last is None:
        last = precision == "bf16" or device.type == "cuda"
    return precision, last


def fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
