"""Small networks as researchers write them, one idea of a paper each, in plain PyTorch.

None is written for distseg. A network is a class of one of this folder's files whose constructor
needs ``in_channels`` and ``out_channels`` alone. Class attributes say what differs from three
bands in two dims: ``bands`` and ``dims``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

GROUPS = (
    "channel_attention",
    "normalisation",
    "resampling",
    "context",
    "unets",
    "blocks",
    "gating",
    "iterative",
    "filters",
    "vectors",
    "positions",
    "heads",
    "volumes",
    "streams",
    "place_attention",
)


@dataclass(frozen=True)
class Entry:
    """A network of the collection.

    Attributes:
        group: the file it is in.
        name: its class.
        make: the class, called with bands and classes.
    """

    group: str
    name: str
    make: Callable[[int, int], nn.Module]

    @property
    def target(self) -> str:
        """The network as ``model.name`` has it."""
        return f"{__name__}.{self.group}:{self.name}"

    @property
    def bands(self) -> int:
        return getattr(self.make, "bands", 3)

    @property
    def dims(self) -> int:
        return getattr(self.make, "dims", 2)


def collection() -> dict[str, Entry]:
    """Return all networks by name, in the order of the files."""
    found = [entry for group in GROUPS for entry in _of_file(group)]
    names = [entry.name for entry in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"networks of one name in two files: {sorted(twice)}")
    return dict(zip(names, found))


def _of_file(group: str) -> list[Entry]:
    module = importlib.import_module(f"{__name__}.{group}")
    made_here = [
        c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__
    ]
    return [Entry(group, c.__name__, c) for c in made_here if _is_network(c)]


def _is_network(made: type) -> bool:
    parameters = list(inspect.signature(made).parameters.values())
    needed = [p.name for p in parameters if p.default is p.empty]
    return issubclass(made, nn.Module) and needed == ["in_channels", "out_channels"]
