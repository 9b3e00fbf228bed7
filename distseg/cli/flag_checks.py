"""Refuse wrong values of a command's own flags, and paths to which no result can be written."""

from __future__ import annotations

import os
from pathlib import Path

from distseg.config.settings import MeshBase
from distseg.report.disk import check_replaceable

MOST = 10**6  # largest value of a flag that is a count


def check_given(mesh: MeshBase, command: str) -> None:
    """Refuse ``mesh.layout: auto`` for a command that needs a mesh which the user gives."""
    if mesh.layout == "auto":
        raise ValueError(
            f"mesh.layout is auto, but {command} needs mesh.samples, mesh.tiles and mesh.stages: "
            "take them from distseg plan CONFIG --ranks N, and leave mesh.layout out"
        )


def check_count(flag: str, value: int, least: int = 1, most: int = MOST) -> None:
    """Refuse a value of a flag that is not between ``least`` and ``most``."""
    if not least <= value <= most:
        raise ValueError(f"{flag} must be a whole number from {least} to {most}, got {value}")


def check_file(path: str | None, what: str) -> None:
    """Refuse a path to which no file can be written.

    The check comes before the work whose result goes to the file, so that no result is lost.

    Args:
        path: the file, or None for no check.
        what: the flag or setting, for the message.

    Raises:
        ValueError: the message names the path and how to fix it.
    """
    if path is None:
        return
    if not path.strip() or "\0" in path:
        raise ValueError(f"{what} is {path!r}, which names no file: give a path")
    if Path(path).is_dir():
        raise ValueError(f"{what} is {path}, which is a folder: name a file in it")
    check_replaceable(Path(path))
    check_folder(str(Path(path).parent), what, path)


def check_folder(path: str, what: str, whole: str | None = None) -> None:
    """Refuse a folder to which no file can be written. The folder may not exist yet.

    Args:
        path: the folder. Its nearest existing parent is checked if it does not exist.
        what: the flag or setting, for the message.
        whole: the file in this folder that the user named, for the message; None if the user named
            the folder.

    Raises:
        ValueError: the message names the path and how to fix it.
    """
    if not path.strip() or "\0" in path:
        raise ValueError(f"{what} is {path!r}, which names no folder: give a path")
    there = next(p for p in (Path(path), *Path(path).absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(
            f"{what} is {whole or path}, but {there} is a file, not a folder: give a path that "
            "does not contain this file"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"{what} is {whole or path}, but you may not write to {there}: give a folder to which "
            "you may write, or change the permissions of this one"
        )
