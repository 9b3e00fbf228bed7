"""``distseg submit``: from a config and a few figures to a job's script; printed, written, or handed in."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Callable

from distseg.config import Config
from distseg.disk import whole
from distseg.mesh import MeshShape
from distseg.submit.job import Job, nodes_of, warning_of
from distseg.submit.render import render
from distseg.submit.sites import SITES, site_of
from distseg.submit.studies import grown, node_counts, sweep
from distseg.submit.systems import SYSTEMS, System, seconds_of, system_of


def add_flags(parser) -> None:
    """The flags beside those of the config's sections."""
    add = parser.add_argument
    add("--system", type=str | None, default=None, help=f"Batch system: {', '.join(SYSTEMS)}; by default the site's.")
    add("--site", type=str, default="generic", help=f"What a node has and how it is bound: {', '.join(SITES)}, or a YAML file (docs/jobs.md).")
    add("--nodes", type=int | None, default=None, help="Nodes; by default as many as the mesh fills.")
    add("--processes", type=int | None, default=None, help="Processes a node; by default one a GPU.")
    add("--gpus", type=int | None, default=None, help="GPUs a node, where the site does not say; 0: none.")
    add("--cores", type=int | None, default=None, help="Cores a node, where the site does not say.")
    add("--time", type=str, default="02:00:00", help="The job's limit, HH:MM:SS or D-HH:MM:SS.")
    add("--warn", type=int | None, default=None, help="Seconds before the limit at which Slurm tells distseg to write a checkpoint and end; 300 by default.")
    add("--account", type=str | None, default=None, help="Account or project that pays.")
    add("--queue", type=str | None, default=None, help="Queue; Slurm's partition.")
    add("--qos", type=str | None, default=None, help="Slurm's quality of service.")
    add("--modules", type=str, nargs="+", default=[], help="Modules to load.")
    add("--venv", type=str | None, default=None, help="Folder of the virtual environment to activate.")
    add("--option", type=str, action="append", help="One more option of the batch system, written --option=--constraint=gpu; may be given again.")
    add("--launcher", type=str | None, default=None, help="The line that starts the processes, such as 'mpirun -n {tasks}'; by default the site's.")
    add("--name", type=str | None, default=None, help="The job's name; by default the config's.")
    add("--sweep", type=str, action="append", help="An array with a training for each value: optim.lr=1e-3,3e-4; given again, for each pair.")
    add("--scaling", type=str | None, default=None, help="A job for each number of nodes: 1,2,4,8; the mesh grows along --scale.")
    add("--scale", type=str, default="samples", help="What grows with --scaling: samples (images a step) or tiles (ranks an image).")
    add("--output", type=str | None, default=None, help="Write the script to this file; with --scaling, the nodes are added to its name.")
    add("--overwrite", action="store_true", help="Replace a file that is there.")
    add("--submit", action="store_true", help="Also hand the script in, and print the job's number.")


def submit(asked, config: Config, arguments: list[str], read: Callable[[list[str]], Config]) -> int:
    """Print, write or hand in the scripts that ``asked`` describes.

    Args:
        asked: the parsed flags.
        config: the settings that they and the config file give.
        arguments: the flags as they were written.
        read: settings from other flags.
    """
    if not asked.config:
        raise ValueError("name the config that is to be trained first: distseg submit CONFIG.yaml ...")
    path = str(asked.config[-1])
    jobs = _jobs(asked, path, config, _differences(read([path]), config), read, _command(arguments))
    scripts = [(job, render(job)) for job in jobs]  # all of them before one is written
    _note_missing_store(config.data.store)
    if not (asked.output or asked.submit):
        print("\n\n".join(script for _, script in scripts), end="")
        return 0
    if asked.output and Path(asked.output).resolve() == Path(path).resolve():
        raise ValueError(f"--output {asked.output} is the config: name another file for the script")
    for job, script in scripts:
        _write(Path(job.script), script, asked.overwrite)
    for job, _ in scripts:
        print(job.script if not asked.submit else "\n".join(f"job {number}: {job.script}; {job.system.look.format(job=number)}" for number in hand_in(job)), flush=True)
    return 0


def _jobs(asked, path: str, config: Config, flags: list[str], read: Callable[[list[str]], Config], command: str) -> list[Job]:
    site = site_of(asked.site)
    system = system_of(asked.system or site.system or _no_system(site.name))
    site = site if site.system in (None, system.name) else replace(site, launcher=None, binding="", options=())  # those are the other system's words
    shape = MeshShape(config.mesh.samples, config.mesh.tiles, config.mesh.stages)
    seconds = seconds_of(asked.time)
    name = asked.name or Path(path).stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"a job's name has letters, digits and . _ - only, got {name!r}: give another with --name")
    job = Job(
        name, path, tuple(flags), shape, site, system, None, seconds, warning_of(seconds, asked.warn), asked.output or f"{name}.{system.suffix}", command,
        asked.account, asked.queue, asked.qos, tuple(asked.modules), asked.venv, tuple(asked.option or ()), asked.launcher,
    )  # fmt: skip
    figures = dict(processes=asked.processes, gpus=asked.gpus, cores=asked.cores)
    if asked.scaling:
        return _scaling(job, asked, config, figures)
    job = replace(job, nodes=nodes_of(site, shape, asked.nodes, **figures))
    if not asked.sweep:
        return [job]
    entries = sweep(asked.sweep, config.train.output)
    for entry in entries:
        _check_entry(job, entry, read([path, *flags, *entry]))
    return [replace(job, entries=tuple(entries))]


def _no_system(site: str):
    raise ValueError(f"site {site} does not say its batch system: give --system, one of {', '.join(SYSTEMS)}")


def _scaling(job: Job, asked, config: Config, figures: dict) -> list[Job]:
    """A job for each number of nodes, with the mesh grown to fill them."""
    if asked.sweep or asked.nodes:
        raise ValueError(f"--scaling {asked.scaling} names the nodes of each job: leave {'--sweep' if asked.sweep else '--nodes'} out")
    if asked.scale not in ("samples", "tiles"):
        raise ValueError(f"--scale is samples or tiles, got {asked.scale!r}")
    found = []
    for count in node_counts(asked.scaling):
        processes = nodes_of(job.site, MeshShape(_fitting(job, figures)), **figures).processes
        shape = grown(job.shape, count * processes, asked.scale)
        own = (f"--mesh.{asked.scale}", str(getattr(shape, asked.scale)), "--train.output", f"{config.train.output}/nodes={count}")
        script = Path(job.script)
        found.append(
            replace(
                job, name=f"{job.name}-{count}", shape=shape, flags=(*_without(job.flags, own[::2]), *own), nodes=nodes_of(job.site, shape, count, **figures),
                script=str(script.with_name(f"{script.stem}-{count}{script.suffix}")),
            )
        )  # fmt: skip
    return found


def _fitting(job: Job, figures: dict) -> int:
    """The processes of one node: of the flag, or one a GPU."""
    gpus = figures["gpus"] if figures["gpus"] is not None else job.site.gpus
    return max(1, figures["processes"] or gpus or 1)


def _without(flags: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    return [word for name, value in zip(flags[::2], flags[1::2]) if name not in names for word in (name, value)]


def _check_entry(job: Job, entry: tuple[str, ...], config: Config) -> None:
    shape = MeshShape(config.mesh.samples, config.mesh.tiles, config.mesh.stages)
    if shape.size != job.shape.size:
        raise ValueError(
            f"--sweep: {shlex.join(entry[:-2])} makes a mesh of {shape}, {shape.size} processes, but the array's jobs have {job.shape.size}: "
            "sweep meshes of one size, or use --scaling"
        )


def _differences(one: Config, other: Config) -> list[str]:
    """The flags that make ``other`` of ``one``."""
    fields = [(section, key) for section in Config.__dataclass_fields__ for key in vars(getattr(other, section))]
    value = lambda config, section, key: getattr(getattr(config, section), key)
    return [
        word for section, key in fields if value(one, section, key) != value(other, section, key)
        for word in (f"--{section}.{key}", _text(value(other, section, key)))
    ]  # fmt: skip


def _text(value) -> str:
    """A field's value as a flag takes it."""
    if value is None or isinstance(value, (bool, list)):
        return json.dumps(value)
    return str(value)


def _command(arguments: list[str]) -> str:
    return "distseg submit " + shlex.join(word for word in arguments if word not in ("--submit", "--overwrite"))


def _note_missing_store(store: str | None) -> None:
    if store is None or not Path(store).exists():
        print(f"distseg: note: data.store is {store}, which is not there yet: prepare it before the job starts", file=sys.stderr)


def _write(path: Path, script: str, overwrite: bool) -> None:
    """Write a script whole, over nothing but itself unless told to."""
    if path.exists() and not overwrite and path.read_text() != script:
        raise ValueError(f"{path} is there, with another content: give --overwrite to replace it, or another --output")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as growing:
        growing.write_text(script)
        growing.chmod(0o755 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def hand_in(job: Job) -> list[str]:
    """Give a written script to its batch system; returns the jobs' numbers.

    Raises:
        ValueError: the system's command is not there, or refuses.
    """
    return [_number(job.system, command, job.script) for command in job.system.commands(job.script, len(job.entries))]


def _number(system: System, command: list[str], script: str) -> str:
    try:
        with open(script if system.by_stdin else "/dev/null") as given:
            done = subprocess.run(command, stdin=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(f"{command[0]} is not here, so {script} is written but not submitted: submit it where {system.name} is") from None
    number = system.number(done.stdout) if done.returncode == 0 else None
    if number is None:
        answer = " ".join((done.stderr + done.stdout).split())
        raise ValueError(f"{shlex.join(command)} did not take the script (code {done.returncode}): {answer}; it is written to {script}")
    return number
