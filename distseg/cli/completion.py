"""Complete command lines in the shell, by argcomplete (extra ``completion``, docs/install.md).

The shell runs ``distseg`` with the variable ``_ARGCOMPLETE`` and the line that the user has typed.
Argcomplete then prints the words with which the line may go on, and ends the process.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


def completing() -> bool:
    """Return True if the shell asks for completions instead of running a command."""
    return "_ARGCOMPLETE" in os.environ and find_spec("argcomplete") is not None


def complete(commands: Sequence[str], command: Callable[[str], Callable[[list[str]], int]]) -> None:
    """Print the words with which the user's line may go on, and end the process.

    Args:
        commands: the names of all commands.
        command: a function that takes a command's name and returns the ``run`` of the command
            (:mod:`distseg.cli.commands`). Called with no words, ``run`` makes the parser of its
            flags. When jsonargparse is asked to parse, it lets argcomplete print the words.
    """
    typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    name = _command_in(typed)
    if name in commands:
        os.environ["_ARGCOMPLETE"] = "2"  # the line begins at its second word, the command
        command(name)([])
        return
    import argcomplete

    parser = argparse.ArgumentParser(prog="distseg", add_help=False)
    parser.add_argument("command", choices=commands)
    argcomplete.autocomplete(parser, always_complete_options=False)


def add_completers(parser: argparse.ArgumentParser) -> None:
    """Let each flag of a parser complete its values by its type.

    Choices are completed to their names, and text to names of files. The completer of jsonargparse
    4.53 fails for types that have no choices.
    """
    from argcomplete.completers import ChoicesCompleter, FilesCompleter

    for action in parser._actions:
        kind = getattr(action, "_typehint", None)
        if kind is not None:
            texts = str in (kind, *get_args(kind))
            action.completer = FilesCompleter() if texts else ChoicesCompleter(values_of(kind))


def values_of(kind: Any) -> list[str]:
    """Return all values that a type allows, as a user writes them.

    The list is empty if the values cannot be listed, as those of int or str.
    """
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) in (Union, UnionType):
        return [value for part in get_args(kind) for value in values_of(part)]
    return []


def _command_in(typed: str) -> str | None:
    """Return the command in an unfinished line: ``train`` for ``distseg train --mo``.

    Return None while the user still types the command itself, as in ``distseg tra``.
    """
    try:
        words = shlex.split(typed)
    except ValueError:  # an open quote
        words = typed.split()
    return words[1] if len(words) > 2 or len(words) == 2 and typed[-1:].isspace() else None
