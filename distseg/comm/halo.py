"""Halo exchange: tiles receive cells that other tiles own, and return the gradients of these cells.

The forward pass copies a tile's cells to all tiles that need them. Its adjoint adds the gradients
that these tiles return. A *strip* is the part of one tensor that goes to one other tile. A layer
sends one message to each neighbouring rank, which holds the strips of all tiles and images. Strips
are intersections of boxes, so corners, halos wider than a tile and several tiles per rank need no
special code. Messages follow the rules of :mod:`distseg.comm.staging`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from distseg.comm.mail import Arriving, HaloMail, Mail
from distseg.comm.memory_format import lies_last
from distseg.comm.waits import Waits
from distseg.tiling.access_pattern import Span
from distseg.tiling.layout import MapView
from distseg.tiling.tile import Box


class Copy(NamedTuple):
    """Transfer of the cells ``box`` of a feature map from the tile that owns them to another tile.

    ``source`` and ``target`` are the positions of the two tiles in the grid of tiles.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    box: Box


def copies_to(
    target: Sequence[int], cuts: Sequence[Sequence[int]], wanted: Sequence[Sequence[Span]]
) -> list[Copy]:
    """Return the parts of a feature map that a tile receives from other tiles.

    Args:
        target: the position of the tile in the grid of tiles.
        cuts: for each dim, the indices of the cells at which tiles begin, and the size of the
            feature map as the last number.
        wanted: ``wanted[dim][i]`` is the span (start, stop) of cells that the tiles with index i
            along this dim need.
    """
    spans = [w[t] for w, t in zip(wanted, target)]
    if any(a >= b for a, b in spans):
        return []
    sources = product(
        *(range(bisect_right(c, a) - 1, bisect_left(c, b)) for c, (a, b) in zip(cuts, spans))
    )
    return [Copy(s, tuple(target), _common(s, cuts, spans)) for s in sources if s != tuple(target)]


def copies_from(
    source: Sequence[int], cuts: Sequence[Sequence[int]], wanted: Sequence[Sequence[Span]]
) -> list[Copy]:
    """Return the parts of a feature map that a tile sends to other tiles.

    Args:
        source: the position of the tile in the grid of tiles.
        cuts, wanted: borders of tiles and spans of needed cells, as for :func:`copies_to`.
    """
    own = [c[s : s + 2] for c, s in zip(cuts, source)]
    near = [
        [t for t, (a, b) in enumerate(w) if max(a, o[0]) < min(b, o[1])]
        for w, o in zip(wanted, own)
    ]
    targets = (t for t in product(*near) if t != tuple(source))
    return [
        Copy(tuple(source), t, _common(source, cuts, [w[i] for w, i in zip(wanted, t)]))
        for t in targets
    ]


def _common(source, cuts, spans) -> Box:
    pairs = [(max(a, c[s]), min(b, c[s + 1])) for s, c, (a, b) in zip(source, cuts, spans)]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


class Strip(NamedTuple):
    """Part of one of this rank's tensors that is sent to another rank or received from it.

    Attributes:
        tensor: index of the tensor.
        slices: the part, as slices of the tensor's spatial dims.
        shape: shape of the part, (B, C, *size).
    """

    tensor: int
    slices: tuple[slice, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExchangeView(MapView):
    """Boxes that a tensor holds before and after a halo exchange, in cells of the feature map.

    Before the exchange, the tensor holds the box ``available``.

    Attributes:
        exchanged: the box of the tensor after the exchange. Its cells beyond the feature map are
            padding.
    """

    exchanged: Box


class HaloExchange:
    """Halo exchange of one layer, for tensors with the same number of channels and dtype.

    A strip is the part of a tensor that another tile needs as halo. ``forward`` and ``adjoint`` are
    adjoint to each other in the inner product over all cells of all ranks.

    Args:
        mail: sends and receives the messages.
        frames: for each tensor (B, C, *available.size) of this rank, its boxes.
        sends: for each other rank, the strips to send, as (index of this rank's tensor, box in
            cells of the whole feature map). Sender and receiver list them in the same order.
        receives: for each other rank, the strips to receive, in the same form.
        here: the strips that are copied between tensors of this rank, as (index of the source,
            index of the target, box).
        like: any one of the tensors, of which the number of channels and the dtype are used.
        batches: number of images of each tensor.
        fill: value of the cells beyond the feature map.
        tag: tag of this layer's messages; ``tag`` + 1 is the tag of gradients.
        name: name of the layer, for error messages.
        last: True if messages have their channels last, which is best if the tensors have them last
            in memory. All ranks must pass the same value.
    """

    def __init__(
        self,
        mail: Mail | HaloMail,
        frames: list[ExchangeView],
        sends: dict[int, list[tuple[int, Box]]],
        receives: dict[int, list[tuple[int, Box]]],
        here: list[tuple[int, int, Box]],
        like: Tensor,
        batches: list[int],
        fill: float,
        tag: int,
        name: str,
        last: bool,
    ):
        self.mail, self.frames, self.fill, self.tag, self.name, self.last = (
            mail,
            frames,
            fill,
            tag,
            name,
            last,
        )
        self.channels, self.dtype, self.itemsize = like.shape[1], like.dtype, like.element_size()

        def strip(at: int, box: Box, origin: Box) -> Strip:
            shape = (batches[at], self.channels, *box.size)
            return Strip(at, box.relative_to(origin).slices, shape)

        self.sends = {
            rank: [strip(at, box, frames[at].available) for at, box in strips]
            for rank, strips in sends.items()
        }
        self.receives = {
            rank: [strip(at, box, frames[at].exchanged) for at, box in strips]
            for rank, strips in receives.items()
        }
        self.here = [
            (strip(a, box, frames[a].available), strip(b, box, frames[b].exchanged))
            for a, b, box in here
        ]

    @property
    def waits(self) -> Waits:
        """Wait policy of this exchange's messages."""
        return self.mail.waits

    @property
    def idle(self) -> bool:
        """True if this rank sends, receives and copies nothing, and no tensor changes its box."""
        return not (self.sends or self.receives or self.here) and all(
            frame.exchanged == frame.available for frame in self.frames
        )

    def forward(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's tensors, extended by cells that other tiles own and by padding.

        Each tensor (B, C, *available.size) becomes (B, C, *exchanged.size).
        """
        arriving = self._start(xs, self.sends, self.receives, self.tag)
        ys = [self._placed(x, frame) for x, frame in zip(xs, self.frames)]
        for source, target in self.here:
            _view(ys, target).copy_(_view(xs, source))
        for _rank, views in self._finish(arriving, self.receives, ""):
            for strip, part in views:
                _view(ys, strip).copy_(part)
        return ys

    def adjoint(self, gs: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the input tensors of :meth:`forward`, given those of its results.

        Args:
            gs: for each tensor, its gradient after the exchange, (B, C, *exchanged.size). The
                result has a gradient (B, C, *available.size) for each tensor.
        """
        return self.finish_adjoint(gs, self.start_adjoint(gs))

    def start_adjoint(self, gs: Sequence[Tensor]):
        """Start to send the gradients of received cells back to the ranks that own these cells.

        Args:
            gs: for each tensor, its gradient after the exchange, (B, C, *exchanged.size).

        Returns:
            A dict from each rank that sends gradients back to this rank to the running receive. It
            is an argument of :meth:`finish_adjoint`.
        """
        return self._start(gs, self.receives, self.sends, self.tag + 1)

    def finish_adjoint(
        self, gs: Sequence[Tensor], arriving, in_place: bool = False
    ) -> list[Tensor]:
        """Wait for the gradients from other ranks, add them, and return the sums.

        The result has one gradient (B, C, *available.size) for each tensor.

        Args:
            gs: the argument of :meth:`start_adjoint`.
            arriving: the result of :meth:`start_adjoint`.
            in_place: True if ``gs`` may be changed and the results may be views of ``gs``.
        """
        dxs = [self._own_part(g, frame, in_place) for g, frame in zip(gs, self.frames)]
        for source, target in self.here:
            _view(dxs, source).add_(_view(gs, target))
        for _rank, views in self._finish(arriving, self.sends, "the gradient of "):
            for strip, part in views:
                _view(dxs, strip).add_(part)
        return dxs

    def _placed(self, x: Tensor, frame: ExchangeView) -> Tensor:
        """Return a tensor for the box ``frame.exchanged``, with owned cells of ``x`` and padding.

        Cells that other tiles own are not initialised.
        """
        y = _empty(x, frame.exchanged.size)
        common = frame.owned.intersection(frame.exchanged)
        if not common.pixels:
            return y.fill_(self.fill)
        inside = frame.exchanged.intersection(Box.whole(frame.size)).relative_to(frame.exchanged)
        fill_around(y, inside, self.fill)
        y[(..., *common.relative_to(frame.exchanged).slices)] = x[
            (..., *common.relative_to(frame.available).slices)
        ]
        return y

    def _own_part(self, g: Tensor, frame: ExchangeView, in_place: bool) -> Tensor:
        """Return the gradient on ``frame.available``: ``g`` on the owned cells, 0 on the others.

        Args:
            g: the gradient on ``frame.exchanged``.
            frame: the boxes of the tensor.
            in_place: True if the result may be a view of ``g``.
        """
        common = frame.owned.intersection(frame.exchanged)
        if in_place and common == frame.available:
            return g[(..., *common.relative_to(frame.exchanged).slices)]
        dx = _empty(g, frame.available.size)
        if common != frame.available:
            dx.zero_()
        if common.pixels:
            dx[(..., *common.relative_to(frame.available).slices)] = g[
                (..., *common.relative_to(frame.exchanged).slices)
            ]
        return dx

    # messages

    def _start(
        self,
        tensors: Sequence[Tensor],
        going: dict[int, list[Strip]],
        coming: dict[int, list[Strip]],
        tag: int,
    ) -> dict[int, Arriving]:
        """Post the receives, pack and send the strips, and return the receives by rank.

        Args:
            tensors: this rank's tensors, from which the strips are taken.
            going, coming: for each other rank, the strips to send and the strips to receive.
            tag: the tag of the messages.
        """

        def pack() -> dict[int, Tensor]:
            packed = {}
            for rank, strips in going.items():
                packed[rank] = self.mail.buffer(self._bytes(strips))
                for strip, part in self._parts(packed[rank], strips):
                    part.copy_(_view(tensors, strip))
            return packed

        sizes = {rank: self._bytes(strips) for rank, strips in coming.items()}
        return self.mail.exchange(sizes, pack, tag)

    def _finish(self, arriving: dict[int, Arriving], strips: dict[int, list[Strip]], what: str):
        for rank, receipt in arriving.items():
            buffer = receipt.tensor(
                f"{what}the halo at layer {self.name} from rank {rank} of the image's tiles", "halo"
            )
            here = buffer.to(self.mail.device, non_blocking=True)
            yield rank, self._parts(here, strips[rank])
            self.mail.done(buffer)

    def _bytes(self, strips: list[Strip]) -> int:
        return sum(math.prod(strip.shape) for strip in strips) * self.itemsize

    def _parts(self, flat: Tensor, strips: list[Strip]):
        """Yield (strip, values) for each strip of a message.

        Args:
            flat: the message, a flat uint8 tensor.
            strips: the strips of the message, in order. The values of a strip are a view of
                ``flat``, (B, C, *size).
        """
        values, offset = flat.view(self.dtype), 0
        for strip in strips:
            count = math.prod(strip.shape)
            part = values[offset : offset + count]
            b, c, *size = strip.shape
            yield (
                strip,
                part.view(b, *size, c).movedim(-1, 1) if self.last else part.view(strip.shape),
            )
            offset += count


def fill_around(y: Tensor, inside: Box, value: float) -> None:
    """Set the cells of a tensor (B, C, *size) outside of a box to a value."""
    for dim, (a, b, n) in enumerate(zip(inside.start, inside.stop, y.shape[2:]), start=2):
        y.narrow(dim, 0, a).fill_(value)
        y.narrow(dim, b, n - b).fill_(value)


def _empty(like: Tensor, size: Sequence[int]) -> Tensor:
    """Return an uninitialised tensor (B, C, *size) in the memory format of ``like``."""
    b, c = like.shape[:2]
    if lies_last(like):
        return like.new_empty(b, *size, c).movedim(-1, 1)
    return like.new_empty(b, c, *size)


def _view(tensors: Sequence[Tensor], strip: Strip) -> Tensor:
    return tensors[strip.tensor][(..., *strip.slices)]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: HaloExchange, *xs):
        ctx.exchange = exchange
        return tuple(exchange.forward(xs))

    @staticmethod
    def backward(ctx, *gs):
        return None, *ctx.exchange.adjoint(gs)


def exchanged(exchange: HaloExchange, xs: Sequence[Tensor]) -> list[Tensor]:
    """Exchange halos, and return this rank's tensors with their halos and an autograd graph.

    In the backward pass, autograd runs :meth:`HaloExchange.adjoint`, in which all ranks exchange
    gradients.

    Args:
        exchange: the exchange of a layer.
        xs: this rank's tensors. Each tensor (B, C, *available.size) becomes
            (B, C, *exchanged.size).
    """
    return list(_Exchanged.apply(exchange, *xs))
