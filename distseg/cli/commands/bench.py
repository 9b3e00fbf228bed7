"""Flags of ``distseg bench``, which measures scaling, pipelines, halos, memory and reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from distseg.cli.bench.flags import add_flags, check_flags, check_kind
from distseg.cli.bench.kinds import MEASURED, SHOWN
from distseg.cli.completion import completing
from distseg.cli.flag_checks import check_count, check_file, check_folder, check_given
from distseg.cli.job import job
from distseg.cli.parsing import (
    HELP,
    command_parser,
    config_from,
    joint,
    own_flags,
    parse,
    parse_plain,
)
from distseg.config.settings import Config


def run(arguments: list[str]) -> int:
    """Measure on all ranks of the job, or show results; return the exit status."""
    if completing():
        _complete()
    kind, words = (arguments or ["--help"])[0], arguments[1:]
    if kind in HELP:
        return _help({**MEASURED, **SHOWN})
    joint(check_kind)(kind, [*MEASURED, *SHOWN])
    if kind in SHOWN:
        return (_compare if kind == "compare" else _report)(words)
    return _measure(kind, words)


def _complete() -> None:
    """Print the words with which a line of ``distseg bench`` may go on, and end the process."""
    parser = command_parser("bench")
    parser.add_argument("kind", choices=[*MEASURED, *SHOWN])
    add_flags(parser, *MEASURED)
    parse(parser, [])


def _help(kinds: Mapping[str, str]) -> int:
    """Print the help of ``distseg bench`` with all kinds of measurement; return the exit status."""
    lines = [f"  {name:10}{text}" for name, text in kinds.items()]
    print(
        "usage: distseg bench KIND [CONFIG.yaml] [--section.field VALUE ...]\n"
        "       distseg bench compare A.json B.json\n"
        "       distseg bench report FOLDER\n\n"
        + "\n".join(lines)
        + "\n\ndistseg bench KIND --help lists a kind's flags."
    )
    return 0


@joint
def _compare(arguments: list[str]) -> int:
    parser = command_parser("bench compare", None)
    parser.add_argument("a", help="The first result, a JSON file.")
    parser.add_argument("b", help="The second result, whose seconds are divided by the first's.")
    parser.add_argument("--json", action="store_true", help="Print the comparison as one object.")
    parsed = parse_plain(parser, arguments)
    from distseg.cli.bench.comparison import compare
    from distseg.cli.bench.result_files import read_result

    found = compare(read_result(Path(parsed.a)), read_result(Path(parsed.b)))
    print(json.dumps(asdict(found), indent=1) if parsed.json else found.text())
    return 0


@joint
def _report(arguments: list[str]) -> int:
    parser = command_parser("bench report", None)
    parser.add_argument("folder", help="The folder of results, --output of the measurements.")
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="The HTML file; by default report.html in the folder.",
    )
    parsed = parse_plain(parser, arguments)
    check_file(parsed.output, "--output")
    from distseg.cli.bench.report import run_report

    return run_report(parsed.folder, parsed.output)


def _measure(kind: str, words: list[str]) -> int:
    """Measure on all ranks of the job, and return the exit status.

    Args:
        kind: the kind of measurement.
        words: the words of the command after the kind.
    """
    parser = command_parser(f"bench {kind}")
    add_flags(parser, kind)

    @joint
    def settle() -> tuple[Config, dict]:
        parsed = parse(parser, words)
        flags = own_flags(parsed)
        for name, least in (("repeats", 1), ("warmup", 0), ("crops", 1)):
            if name in flags:
                check_count(f"--{name}", flags[name], least)
        check_folder(flags["output"], "--output")
        config = config_from(parsed)
        if flags["network"] is not None:
            config = config.with_values({"model.name": flags["network"]})
        check_given(config.mesh, "distseg bench")
        check_flags(kind, flags, config.data.store)
        return config, flags

    with job(settle) as (config, flags, comm):
        from distseg.cli.bench.command import run_bench
        from distseg.cli.bench.measurements import Asked

        return run_bench(Asked(kind, flags, config, ["bench", kind, *words]), comm)
