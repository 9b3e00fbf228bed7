"""Layers that rearrange cells of a map: strided slices, unfold, pixel shuffle and fold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class Slices(nn.Module):
    """A strided slice of a map: (N, C, *size) -> (N, C, *made).

    Along a dim of n cells it is ``x[..., start : n - behind : step]``.

    Args:
        start, behind: the number of cells that are left out before and after the slice, along each
            dim.
        step: the stride of the slice along each dim.
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
    """A layer that returns the cells of a sliding window as channels, as ``F.unfold`` does.

    Shapes are (N, C, *size) -> (N, C * window, *made). ``window`` is the number of cells of a
    window, and ``made`` the number of windows along each dim. The cells of a channel are adjacent,
    row by row. Cells beyond the map are zero.

    Args:
        kernel, stride, dilation, padding: as in ``F.unfold``, one number for each spatial dim.
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
        self.dilation = tuple(dilation) or (1,) * len(kernel)
        self.padding = tuple(padding) or (0,) * len(kernel)

    def forward(self, x: Tensor) -> Tensor:
        pads = [n for p in reversed(self.padding) for n in (p, p)]
        return self.unfolded(F.pad(x, pads) if any(pads) else x)

    def unfolded(self, x: Tensor) -> Tensor:
        """Return the cells of each sliding window of ``x`` (N, C, *size), an already padded map.

        The result is (N, C * cells of a window, *number of windows along each spatial dim).
        """
        dims = len(self.kernel)
        for dim, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation), 2):
            x = x.unfold(dim, (k - 1) * d + 1, s)[..., ::d]
        x = x.movedim(tuple(range(-dims, 0)), tuple(range(2, 2 + dims)))
        return x.reshape(len(x), x.shape[1] * math.prod(self.kernel), *x.shape[-dims:])

    def extra_repr(self) -> str:
        return (
            f"kernel={self.kernel}, stride={self.stride}, "
            f"dilation={self.dilation}, padding={self.padding}"
        )


class Blocks(nn.Module):
    """A layer that moves channels to new cells, as ``nn.PixelShuffle`` does.

    Shapes are (N, C, *size) -> (N, C / factors, *size * factors). ``nn.PixelShuffle(2)`` from 12
    to 3 channels is ``Blocks(cells=(3, 2, 2), along=(None, 0, 1))``.

    Args:
        cells: the factors into which the number of channels C is split, in order.
        along: for each of these factors the dim of the image that grows by it; None if the factor
            stays in the channels.
    """

    def __init__(self, cells: Sequence[int], along: Sequence[int | None]):
        super().__init__()
        self.cells, self.along = tuple(cells), tuple(along)

    def factors(self, dims: int) -> tuple[int, ...]:
        """Return, for each of the ``dims`` spatial dims of a map, the factor by which it grows."""
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
    """A layer that adds overlapping windows, as ``F.fold`` does.

    Shapes are (N, C * window, *size) -> (N, C, *made). ``window`` is the number of cells of a
    window, and ``size`` the number of windows along each dim. The size ``made`` of the result
    follows from ``size`` and the arguments.

    Args:
        kernel, stride, dilation, padding: as in ``F.fold``, one number for each spatial dim.
        extra: for each spatial dim, the number of cells that the last window leaves uncovered at
            the end of the padded result. These cells are 0.
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
        each = zip(self.padding, self.extra, y.shape[2:])
        return y[(..., *(slice(p, n - p + e) for p, e, n in each))]

    def folded(self, x: Tensor) -> Tensor:
        """Add up overlapping windows, and return the sums with the padding not yet cut off.

        Args:
            x: the windows (N, C * window, *size).

        Returns:
            The sums (N, C, *more). Along each dim, this tensor begins ``padding`` cells before the
                layer's result, and ends with it or after it.
        """
        each = zip(x.shape[2:], self.stride, self.kernel, self.dilation)
        size = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in each]
        y = F.fold(x.flatten(2), size, self.kernel, self.dilation, 0, self.stride)
        more = [max(0, e - p) for e, p in zip(self.extra, self.padding)]
        return F.pad(y, [n for m in reversed(more) for n in (0, m)]) if any(more) else y

    def extra_repr(self) -> str:
        return (
            f"kernel={self.kernel}, stride={self.stride}, "
            f"dilation={self.dilation}, padding={self.padding}"
        )
