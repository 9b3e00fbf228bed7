"""Flags of ``distseg plot``, which draws loss curves, or predictions over their images."""

from __future__ import annotations

import os

from distseg.cli.flag_checks import check_file
from distseg.cli.parsing import command_parser, joint, parse_plain


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("plot", None)
    parser.add_argument(
        "what",
        choices=["curves", "overlay"],
        help="curves: loss and scores of runs; overlay: image, truth, prediction, errors.",
    )
    parser.add_argument(
        "paths", nargs="+", help="curves: run folders; overlay: prediction files NAME.h5."
    )
    parser.add_argument(
        "--store",
        type=str | None,
        default=None,
        help="The store with the image and its labels (overlay).",
    )
    parser.add_argument(
        "--box",
        type=str | None,
        default=None,
        help="Part to draw as rows and columns, such as 100:900,0:675 (overlay).",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="The picture; by default curves.png in the first run, NAME.overlay.png beside each "
        "prediction.",
    )
    parsed = parse_plain(parser, arguments)
    for flag in ("store", "box") if parsed.what == "curves" else ():
        if parsed[flag] is not None:
            raise ValueError(
                f"--{flag} {parsed[flag]} is for overlays, but curves are drawn: leave --{flag} "
                "out, or plot overlay"
            )
    if parsed.what == "overlay" and parsed.output and len(parsed.paths) > 1:
        raise ValueError(
            f"--output {parsed.output} names one picture, but there are {len(parsed.paths)} "
            "predictions: leave --output out, or plot each prediction with its own command"
        )
    for path in parsed.paths:
        if not (os.path.isfile(path) or parsed.what == "curves" and os.path.isdir(path)):
            kind = (
                "the folder of a run, or a log"
                if parsed.what == "curves"
                else "a prediction, NAME.h5"
            )
            raise ValueError(
                f"{path!r} is {'a folder' if os.path.isdir(path) else 'no file'}: 'distseg plot "
                f"{parsed.what}' takes {kind}"
            )
    check_file(parsed.output, "--output")
    from distseg.cli.plot import run_plot

    return run_plot(parsed.what, parsed.paths, parsed.store, parsed.box, parsed.output)
