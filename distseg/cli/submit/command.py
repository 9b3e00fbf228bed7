"""Command ``distseg submit``: print, write or hand in the script of a job, made from a config."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distseg.cli.submit.job import Job, node_of, nodes_for, warning_of
from distseg.cli.submit.render import render
from distseg.cli.submit.sites import SITES, site_of
from distseg.cli.submit.studies import grown, node_counts, sweep
from distseg.cli.submit.systems import SYSTEMS, System, seconds_of, system_of
from distseg.comm.mesh import MeshShape
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config, MeshBase
from distseg.report.disk import atomic_write, check_replaceable


def add_flags(parser) -> None:
    """Add the flags of ``distseg submit`` that are not settings of the config to a parser."""
    add = parser.add_argument
    add(
        "--system",
        type=str | None,
        default=None,
        help=f"Batch system: {', '.join(SYSTEMS)}; by default the batch system of the site.",
    )
    add(
        "--site",
        type=str,
        default="generic",
        help=f"The site, which says what a node has and how processes are bound: "
        f"{', '.join(SITES)}, or a YAML file (docs/jobs.md).",
    )
    add(
        "--nodes",
        type=int | None,
        default=None,
        help="Number of nodes; by default the number that the mesh fills.",
    )
    add(
        "--processes",
        type=int | None,
        default=None,
        help="Number of processes on each node; by default one for each GPU.",
    )
    add(
        "--gpus",
        type=int | None,
        default=None,
        help="Number of GPUs on each node, if the site does not say it; 0 for no GPU.",
    )
    add(
        "--cores",
        type=int | None,
        default=None,
        help="Number of cores on each node, if the site does not say it.",
    )
    add("--time", type=str, default="02:00:00", help="The job's limit, HH:MM:SS or D-HH:MM:SS.")
    add(
        "--warn",
        type=int | None,
        default=None,
        help="Seconds before the limit at which Slurm tells distseg to write a checkpoint and "
        "end; 300 by default.",
    )
    add("--account", type=str | None, default=None, help="Account or project that is charged.")
    add("--queue", type=str | None, default=None, help="Queue; for Slurm the partition.")
    add("--qos", type=str | None, default=None, help="Slurm's quality of service.")
    add("--modules", type=str, nargs="+", default=[], help="Modules to load.")
    add(
        "--venv",
        type=str | None,
        default=None,
        help="Folder of the virtual environment to activate.",
    )
    add(
        "--option",
        type=str,
        action="append",
        help="Another option of the batch system, written --option=--constraint=gpu; may be given "
        "several times.",
    )
    add(
        "--launcher",
        type=str | None,
        default=None,
        help="The line that starts the processes, such as 'mpirun -n {tasks}'; by default the "
        "line of the site.",
    )
    add(
        "--name",
        type=str | None,
        default=None,
        help="Name of the job; by default the name of the config file.",
    )
    add(
        "--sweep",
        type=str,
        action="append",
        help="Make a job array with one training for each value: optim.lr=1e-3,3e-4. If given "
        "several times: one training for each combination of values.",
    )
    add(
        "--scaling",
        type=str | None,
        default=None,
        help="Make one job for each number of nodes: 1,2,4,8. The mesh grows along --scale.",
    )
    add(
        "--scale",
        type=str,
        default="samples",
        help="The axis of the mesh that grows with --scaling: samples (more images in a step) or "
        "tiles (more ranks for an image).",
    )
    add(
        "--output",
        type=str | None,
        default=None,
        help="Write the script to this file; with --scaling, the number of nodes is added to the "
        "file's name.",
    )
    add("--overwrite", action="store_true", help="Replace an existing file.")
    add(
        "--submit",
        action="store_true",
        help="Also submit the script to the batch system, and print the job's number.",
    )


def submit(asked, arguments: list[str], read: Callable[[list[str]], Config | PatchConfig]) -> int:
    """Print, write or submit the scripts that ``asked`` describes; return the exit status.

    Args:
        asked: the parsed flags.
        arguments: the flags as the user wrote them.
        read: a function that parses flags and returns their settings.
    """
    path, config = config_file(arguments), read(arguments)
    jobs = _Request(asked, path, config, read, _command(arguments)).jobs()
    # All scripts are made before the first one is written, so that none is left behind an error.
    scripts = [(job, render(job)) for job in jobs]
    _note_missing_store(config.data.store)
    if not (asked.output or asked.submit):
        print("\n\n".join(script for _, script in scripts), end="")
        return 0
    for job, script in scripts:
        _check_free(Path(job.script), script, Path(path), asked.overwrite)
    for job, script in scripts:
        _write(Path(job.script), script)
    for job, _ in scripts:
        for number in hand_in(job) if asked.submit else ():
            print(f"job {number}: {job.script}; {job.system.look.format(job=number)}", flush=True)
        if not asked.submit:
            print(job.script)
    return 0


def config_file(arguments: list[str]) -> str:
    """Return the config file among the flags: the first argument, or the value of ``--config``.

    Raises:
        ValueError: the flags name no file, or more than one.
    """
    named = [word.partition("=")[2] for word in arguments if word.startswith("--config=")]
    named += [path for flag, path in zip(arguments, arguments[1:]) if flag == "--config"]
    named += [word for word in arguments[:1] if not word.startswith("-")]
    if len(named) != 1 or not Path(named[0]).is_file():
        raise ValueError(
            "give exactly one config file to train, as the first argument: distseg submit "
            "CONFIG.yaml ..."
        )
    return named[0]


@dataclass(frozen=True)
class _Request:
    """Request of a user for jobs that train with a config.

    Attributes:
        asked: the parsed flags.
        path: the config file.
        config: the settings of the config file and the flags.
        read: a function that parses other flags and returns their settings.
        command: the whole command, for a comment in the script.
    """

    asked: Namespace
    path: str
    config: Config | PatchConfig
    read: Callable[[list[str]], Config | PatchConfig]
    command: str

    def jobs(self) -> list[Job]:
        """Return the jobs that the flags ask for, after checking that they are possible.

        Raises:
            ValueError: a flag or the mesh does not fit. The message names it and how to fix it.
        """
        asked, output = self.asked, self.config.train.output
        flags = _flags(self.read([self.path]).changes_to(self.config))
        job = self._job(tuple(flags))
        if asked.scaling:
            return _scaling(job, asked, output)
        job = replace(job, nodes=nodes_for(job.shape, job.nodes, asked.nodes))
        entries = sweep(asked.sweep, output, type(self.config)) if asked.sweep else []
        for entry in entries:
            _check_entry(job, entry, _shape(self.read([self.path, *flags, *entry]).mesh))
        return [replace(job, entries=tuple(entries))]

    def _job(self, flags: tuple[str, ...]) -> Job:
        """Return the job of one training with the mesh of the config.

        The attribute ``nodes`` of the result describes a single node of the site. The caller
        replaces it by the number of nodes that the mesh needs.

        Args:
            flags: the flags of the settings that differ from the config file, as alternating names
                and values, such as ``("--optim.lr", "0.01")``.
        """
        asked, train, site = self.asked, self.config.train, site_of(self.asked.site)
        if not (asked.system or site.system):
            raise ValueError(
                f"site {site.name} does not say its batch system: give --system, one of "
                f"{', '.join(SYSTEMS)}"
            )
        system = system_of(asked.system or site.system)
        if site.system not in (None, system.name):
            site = replace(
                site, launcher=None, binding="", options=()
            )  # the site's launcher, binding and options are for the site's batch system only
        name = asked.name or Path(self.path).stem
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"a job's name must have letters, digits and . _ - only, got {name!r}: give "
                "another name with --name"
            )
        if train.resume not in (True, False):
            raise ValueError(
                f"train.resume is {train.resume}, but a job always continues from the last "
                "checkpoint in train.output: leave train.resume out; to begin with the checkpoint "
                f"{train.resume}, run distseg train with this setting once before you submit"
            )
        shape, seconds = _shape(self.config.mesh), seconds_of(asked.time)
        return Job(
            name=name,
            config=self.path,
            flags=flags,
            shape=shape,
            site=site,
            system=system,
            nodes=node_of(site, asked.processes, asked.gpus, asked.cores),
            seconds=seconds,
            warn=warning_of(seconds, asked.warn),
            script=asked.output or f"{name}.{system.suffix}",
            command=self.command,
            trains="patchgd" if isinstance(self.config, PatchConfig) else "train",
            account=asked.account,
            queue=asked.queue,
            qos=asked.qos,
            modules=tuple(asked.modules),
            venv=asked.venv,
            options=tuple(asked.option or ()),
            launcher=asked.launcher,
            transport=self.config.run.transport,
        )


def _shape(mesh: MeshBase) -> MeshShape:
    return MeshShape(mesh.samples, mesh.tiles, mesh.stages)


def _check_entry(job: Job, entry: tuple[str, ...], shape: MeshShape) -> None:
    """Refuse a training of a job array whose mesh needs another number of processes than the job.

    Args:
        job: the job.
        entry: the flags of the training, which differ from those of other trainings.
        shape: the mesh of the training.
    """
    if shape.size != job.shape.size:
        raise ValueError(
            f"--sweep: {shlex.join(entry[:-2])} makes a mesh of {shape}, {shape.size} processes, "
            "but the array's jobs"
            f" have {job.shape.size}: sweep over meshes of this size, or use --scaling"
        )


def _scaling(job: Job, asked, output: str) -> list[Job]:
    """Return a job for each number of nodes; its mesh is enlarged so that it fills the nodes.

    Args:
        job: a job with the mesh of the config.
        asked: the parsed flags.
        output: the folder of the trainings; each job gets a folder of its own in it.
    """
    if asked.sweep or asked.nodes:
        raise ValueError(
            f"--scaling {asked.scaling} makes one job for each number of nodes, so it cannot be "
            f"combined with {'--sweep' if asked.sweep else '--nodes'}: leave one of them out"
        )
    if asked.scale not in ("samples", "tiles"):
        raise ValueError(f"--scale must be samples or tiles, got {asked.scale!r}")
    return [_scaled(job, count, asked.scale, output) for count in node_counts(asked.scaling)]


def _scaled(job: Job, count: int, axis: str, output: str) -> Job:
    """Return the job on ``count`` nodes, with a mesh that is enlarged along ``axis``.

    Args:
        job: a job with the mesh of the config.
        count: the number of nodes.
        axis: ``samples`` or ``tiles``.
        output: the folder of the trainings; the job gets a folder of its own in it.
    """
    shape = grown(job.shape, count * job.nodes.processes, axis)
    own = (f"--mesh.{axis}", str(getattr(shape, axis)), "--train.output", f"{output}/nodes={count}")
    script = Path(job.script)
    return replace(
        job,
        name=f"{job.name}-{count}",
        shape=shape,
        flags=(*_without(job.flags, own[::2]), *own),
        nodes=nodes_for(shape, job.nodes, count),
        script=str(script.with_name(f"{script.stem}-{count}{script.suffix}")),
    )


def _without(flags: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    return [
        word
        for name, value in zip(flags[::2], flags[1::2])
        if name not in names
        for word in (name, value)
    ]


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags that set some settings, as a list of alternating names and values.

    An example is ``["--optim.lr", "0.01"]`` for the settings ``{"optim.lr": 0.01}``.
    """
    return [word for setting, value in settings.items() for word in (f"--{setting}", _text(value))]


def _text(value) -> str:
    """Return the value of a setting as text for a flag."""
    if value is None or isinstance(value, (bool, list)):
        return json.dumps(value)
    return str(value)


def _command(arguments: list[str]) -> str:
    return "distseg submit " + shlex.join(
        word for word in arguments if word not in ("--submit", "--overwrite")
    )


def _note_missing_store(store: str | None) -> None:
    if store is None or not Path(store).exists():
        print(
            f"distseg: note: data.store is {store}, which does not exist yet: prepare the store "
            "before the job starts",
            file=sys.stderr,
        )


def _check_free(path: Path, script: str, config: Path, overwrite: bool) -> None:
    """Refuse to write a script over the config, or over another file without ``overwrite``.

    A file that already has the script's content is accepted.

    Args:
        path: the file to write.
        script: the content to write.
        config: the config file.
        overwrite: True to replace a file with other content.
    """
    if path.resolve() == config.resolve():
        raise ValueError(f"--output {path} is the config file: give another file for the script")
    if not path.is_dir():
        check_replaceable(path)
    if path.is_dir() or path.exists() and not overwrite and path.read_bytes() != script.encode():
        found = "exists with other content: give --overwrite to replace it, or"
        if path.is_dir():
            found = "is a folder: give"
        raise ValueError(f"cannot write the script: {path} {found} another --output")


def _write(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as growing:
        growing.write_text(script)
    path.chmod(0o777 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def hand_in(job: Job) -> Iterator[str]:
    """Submit a written script to its batch system; yield the jobs' numbers one by one.

    Raises:
        ValueError: the batch system's command is not installed, or does not accept the script.
    """
    for command in job.system.commands(job.script, len(job.entries)):
        yield _number(job.system, command, job.script)


def _number(system: System, command: list[str], script: str) -> str:
    """Submit a script to the batch system by ``command``, and return the number of the job.

    Raises:
        ValueError: the batch system's command is not installed, or it refused the script.
    """
    try:
        with open(script if system.by_stdin else "/dev/null") as given:
            done = subprocess.run(command, stdin=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(
            f"the command {command[0]} is not installed here, so {script} is written but not "
            f"submitted: submit it on a machine with {system.name}"
        ) from None
    number = system.number(done.stdout) if done.returncode == 0 else None
    if number is None:
        answer = " ".join((done.stderr + done.stdout).split())
        raise ValueError(
            f"{shlex.join(command)} did not accept the script (code {done.returncode}): {answer}; "
            f"correct the job, or submit the script by hand: it is written to {script}"
        )
    return number
