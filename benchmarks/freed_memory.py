"""Measure the worth of keeping freed memory: glibc returns big blocks to the system, which hands them out zeroed, page by page.

The setting (:func:`distseg.comm.launch.keep_freed_memory`) cannot be undone in a process, so each case is a job of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import Reading, measure, parent, repeats_of, report, run_ranks
from benchmarks.steps import Setting, arguments_of
from distseg.config.sizes import Size

QUESTION = "How much faster is a step when glibc keeps freed memory?"
FORMATS = {"fp32": {}, "bf16 channels_last": {"precision": "bf16", "channels_last": True}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--size", type=Size, default=Size((768, 768)), help="of the image (default: %(default)s)"
    )
    parser.add_argument(
        "--base", type=int, default=32, help="channels of the first level (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="steps of a job (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    setting, formats = Setting(options.size, 3, 1, options.base), FORMATS
    if options.quick:
        setting, formats, options.repeats, options.steps = (
            Setting(Size((32, 32)), 1, 1, 4),
            {"fp32": {}},
            1,
            1,
        )
    cases = {}
    for name, form in formats.items():
        given = [*arguments_of(replace(setting, **form)), "--steps", str(options.steps)]
        cases[name] = lambda given=given: _seconds([*given, "--system_malloc"])
        cases[f"{name}, kept"] = lambda given=given: _seconds(given)
    results = measure(cases, repeats_of(options), warmup=0)
    notes = (
        f"U-Net of depth {setting.depth}, {setting.num_convs} conv a level, base {setting.base_channels}, image {setting.size}; "
        "processor seconds a step, of user and kernel, one thread"
    )
    report("freed_memory", QUESTION, results, options, {"setting": setting.as_dict()}, notes)


def _seconds(given: list[str]) -> Reading:
    return Reading(run_ranks(1, given)["processor"])


if __name__ == "__main__":
    main()
