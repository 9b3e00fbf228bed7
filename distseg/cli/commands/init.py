"""Flags of ``distseg init``, which writes a commented config for a store."""

from __future__ import annotations

import os
import shlex
from argparse import SUPPRESS
from pathlib import Path

from distseg.cli.flag_checks import MOST, check_file
from distseg.cli.parsing import command_parser, joint, parse_plain


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("init", None)
    parser.add_argument("store", help="The store that distseg prepare wrote.")
    parser.add_argument(
        "--output", type=str, default="config.yaml", help="The config file to write."
    )
    parser.add_argument(
        "--network",
        type=str | None,
        default=None,
        help="unet, a name that distseg models lists, or your own function as "
        "package.module:function; by default unet, or a residual network if each image has one "
        "label.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=3.0,
        help="Predicted minutes of training, from which the number of epochs follows.",
    )
    parser.add_argument("--masks", type=str | None, default=None, help=SUPPRESS)
    parsed = parse_plain(parser, arguments)
    if os.path.isdir(parsed.store) or parsed.masks is not None:
        store = f"{Path(parsed.store).resolve().name}.h5"
        masks = shlex.quote(parsed.masks or "MASKS")
        raise ValueError(
            f"{parsed.store} is {'a folder' if os.path.isdir(parsed.store) else 'one file'}, and "
            f"init reads a store: first pack the images into one by 'distseg prepare "
            f"{shlex.quote(parsed.store)} {shlex.quote(store)} --masks {masks} "
            f"--classes background,NAME', then run 'distseg init {shlex.quote(store)}'"
        )
    if not 0 < parsed.minutes <= MOST:
        raise ValueError(
            f"--minutes must be a number above 0 and at most {MOST}, got {parsed.minutes:g}"
        )
    check_file(parsed.output, "--output")
    from distseg.cli.init import init

    for line in init(parsed.store, parsed.output, parsed.network, parsed.minutes):
        print(line)
    return 0
