"""What distseg's machinery costs where nothing is distributed: its step on one rank against the same network in plain PyTorch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.harness import measure, parent, repeats_of, report
from benchmarks.rows import Rows
from benchmarks.steps import Setting, distributed_step, plain_step
from distseg.comm.launch import keep_freed_memory
from distseg.config.sizes import Size

QUESTION = "How much slower is distseg's step on one rank than the same step in plain PyTorch?"
FORMATS = {"fp32": {}, "bf16 channels_last": {"precision": "bf16", "channels_last": True}}
NORMS = ("instance", "batch", "group")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(7)])
    parser.add_argument(
        "--size", type=Size, default=Size((384, 384)), help="of the image (default: %(default)s)"
    )
    parser.add_argument(
        "--base", type=int, default=32, help="channels of the first level (default: %(default)s)"
    )
    parser.add_argument(
        "--model",
        default="unet",
        help="another network, as package.module:function, such as benchmarks.networks:smp_Unet_resnet34; norm and base are its own then",
    )
    parser.add_argument(
        "--against",
        help="our step on this network in the place of plain PyTorch's, such as the same one in another form",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    setting = Setting(size=options.size, base_channels=options.base, model=options.model)
    if options.quick:
        setting = replace(setting, size=Size((64, 64)), base_channels=4, depth=2)
    found = {
        (norm, name): measure(
            _cases(replace(setting, norm=norm, **form), options.against),
            repeats_of(options),
            clock=time.process_time,
        )
        for norm in (NORMS if options.model == "unet" else ("its own",))
        for name, form in FORMATS.items()
    }
    rows = [_row(norm, name, results) for (norm, name), results in found.items()]
    network = (
        f"U-Net of depth {setting.depth}, {setting.num_convs} convs a level, base {setting.base_channels}, dropout 0.1"
        if options.model == "unet"
        else options.model
    )
    notes = (
        f"{network}, AdamW, gradient norm in both; image {setting.size};\n"
        "processor seconds of one thread (the wall clock's on a quiet machine); ratio: median of the turns, with its range"
    )
    notes += f"\nplain: our step on {options.against}" if options.against else ""
    samples = {f"{norm}, {name}": results.as_dict() for (norm, name), results in found.items()}
    report(
        "overhead",
        QUESTION,
        Rows(rows, {"samples": samples}),
        options,
        {"setting": setting.as_dict()},
        notes,
    )


def _cases(setting: Setting, against: str | None) -> dict:
    """Plain PyTorch's step and ours; or ours on another network and on this."""
    other = distributed_step(replace(setting, model=against))[0] if against else plain_step(setting)
    return {"plain": other, "distseg": distributed_step(setting)[0]}


def _row(norm: str, name: str, results) -> dict:
    ratio = results.ratio("distseg")
    plain, own = results.spread("plain"), results.spread("distseg")
    return {
        "norm": norm, "format": name, "plain min [s]": plain.min, "median [s]": plain.median,
        "distseg min [s]": own.min, "distseg median [s]": own.median,
        "distseg / plain": ratio.median, "from": ratio.min, "to": ratio.max, "of minima": own.min / plain.min,
    }  # fmt: skip


if __name__ == "__main__":
    main()
