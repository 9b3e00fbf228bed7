"""Convolutions whose backward pass is in two parts: the input's gradient at once, the weight's later.

The two take as long as each other, and only the input's is awaited by other ranks. So it comes first, and where borders were exchanged
before the convolution, theirs are sent. The weight's is put off (:mod:`distseg.comm.waits`), and goes right into the parameter's ``grad``.
That is how a convolution is computed together with the exchange before it (:func:`exchanged_convolution`), and how any other is under a
schedule that wants it so (:class:`WeightsApart`).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, ContextManager, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distseg.comm.halo import HaloExchange
from distseg.comm.memory_format import like_format, like_layout
from distseg.comm.waits import Waits
from distseg.models.layers import skip_store
from distseg.tiling.layout import Part
from distseg.tiling.tile import Box


@dataclass(frozen=True)
class _Call:
    """Arguments of PyTorch's convolution but for tensors, a number each dim."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    output_padding: Sequence[int] | None = None
    """Of a transposed convolution; None of others."""

    @property
    def _arguments(self) -> tuple:
        transposed = self.output_padding is not None
        return (
            self.stride,
            self.padding,
            self.dilation,
            transposed,
            self.output_padding or [0] * len(self.padding),
            self.groups,
        )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution(x, weight, bias, *self._arguments)

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]):
        """The gradients of x, weight and bias that the mask wants."""
        return torch.ops.aten.convolution_backward(
            g, x, weight, [g.shape[1]] if mask[2] else None, *self._arguments, mask
        )


class _NoExchange:
    """Of a convolution that has all it looks at."""

    def __init__(self, waits: Waits):
        self.waits = waits

    def forward(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        return xs

    def start_adjoint(self, gs: Sequence[Tensor]) -> None:
        pass

    def finish_adjoint(
        self, gs: Sequence[Tensor], arriving: None, in_place: bool
    ) -> Sequence[Tensor]:
        return gs


class _Convolution(torch.autograd.Function):
    """The convolution of several tensors after an exchange.

    ``parameters`` are those that gradients go to, where ``weight`` and ``bias`` may be these in another type.
    """

    @staticmethod
    def forward(
        ctx, parameters, exchange: HaloExchange | _NoExchange, calls: list[_Call], weight, bias, *xs
    ):
        frames = exchange.forward(xs)
        ctx.parameters, ctx.exchange, ctx.calls = parameters, exchange, calls
        # In PyTorch's own order: a checkpointed block may compute it again outside.
        ctx.save_for_backward(*frames, weight)
        return tuple(call.forward(frame, weight, bias) for call, frame in zip(calls, frames))

    @staticmethod
    def backward(ctx, *gs):
        # What is put off must not hold the graph behind them.
        *frames, weight = (t.detach() for t in ctx.saved_tensors)
        parameters, exchange, calls, wanted = (
            ctx.parameters,
            ctx.exchange,
            ctx.calls,
            ctx.needs_input_grad,
        )
        gs = [like_format(g, frame) for g, frame in zip(gs, frames)]
        dxs: Sequence[Tensor | None] = [None] * len(frames)
        # Alike on all ranks: the first layer's input is pixels everywhere.
        of_inputs = any(wanted[5:])
        if of_inputs:
            dxs = [
                call.backward(g, x, weight, [True, False, False])[0]
                for call, g, x in zip(calls, gs, frames)
            ]
            arriving = exchange.start_adjoint(dxs)

        def of_parameters() -> list[Tensor | None]:
            parts = [
                call.backward(g, x, weight, [False, *wanted[3:5]])[1:]
                for call, g, x in zip(calls, gs, frames)
            ]
            return [
                sum(found[1:], found[0]) if w else None
                for found, w in zip(zip(*parts), wanted[3:5])
            ]

        dweight = dbias = None
        if (wanted[3] or wanted[4]) and not exchange.waits.later(
            lambda: accumulate(parameters, of_parameters())
        ):
            dweight, dbias = of_parameters()
        if of_inputs:
            dxs = exchange.finish_adjoint(dxs, arriving, in_place=True)
        return None, None, None, dweight, dbias, *dxs


@torch.no_grad()
def accumulate(
    parameters: Sequence[nn.Parameter | None], gradients: Sequence[Tensor | None]
) -> None:
    """Add gradients to the ``grad`` of their parameters, in the memory layout of the parameter.

    A convolution of a map with channels last returns the gradient of its weight with channels last,
    whatever the weight's layout.
    """
    for p, g in zip(parameters, gradients):
        if g is not None:
            p.grad = like_layout(g.to(p.dtype), p) if p.grad is None else p.grad.add_(g)


def exchanged_convolution(
    conv: nn.Module,
    exchange: HaloExchange,
    frames: Sequence[Box],
    parts: Sequence[Part],
    xs: Sequence[Tensor],
) -> list[Tensor]:
    """The convolution of all tiles of this rank on what an exchange makes of their cells; zero padding only."""
    # What a frame lacks lies beyond the image, the same on both sides of a dim (see local.framed).
    paddings = [
        [a - r for a, r in zip(frame.start, part.raw.start)] for frame, part in zip(frames, parts)
    ]
    calls = [_Call(conv.stride, padding, conv.dilation, conv.groups) for padding in paddings]
    parameters = conv.weight, conv.bias
    return list(_Convolution.apply(parameters, exchange, calls, *_lowered(*parameters), *xs))


def _lowered(*tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors in the type in which autocast computes convolutions: it does not reach into a function with a backward pass of its own."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


class WeightsApart(TorchFunctionMode):
    """Inside, convolutions put the gradients of their weights off, whichever module they are called from.

    Those whose weight is computed (parametrizations, layers of the user's that scale it) and those whose gradient is watched by hooks
    stay autograd's: what is put off goes into a parameter's ``grad`` behind autograd's back.
    """

    def __init__(self, waits: Waits):
        super().__init__()
        self._here = _NoExchange(waits)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        read = _READ.get(function)
        found = read and torch.is_grad_enabled() and read(*args, **(kwargs or {}))
        if not found:
            return function(*args, **(kwargs or {}))
        call, x, *parameters = found
        x, *lowered = _lowered(x, *parameters)
        return _Convolution.apply(tuple(parameters), self._here, [call], *lowered, x)[0]


def weights_apart(waits: Waits) -> Callable[[dict[str, Tensor]], ContextManager]:
    """:func:`distseg.models.layers.skip_store` in which layers put gradients of weights off."""

    @contextmanager
    def around(skips: dict[str, Tensor]):
        with skip_store(skips), WeightsApart(waits):
            yield

    return around


def _convolution(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """The call, its input, weight and bias, as PyTorch's functional convolutions are given them; None where autograd must see it whole."""
    each = _each(weight)
    if isinstance(padding, str):
        around = [
            d * (k - 1) if padding == "same" else 0
            for d, k in zip(each(dilation), weight.shape[2:])
        ]
        # The two sides differ.
        padding = [n // 2 for n in around] if not any(n % 2 for n in around) else None
    if padding is None or not _can_wait(input, weight, bias):
        return None
    return _Call(each(stride), each(padding), each(dilation), groups), input, weight, bias


def _transposed(
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
):
    """The same of transposed convolutions."""
    if not _can_wait(input, weight, bias):
        return None
    each = _each(weight)
    return (
        _Call(each(stride), each(padding), each(dilation), groups, each(output_padding)),
        input,
        weight,
        bias,
    )


_READ: dict[Callable, Callable] = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolution),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _transposed
    ),
}


def _each(weight: Tensor) -> Callable[[int | Sequence[int]], list[int]]:
    """Makes a number for each dim of what may be one for all."""
    dims = weight.dim() - 2
    return lambda value: (
        [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))
    )


def _can_wait(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autograd would do no more with the gradients of weight and bias than add them to their ``grad``."""
    plain = lambda p: (
        not p.requires_grad
        or (
            isinstance(p, nn.Parameter)
            and not p._backward_hooks
            and not p._post_accumulate_grad_hooks
        )
    )
    return (
        x.dim() == weight.dim()
        and weight.requires_grad
        and plain(weight)
        and (bias is None or plain(bias))
    )
