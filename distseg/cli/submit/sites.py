"""Sites: the batch system of a cluster, a node's GPUs and cores, how processes start and are bound.

The built-in sites follow the centres' public documentation. distseg has not been run on any of them
yet.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Site:
    """Cluster; every field is a key of a site's own YAML file (``--site my.yaml``)."""

    name: str = "generic"
    system: str | None = None
    """slurm, lsf, pbs or flux."""
    gpus: int | None = None
    """GPUs a node, as the batch system counts them."""
    cores: int | None = None
    """Cores a node that jobs may use."""
    cpus: int | None = None
    """CPUs a node, if the batch system counts hardware threads; by default ``cores``."""
    launcher: str | None = None
    """The line that starts the processes; by default the system's.

    It may hold {nodes}, {tasks}, {processes}, {gpus} and {node_cores} (a node), {cores} and
    {cpus} (a process), {binding}.
    """
    binding: str = ""
    """The options of that line that bind each process to the cores near its GPU.

    They are left out if there is not one process for each GPU.
    """
    modules: tuple[str, ...] = ()
    """Modules to load."""
    options: tuple[str, ...] = ()
    """More options of the batch system, such as ``--constraint=gpu``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables to export."""
    about: str = ""
    """The source of the figures."""


# Without --mpi: the default of srun at these sites is Cray's MPI.
_SRUN = "srun {binding} --kill-on-bad-exit=0 --wait=60"
_MI250X = (
    "0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,"
    "0xfe,0xfe00,0xfe00000000,0xfe0000000000"
)
_NEAR = (
    "GPUs 0 to 7 are near the cores from 48, 56, 16, 24, 0, 8, 32 and 40 on, "
    "of which the first of each 8 is the system's"
)

SITES = {
    site.name: site
    for site in (
        Site(),
        Site(
            "summit",
            "lsf",
            gpus=6,
            cores=42,
            about="Summit (OLCF, until 2024): 42 of 44 cores and 6 V100 a node, from its user "
            "guide; not run here",
        ),
        Site(
            "frontier",
            "slurm",
            gpus=8,
            cores=56,
            launcher=_SRUN,
            binding=f"--cpu-bind=mask_cpu:{_MI250X}",
            about="Frontier (OLCF): 56 of 64 cores and 8 GPUs (halves of MI250X) a node, from "
            "its user guide: "
            f"{_NEAR}; not run here",
        ),
        Site(
            "crusher",
            "slurm",
            gpus=8,
            cores=56,
            launcher=_SRUN,
            binding=f"--cpu-bind=mask_cpu:{_MI250X}",
            about=f"Crusher (OLCF): nodes as Frontier's, from its quick-start guide: {_NEAR}; "
            "not run here",
        ),
        Site(
            "perlmutter",
            "slurm",
            gpus=4,
            cores=64,
            cpus=128,
            launcher=_SRUN,
            binding="--cpu-bind=cores",
            options=("--constraint=gpu",),
            about="Perlmutter (NERSC), GPU nodes: 64 cores of 2 threads and 4 A100 a node, from "
            "docs.nersc.gov; "
            "not run here",
        ),
        Site(
            "polaris",
            "pbs",
            gpus=4,
            cores=32,
            cpus=64,
            launcher="mpiexec -n {tasks} --ppn {processes} {binding}",
            binding="--cpu-bind list:24-31:16-23:8-15:0-7",
            options=("-l filesystems=home:eagle",),
            about="Polaris (ALCF): 32 cores of 2 threads and 4 A100 a node, GPU 0 near the last "
            "cores, from its user "
            "guide; not run here",
        ),
    )
}


def site_of(name: str) -> Site:
    """Return a built-in site by its name, or the user's own site from a YAML file.

    Raises:
        ValueError: there is no such site, or the file has other content than a site's fields.
    """
    if name in SITES:
        return SITES[name]
    if not name.endswith((".yaml", ".yml")):
        raise ValueError(
            f"there is no site {name!r}: choose {', '.join(SITES)}, or give a YAML file with its "
            "figures (docs/jobs.md)"
        )
    return _read(Path(name))


def _read(path: Path) -> Site:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"site {path} cannot be read: {' '.join(str(e).split())}") from e
    known = [f.name for f in fields(Site)]
    if not isinstance(found, dict):
        raise ValueError(
            f"site {path} holds no fields: write one per line, such as gpus: 4; the fields are "
            f"{', '.join(known)}"
        )
    if strange := [key for key in found if key not in known]:
        raise ValueError(
            f"site {path} has a field {strange[0]!r}, which is unknown: choose from "
            f"{', '.join(known)}"
        )
    values = {
        "name": path.stem,
        **{key: _checked(path, key, value) for key, value in found.items() if value is not None},
    }
    return Site(**values)


def _checked(path: Path, key: str, value):
    """Return a field's value in the field's type.

    Raises:
        ValueError: the value has another type.
    """
    if key in ("gpus", "cores", "cpus"):
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < (0 if key == "gpus" else 1)
        ):
            raise ValueError(
                f"site {path}: {key} is a whole number from {0 if key == 'gpus' else 1} on, got "
                f"{reprlib.repr(value)}"
            )
        return value
    if key in ("modules", "options"):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(
                f"site {path}: {key} is a list of texts, such as"
                f" [{'cuda' if key == 'modules' else '--constraint=gpu'}], got "
                f"{reprlib.repr(value)}"
            )
        return tuple(value)
    if key == "environment":
        if not isinstance(value, dict):
            raise ValueError(
                f"site {path}: environment is a variable a line, such as NCCL_DEBUG: INFO, got "
                f"{reprlib.repr(value)}"
            )
        return {str(k): str(v) for k, v in value.items()}
    if not isinstance(value, str):
        raise ValueError(f"site {path}: {key} is text, got {reprlib.repr(value)}")
    return value
