"""Notes on files: contents that are not read, or that had to be interpreted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def notes_on(files: Iterable[tuple[Path | str, Iterable[str]]]) -> list[str]:
    """Return one line per different note, which names the first of its files.

    Args:
        files: (path, its notes). A note is a phrase that continues the file's name, such as ``has
            one more image``.
    """
    with_note: dict[str, list[Path | str]] = {}
    for path, notes in files:
        for note in notes:
            with_note.setdefault(note, []).append(path)
    return [
        f"note: {paths[0]} {note}"
        if len(paths) == 1
        else f"note: {paths[0]} and {len(paths) - 1} more files: each {note}"
        for note, paths in with_note.items()
    ]
