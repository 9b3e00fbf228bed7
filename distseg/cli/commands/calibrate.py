"""Flags of ``distseg calibrate``, which measures a machine for ``distseg plan``."""

from __future__ import annotations

import math

from distseg.cli.flag_checks import check_file
from distseg.cli.job import job
from distseg.cli.parsing import command_parser, config_from, joint, own_flags, parse
from distseg.config.settings import Config
from distseg.report.disk import atomic_write


def run(arguments: list[str]) -> int:
    """Measure this machine on all ranks of the job; return the exit status."""
    parser = command_parser("calibrate")
    parser.add_argument(
        "--save", type=str | None, default=None, help="Write the machine's profile to this file."
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="About how long the measurement may take."
    )

    @joint
    def settle() -> tuple[Config, dict]:
        parsed = parse(parser, arguments)
        if not 0 < parsed.seconds < math.inf:
            raise ValueError(
                f"--seconds must be a number above 0, such as 60, got {parsed.seconds}"
            )
        check_file(parsed.save, "--save")
        return config_from(parsed), own_flags(parsed)

    with job(settle) as (config, flags, comm):
        from distseg.cli.calibrate import calibrate, text
        from distseg.planning.machine import as_profile

        found = calibrate(config.run, comm, flags["seconds"])
        if comm.rank == 0:
            if flags["save"]:
                with atomic_write(flags["save"]) as growing:
                    growing.write_text(as_profile(found))
            print(text(found), flush=True)
    return 0
