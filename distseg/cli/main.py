"""Console command ``distseg``: one subcommand a task, flags from :mod:`distseg.config.settings`.

Each subcommand imports heavy modules only when it runs, so ``distseg --help`` answers at once.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import cache, wraps
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings
from jsonargparse.typing import register_type

from distseg.cli.completion import add_completers, complete, completing
from distseg.cli.interrupt import interruptible
from distseg.cli.job import job
from distseg.comm.launch import JointFailure, as_program, end_as_one, raise_jointly
from distseg.comm.signals import listening
from distseg.config.file import (
    Setting,
    check_value,
    listed,
    read_settings,
    read_text,
    renamed_value,
    sections,
    sections_in,
    settings_of,
    suggestion,
)
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import AUGMENTATION_LIMITS, Config, MeshBase, ModelConfig
from distseg.config.sizes import Size, parse_bytes
from distseg.config.spelling import did_you_mean
from distseg.report.disk import atomic_write, check_replaceable

register_type(Size, serializer=str, deserializer=Size)

_USAGE = """usage: distseg COMMAND [CONFIG.yaml] [--section.field VALUE ...]

data      prepare   pack images and masks into a store, or make an example
          check     find damaged data in a store or in checkpoints
training  init      write a commented config for a store and this machine
          train     train on any number of ranks, as with mpirun -n 4
          patchgd   train by patch gradient descent, an approximation
          models    list networks by name: parameters, layers, stride, halo
          plan      find the fastest layouts on N ranks, or stages of a model
          calibrate measure this machine, for plan --machine FILE
          verify    compare steps on the mesh with the serial program in float64
          profile   measure where the time of a step goes, rank by rank
results   evaluate  score a run on whole images, by class and by image
          predict   write class maps of whole images, in bounded memory
          trace     write objects of class maps as polygons or numbers
          export    write a network for use without distseg, such as ONNX
          plot      draw loss curves, or predictions over their images
          report    write one HTML page: curves, scores, pictures, settings
          runs      list the runs in a folder: progress, best checkpoint, mesh
clusters  submit    write or submit batch jobs, sweeps and scaling studies

distseg COMMAND --help lists a command's flags."""


_HELP = {"-h", "--help"}
_MOST = 10**6  # of flags that count


def main(arguments: list[str] | None = None) -> None:
    """Run the command line ``arguments``, by default that of the process."""
    if arguments is None:
        as_program()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))
    # The help of the flags is the documentation of the fields. Parsing it is slow, so it is parsed
    # for --help only.
    set_parsing_settings(docstring_parse_attribute_docstrings=bool(_HELP & set(arguments)))
    try:
        with interruptible():
            if completing():
                complete(_COMMANDS)
            end_as_one(lambda: _command(arguments))
    except OSError as e:  # the last output was not written, as on a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(
            f"distseg: error: the output cannot be written ({e.strerror}): send the output to "
            "another file or device",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(2)


def _command(arguments: list[str]) -> int | None:
    if not arguments or arguments[0] in _HELP:
        print(_USAGE)
        return 0
    name, *flags = arguments
    if name == "--version":
        from distseg import __version__

        print(__version__)
        return 0
    if name not in _COMMANDS:
        near = did_you_mean(name, [*_COMMANDS, "--help"])
        raise JointFailure(f"unknown command {name!r}: choose {', '.join(_COMMANDS)}{near}")
    try:
        return _COMMANDS[name](flags)
    except SystemExit as e:  # raised by argparse after --help
        return e.code


def _joint(read: Callable) -> Callable:
    """Decorate a function that reads a command line so that its errors become JointFailures.

    All ranks read the same command line. A JointFailure is reported once, not by every rank.
    """

    @wraps(read)
    def joint(*arguments):
        try:
            return read(*arguments)
        except BrokenPipeError:  # the reader of our output closed it
            raise
        except (ValueError, OSError) as e:
            raise JointFailure(str(e)) from e

    return joint


class _Parser(ArgumentParser):
    """Parser of the arguments of one command, such as ``distseg train``.

    Attributes:
        kind: the class of the config whose settings are flags; None if there is no config.
    """

    kind: type | None = None

    def add_settings(self, kind: type) -> None:
        """Add a flag for each setting of a config of this class."""
        self.kind = kind
        self.add_argument(
            "--config",
            action="config",
            help="A YAML file with the sections below. It may also be the first argument, without "
            "--config.",
        )
        for section in fields(kind):
            self.add_class_arguments(section.default_factory, section.name)

    @property
    def settings(self) -> dict[str, tuple[str, ...]]:
        """Names of the fields of each section, by the section's name."""
        return sections(self.kind) if self.kind else {}


def _parser(command: str, kind: type | None = Config) -> _Parser:
    parser = _Parser(prog=f"distseg {command}", exit_on_error=False, default_env=False)
    if kind:
        parser.add_settings(kind)
    return parser


def _parse(parser: _Parser, arguments: list[str], given: list[Setting] | None = None) -> Namespace:
    """Return the values of a command's flags, by name.

    If the first argument has no dash, it is the config file. ``--memory`` stands for
    ``--streaming.memory``, and ``--mesh auto`` for ``--mesh.layout auto``.

    Args:
        parser: the parser of the command.
        arguments: the arguments as the user wrote them.
        given: settings that come before the arguments, such as those of a run. The arguments
            override them.
    """
    if given is None:
        given = []
    arguments = [
        re.sub(r"^--memory(?==|$)", "--streaming.memory", argument) for argument in arguments
    ]
    for place, (flag, value) in enumerate(zip(arguments, [*arguments[1:], ""])):
        if flag == "--mesh=auto" or (flag, value) == ("--mesh", "auto"):
            arguments[place] = flag.replace("--mesh", "--mesh.layout")
    if completing():
        parser.add_argument("file", nargs="?")  # the first argument
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    if _HELP & set(arguments):
        _print_head(parser)
        arguments, given = ["--help"], []
    typed = {argument.partition("=")[0] for argument in arguments}
    arguments, read = _without_files(arguments, parser.kind)
    places = {
        setting.name: setting.place
        for setting in [*given, *read]
        if f"--{setting.name}" not in typed
    }
    return _parse_plain(parser, [*(setting.flag for setting in given), *arguments], places)


def _print_head(parser: _Parser) -> None:
    """Print the important part of a command's help, before the flags of all settings."""
    from distseg.cli.help import head

    _, command, *run = parser.prog.split()
    words = " ".join(
        ["distseg", command, *(run or ["[CONFIG.yaml]"]), "[--section.field VALUE ...]"]
    )
    known = {f"--{name}" for name in settings_flags(parser)} | {
        "--help",
        "--config",
        "--print_config",
    }
    own = {
        flag: action.help or ""
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag.rstrip("+") not in known
    }
    print(f"usage: {words}\n\n{head(command, own, parser.kind)}")
    parser.usage = SUPPRESS


def settings_flags(parser: _Parser) -> list[str]:
    """Return the names of the flags of all settings, without dashes.

    These are the names of sections and fields, such as ``model`` and ``model.name``.
    """
    return [
        name
        for section, names in parser.settings.items()
        for name in (section, *(f"{section}.{field}" for field in names))
    ]


def _without_files(arguments: list[str], kind: type) -> tuple[list[str], list[Setting]]:
    """Replace each config file among the arguments by flags with the file's settings.

    Args:
        arguments: the arguments; ``--config PATH`` names a file.
        kind: the class of the config.

    Returns:
        The new arguments, and the settings of all files.
    """
    found, read, rest = [], [], iter(arguments)
    for argument in rest:
        flag, equals, path = argument.partition("=")
        if flag.startswith("--") and flag[2:] in sections(kind):
            example = f"{flag}.{sections(kind)[flag[2:]][0]}"
            raise ValueError(
                f"{flag} is a section, which takes no value: give its fields, such as {example} "
                "VALUE, or give a config file as the first argument"
                + ("; --mesh auto chooses the mesh" if flag == "--mesh" else "")
            )
        if flag != "--config":
            found.append(argument)
            continue
        settings = read_settings(path if equals else next(rest, ""), kind)
        read += settings
        found += [setting.flag for setting in settings]
    return found, read


def _config(parsed: Namespace, kind: type = Config) -> Config | PatchConfig:
    return kind(
        **{
            section.name: section.default_factory(**vars(parsed[section.name]))
            for section in fields(kind)
        }
    )


def _check_given(mesh: MeshBase, command: str) -> None:
    """Refuse ``mesh.layout: auto`` for a command that computes on the mesh that the user gives."""
    if mesh.layout == "auto":
        raise ValueError(
            f"mesh.layout is auto, but {command} needs mesh.samples, mesh.tiles and mesh.stages: "
            "take them from distseg plan CONFIG --ranks N, and leave mesh.layout out"
        )


def _own(parsed: Namespace, kind: type = Config) -> dict:
    """Return the values of a command's own flags, which are no settings, by name.

    Args:
        parsed: the values of all flags.
        kind: the class of the config, which has the settings.
    """
    return {
        name: value
        for name, value in vars(parsed).items()
        if name not in sections(kind) and name != "config"
    }


def _verify(arguments: list[str]) -> int:
    parser = _parser("verify")
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

    @_joint
    def settle() -> tuple[Config, dict]:
        parsed = _parse(parser, arguments)
        _check_count("--steps", parsed.steps)
        if not 0 <= parsed.tolerance < math.inf:
            raise ValueError(
                "--tolerance, the largest relative error that passes, must be a number of at "
                f"least 0, such as 1e-12, got {parsed.tolerance}"
            )
        _check_file(parsed.dump, "--dump")
        return _config(parsed), _own(parsed)

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


def _profile(arguments: list[str]) -> int:
    parser = _parser("profile")
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

    @_joint
    def settle() -> tuple[Config, dict]:
        parsed = _parse(parser, arguments)
        _check_count("--steps", parsed.steps)
        check_folder(parsed.output, "--output")
        return _config(parsed), _own(parsed)

    with job(settle) as (config, flags, comm):
        from distseg.cli.plan_layouts import with_best_layout
        from distseg.cli.profile import profile

        config = with_best_layout(config, comm, flags["image"])
        found = profile(config, comm, flags["image"], flags["steps"], flags["output"])
        if found is not None:
            print(
                f"{found.text()}\n\n{flags['output']}/timeline.png, {flags['output']}/trace.json",
                flush=True,
            )
    return 0


@_joint
def _models(arguments: list[str]) -> int:
    parser = _parser("models", None)
    parser.add_argument("names", nargs="*", help="Names of networks; all by default.")
    parser.add_argument("--json", action="store_true", help="Print a list of objects.")
    parsed = _parse_plain(parser, arguments)
    from distseg.cli.commands import describe_model
    from distseg.models.zoo import ZOO
    from distseg.report.tables import table

    rows = [describe_model(name) for name in parsed.names or ZOO]
    print(json.dumps(rows, indent=1) if parsed.json else table(rows))
    return 0


def _plan(arguments: list[str]) -> int:
    if "--program" in arguments:
        return _program(arguments)
    return (_layouts if "--ranks" in arguments else _stages)(arguments)


def _layouts(arguments: list[str]) -> int:
    """Print the best layouts of a training on ``--ranks`` ranks; return the exit status."""
    parser = _parser("plan")
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

    @_joint
    def settle() -> tuple[Config, dict]:
        parsed = _parse(parser, arguments)
        _check_count("--ranks", parsed.ranks)
        _check_file(parsed.save, "--save")
        _check_file(parsed.write, "--write")
        _check_file(parsed.picture, "--picture")
        if parsed.picture is not None:
            from distseg.report.style import need_matplotlib

            need_matplotlib()
        if parsed.batch is not None:
            _check_count("--batch", parsed.batch)
        return _config(parsed), _own(parsed)

    with job(settle) as (config, flags, comm):
        from distseg.cli.plan_layouts import PlannedTraining, plan_layouts, text

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
        settings: all values that are not the defaults, by the name of the setting.
        path: the file whose comments and order are kept; None for a file of the settings that are
            not their defaults.
        output: the file to write, which may be ``path``.

    Raises:
        ValueError: the settings cannot be written into the text of ``path``.
    """
    from distseg.config.edit import with_settings

    def read(file: str | None) -> Config:
        return _config(_parse(_parser("plan"), [] if file is None else [str(file)]))

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


def _calibrate(arguments: list[str]) -> int:
    """Measure this machine on all ranks of the job; return the exit status."""
    parser = _parser("calibrate")
    parser.add_argument(
        "--save", type=str | None, default=None, help="Write the machine's profile to this file."
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="About how long the measurement may take."
    )

    @_joint
    def settle() -> tuple[Config, dict]:
        parsed = _parse(parser, arguments)
        if not 0 < parsed.seconds < math.inf:
            raise ValueError(
                f"--seconds must be a number above 0, such as 60, got {parsed.seconds}"
            )
        _check_file(parsed.save, "--save")
        return _config(parsed), _own(parsed)

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


@_joint
def _stages(arguments: list[str]) -> int:
    from distseg.runtime.schedule import SCHEDULES

    parser = _parser("plan", None)
    parser.add_argument(
        "--program",
        action="store_true",
        help="Print what each rank does in a step of a job: distseg plan CONFIG --program "
        "--image 512x512.",
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
    parsed = _parse_plain(parser, arguments)
    for flag in ("stages", "micro_batches", "batch"):
        _check_count(f"--{flag.replace('_', '-')}", parsed[flag])
    from distseg.planning import stage_report

    stage_report.check_stages(parsed.model, parsed.stages)
    policy = stage_report.Policy(parsed.micro_batches, parsed.schedule, parsed.recompute)
    limit = parse_bytes(parsed.memory)
    costs = stage_report.costs_of(
        parsed.model, stage_report.window_of(parsed.tile), parsed.batch, parsed.costs, parsed.device
    )
    found = stage_report.plan(parsed.model, costs, parsed.stages, policy, limit)
    print(json.dumps(found, indent=1) if parsed.json else stage_report.summary(found))
    return 0


@_joint
def _program(arguments: list[str]) -> int:
    """Print the operations of each rank of a config's pipeline; return the exit status."""
    parser = _parser("plan")
    parser.add_argument(
        "--program", action="store_true", help="Print what each rank does in a step of this job."
    )
    parser.add_argument(
        "--image",
        type=Size | None,
        default=None,
        help="Size of the images, such as 512x512; by default that of the first step on the store.",
    )
    parsed = _parse(parser, arguments)
    from distseg.cli.plan_program import PipelineProgram
    from distseg.models.capture.capture import as_network
    from distseg.training.verify import prepare

    prepared = prepare(_config(parsed), parsed.image)
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


def _train(arguments: list[str], kind: type = Config) -> int:
    """Train with the settings of a config, and return the exit status.

    Args:
        arguments: the flags.
        kind: the class of the config: Config for exact training, PatchConfig for PatchGD.
    """

    @_joint
    def settle() -> tuple[Config | PatchConfig, dict]:
        parser = _parser("patchgd" if kind is PatchConfig else "train", kind)
        config = _config(_parse(parser, arguments), kind)
        check_folder(config.train.output, "train.output")
        return config, {}

    with listening(), job(settle, lambda config: config.train.output) as (config, _, comm):
        from distseg.cli.plan_layouts import with_best_layout
        from distseg.training.loop import train

        train(with_best_layout(config, comm), comm)
    return 0


def _patchgd(arguments: list[str]) -> int:
    return _train(arguments, PatchConfig)


@cache
def _submit_parser(kind: type) -> _Parser:
    from distseg.cli.submit.command import add_flags

    parser = _parser("submit", kind)
    add_flags(parser)
    return parser


def _submit(arguments: list[str]) -> int:
    from distseg.cli.submit.command import config_file, submit

    asking = completing() or bool(_HELP & set(arguments))
    by_patches = not asking and "patchgd" in sections_in(config_file(arguments))
    kind = PatchConfig if by_patches else Config

    def parse(words):
        return _parse(_submit_parser(kind), words)

    def read(words):
        return _config(parse(words), kind)

    parsed = parse(arguments)
    _check_given(read(arguments).mesh, "distseg submit")
    return submit(parsed, arguments, read)


def _evaluate(arguments: list[str]) -> int:
    parser = _parser("evaluate RUN", None)
    parser.add_argument("--split", type=str, default="test", help="The split to evaluate.")
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="The JSON file for scores, confusion matrix and the table of images, which is also "
        "written beside it as NAME.csv; by default evaluation/SPLIT.json in the run's folder.",
    )
    parser.add_argument(
        "--tolerance",
        type=int,
        default=3,
        help="Pixels by which boundaries may differ in the scores boundary IoU and boundary F1; 0 "
        "leaves these scores out.",
    )

    @_joint
    def settle() -> tuple[Config, dict]:
        config, flags = _parse_run(parser, arguments)
        _check_file(flags["output"], "--output")
        _check_count("--tolerance", flags["tolerance"], 0, 1000)
        if (flags["output"] or "").lower().endswith(".csv"):
            raise ValueError(
                f"--output is {flags['output']}, but the scores are written as JSON and the table "
                "of images beside it as CSV: name a file that ends in .json"
            )
        if flags["output"]:
            _check_file(str(Path(flags["output"]).with_suffix(".csv")), "--output")
        return config, flags

    with job(settle) as (config, flags, comm):
        from distseg.cli.evaluate import run_evaluate

        _print_ignored(flags["left"], comm)
        return run_evaluate(
            flags["run"], config, comm, flags["split"], flags["output"], flags["tolerance"]
        )


def _predict(arguments: list[str]) -> int:
    parser = _parser("predict RUN", None)
    parser.add_argument(
        "--images",
        type=str,
        nargs="+",
        default=None,
        help="Image files; by default the store's images of --split.",
    )
    parser.add_argument(
        "--split",
        type=str | None,
        default=None,
        help="The split of the store to predict; test by default.",
    )
    parser.add_argument(
        "--output",
        type=str,
        default="predictions",
        help="Folder for the class maps, NAME.h5 and NAME.png.",
    )
    parser.add_argument(
        "--nodata",
        type=str | None,
        default=None,
        help="The number that stands for no data in --images, such as -9999 or nan; by default "
        "what a TIFF file says of itself.",
    )
    parser.add_argument(
        "--level",
        type=int,
        default=0,
        help="The resolution of OME-Zarr images in --images: 0 is the highest, 1 the next one.",
    )

    @_joint
    def settle() -> tuple[Config, dict]:
        config, flags = _parse_run(parser, arguments)
        if flags["images"] is not None and flags["split"] is not None:
            raise ValueError(
                f"--split {flags['split']} names images of the store, but --images names image "
                "files: leave one of them out"
            )
        check_folder(flags["output"], "--output")
        _check_count("--level", flags["level"], 0)
        return config, flags

    with job(settle) as (config, flags, comm):
        from distseg.cli.commands import run_predict

        _print_ignored(flags["left"], comm)
        return run_predict(
            flags["run"],
            config,
            comm,
            flags["images"],
            flags["split"] or "test",
            flags["output"],
            flags["nodata"],
            flags["level"],
        )


@_joint
def _trace(arguments: list[str]) -> int:
    parser = _parser("trace", None)
    parser.add_argument(
        "maps", nargs="+", help="Class maps NAME.h5 or NAME.tif, or label maps (TIFF, PNG, npy)."
    )
    parser.add_argument("--output", type=str, default="objects", help="Folder for the results.")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=["gpkg", "geojson", "objects"],
        default=["gpkg"],
        help="gpkg: GeoPackage; geojson: in WGS 84; objects: a TIFF with each pixel's object.",
    )
    parser.add_argument(
        "--classes",
        nargs="+",
        default=None,
        help="Names or numbers of the classes whose objects are written; by default all.",
    )
    parser.add_argument(
        "--least", type=int, default=1, help="Leave out polygons of objects with fewer pixels."
    )
    parsed = _parse_plain(parser, arguments)
    _check_count("--least", parsed.least)
    check_folder(parsed.output, "--output")
    from distseg.cli.trace import trace_maps

    for line in trace_maps(
        parsed.maps, parsed.output, parsed.formats, parsed.classes, parsed.least
    ):
        print(line)
    return 0


@_joint
def _export(arguments: list[str]) -> int:
    parser = _parser("export RUN", None)
    parser.add_argument(
        "--output", type=str, default="exported", help="Folder for export.json and the files."
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=["safetensors", "torch", "onnx"],
        default=None,
        help="model.safetensors, model.pt2 (torch.export), model.onnx; by default safetensors "
        "and torch, or only safetensors for a network of PatchGD.",
    )
    config, flags = _parse_run(parser, arguments)
    check_folder(flags["output"], "--output")
    from distseg.cli.export import export

    for path in export(flags["run"], config.model, flags["output"], flags["formats"]):
        print(path)
    return 0


@_joint
def _check(arguments: list[str]) -> int:
    parser = _parser("check", None)
    parser.add_argument("path", help="A store, a run's folder, or one of its checkpoints.")
    parsed = _parse_plain(parser, arguments)
    from distseg.cli.commands import run_check

    return run_check(parsed.path)


@_joint
def _plot(arguments: list[str]) -> int:
    parser = _parser("plot", None)
    parser.add_argument(
        "what",
        choices=["curves", "overlay"],
        help="curves: loss and scores of runs; overlay: image, truth, prediction, errors.",
    )
    parser.add_argument(
        "paths", nargs="+", help="curves: run folders; overlay: prediction files NAME.h5."
    )
    parser.add_argument(
        "--store",
        type=str | None,
        default=None,
        help="The store with the image and its labels (overlay).",
    )
    parser.add_argument(
        "--box",
        type=str | None,
        default=None,
        help="Part to draw as rows and columns, such as 100:900,0:675 (overlay).",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="The picture; by default curves.png in the first run, NAME.overlay.png beside each "
        "prediction.",
    )
    parsed = _parse_plain(parser, arguments)
    for flag in ("store", "box") if parsed.what == "curves" else ():
        if parsed[flag] is not None:
            raise ValueError(
                f"--{flag} {parsed[flag]} is for overlays, but curves are drawn: leave --{flag} "
                "out, or plot overlay"
            )
    if parsed.what == "overlay" and parsed.output and len(parsed.paths) > 1:
        raise ValueError(
            f"--output {parsed.output} names one picture, but there are {len(parsed.paths)} "
            "predictions: leave --output out, or plot each prediction with its own command"
        )
    for path in parsed.paths:
        if not (os.path.isfile(path) or parsed.what == "curves" and os.path.isdir(path)):
            kind = (
                "the folder of a run, or a log"
                if parsed.what == "curves"
                else "a prediction, NAME.h5"
            )
            raise ValueError(
                f"{path!r} is {'a folder' if os.path.isdir(path) else 'no file'}: 'distseg plot "
                f"{parsed.what}' takes {kind}"
            )
    _check_file(parsed.output, "--output")
    from distseg.cli.commands import run_plot

    return run_plot(parsed.what, parsed.paths, parsed.store, parsed.box, parsed.output)


@_joint
def _report(arguments: list[str]) -> int:
    parser = _parser("report RUN", None)
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
    config, flags = _parse_run(parser, arguments)
    _check_file(flags["output"], "--output")
    if not 0 <= flags["pictures"] <= _MOST:
        raise ValueError(
            f"--pictures must be a whole number from 0 to {_MOST}, got {flags['pictures']}"
        )
    from distseg.cli.report import run_report

    return run_report(
        flags["run"], config, flags["output"], flags["predictions"], flags["pictures"]
    )


@_joint
def _runs(arguments: list[str]) -> int:
    parser = _parser("runs", None)
    parser.add_argument("folder", help="A run, or a folder with runs in it.")
    parser.add_argument("--json", action="store_true", help="Print a list of objects.")
    parsed = _parse_plain(parser, arguments)
    from distseg.report.tables import table
    from distseg.training.checkpoint.runs import describe, runs_in

    rows = [describe(run) for run in runs_in(parsed.folder)]
    print(json.dumps(rows, indent=1) if parsed.json else table(rows))
    return 0


@_joint
def _init(arguments: list[str]) -> int:
    parser = _parser("init", None)
    parser.add_argument("store", help="The store that distseg prepare wrote.")
    parser.add_argument(
        "--output", type=str, default="config.yaml", help="The config file to write."
    )
    parser.add_argument(
        "--network",
        type=str | None,
        default=None,
        help="unet, a name that distseg models lists, or your own function as "
        "package.module:function; by default unet, or a residual network if each image has one "
        "label.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=3.0,
        help="Predicted minutes of training, from which the number of epochs follows.",
    )
    parser.add_argument("--masks", type=str | None, default=None, help=SUPPRESS)
    parsed = _parse_plain(parser, arguments)
    if os.path.isdir(parsed.store) or parsed.masks is not None:
        store = f"{Path(parsed.store).resolve().name}.h5"
        masks = shlex.quote(parsed.masks or "MASKS")
        raise ValueError(
            f"{parsed.store} is {'a folder' if os.path.isdir(parsed.store) else 'one file'}, and "
            f"init reads a store: first pack the images into one by 'distseg prepare "
            f"{shlex.quote(parsed.store)} {shlex.quote(store)} --masks {masks} "
            f"--classes background,NAME', then run 'distseg init {shlex.quote(store)}'"
        )
    if not 0 < parsed.minutes <= _MOST:
        raise ValueError(
            f"--minutes must be a number above 0 and at most {_MOST}, got {parsed.minutes:g}"
        )
    _check_file(parsed.output, "--output")
    from distseg.cli.init import init

    for line in init(parsed.store, parsed.output, parsed.network, parsed.minutes):
        print(line)
    return 0


@_joint
def _prepare(arguments: list[str]) -> int:
    parser = _parser("prepare", None)
    parser.add_argument(
        "source",
        help="The folder of images, or an example: blue-marble, gigapixel (one grey image from the "
        "Blue Marble) or ultramnist (images of digits, labelled with the sum of the digits).",
    )
    parser.add_argument("output", help="The HDF5 store to write.")
    parser.add_argument(
        "--masks",
        type=str | None,
        default=None,
        help="The folder of masks, paired by file names; or one file of polygons for all images "
        "(GeoJSON, GeoPackage, shapefile, COCO).",
    )
    parser.add_argument(
        "--attribute",
        type=str | None,
        default=None,
        help="If masks are polygons of several classes: the attribute that holds the name or the "
        "label of a polygon's class. By default all polygons are the second class.",
    )
    parser.add_argument(
        "--labels",
        type=str | None,
        default=None,
        help="If each image has one label: a CSV file with the columns image, label and perhaps "
        "split; or the word folders, if the images lie in folders named after classes.",
    )
    parser.add_argument(
        "--classes",
        type=str | None,
        default=None,
        help="Names of the classes in the order of their labels: background,road,building. If "
        "colours of masks stand for classes: background=#000000,road=#ff0000.",
    )
    parser.add_argument(
        "--values",
        type=str | None,
        default=None,
        help="Mask values that stand for other labels: 255=1,128=2. With --attribute also names: "
        "forest=2,water=0.",
    )
    parser.add_argument(
        "--ignore", type=int, default=255, help="Label of pixels to ignore in losses and scores."
    )
    parser.add_argument(
        "--nodata",
        type=str | None,
        default=None,
        help="The number that stands for no data in images, such as -9999 or nan; by default "
        "what a TIFF file says of itself.",
    )
    parser.add_argument(
        "--alpha",
        choices=["mask", "band"],
        default=None,
        help="Meaning of the images' alpha channel: mask, pixels with alpha 0 have no data (the "
        "default); or band, alpha is a band like the others.",
    )
    parser.add_argument(
        "--instances",
        choices=["foreground", "border"],
        default=None,
        help="If masks hold a number for each object and 0 for the background: foreground makes "
        "all objects class 1; border also makes pixels where two objects touch class 2.",
    )
    parser.add_argument(
        "--dry-run",
        dest="dry_run",
        action="store_true",
        help="Check everything, print what was found, and write nothing.",
    )
    parser.add_argument(
        "--recursive",
        action="store_true",
        help="Read the subfolders of the folders of images and masks too; both must have the same.",
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="Refer to the image files instead of copying their pixels into the store. Labels are "
        "still stored. The files must stay as they are, at the same place relative to the store.",
    )
    parser.add_argument(
        "--pages",
        choices=["bands", "volume", "images"],
        default=None,
        help="What the pages of a TIFF file, or the first axis of an npy array, are: bands of one "
        "image, slices of a volume, or separate images.",
    )
    parser.add_argument(
        "--parts",
        type=Size | None,
        default=None,
        help="Cut each image into parts that share no pixel, such as 4x4 (rows x columns), which "
        "are assigned to the splits. So one large image is enough for train, val and test.",
    )
    parser.add_argument(
        "--level",
        type=int,
        default=0,
        help="The resolution of OME-Zarr images and masks: 0 is the highest, 1 the next one.",
    )
    parser.add_argument(
        "--absent",
        type=str | None,
        default=None,
        help="Classes that may have no pixel in the masks: road,tree.",
    )
    parser.add_argument(
        "--split",
        type=str,
        default="0.8,0.1,0.1",
        help="Shares of train, val and test, if the source has no folders with these names.",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="Seed of the split, and of ultramnist's images."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing store.")
    parser.add_argument(
        "--size",
        type=Size | None,
        default=None,
        help="Size of the gigapixel image, by default 16000x64000, or of the images of "
        "ultramnist, by default 512x512.",
    )
    parser.add_argument(
        "--images",
        type=str,
        default="2000,250,500",
        help="For ultramnist: number of images for train, val and test.",
    )
    parser.add_argument(
        "--digits", type=str, default="3-5", help="For ultramnist: number of digits in an image."
    )
    parser.add_argument(
        "--sum-below",
        dest="sum_below",
        type=int | None,
        default=None,
        help="For ultramnist: use only sums below this number, with the same number of images for "
        "each sum. Gupta et al. 2023 use 10.",
    )
    parser.add_argument(
        "--noise",
        type=int,
        default=16,
        help="For ultramnist: background pixels are drawn uniformly from the integers below this "
        "number; the largest pixel value is 255. Gupta et al. 2023 use 0, no noise.",
    )
    parsed = _parse_plain(parser, arguments)
    made = ("blue-marble", "gigapixel", "ultramnist")
    for flag in (
        (
            "masks",
            "labels",
            "classes",
            "values",
            "ignore",
            "alpha",
            "pages",
            "instances",
            "attribute",
            "dry_run",
            "recursive",
            "reference",
            "parts",
            "level",
            "split",
            *(["seed"] if parsed.source != "ultramnist" else []),
        )
        if parsed.source in made
        else ()
    ):
        if parsed[flag] != parser.get_default(flag):
            raise ValueError(
                f"--{flag.replace('_', '-')} is for folders of images, but the source is "
                f"{parsed.source}, which sets this itself: leave the flag out"
            )
    for flag in ("images", "digits", "sum_below", "noise") if parsed.source != "ultramnist" else ():
        if parsed[flag] != parser.get_default(flag):
            raise ValueError(
                f"--{flag.replace('_', '-')} is for the source ultramnist, not for "
                f"{parsed.source}: leave the flag out"
            )
    of_masks = (
        "masks",
        "values",
        "ignore",
        "absent",
        "instances",
        "attribute",
        "dry_run",
        "recursive",
        "parts",
    )
    for flag in of_masks if parsed.labels is not None else ():
        if parsed[flag] != parser.get_default(flag):
            raise ValueError(
                f"--{flag.replace('_', '-')} is about masks, but --labels gives each image one "
                "label: leave one of them out"
            )
    of_masks = ("values", "ignore", "instances", "attribute")
    for flag in of_masks if parsed.masks is None else ():
        if parsed[flag] != parser.get_default(flag):
            raise ValueError(
                f"--{flag} {parsed[flag]} is about masks, but no masks are given: give --masks "
                f"FOLDER, or leave --{flag} out"
            )
    _check_file(parsed.output, "the store")
    _check_count("--level", parsed.level, 0)
    from distseg.cli.commands import run_prepare

    return run_prepare(parsed)


def _parse_run(parser: _Parser, arguments: list[str]) -> tuple[Config | PatchConfig, dict]:
    """Return the config of a command whose first argument is a run, and the command's other flags.

    The config has the class of the run's config: Config for exact training, PatchConfig for
    PatchGD. Its values come from the run, and the user's flags override them. Two entries are added
    to the other flags: ``run``, the folder of the checkpoint, and ``left``, a list of texts such as
    ``run.threads 4``, one for each setting of the training that the config does not take over.
    """
    if not arguments or arguments[0].startswith("-"):
        parser.add_settings(Config)
        _parse(parser, arguments)  # --help ends here
        raise ValueError(
            f"give the folder of a run or of a checkpoint as the first argument: {parser.prog} ..."
        )
    from distseg.training.checkpoint.files import find, read_manifest
    from distseg.training.run_config import (
        check_head,
        check_model,
        check_named,
        kind_of,
        left_behind,
        taken_over,
    )

    run, *flags = arguments
    checkpoint = find(run)  # searched once, because a training may write a better one meanwhile
    trained = read_manifest(checkpoint).get("config")
    taken = taken_over(trained, run)
    if not any(flag.partition("=")[0] in ("--model.name", "--config") for flag in flags) and all(
        flag.startswith("-") for flag in flags[:1]
    ):
        check_named(trained, ModelConfig.name, run)
    kind = kind_of(trained)
    parser.add_settings(kind)
    parsed = _parse(parser, flags, settings_of(taken, f"{run}, config in manifest.json", kind))
    config = _config(parsed, kind)
    _check_given(config.mesh, " ".join(parser.prog.split()[:2]))
    check_model(trained, config.model, run)
    if isinstance(config, PatchConfig):
        check_head(trained, config.patchgd.head, run)
    return config, {
        "run": str(checkpoint),
        "left": left_behind(trained, asdict(kind())),
        **_own(parsed, kind),
    }


def _print_ignored(left: list[str], comm) -> None:
    if left and comm.rank == 0:
        print(
            f"distseg: settings of the machine that trained the run are not used: "
            f"{', '.join(left)}; set them for this machine with flags",
            file=sys.stderr,
            flush=True,
        )


def _check_count(flag: str, value: int, least: int = 1, most: int = _MOST) -> None:
    if not least <= value <= most:
        raise ValueError(f"{flag} must be a whole number from {least} to {most}, got {value}")


def _check_file(path: str | None, what: str) -> None:
    """Refuse a path to which no file can be written.

    The check comes before the work whose result goes to the file, so that no result is lost.

    Args:
        path: the file, or None for no check.
        what: the flag or setting, for the message.

    Raises:
        ValueError: the message names the path and how to fix it.
    """
    if path is None:
        return
    if not path.strip() or "\0" in path:
        raise ValueError(f"{what} is {path!r}, which names no file: give a path")
    if Path(path).is_dir():
        raise ValueError(f"{what} is {path}, which is a folder: name a file in it")
    check_replaceable(Path(path))
    check_folder(str(Path(path).parent), what, path)


def check_folder(path: str, what: str, whole: str | None = None) -> None:
    """Refuse a folder to which no file can be written. The folder may not exist yet.

    Args:
        path: the folder. Its nearest existing parent is checked if it does not exist.
        what: the flag or setting, for the message.
        whole: the file in this folder that the user named, for the message; None if the user named
            the folder.

    Raises:
        ValueError: the message names the path and how to fix it.
    """
    if not path.strip() or "\0" in path:
        raise ValueError(f"{what} is {path!r}, which names no folder: give a path")
    there = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(
            f"{what} is {whole or path}, but {there} is a file, not a folder: give a path that "
            "does not contain this file"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"{what} is {whole or path}, but you may not write to {there}: give a folder to which "
            "you may write, or change the permissions of this one"
        )


def _parse_plain(
    parser: _Parser, arguments: list[str], places: Mapping[str, str] = {}
) -> Namespace:
    """Return the values of a command's flags, by name; the arguments name no config file.

    Args:
        parser: the parser of the command.
        arguments: the flags.
        places: the file and line of each setting that comes from a file, by the setting's name.

    Raises:
        ValueError: a flag is unknown or has a wrong value.
    """
    if completing():
        add_completers(parser)
    for before, argument in zip(["", *arguments], arguments):
        flag, equals, value = argument.partition("=")
        check_value(*(flag, value) if equals and flag.startswith("--") else (before, argument))
    try:
        return parser.parse_args(_with_brackets(arguments))
    except (ArgumentError, ValueError, TypeError, KeyError, RecursionError, OSError) as e:
        raise ValueError(_with_flag_hint(e, parser, places)) from e


def _with_brackets(arguments: list[str]) -> list[str]:
    """Return the arguments with brackets around lists of names that have none."""
    found = []
    for before, argument in zip(["", *arguments], arguments):
        flag, equals, value = argument.partition("=")
        if equals and flag.startswith("--"):
            found.append(f"{flag}={listed(flag[2:], value)}")
        else:
            found.append(listed(before[2:], argument) if before.startswith("--") else argument)
    return found


def _with_flag_hint(error: Exception, parser: _Parser, places: Mapping[str, str]) -> str:
    text = _in_a_line(error)
    flag = re.match(r"--([\w.]*\w)", text)
    if flag and flag[1] in places:
        return f"{places[flag[1]]}: {text[2:]}"
    unknown = re.search(r"(?i)unrecognized arguments: (--[^\s=]+)", text)
    known = parser._option_string_actions
    near = suggestion(unknown[1], known, parser.kind or Config) if unknown else ""
    return f"{text}{near} ({parser.prog} --help lists the flags)"


def _in_a_line(error: Exception) -> str:
    """Return a one-line message for an error of jsonargparse about a wrong value.

    The message names the flag, the kind of value that it takes, and the value that was given.
    """
    text = " ".join(str(error).split())
    key = re.match(r'Parser key "([^"]+)": ', text)
    if key is None:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", text)
        near = did_you_mean(choice[1], re.findall(r"[^', ]+", choice[2])) if choice else ""
        return _cut(text) + near
    flag, text = f"--{key[1]}", text[key.end() :]
    if own := re.search(r"Not of type \w+: (.*?)(?= - Expected a| Given value type:|$)", text):
        return f"{flag}: {_cut(own[1])}"
    if "integer string conversion" in text:
        return f"{flag} is a whole number of thousands of digits: give a smaller number"
    kinds = re.findall(r"Expected an? (?:typing\.)?(Literal\[[^]]*\]|<class '[^']*'>)", text)
    given = re.search(r"Given value:(.*)$", text) or re.search(r"Got value:(.*)$", text)
    if not kinds:
        return f"{flag}: {_cut(text)}"
    words = dict.fromkeys(
        _KINDS.get(kind) or kind.replace("Literal[", "one of ").rstrip("]") for kind in kinds
    )
    if key[1].removeprefix("data.") in AUGMENTATION_LIMITS:
        words = dict.fromkeys(("a range of two numbers [from, to]", "null"))
    value = given[1].strip() if given else ""
    end = renamed_value(key[1], value) or did_you_mean(
        value, re.findall(r"'([^']*)'", "".join(words))
    )
    return f"{flag} takes {' or '.join(words)}, got {_cut(value)!r}{end}"


_KINDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'list'>": "a list such as [a, b]",
    "<class 'dict'>": "a mapping such as {name: value}",
    "<class 'NoneType'>": "null",
}


def _cut(text: str) -> str:
    """Return a text; of more than 400 characters only the first 380 and the last 20.

    The end is kept because the code of a refusal stands there.
    """
    return text if len(text) <= 400 else f"{text[:380]}...{text[-20:]}"


_COMMANDS = {
    "prepare": _prepare,
    "init": _init,
    "check": _check,
    "train": _train,
    "patchgd": _patchgd,
    "evaluate": _evaluate,
    "predict": _predict,
    "trace": _trace,
    "export": _export,
    "plot": _plot,
    "report": _report,
    "models": _models,
    "plan": _plan,
    "calibrate": _calibrate,
    "verify": _verify,
    "profile": _profile,
    "runs": _runs,
    "submit": _submit,
}
