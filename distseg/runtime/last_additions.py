"""Finds the operations of a step that add to the gradients of parameters for the last time.

After such an operation the gradients are complete, and their sum over the replicas can start
(:mod:`distseg.comm.gradient_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import nn

Part = TypeVar("Part", bound=Hashable)
# Function that returns the context manager in which an operation runs. It is given the parameters
# to whose gradients the operation adds for the last time.
LastPass = Callable[[Iterable[nn.Parameter]], AbstractContextManager]


def last_additions(
    parts: Sequence[Part | None], parameters_of: Callable[[Part], Iterable[nn.Parameter]]
) -> dict[int, list[nn.Parameter]]:
    """Return, for each operation, the parameters to whose gradients it is the last to add.

    Args:
        parts: for each operation of the step, the part of the network to whose gradients it adds,
            such as the number of a stage; None if it adds to no gradients.
        parameters_of: returns the parameters of a part. Several parts may have the same parameter.

    Returns:
        A dict from the index of an operation to a list of parameters. Each parameter is in the
        list of the last operation that adds to its gradient.
    """
    last_of_part = {part: place for place, part in enumerate(parts) if part is not None}
    last = {}
    for part, place in sorted(last_of_part.items(), key=lambda item: item[1]):
        last.update(dict.fromkeys(parameters_of(part), place))
    found: dict[int, list[nn.Parameter]] = {}
    for parameter, place in last.items():
        found.setdefault(place, []).append(parameter)
    return found
