"""A network as a graph: layer calls in an order in which they can run, and the maps between them.

A *node* is a layer call, a *map* is a feature map. Map 0 is the image, and node n computes map
n + 1. A node may read any earlier maps::

    node     0 conv   1 relu   2 conv   3 add
    reads    0        1        2        3, 1          a skip is an edge like any other
    makes    1        2        3        4
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from distseg.tiling.access_pattern import AccessPattern


@dataclass(frozen=True)
class Node:
    """One call of a layer of the network.

    Attributes:
        name: the name of the layer.
        inputs: indices of the feature maps that the layer reads.
        access_patterns: for each dim, the access pattern of the layer on its first input. Empty if
            an output cell reads only the cell at its own position of the first input. Of each other
            input, an output cell always reads only the cell at its own position.
        like: index of the map whose size the result takes, as in resizing to the size of another
            map. The layer reads only the size of this map. None if the inputs determine the size.
        placed: True if the value of a cell also depends on its position in the image and on the
            image's size.
    """

    name: str
    inputs: tuple[int, ...]
    access_patterns: tuple[AccessPattern, ...] = ()
    like: int | None = None
    placed: bool = False

    @property
    def first(self) -> int:
        """The index of the first feature map that the layer reads."""
        return self.inputs[0]

    @property
    def joins(self) -> bool:
        """True if the node has several inputs, as a sum or a concatenation has.

        The result has the size of the last input. Larger inputs are cut to that size.
        """
        return len(self.inputs) > 1

    @property
    def simple(self) -> bool:
        """True if every output cell depends on one input cell (a pointwise layer)."""
        return not (self.access_patterns or self.joins)

    def along(self, dim: int) -> AccessPattern | None:
        """Return the access pattern of the first input along a dim; None for a pointwise layer."""
        return self.access_patterns[dim] if self.access_patterns else None

    @property
    def follows(self) -> int:
        """Index of the feature map whose size determines the size of the node's result."""
        if self.like is not None:
            return self.like
        return self.first if self.access_patterns else self.inputs[-1]

    def size(self, dim: int, sizes: Sequence[int]) -> int:
        """Return the size of the node's result along a dim, in cells.

        ``sizes`` are the sizes along this dim of the image and of all earlier nodes' results.
        """
        pattern, n = self.along(dim), sizes[self.follows]
        return n if pattern is None else pattern.size(n)

    @property
    def sized(self) -> bool:
        """True if the node's result depends on the size of a whole map, as that of some resizes.

        The result for a window alone may then differ from the result for that part of the image.
        """
        return self.placed or any(pattern.sized for pattern in self.access_patterns)


class Graph(Sequence[Node]):
    """All nodes of a network, in an order in which they can run.

    Args:
        nodes: the layer calls.
        of_image: True if the result is a vector of the image instead of a map.

    Raises:
        ValueError: a node reads a map that a later node computes, or the result of a node other
            than the last one is never read.
    """

    def __init__(self, nodes: Iterable[Node], of_image: bool = False):
        self.nodes, self.of_image = tuple(nodes), of_image
        for number, node in enumerate(self.nodes):
            for source in (*node.inputs, node.follows):
                if not 0 <= source <= number:
                    there = 0 < source <= len(self.nodes)
                    later = self.nodes[source - 1].name if there else f"number {source}"
                    raise ValueError(
                        f"layer {node.name} reads the output of layer {later}, which does not come "
                        "before it: list each layer after the layers whose outputs it reads"
                    )
        followed = {node.like for node in self.nodes}
        unread = [
            node.name
            for number, node in enumerate(self.nodes[:-1])
            if number + 1 not in self.readers and number + 1 not in followed
        ]
        if unread:
            raise ValueError(
                f"no layer reads the output of layer {unread[0]}: remove it from the model"
            )

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, number):
        return self.nodes[number]

    @property
    def result(self) -> int:
        """The index of the last map, the output of the network."""
        return len(self.nodes)

    @property
    def sized(self) -> bool:
        """True if some node's result depends on the size of a whole map (:attr:`Node.sized`)."""
        return any(node.sized for node in self.nodes)

    def sizes(self, image: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the size of each map for an image of this size."""
        return list(zip(*(self.sizes_along(dim, n) for dim, n in enumerate(image))))

    def sizes_along(self, dim: int, n: int) -> list[int]:
        """Return the size of each map along a dim for an image of ``n`` pixels."""
        found = [n]
        for node in self.nodes:
            found.append(node.size(dim, found))
        return found

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """For each map, the indices of the nodes that read it, in order."""
        found: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for source in dict.fromkeys(node.inputs):
                found.setdefault(source, []).append(number)
        return found

    def needed_for(self, result: int, there: Container[int]) -> list[int]:
        """Return the indices of the nodes (layer calls) that must run to compute map ``result``.

        The nodes are in order. The image and the maps in ``there`` exist already, so nodes that are
        needed only for these maps are left out.
        """
        wanted, found = {result}, []
        for number in reversed(range(result)):
            if number + 1 in wanted and (number + 1 == result or number + 1 not in there):
                found.append(number)
                wanted.update(self.nodes[number].inputs)
        return found[::-1]


def last_readings(
    inputs: Sequence[Sequence[int]], numbers: Iterable[int], kept: Container[int] = ()
) -> dict[int, list[int]]:
    """Return, for each node in ``numbers``, the maps whose memory can be freed after the node.

    A map can be freed after the last node in ``numbers`` that reads it.

    Args:
        inputs: for each node of the network, the indices of the maps that it reads.
        numbers: the nodes, in order.
        kept: the maps that are never freed.
    """
    found: dict[int, list[int]] = {number: [] for number in numbers}
    last = {source: number for number in found for source in inputs[number] if source not in kept}
    for source, number in last.items():
        found[number].append(source)
    return found


class Skip(NamedTuple):
    """A skip connection: a map that a node reads later than the node right after the map.

    Attributes:
        stash: index of the map, which is also the index of the node right after it.
        pop: index of the later node that reads the map.
    """

    stash: int
    pop: int


def skips_of(inputs: Sequence[Sequence[int]]) -> list[Skip]:
    """Return all skip connections, sorted by the map that they carry.

    Args:
        inputs: for each node the indices of the maps that it reads.
    """
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
    """Return the maps that one range of nodes, such as a stage, computes and another range reads.

    Args:
        inputs: for each node the indices of the maps that it reads.
        ranges: consecutive ranges of nodes, such as the stages of a pipeline.

    Returns:
        Sorted triples (map, range that computes the map, range that reads the map). The image
        belongs to range 0.
    """
    if not ranges:
        return []
    range_of = {number: index for index, numbers in enumerate(ranges) for number in numbers}
    found = set()
    for number, sources in enumerate(inputs):
        for source in sources:
            found.add((source, range_of.get(source - 1, 0), range_of[number]))
    return sorted(way for way in found if way[1] != way[2])
