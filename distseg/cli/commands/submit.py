"""Flags of ``distseg submit``, which writes or submits batch jobs."""

from __future__ import annotations

from functools import cache

from distseg.cli.completion import completing
from distseg.cli.flag_checks import check_given
from distseg.cli.parsing import HELP, Parser, command_parser, config_from, parse
from distseg.config.file import sections_in
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config


@cache
def _parser(kind: type) -> Parser:
    from distseg.cli.submit.command import add_flags

    parser = command_parser("submit", kind)
    add_flags(parser)
    return parser


def run(arguments: list[str]) -> int:
    from distseg.cli.submit.command import config_file, submit

    asking = completing() or bool(HELP & set(arguments))
    by_patches = not asking and "patchgd" in sections_in(config_file(arguments))
    kind = PatchConfig if by_patches else Config

    def read(words):
        return config_from(parse(_parser(kind), words), kind)

    parsed = parse(_parser(kind), arguments)
    check_given(read(arguments).mesh, "distseg submit")
    return submit(parsed, arguments, read)
