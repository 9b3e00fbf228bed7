"""What a norm and its activation cost beside the convolution before them: distseg's fused passes against PyTorch's layers.

The bound is bytes: an image of n bytes is read for the statistics, read and written forward; backward gradient and image
are read for the sums, and read and written once more: 8 n. A plain copy of the image, which moves 2 n, gives the speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.harness import Results, measure, parent, repeats_of, report
from benchmarks.rows import Rows
from distseg.comm.launch import keep_freed_memory
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.tile import Box, ReceptiveField, TilePlacement

QUESTION = "What do norm and activation cost beside the convolution before them?"
FORMATS = {
    "bf16 channels_last": (torch.bfloat16, True),
    "fp32 channels_last": (torch.float32, True),
    "fp32": (torch.float32, False),
}
NORMS = {
    "instance": lambda c: nn.InstanceNorm2d(c),
    "batch": lambda c: nn.BatchNorm2d(c),
    "group": lambda c: nn.GroupNorm(8, c),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(7)])
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument(
        "--side", type=int, default=1024, help="of the image in pixels (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    channels, side = (8, 32) if options.quick else (options.channels, options.side)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    rows, samples = [], {}
    for name, (dtype, last) in FORMATS.items():
        results = measure(cases(channels, side, dtype, last), repeats_of(options), warmup=2)
        samples[name] = results.as_dict()
        rows += [_row(name, case, results) for case in results.samples]
    notes = f"3x3, {channels} channels, {side}x{side}, forward and backward, {options.threads} threads; / conv: of neighbours in time, median and range"
    report(
        "norm",
        QUESTION,
        Rows(rows, {"samples": samples}),
        options,
        {"channels": channels, "side": side, "threads": options.threads},
        notes,
    )


def cases(
    channels: int, side: int, dtype: torch.dtype, last: bool
) -> dict[str, Callable[[], None]]:
    layout = torch.channels_last if last else torch.contiguous_format
    x = (
        torch.randn(1, channels, side, side)
        .to(dtype)
        .contiguous(memory_format=layout)
        .requires_grad_()
    )
    g = torch.randn(x.shape).to(dtype).contiguous(memory_format=layout)
    y = torch.empty_like(g)
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(
        dtype=dtype, memory_format=layout
    )
    box = Box.whole((side, side))
    place = TilePlacement((side, side), box, box, (0,), (0,))

    def backward(output: torch.Tensor) -> None:
        output.backward(g)
        x.grad = conv.weight.grad = None

    def ours(norm: nn.Module) -> Callable[[], None]:
        model = parallelize(
            nn.Sequential(conv, norm, nn.LeakyReLU(0.01)), ReceptiveField((0, 0), (1, 1))
        )
        return lambda: backward(model([x], [place])[0])

    def theirs(*layers: nn.Module) -> Callable[[], None]:
        model = nn.Sequential(conv, *layers)
        return lambda: backward(model(x))

    found = {
        "conv": theirs(),
        "conv, LeakyReLU": theirs(nn.LeakyReLU(0.01)),
        "4 copies (the bytes of a norm)": lambda: [y.copy_(g) for _ in range(4)],
    }
    for name, make in NORMS.items():
        found[f"conv, {name} norm, LeakyReLU: PyTorch"] = theirs(make(channels), nn.LeakyReLU(0.01))
        found[f"conv, {name} norm, LeakyReLU: distseg"] = ours(make(channels))
    return found


def _row(form: str, case: str, results: Results) -> dict:
    spread, ratio = results.spread(case), results.ratio(case)
    times = {"min [ms]": 1e3 * spread.min, "median [ms]": 1e3 * spread.median}
    return {
        "format": form,
        "case": case,
        **times,
        "/ conv": ratio.median,
        "from": ratio.min,
        "to": ratio.max,
    }


if __name__ == "__main__":
    main()
