"""OME-NGFF metadata: the axes, levels and scales of the images in OME-Zarr folders.

Versions 0.4 (zarr v2) and 0.5 (zarr v3) are read; 0.5 is written. Everything here is a pure
function of the JSON that a folder holds, which may come from anywhere and is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

# Metres in a unit of length, for the units that microscopes and scanners use.
UNITS = {
    "picometer": 1e-12,
    "angstrom": 1e-10,
    "nanometer": 1e-9,
    "micrometer": 1e-6,
    "millimeter": 1e-3,
    "centimeter": 1e-2,
    "meter": 1.0,
    "kilometer": 1e3,
    "inch": 0.0254,
    "foot": 0.3048,
}
VERSIONS = ("0.4", "0.5")
_SPACE = ("z", "y", "x")
_KNOWN = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}


@dataclass(frozen=True)
class Multiscale:
    """One resolution (level) of an OME-NGFF image: its array, axes, scale and translation.

    Attributes:
        level: the path of the level's array, relative to the image.
        axes: the names of the array's axes, such as ("t", "c", "z", "y", "x").
        scale: the distance between neighbouring pixels along each axis.
        translation: the position of the centre of the first pixel along each axis.
        unit: the length, in metres, of one unit of the spatial axes; None if the file does not say.
        placed: True if the file gives the spatial axes a scale, a translation or a unit.
        notes: warnings about the image; each is the rest of a sentence that begins with its name.
    """

    level: str
    axes: tuple[str, ...]
    scale: tuple[float, ...]
    translation: tuple[float, ...]
    unit: float | None = None
    placed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def spatial(self) -> tuple[str, ...]:
        """The names of the spatial axes: ("z", "y", "x") or ("y", "x")."""
        return tuple(name for name in self.axes if name in _SPACE)

    @property
    def matrix(self) -> list[list[float]]:
        """The affine matrix (4, 4) from a pixel's indices (x, y, z) to its centre's position.

        The position is in the unit of the axes.
        """
        found = [[float(row == column) for column in range(4)] for row in range(4)]
        for row, name in enumerate(reversed(_SPACE)):
            if name in self.axes:
                at = self.axes.index(name)
                found[row][row], found[row][3] = self.scale[at], self.translation[at]
        return found


def multiscale_in(
    attributes: Mapping[str, Any], version: int, path: Path, level: int = 0
) -> Multiscale:
    """Return the OME-NGFF image that the attributes of a zarr group describe.

    Args:
        attributes: the attributes of the group.
        version: the version of zarr, 2 or 3.
        path: the group's folder, for messages.
        level: the resolution to read; 0 is the highest.

    Raises:
        ValueError: the group is not an image of a supported version, has no such level, or its
            metadata contradict themselves.
    """
    about = attributes.get("ome", {}) if version == 3 else attributes
    several = about.get("multiscales") if isinstance(about, Mapping) else None
    if not isinstance(several, list) or not several:
        raise _no_image(about, path)
    first = several[0]
    try:
        number = about.get("version") if version == 3 else first.get("version", VERSIONS[0])
        if number != VERSIONS[version - 2]:
            raise ValueError(
                f"{path} has OME-NGFF metadata of version {number} in zarr v{version}, but "
                "distseg reads 0.4 in zarr v2 and 0.5 in zarr v3: convert it to one of these"
            )
        found = _multiscale(first, path, level)
    except (AttributeError, IndexError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} has OME-NGFF metadata that are not complete or of a wrong form "
            f"({type(e).__name__}: {e}): write it again"
        ) from e
    if len(several) > 1:
        found = _with_note(
            found, f"holds {len(several)} images (multiscales), of which the first is read"
        )
    return found


def _with_note(found: Multiscale, note: str) -> Multiscale:
    return Multiscale(**{**found.__dict__, "notes": (*found.notes, note)})


def _no_image(about: Any, path: Path) -> ValueError:
    """Return the error for a zarr group that has no OME-NGFF image; it says what the group has."""
    what, repair = "no OME-NGFF image (multiscales)", "name a folder that has"
    if isinstance(about, Mapping):
        if "plate" in about or "well" in about:
            what, repair = "a plate or a well with many images", "name one of these, such as A/1/0"
        elif "bioformats2raw.layout" in about:
            what, repair = "a series of images (bioformats2raw)", "name one of these, such as 0"
        elif "labels" in about:
            what = f"several label images ({', '.join(map(str, about['labels'])):.100})"
            repair = "name one of these"
    return ValueError(f"{path} is a zarr group that holds {what}: {repair}")


def _multiscale(about: Mapping[str, Any], path: Path, level: int) -> Multiscale:
    """Return the resolution ``level`` of the image that an entry of ``multiscales`` describes.

    Args:
        about: the entry of the list ``multiscales`` in the attributes of a zarr group.
        path: the group's folder, for messages.
        level: the resolution to read; 0 is the highest.
    """
    axes, units = _axes(about["axes"], path)
    levels = about["datasets"]
    if not 0 <= level < len(levels):
        raise ValueError(
            f"--level is {level}, but {path} has {len(levels)} levels: give a number from 0 (the "
            f"highest resolution) to {len(levels) - 1}"
        )
    first, _ = _placed(levels[0], len(axes), path)
    for other in levels[1:]:
        finer = [
            name
            for name, ours, theirs in zip(axes, first, _placed(other, len(axes), path)[0])
            if name in _SPACE and theirs < ours
        ]
        if finer:
            raise ValueError(
                f"{path}: the level {other['path']} has smaller pixels along {finer[0]} than the "
                f"first level {levels[0]['path']}, which must have the highest resolution: write "
                "the levels from the largest to the smallest"
            )
    scale, translation = _placed(levels[level], len(axes), path)
    outer = about.get("coordinateTransformations")
    if outer:
        more = _placed(about, len(axes), path)
        translation = [a * t + b for a, t, b in zip(more[0], translation, more[1])]
        scale = [a * s for a, s in zip(more[0], scale)]
    spatial = [at for at, name in enumerate(axes) if name in _SPACE]
    unit, factors, note = _unit([units[at] for at in spatial])
    for at, factor in zip(spatial, factors):
        scale[at], translation[at] = scale[at] * factor, translation[at] * factor
    placed = any(units[at] or scale[at] != 1 or translation[at] for at in spatial)
    return Multiscale(
        _inside(levels[level]["path"], path),
        tuple(axes),
        tuple(scale),
        tuple(translation),
        unit,
        placed,
        note,
    )


def _axes(about: Sequence[Any], path: Path) -> tuple[list[str], list[str | None]]:
    """Return the names and the units of an image's axes, from their OME-NGFF metadata.

    A unit is None if the metadata do not give it.

    Raises:
        ValueError: an axis is unknown or has a wrong type, or the spatial axes are not (z,) y, x.
    """
    names = [str(axis["name"]) for axis in about]
    for name, axis in zip(names, about):
        kind = axis.get("type", _KNOWN.get(name))
        if _KNOWN.get(name, kind) != kind or (kind == "space" and name not in _SPACE):
            raise ValueError(
                f"{path} has an axis {name!r} of the type {kind}, but distseg reads t (time), c "
                "(channel), z, y and x (space): give the axes these names"
            )
    spatial = tuple(name for name in names if name in _SPACE)
    if spatial not in (_SPACE, _SPACE[1:]) or len(set(names)) < len(names):
        raise ValueError(
            f"{path} has the axes {', '.join(names)}, but an image must have y and x, or z, y and "
            "x, once each and in this order: write the image with such axes"
        )
    return names, [axis.get("unit") for axis in about]


def _unit(units: Sequence[str | None]) -> tuple[float | None, list[float], tuple[str, ...]]:
    """Return the common unit of spatial axes, a factor for each axis to convert to it, and notes.

    The common unit is that of the last axis, x, as a length in metres. It is None if an axis has
    no unit, or one that is unknown.
    """
    known = [UNITS.get(unit) if isinstance(unit, str) else None for unit in units]
    if any(size is None for size in known):
        strange = [str(unit) for unit, size in zip(units, known) if size is None and unit]
        note = f"has an unknown unit of length ({', '.join(strange)}), which is not kept"
        return None, [1.0] * len(units), (note,) if strange else ()
    return known[-1], [1.0 if size == known[-1] else size / known[-1] for size in known], ()


def _placed(about: Mapping[str, Any], count: int, path: Path) -> tuple[list[float], list[float]]:
    """Return the scale and the translation of a level, lists with one number for each axis.

    Args:
        about: the metadata that hold the level's ``coordinateTransformations``.
        count: number of axes.
        path: the group's folder, for messages.
    """
    scale, translation = [1.0] * count, [0.0] * count
    for step in about.get("coordinateTransformations", ()):
        kind = step["type"]
        numbers = step.get(kind)
        if kind == "identity":
            continue
        if (
            kind not in ("scale", "translation")
            or not isinstance(numbers, list)
            or len(numbers) != count
            or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
            or (kind == "scale" and min(numbers) <= 0)
        ):
            raise ValueError(
                f"{path} has the coordinate transformation {str(step):.200}, but distseg reads a "
                f"scale of {count} positive numbers and a translation of {count} numbers: correct "
                "its metadata"
            )
        if kind == "scale":
            scale = [float(n) * s for n, s in zip(numbers, scale)]
            translation = [float(n) * t for n, t in zip(numbers, translation)]
        else:
            translation = [float(n) + t for n, t in zip(numbers, translation)]
    return scale, translation


def _inside(level: Any, path: Path) -> str:
    """Return ``level``, the path of a level, after a check that it stays in the image's folder."""
    parts = PurePosixPath(level).parts
    if not parts or level.startswith("/") or ".." in parts or "\0" in level:
        raise ValueError(
            f"{path} names the level {level!r}, which is no folder inside of it: correct its "
            "metadata"
        )
    return level
