"""Convolutions with a backward pass in two parts: the input's gradient now, the weight's later.

Both parts take the same time, but other ranks wait only for the input's gradient. So the input's
gradient is computed first. If a halo exchange came before the convolution, the halo's gradient is
sent. The weight's gradient is deferred (:mod:`distseg.comm.waits`) and is added to the parameter's
``grad`` directly.

:func:`exchanged_convolution` computes a convolution together with the halo exchange before it.
:class:`WeightsApart` defers the weight gradients of all other convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distseg.comm.halo import HaloExchange
from distseg.comm.memory_format import like_format, like_layout
from distseg.comm.waits import Waits
from distseg.models.layers import skip_store
from distseg.tiling.layout import LayerView
from distseg.tiling.tile import Box


@dataclass(frozen=True)
class _Call:
    """Settings of one convolution call, such as its stride, with one number for each spatial dim.

    The tensors of the call are passed to the methods.
    """

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    output_padding: Sequence[int] | None = None
    """Output padding of a transposed convolution; None for an ordinary one."""

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
        """Return the gradients of x, weight and bias, or None for each that is not wanted.

        Args:
            g: the gradient of the result.
            x, weight: the arguments of :meth:`forward`.
            mask: True for each wanted gradient, in the order x, weight, bias.
        """
        return torch.ops.aten.convolution_backward(
            g, x, weight, [g.shape[1]] if mask[2] else None, *self._arguments, mask
        )


class _NoExchange:
    """Halo exchange that sends nothing, for a convolution whose whole input is available.

    It has the methods of :class:`distseg.comm.halo.HaloExchange` that :class:`_Convolution` calls.
    """

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
    """Autograd function that exchanges the halos of several tensors and convolves each of them.

    All tensors are convolved with the same weight. The argument ``parameters`` is the pair of the
    layer's weight and bias. The arguments ``weight`` and ``bias`` are these two, perhaps cast to
    another dtype. The backward pass computes the gradients of the inputs immediately. The gradients
    of weight and bias are either returned to autograd too, or computed later and added to ``grad``
    of ``parameters``.
    """

    @staticmethod
    def forward(
        ctx, parameters, exchange: HaloExchange | _NoExchange, calls: list[_Call], weight, bias, *xs
    ):
        frames = exchange.forward(xs)
        ctx.parameters, ctx.exchange, ctx.calls = parameters, exchange, calls
        # PyTorch's own convolution saves its tensors in this order. Activation checkpointing
        # matches saved tensors by position, and may recompute this convolution as PyTorch's own.
        ctx.save_for_backward(*frames, weight)
        return tuple(call.forward(frame, weight, bias) for call, frame in zip(calls, frames))

    @staticmethod
    def backward(ctx, *gs):
        # Deferred work must not keep the autograd graph of these tensors alive.
        *frames, weight = (t.detach() for t in ctx.saved_tensors)
        parameters, exchange, calls, wanted = (
            ctx.parameters,
            ctx.exchange,
            ctx.calls,
            ctx.needs_input_grad,
        )
        gs = [like_format(g, frame) for g, frame in zip(gs, frames)]
        dxs: Sequence[Tensor | None] = [None] * len(frames)
        # The same value on all ranks, so all of them take part in the exchange or none does.
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
            lambda: accumulate(parameters, of_parameters()), parameters
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

    A gradient of None is skipped. The layout must be set here: a convolution of a channels_last
    feature map returns the gradient of its weight in channels_last, even if the weight is not.
    """
    for p, g in zip(parameters, gradients):
        if g is not None:
            p.grad = like_layout(g.to(p.dtype), p) if p.grad is None else p.grad.add_(g)


def exchanged_convolution(
    conv: nn.Module,
    exchange: HaloExchange,
    frames: Sequence[Box],
    parts: Sequence[LayerView],
    xs: Sequence[Tensor],
) -> list[Tensor]:
    """Exchange halos, convolve all tiles of this rank, and return the result of each tile.

    Args:
        conv: the convolution, which must pad with zeros.
        exchange: the halo exchange of its input.
        frames: for each tile, the box of the feature map that the exchange produces.
        parts: for each tile, the boxes that the convolution reads and computes.
        xs: the feature map of each tile, before the exchange.
    """
    # The cells that a frame lacks lie outside the image, equally many on both sides of a dim (see
    # layer_table.exchange_box), so the kernel pads them.
    paddings = [
        [a - r for a, r in zip(frame.start, part.padded_input.start)]
        for frame, part in zip(frames, parts)
    ]
    calls = [_Call(conv.stride, padding, conv.dilation, conv.groups) for padding in paddings]
    parameters = conv.weight, conv.bias
    return list(_Convolution.apply(parameters, exchange, calls, *_lowered(*parameters), *xs))


def _lowered(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast tensors to the dtype in which autocast computes convolutions, if it is enabled.

    Autocast has no effect inside an ``autograd.Function``, so tensors are cast before they are
    passed to one. Tensors in float64 are not cast.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


class WeightsApart(TorchFunctionMode):
    """Torch function mode in which convolutions compute their weight gradients later.

    The backward pass leaves the gradients of weight and bias as deferred work. This work is done
    while the rank waits for other ranks. The gradients are added to ``grad`` without autograd.
    Autograd computes the gradients as usual if the weight is not a parameter itself (but computed
    from one), or if a parameter has hooks.

    Args:
        waits: the object that does the deferred work while this rank waits for messages.
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


def weights_apart(waits: Waits) -> Callable[[dict[str, Tensor]], AbstractContextManager]:
    """Return a function that makes a context in which convolutions defer their weights' gradients.

    The function takes a dict of skips and returns a context manager. Inside it, ``Stash`` and
    ``Pop`` layers use this dict (:func:`distseg.models.layers.skip_store`). Convolutions compute
    the gradients of their weights and biases later (:class:`WeightsApart`).

    Args:
        waits: the object that does the deferred work while this rank waits for messages.
    """

    @contextmanager
    def around(skips: dict[str, Tensor]):
        with skip_store(skips), WeightsApart(waits):
            yield

    return around


def _convolution(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Split the arguments of ``F.conv2d`` into (:class:`_Call`, input, weight, bias).

    Return None if the weight's gradient cannot be deferred (:func:`_can_wait`), or if the two sides
    of a dim need different padding. ``F.conv1d`` and ``F.conv3d`` have the same arguments.
    """
    each = _each(weight)
    if isinstance(padding, str):
        around = [
            d * (k - 1) if padding == "same" else 0
            for d, k in zip(each(dilation), weight.shape[2:])
        ]
        # An odd number of cells leaves one side with more padding than the other.
        padding = [n // 2 for n in around] if not any(n % 2 for n in around) else None
    if padding is None or not _can_wait(input, weight, bias):
        return None
    return _Call(each(stride), each(padding), each(dilation), groups), input, weight, bias


def _transposed(
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
):
    """Split the arguments of ``F.conv_transpose2d`` into (:class:`_Call`, input, weight, bias).

    Return None if the weight's gradient cannot be deferred (:func:`_can_wait`).
    ``F.conv_transpose1d`` and ``F.conv_transpose3d`` have the same arguments.
    """
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
    """Return a function that turns a setting into a list with one number for each spatial dim.

    For two spatial dims it returns [3, 3] for 3, for [3] and for [3, 3].

    Args:
        weight: the weight of the convolution, (C', C, *kernel), which gives the number of dims.
    """
    dims = weight.dim() - 2

    def each(value: int | Sequence[int]) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))

    return each


def _can_wait(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if the gradients of weight and bias may be computed later, without autograd.

    This holds if the weight needs a gradient, if weight and bias are parameters without hooks (so
    that autograd would only add the gradients to ``grad``), and if ``x`` has a batch dim.
    """
    return (
        x.dim() == weight.dim()
        and weight.requires_grad
        and _without_hooks(weight)
        and (bias is None or _without_hooks(bias))
    )


def _without_hooks(p: Tensor) -> bool:
    """Return True if ``p`` needs no gradient or is a parameter without hooks on its gradient."""
    if not p.requires_grad:
        return True
    return (
        isinstance(p, nn.Parameter) and not p._backward_hooks and not p._post_accumulate_grad_hooks
    )
