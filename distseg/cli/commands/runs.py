"""Flags of ``distseg runs``, which lists the runs in a folder."""

from __future__ import annotations

import json

from distseg.cli.parsing import command_parser, joint, parse_plain


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("runs", None)
    parser.add_argument("folder", help="A run, or a folder with runs in it.")
    parser.add_argument("--json", action="store_true", help="Print a list of objects.")
    parsed = parse_plain(parser, arguments)
    from distseg.report.tables import table
    from distseg.training.checkpoint.runs import describe, runs_in

    rows = [describe(run) for run in runs_in(parsed.folder)]
    print(json.dumps(rows, indent=1) if parsed.json else table(rows))
    return 0
