"""Graphs for tests that need no layers."""

from distseg.tiling.access_pattern import Gather
from distseg.tiling.graph import Graph, Node

CONV = Gather(3, before=1, after=1)


def line(*steps: tuple, dims: int = 1) -> Graph:
    """Layers one behind the other: (name,) looks at single cells, (name, pattern) alike along each dim, (name, "pop") at the map before "stash" too."""
    nodes, put_aside = [], 0
    for number, (name, *looks) in enumerate(steps):
        if name == "stash":
            put_aside = number
        popped = (put_aside,) if looks == ["pop"] else ()
        nodes.append(
            Node(name, (number, *popped), () if popped or not looks else tuple(looks) * dims)
        )
    return Graph(nodes)
