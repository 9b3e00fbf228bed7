"""Flags of ``distseg report``, which writes a page about a run."""

from __future__ import annotations

from distseg.cli.flag_checks import check_count, check_file
from distseg.cli.parsing import command_parser, joint, parse_run


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("report RUN", None)
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="The HTML file; by default report.html in the run's folder.",
    )
    parser.add_argument(
        "--predictions",
        type=str,
        default="predictions",
        help="Folder of class maps of distseg predict. Images of up to 16 megapixels without a "
        "class map there are predicted.",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        default=2,
        help="Number of the worst images, and of the best images, to draw; 0: none.",
    )
    config, flags = parse_run(parser, arguments)
    check_file(flags["output"], "--output")
    check_count("--pictures", flags["pictures"], 0)
    from distseg.cli.report import run_report

    return run_report(
        flags["run"], config, flags["output"], flags["predictions"], flags["pictures"]
    )
