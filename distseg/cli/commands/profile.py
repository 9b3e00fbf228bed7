"""Flags of ``distseg profile``, which measures where the time of a step goes."""

from __future__ import annotations

from distseg.cli.flag_checks import check_count, check_folder
from distseg.cli.job import job
from distseg.cli.parsing import command_parser, config_from, joint, own_flags, parse
from distseg.config.settings import Config
from distseg.config.sizes import Size


def run(arguments: list[str]) -> int:
    parser = command_parser("profile")
    parser.add_argument(
        "--image",
        type=Size | None,
        default=None,
        help="Size of random images, such as 97x131; by default the images of the first step on "
        "the store.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="Number of optimizer steps; the last one is profiled, the steps before it warm up.",
    )
    parser.add_argument(
        "--output",
        type=str,
        default="profile",
        help="Folder for timeline.png and trace.json (ui.perfetto.dev).",
    )

    @joint
    def settle() -> tuple[Config, dict]:
        parsed = parse(parser, arguments)
        check_count("--steps", parsed.steps)
        check_folder(parsed.output, "--output")
        return config_from(parsed), own_flags(parsed)

    with job(settle) as (config, flags, comm):
        from distseg.cli.plan_layouts import with_best_layout
        from distseg.cli.profile import profile
        from distseg.comm.launch import raise_jointly
        from distseg.training.verify import prepare

        config = with_best_layout(config, comm, flags["image"])
        with raise_jointly(comm):
            prepared = prepare(config, flags["image"])
        found = profile(prepared, comm, flags["steps"], flags["output"])
        if found is not None:
            print(
                f"{found.text()}\n\n{flags['output']}/timeline.png, {flags['output']}/trace.json",
                flush=True,
            )
    return 0
