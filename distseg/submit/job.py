"""One job: what is asked for, checked against the config's mesh and the site's nodes before a script is written."""

from __future__ import annotations

from dataclasses import dataclass

from distseg.mesh import MeshShape
from distseg.submit.sites import Site
from distseg.submit.systems import System


@dataclass(frozen=True)
class Nodes:
    """The part of a cluster that a job takes: ``count`` nodes of so many processes, GPUs, cores, and CPUs as the batch system counts them."""

    count: int
    processes: int
    gpus: int
    cores: int
    cpus: int

    @property
    def tasks(self) -> int:
        return self.count * self.processes

    def __str__(self) -> str:
        return f"{self.count} node{'' if self.count == 1 else 's'} of {self.processes}"


def nodes_of(site: Site, shape: MeshShape, count: int | None = None, processes: int | None = None, gpus: int | None = None, cores: int | None = None) -> Nodes:
    """The nodes for a mesh: one process a GPU unless said, as many nodes as the mesh fills unless said.

    Raises:
        ValueError: what a node has is not known; more processes than cores; a mesh of another size, with both numbers and the repair.
    """
    own = cores is not None and cores != site.cores
    gpus, cores = (asked if asked is not None else known for asked, known in ((gpus, site.gpus), (cores, site.cores)))
    if gpus is None or cores is None:
        missing = " and ".join(flag for flag, value in (("--gpus", gpus), ("--cores", cores)) if value is None)
        raise ValueError(f"site {site.name} does not say what a node has: give {missing} (--gpus 0 where there are none), or name a site with --site")
    processes = processes or gpus
    for flag, value, least in (("--gpus", gpus, 0), ("--cores", cores, 1), ("--nodes", count, 1), ("--processes", processes or None, 1)):
        if value is not None and value < least:
            raise ValueError(f"{flag} is at least {least}, got {value}")
    if not processes:
        raise ValueError(f"a node has no GPU, so how many processes to start on it is not clear: give --processes, up to its {cores} cores")
    if processes > cores:
        raise ValueError(f"{processes} processes a node are more than its {cores} cores: give --processes up to {cores}")
    found = Nodes(count or max(1, shape.size // processes), processes, gpus, cores, cores if own else site.cpus or cores)
    _check(shape, found)
    return found


def _check(shape: MeshShape, nodes: Nodes) -> None:
    if shape.size == nodes.tasks:
        return
    repairs = [f"--nodes {shape.size // nodes.processes}"] if shape.size % nodes.processes == 0 else []
    repairs += [f"--processes {shape.size // nodes.count}"] if shape.size % nodes.count == 0 and shape.size // nodes.count <= (nodes.gpus or nodes.cores) else []
    repairs += [f"mesh.samples, mesh.tiles and mesh.stages to a product of {nodes.tasks}"]
    raise ValueError(f"a mesh of {shape} needs {shape.size} processes, but {nodes} start{'s' * (nodes.count == 1)} {nodes.tasks}: set {', or '.join(repairs)}")


@dataclass(frozen=True)
class Job:
    """A training of one config on some nodes, or an array of such trainings that differ in some flags."""

    name: str
    config: str
    flags: tuple[str, ...]
    """Beside the config file."""
    shape: MeshShape
    site: Site
    system: System
    nodes: Nodes
    seconds: int
    """Its time limit."""
    warn: int
    """Seconds before the limit at which Slurm signals."""
    script: str
    """The file of the script."""
    command: str = "distseg submit"
    """What made it."""
    account: str | None = None
    queue: str | None = None
    qos: str | None = None
    modules: tuple[str, ...] = ()
    venv: str | None = None
    options: tuple[str, ...] = ()
    launcher: str | None = None
    entries: tuple[tuple[str, ...], ...] = ()
    """The flags of each training of an array."""


def warning_of(seconds: int, asked: int | None) -> int:
    """Seconds before the limit at which the job is told: 300, or a quarter of a short job."""
    if asked is None:
        return min(300, seconds // 4)
    if not 0 < 2 * asked <= seconds:
        raise ValueError(f"--warn is {asked} s, but --time is {seconds} s: a warning comes at most half the time before the limit (and up to a minute early); choose up to {seconds // 2}")
    return asked
