"""A network as geometry sees it: layer calls in an order in which they can run, and the maps between them.

Map 0 is the image, and node n makes map n + 1; a node may read any maps before its own::

    node     0 conv   1 relu   2 conv   3 add
    reads    0        1        2        3, 1          a skip is an edge like any other
    makes    1        2        3        4
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Container, Iterable, NamedTuple, Sequence

from distseg.tiling.access_pattern import AccessPattern


@dataclass(frozen=True)
class Node:
    """A layer call.

    Attributes:
        inputs: the maps that it reads.
        footprints: along each dim, which cells of the first of them it looks at; none: it looks at single cells, as it does of all others.
        like: the map whose size the result's follows, by the footprints' rule, where that is not the first of those it reads. No cell of it is read.
        placed: a cell hangs on its place in the image, and on the image's size.
    """

    name: str
    inputs: tuple[int, ...]
    footprints: tuple[AccessPattern, ...] = ()
    like: int | None = None
    placed: bool = False

    @property
    def first(self) -> int:
        return self.inputs[0]

    @property
    def joins(self) -> bool:
        """Whether several maps meet here. The result has the size of the last; what others have beyond that is cut off."""
        return len(self.inputs) > 1

    @property
    def simple(self) -> bool:
        """Whether a cell is made from one cell."""
        return not (self.footprints or self.joins)

    def along(self, dim: int) -> AccessPattern | None:
        return self.footprints[dim] if self.footprints else None

    @property
    def follows(self) -> int:
        """The map whose size the result's follows."""
        return (
            self.like
            if self.like is not None
            else self.first
            if self.footprints
            else self.inputs[-1]
        )

    def size(self, dim: int, sizes: Sequence[int]) -> int:
        """Return the cells of the result along a dim, given those of all maps before it."""
        footprint, n = self.along(dim), sizes[self.follows]
        return n if footprint is None else footprint.size(n)

    @property
    def sized(self) -> bool:
        """True if its cells hang on the sizes of maps, so that they are alike in no two images."""
        return self.placed or any(footprint.sized for footprint in self.footprints)


class Graph(Sequence[Node]):
    """All nodes of a network, in order.

    Args:
        of_image: the result is a vector of the image, and not a map of its size.

    Raises:
        ValueError: a node that reads what is made behind it, or whose result nobody reads.
    """

    def __init__(self, nodes: Iterable[Node], of_image: bool = False):
        self.nodes, self.of_image = tuple(nodes), of_image
        for number, node in enumerate(self.nodes):
            if not all(0 <= source <= number for source in (*node.inputs, node.follows)):
                raise ValueError(f"layer {node.name} reads what is made behind it")
        followed = {node.like for node in self.nodes}
        unread = [
            node.name
            for number, node in enumerate(self.nodes[:-1])
            if number + 1 not in self.readers and number + 1 not in followed
        ]
        if unread:
            raise ValueError(
                f"nothing reads what layer {unread[0]} makes: remove it from the model"
            )

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, number):
        return self.nodes[number]

    @property
    def result(self) -> int:
        """The last map."""
        return len(self.nodes)

    @property
    def sized(self) -> bool:
        """True if the cells that some layer looks at hang on the sizes of maps."""
        return any(node.sized for node in self.nodes)

    def sizes(self, image: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the size of each map of an image."""
        return list(zip(*(self.sizes_along(dim, n) for dim, n in enumerate(image))))

    def sizes_along(self, dim: int, n: int) -> list[int]:
        """Return the cells of each map along a dim of an image of ``n`` pixels."""
        found = [n]
        for node in self.nodes:
            found.append(node.size(dim, found))
        return found

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The nodes that read each map."""
        found: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for source in dict.fromkeys(node.inputs):
                found.setdefault(source, []).append(number)
        return found

    def needed_for(self, result: int, there: Container[int]) -> list[int]:
        """The nodes that make map ``result`` from the maps that are ``there``, and from the image, in order."""
        wanted, found = {result}, []
        for number in reversed(range(result)):
            if number + 1 in wanted and (number + 1 == result or number + 1 not in there):
                found.append(number)
                wanted.update(self.nodes[number].inputs)
        return found[::-1]


def last_readings(
    inputs: Sequence[Sequence[int]], numbers: Iterable[int], kept: Container[int] = ()
) -> dict[int, list[int]]:
    """By node: the maps that none of ``numbers`` behind it reads, so that they can be let go of, but for those that are ``kept``."""
    found: dict[int, list[int]] = {number: [] for number in numbers}
    last = {source: number for number in found for source in inputs[number] if source not in kept}
    for source, number in last.items():
        found[number].append(source)
    return found


class Skip(NamedTuple):
    """A map that is read further on than right behind where it is made: the one before node ``stash``, by node ``pop``."""

    stash: int
    pop: int


def skips_of(inputs: Sequence[Sequence[int]]) -> list[Skip]:
    """In order of their maps."""
    return sorted(
        {
            Skip(source, number)
            for number, sources in enumerate(inputs)
            for source in sources
            if source != number
        }
    )


def crossing(
    inputs: Sequence[Sequence[int]], ranges: Sequence[range]
) -> list[tuple[int, int, int]]:
    """What crosses from one run of nodes to another: (map, the run that makes it, a run that reads it), in order; the image is the first run's."""
    run_of = {number: run for run, numbers in enumerate(ranges) for number in numbers}
    ways = (
        {
            (source, run_of.get(source - 1, 0), run_of[number])
            for number, sources in enumerate(inputs)
            for source in sources
        }
        if ranges
        else set()
    )
    return sorted(way for way in ways if way[1] != way[2])
