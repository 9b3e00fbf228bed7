"""Sites: for each cluster its batch system, the GPUs and cores of a node, and how processes start.

The built-in sites follow the centres' public documentation. distseg has not been run on any of them
yet.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from distseg.config.spelling import did_you_mean


@dataclass(frozen=True)
class Site:
    """Description of a cluster. A user's own YAML file (``--site my.yaml``) has the same fields."""

    name: str = "generic"
    """The value of ``--site``."""
    system: str | None = None
    """slurm, lsf, pbs or flux."""
    gpus: int | None = None
    """Number of GPUs on each node, as the batch system counts them."""
    cores: int | None = None
    """Number of cores on each node that jobs may use."""
    cpus: int | None = None
    """Number of CPUs on each node, if the batch system counts hardware threads.

    The default is ``cores``.
    """
    launcher: str | None = None
    """The line that starts the processes; by default the line of the batch system.

    Its placeholders may be {nodes} and {tasks} of the job, {processes}, {gpus} and {node_cores} of
    a node, {cores} and {cpus} of a process, and {binding}.
    """
    binding: str = ""
    """The options of the launcher's line that bind each process to the cores near its GPU.

    They are left out if there is not one process for each GPU.
    """
    modules: tuple[str, ...] = ()
    """Modules to load."""
    options: tuple[str, ...] = ()
    """More options of the batch system, such as ``--constraint=gpu``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to export, with their values."""
    about: str = ""
    """Text about the site and the source of its numbers, for a comment in the script."""


# The line has no --mpi, because the default of srun at these sites is Cray's MPI.
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
        ValueError: there is no such site, or the file has content that is not a field of a site.
    """
    if name in SITES:
        return SITES[name]
    if not name.endswith((".yaml", ".yml")):
        raise ValueError(
            f"there is no site {name!r}: choose {', '.join(SITES)}, or describe the site in a YAML "
            f"file (docs/jobs.md){did_you_mean(name, SITES)}"
        )
    return _read(Path(name))


def _read(path: Path) -> Site:
    """Return the site that a user's YAML file describes.

    Raises:
        ValueError: the file cannot be read, or has content that is not a field of a site.
    """
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(
            f"site {path} cannot be read ({' '.join(str(e).split())}): give a YAML file that "
            "describes a site (docs/jobs.md)"
        ) from e
    known = [f.name for f in fields(Site)]
    if not isinstance(found, dict):
        raise ValueError(
            f"site {path} has no fields: write one field per line, such as gpus: 4; the fields are "
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
    """Return the value of a site's field in the field's type.

    Args:
        path: the site's file, for messages.
        key: the name of the field.
        value: the value in the file.

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
                f"site {path}: {key} must be a whole number of at least "
                f"{0 if key == 'gpus' else 1}, got "
                f"{reprlib.repr(value)}"
            )
        return value
    if key in ("modules", "options"):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(
                f"site {path}: {key} must be a list of texts, such as"
                f" [{'cuda' if key == 'modules' else '--constraint=gpu'}], got "
                f"{reprlib.repr(value)}"
            )
        return tuple(value)
    if key == "environment":
        if not isinstance(value, dict):
            raise ValueError(
                f"site {path}: environment must have one variable per line, such as "
                f"NCCL_DEBUG: INFO, got "
                f"{reprlib.repr(value)}"
            )
        return {str(k): str(v) for k, v in value.items()}
    if not isinstance(value, str):
        raise ValueError(f"site {path}: {key} must be text, got {reprlib.repr(value)}")
    return value
