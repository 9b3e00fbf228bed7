"""Flags of ``distseg verify``, which compares steps on the mesh with the serial program."""

from __future__ import annotations

import json
import math

from distseg.cli.flag_checks import check_count, check_file
from distseg.cli.job import job
from distseg.cli.parsing import command_parser, config_from, joint, own_flags, parse
from distseg.config.settings import Config
from distseg.config.sizes import Size


def run(arguments: list[str]) -> int:
    parser = command_parser("verify")
    parser.add_argument(
        "--image", type=Size | None, default=None, help="Size of random images, such as 97x131."
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-12, help="Largest relative error that passes."
    )
    parser.add_argument(
        "--dump",
        type=str | None,
        default=None,
        help="Write weights, input, labels and gradients to this safetensors file.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        help="Number of optimizer steps; an error in the optimizer's state shows only in the "
        "step after it.",
    )
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")

    @joint
    def settle() -> tuple[Config, dict]:
        parsed = parse(parser, arguments)
        check_count("--steps", parsed.steps)
        if not 0 <= parsed.tolerance < math.inf:
            raise ValueError(
                "--tolerance, the largest relative error that passes, must be a number of at "
                f"least 0, such as 1e-12, got {parsed.tolerance}"
            )
        check_file(parsed.dump, "--dump")
        return config_from(parsed), own_flags(parsed)

    with job(settle) as (config, flags, comm):
        from distseg.cli.plan_layouts import with_best_layout
        from distseg.comm.launch import set_up
        from distseg.training import verify

        config = with_best_layout(config, comm, flags["image"])
        device = set_up(comm, config.run.device, config.run.threads).device
        report = verify.verify(config, comm, flags["image"], flags["dump"], device, flags["steps"])
        if report is not None:
            report.update(
                tolerance=flags["tolerance"], passed=verify.passed(report, flags["tolerance"])
            )
            print(
                json.dumps(report) if flags["json"] else verify.summary(report, flags["tolerance"]),
                flush=True,
            )
        good = comm.bcast(report is not None and report["passed"], root=0)
        return 0 if good else 1
