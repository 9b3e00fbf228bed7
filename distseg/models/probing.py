"""Measure halo and stride of any network by probing it with test images.

For a network that is a list of known layers, halo and stride are computed instead
(:func:`distseg.tiling.layout.reach_of`). Before probing, norms, dropout and activations are
replaced by the identity, and the weights of convolutions by ones (in modified convolutions by
positive random numbers). So a signal spreads wherever it can and never cancels. With ones all
channels are equal, so a convolution of thousands of channels is probed with one channel. The test
image is a strip along one dim, as thin as the network accepts. So probing a network of a billion
weights takes seconds and needs none of its weights.

* Halo: the smallest h for which an input row more than h rows before a tile border (on the stride
  grid) never influences an output row after that border. The same must hold in the other direction.
  The halo is found from gradients, and by bisection where gradients miss an influence.
* Stride: the smallest s for which shifting the input by s shifts the output by s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from distseg.models.modified import unmodified
from distseg.models.pointwise import POINTWISE_LAYERS
from distseg.models.user_errors import user_error
from distseg.tiling.tile import ReceptiveField

_CONVS = nn.modules.conv._ConvNd
# Multiples of 2^8 and of 3, so that common strides divide them.
_LENGTHS = [768 * 2**k for k in range(5)]
_WIDTHS = (1, 8, 32, 96, 384)


def probed_reach(
    model: nn.Module, dims: int | None = None, in_channels: int | None = None
) -> ReceptiveField:
    """Return halo and stride of a model, in pixels of each spatial dim.

    Args:
        model: a network (N, C, *size) -> (N, C', *size) on any device, including the meta device.
            It is not changed.
        dims: number of spatial dims; by default the number that its convolutions have.
        in_channels: number of bands; by default the number that its first convolution takes.

    Raises:
        ValueError: the model has no convolution from which to read defaults, changes the spatial
            size, or has an unbounded receptive field.
    """
    convs = [m for m in model.modules() if isinstance(m, _CONVS)]
    if not convs and (dims is None or in_channels is None):
        raise ValueError(
            "this model has no convolution layer from which its dims and bands can be read: "
            "give probed_reach(model, dims=..., in_channels=...)"
        )
    dims = dims or convs[0].weight.dim() - 2
    in_channels = in_channels or convs[0].in_channels
    try:
        probe = _simplified(model, narrow=True)
        pairs = [_along(probe, dim, dims, 1) for dim in range(dims)]
    except _CannotProbe:
        # Most likely some layer needs its original number of channels.
        probe = _simplified(model, narrow=False)
        pairs = [_along(probe, dim, dims, in_channels) for dim in range(dims)]
    return ReceptiveField(halo=tuple(h for h, _ in pairs), stride=tuple(s for _, s in pairs))


def _along(probe: nn.Module, dim: int, dims: int, channels: int) -> tuple[int, int]:
    """Return (halo, stride) of a network along one dim, in pixels.

    Both are measured on the shortest strip of an image that is longer than the receptive field.

    Args:
        probe: the network, simplified for probing (:func:`_simplified`).
        dim: the dim, counted from 0 without batch and channels.
        dims: number of spatial dims.
        channels: number of bands of the test images.

    Raises:
        ValueError: no shift of the input shifts the result by the same distance, so the network has
            no stride. Or its receptive field is longer than half of the longest strip.
    """
    without_stride = 0
    for length in _LENGTHS:
        respond, reached = _strip(probe, dim, dims, channels, length)
        if respond(0, 1)[length // 2 :].any() or reached(length // 2)[0][0]:
            continue  # the strip is too short, or the receptive field is unbounded
        stride = _stride(respond, length)
        if stride is None:
            without_stride += 1
            if without_stride < 2:
                continue
            raise ValueError(
                "this model cannot be computed from windows of an image: moving the image by up "
                f"to {length // 4} pixels never moves the result by the same distance, so one of "
                "its layers depends on the size of the image: replace the layers that do, such as "
                "up-sampling with align_corners=True"
            )
        border = length // 2 // stride * stride
        first, last = (rows.nonzero() for rows in reached(border))
        before = border - int(first.min()) if len(first) else 0
        after = int(last.max()) + 1 - border if len(last) else 0
        before = _smallest(lambda h: bool(respond(0, border - h)[border:].any()), before, border)
        after = _smallest(
            lambda h: bool(respond(border + h, length)[:border].any()), after, length - border
        )
        if before < border - stride and after < length - border - stride:
            return max(before, after), stride
    raise ValueError(
        f"the receptive field of this model is larger than {_LENGTHS[-1] // 2} pixels: a layer "
        "looks at the whole image, and such a network cannot be computed from windows: replace "
        "this layer, such as attention or global pooling"
    )


def _smallest(reaches: Callable[[int], bool], least: int, bound: int) -> int:
    """Return the smallest h in ``least`` .. ``bound`` for which ``reaches(h)`` is false.

    ``reaches`` must change from true to false once as h grows. ``least`` is tried first. If
    ``reaches`` is true for all numbers below ``bound``, ``bound`` is returned untried.
    """
    if not reaches(least):
        return least
    low, high = least + 1, bound
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if reaches(middle) else (low, middle)
    return low


def _stride(respond: Callable[[int, int], Tensor], length: int) -> int | None:
    """Return the smallest s for which shifting the input by s rows shifts the output by s rows.

    Return None if this holds for no s below a quarter of the strip's length.

    Args:
        respond: the function of this name that :func:`_strip` returns.
        length: length of the strip in rows.
    """
    origin = length // 3
    base = {r: respond(r, r + 1) for r in range(origin, origin + 2)}
    for s in range(1, length // 4):
        if all(_shifted(base[r], respond(r + s, r + s + 1), s) for r in base):
            # Two rows are a cheap first test; a stride must hold for every row.
            rows = range(origin, origin + s, max(1, s // 16))
            if all(_shifted(respond(r, r + 1), respond(r + s, r + s + 1), s) for r in rows):
                return s
    return None


def _shifted(first: Tensor, second: Tensor, by: int) -> bool:
    return torch.allclose(first[:-by], second[by:], rtol=1e-9, atol=0)


def _strip(
    probe: nn.Module, dim: int, dims: int, channels: int, length: int
) -> tuple[Callable, Callable]:
    """Return two functions that show which input rows of a strip influence which output rows.

    Each finds influences that the other misses. ``respond`` misses a factor computed from the image
    (squeeze and excite), because its input of zeros hides the factor. ``reached`` uses gradients,
    and a maximum passes its gradient to its largest input only.

    Args:
        probe: the network, simplified for probing (:func:`_simplified`).
        dim: the spatial dim along which the strip is long. A row is a position along it.
        dims: number of spatial dims.
        channels: number of bands of the strip.
        length: length of the strip in rows.

    Returns:
        ``respond(a, b)``, which returns the change of each output row, (length,), when the input
            rows a .. b-1 are one instead of zero. And ``reached(border)``, which returns two masks
            of the input rows, (length,) each: the rows before the border that influence output rows
            after it, and the rows after it that influence output rows before it.

    Raises:
        _CannotProbe: the network fails on strips of every width.
    """
    for width in _WIDTHS:
        shape = [1, channels, *([width] * dims)]
        shape[2 + dim] = length

        def run(a: int, b: int, shape=tuple(shape)) -> Tensor:
            x = torch.zeros(shape, dtype=torch.float64)
            x.narrow(2 + dim, a, b - a).fill_(1)
            y = probe(x)
            if not isinstance(y, Tensor):
                raise TypeError(
                    f"the model returns a {type(y).__name__}, but a segmentation network returns "
                    "one tensor of logits (N, classes, *size): return only this tensor"
                )
            if y.shape[2:] != x.shape[2:]:
                raise _WrongSize(tuple(x.shape[2:]), tuple(y.shape[2:]))
            return y.movedim(2 + dim, 0).flatten(1).sum(1)

        try:
            with torch.no_grad():
                silence = run(0, 0)
            break
        except Exception as e:
            # Most likely the strip is too thin for a pooling that rounds down. Otherwise a layer of
            # the user has failed, and the error is reported below.
            failure = e
    else:
        why = failure if isinstance(failure, _WrongSize) else user_error(failure)
        raise _CannotProbe(
            f"the halo of the model cannot be measured, since the model fails on images {length} "
            f"pixels long and {', '.join(map(str, _WIDTHS))} pixels wide: let it accept such "
            f"images. The last error: {why}"
        )

    @lru_cache(32)  # the search for the stride repeats its calls
    @torch.no_grad()
    def respond(a: int, b: int) -> Tensor:
        return run(a, b) - silence

    @lru_cache(2)  # for most strides the middle of the strip is also the border
    def reached(border: int) -> tuple[Tensor, Tensor]:
        x = (
            torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            .add_(0.5)
            .requires_grad_()
        )
        y = probe(x).movedim(2 + dim, 0)
        if not y.requires_grad:
            return torch.zeros(length), torch.zeros(length)

        def sources(part: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(part.sum(), x, retain_graph=True)
            return gradient.movedim(2 + dim, 0).flatten(1).ne(0).any(1)

        behind, before = sources(y[border:]), sources(y[:border])
        behind[border:], before[:border] = False, False
        return behind, before

    return respond, reached


class _CannotProbe(ValueError):
    """Error that is raised for a model that fails on strips of every width in ``_WIDTHS``."""


class _WrongSize(Exception):
    def __str__(self) -> str:
        size, made = self.args
        return (
            f"an input of {size} pixels comes out as {made}, "
            "but a segmentation network keeps the size"
        )


def _simplified(model: nn.Module, narrow: bool) -> nn.Module:
    """Return a copy for probing, with weights of one and without norms, dropout and activations.

    Modified convolutions get random weights instead of ones.

    Args:
        model: the network. It is not changed.
        narrow: True to give every unmodified convolution of the copy a single output channel, which
            saves time. A layer that needs a certain number of channels then fails.
    """
    model = copy.deepcopy(model)
    replacement = _replacement(model, narrow)
    if replacement is not None:
        return replacement
    for parent in list(model.modules()):
        # named_children would skip a layer that is registered a second time.
        for name, child in list(parent._modules.items()):
            replacement = None if child is None else _replacement(child, narrow)
            if replacement is not None:
                setattr(parent, name, replacement)
    if any(p.is_meta for p in model.parameters()):
        model = model.to_empty(device="cpu")
        for b in model.buffers():
            b.fill_(1)
    model = model.to(torch.float64).eval()
    draw = torch.Generator().manual_seed(0)
    for layer in model.modules():
        for p in layer.parameters(recurse=False):
            if isinstance(layer, _CONVS):
                # A user's convolution may compute 0 from equal weights, as standardisation does.
                p.data.uniform_(0.5, 1.5, generator=draw)
            else:
                p.data.fill_(1.0)
    return model


def _replacement(layer: nn.Module, narrow: bool) -> nn.Module | None:
    """Return the layer that replaces ``layer`` in the copy for probing; None to keep ``layer``."""
    if isinstance(layer, (nn.Softmax, nn.LogSoftmax)) and layer.dim not in (None, 1):
        raise ValueError(
            f"{layer} seems to normalise over pixels and not over the channels (dim=1), "
            "which cannot be computed from windows: use dim=1"
        )
    if unmodified(layer, POINTWISE_LAYERS):
        return nn.Identity()
    if unmodified(layer, _CONVS):
        if layer.padding_mode == "circular":
            raise ValueError(
                f"{layer} has circular padding, which joins opposite borders of the image and "
                "cannot be computed from windows: use zeros (padding_mode='zeros')"
            )
        return _OnesConv(layer, 1 if narrow else layer.out_channels)
    return None


class _OnesConv(nn.Module):
    """A convolution with weights of one, which replaces a convolution of the probed network.

    Every output channel is the sum of all input channels under the kernel.
    """

    def __init__(self, conv: _CONVS, out_channels: int):
        super().__init__()
        dims = conv.weight.dim() - 2
        kind = "conv_transpose" if conv.transposed else "conv"
        self.function = getattr(nn.functional, f"{kind}{dims}d")
        self.out_channels = out_channels
        self.arguments = dict(stride=conv.stride, padding=conv.padding, dilation=conv.dilation)
        if conv.transposed:
            self.arguments["output_padding"] = conv.output_padding
        self.register_buffer(
            "ones",
            torch.ones(1, 1, *conv.kernel_size, dtype=torch.float64, device="cpu"),
            persistent=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x.sum(1, keepdim=True), self.ones, **self.arguments)
        return y.expand(-1, self.out_channels, *y.shape[2:])
