"""Lists the messages that layers exchange with other tiles and sample groups during a pass.

These messages are the halos of layers that exchange them, and the statistics of active norms (norms
that compute their statistics from the current images). A backward pass has the same messages in the
reverse order: autograd runs the layers backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from distseg.comm.mesh import Members
from distseg.runtime.exchange import Cell, Exchange
from distseg.runtime.message_order import Collective, Message, Start, Step, Wait
from distseg.tiling.layout import Layout


class PassMessages:
    """Messages that the layers of one rank exchange in their forward and backward passes.

    Args:
        rank: the number of the rank in the job.
        members: for each of its communicators, the numbers of the ranks in the job.
        names: the names of the network's layers.
        exchange: the halo exchange between layers; None if tiles exchange no halos.
        tiles: for each tile of this rank, (layout of its image, index of the tile in the grid).
        statistics: for each active norm, the communicator over which it takes statistics: ``tiles``
            or ``replicas``.
        first_trained: the index of the first layer with trained parameters. Layers before it have
            no backward pass.
    """

    def __init__(
        self,
        rank: int,
        members: Members,
        names: Sequence[str],
        exchange: Exchange | None,
        tiles: Sequence[tuple[Layout, Cell]],
        statistics: Mapping[int, str],
        first_trained: int,
    ):
        self.rank, self.members, self.names = rank, members, names
        self.exchange, self.tiles = exchange, tiles
        self.statistics, self.first_trained = statistics, first_trained

    def forward(self, layers: Sequence[int], name: str) -> Iterator[Step]:
        """Yield the messages of the layers in a forward pass, or in a repeated forward pass.

        Args:
            layers: the numbers of the layers.
            name: the name of the pass, such as ``F3,0``.
        """
        for number in layers:
            yield from self._halo(number, False, name)
            yield from self._statistic(number, name)

    def backward(self, layers: Sequence[int], name: str) -> Iterator[Step]:
        """Yield the messages of the layers in a backward pass, last layer first.

        The arguments are those of :meth:`forward`.
        """
        for number in reversed(layers):
            if number >= self.first_trained:
                yield from self._statistic(number, name)
            if number > self.first_trained:
                yield from self._halo(number, True, name)

    def _statistic(self, number: int, name: str) -> Iterator[Step]:
        if number in self.statistics:
            comm = self.statistics[number]
            yield from collective(
                comm, getattr(self.members, comm), f"statistics at {self.names[number]} in {name}"
            )

    def _halo(self, number: int, back: bool, name: str) -> Iterator[Step]:
        """Yield the messages of the halo exchange before a layer.

        Args:
            number: the index of the layer.
            back: True for the messages that return the halo's gradient.
            name: the name of the pass.
        """
        concerned = [each for each in self.tiles if number in each[0].points]
        if self.exchange is None or not concerned:
            return
        strips = self.exchange.strips(number, *map(list, zip(*concerned)))
        sent, received = strips.sends, strips.receives
        yield from neighbours(
            self.rank,
            self.members.tiles,
            *((received, sent) if back else (sent, received)),
            2 * number + back,
            f"{'gradient of the ' * back}halo at {self.names[number]} in {name}",
        )


def neighbours(
    rank: int,
    members: Sequence[int],
    sends: Sequence[int] | Mapping[int, object],
    receives: Sequence[int] | Mapping[int, object],
    tag: int,
    name: str,
) -> Iterator[Step]:
    """Yield two steps of a halo exchange: start all messages, then wait for the receives.

    Args:
        rank: the number of this rank in the job.
        members: the ranks that share the image.
        sends, receives: the other ranks, as numbers among ``members``.
        tag: the tag of the messages.
        name: the name of the messages; it must differ from that of any other exchange.
    """
    coming = tuple(Message("tiles", members[r], rank, tag, name) for r in receives)
    going = tuple(Message("tiles", rank, members[r], tag, name) for r in sends)
    if coming or going:
        yield Start(coming + going)
        yield Wait(coming)


def collective(comm: str, ranks: Sequence[int], name: str) -> Iterator[Collective]:
    """Yield a collective of the ranks of a communicator, or nothing if it has only one rank.

    Args:
        comm: the name of the communicator.
        ranks: the numbers of its ranks in the job.
        name: the name of what is gathered or summed.
    """
    if len(ranks) > 1:
        yield Collective(comm, tuple(ranks), name)
