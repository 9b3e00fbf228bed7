"""What is needed of each feature map for a part of a later one: one recurrence over the layers, from behind.

It is that of tiles that exchange borders, of windows, and of tiles in time (:mod:`distseg.geometry.layout`, :mod:`distseg.geometry.segment`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from distseg.geometry.footprint import Footprint, Gather, Span, inside
from distseg.geometry.tile import Box


@dataclass(frozen=True)
class Link:
    """A layer as geometry sees it: its footprint along each dim (none: pointwise), and the skip that it stashes or pops."""

    name: str
    footprints: tuple[Footprint, ...] = ()
    stash: str | None = None
    pop: str | None = None

    def along(self, dim: int) -> Footprint | None:
        return self.footprints[dim] if self.footprints else None


@dataclass(frozen=True)
class Need:
    """One layer along one dim: the spans of several tiles, in cells; ``skip``: what a pop's tile has of a skip that is stashed in the same run of layers.

    ``given``, ``taken``, ``raw``, ``made``: as :class:`distseg.geometry.layout.Part`'s.
    """

    given: list[Span]
    taken: list[Span]
    raw: list[Span]
    made: list[Span]
    skip: list[Span] | None


@dataclass(frozen=True)
class Along:
    """One tile along one dim, at each of some layers in a row: the spans of :class:`Need`, and how many cells ``taken`` and ``made`` have."""

    taken: list[Span]
    raw: list[Span]
    made: list[Span]
    skip: list[Span | None]
    takes: list[int]
    makes: list[int]

    @classmethod
    def of(cls, needs: Sequence[Need]) -> "Along":
        taken, raw, made = ([getattr(need, field)[0] for need in needs] for field in ("taken", "raw", "made"))
        cells = lambda spans: [b - a for a, b in spans]
        return cls(taken, raw, made, [need.skip and need.skip[0] for need in needs], cells(taken), cells(made))


def needs_along(
    links: Sequence[Link], dim: int, sizes: Sequence[int], wanted: list[Span], owned: Sequence[list[Span]] | None = None, points: frozenset[int] = frozenset()
) -> list[Need]:
    """What each of several tiles of a dim is given, takes and makes at each of some layers in a row.

    Args:
        sizes: of the map before each layer.
        wanted: what each tile is to have behind the last layer.
        owned: what each tile has of each map at least.
        points: the layers, by number, before which a tile has no more than it owns, until it is given what it takes.
    """
    held = _held(links, dim, sizes, wanted, owned, points)
    found: list[Need] = []
    skips: dict[str, list[Span]] = {}
    given = held[0]
    for layer, (link, n) in enumerate(zip(links, sizes)):
        if link.footprints or link.pop is not None or layer in points:
            made = held[layer + 1]
            taken, raw = map(list, zip(*(taken_of(link, dim, span, n) for span in made)))
        else:
            made = taken = raw = given
        if link.stash is not None:
            skips[link.stash] = made
        found.append(Need(given, taken, raw, made, skips.get(link.pop)))
        given = made
    return found


def _held(links: Sequence[Link], dim: int, sizes: Sequence[int], wanted: list[Span], owned, points: frozenset[int]) -> list[list[Span]]:
    """What each tile must have of the map before each layer, and behind the last."""
    held = [wanted]
    skips: dict[str, list[Span]] = {}
    for layer in reversed(range(len(links))):
        link = links[layer]
        taken = [taken_of(link, dim, span, sizes[layer])[0] for span in held[-1]]
        if link.pop is not None:
            skips[link.pop] = held[-1]
        if link.stash in skips:
            taken = list(map(hull, taken, skips.pop(link.stash)))
        if owned is not None:
            taken = owned[layer] if layer in points else list(map(hull, taken, owned[layer]))
        held.append(taken)
    return held[::-1]


def taken_of(link: Link, dim: int, made: Span, n: int) -> tuple[Span, Span]:
    """(taken, raw) along a dim: the cells that a result is made from, in the map and with what lies beyond it."""
    footprint = link.along(dim)
    if footprint is None:
        return inside(made, n), inside(made, n)
    raw = footprint.needs(*made)
    return inside(raw, n, footprint.mirrored), raw if isinstance(footprint, Gather) else inside(raw, n)


def hull(one: Span, other: Span) -> Span:
    return min(one[0], other[0]), max(one[1], other[1])


def box_of(spans: Sequence[Span]) -> Box:
    return Box(*zip(*spans))
