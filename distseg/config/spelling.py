"""Find the name that a user meant by a misspelt one, for the end of an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """Return the name that is most similar to a misspelt word, or None if no name is similar.

    Upper and lower case count as equal.

    Args:
        word: the word that the user wrote.
        known: the names that are allowed.
        least: the least similarity, from 0 to 1 (:func:`difflib.get_close_matches`).
    """
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, 1, least)
    return names[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message, such as ``. Did you mean adam?``.

    The text is empty if no name in ``known`` is similar to ``word``.
    """
    found = closest(word, known)
    return f". Did you mean {found}?" if found else ""
