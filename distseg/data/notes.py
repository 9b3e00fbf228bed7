"""Notes on files: contents that are not read, or that had to be interpreted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def notes_on(files: Iterable[tuple[Path | str, Iterable[str]]]) -> list[str]:
    """Return one line of text for each distinct note.

    A line names the first file that has the note, and says how many other files have the same note.

    Args:
        files: pairs (path, notes on this file). A note is the rest of a sentence that begins with
            the path, such as ``has one more image``.
    """
    with_note: dict[str, dict[Path | str, None]] = {}  # a file may hold the labels of many images
    for path, notes in files:
        for note in notes:
            with_note.setdefault(note, {})[path] = None
    return [
        f"note: {next(iter(paths))} {note}"
        if len(paths) == 1
        else f"note: {next(iter(paths))} and {len(paths) - 1} more files: each {note}"
        for note, paths in with_note.items()
    ]
