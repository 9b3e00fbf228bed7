"""Two ways to hide the exchange of borders: a convolution split into interior and strips, and weight gradients that fill waits.

The first computes the interior while borders travel; it can pay only if the split itself costs less than the wait. The second
is what distseg does in the backward pass (:func:`distseg.comm.collective.later`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Reading, measure, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import Setting, arguments_of
from distseg.comm.launch import keep_freed_memory
from distseg.config.sizes import Size

QUESTION = (
    "Does it pay to compute while borders travel, in the forward pass and in the backward pass?"
)
SHAPES = [(32, 384), (64, 192), (128, 96), (256, 48)]  # channels, pixels a side
SETTING = Setting(Size((384, 384)), 3, 2, 32)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        help="steps of a job; the fastest counts (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    shapes, setting = SHAPES, SETTING
    if options.quick:
        shapes, setting, options.steps = [(8, 16)], Setting(Size((32, 32)), 1, 1, 4), 1
    torch.set_num_threads(1)
    keep_freed_memory()
    rows, samples = [], {}
    for channels, side in shapes:
        cases = split_cases(channels, side)
        results = measure(
            cases, repeats_of(options) if options.quick else 4 * options.repeats, warmup=1
        )
        samples[f"{channels} channels"] = results.as_dict()
        rows.append(
            _row(
                f"forward: {channels} channels, {side}x{side}, whole against split",
                results,
                "split",
            )
        )
    results = measure(step_cases(setting, options), repeats_of(options), warmup=0)
    samples["steps"] = results.as_dict()
    rows.append(_row("step of 2 ranks: waits filled against idle", results, "idle"))
    notes = "one thread; slower: the second case over the first, turn by turn, median and range"
    report(
        "overlap",
        QUESTION,
        Rows(rows, {"samples": samples}),
        options,
        {"shapes": shapes, "step": setting.as_dict()},
        notes,
    )


def split_cases(channels: int, side: int) -> dict[str, Callable[[], Tensor]]:
    """A 3x3 convolution of a tile whose borders are there, at once, and its interior first and its four sides later."""
    x, weight = torch.randn(1, channels, side + 2, side + 2), torch.randn(channels, channels, 3, 3)

    def split() -> Tensor:
        y = torch.empty(1, channels, side, side)
        y[..., 1:-1, 1:-1] = F.conv2d(x[..., 1:-1, 1:-1], weight)
        for rows, columns in (
            (slice(0, 1), slice(None)),
            (slice(-1, None), slice(None)),
            (slice(1, -1), slice(0, 1)),
            (slice(1, -1), slice(-1, None)),
        ):
            y[..., rows, columns] = F.conv2d(
                x[..., _wider(rows, side), _wider(columns, side)], weight
            )
        return y

    assert torch.allclose(split(), F.conv2d(x, weight), rtol=1e-3, atol=1e-3)
    return {"whole": lambda: F.conv2d(x, weight), "split": split}


def _wider(wanted: slice, side: int) -> slice:
    """The rows of the input that these rows of the output look at."""
    start, stop, _ = wanted.indices(side)
    return slice(start, stop + 2)


def step_cases(setting: Setting, options: argparse.Namespace) -> dict[str, Callable[[], Reading]]:
    tiles = [
        "--tiles",
        "2x1",
        "--exchange_every",
        "1",
        "--steps",
        str(options.steps),
        "--reducer",
        "mpi",
    ]
    base = [argument for argument in arguments_of(setting)]

    def seconds(*flags: str) -> Reading:
        return Reading(min(run_ranks(2, [*base, *tiles, *flags])["every"]))

    return {"filled": lambda: seconds(), "idle": lambda: seconds("--idle_waits")}


def _row(what: str, results, second: str) -> dict:
    ratio = results.ratio(second)
    return {
        "comparison": what,
        "first [ms]": 1e3 * results.spread(results.baseline).median,
        "slower": ratio.median,
        "from": ratio.min,
        "to": ratio.max,
    }


if __name__ == "__main__":
    main()
