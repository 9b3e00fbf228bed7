"""A convolution and the exchange before it as one: gradients of borders travel while the weight's gradient is computed.

The backward pass of a convolution is two computations of equal size, of which only the input's gradient is awaited by
other ranks. So it comes first and its borders are sent. The weight's is computed while this rank would wait, for borders or
for the sums of the norm before, and goes right into the parameter's ``grad``.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor, nn

from distseg.comm.collective import later
from distseg.comm.halo import HaloExchange
from distseg.geometry.layout import Part
from distseg.geometry.tile import Box
from distseg.memory_format import like_format


class _Call:
    """Arguments of PyTorch's convolution but for tensors."""

    def __init__(self, conv: nn.Module, frame: Box, part: Part):
        # What a frame lacks lies beyond the image, the same on both sides of a dim (see local.framed).
        self.padding = [a - r for a, r in zip(frame.start, part.raw.start)]
        self.stride, self.dilation, self.groups = conv.stride, conv.dilation, conv.groups
        self.none = [0] * len(self.padding)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, self.none, self.groups)

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, bias: bool, mask: list[bool]):
        sizes = [weight.shape[0]] if bias else None
        return torch.ops.aten.convolution_backward(g, x, weight, sizes, self.stride, self.padding, self.dilation, False, self.none, self.groups, mask)


class _ExchangedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, conv: nn.Module, exchange: HaloExchange, calls: list[_Call], weight, bias, *xs):
        frames = exchange.forward(xs)
        ctx.conv, ctx.exchange, ctx.calls = conv, exchange, calls
        ctx.save_for_backward(weight, *frames)
        return tuple(call.forward(frame, weight, bias) for call, frame in zip(calls, frames))

    @staticmethod
    def backward(ctx, *gs):
        weight, *frames = ctx.saved_tensors
        conv, exchange, calls, wanted = ctx.conv, ctx.exchange, ctx.calls, ctx.needs_input_grad
        gs = [like_format(g, frame) for g, frame in zip(gs, frames)]
        dxs: Sequence[Tensor | None] = [None] * len(frames)
        of_inputs = any(wanted[5:])  # alike on all ranks: the first layer's input is pixels everywhere
        if of_inputs:
            dxs = [call.backward(g, x, weight, False, [True, False, False])[0] for call, g, x in zip(calls, gs, frames)]
            arriving = exchange.start_adjoint(dxs)

        def of_parameters() -> list[Tensor | None]:
            mask = [False, wanted[3], wanted[4]]
            parts = [call.backward(g, x, weight, wanted[4], mask)[1:] for call, g, x in zip(calls, gs, frames)]
            return [sum(found[1:], found[0]) if w else None for found, w in zip(zip(*parts), mask[1:])]

        dweight = dbias = None
        if (wanted[3] or wanted[4]) and not later(lambda: accumulate((conv.weight, conv.bias), of_parameters())):
            dweight, dbias = of_parameters()
        if of_inputs:
            dxs = exchange.finish_adjoint(dxs, arriving, in_place=True)
        return None, None, None, dweight, dbias, *dxs


@torch.no_grad()
def accumulate(parameters: Sequence[nn.Parameter | None], gradients: Sequence[Tensor | None]) -> None:
    """Add to the parameters' gradients what autograd does not bring there."""
    for p, g in zip(parameters, gradients):
        if g is not None:
            p.grad = g.to(p.dtype) if p.grad is None else p.grad.add_(g)


def exchanged_convolution(conv: nn.Module, exchange: HaloExchange, frames: Sequence[Box], parts: Sequence[Part], xs: Sequence[Tensor]) -> list[Tensor]:
    """The convolution of all tiles of this rank on what an exchange makes of their cells; zero padding only."""
    weight, bias = conv.weight, conv.bias
    if torch.is_autocast_enabled(weight.device.type):  # which does not reach into a function with a backward pass of its own
        weight, bias = weight.to(xs[0].dtype), None if bias is None else bias.to(xs[0].dtype)
    calls = [_Call(conv, frame, part) for frame, part in zip(frames, parts)]
    return list(_ExchangedConv.apply(conv, exchange, calls, weight, bias, *xs))
