"""Describe the nodes of a job and the links that its messages share.

The ranks fill the nodes one after another. A rank sends and receives over its own link to the other
ranks of its node. All ranks of a node share the node's network card. All nodes of a switch share
the cables from it to the other switches. All ranks of the job share the file system::

    rank - node's card - switch - other switches
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distseg.planning.machine import Machine
from distseg.planning.shared_links import Link

SUMS = ("halving", "ring", "tree")


@dataclass(frozen=True)
class Cluster:
    """Nodes of a job, and the network between them.

    Attributes:
        machine: the numbers of a rank and a node.
        ranks: the number of ranks of the job.
        sums: how a sum travels. ``ring``: n - 1 rounds in which every rank passes on an n-th part,
            twice. ``tree``: all bytes go up and down a tree of log2(n) levels. ``halving``: the
            bytes of a ring in the rounds of a tree (recursive halving and doubling), as
            :meth:`distseg.planning.machine.Machine.sum` assumes.
        sum_network: bytes/s of a node's card in sums, in one direction; by default the network of
            the machine.
        switch: the number of nodes of a switch; 0 if all nodes are on one switch.
        contention: the factor by which the cables between switches are slower than the cards of
            all nodes of a switch together; 1 for a fat tree without contention. Sums are not slowed
            by it: a ring passes the cables of each switch once.
        storage: bytes/s that the file system gives the job; infinite if reading is not simulated.
        stored: bytes of a pixel's value in the image files.
    """

    machine: Machine
    ranks: int
    sums: str = "halving"
    sum_network: float | None = None
    switch: int = 0
    contention: float = 1.0
    storage: float = math.inf
    stored: int = 1

    def __post_init__(self):
        if self.sums not in SUMS:
            raise ValueError(f"sums is {self.sums!r}: give one of {', '.join(SUMS)}")
        if self.contention < 1:
            raise ValueError(f"contention is {self.contention}: give a factor of at least 1")

    def node(self, rank: int) -> int:
        """Return the index of the node that a rank is on."""
        return rank // self.machine.ranks

    def message(self, source: int, target: int) -> tuple[Link, ...]:
        """Return the links over which a message travels from one rank to another."""
        a, b = self.node(source), self.node(target)
        links: list[Link] = [("rank out", source), ("rank in", target)]
        if a != b:
            links += [("card out", a), ("card in", b)]
            if self.switch and a // self.switch != b // self.switch:
                links += [("switch out", a // self.switch), ("switch in", b // self.switch)]
        return tuple(links)

    def sum_links(self, ranks: Sequence[int], whole: int) -> tuple[Link, ...]:
        """Return the links over which the bytes of a sum over ranks travel.

        Args:
            ranks: the simulated ranks that take part.
            whole: the number of all ranks that take part, simulated or not.
        """
        nodes = dict.fromkeys(map(self.node, ranks))
        elsewhere = whole > len(ranks) and self.ranks > self.machine.ranks
        over_network = len(nodes) > 1 or elsewhere
        kinds = ("card out", "card in", "sums")[: 2 if self.sum_network is None else 3]
        return (
            *(("rank out", rank) for rank in ranks),
            *((kind, node) for kind in kinds[: 3 * over_network] for node in nodes),
        )

    def sum_cost(self, ranks: int, size: float) -> tuple[float, float]:
        """Return the seconds of latency of a sum over ranks, and the bytes that each rank sends.

        Args:
            ranks: the number of ranks that take part.
            size: the bytes of the array that is summed.
        """
        rounds = math.ceil(math.log2(ranks)) if self.sums != "ring" else ranks - 1
        sent = 2 * size * (1 if self.sums == "tree" else (ranks - 1) / ranks)
        return 2 * rounds * self.machine.latency, sent

    def capacity(self, simulated: int) -> Callable[[Link], float]:
        """Return a function that returns the bytes/s of a link.

        Args:
            simulated: the number of simulated ranks. The simulated ranks get a share of the file
                system's bytes/s, in proportion to their share of all ranks.
        """
        machine = self.machine
        found = {
            "rank": machine.link,
            "card": machine.network,
            "switch": self.switch * machine.network / self.contention,
            "sums": machine.network if self.sum_network is None else self.sum_network,
            "file": self.storage * simulated / self.ranks,
        }

        return lambda link: found[link[0].split()[0]]

    def reading(self, rank: int) -> tuple[Link, ...]:
        """Return the links over which a rank reads images."""
        return ("card in", self.node(rank)), ("file system", 0)
