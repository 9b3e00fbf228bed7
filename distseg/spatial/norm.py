"""Instance, group and batch norm of images that lie in pieces: the twins of PyTorch's layers.

Statistics are taken over the pixels that tiles own, never their halos, and combined over the tile group in one packed
message a layer. Every pixel of a window, its halo too, is normalised with them. So with y = (x - mean) * r * w + b,
r = (var + eps)^(-1/2), N owned pixels in all and g the gradient of y, a statistic collects gradient from every window:

    s1 = sum over all windows of g * w,    s2 = sum over all windows of g * w * xhat        (one message)
    dx = r * (g * w)  everywhere,          dx -= r / N * (s1 + xhat * s2)  on owned pixels

which is the adjoint of 'mean and variance of the owned pixels, handed to every window'.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.comm.collective import Alone, add, gather
from distseg.spatial.context import Context
from distseg.spatial.moments import Moments, by_group, combine, of_channels, rows_of_chunk, stack

_ALONE = Alone()
NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)


class DistributedNorm(nn.Module):
    """The twin of a norm layer, with the same parameters and buffers under the same names.

    ``joint`` takes the windows that this rank holds together, ``forward`` one window. ``stride`` is the layer's
    cumulative stride in pixels per dim.
    """

    def __init__(self, norm: nn.Module, context: Context, stride: tuple[int, ...], name: str):
        super().__init__()
        self.kind = _kind(norm, name)
        self.context, self.stride, self.name = context, stride, name
        self.eps = norm.eps
        self.groups = norm.num_groups if self.kind == "group" else None
        self.momentum = getattr(norm, "momentum", None)
        for field in ("weight", "bias"):
            self.register_parameter(field, getattr(norm, field, None))
        self.tracks = self.kind == "batch" and norm.track_running_stats
        for field in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(field, getattr(norm, field) if self.tracks else None)
        self.frozen = False
        self.seen: list[Moments] = []

    @property
    def live(self) -> bool:
        """Whether the output depends on statistics of the images in hand."""
        return not (self.tracks and (self.frozen or not self.training))

    def forward(self, x: Tensor) -> Tensor:
        return self.joint([x])[0]

    def joint(self, xs: list[Tensor]) -> list[Tensor]:
        """The same windows normalised: a list of (B, C, *size), one each place of the context."""
        if not self.live:
            return [F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps) for x in xs]
        if self.is_local(xs):
            return [self.local(xs[0])]
        return list(_JointNorm.apply(self, self.weight, self.bias, *xs))

    def is_local(self, xs: list[Tensor]) -> bool:
        """Whether PyTorch's own kernel does: one rank, whole images, one tensor.

        Not in float64, where its plain sums lose digits, nor for group norm in channels_last, where it is slower.
        """
        x = xs[0]
        alone = self.comm.size == 1 and len(xs) == 1 and self.owned(x, 0).shape == x.shape and x[0, 0].numel() > 1
        return alone and x.dtype != torch.float64 and (self.kind != "group" or x.is_contiguous())

    def local(self, x: Tensor) -> Tensor:
        """The norm of whole images (B, C, *size) by PyTorch."""
        if self.kind == "group":
            return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        if self.kind == "instance":  # an image alone in a batch, as PyTorch's instance norm is slow in channels_last
            rows = [F.batch_norm(row, None, None, self.weight, self.bias, True, eps=self.eps) for row in x.split(1)]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        mean = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
        var = torch.ones_like(mean)
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)  # momentum 1: mean and unbiased variance of the batch
        if self.tracks and self.training and self.context.tracking:
            count = torch.tensor(x.numel() / x.shape[1], dtype=torch.float64, device=x.device)
            self.seen.append(Moments(count, mean.double(), var.double() * (count - 1)))
        return y

    @property
    def comm(self):
        if self.context.per_window:
            return _ALONE
        return self.context.batch_comm if self.kind == "batch" else self.context.norm_comm

    def owned(self, x: Tensor, index: int) -> Tensor:
        """The view of ``x`` on the cells that statistics are taken over: those that this rank owns."""
        if self.context.per_window:
            return x
        return x[(..., *self.context.region(index, self.stride).own.slices)]

    def rows(self, index: int) -> list[int]:
        """The row of the statistics for each image of window ``index``."""
        images = self.context.places[index].images
        if self.context.per_window:
            before = sum(len(place.images) for place in self.context.places[:index])
            return [index if self.kind == "batch" else before + b for b in range(len(images))]
        return [0 if self.kind == "batch" else image for image in images]

    def moments(self, x: Tensor, index: int) -> list[tuple[int, Moments]]:
        """Moments of the channels of window ``index``, with the row of the statistics each belongs to."""
        owned = self.owned(x, index)
        return [(row, of_channels(owned[b : b + 1])) for b, row in enumerate(self.rows(index))]

    def statistics(self, parts: list[tuple[int, Moments]]) -> Moments:
        """From the moments of all windows of this rank those over the tile group: (I, K) with I images (batch: 1) and K channels or groups."""
        by_row: dict[int, list[Moments]] = {}
        for row, part in parts:
            by_row.setdefault(row, []).append(part)
        mine = stack([combine(stack(by_row[row])) for row in sorted(by_row)])
        if self.kind == "group":
            mine = by_group(mine, self.groups)
        everyone = combine(mine.unpacked(gather(mine.packed(), self.comm)))
        if everyone.count.min() < 2:
            raise ValueError(
                f"{self.name}: a norm needs at least 2 values a channel, but the feature map of this image has {int(everyone.count.min())}: "
                "take a larger image or crop, or a smaller model.depth"
            )
        if self.tracks and self.training and self.context.tracking:
            self.seen.append(combine(everyone))
        return everyone

    def normalise(self, x: Tensor, index: int, statistics: Moments) -> Tensor:
        """Window ``index`` normalised with these statistics."""
        mean, var = self.mean_and_var(x, statistics)
        rows = enumerate(self.rows(index))
        ys = [torch.native_batch_norm(x[b : b + 1], self.weight, self.bias, mean[i], var[i], False, 0.0, self.eps)[0] for b, i in rows]
        return ys[0] if len(ys) == 1 else torch.cat(ys)

    def mean_and_var(self, x: Tensor, statistics: Moments) -> tuple[Tensor, Tensor]:
        """(I, C) each, in the precision that the kernels take beside ``x``."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return tuple(self.per_channel(v, x.shape[1]).to(dtype) for v in (statistics.mean, statistics.var))

    def per_channel(self, values: Tensor, channels: int) -> Tensor:
        """(I, K) -> (I, C)."""
        return values.repeat_interleave(channels // values.shape[-1], -1)


class _JointNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, norm: DistributedNorm, weight, bias, *xs):
        everyone = norm.statistics([part for j, x in enumerate(xs) for part in norm.moments(x, j)])
        ctx.norm, ctx.where, ctx.pixels = norm, (norm.context.places, norm.context.regions), everyone.count
        ctx.save_for_backward(weight, *norm.mean_and_var(xs[0], everyone), *xs)
        return tuple(norm.normalise(x, j, everyone) for j, x in enumerate(xs))

    @staticmethod
    def backward(ctx, *gs):
        norm = ctx.norm
        norm.context.places, norm.context.regions = ctx.where
        weight, mean, var, *xs = ctx.saved_tensors
        scale = torch.ones_like(mean[0]) if weight is None else weight
        dxs = []
        dweight, dbias = torch.zeros_like(mean, dtype=torch.float64), torch.zeros_like(mean, dtype=torch.float64)
        for j, (x, g) in enumerate(zip(xs, gs)):
            rows = []
            for b, i in enumerate(norm.rows(j)):
                dx, dw, db = _local_backward(g[b : b + 1], x[b : b + 1], scale, mean[i], var[i], norm.eps)
                rows.append(dx)
                dweight[i] += dw
                dbias[i] += db
            dxs.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        slope, offset = _correction(norm, scale, mean, var, dweight, dbias, ctx.pixels)
        shape = (1, -1, *(1 for _ in norm.stride))
        for j, (x, dx) in enumerate(zip(xs, dxs)):
            x, dx = norm.owned(x, j), norm.owned(dx, j)
            for b, i in enumerate(norm.rows(j)):
                a, c = slope[i].view(shape).to(dx.dtype), offset[i].view(shape).to(dx.dtype)
                dx[b : b + 1].addcmul_(x[b : b + 1], a).add_(c)
        return None, *(None if weight is None else d.sum(0).to(weight.dtype) for d in (dweight, dbias)), *dxs


def _local_backward(g, x, scale, mean, var, eps) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias with the statistics held fixed; in chunks where the last digits count."""
    rows = rows_of_chunk(x) if x.dtype == torch.float64 else x.shape[2]
    kernel = torch.ops.aten.native_batch_norm_backward
    parts = [kernel(*gx, scale, mean, var, None, None, False, eps, [True, True, True]) for gx in zip(g.split(rows, 2), x.split(rows, 2))]
    if len(parts) == 1:
        return parts[0]
    dxs, dweights, dbiases = zip(*parts)
    return torch.cat(dxs, 2), torch.stack(dweights).sum(0), torch.stack(dbiases).sum(0)


def _correction(norm, scale, mean, var, dweight, dbias, pixels) -> tuple[Tensor, Tensor]:
    """(slope, offset), each (I, C), of what owned pixels lose: r / N * (s1 + xhat * s2) = -(slope * x + offset)."""
    channels = mean.shape[-1]
    sums = torch.stack((dbias, dweight)) * scale  # (2, I, C)
    if norm.kind == "group":
        sums = sums.unflatten(-1, (norm.groups, -1)).sum(-1)
    s1, s2 = add(sums, norm.comm) / pixels.unsqueeze(-1)
    s1, s2 = norm.per_channel(s1, channels), norm.per_channel(s2, channels)
    r = (var.double() + norm.eps).rsqrt()
    return -r * r * s2, r * (r * mean * s2 - s1)


def _kind(norm: nn.Module, name: str) -> str:
    if isinstance(norm, nn.GroupNorm):
        return "group"
    if isinstance(norm, nn.modules.instancenorm._InstanceNorm):
        if norm.track_running_stats:
            raise ValueError(f"{name}: instance norm with running statistics is not supported: set track_running_stats=False")
        return "instance"
    if norm.momentum is None:
        raise ValueError(f"{name}: batch norm with a cumulative average (momentum=None) is not supported: give it a momentum, such as 0.1")
    return "batch"


def commit(norms: list[DistributedNorm], groups_comm) -> None:
    """Update running statistics from all that was seen since the last time, once an optimizer step.

    As torchgpipe's deferred batch norm: the mean and biased variance of all images of the step together, over
    micro-batches and sample groups, enter the running averages once. One message for all layers.
    """
    norms = [n for n in norms if n.seen]
    if not norms:
        return
    seen = [combine(stack(n.seen)) for n in norms]
    home = seen[0].count.device  # the layers of a pipeline in one process lie on several
    everyone = gather(torch.cat([m.packed().to(home) for m in seen]), groups_comm)
    for n, m, messages in zip(norms, seen, everyone.split([m.packed().numel() for m in seen], 1)):
        total = combine(m.unpacked(messages))
        n.running_mean.lerp_(total.mean.to(n.running_mean), n.momentum)
        n.running_var.lerp_(total.var.to(n.running_var), n.momentum)
        n.num_batches_tracked += 1
        n.seen.clear()
