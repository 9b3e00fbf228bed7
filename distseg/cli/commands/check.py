"""Flags of ``distseg check``, which finds damaged data in a store or in checkpoints."""

from __future__ import annotations

from distseg.cli.parsing import command_parser, joint, parse_plain


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("check", None)
    parser.add_argument("path", help="A store, a run's folder, or one of its checkpoints.")
    parsed = parse_plain(parser, arguments)
    from distseg.cli.check import run_check

    return run_check(parsed.path)
