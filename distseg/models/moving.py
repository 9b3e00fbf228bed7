"""Layers that move places of a map: strided parts, windows as channels, and channels as places."""

from __future__ import annotations

import math
from typing import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class Slices(nn.Module):
    """Some places of a map, as ``x[..., start : -behind : step]`` takes them: (N, C, *size) -> (N, C, *fewer).

    Args:
        start, behind: along each dim, how many places are left out in front and behind.
        step: of so many places one is taken.
    """

    def __init__(self, start: Sequence[int], behind: Sequence[int], step: Sequence[int]):
        super().__init__()
        self.start, self.behind, self.step = tuple(start), tuple(behind), tuple(step)

    def forward(self, x: Tensor) -> Tensor:
        each = zip(self.start, self.behind, self.step, x.shape[2:])
        return x[(..., *(slice(a, n - b, s) for a, b, s, n in each))]

    def extra_repr(self) -> str:
        return f"start={self.start}, behind={self.behind}, step={self.step}"


class Windows(nn.Module):
    """The places of a window around each place as channels: (N, C, *size) -> (N, C * window, *made), as ``F.unfold`` has it.

    What lies beyond the map is zero. A channel's places lie side by side, row by row.

    Args:
        kernel, stride, dilation, padding: along each dim.
    """

    def __init__(
        self,
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int] = (),
        padding: Sequence[int] = (),
    ):
        super().__init__()
        self.kernel, self.stride = tuple(kernel), tuple(stride)
        self.dilation, self.padding = (
            tuple(dilation) or (1,) * len(kernel),
            tuple(padding) or (0,) * len(kernel),
        )

    def forward(self, x: Tensor) -> Tensor:
        pads = [n for p in reversed(self.padding) for n in (p, p)]
        return self.unfolded(F.pad(x, pads) if any(pads) else x)

    def unfolded(self, x: Tensor) -> Tensor:
        """Return the windows of a map that has its padding."""
        dims = len(self.kernel)
        for dim, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation), 2):
            x = x.unfold(dim, (k - 1) * d + 1, s)[..., ::d]
        x = x.movedim(tuple(range(-dims, 0)), tuple(range(2, 2 + dims)))
        return x.reshape(len(x), x.shape[1] * math.prod(self.kernel), *x.shape[-dims:])

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, stride={self.stride}, dilation={self.dilation}, padding={self.padding}"


class Blocks(nn.Module):
    """Channels as places, as ``nn.PixelShuffle`` makes them: (N, C, *size) -> (N, C / factors, *size * factors).

    Args:
        cells: what the channels are a product of, in order.
        along: of each of these the dim of the image that it becomes a part of; None: it stays.
    """

    def __init__(self, cells: Sequence[int], along: Sequence[int | None]):
        super().__init__()
        self.cells, self.along = tuple(cells), tuple(along)

    def factors(self, dims: int) -> tuple[int, ...]:
        """Return the places that each place becomes, along each dim."""
        return tuple(
            math.prod(n for n, d in zip(self.cells, self.along) if d == dim) for dim in range(dims)
        )

    def forward(self, x: Tensor) -> Tensor:
        size, count = x.shape[2:], len(self.cells)
        order = [1 + i for i, d in enumerate(self.along) if d is None]
        for dim in range(len(size)):
            order += [1 + count + dim, *(1 + i for i, d in enumerate(self.along) if d == dim)]
        y = x.reshape(len(x), *self.cells, *size).permute(0, *order)
        kept = math.prod(n for n, d in zip(self.cells, self.along) if d is None)
        return y.reshape(len(x), kept, *(n * f for n, f in zip(size, self.factors(len(size)))))

    def extra_repr(self) -> str:
        return f"cells={self.cells}, along={self.along}"


class Overlaid(nn.Module):
    """Windows laid over each other, and summed up: (N, C * window, *size) -> (N, C, *made), as ``F.fold`` has it.

    Args:
        kernel, stride, dilation, padding: along each dim.
        extra: places that are made behind, and that no window reaches.
    """

    def __init__(
        self,
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        padding: Sequence[int],
        extra: Sequence[int],
    ):
        super().__init__()
        self.kernel, self.stride, self.dilation, self.padding, self.extra = map(
            tuple, (kernel, stride, dilation, padding, extra)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.folded(x)
        return y[
            (..., *(slice(p, n - p + e) for p, e, n in zip(self.padding, self.extra, y.shape[2:])))
        ]

    def folded(self, x: Tensor) -> Tensor:
        """Return the sums, padding and ``extra`` included."""
        each = zip(x.shape[2:], self.stride, self.kernel, self.dilation)
        size = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in each]
        y = F.fold(x.flatten(2), size, self.kernel, self.dilation, 0, self.stride)
        more = [max(0, e - p) for e, p in zip(self.extra, self.padding)]
        return F.pad(y, [n for m in reversed(more) for n in (0, m)]) if any(more) else y

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, stride={self.stride}, dilation={self.dilation}, padding={self.padding}"
