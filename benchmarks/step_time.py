"""Where the time of an optimizer step goes, and what share of it the convolutions would take if there were nothing else.

Four cases take turns: distseg's step; the same step from PyTorch's own layers in the same type and memory format; that in a
process of its own, where glibc gives freed memory back, as it does unless told otherwise; and the step's convolutions alone,
forward and backward on tensors of the same shapes, types and layouts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import Reading, measure, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import Setting, distributed_step, plain_step
from distseg.comm.launch import keep_freed_memory
from distseg.comm.memory_format import channels_last as last_format
from distseg.config.sizes import Size
from distseg.report.style import INK, PALETTE, new_figure

QUESTION = "Where does a step's time go, and how near is it to that of its convolutions alone?"
KINDS = {
    "convolution": ("conv",), "norm, activation, dropout": ("norm", "leaky"), "skips": ("cat", "_join", "aten::add"), "pooling": ("pool",), "up-sampling": ("upsample",),
    "loss": ("nll", "softmax", "nonzero", "aten::index"), "copies": ("copy", "fill", "zero"), "update": ("adam", "linalg"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--size", type=Size, default=Size((1024, 1024)), help="of the image (default: %(default)s)"
    )
    parser.add_argument(
        "--base", type=int, default=32, help="channels of the first level (default: %(default)s)"
    )
    parser.add_argument("--norms", nargs="*", default=["instance", "batch", "group"])
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--plain",
        metavar="NORM",
        help="only PyTorch's layers, with glibc as it is: prints the seconds of the fastest of 3 steps",
    )
    options = parser.parse_args(arguments)
    size, depth, base, norms = (
        (Size((32, 32)), 2, 4, ["batch"])
        if options.quick
        else (options.size, 4, options.base, options.norms)
    )
    torch.set_num_threads(options.threads)

    def setting_of(norm):
        return Setting(size, depth, 2, base, norm, precision=options.precision, channels_last=True)

    if options.plain:
        return _print_plain(setting_of(options.plain))
    keep_freed_memory()
    rows, samples, bars = [], {}, {}
    for norm in norms:
        setting = setting_of(norm)
        ours, engine = distributed_step(setting)
        flags = [
            "--size",
            str(size),
            "--base",
            str(base),
            "--precision",
            options.precision,
            "--threads",
            str(options.threads),
            *["--quick"] * options.quick,
        ]
        cases = {
            "distseg": ours,
            "PyTorch's layers": plain_step(setting),
            "PyTorch's layers, glibc as it is": lambda: Reading(
                run_ranks(1, ["-m", "benchmarks.step_time", "--plain", norm, *flags])["seconds"]
            ),
            "convolutions alone": convolutions(engine, ours),
        }
        results = measure(cases, repeats_of(options), warmup=0 if options.quick else 1)
        samples[norm], bars[norm] = (
            results.as_dict(),
            shares(ours, results.spread("distseg").median),
        )
        rows += [{"norm": norm, **results.row(case, ("min", "median"))} for case in cases]
    by_kind = [
        f"{norm}: "
        + ", ".join(
            f"{kind} {seconds / sum(parts.values()):.1%}" for kind, seconds in parts.items()
        )
        for norm, parts in bars.items()
    ]
    network = f"U-Net of depth {depth}, 2 convs a level, base {base}, image {size}, dropout 0.1, {options.precision} channels_last, {options.threads} threads"
    notes = "\n".join([f"{network}; / distseg: of neighbours in time, median and range", *by_kind])
    parameters = {
        "size": str(size),
        "depth": depth,
        "base": base,
        "precision": options.precision,
        "threads": options.threads,
    }
    report(
        "step_time",
        QUESTION,
        Rows(rows, {"samples": samples, "seconds by kind": bars}),
        options,
        parameters,
        notes,
        lambda path: draw(bars, samples, path),
    )


def _print_plain(setting: Setting) -> None:
    step, seconds = plain_step(setting), []
    for _ in range(4):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": min(seconds[1:])}))


def convolutions(engine, step: Callable[[], float]) -> Callable[[], None]:
    """All convolutions of a step, one after another, forward and backward."""
    seen: list[tuple[nn.Module, torch.Size, torch.dtype]] = []
    convs = [layer for layer in engine.model.layers if isinstance(layer, nn.modules.conv._ConvNd)]
    hooks = [
        conv.register_forward_hook(
            lambda conv, inputs, y: seen.append((conv, inputs[0].shape, y.dtype))
        )
        for conv in convs
    ]
    step()
    for hook in hooks:
        hook.remove()
    calls = []
    for number, (conv, shape, dtype) in enumerate(seen):
        alone = nn.Conv2d(
            conv.in_channels, conv.out_channels, conv.kernel_size, padding=conv.padding, bias=False
        ).to(dtype=dtype, memory_format=torch.channels_last)
        x = (
            torch.randn(shape, dtype=dtype)
            .contiguous(memory_format=last_format(4))
            .requires_grad_(number > 0)
        )  # an image wants no gradient
        calls.append(
            (
                alone,
                x,
                torch.randn(alone(x).shape).to(dtype).contiguous(memory_format=last_format(4)),
            )
        )

    def run() -> None:
        for conv, x, g in calls:
            conv(x).backward(g)
            x.grad = conv.weight.grad = None

    return run


def shares(step: Callable[[], float], seconds: float) -> dict[str, float]:
    """Seconds of a step by kind of operation, from a profile of one, scaled to ``seconds``."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    scale = seconds / sum(times.values())
    found = {
        kind: scale * sum(t for key, t in times.items() if _kind(key) == kind) for kind in KINDS
    }
    return found | {"other": seconds - sum(found.values())}


def _kind(operation: str) -> str | None:
    name = operation.lower()
    return next(
        (kind for kind, parts in KINDS.items() if any(part in name for part in parts)), None
    )


def draw(bars: dict[str, dict[str, float]], samples: dict, path: Path) -> None:
    """A bar a norm for distseg's step, by kind; beside it the convolutions alone and PyTorch's layers."""
    with new_figure(path, (9, 1.8 + 0.9 * len(bars))) as figure:
        axes = figure.add_subplot()
        colours = dict(zip([*KINDS, "other"], (*PALETTE, "#BBBBBB")))
        for row, (norm, parts) in enumerate(bars.items()):
            left = 0.0
            for kind, seconds in parts.items():
                axes.barh(
                    row, seconds, 0.34, left, color=colours[kind], label=kind if row == 0 else None
                )
                left += seconds
            cases = samples[norm]["cases"]
            axes.barh(
                row + 0.36,
                cases["PyTorch's layers"]["median"],
                0.26,
                color="#DDDDDD",
                label="PyTorch's layers, in all" if row == 0 else None,
            )
            axes.plot(
                [cases["convolutions alone"]["median"]] * 2,
                [row - 0.25, row + 0.25],
                color=INK,
                label="convolutions alone" if row == 0 else None,
            )
        axes.set_yticks(range(len(bars)), [f"{norm} norm" for norm in bars])
        axes.invert_yaxis()
        axes.set_xlabel("seconds a step")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1.45), ncols=4)
        figure.tight_layout()


if __name__ == "__main__":
    main()
