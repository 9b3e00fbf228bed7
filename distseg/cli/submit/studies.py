"""Derive trainings from one config: a sweep over settings, or a mesh that grows with the nodes."""

from __future__ import annotations

import math
import re
from itertools import product

from distseg.comm.mesh import MeshShape
from distseg.config.file import sections
from distseg.config.settings import Config
from distseg.config.sizes import Size

_OWN = ("train.output", "train.resume")  # set by the array itself


def sweep(asked: list[str], output: str, kind: type = Config) -> list[tuple[str, ...]]:
    """Return the flags of each training of a sweep, each with its own folder below ``output``.

    Args:
        asked: the settings and their values, such as ``["optim.lr=1e-3,3e-4", "train.seed=0,1"]``.
        output: the folder of all trainings.
        kind: the class of the trainings' config.

    Raises:
        ValueError: a setting does not exist, is given twice, has no values, or has a value twice.
    """
    axes = [_axis(text, kind) for text in asked]
    keys = [key for key, _ in axes]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(
            f"--sweep names {twice} twice: give all its values at once, as {twice}=1,2,3"
        )
    short = [key.rpartition(".")[2] for key in keys]
    names = [name if short.count(name) == 1 else key for name, key in zip(short, keys)]
    entries = []
    for values in product(*(values for _, values in axes)):
        label = ",".join(f"{name}={_plain(value)}" for name, value in zip(names, values))
        entries.append(
            (
                *(word for key, value in zip(keys, values) for word in (f"--{key}", value)),
                "--train.output",
                f"{output}/{label}",
            )
        )
    folders = [entry[-1] for entry in entries]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ValueError(
            f"--sweep has two trainings for the folder {twice}: give values that differ in "
            "letters and digits"
        )
    return entries


def _plain(value: str) -> str:
    """Return a value as text that can be part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", value).strip("-") or "none"


def _axis(text: str, kind: type) -> tuple[str, list[str]]:
    """Return the setting and the values of one part of a sweep, such as ``optim.lr=1e-3,3e-4``.

    Raises:
        ValueError: the name is not a setting, or a value is empty or given twice.
    """
    key, given, rest = text.partition("=")
    # Commas inside a list [a, b] do not separate values.
    values = [value.strip() for value in re.split(r",(?![^\[]*\])", rest)]
    section, _, name = key.partition(".")
    known = sections(kind)
    if name not in known.get(section, ()):
        raise ValueError(
            f"--sweep {key} is not a setting: write section.field=value,value, such as "
            "optim.lr=1e-3,3e-4; sections are"
            f" {', '.join(known)}"
        )
    if key in _OWN:
        raise ValueError(f"--sweep sets {key} itself for each training: leave {key} out of --sweep")
    if not given or not all(values):
        raise ValueError(f"--sweep {text} has an empty value: write {key}=value,value")
    if twice := next((value for value in values if values.count(value) > 1), None):
        raise ValueError(f"--sweep {key} has the value {twice} twice: leave one of them out")
    return key, values


def grown(shape: MeshShape, size: int, axis: str) -> MeshShape:
    """Return a mesh with ``size`` ranks, which differs from ``shape`` in the size of one axis.

    Args:
        shape: the mesh.
        size: the number of ranks of the new mesh.
        axis: ``samples`` (more images a step) or ``tiles`` (an image on more ranks).

    Raises:
        ValueError: the product of the other axes does not divide ``size``.
    """
    rest = shape.stages * (shape.tiles.volume if axis == "samples" else shape.samples)
    if size % rest:
        raise ValueError(
            f"a mesh of {shape} cannot grow to {size} processes by its {axis}: its other axes need "
            f"a multiple of {rest} processes; choose --scaling so that nodes x processes is a "
            f"multiple of {rest}, or choose another mesh"
        )
    if axis == "samples":
        return MeshShape(size // rest, shape.tiles, shape.stages)
    return MeshShape(shape.samples, _grid(size // rest, len(shape.tiles)), shape.stages)


def _grid(tiles: int, dims: int) -> Size:
    """Return a nearly square grid of ``tiles`` tiles, with the most tiles along the last dim."""
    sides = [1] * dims
    for factor in sorted(_primes(tiles), reverse=True):
        sides[sides.index(min(sides))] *= factor
    return Size(sorted(sides))


def _primes(number: int) -> list[int]:
    for divisor in range(2, math.isqrt(number) + 1):
        if number % divisor == 0:
            return [divisor, *_primes(number // divisor)]
    return [number] if number > 1 else []


def node_counts(text: str) -> list[int]:
    """Return the numbers of nodes in a list such as ``1,2,4,8``.

    Raises:
        ValueError: the text is not a list of distinct positive numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(
        set(map(int, parts))
    ) < len(parts):
        raise ValueError(
            f"--scaling must be a list of distinct numbers of nodes, such as 1,2,4,8, got {text!r}"
        )
    return [int(part) for part in parts]
