"""Halo exchange: tiles get cells that others own, and the gradients of those cells go back and are added up.

Forward, a tile's cells are copied to all tiles that want them; the adjoint adds what these return. All neighbours are
served at once, one message each a layer, whatever the number of tiles and images: corners, neighbours of neighbours where
the halo is wider than a tile, and several tiles a rank come out of intersecting boxes, with no case of their own. Messages keep
the rules of :mod:`distseg.comm.staging`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from distseg.comm.mail import Mail, Receipt
from distseg.comm.memory_format import lies_last
from distseg.comm.waits import Waits
from distseg.tiling.access_pattern import Span
from distseg.tiling.layout import Region
from distseg.tiling.tile import Box


class Copy(NamedTuple):
    """The cells ``box`` of a feature map, from the tile that owns them to one that wants them; tiles by their cell in the grid."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    box: Box


def copies_to(
    target: Sequence[int], cuts: Sequence[Sequence[int]], wanted: Sequence[Sequence[Span]]
) -> list[Copy]:
    """What a tile gets from others.

    Args:
        cuts: along each dim, the borders between tiles.
        wanted: along each dim, the span that each tile wants.
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
    """What others get from a tile."""
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
    """A box of one of this rank's tensors: its number and the slices."""

    tensor: int
    slices: tuple[slice, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Frame(Region):
    """What a tensor holds before an exchange, and ``make``, the cells of the tensor after it; those beyond the map are padding."""

    make: Box


class HaloExchange:
    """One exchange of one layer: what goes where, for tensors of one shape and type.

    ``forward`` and ``adjoint`` are each other's adjoint in the inner product over all cells that ranks have and make.

    Args:
        frames: of each tensor (B, C, *held.size) of this rank.
        sends, receives: for each rank the strips that go there, as boxes of own tensors in map cells, in an order both ranks agree on.
        here: pairs of own tensors, source and target, and the cells that go from one to the other.
        like: a tensor, for channels and type; ``batches``: images of each tensor.
        fill: what padding consists of.
        tag: of the messages of this layer, and the next one, for gradients.
        last: whether channels come last in messages, as they should where they do in memory; all ranks must agree.
    """

    def __init__(
        self, mail: Mail, frames: list[Frame], sends: dict[int, list[tuple[int, Box]]], receives: dict[int, list[tuple[int, Box]]],
        here: list[tuple[int, int, Box]], like: Tensor, batches: list[int], fill: float, tag: int, name: str, last: bool,
    ):  # fmt: skip
        self.mail, self.frames, self.fill, self.tag, self.name, self.last = (
            mail,
            frames,
            fill,
            tag,
            name,
            last,
        )
        self.channels, self.dtype, self.itemsize = like.shape[1], like.dtype, like.element_size()
        strip = lambda at, box, origin: Strip(
            at, box.relative_to(origin).slices, (batches[at], self.channels, *box.size)
        )
        self.sends = {
            rank: [strip(at, box, frames[at].held) for at, box in strips]
            for rank, strips in sends.items()
        }
        self.receives = {
            rank: [strip(at, box, frames[at].make) for at, box in strips]
            for rank, strips in receives.items()
        }
        self.here = [
            (strip(a, box, frames[a].held), strip(b, box, frames[b].make)) for a, b, box in here
        ]

    @property
    def waits(self) -> Waits:
        return self.mail.waits

    @property
    def idle(self) -> bool:
        """Whether every tile has all it wants."""
        return not (self.sends or self.receives or self.here) and all(
            frame.make == frame.held for frame in self.frames
        )

    def forward(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """(B, C, *held.size) each -> (B, C, *make.size) each."""
        arriving = self._start(xs, self.sends, self.receives, self.tag)
        ys = [self._framed(x, frame) for x, frame in zip(xs, self.frames)]
        for source, target in self.here:
            _view(ys, target).copy_(_view(xs, source))
        for rank, views in self._finish(arriving, self.receives, ""):
            for strip, part in views:
                _view(ys, strip).copy_(part)
        return ys

    def adjoint(self, gs: Sequence[Tensor]) -> list[Tensor]:
        """Gradients (B, C, *make.size) of what was made -> those of what was there."""
        return self.finish_adjoint(gs, self.start_adjoint(gs))

    def start_adjoint(self, gs: Sequence[Tensor]):
        """Send the gradients of others' cells on their way."""
        return self._start(gs, self.receives, self.sends, self.tag + 1)

    def finish_adjoint(
        self, gs: Sequence[Tensor], arriving, in_place: bool = False
    ) -> list[Tensor]:
        """The gradients once the others' part is added; ``in_place`` into ``gs``, of which the results may then be views."""
        dxs = [self._own_part(g, frame, in_place) for g, frame in zip(gs, self.frames)]
        for source, target in self.here:
            _view(dxs, source).add_(_view(gs, target))
        for rank, views in self._finish(arriving, self.sends, "the gradient of "):
            for strip, part in views:
                _view(dxs, strip).add_(part)
        return dxs

    def _framed(self, x: Tensor, frame: Frame) -> Tensor:
        """Room for what is made, with own cells and padding in place."""
        y = _empty(x, frame.make.size)
        common = frame.owned.intersection(frame.make)
        if not common.pixels:
            return y.fill_(self.fill)
        inside = frame.make.intersection(Box.whole(frame.size)).relative_to(frame.make)
        for dim, (a, b, n) in enumerate(zip(inside.start, inside.stop, frame.make.size)):
            y.narrow(2 + dim, 0, a).fill_(self.fill)
            y.narrow(2 + dim, b, n - b).fill_(self.fill)
        y[(..., *common.relative_to(frame.make).slices)] = x[
            (..., *common.relative_to(frame.held).slices)
        ]
        return y

    def _own_part(self, g: Tensor, frame: Frame, in_place: bool) -> Tensor:
        """The gradient of own cells from their own tile; none of the others that it had."""
        common = frame.owned.intersection(frame.make)
        if in_place and common == frame.held:
            return g[(..., *common.relative_to(frame.make).slices)]
        dx = _empty(g, frame.held.size)
        if common != frame.held:
            dx.zero_()
        if common.pixels:
            dx[(..., *common.relative_to(frame.held).slices)] = g[
                (..., *common.relative_to(frame.make).slices)
            ]
        return dx

    # messages

    def _start(
        self,
        tensors: Sequence[Tensor],
        going: dict[int, list[Strip]],
        coming: dict[int, list[Strip]],
        tag: int,
    ) -> dict[int, Receipt]:
        arriving = {
            rank: self.mail.receive_bytes(self._bytes(strips), rank, tag)
            for rank, strips in coming.items()
        }
        packed = {}
        for rank, strips in going.items():
            packed[rank] = self.mail.room(self._bytes(strips))
            for strip, part in self._parts(packed[rank], strips):
                part.copy_(_view(tensors, strip))
        self.mail.send_all(packed, tag, packed=True)
        return arriving

    def _finish(self, arriving: dict[int, Receipt], strips: dict[int, list[Strip]], what: str):
        for rank, receipt in arriving.items():
            buffer = receipt.tensor(
                f"{what}the borders at layer {self.name} from rank {rank} of the image's tiles",
                "halo",
            )
            here = buffer.to(self.mail.device, non_blocking=True)
            yield rank, self._parts(here, strips[rank])
            self.mail.done(buffer)

    def _bytes(self, strips: list[Strip]) -> int:
        return sum(math.prod(strip.shape) for strip in strips) * self.itemsize

    def _parts(self, flat: Tensor, strips: list[Strip]):
        """Each strip with its part of a message, as a view of the strip's shape."""
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


def _empty(like: Tensor, size: Sequence[int]) -> Tensor:
    """(B, C, *size) in the memory format of ``like``."""
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
    """The tensors of this rank with the cells that they want of others; differentiable."""
    return list(_Exchanged.apply(exchange, *xs))
