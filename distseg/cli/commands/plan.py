"""Flags of ``distseg plan``: layouts of a training, stages of a network, or what each rank does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distseg.cli.flag_checks import check_count, check_file
from distseg.cli.job import job
from distseg.cli.parsing import command_parser, config_from, joint, own_flags, parse, parse_plain
from distseg.comm.launch import raise_jointly
from distseg.config.file import read_text
from distseg.config.settings import Config
from distseg.config.sizes import Size, parse_bytes
from distseg.report.disk import atomic_write


def run(arguments: list[str]) -> int:
    if "--program" in arguments:
        return _program(arguments)
    if any(re.match("--ranks(=|$)", argument) for argument in arguments):
        return _layouts(arguments)
    return _stages(arguments)


def _layouts(arguments: list[str]) -> int:
    """Print the best layouts of a training on ``--ranks`` ranks; return the exit status."""
    parser = command_parser("plan")
    parser.add_argument("--ranks", type=int, default=1, help="Number of ranks to plan for.")
    parser.add_argument(
        "--image",
        type=Size | None,
        default=None,
        help="Size of the images, such as 512x512; by default that of the store's largest sample.",
    )
    parser.add_argument(
        "--machine",
        type=str,
        default="here",
        help="here, to time the network on this machine, on all ranks of mpirun at the same time; "
        "or a profile of another machine: a100, dgx1-v100, h100, summit-v100, or the path of a "
        "YAML file.",
    )
    parser.add_argument(
        "--limit",
        type=str | None,
        default=None,
        help="Memory limit of a rank, such as 16GB; by default the memory that the machine has.",
    )
    parser.add_argument(
        "--batch",
        type=int | None,
        default=None,
        help="Number of images in a step over all sample groups; by default that of the config.",
    )
    parser.add_argument(
        "--save", type=str | None, default=None, help="Write the machine's profile to this file."
    )
    parser.add_argument(
        "--write",
        type=str | None,
        default=None,
        help="Write the config with the best layout to this file.",
    )
    parser.add_argument(
        "--picture",
        type=str | None,
        default=None,
        help="Draw time and memory of the layouts to this file, such as plan.png, and the "
        "timeline of the fastest one beside it.",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="Simulate the fastest layout, whose messages share the links of nodes.",
    )
    parser.add_argument("--json", action="store_true", help="Print one object; seconds and bytes.")

    @joint
    def settle() -> tuple[Config, dict]:
        parsed = parse(parser, arguments)
        check_count("--ranks", parsed.ranks)
        check_file(parsed.save, "--save")
        check_file(parsed.write, "--write")
        check_file(parsed.picture, "--picture")
        if parsed.picture is not None:
            from distseg.report.style import need_matplotlib

            need_matplotlib()
        if parsed.batch is not None:
            check_count("--batch", parsed.batch)
        return config_from(parsed), own_flags(parsed)

    with job(settle) as (config, flags, comm):
        from distseg.cli.plan_layouts import plan_layouts, text
        from distseg.cli.planned_training import PlannedTraining

        with raise_jointly(comm):
            training = PlannedTraining.of(config, flags["image"])
        found = plan_layouts(
            training,
            comm,
            flags["ranks"],
            flags["machine"],
            parse_bytes(flags["limit"]),
            flags["batch"],
            flags["simulate"],
        )
        if found is not None:
            if flags["save"]:
                with atomic_write(flags["save"]) as growing:
                    growing.write_text(found.facts["profile"])
            path, facts = _file_among(arguments), found.facts
            if flags["write"]:
                wanted = Config().changes_to(config.with_values(found.settings))
                _write_config(wanted, path, flags["write"])
                path, facts = flags["write"], {**facts, "chosen": {}}
            print(json.dumps(facts, indent=1) if flags["json"] else text(facts, path or "CONFIG"))
            if flags["picture"]:
                pictures = found.draw(Path(flags["picture"]))
                print(" ".join(map(str, pictures)), file=sys.stderr)
    return 0


def _file_among(arguments: list[str]) -> str | None:
    """Return the config file that the arguments name, or None if they name none or several."""
    words = ["--config", *arguments] if arguments[0][:1] != "-" else arguments
    words = [part for word in words for part in re.split("(?<=^--config)=", word)]
    found = [value for flag, value in zip(words, words[1:]) if flag == "--config"]
    return found[0] if len(found) == 1 else None


def _write_config(settings: Mapping[str, Any], path: str | None, output: str) -> None:
    """Write a config file with these settings; keep the comments and the order of another file.

    Args:
        settings: the values of all settings that differ from their defaults, by name.
        path: the file whose comments and order are kept; None to write a new file with
            ``settings`` only.
        output: the file to write, which may be ``path``.

    Raises:
        ValueError: the settings cannot be written into the text of ``path``.
    """
    from distseg.config.edit import with_settings

    def read(file: str | None) -> Config:
        return config_from(parse(command_parser("plan"), [] if file is None else [str(file)]))

    before, config = "" if path is None else read_text(path), Config().with_values(settings)
    changed = read(path).changes_to(config)
    with atomic_write(output) as growing:
        try:
            growing.write_text(with_settings(before, changed), encoding="utf-8")
            left = read(growing).changes_to(config)
        except ValueError:  # the new text is no config
            left = changed
        if left:
            name, value = next(iter(left.items()))
            raise ValueError(
                f"{name} cannot be set to {value} in the text of {path}: write its sections as "
                "indented lines without braces and anchors, or leave --write out"
            )


@joint
def _stages(arguments: list[str]) -> int:
    """Print how a network is cut into ``--stages`` stages; return the exit status."""
    from distseg.runtime.schedule import SCHEDULES

    parser = command_parser("plan", None)
    parser.add_argument(
        "--program",
        action="store_true",
        help="Print what each rank does in a step of a job: distseg plan CONFIG --program "
        "--image 512x512.",
    )
    parser.add_argument(
        "--ranks",
        type=int | None,
        default=None,
        help="Print the best layouts of a job on this number of ranks: distseg plan CONFIG --ranks "
        "16. distseg plan --ranks 16 --help lists the flags of this form.",
    )
    parser.add_argument("--stages", type=int, default=6, help="Number of pipeline stages.")
    parser.add_argument(
        "--model",
        type=str,
        default="summit-small",
        help="A name of distseg models, or package.module:function.",
    )
    parser.add_argument(
        "--tile",
        type=Size,
        default=Size("1434"),
        help="Size of the window in the pipeline, such as 1434 or 512x768.",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=2, help="Number of micro-batches in a step."
    )
    parser.add_argument("--batch", type=int, default=1, help="Number of windows in a micro-batch.")
    parser.add_argument(
        "--memory",
        type=str | None,
        default=None,
        help="Memory limit of a stage, such as 16GB or 15.5GiB; no limit by default.",
    )
    parser.add_argument(
        "--recompute",
        choices=["never", "except_last", "always"],
        default="never",
        help="Which activations to compute again.",
    )
    parser.add_argument(
        "--schedule",
        choices=list(SCHEDULES),
        default="gpipe",
        help="Order of the forward and backward passes.",
    )
    parser.add_argument(
        "--costs",
        choices=["modelled", "measured"],
        default="modelled",
        help="Costs of layers: modelled from their arithmetic, or measured on this machine.",
    )
    parser.add_argument(
        "--device",
        type=str | None,
        default=None,
        help="Device for modelled costs: v100 (the default), or cpu for the CPU of this machine.",
    )
    parser.add_argument("--json", action="store_true", help="Print one object; seconds and bytes.")
    if arguments and not arguments[0].startswith("-"):
        raise ValueError(
            f"distseg plan {arguments[0]} needs --ranks N, to choose a layout on N ranks, or "
            "--program, to print what each rank does; without a config it cuts a network into "
            "stages (distseg plan --help)"
        )
    parsed = parse_plain(parser, arguments)
    for flag in ("stages", "micro_batches", "batch"):
        check_count(f"--{flag.replace('_', '-')}", parsed[flag])
    from distseg.planning import stage_report

    stage_report.check_stages(parsed.model, parsed.stages)
    policy = stage_report.Policy(parsed.micro_batches, parsed.schedule, parsed.recompute)
    limit = parse_bytes(parsed.memory)
    model, window = parsed.model, stage_report.window_of(parsed.tile)
    costs = stage_report.costs_of(model, window, parsed.batch, parsed.costs, parsed.device)
    tensors = stage_report.tensors_of_stages(model, window, parsed.batch)
    found = stage_report.plan(model, costs, tensors, parsed.stages, policy, limit)
    print(json.dumps(found, indent=1) if parsed.json else stage_report.summary(found))
    return 0


@joint
def _program(arguments: list[str]) -> int:
    """Print the operations of each rank of a config's pipeline; return the exit status."""
    parser = command_parser("plan")
    parser.add_argument(
        "--program", action="store_true", help="Print what each rank does in a step of this job."
    )
    parser.add_argument(
        "--image",
        type=Size | None,
        default=None,
        help="Size of the images, such as 512x512; by default that of the first step on the store.",
    )
    parsed = parse(parser, arguments)
    from distseg.cli.plan_program import PipelineProgram
    from distseg.models.capture.capture import as_network
    from distseg.training.verify import prepare

    prepared = prepare(config_from(parsed), parsed.image)
    model, size = as_network(prepared.model), prepared.images().size
    program = PipelineProgram(prepared.config, model, size)
    for rank, (legend, operations) in enumerate(program.texts()):
        print(
            f"{'' if rank == 0 else chr(10)}rank {rank} of {prepared.config.mesh.stages} of the "
            f"pipeline\n{legend}\n\n{operations}"
        )
    if sentence := program.order_of_messages():
        print(f"\n{sentence}")
    return 0
