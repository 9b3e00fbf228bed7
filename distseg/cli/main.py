"""Run the console command ``distseg``: find and call a command of :mod:`distseg.cli.commands`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module

from jsonargparse import set_parsing_settings

from distseg.cli.completion import complete, completing
from distseg.cli.interrupt import interruptible
from distseg.cli.parsing import HELP
from distseg.comm.launch import JointFailure, as_program, end_as_one
from distseg.config.spelling import did_you_mean

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
          bench     measure scaling, pipelines, halos, memory and reading

distseg COMMAND --help lists a command's flags."""

COMMANDS = (
    "prepare",
    "init",
    "check",
    "train",
    "patchgd",
    "evaluate",
    "predict",
    "trace",
    "export",
    "plot",
    "report",
    "models",
    "plan",
    "calibrate",
    "verify",
    "profile",
    "runs",
    "submit",
    "bench",
)


def main(arguments: list[str] | None = None) -> None:
    """Run ``distseg`` with the words of a command line, by default those of the process."""
    if arguments is None:
        as_program()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))
    # The help of the flags is the documentation of the fields. Parsing it is slow, so it is parsed
    # for --help only.
    set_parsing_settings(docstring_parse_attribute_docstrings=bool(HELP & set(arguments)))
    try:
        with interruptible():
            if completing():
                complete(COMMANDS, command)
            end_as_one(lambda: _run(arguments))
    except OSError as e:  # the last output was not written, as on a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(
            f"distseg: error: the output cannot be written ({e.strerror}): send the output to "
            "another file or device",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(2)


def _run(arguments: list[str]) -> int | None:
    """Run a command, or print the help or the version; return the exit status."""
    if not arguments or arguments[0] in HELP:
        print(_USAGE)
        return 0
    name, *flags = arguments
    if name == "--version":
        from distseg import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        near = did_you_mean(name, [*COMMANDS, "--help"])
        raise JointFailure(f"unknown command {name!r}: choose {', '.join(COMMANDS)}{near}")
    try:
        return command(name)(flags)
    except SystemExit as e:  # raised by argparse after --help
        return e.code


def command(name: str) -> Callable[[list[str]], int]:
    """Return the function that reads the flags of a command and does its work.

    It takes the words after the command's name, and returns the exit status.
    """
    return import_module(f"distseg.cli.commands.{name}").run
