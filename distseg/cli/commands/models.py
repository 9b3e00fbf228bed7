"""Flags of ``distseg models``, which lists networks by name."""

from __future__ import annotations

import json

from distseg.cli.parsing import command_parser, joint, parse_plain


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("models", None)
    parser.add_argument("names", nargs="*", help="Names of networks; all by default.")
    parser.add_argument("--json", action="store_true", help="Print a list of objects.")
    parsed = parse_plain(parser, arguments)
    from distseg.cli.models import describe_model
    from distseg.models.zoo import ZOO
    from distseg.report.tables import table

    rows = [describe_model(name) for name in parsed.names or ZOO]
    print(json.dumps(rows, indent=1) if parsed.json else table(rows))
    return 0
