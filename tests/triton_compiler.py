"""Compile the Triton kernels of norms for a GPU that is not there: ``python triton_compiler.py 80 float32-last-part``.

Prints for each case and kernel which instructions read and write memory. Nothing is launched.
"""

import re
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from distseg.layers.kernels import triton_norm
from distseg.layers.kernels.norm import Affine
from distseg.tiling.tile import Box


def main(capability: str, *cases: str) -> None:
    """Compile all kernels for a compute capability and for each case: dtype, place of channels, whole or a part."""
    properties = {"max_shared_mem": 48 << 10}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", int(capability), 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
        )
    )
    for case in cases:
        JITFunction.__getitem__ = _compiling(case)
        compile_all(*case.split("-"))


def compile_all(dtype: str, place: str, part: str) -> None:
    x, vectors = torch.zeros(1, 32, 64, 256, dtype=getattr(torch, dtype)), torch.zeros(5, 32)
    if place == "last":
        x = x.contiguous(memory_format=torch.channels_last)
    if part == "part":
        x = x[..., 1:-2, 3:]
    affine, own = Affine(*vectors[:3].double(), 0.01), Box((0, 0), (64, 256))
    own = Box((1, 2), (9, 30)) if part == "part" else own
    triton_norm.forward(x, affine, torch.empty_like(x))
    triton_norm.sums(x, x, affine)
    triton_norm.gradient(x, x, affine, *vectors[3:].double(), own, torch.empty_like(x))
    triton_norm.moments(x)


def _compiling(case: str):
    """Return what takes the place of a launch, ``kernel[grid](...)``: it compiles as a launch would."""

    def launch(kernel: JITFunction, grid):
        def compiled(*arguments, **constants):
            code = kernel.warmup(*arguments, grid=grid, **constants)
            assert code.asm["cubin"], "machine code"
            memory = sorted(set(re.findall(r"(?:ld|st)\.global[\w.]*", code.asm["ptx"])))
            print(f"{case}:{kernel.__name__}", *memory)

        return compiled

    return launch


if __name__ == "__main__":
    main(*sys.argv[1:])
