"""Functions that compute a part of a layer's result, and the access pattern of each layer.

Zero padding belongs to the border of the image, not to the border of a tile. So a layer runs
without its own padding, on exactly the cells that the part needs. Cells outside the image are added
here. If both sides of a dim need the same number of such cells, the layer's own kernel pads, which
costs no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.comm.staging import upload
from distseg.layers import moving
from distseg.layers.dropout import DROPOUTS, KeyedDropout
from distseg.layers.fitting import (
    cropped,
    cropped_input,
    fitted,
    mirrored,
    padded,
    taken_from,
    taken_from_result,
)
from distseg.layers.norm import NORMS, DistributedNorm
from distseg.layers.resize import Placed, PlacedPositions, resized
from distseg.models.capture.positions import Positions
from distseg.models.layers import (
    Cat,
    CutTo,
    Derived,
    DropImage,
    Fill,
    Formula,
    Join,
    MainOutput,
    Mean,
    Pop,
    Spread,
    Stash,
    Sum,
)
from distseg.models.lines import OfLines
from distseg.models.modified import known, modification_of, unmodified
from distseg.models.moving import Windows
from distseg.models.network import Call
from distseg.models.pointwise import POINTWISE_LAYERS
from distseg.models.resize import RATIO, FitTo, Follows, ResizeTo, VectorAt, kernel_of
from distseg.tiling import access_pattern
from distseg.tiling.access_pattern import AccessPattern, Align, Gather, Interpolate, Scatter, Shift
from distseg.tiling.graph import Node
from distseg.tiling.layout import LayerView
from distseg.tiling.resize import Resize, SizeRule
from distseg.tiling.tile import Box


def _conv3d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride, padding, dilation, groups: int
) -> Tensor:
    """Compute ``F.conv3d``; on CPUs in float32 without gradients, use oneDNN's kernel.

    For a single volume with few channels, ``F.conv3d`` itself copies the input into a large matrix
    (unfolding). This takes far more time and memory than oneDNN.
    """
    fast = (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )
    if not fast or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return F.conv3d(x, weight, bias, stride, padding, dilation, groups)
    sizes = [[n] * 3 if isinstance(n, int) else list(n) for n in (padding, stride, dilation)]
    return torch.mkldnn_convolution(x, weight, bias, *sizes, groups)


_CONV = (F.conv1d, F.conv2d, _conv3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_MAX_POOL = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVG_POOL = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVG = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_PADS = {
    nn.modules.padding._ConstantPadNd: "constant",
    nn.modules.padding._ReflectionPadNd: "reflect",
    nn.modules.padding._ReplicationPadNd: "replicate",
}
_FURTHER = {"linear": 0, "bilinear": 0, "trilinear": 0, "bicubic": 1}
_ALIKE = (
    *POINTWISE_LAYERS,
    nn.Identity,
    Mean,
    DropImage,
    MainOutput,
    DistributedNorm,
    KeyedDropout,
)


def node_of(call: Call, dims: int) -> Node:
    """Return the node of the graph for a layer call: its inputs and the layer's access pattern.

    Args:
        call: the call of the layer.
        dims: the number of spatial dims of the images.

    Raises:
        ValueError: the layer cannot be computed in parts. The message names it and how to fix it.
    """
    name, layer = call.name, call.layer
    if isinstance(layer, (Stash, Pop, Spread)) or type(layer) in (
        Cat,
        CutTo,
        Sum,
        Formula,
        OfLines,
    ):
        return Node(name, call.inputs)
    if isinstance(layer, Positions):
        return Node(name, call.reads, placed=True)
    if isinstance(layer, Follows):
        return Node(name, call.reads, layer.access_patterns(), call.like)
    layer = layer.inner if isinstance(layer, Derived) else layer
    if len(call.inputs) > 1:
        raise ValueError(
            f"layer {name} ({type(layer).__name__}) is called with {len(call.inputs)} feature "
            f"maps, and it is unknown how it combines them: write it as distseg.Cat or "
            "distseg.Sum, followed by layers with one input"
        )
    if isinstance(layer, (*NORMS, *DROPOUTS)):
        check_plain(name, layer)
    for kinds, access_patterns in _ACCESS_PATTERNS:
        if unmodified(layer, kinds):
            try:
                return Node(name, call.inputs, access_patterns(layer, dims))
            except _Unsupported as e:
                raise ValueError(
                    f"layer {name} ({type(layer).__name__}) cannot be computed in tiles with "
                    f"halo exchange: {e}"
                ) from None
    hidden = next(
        (
            part
            for part in layer.modules()
            if isinstance(part, (*NORMS, *DROPOUTS)) and getattr(part, "p", 1) > 0
        ),
        None,
    )
    if hidden not in (None, layer):
        raise ValueError(
            f"layer {name} ({type(layer).__name__}) contains a {type(hidden).__name__}, whose "
            f"statistics or masks depend on the whole image: take the {type(hidden).__name__} out "
            "of the layer and make it a layer of its own in the nn.Sequential"
        )
    if isinstance(layer, (nn.Softmax, nn.LogSoftmax)) and layer.dim not in (1, -1 - dims):
        raise ValueError(
            f"layer {name} ({type(layer).__name__}) runs over dim {layer.dim}, that is, over "
            "positions of the image, but only channels are supported: set dim=1"
        )
    if unmodified(layer, _ALIKE):
        return Node(name, call.inputs)
    which = (
        f", which {modification_of(layer)},"
        if known(type(layer)) is not nn.Module and modification_of(layer)
        else ""
    )
    raise ValueError(
        f"layer {name} ({type(layer).__name__}){which} is not known to work pixel by pixel and "
        "has no distributed counterpart: write it as layers that have one "
        "(convolutions, poolings, up-samplings, norms, activations), or as functions of these"
    )


def check_plain(name: str, layer: nn.Module) -> None:
    """Refuse a norm or dropout that a hook, subclass or parametrization modifies.

    The distributed counterpart that replaces the layer would not have the modification.

    Args:
        name: the layer's name in the message.
        layer: the norm or dropout.

    Raises:
        ValueError: the layer is modified. The message names the layer and the modification.
    """
    if why := modification_of(layer):
        base = known(type(layer)).__name__
        raise ValueError(
            f"layer {name} ({type(layer).__name__}) is a {base} that {why}; distseg replaces it "
            "by a layer of its own, which would drop this modification: move the modification to "
            f"a separate layer before or after a plain {base}"
        )


class _Unsupported(ValueError):
    """Error for a layer setting, such as circular padding, that tiles cannot compute.

    Its message names the setting and how to fix it. :func:`node_of` adds the name of the layer.
    """


def run(
    layer: nn.Module,
    x: Tensor,
    have: Box,
    part: LayerView,
    others: Sequence[tuple[Tensor, Box]] = (),
) -> Tensor:
    """Return a layer's result on the box ``part.output``, (B, C', *part.output.size).

    Args:
        layer: the layer to compute.
        x: the cells of the layer's first input inside ``have``, (B, C, *have.size).
        have: a box of the first input's feature map, which contains ``part.input``. Its cells
            outside the map already hold padding.
        part: the boxes that the layer reads and computes.
        others: the layer's other inputs, each as a tensor and its box in its feature map.
    """
    if isinstance(layer, Derived):
        layer = layer.filled(x)
    if isinstance(layer, PlacedPositions):
        return layer.on_box(x, part.size, part.output)
    if isinstance(layer, Placed):
        layer = layer.inner
    if isinstance(layer, Spread):
        return layer.part(
            others[0][0],
            part.size,
            [range(a, b) for a, b in zip(part.output.start, part.output.stop)],
        )
    if isinstance(layer, OfLines):
        return layer.mapped_to(part.size, [line for line, _ in others])
    if others:
        # The results of these layers are new tensors, which hold no part of an input.
        crop = cropped_input if isinstance(layer, (Pop, Join)) else cropped
        return layer(
            crop(x, have, part.input), *(crop(other, there, part.output) for other, there in others)
        )
    function = _function_of(type(layer))
    # A layer without a function here is pointwise, as `node_of` has checked.
    if function is None or modification_of(layer):
        return layer(cropped(x, have, part.input))
    return function(layer, x, have, part)


@cache
def _function_of(kind: type) -> Callable[[nn.Module, Tensor, Box, LayerView], Tensor] | None:
    return next((function for kinds, function in _FUNCTIONS if issubclass(kind, kinds)), None)


def fill_of(layer: nn.Module) -> float | None:
    """Return the constant with which a layer pads its input, such as 0 for a convolution.

    Return None if the layer never pads, or if it pads with values of the feature map, as by
    reflection.
    """
    layer = layer.inner if isinstance(layer, Placed) else layer
    if isinstance(layer, _CONVS):
        return 0.0 if fuses(layer) else None
    if isinstance(layer, _MAX):
        return -math.inf
    if isinstance(layer, nn.modules.padding._ConstantPadNd):
        return layer.value
    if isinstance(layer, FitTo):
        return layer.value if layer.mode == "constant" else None
    return 0.0 if isinstance(layer, (*_AVG, Fill, Windows)) else None


def fuses(layer: nn.Module) -> bool:
    """Return True if a layer and the halo exchange before it can be one autograd function.

    This holds for convolutions that pad with zeros (:mod:`distseg.layers.conv`).
    """
    return isinstance(layer, _CONVS) and layer.padding_mode == "zeros"


def exchange_box(layer: nn.Module, part: LayerView) -> Box:
    """Return the box of a feature map that a tile has after the halo exchange for a layer.

    The box is ``part.input``, perhaps with padding. For a convolution, the exchange adds the
    padding along each dim whose two sides need different padding; along other dims the convolution
    pads itself. For other layers that pad with a constant, the exchange adds all padding.

    Args:
        part: the boxes that the layer reads and computes.
    """
    if fill_of(layer) is None:
        return part.input
    alike = [
        t - r == s - u
        for t, r, s, u in zip(
            part.input.start, part.padded_input.start, part.padded_input.stop, part.input.stop
        )
    ]
    if not isinstance(layer, _CONVS):
        alike = [a and t == r for a, t, r in zip(alike, part.input.start, part.padded_input.start)]
    return Box(
        tuple(t if a else r for a, t, r in zip(alike, part.input.start, part.padded_input.start)),
        tuple(t if a else r for a, t, r in zip(alike, part.input.stop, part.padded_input.stop)),
    )


# convolutions


def _conv_patterns(conv: nn.Module, dims: int) -> tuple[AccessPattern, ...]:
    """Return the access pattern of a convolution along each dim."""
    if conv.padding_mode == "circular":
        raise _Unsupported(
            "circular padding joins opposite borders of the image, which lie on different tiles: "
            "use zeros, reflect or replicate as padding_mode"
        )
    found = []
    for d in range(dims):
        k, s, dilation = conv.kernel_size[d], conv.stride[d], conv.dilation[d]
        before = after = conv.padding[d] if not isinstance(conv.padding, str) else 0
        # If "same" padding has an odd number of cells, PyTorch puts the extra cell at the end.
        if conv.padding == "same":
            before = dilation * (k - 1) // 2
            after = dilation * (k - 1) - before
        found.append(Gather(k, s, dilation, before, after, mirrored=conv.padding_mode != "zeros"))
    return tuple(found)


def _conv(conv: nn.Module, x: Tensor, have: Box, part: LayerView) -> Tensor:
    if conv.padding_mode != "zeros":
        x, have = mirrored(x, have, part, conv.padding_mode)
    x, pads = fitted(x, have, part.padded_input, cropped_input)
    native = [
        max(pad) if s == 1 else b if (b := pad[0]) == pad[1] else None
        for pad, s in zip(pads, conv.stride)
    ]
    if None in native:
        x = padded(x, [(0, 0) if p is not None else pad for p, pad in zip(native, pads)])
    y = _CONV[len(pads) - 1](
        x, conv.weight, conv.bias, conv.stride, [p or 0 for p in native], conv.dilation, conv.groups
    )
    # If only one side needs padding, the kernel pads both, and the other side's extra cells are cut
    # off here.
    start = [0 if p is None else p - pad[0] for p, pad in zip(native, pads)]
    return taken_from_result(y, start, part.output.size)


def _transposed_patterns(conv: nn.Module, dims: int) -> tuple[AccessPattern, ...]:
    return tuple(
        Scatter(
            conv.kernel_size[d],
            conv.stride[d],
            conv.dilation[d],
            conv.padding[d],
            conv.output_padding[d],
        )
        for d in range(dims)
    )


def _transposed(conv: nn.Module, x: Tensor, have: Box, part: LayerView) -> Tensor:
    x = cropped_input(x, have, part.input)
    dims = range(len(conv.stride))
    first = [part.input.start[d] * conv.stride[d] - conv.padding[d] for d in dims]
    span = [conv.dilation[d] * (conv.kernel_size[d] - 1) + 1 for d in dims]
    last = [(part.input.stop[d] - 1) * conv.stride[d] - conv.padding[d] + span[d] for d in dims]
    extra = [max(0, part.output.stop[d] - last[d]) for d in dims]
    y = _CONV_TRANSPOSE[len(dims) - 1](
        x, conv.weight, conv.bias, conv.stride, 0, extra, conv.groups, conv.dilation
    )
    first = [a - f for a, f in zip(part.output.start, first)]
    return taken_from_result(y, first, part.output.size)


# poolings


def _tuple(value, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)


def _pool_patterns(pool: nn.Module, dims: int) -> tuple[AccessPattern, ...]:
    if getattr(pool, "return_indices", False):
        raise _Unsupported(
            "with return_indices=True, its indices would be positions in a tile, not in the "
            "image: set return_indices=False"
        )
    k, s, p, d = (
        _tuple(getattr(pool, field, 1), dims)
        for field in ("kernel_size", "stride", "padding", "dilation")
    )
    return tuple(Gather(k[i], s[i], d[i], p[i], p[i], pool.ceil_mode) for i in range(dims))


def _max_pool(pool: nn.Module, x: Tensor, have: Box, part: LayerView) -> Tensor:
    dims = len(part.size)
    k, s, d = (
        _tuple(getattr(pool, field), dims) for field in ("kernel_size", "stride", "dilation")
    )
    x, pads = fitted(x, have, part.padded_input, cropped_input)
    # The kernel can pad both sides by the same number of cells. In ceil_mode it can also pad more
    # at the end, by less than its stride.
    native = [
        (b, b) if b <= k[i] // 2 and (a == b or (pool.ceil_mode and b < a < b + s[i])) else None
        for i, (b, a) in enumerate(pads)
    ]
    x = padded(x, [(0, 0) if n else pad for n, pad in zip(native, pads)], -math.inf)
    return _MAX_POOL[dims - 1](x, k, s, [n[0] if n else 0 for n in native], d, pool.ceil_mode)


def _avg_pool(pool: nn.Module, x: Tensor, have: Box, part: LayerView) -> Tensor:
    dims = len(part.size)
    k, s, p = (_tuple(getattr(pool, field), dims) for field in ("kernel_size", "stride", "padding"))
    x, pads = fitted(x, have, part.padded_input, cropped_input)
    y = _AVG_POOL[dims - 1](padded(x, pads), k, s)
    divisor = getattr(pool, "divisor_override", None)
    if divisor is not None:
        return y * (math.prod(k) / divisor)
    if part.padded_input == part.input:
        return y
    for i in range(dims):
        first = torch.arange(part.output.start[i], part.output.stop[i]) * s[i] - p[i]
        low, high = (-p[i], part.size[i] + p[i]) if pool.count_include_pad else (0, part.size[i])
        cells = (first + k[i]).clamp(max=high) - first.clamp(min=low)
        y = y * (k[i] / upload(cells, y.device, y.dtype)).view(-1, *(1,) * (dims - 1 - i))
    return y


# up-sampling and padding


def _factors(up: nn.Module, dims: int) -> tuple[int, ...] | None:
    """Return the up-sampling factor of each dim of an ``nn.Upsample``, if all are integers.

    Return None if a factor is not an integer, if the layer has a size instead of factors, or if it
    is bicubic with ``align_corners``. :func:`_resize_patterns` covers these cases.
    """
    if up.scale_factor is None:
        return None
    factors = up.scale_factor if isinstance(up.scale_factor, tuple) else (up.scale_factor,) * dims
    whole = all(f == int(f) >= 1 for f in factors) and not (
        up.align_corners and up.mode == "bicubic"
    )
    return tuple(int(f) for f in factors) if whole else None


def _up_patterns(up: nn.Module, dims: int) -> tuple[AccessPattern, ...]:
    factors = _factors(up, dims)
    if factors is None:
        return _resize_patterns(up, dims)
    if up.mode in ("nearest", "nearest-exact"):
        return tuple(Scatter(f, f) for f in factors)
    if up.align_corners:
        return tuple(Align(f) for f in factors)
    return tuple(Interpolate(f, _FURTHER[up.mode]) for f in factors)


def _resize_patterns(up: nn.Module, dims: int) -> tuple[AccessPattern, ...]:
    """Return the access pattern of each dim of an ``nn.Upsample`` with a size or any factor.

    It is used where :func:`_factors` returns None. Integer factors have simpler patterns.
    """
    if up.size is not None:
        rules = [SizeRule(0, n) for n in _tuple(up.size, dims)]
        places: list[float | None] = [None] * dims
    else:
        scale = up.scale_factor
        factors = scale if isinstance(scale, tuple) else (scale,) * dims
        rules = [SizeRule(factor=float(f)) for f in factors]
        places = [None if up.recompute_scale_factor else float(f) for f in factors]
    return tuple(
        Resize(kernel_of(up.mode), bool(up.align_corners), rule, factor)
        for rule, factor in zip(rules, places)
    )


def _up(up: nn.Module, x: Tensor, have: Box, part: LayerView) -> Tensor:
    factors = _factors(up, len(part.size))
    if factors is None:
        return _resized(up, _resize_patterns(up, len(part.size)), x, have, part)
    if not up.align_corners or part.input == Box.whole(part.size):
        return _grown(up, factors, x, have, part)
    x = cropped(x, have, part.input)
    for dim, (n, f, first, a, b) in enumerate(
        zip(part.size, factors, part.input.start, part.output.start, part.output.stop), 2
    ):
        x = _aligned(x, dim, n, n * f, first, range(a, b))
    return x


def _resize_to(layer: ResizeTo, x: Tensor, have: Box, part: LayerView) -> Tensor:
    return _resized(
        lambda x: layer.made(x, part.output_size),
        layer.access_patterns(),
        x,
        have,
        part,
        layer.factors == RATIO,
    )


def _resized(
    whole: Callable[[Tensor], Tensor],
    access_patterns: Sequence[Resize],
    x: Tensor,
    have: Box,
    part: LayerView,
    ratio: bool = False,
) -> Tensor:
    """Return the result of a resize on the box ``part.output``, (B, C, *part.output.size).

    Args:
        whole: function that resizes the whole feature map; used if the part is the whole result.
        access_patterns: the access pattern of each dim.
        x: the cells of the input inside ``have``, (B, C, *have.size).
        have: a box of the input's feature map, which contains ``part.input``.
        part: the boxes that the layer reads and computes.
        ratio: True if the scale factors are output size divided by input size (``RATIO``).
    """
    x = cropped(x, have, part.input)
    if part.input.size == part.size and part.output.size == part.output_size:
        return whole(x)
    return resized(x, access_patterns, part, ratio)


def _fit_to(layer: FitTo, x: Tensor, have: Box, part: LayerView) -> Tensor:
    return _padded_map(x, have, part, layer.mode, layer.value)


def _vector_at(layer: VectorAt, x: Tensor, have: Box, part: LayerView) -> Tensor:
    return x


def _aligned(x: Tensor, dim: int, n: int, m: int, first: int, wanted: range) -> Tensor:
    """Resize one dim linearly with ``align_corners=True``; return only the wanted output cells.

    Args:
        x: the input cells that the wanted output cells need, (B, C, ...).
        dim: the dim of ``x`` that is resized, counted from the batch dim 0.
        n, m: the size of this dim in the whole input and in the whole output.
        first: the index of the first cell of ``x`` in the whole input.
        wanted: the indices of the output cells to return.
    """
    place = torch.arange(wanted.start, wanted.stop, dtype=torch.float64) * (
        (n - 1) / (m - 1) if m > 1 else 0.0
    )
    low = place.long().clamp(max=n - 1)
    share = upload(place - low, x.device, x.dtype).view(-1, *(1,) * (x.dim() - 1 - dim))
    below, above = (
        x.index_select(dim, upload(at - first, x.device))
        for at in (low, (low + 1).clamp(max=n - 1))
    )
    return below + (above - below) * share


def _shuffle_patterns(shuffle: nn.PixelShuffle, dims: int) -> tuple[AccessPattern, ...]:
    return (Scatter(shuffle.upscale_factor, shuffle.upscale_factor),) * dims


def _shuffle(shuffle: nn.PixelShuffle, x: Tensor, have: Box, part: LayerView) -> Tensor:
    return _grown(shuffle, (shuffle.upscale_factor,) * len(part.size), x, have, part)


def _grown(
    layer: nn.Module, factors: Sequence[int], x: Tensor, have: Box, part: LayerView
) -> Tensor:
    """Return a part of the result of a layer that turns each cell into a block of cells.

    Args:
        layer: the layer, such as ``nn.PixelShuffle`` or ``nn.Upsample`` with integer factors.
        factors: the size of a block, in cells along each dim.
        x: the cells of the input inside ``have``, (B, C, *have.size).
        have: a box of the input's feature map, which contains ``part.input``.
        part: the boxes that the layer reads and computes; ``part.output`` is the part to return.
    """
    y = layer(cropped(x, have, part.input))
    return taken_from(
        y,
        [m - f * t for m, f, t in zip(part.output.start, factors, part.input.start)],
        part.output.size,
    )


def _fill_patterns(layer: Fill, dims: int) -> tuple[AccessPattern, ...]:
    return (access_pattern.Fill(multiple=layer.multiple),) * dims


def _fill(layer: Fill, x: Tensor, have: Box, part: LayerView) -> Tensor:
    return _padded_map(x, have, part)


def _pad_patterns(pad: nn.Module, dims: int) -> tuple[AccessPattern, ...]:
    if isinstance(pad, nn.modules.padding._CircularPadNd):
        raise _Unsupported(
            "circular padding joins opposite borders of the image, which lie on different tiles: "
            "use zeros, reflection or replication, such as nn.ReflectionPad2d"
        )
    mirrors = not isinstance(pad, nn.modules.padding._ConstantPadNd)
    # PyTorch lists the padding of the last dim first.
    sides = [pad.padding[2 * i : 2 * i + 2] for i in reversed(range(dims))]
    return tuple(Shift(before=before, after=after, mirrored=mirrors) for before, after in sides)


def _pad(pad: nn.Module, x: Tensor, have: Box, part: LayerView) -> Tensor:
    mode = next(mode for kind, mode in _PADS.items() if isinstance(pad, kind))
    return _padded_map(x, have, part, mode, pad.value if mode == "constant" else 0.0)


def _padded_map(
    x: Tensor, have: Box, part: LayerView, mode: str = "constant", value: float = 0.0
) -> Tensor:
    """Return the part of a padded feature map that a tile reads, as a new tensor.

    ``F.pad`` always makes a new tensor, which the next layer may overwrite. So a tile's part is
    copied even if it has no padding.

    Args:
        x: the cells of the input inside ``have``, (B, C, *have.size).
        have: a box of the input's feature map, which contains ``part.input``.
        part: the boxes that the layer reads and computes.
        mode, value: the arguments of ``F.pad``.
    """
    if mode == "constant":
        y = padded(*fitted(x, have, part.padded_input), value)
    else:
        mirror, there = mirrored(x, have, part, mode)
        y = cropped(mirror, there, part.padded_input)
    return y.clone() if y.untyped_storage()._cdata == x.untyped_storage()._cdata else y


# Classes of layers, and a function (layer, dims) that returns the access pattern of each dim.
_ACCESS_PATTERNS = (
    (_CONVS, _conv_patterns),
    (_TRANSPOSED, _transposed_patterns),
    ((*_MAX, *_AVG), _pool_patterns),
    (nn.Upsample, _up_patterns),
    (nn.PixelShuffle, _shuffle_patterns),
    (Fill, _fill_patterns),
    *moving.ACCESS_PATTERNS,
    ((*_PADS, nn.modules.padding._CircularPadNd), _pad_patterns),
)
# Classes of layers, and a function (layer, x, have, part) that computes a part of the result, with
# the arguments of `run`.
_FUNCTIONS = (
    (_CONVS, _conv),
    (_TRANSPOSED, _transposed),
    (_MAX, _max_pool),
    (_AVG, _avg_pool),
    (nn.Upsample, _up),
    (nn.PixelShuffle, _shuffle),
    (tuple(_PADS), _pad),
    (Fill, _fill),
    *moving.FUNCTIONS,
    (ResizeTo, _resize_to),
    (FitTo, _fit_to),
    (VectorAt, _vector_at),
)
