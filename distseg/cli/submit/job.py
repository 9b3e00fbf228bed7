"""Describe a job of a batch system, and check it against the config's mesh and the site's nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distseg.cli.submit.sites import Site
from distseg.cli.submit.systems import System
from distseg.comm.mesh import MeshShape


@dataclass(frozen=True)
class Nodes:
    """Nodes of a cluster that a job uses.

    Attributes:
        count: the number of nodes.
        processes: number of processes on each node.
        gpus: number of GPUs on each node.
        cores: number of cores on each node.
        cpus: number of CPUs on each node as the batch system counts them, which may be hardware
            threads instead of cores.
    """

    count: int
    processes: int
    gpus: int
    cores: int
    cpus: int

    @property
    def tasks(self) -> int:
        """Number of processes on all nodes together."""
        return self.count * self.processes

    def __str__(self) -> str:
        return f"{self.count} node{'' if self.count == 1 else 's'} of {self.processes}"


def node_of(
    site: Site, processes: int | None = None, gpus: int | None = None, cores: int | None = None
) -> Nodes:
    """Return the description of one node of a site.

    Arguments other than None replace the numbers of the site.

    Args:
        site: the site.
        processes: number of processes on the node; by default one for each GPU.
        gpus: number of GPUs on the node.
        cores: number of cores on the node.

    Raises:
        ValueError: the numbers of a node are not known or too small, or there are more processes
            than cores.
    """
    cpus = site.cpus if cores in (None, site.cores) else None
    gpus, cores = (
        asked if asked is not None else known
        for asked, known in ((gpus, site.gpus), (cores, site.cores))
    )
    if missing := [flag for flag, value in (("--gpus", gpus), ("--cores", cores)) if value is None]:
        raise ValueError(
            f"site {site.name} does not say what a node has: give {' and '.join(missing)} "
            "(--gpus 0 if a node has no GPU), or name a site with --site"
        )
    for flag, value, least in (
        ("--gpus", gpus, 0),
        ("--cores", cores, 1),
        ("--processes", processes, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, got {value}")
    processes = processes or gpus
    if not processes:
        raise ValueError(
            "a node has no GPU, so the number of processes on it is not known: give "
            f"--processes, at most {cores}, the number of cores"
        )
    if processes > cores:
        raise ValueError(
            f"a node has {cores} cores, too few for {processes} processes: give --processes of at "
            f"most {cores}"
        )
    return Nodes(1, processes, gpus, cores, cpus or cores)


def nodes_for(shape: MeshShape, node: Nodes, count: int | None = None) -> Nodes:
    """Return ``count`` nodes for a mesh; by default the number of nodes that the mesh fills.

    Args:
        shape: the mesh.
        node: one node, with the number of processes that it starts.
        count: the number of nodes.

    Raises:
        ValueError: the mesh needs another number of processes than the nodes start. The message
            names both numbers and how to fix it.
    """
    if count is not None and count < 1:
        raise ValueError(f"--nodes must be at least 1, got {count}")
    nodes = replace(node, count=count or max(1, shape.size // node.processes))
    if shape.size != nodes.tasks:
        starts = f"{nodes} start{'s' * (nodes.count == 1)} {nodes.tasks}"
        raise ValueError(
            f"a mesh of {shape} needs {shape.size} processes, but {starts}: set"
            f" {', or '.join(_repairs(shape.size, nodes))}"
        )
    return nodes


def _repairs(size: int, nodes: Nodes) -> list[str]:
    """Return texts that name settings with which a mesh of ``size`` ranks would fit the nodes."""
    more_nodes = [f"--nodes {size // nodes.processes}"] if size % nodes.processes == 0 else []
    each = size // nodes.count
    other_processes = (
        [f"--processes {each}"]
        if size % nodes.count == 0 and each <= (nodes.gpus or nodes.cores)
        else []
    )
    return [
        *more_nodes,
        *other_processes,
        f"mesh.samples, mesh.tiles and mesh.stages to a product of {nodes.tasks}",
    ]


@dataclass(frozen=True)
class Job:
    """Training of one config on some nodes, or an array of trainings that differ in some flags."""

    name: str
    """The name under which the batch system shows the job."""
    config: str
    """The config file."""
    flags: tuple[str, ...]
    """The flags of the training in addition to the config file."""
    shape: MeshShape
    """The mesh."""
    site: Site
    """The cluster."""
    system: System
    """The batch system."""
    nodes: Nodes
    """The nodes that the job asks for."""
    seconds: int
    """The time limit of the job."""
    warn: int
    """Number of seconds before the limit at which Slurm sends a signal."""
    script: str
    """The file of the script."""
    command: str = "distseg submit"
    """The command that made the script."""
    trains: str = "train"
    """The subcommand that the script runs: train or patchgd."""
    account: str | None = None
    """The account or project that pays for the job."""
    queue: str | None = None
    """The queue or partition."""
    qos: str | None = None
    """The quality of service of Slurm."""
    modules: tuple[str, ...] = ()
    """Environment modules to load, besides those of the site."""
    venv: str | None = None
    """The folder of the virtual environment to activate."""
    options: tuple[str, ...] = ()
    """More options of the batch system, besides those of the site."""
    launcher: str | None = None
    """The line that starts the processes; by default that of the site."""
    transport: str = "auto"
    """The value of ``run.transport``."""
    entries: tuple[tuple[str, ...], ...] = ()
    """The flags of each training of an array."""


def warning_of(seconds: int, asked: int | None) -> int:
    """Return the number of seconds before its limit at which the job is warned.

    Args:
        seconds: the time limit of the job.
        asked: the value of the flag ``--warn``. If it is None, the result is 300 s, but at most a
            quarter of the time limit.

    Raises:
        ValueError: the warning would come in the first half of the job.
    """
    if asked is None:
        return min(300, seconds // 4)
    if not 0 < 2 * asked <= seconds:
        raise ValueError(
            f"--warn is {asked} s, but --time is {seconds} s, and the warning must come in the "
            "second half of the job: set --warn to a number from 1 to "
            f"{seconds // 2}"
        )
    return asked
