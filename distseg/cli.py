"""The console command ``distseg``: one subcommand a task, all flags from the sections of :mod:`distseg.config`.

Heavy modules are imported by the subcommand that needs them, so that ``distseg --help`` answers at once.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from typing import Callable

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings
from jsonargparse.typing import register_type

from distseg.config import Config
from distseg.extents import Extents, parse_bytes
from distseg.launch import JointFailure, end_as_one, world

set_parsing_settings(docstring_parse_attribute_docstrings=True)  # the fields' documentation is the flags' help
register_type(Extents, serializer=str, deserializer=Extents)

_USAGE = """usage: distseg COMMAND [CONFIG.yaml] [--section.field VALUE ...]

prepare   folders of images and masks, or blue-marble, into an HDF5 store
train     train on any number of ranks: mpirun -n 4 distseg train CONFIG.yaml
evaluate  IoU, Dice and accuracy of a run on whole images, beside the colour baseline
predict   class maps of whole images, in bounded memory
plot      loss curves and overlays of a run
models    the models by name: parameters, layers, stride, halo
plan      pipeline stages of a model: layers, time and memory of each, other splits beside
verify    one step on the mesh and serially, in float64, compared
profile   where the time of a step goes, rank by rank: a table, a timeline, a trace

distseg COMMAND --help lists a command's flags."""


def main(arguments: list[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return
    if arguments[0] == "--version":
        from distseg import __version__

        print(__version__)
        return
    end_as_one(lambda: _command(arguments[0])(arguments[1:]))


def _command(name: str) -> Callable[[list[str]], int | None]:
    if name not in _COMMANDS:
        raise JointFailure(f"unknown command {name!r}: choose {', '.join(_COMMANDS)}")
    return _COMMANDS[name]


def _parser(command: str, sections: bool = True) -> ArgumentParser:
    parser = ArgumentParser(prog=f"distseg {command}", exit_on_error=False, default_env=False)
    if sections:
        parser.add_argument("--config", action="config", help="A YAML file with the sections below; may also stand first, without a flag.")
        for section in fields(Config):
            parser.add_class_arguments(section.default_factory, section.name)
    return parser


def _parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Arguments parsed; a first argument without a dash is the config file, ``--memory`` is ``--run.memory``. All ranks fail alike."""
    arguments = [re.sub(r"^--memory(?==|$)", "--run.memory", argument) for argument in arguments]
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    return _parse_plain(parser, arguments)


def _config(parsed: Namespace) -> Config:
    try:
        return Config(**{section.name: section.default_factory(**vars(parsed[section.name])) for section in fields(Config)})
    except ValueError as e:
        raise JointFailure(str(e)) from e


def _verify(arguments: list[str]) -> int:
    parser = _parser("verify")
    parser.add_argument("--image", type=Extents | None, default=None, help="Size of random images, such as 97x131.")
    parser.add_argument("--tolerance", type=float, default=1e-12, help="Largest relative error that passes.")
    parser.add_argument("--dump", type=str | None, default=None, help="Write weights, input, labels and gradients to this safetensors file.")
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")
    parsed = _parse(parser, arguments)
    from distseg import verify
    from distseg.launch import set_up

    comm = world()
    device = set_up(comm, parsed.run.device, parsed.run.threads)
    report = verify.verify(_config(parsed), comm, parsed.image, parsed.dump, device)
    if report is not None:
        report.update(tolerance=parsed.tolerance, passed=verify.passed(report, parsed.tolerance))
        print(json.dumps(report) if parsed.json else verify.summary(report, parsed.tolerance), flush=True)
    good = comm.bcast(report is not None and report["passed"], root=0)
    return 0 if good else 1


def _profile(arguments: list[str]) -> int:
    parser = _parser("profile")
    parser.add_argument("--image", type=Extents | None, default=None, help="Size of random images, such as 97x131; by default the store's first step.")
    parser.add_argument("--steps", type=int, default=3, help="Optimizer steps; the last one is watched, those before it warm up.")
    parser.add_argument("--output", type=str, default="profile", help="Folder for timeline.png and trace.json (ui.perfetto.dev).")
    parsed = _parse(parser, arguments)
    from distseg.profile import profile

    found = profile(_config(parsed), world(), parsed.image, parsed.steps, parsed.output)
    if found is not None:
        print(f"{found.text()}\n\n{parsed.output}/timeline.png, {parsed.output}/trace.json", flush=True)
    return 0


def _models(arguments: list[str]) -> int:
    parser = _parser("models", sections=False)
    parser.add_argument("names", nargs="*", help="Names of the zoo; all by default.")
    parser.add_argument("--json", action="store_true", help="Print a list of objects.")
    parsed = _parse_plain(parser, arguments)
    from distseg.models.zoo import ZOO, describe
    from distseg.report.tables import table

    rows = [describe(name) for name in parsed.names or ZOO]
    if parsed.json:
        print(json.dumps(rows, indent=1))
    else:
        print(table(rows))
    return 0


def _plan(arguments: list[str]) -> int:
    parser = _parser("plan", sections=False)
    parser.add_argument("--stages", type=int, default=6, help="S: pipeline stages.")
    parser.add_argument("--model", type=str, default="summit-small", help="A name of distseg models, or package.module:function.")
    parser.add_argument("--tile", type=Extents, default=Extents("1434"), help="Size of the window in the pipeline, such as 1434 or 512x768.")
    parser.add_argument("--micro-batches", type=int, default=2, help="Micro-batches of an optimizer step.")
    parser.add_argument("--batch", type=int, default=1, help="Windows of a micro-batch.")
    parser.add_argument("--memory", type=str | None, default=None, help="What a stage may take, such as 16GB or 15.5GiB; no limit by default.")
    parser.add_argument("--recompute", choices=["never", "except_last", "always"], default="never", help="Which activations to compute again.")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="gpipe", help="Order of the forward and backward passes.")
    parser.add_argument("--costs", choices=["modelled", "measured"], default="modelled", help="By arithmetic, or timed here.")
    parser.add_argument("--device", type=str | None, default=None, help="Of modelled costs: v100 (the default) or cpu, this one.")
    parser.add_argument("--json", action="store_true", help="Print one object; seconds and bytes.")
    parsed = _parse_plain(parser, arguments)
    from distseg.plan import report

    policy = report.Policy(parsed.micro_batches, parsed.schedule, parsed.recompute)
    limit = parse_bytes(parsed.memory)
    costs = report.costs_of(parsed.model, report.window_of(parsed.tile), parsed.batch, parsed.costs, parsed.device)
    found = report.plan(parsed.model, costs, parsed.stages, policy, limit)
    print(json.dumps(found, indent=1) if parsed.json else report.summary(found))
    return 0


def _train(arguments: list[str]) -> int:
    config = _config(_parse(_parser("train"), arguments))
    from distseg.train.loop import train

    train(config, world())
    return 0


def _evaluate(arguments: list[str]) -> int:
    parser = _parser("evaluate RUN")
    parser.add_argument("--split", type=str, default="test", help="Which images.")
    parser.add_argument("--output", type=str | None, default=None, help="Write the scores to this JSON file.")
    run, parsed = _parse_run(parser, arguments)
    from distseg.commands import run_evaluate

    return run_evaluate(run, _config(parsed), world(), parsed.split, parsed.output)


def _predict(arguments: list[str]) -> int:
    parser = _parser("predict RUN")
    parser.add_argument("--images", type=str, nargs="+", default=None, help="Image files; by default the store's images of --split.")
    parser.add_argument("--split", type=str, default="test", help="Which of the store's images.")
    parser.add_argument("--output", type=str, default="predictions", help="Folder for the class maps, NAME.h5 and NAME.png.")
    run, parsed = _parse_run(parser, arguments)
    from distseg.commands import run_predict

    return run_predict(run, _config(parsed), world(), parsed.images, parsed.split, parsed.output)


def _plot(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="distseg plot", exit_on_error=False)
    parser.add_argument("what", choices=["curves", "overlay"], help="curves: of the logs of runs; overlay: image, truth, prediction, errors.")
    parser.add_argument("paths", nargs="+", help="curves: run folders; overlay: prediction files NAME.h5.")
    parser.add_argument("--store", type=str | None, default=None, help="The store with the image and its labels (overlay).")
    parser.add_argument("--box", type=str | None, default=None, help="Part to draw as rows and columns, such as 100:900,0:675 (overlay).")
    parser.add_argument("--output", type=str | None, default=None, help="The picture; by default curves.png in the first run, NAME.overlay.png beside each prediction.")
    parsed = _parse_plain(parser, arguments)
    from distseg.commands import run_plot

    return run_plot(parsed.what, parsed.paths, parsed.store, parsed.box, parsed.output)


def _prepare(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="distseg prepare", exit_on_error=False)
    parser.add_argument("source", help="blue-marble, gigapixel (one grey image from it), or the folder of images.")
    parser.add_argument("output", help="The HDF5 store to write.")
    parser.add_argument("--size", type=Extents | None, default=None, help="Of the gigapixel image; 16000x64000 by default.")
    parser.add_argument("--masks", type=str | None, default=None, help="The folder of masks; files pair by name.")
    parser.add_argument("--classes", type=str | None, default=None, help="Names in the order of their labels: background,road,building.")
    parser.add_argument("--values", type=str | None, default=None, help="Mask values that stand for other labels: 255=1,128=2.")
    parser.add_argument("--ignore", type=int, default=255, help="Label of pixels that count nowhere.")
    parser.add_argument("--split", type=str, default="0.8,0.1,0.1", help="Shares of train, val, test, where there are no folders of these names.")
    parser.add_argument("--seed", type=int, default=0, help="Of the split.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing store.")
    parsed = _parse_plain(parser, arguments)
    from distseg.commands import run_prepare

    return run_prepare(parsed)


def _parse_run(parser: ArgumentParser, arguments: list[str]) -> tuple[str, Namespace]:
    """The folder of a run, first, and flags that override the config it was trained with."""
    if not arguments or arguments[0].startswith("-"):
        _parse_plain(parser, arguments)  # --help ends here
        raise JointFailure(f"name the folder of a run or of a checkpoint first: {parser.prog} ...")
    from distseg.train.checkpoint import find, read_manifest

    try:
        trained = read_manifest(find(arguments[0]))["config"]
    except (ValueError, OSError) as e:
        raise JointFailure(str(e)) from e
    return arguments[0], _parse_plain(parser, ["--config", json.dumps(trained), *arguments[1:]])


def _parse_plain(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    try:
        return parser.parse_args(arguments)
    except (ArgumentError, ValueError, TypeError, OSError) as e:
        raise JointFailure(f"{_in_a_line(e)} ({parser.prog} --help lists the flags)") from e


def _in_a_line(error: Exception) -> str:
    """jsonargparse's words on a wrong value: the flag, what it takes, what it was given."""
    text = " ".join(str(error).split())
    found = re.match(r'Parser key "(?P<flag>[^"]+)": Does not validate.*Given value: (?P<given>.*)', text)
    if found is None:
        return re.sub(r'^Parser key "([^"]+)": (Not of type \w+: )?', r"\1: ", text)
    kinds = re.findall(r"Expected an? (?:typing\.)?(Literal\[[^]]*\]|<class '[^']*'>|[^\s]+)", text)
    words = [re.sub(r"<class '(?:.*\.)?(\w+)'>", r"\1", kind).replace("Literal[", "one of ").rstrip("]").replace("NoneType", "null") for kind in kinds]
    return f"--{found['flag']} takes {' or '.join(words) or 'another kind of value'}, got {found['given']!r}"


_COMMANDS = {
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "plot": _plot,
    "models": _models,
    "plan": _plan,
    "verify": _verify,
    "profile": _profile,
}
