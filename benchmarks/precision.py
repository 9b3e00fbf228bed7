"""What bf16 with channels_last is worth on a CPU, for networks of several widths, and what bounds it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.harness import Results, measure, parent, repeats_of, report
from benchmarks.rows import Rows
from benchmarks.steps import Setting, distributed_step
from distseg.comm.launch import keep_freed_memory
from distseg.config.sizes import Size

QUESTION = "How much faster is a step in bf16 with channels_last than in fp32, and what bounds it?"
FORMATS = {
    "fp32": {},
    "fp32 channels_last": {"channels_last": True},
    "bf16": {"precision": "bf16"},
    "bf16 channels_last": {"precision": "bf16", "channels_last": True},
}
WIDTHS = {64: Size((256, 256)), 32: Size((384, 384)), 16: Size((512, 512))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--widths",
        type=int,
        nargs="*",
        default=list(WIDTHS),
        choices=list(WIDTHS),
        help="base channels (default: %(default)s)",
    )
    parser.add_argument("--norm", default="instance", choices=("instance", "batch", "group"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    settings = {
        width: Setting(WIDTHS[width], 5, 2, width, options.norm) for width in options.widths
    }
    if options.quick:
        settings = {4: Setting(Size((64, 64)), 2, 1, 4, options.norm)}
    size = (
        16 if options.quick else 128
    )  # a CPU without AVX512 computes bf16 by its reference, at 1 GFLOP/s
    rows, samples, peaks = (
        [],
        {},
        {name: convolution(form, size=size) / 1e9 for name, form in FORMATS.items()},
    )
    for width, setting in settings.items():
        cases = {
            name: distributed_step(replace(setting, **form))[0] for name, form in FORMATS.items()
        }
        results = measure(cases, repeats_of(options), baseline="fp32", clock=time.process_time)
        samples[width] = results.as_dict()
        work = operations(cases["fp32"])
        rows += [
            _row(width, setting, name, results, work, shares(step)) for name, step in cases.items()
        ]
        print(f"width {width} is measured", file=sys.stderr, flush=True)
    notes = (
        f"depth 5, 2 convs a level, {options.norm} norm, dropout 0.1, forward, backward and AdamW on one rank; processor seconds of one thread\n"
        "speed-up: fp32 / case, median of the turns, with its range; shares of a step's processor time by torch.profiler\n"
        f"a 3x3 convolution of 128 channels alone, {size}x{size}, forward and backward: "
        + ", ".join(f"{name} {peak:.0f} GFLOP/s" for name, peak in peaks.items())
    )
    parameters = {
        "settings": {width: s.as_dict() for width, s in settings.items()},
        "convolution [GFLOP/s]": peaks,
    }
    report("precision", QUESTION, Rows(rows, {"samples": samples}), options, parameters, notes)


def operations(step: Callable[[], float]) -> int:
    """Floating-point operations of a step's convolutions, a multiply-add as two."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def convolution(form: dict, channels: int = 128, *, size: int, repeats: int = 5) -> float:
    """Operations a second of one convolution, forward and backward: what a network of nothing else would reach."""
    last = torch.channels_last if form.get("channels_last") else torch.contiguous_format
    dtype = torch.bfloat16 if form.get("precision") == "bf16" else torch.float32
    conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(
        dtype=dtype, memory_format=last
    )
    x = (
        torch.randn(1, channels, size, size, dtype=dtype)
        .contiguous(memory_format=last)
        .requires_grad_()
    )
    g, seconds = torch.randn_like(x), []
    for _ in range(repeats):
        start = time.process_time()
        conv(x).backward(g)
        seconds.append(time.process_time() - start)
    return 3 * 2 * 9 * channels**2 * size**2 / min(seconds)


_KINDS = {
    "convolution": ("conv", "mkldnn"),
    "norm": ("batch_norm", "group_norm", "instance_norm"),
    "update": ("adam",),
    "pointwise, pooling": ("leaky", "mul", "pool", "upsample"),
    "copies": ("copy_", "cat", "fill_", "zero_"),
}


def shares(step: Callable[[], float]) -> dict[str, float]:
    """Share of a step's processor time in each kind of operation."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    total = sum(times.values())
    found = {
        kind: sum(t for key, t in times.items() if _kind(key) == kind) / total for kind in _KINDS
    }
    return found | {"other": 1 - sum(found.values())}


def _kind(operation: str) -> str | None:
    return next(
        (
            kind
            for kind, names in _KINDS.items()
            if any(name in operation.lower() for name in names)
        ),
        None,
    )


def _row(
    width: int, setting: Setting, name: str, results: Results, work: int, parts: dict[str, float]
) -> dict:
    spread, speedup = results.spread(name), results.speedup(name)
    times = {
        "min [s]": spread.min,
        "median [s]": spread.median,
        "speed-up": speedup.median,
        "from": speedup.min,
        "to": speedup.max,
    }
    rate = {"GFLOP/s": round(work / spread.min / 1e9)}
    return {
        "base": width,
        "size": str(setting.size),
        "format": name,
        **times,
        **rate,
        **{kind: f"{share:.0%}" for kind, share in parts.items()},
    }


if __name__ == "__main__":
    main()
