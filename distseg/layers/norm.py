"""Distributed instance, group and batch norms for images that are split into windows.

Statistics are taken over the pixels that tiles own, never over their halos. For each layer, all
ranks of the tile group combine the statistics in one message. Every pixel of a window, halo pixels
included, is normalised with them. Notation:

    xhat = (x - mean) * r,   r = (var + eps)^(-1/2),   y = xhat * w + b
    N    number of owned pixels of all windows
    g    gradient of the loss with respect to y

The statistics receive gradient from every window, so the backward pass is:

    s1 = sum over all windows of g * w
    s2 = sum over all windows of g * w * xhat           (s1 and s2 travel in one message)
    dx = r * (g * w)                      everywhere
    dx -= r / N * (s1 + xhat * s2)        on owned pixels

This is the adjoint of the forward pass, which takes the mean and variance of the owned pixels and
uses them in every window. For vectors, xhat is replaced by xhat - s0 / N with s0 = sum of xhat,
because rounding makes the mean of xhat differ from 0.

A channel dropout before the norm and a leaky activation after it are computed in the same pass over
memory (:mod:`distseg.runtime.swap_layers` folds them into the norm). The dropout scales each
channel by a mask m, and so scales the mean and the standard deviation. The activation multiplies g
by its slope wherever y is negative. As layers of their own they would cost further passes over
memory, which dominate the cost of a norm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.comm.collective import Alone, add, gather
from distseg.comm.memory_format import channels_last
from distseg.comm.staging import upload
from distseg.layers.context import Context
from distseg.layers.conv import accumulate
from distseg.layers.dropout import KeyedDropout
from distseg.layers.kernels import norm as compiled
from distseg.layers.kernels.choice import kernels, triton_kernels
from distseg.layers.kernels.norm import Affine
from distseg.layers.moments import Moments, by_group, combine, joined, of_channels, stack
from distseg.models.layers import Mean, VectorNorm, register
from distseg.tiling.tile import Box

_ALONE = Alone()
# Up to this many values PyTorch's norm and activation take less time than a call of our kernel.
_SMALL = 1 << 19
NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
STATISTICAL = (*NORMS, Mean)
"""Layers whose output depends on the whole feature map, through its statistics."""


class DistributedNorm(nn.Module):
    """Distributed counterpart of a norm layer, with the same parameter and buffer names.

    :meth:`joint` normalises all windows of this rank together, :meth:`forward` a single window.
    The statistics are :class:`Moments` of several sets of pixels. A *row* is the index of one set:
    each image of the micro-batch has a row of its own, but in batch norm all images share row 0.

    Args:
        norm: the user's layer.
        context: the state of the model's forward pass, with the position of each window.
        stride: the number of image pixels per cell of the layer's feature map, along each dim.
        name: the layer's name in error messages.
    """

    def __init__(self, norm: nn.Module, context: Context, stride: tuple[int, ...], name: str):
        super().__init__()
        self.kind = _kind(norm, name)
        self.context, self.stride, self.name = context, stride, name
        self.eps = getattr(norm, "eps", 0.0)
        self.groups = norm.num_groups if self.kind == "group" else None
        self.momentum = getattr(norm, "momentum", None)
        # User code may hold a weight or bias in a buffer, so `register` takes both kinds.
        register(self, {field: getattr(norm, field, None) for field in ("weight", "bias")})
        self.tracks = tracks(norm)
        for field in RUNNING:
            self.register_buffer(field, getattr(norm, field) if self.tracks else None)
        # Number of values per channel if the input is a vector; None if it is a feature map.
        self.parts = norm.parts if isinstance(norm, VectorNorm) else None
        # Number of images that are stacked in the channels of each image of the batch.
        self.frames = getattr(norm, "frames", 1)
        self.channels = getattr(norm, "num_features", 0)
        self.frozen = False
        # The counterpart of the first call of the same user layer, which keeps the running
        # statistics of all calls; empty if this is the first call. A list, because a module that is
        # stored as an attribute would become a submodule.
        self.keeper: list[DistributedNorm] = []
        self.slope = 1.0
        # The dropout that this norm computes too, or empty. A list, so that it is no submodule.
        self.dropout: list[KeyedDropout] = []
        # Statistics of each call; the key is the number of earlier calls in the same forward pass.
        self.seen: dict[int, list[Moments]] = {}
        self.turn = 0

    def note(self, statistics: Moments) -> None:
        """Store the statistics of one call of the layer until :func:`commit` uses them.

        A user's module may call this layer several times in a forward pass. Statistics of its
        first, second, ... call in a pass are stored separately.

        Args:
            statistics: the moments over all images of the call: count (), mean and m2 (C,).
        """
        self.seen.setdefault(self.turn, []).append(statistics)
        self.turn += self.context.whole

    @property
    def running(self) -> DistributedNorm:
        """The distributed counterpart (this layer or another) that holds the running statistics.

        If user code calls a norm layer several times, each call has a counterpart. The counterpart
        of the first call holds the running statistics for all calls.
        """
        return self.keeper[0] if self.keeper else self

    @property
    def active(self) -> bool:
        """True if the norm computes its statistics from the current images (an active norm).

        False if it uses its running statistics, as batch norm does in evaluation or if it is
        frozen.
        """
        return not (self.tracks and (self.frozen or not self.training))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:  # a vector (N, C) in a user's own module
            return self.joint([x[:, :, None]])[0][:, :, 0]
        return self.joint([x])[0]

    def joint(self, xs: list[Tensor]) -> list[Tensor]:
        """Normalise the layer's input in all windows of this rank, and return the results.

        If the norm is active, all ranks that share statistics must call it together.

        Args:
            xs: the layer's input in each window, (B, C, *size).
        """
        if not (self.active or self.training or torch.is_grad_enabled()):
            return [self.fixed(x) for x in xs]
        if self.parts is not None or self.frames > 1:
            return [
                y.view_as(x)
                for x, y in zip(
                    xs, _JointNorm.apply(self, self.weight, self.bias, *map(self.opened, xs))
                )
            ]
        if self.is_local(xs):
            return [self.local(xs[0])]
        if len(xs) == 1 and self.is_whole(xs[0]):
            return [_WholeNorm.apply(self, self.weight, self.bias, xs[0])]
        return list(_JointNorm.apply(self, self.weight, self.bias, *xs))

    def fixed(self, x: Tensor) -> Tensor:
        """Normalise a window with the running statistics, where no backward pass follows.

        Args:
            x: the layer's input in the window, (B, C, *size).
        """
        if x.numel() <= _SMALL and self.parts is None and self.frames == 1:
            y = F.batch_norm(
                x,
                self.running.running_mean,
                self.running.running_var,
                self.weight,
                self.bias,
                eps=self.eps,
            )
            return y if self.slope == 1 else F.leaky_relu_(y, self.slope)
        of = (
            self.running.running_mean.double(),
            self.running.running_var.double(),
            self.eps,
            self.weight,
            self.bias,
            self.slope,
            None,
        )
        opened = self.opened(x)
        return self.closed(_normalised(opened, [_coefficients(*of).affine] * len(opened)), x)

    def opened(self, x: Tensor) -> Tensor:
        """Reshape the layer's input so that dim 1 holds the channels whose statistics are taken.

        If a vector has several values per channel, these become cells along a spatial dim:
        (N, C * parts, 1, ...) -> (N, C, parts, 1, ...). Images that are stacked in the channels
        become images of the batch: (N, frames * C, *size) -> (N * frames, C, *size). Any other
        ``x`` is returned unchanged.
        """
        if self.frames > 1:
            return x.reshape(-1, self.channels, *x.shape[2:])
        return (
            x if self.parts is None else x.reshape(len(x), self.channels, -1, *(1,) * (x.dim() - 3))
        )

    def closed(self, y: Tensor, x: Tensor) -> Tensor:
        """Undo :meth:`opened`: return ``y``, the norm of ``opened(x)``, in the shape of ``x``.

        If :meth:`opened` changes nothing, ``y`` itself is returned instead of a view. A view of a
        single image would lose the memory format, and later layers would copy the image.
        """
        return y if self.parts is None and self.frames == 1 else y.view_as(x)

    def is_local(self, xs: list[Tensor]) -> bool:
        """Return True if PyTorch's own norm functions are to compute this norm (:meth:`local`).

        These functions are used where neither the compiled kernels nor Triton's are available, for
        instance on a GPU. The norm must be active, and this rank must hold its images whole, in one
        window. Three cases return False all the same: float64, as PyTorch's plain sums lose digits;
        group norm in channels_last, as PyTorch is slow there; and group norm in 16 bits on a GPU,
        as PyTorch returns float32 there under autocast.

        Args:
            xs: the feature maps of this rank's windows.
        """
        x = xs[0]
        if compiled.available(x) or triton_kernels(x) or not self.active:
            return False
        alone = (
            self.comm.size == 1
            and len(xs) == 1
            and self.owned(x, 0).shape == x.shape
            and x[0, 0].numel() > 1
        )
        if not alone or x.dtype == torch.float64:
            return False
        return self.kind != "group" or (
            x.is_contiguous() and not (x.is_cuda and x.dtype != torch.float32)
        )

    def is_whole(self, x: Tensor) -> bool:
        """Return True if one call of a compiled kernel can normalise the images of this rank.

        The norm must be active, and no other rank may hold a part of the images.

        Args:
            x: the feature map of this rank's only window, (B, C, *size).
        """
        return compiled.available(x) and self.active and self.comm.size == 1 and self.has_all(x)

    def has_all(self, x: Tensor) -> bool:
        """Return True if all cells of this rank's only window enter the statistics.

        This holds if the window has no halo, or if each window counts as an image of its own.

        Args:
            x: the feature map of this window, (B, C, *size).
        """
        return self.context.per_window or self.context.owns_all(x.shape[2:])

    def local(self, x: Tensor) -> Tensor:
        """Compute dropout, norm and activation of whole images (B, C, *size) with PyTorch."""
        (mask,) = self.masks([x])
        if mask is not None:
            x = x * mask.to(x.dtype).view(*x.shape[:2], *(1 for _ in x.shape[2:]))
        y = self._local(x)
        return y if self.slope == 1 else F.leaky_relu_(y, self.slope)

    def _local(self, x: Tensor) -> Tensor:
        """Compute the norm of whole images with PyTorch's norm functions.

        In training, store the statistics of a batch norm for the update of its running statistics.
        """
        if self.kind == "group":
            return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        # Batch norm of one image at a time: PyTorch's instance norm is slow in channels_last.
        if self.kind == "instance":
            rows = [
                F.batch_norm(row, None, None, self.weight, self.bias, True, eps=self.eps)
                for row in x.split(1)
            ]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        mean = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
        var = torch.ones_like(mean)
        # With momentum 1 the kernel writes the batch's mean and unbiased variance to `mean`, `var`.
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        if self.tracks and self.training and self.context.tracking:
            count = torch.full((), x.numel() / x.shape[1], dtype=torch.float64, device=x.device)
            self.note(Moments(count, mean.double(), var.double() * (count - 1)))
        return y

    @property
    def comm(self):
        if self.context.per_window:
            return _ALONE
        return self.context.batch_comm if self.kind == "batch" else self.context.norm_comm

    def owned(self, x: Tensor, index: int) -> Tensor:
        """Return a view of the cells of ``x`` that this rank owns and takes statistics of.

        Args:
            x: the feature map of window ``index``.
        """
        return x[(..., *self.own(x, index).slices)]

    def own(self, x: Tensor, index: int) -> Box:
        """Return the box of the cells that this rank owns and over which it takes statistics.

        The box counts from the first cell of ``x``.

        Args:
            x: the feature map of window ``index``.
        """
        return (
            Box.whole(x.shape[2:])
            if self.context.per_window or self.context.whole or self.parts is not None
            else self.context.region(index, self.stride, x.shape[2:]).own
        )

    def times(self, index: int) -> float:
        """Return the weight of window ``index`` in the statistics: 1 if the input is a feature map.

        If the input is a vector of the image, every window holds the whole vector, which must count
        once in all. The weight of a window is then the fraction of the image that it owns. Over
        all windows of the image these weights add up to 1.
        """
        if self.parts is None or self.context.per_window:
            return 1
        if self.context.regions is None:
            place = self.context.places[index]
            return place.tile.pixels / math.prod(place.image)
        region = self.context.regions[index]
        return region.owned.pixels / math.prod(region.size)

    def rows(self, index: int) -> list[int]:
        """Return the row in the statistics of each image of window ``index``.

        The row is the image's position in the micro-batch. In batch norm it is 0, because all
        images share their statistics. If statistics are taken of each window separately, each
        window has rows of its own.
        """
        images = self.context.places[index].images
        if self.context.per_window:
            before = sum(len(place.images) for place in self.context.places[:index])
            return [
                index if self.kind == "batch" else before + b
                for b in range(len(images) * self.frames)
            ]
        if self.frames > 1:  # only a batch norm has frames
            return [0] * len(images) * self.frames
        return [0 if self.kind == "batch" else image for image in images]

    def rows_of(self, x: Tensor, index: int) -> list[int]:
        """Return the row in the statistics of each entry x[b] of the batch ``x``.

        Usually an entry is an image, with the row that :meth:`rows` returns. But a user's module
        that reads whole images may have split each of them into several entries of the batch. In
        such a batch, entry b has row b; in batch norm all entries have row 0.

        Args:
            x: the feature map of window ``index``, (B, C, *size).
        """
        if not self.context.whole:
            return self.rows(index)
        return [0] * len(x) if self.kind == "batch" else list(range(len(x)))

    def kernel_settings(self) -> compiled.Norm:
        """Return this norm's settings as the compiled kernel for whole images takes them.

        The settings include the keys of the dropout masks for the images of this rank's first
        window.
        """
        keys, p = None, 0.0
        if self.training and self.dropout:
            keys, p = self.dropout[0].keys(self.context.places[0]), self.dropout[0].p
        return compiled.Norm(self.groups or 0, self.kind == "batch", self.eps, self.slope, p, keys)

    def masks(self, xs: list[Tensor]) -> list[Tensor | None]:
        """Return, for each window, the mask of the channel dropout that this layer applies first.

        A mask (B, C) float64 is 0 for a dropped channel and 1 / (1 - p) for a kept one. It is None
        if the norm has no dropout or is in evaluation.

        Args:
            xs: the feature map of each window.
        """
        if not (self.training and self.dropout):
            return [None] * len(xs)
        return [
            upload(self.dropout[0].channels_of(place, x.shape[1]), x.device)
            for place, x in zip(self.context.places, xs)
        ]

    def moments(self, x: Tensor, index: int, mask: Tensor | None = None) -> list[Contribution]:
        """Return count, mean and squared deviations (moments) of each channel, for each image.

        The moments are taken over the cells that window number ``index`` owns, without its halo.

        Args:
            x: the feature map of the window.
            mask: the dropout mask of the window (:meth:`masks`).
        """
        owned, times = self.owned(self.opened(x), index), self.times(index)
        parts = [of_channels(owned[b : b + 1]) for b in range(len(owned))]
        if times != 1:
            parts = [Moments(part.count * times, part.mean, part.m2 * times) for part in parts]
        if mask is not None:
            parts = [
                Moments(part.count, part.mean * m, part.m2 * m * m) for part, m in zip(parts, mask)
            ]
        pixels = owned.shape[2:].numel() * times
        return [
            Contribution(row, part, pixels)
            for row, part in zip(self.rows_of(owned, index), parts, strict=True)
        ]

    def statistics(self, parts: list[Contribution]) -> Moments:
        """Combine the moments of this rank's windows with those of the other ranks.

        All ranks that share statistics must call it together.

        Args:
            parts: the contributions of all images of this rank's windows.

        Returns:
            Moments with ``count`` (I,), ``mean`` and ``m2`` (I, K), for I images (I = 1 in batch
                norm) and K channels, or K groups in group norm.
        """
        by_row: dict[int, list[Contribution]] = {}
        for part in parts:
            by_row.setdefault(part.row, []).append(part)
        mine = stack([joined([part.moments for part in by_row[row]]) for row in sorted(by_row)])
        if self.kind == "group":
            mine = by_group(mine, self.groups)
        others = self.comm.size > 1
        home = torch.device("cpu") if others else None
        everyone = (
            combine(mine.unpacked(gather(mine.packed(), self.comm, home))) if others else mine
        )
        # Counts on a GPU are read only if they may be too small, as reading would synchronise.
        least = self._least(by_row, everyone)
        if others and (least < 2 or not everyone.count.is_cuda):
            least = everyone.count.min()
        self._check_count(least)
        everyone = everyone.on(mine.mean.device)
        if self.tracks and self.training and self.context.tracking:
            self.note(combine(everyone))
        return everyone

    def _least(self, by_row: dict[int, list[Contribution]], statistics: Moments) -> float:
        """Return the smallest number of values that this rank adds to one mean and variance.

        This is the number of pixels of the row with the fewest pixels, times the number of channels
        that share a statistic: the channels of a group in group norm, otherwise 1.

        Args:
            by_row: for the index of each row of the statistics, the contributions to it.
            statistics: the combined moments. Only the number of columns of ``mean`` is used.
        """
        channels = (
            next(iter(by_row.values()))[0].moments.mean.shape[-1] // statistics.mean.shape[-1]
        )
        return channels * min(sum(part.pixels for part in parts) for parts in by_row.values())

    def check_map(self, cells: int, channels: int) -> None:
        """Refuse a feature map with fewer than 2 values for each mean and variance.

        Args:
            cells: the number of cells of the whole map.
            channels: the number of channels of the map.

        Raises:
            ValueError: the map is too small. The message names the norm and how to fix it.
        """
        if self.parts is None:
            self._check_count(cells * (channels // self.groups if self.kind == "group" else 1))

    def _check_count(self, count) -> None:
        # The count is an integer up to rounding, since windows add shares of an image (`times`).
        if count < 1.5:
            raise ValueError(
                f"{self.name}: a norm needs at least 2 values per channel, but the feature map of "
                f"this image has {round(float(count))}: take a larger image or crop, or a smaller "
                "model.depth"
            )

    def known(self) -> Moments:
        """Return the running statistics as moments with one row: ``mean`` and ``m2`` (1, C).

        A frozen norm (one that is not active) normalises with these moments. Their ``count`` is 1,
        so that ``m2`` is the variance.
        """
        mean, var = self.running.running_mean, self.running.running_var
        return Moments(
            torch.ones(1, dtype=torch.float64, device=mean.device),
            mean.double().unsqueeze(0),
            var.double().unsqueeze(0),
        )

    def normalise(
        self, x: Tensor, index: int, statistics: Moments, mask: Tensor | None = None
    ) -> Tensor:
        """Apply dropout, norm and activation to window number ``index``, and return the result.

        Args:
            x: the feature map of the window.
            statistics: the moments of all images, as :meth:`statistics` returns them.
            mask: the dropout mask of the window (:meth:`masks`).
        """
        return _normalised(
            x,
            [coefficients.affine for coefficients in self.coefficients(x, index, statistics, mask)],
        )

    def coefficients(
        self, x: Tensor, index: int, statistics: Moments, mask: Tensor | None
    ) -> list[Coefficients]:
        """Return the factors and offsets that normalise each image of window number ``index``.

        Args:
            x: the feature map of the window.
            statistics: the moments of all images, as :meth:`statistics` or :meth:`known` returns
                them.
            mask: the dropout mask of the window (:meth:`masks`), or None.
        """
        rows, channels = self.rows_of(x, index), x.shape[1]
        mean, var = (self.per_channel(v, channels) for v in (statistics.mean, statistics.var))

        def of_row(i: int, mask: Tensor | None) -> Coefficients:
            return _coefficients(
                mean[i], var[i], self.eps, self.weight, self.bias, self.slope, mask
            )

        # Without dropout, images that share statistics share their coefficients too.
        if mask is None:
            each = {i: of_row(i, None) for i in set(rows)}
            return [each[i] for i in rows]
        return [of_row(i, mask[b]) for b, i in enumerate(rows)]

    def per_channel(self, values: Tensor, channels: int) -> Tensor:
        """Repeat the value of each of K groups for its channels: (I, K) -> (I, C).

        Without groups, K is C and the values stay the same.
        """
        return values.repeat_interleave(channels // values.shape[-1], -1)

    def tilt_and_shift(
        self, c: Coefficients, shares: Tensor, times: float = 1
    ) -> tuple[Tensor, Tensor]:
        """Return the input's gradient through the statistics, as two vectors (C,).

        On owned pixels the backward pass adds tilt * (x - pivot) + shift to the input's gradient.
        In the notation of :mod:`distseg.layers.norm`, this sum is -times * r / N * (s1 + (xhat - s0
        / N) * s2). For feature maps s0 is 0.

        Args:
            c: the coefficients with which the image was normalised.
            shares: s1 / N and s2 / N, and for vectors also s0 / N, (2 or 3, C).
            times: weight of each pixel in the statistics (:meth:`times`).

        Returns:
            tilt and shift.
        """
        s1, s2, *s0 = shares
        return -c.hat * c.hat * s2 * times, -c.hat * (s1 + (c.offset - sum(s0)) * s2) * times

    def pending(self, statistics: Moments) -> Pending:
        """Return a :class:`Pending`, which normalises windows one after another, as in streaming.

        Args:
            statistics: the moments of all windows, as :meth:`statistics` returns them.
        """
        return Pending(self, statistics)


class Contribution(NamedTuple):
    """Contribution of one image of a window to the statistics of a norm.

    Attributes:
        row: the row of the statistics to which the moments belong (:meth:`DistributedNorm.rows`).
        moments: the moments of the image's channels over the pixels that the window owns.
        pixels: the number of pixels that count. For a feature map, the pixels that the window owns.
            For a vector of the image, the number of its values per channel times the window's
            weight (:meth:`DistributedNorm.times`).
    """

    row: int
    moments: Moments
    pixels: float


class Coefficients(NamedTuple):
    """Coefficients with which a norm layer normalises one image; each is a vector (C,) or a number.

    Here x is the layer's input before the folded dropout, xhat the normalised input without weight
    and bias, and y the layer's result. The coefficients include the image's dropout mask.

    Attributes:
        affine: the affine map and activation that compute y from x.
        hat, offset: numbers for xhat = hat * (x - affine.pivot) + offset.
    """

    affine: Affine
    hat: Tensor
    offset: Tensor | float


def _coefficients(
    mean, var, eps: float, weight, bias, slope: float, mask: Tensor | None
) -> Coefficients:
    """Return the coefficients with which a norm layer normalises one image.

    Args:
        mean, var: statistics of each channel, (C,) float64.
        eps: a small number, added to the variance.
        weight, bias: the norm's parameters; None without them.
        slope: the slope of the activation below 0.
        mask: the dropout mask of the image's channels, (C,); None without dropout.
    """
    r = (var + eps).rsqrt()
    w = torch.ones_like(r) if weight is None else weight.detach().double()
    b = torch.zeros_like(r) if bias is None else bias.detach().double()
    if mask is None:
        return Coefficients(Affine(mean, r * w, b, slope), r, 0.0)
    # The norm's input is mask * x, and mask * x - mean = mask * (x - mean / mask). A dropped
    # channel has mask 0: its input is 0 everywhere, so xhat is the constant -mean * r.
    kept = mask > 0
    pivot = torch.where(kept, mean / mask.where(kept, 1), 0)
    offset = torch.where(kept, 0, -mean * r)
    return Coefficients(Affine(pivot, mask * r * w, b + offset * w, slope), mask * r, offset)


class _WholeNorm(torch.autograd.Function):
    """Autograd function that normalises whole images with one kernel call forward, one backward.

    It replaces :class:`_JointNorm` if one rank holds all images whole.
    """

    @staticmethod
    def forward(ctx, norm: DistributedNorm, weight, bias, x):
        found = norm.kernel_settings()
        count = (
            x.shape[2:].numel()
            * (len(x) if found.joint else 1)
            * (x.shape[1] // found.groups if found.groups else 1)
        )
        norm._check_count(count)
        y, statistics, ctx.numbers = compiled.norm_forward(x, found, weight, bias)
        if norm.tracks and norm.training and norm.context.tracking:
            norm.note(Moments(_number(count), *statistics[:, 0]))
        ctx.norm = found
        ctx.save_for_backward(weight, x)
        return y

    @staticmethod
    def backward(ctx, g):
        weight, x = ctx.saved_tensors
        dx, *gradients = compiled.norm_backward(g, x, ctx.norm, weight, ctx.numbers)
        return None, *(None if weight is None else d.to(weight.dtype) for d in gradients), dx


@lru_cache(1024)
def _number(count: int) -> Tensor:
    """Return a count as a float64 tensor of shape ().

    The tensor is cached, so the caller must not write to it.
    """
    return torch.tensor(count, dtype=torch.float64)


class _JointNorm(torch.autograd.Function):
    """Autograd function that normalises all windows of a rank together.

    For an active norm (one that uses the statistics of the current images), the statistics and
    their gradient are combined over all ranks that share them. Any other norm uses its running
    statistics.
    """

    @staticmethod
    def forward(ctx, norm: DistributedNorm, weight, bias, *xs):
        masks = norm.masks(xs)
        everyone = (
            norm.statistics(
                [part for j, x in enumerate(xs) for part in norm.moments(x, j, masks[j])]
            )
            if norm.active
            else norm.known()
        )
        ctx.norm, ctx.active, ctx.pixels = norm, norm.active, everyone.count
        ctx.rows, ctx.own = (
            [norm.rows_of(x, j) for j, x in enumerate(xs)],
            [norm.own(x, j) for j, x in enumerate(xs)] if norm.active else None,
        )
        ctx.times = [norm.times(j) for j in range(len(xs))]
        ctx.coefficients = [norm.coefficients(x, j, everyone, masks[j]) for j, x in enumerate(xs)]
        ctx.save_for_backward(weight, *xs)
        return tuple(
            _normalised(x, [c.affine for c in found]) for x, found in zip(xs, ctx.coefficients)
        )

    @staticmethod
    def backward(ctx, *gs):
        weight, *xs = ctx.saved_tensors
        images = [(j, b, i) for j, rows in enumerate(ctx.rows) for b, i in enumerate(rows)]
        dweight = torch.zeros(
            len(ctx.pixels), xs[0].shape[1], dtype=torch.float64, device=xs[0].device
        )
        dbias = torch.zeros_like(dweight)
        if ctx.active or any(ctx.needs_input_grad[1:3]):
            for j, b, i in images:
                _collect(
                    dweight[i], dbias[i], gs[j][b : b + 1], xs[j][b : b + 1], ctx.coefficients[j][b]
                )
        centre = None if ctx.norm.parts is None else torch.zeros_like(dweight)
        if ctx.active and centre is not None:
            for j, b, i in images:
                centre[i] += _centre(xs[j][b : b + 1], ctx.coefficients[j][b], ctx.times[j])
        shares = (
            _shares(ctx.norm, weight, dweight, dbias, centre, ctx.pixels) if ctx.active else None
        )
        dxs = [torch.empty_like(x) for x in xs]
        for j, b, i in images:
            c = ctx.coefficients[j][b]
            tilt, shift = (
                ctx.norm.tilt_and_shift(c, shares[:, i], ctx.times[j])
                if ctx.active
                else (torch.zeros_like(c.hat),) * 2
            )
            own = ctx.own[j] if ctx.active else _nowhere(xs[j])
            kernels(xs[j]).gradient(
                gs[j][b : b + 1],
                xs[j][b : b + 1],
                c.affine,
                tilt,
                shift,
                own,
                out=dxs[j][b : b + 1],
            )
        return (
            None,
            *(None if weight is None else d.sum(0).to(weight.dtype) for d in (dweight, dbias)),
            *dxs,
        )


class Pending:
    """Norm with the statistics of the current images, for windows computed one after another.

    First, call the object with each window to normalise it. Then run the windows' backward passes.
    These passes treat the statistics as constants, and add up in this object the sums from which
    the gradient of the statistics is computed. Then call :meth:`finalize` once. Finally, call
    :meth:`with_statistics_grad` for each window, to add the missing part of its gradient.

    Args:
        norm: the norm layer.
        statistics: the moments of all windows (:meth:`DistributedNorm.statistics`).
    """

    def __init__(self, norm: DistributedNorm, statistics: Moments):
        self.norm, self.statistics = norm, statistics
        self.dweight = self.dbias = self.centre = None

    def __call__(self, x: Tensor, index: int, mask: Tensor | None, share: float) -> Tensor:
        """Return window ``index``, normalised.

        Its backward pass returns the gradient for constant statistics. The gradient through the
        statistics follows in :meth:`with_statistics_grad`.

        Args:
            x: the feature map of the window.
            mask: the dropout mask of the window (:meth:`DistributedNorm.masks`).
            share: the fraction of the image that counts as this window's part, used for vectors
                only. The fractions of all windows of an image add up to 1, even if windows overlap.
        """
        opened = self.norm.opened(x)
        self.channels = opened.shape[1]
        y = _PendingNorm.apply(
            self,
            self.norm.coefficients(opened, index, self.statistics, mask),
            self.norm.rows_of(opened, index),
            share,
            opened,
        )
        return self.norm.closed(y, x)

    def collect(
        self, row: int, g: Tensor, x: Tensor, coefficients: Coefficients, times: float
    ) -> None:
        """Add one image's part of the gradients of weight, bias and statistics to this object.

        Args:
            row: the image's row in the statistics (:meth:`DistributedNorm.rows`).
            g: the gradient of the norm's result, (1, C, *size).
            x: the norm's input, (1, C, *size).
            coefficients: the coefficients with which the image was normalised.
            times: how often each value of the image counts in the statistics: 1 for a feature map;
                for a vector of the image, which each window holds whole, the window's share.
        """
        if self.dweight is None:
            self._begin(x.device)
        _collect(self.dweight[row], self.dbias[row], g, x, coefficients)
        if self.centre is not None:
            self.centre[row] += _centre(x, coefficients, times)

    def _begin(self, device: torch.device) -> None:
        self.dweight, self.dbias = torch.zeros(
            2, len(self.statistics.count), self.channels, dtype=torch.float64, device=device
        )
        self.centre = None if self.norm.parts is None else torch.zeros_like(self.dweight)

    def finalize(self) -> None:
        """Complete the norm's gradients, after the backward passes of all windows of this rank.

        The gradients of weight and bias are added to their ``grad``. The sums for the gradient of
        the statistics are added over all ranks that share statistics, which must call this method
        together.
        """
        norm = self.norm
        # No window had a backward pass, for instance because the result was detached.
        if self.dweight is None:
            self._begin(self.statistics.mean.device)
        self.shares = _shares(
            norm, norm.weight, self.dweight, self.dbias, self.centre, self.statistics.count
        )
        gradients = [
            d.sum(0).to(p.dtype) if p is not None and p.requires_grad else None
            for p, d in ((norm.weight, self.dweight), (norm.bias, self.dbias))
        ]
        accumulate((norm.weight, norm.bias), gradients)

    def with_statistics_grad(
        self, g: Tensor, x: Tensor, own: Box, index: int, mask: Tensor | None
    ) -> Tensor:
        """Return the gradient of a window's input: ``g`` plus the gradient through the statistics.

        Call :meth:`finalize` first.

        Args:
            g: the gradient of the input for constant statistics, from the window's backward pass.
            x: the norm's input in window ``index``.
            own: the box of the owned cells of ``x``.
            mask: the dropout mask of the window (:meth:`DistributedNorm.masks`).
        """
        form, g, x = x, self.norm.opened(g), self.norm.opened(x)
        own, dx = own if self.norm.parts is None else Box.whole(x.shape[2:]), torch.empty_like(x)
        for b, (i, c) in enumerate(
            zip(
                self.norm.rows_of(x, index),
                self.norm.coefficients(x, index, self.statistics, mask),
                strict=True,
            )
        ):
            tilt, shift = self.norm.tilt_and_shift(c, self.shares[:, i], self.norm.times(index))
            as_is = Affine(c.affine.pivot, torch.ones_like(c.hat), torch.zeros_like(c.hat))
            kernels(x).gradient(
                g[b : b + 1], x[b : b + 1], as_is, tilt, shift, own, out=dx[b : b + 1]
            )
        return self.norm.closed(dx, form)


class _PendingNorm(torch.autograd.Function):
    """Autograd function that normalises one window for a :class:`Pending`.

    Its backward pass returns the gradient of the window's input for constant statistics. It also
    adds the window's sums of g and g * xhat to the :class:`Pending`, where g is the gradient of the
    result and xhat the normalised input without weight and bias. From the sums of all windows, the
    :class:`Pending` later computes the gradient through the statistics.
    """

    @staticmethod
    def forward(
        ctx, pending: Pending, coefficients: list[Coefficients], rows: list[int], times: float, x
    ):
        ctx.pending, ctx.coefficients, ctx.rows, ctx.times = pending, coefficients, rows, times
        ctx.save_for_backward(x)
        return _normalised(x, [c.affine for c in coefficients])

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        for b, (i, c) in enumerate(zip(ctx.rows, ctx.coefficients)):
            image = g[b : b + 1], x[b : b + 1]
            none = torch.zeros_like(c.hat)
            ctx.pending.collect(i, *image, c, ctx.times)
            kernels(x).gradient(*image, c.affine, none, none, _nowhere(x), out=dx[b : b + 1])
        return None, None, None, None, dx


def _collect(dweight: Tensor, dbias: Tensor, g: Tensor, x: Tensor, c: Coefficients) -> None:
    """Add an image's part of the gradients of weight and bias to ``dweight`` and ``dbias``.

    Args:
        dweight, dbias: (C,) float64, changed in place.
        g: the gradient of the norm's result, (1, C, *size).
        x: the norm's input, (1, C, *size).
        c: the coefficients with which the image was normalised.
    """
    total, weighted = kernels(x).sums(g, x, c.affine)
    dbias += total
    dweight += c.hat * weighted + c.offset * total


def _centre(x: Tensor, c: Coefficients, times: float) -> Tensor:
    """Return the sum of an image's normalised values xhat, multiplied by ``times``, (C,).

    The sum over all images would be 0 if the mean were not rounded. But the vectors of a batch can
    differ so little that the rounding error matters: to take the sum as 0 would change a gradient
    whose terms nearly cancel.

    Args:
        x: the norm's input, (1, C, *size).
        c: the coefficients with which the image was normalised.
        times: how often each value of the image counts in the statistics.
    """
    return (
        (x.double() - c.affine.pivot.view(1, -1, *(1 for _ in x.shape[2:])))
        .transpose(0, 1)
        .flatten(1)
        .sum(1)
        * c.hat
        * times
    )


def _shares(
    norm: DistributedNorm,
    weight,
    dweight: Tensor,
    dbias: Tensor,
    centre: Tensor | None,
    pixels: Tensor,
) -> Tensor:
    """Return s1 / N and s2 / N, from which the gradient through the statistics is computed.

    N is the number of values of a channel, or of a group in group norm. Over these values,
    s1 = sum g * w and s2 = sum g * w * xhat; for vectors also s0 = sum xhat. The sums run over all
    ranks that share statistics, which must call this function together.

    Args:
        norm: the norm layer.
        weight: its weight w (C,), or None if it has none.
        dweight, dbias: this rank's sums of g * xhat and of g, for each of the I rows of the
            statistics, (I, C).
        centre: this rank's part of s0, (I, C); None for feature maps.
        pixels: N for each row, (I,).

    Returns:
        s1 / N and s2 / N, (2, I, C). For vectors s1 / N, s2 / N and s0 / N, (3, I, C).
    """
    channels = dweight.shape[-1]
    sums = torch.stack((dbias, dweight))  # (2, I, C)
    sums = sums if weight is None else sums * weight.double()
    sums = sums if centre is None else torch.cat((sums, centre.unsqueeze(0)))
    if norm.kind == "group":
        sums = sums.unflatten(-1, (norm.groups, -1)).sum(-1)
    return norm.per_channel(add(sums, norm.comm) / pixels.unsqueeze(-1), channels)


def _nowhere(x: Tensor) -> Box:
    """Return an empty box with the number of spatial dims of ``x``.

    A kernel that gets this box as the box of owned pixels adds no gradient through the statistics.
    """
    return Box.whole((0,) * (x.dim() - 2))


def _normalised(x: Tensor, affines: list[Affine]) -> Tensor:
    """Apply to each image x[b] of the batch x (B, C, *size) its own affine map ``affines[b]``."""
    y = torch.empty_like(x)
    if len(affines) > 1 and all(affine is affines[0] for affine in affines):
        # Images with equal coefficients are computed as one image with B times the channels.
        if x.is_contiguous():
            pivot, scale, shift, slope = affines[0]
            many = Affine(*(v.repeat(len(x)) for v in (pivot, scale, shift)), slope)
            kernels(x).forward(x.flatten(0, 1)[None], many, out=y.flatten(0, 1)[None])
            return y
        # In channels_last they are computed as one image with B times the rows.
        if x.is_contiguous(memory_format=channels_last(x.dim())):
            kernels(x).forward(_stacked_rows(x), affines[0], out=_stacked_rows(y))
            return y
    for b, affine in enumerate(affines):
        kernels(x).forward(x[b : b + 1], affine, out=y[b : b + 1])
    return y


def _stacked_rows(x: Tensor) -> Tensor:
    """Return a view of images in channels_last as one image: (B, C, H, W) -> (1, C, B * H, W)."""
    return x.movedim(1, -1).flatten(0, 1).movedim(-1, 0)[None]


def active_norms(layers: Iterable[nn.Module], frozen: bool) -> list[int]:
    """Return the indices of the layers that take statistics of the images in training.

    Args:
        layers: all layers of the network; the first one has index 0.
        frozen: True if norms use their running statistics. Then only means (:class:`Mean` and its
            subclasses) take statistics.
    """
    return [
        position
        for position, layer in enumerate(layers)
        if isinstance(layer, Mean) or (isinstance(layer, NORMS) and not frozen)
    ]


def kind_of(norm: nn.Module) -> str:
    """Return the kind of a norm or mean layer: batch, group, instance or mean."""
    if isinstance(norm, Mean):
        return "mean"
    if isinstance(norm, nn.GroupNorm):
        return "group"
    return "instance" if isinstance(norm, nn.modules.instancenorm._InstanceNorm) else "batch"


def tracks(norm: nn.Module) -> bool:
    """Return True if distseg updates running statistics of a norm layer.

    It does so for batch norm with ``track_running_stats``.
    """
    return kind_of(norm) == "batch" and norm.track_running_stats


def _kind(norm: nn.Module, name: str) -> str:
    kind = kind_of(norm)
    if kind == "instance" and norm.track_running_stats:
        raise ValueError(
            f"{name}: instance norm with running statistics is not supported: set "
            "track_running_stats=False"
        )
    if kind == "batch" and norm.momentum is None:
        raise ValueError(
            f"{name}: batch norm with a cumulative average (momentum=None) is not supported: give "
            "it a momentum, such as 0.1"
        )
    return kind


def commit(norms: list[DistributedNorm], groups_comm, unbiased: bool = False) -> None:
    """Update the running statistics of all norm layers, once for this optimizer step.

    The new values are the mean and variance of all images of the step, over micro-batches and
    sample groups, from the statistics that :meth:`DistributedNorm.note` has stored. (This is the
    deferred batch norm of torchgpipe.) A layer that is called several times in a pass makes one
    update for each call. All ranks of ``groups_comm`` must call this function together. They
    exchange the statistics of all layers in one message.

    Args:
        norms: the counterparts of all norm layers.
        groups_comm: the ranks with the same tile as this rank, one in each sample group.
        unbiased: True to use the variance m2 / (n - 1), as PyTorch's layers do, instead of m2 / n.
    """
    turns = [(n, n.seen[turn]) for n in norms for turn in sorted(n.seen)]
    if not turns:
        return
    seen = [joined(each) for _, each in turns]
    if groups_comm.size > 1:
        seen = _over_groups(seen, groups_comm)
    counts = [(m.count - 1).clamp(min=1) if unbiased else m.count for m in seen]
    variances = torch._foreach_div([m.m2 for m in seen], counts)
    _average([n for n, _ in turns], [m.mean for m in seen], variances)
    for n, _ in turns:
        n.seen.clear()
    for n in norms:
        # A checkpoint stores these buffers for each call of the layer, so each call has a copy.
        for field in RUNNING if n.keeper else ():
            n._buffers[field].copy_(n.running._buffers[field])


def _over_groups(seen: list[Moments], groups_comm) -> list[Moments]:
    """Combine the moments of each layer over the images of all sample groups, in one message.

    All ranks of ``groups_comm`` must call it together.

    Args:
        seen: the moments of each layer, from this rank's sample group.
        groups_comm: the ranks with the same tile as this rank, one in each sample group.
    """
    # The layers of a pipeline in one process lie on several devices.
    home = seen[0].count.device
    channels = [m.mean.numel() for m in seen]
    counts, means, m2s = (
        torch.cat([x.to(home).expand(c) for x, c in zip(tensors, channels)])
        for tensors in zip(*seen)
    )
    # The channels of all layers become one list, in which each channel has its own count.
    mine = Moments(counts, means.unsqueeze(-1), m2s.unsqueeze(-1))
    total = combine(mine.unpacked(gather(mine.packed(), groups_comm)))
    parts = (x.flatten().split(channels) for x in total)
    return [Moments(count[0], mean, m2) for count, mean, m2 in zip(*parts)]


def _average(
    norms: Sequence[DistributedNorm], means: Sequence[Tensor], variances: Sequence[Tensor]
) -> None:
    """Update the running mean and variance of each norm layer with those of a step's images.

    Norms that share running statistics are updated one after another, in the given order. All other
    norms are updated together.

    Args:
        norms: the layers. A layer that had several calls may occur several times.
        means, variances: for each entry of ``norms``, the mean and variance of the step's images,
            (C,).
    """
    times: Counter[DistributedNorm] = Counter()
    groups: dict[tuple, list[int]] = {}
    for number, norm in enumerate(norms):
        mean = norm.running.running_mean
        key = times[norm.running], norm.momentum, mean.device, mean.dtype
        groups.setdefault(key, []).append(number)
        times[norm.running] += 1
    for (_, momentum, *kind), those in sorted(groups.items(), key=lambda item: item[0][0]):
        layers = [norms[number].running for number in those]
        for field, values in (("running_mean", means), ("running_var", variances)):
            torch._foreach_lerp_(
                [getattr(layer, field) for layer in layers],
                [values[number].to(*kind) for number in those],
                momentum,
            )
        torch._foreach_add_([layer.num_batches_tracked for layer in layers], 1)
