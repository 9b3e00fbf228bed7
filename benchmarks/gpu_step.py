"""On one GPU: distseg's step beside PyTorch's own layers, in seconds, in arithmetic a second and in memory.

The same cases run on the CPU with ``--device cpu``. fp32 is as PyTorch has it: convolutions may use TF32.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import measure, parent, repeats_of, report
from benchmarks.rows import Rows
from benchmarks.steps import Setting, distributed_step, plain_step
from distseg.config.sizes import Size

QUESTION = "On a GPU, how fast is distseg's step beside PyTorch's own layers, and how much memory does it take?"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--size", type=Size, default=Size((1024, 1024)), help="of the image (default: %(default)s)"
    )
    parser.add_argument("--base", type=int, default=64, help="channels of the first level")
    parser.add_argument("--depth", type=int, default=5, help="poolings of the U-Net")
    parser.add_argument("--norms", nargs="*", default=["instance", "batch", "group"])
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    options = parser.parse_args(arguments)
    if options.quick:
        options.size, options.base, options.depth, options.norms = Size((32, 32)), 4, 2, ["batch"]
        options.precisions = ["fp32"]
        if not torch.cuda.is_available():
            options.device = torch.device("cpu")
    rows, samples = [], {}
    for precision in options.precisions:
        for norm in options.norms:
            setting = Setting(
                options.size,
                options.depth,
                2,
                options.base,
                norm,
                precision=precision,
                channels_last=True,
            )
            found, results = _compare(setting, options)
            rows += found
            samples[f"{norm}, {precision}"] = results.as_dict()
    network = f"U-Net of depth {options.depth}, 2 convs a level, base {options.base}, image {options.size}"
    parameters = {"size": str(options.size), "depth": options.depth, "base": options.base}
    notes = f"{network}, dropout 0.1, channels_last, on {options.device}; TFLOP/s counts convolutions and products"
    report("gpu_step", QUESTION, Rows(rows, samples), options, parameters, notes)


def _compare(setting: Setting, options: argparse.Namespace):
    """Time both steps in turn; each one's peak of memory is taken while it alone exists."""
    device = options.device
    makers: dict[str, Callable] = {
        "distseg": lambda: distributed_step(setting, device=device)[0],
        "PyTorch's layers": lambda: plain_step(setting, device),
    }
    peaks = {case: _peak(make, device) for case, make in makers.items()}
    steps = {case: make() for case, make in makers.items()}
    with FlopCounterMode(display=False) as counter:
        steps["PyTorch's layers"]()
    results = measure(steps, repeats_of(options), warmup=1 if options.quick else 3)
    rows = []
    for case in steps:
        row = results.row(case, ("min", "median"))
        rows.append(
            {
                "precision": setting.precision,
                "norm": setting.norm,
                **row,
                "TFLOP/s": counter.get_total_flops() / row["median [s]"] / 1e12,
                "peak [GB]": peaks[case],
            }
        )
    return rows, results


def _peak(make: Callable[[], Callable], device: torch.device) -> float | None:
    """GB of tensors that two steps of a case take at most; None on a CPU, which does not count them."""
    step = make()
    step()
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    found = torch.cuda.max_memory_allocated(device) / 1e9
    del step
    gc.collect()
    torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    main()
