"""Which layer a call of PyTorch's is: a rule for each function that looks beyond single cells, a list of those that do not.

A rule has the function's name and arguments; maps of the image come as :class:`distseg.models.reader.Value`, and it gives that of its result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distseg.models.layers import Cat, Fill, Max, Mean, Sum, VectorNorm
from distseg.models.reader import FORMS, LAST, VECTORS, Reader, Stack, Value, has_sizes
from distseg.models.trace import Kept, Made


def made(reader: Reader, args: tuple, kwargs: dict) -> Any:
    """The value, or values, of what the call at hand makes.

    Raises:
        CanNotCapture: naming the call, and what would help.
    """
    name = reader.call.name
    if rule := vars(Rules).get(name):
        return rule(reader, *args, **kwargs)
    if name in POINTWISE:
        return reader.formula(args, kwargs)
    if name in _OVER_CHANNELS:
        return reader.over_dims(args, kwargs)
    raise reader.refusal("is not known here: write it as convolutions, poolings, up-samplings, norms and functions of single cells")


_PART = "takes a part of the image, or of the batch: of the channels it is known"
_OVER_CHANNELS = {"std", "var", "logsumexp", "prod", "cumsum", "flip"}  # where the dims that they are told are those of channels
POINTWISE = {
    *("relu6 elu selu celu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid sigmoid logsigmoid tanh tanhshrink softshrink hardshrink prelu").split(),
    *("exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal abs neg negative sin cos tan atan atan2 erf clamp clamp_min clamp_max sign threshold").split(),
    *("sub subtract rsub pow maximum minimum lerp addcmul addcdiv hypot logaddexp nan_to_num detach").split(),
    *("__rsub__ __rtruediv__ __rdiv__ __pow__ __rpow__ where masked_fill clip gt lt ge le eq ne greater less __gt__ __lt__ __ge__ __le__ __eq__ __ne__").split(),
    *("logical_and logical_or logical_not __and__ __or__ __invert__ floor ceil round trunc fmod remainder sinh cosh asinh heaviside xlogy").split(),
}


class Rules:
    """By the name of a function, the layer that it is; arguments are those of the function."""

    def conv2d(self: Reader, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        if self.is_grid(input):
            return self.formula((input, weight, bias, stride, padding, dilation, groups), {})
        x, kernel = self.map(input, "maps", "place"), self.shape_of(weight)
        if x.form == "place":
            return self.formula((input, weight, bias, stride, padding, dilation, groups), {})
        settings = dict(stride=self.each(stride), padding=self.each(padding), dilation=self.each(dilation), groups=groups)
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.dims - 1]
        return self.layer(kind, x, kernel[1] * groups, kernel[0], kernel[2:], bias=bias is not None, tensors=dict(weight=weight, bias=bias), **self.fixed_all(settings))

    conv1d = conv3d = conv2d

    def conv_transpose2d(self: Reader, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        x, kernel = self.map(input), self.shape_of(weight)
        settings = dict(stride=self.each(stride), padding=self.each(padding), output_padding=self.each(output_padding), dilation=self.each(dilation), groups=groups)
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[self.dims - 1]
        return self.layer(kind, x, kernel[0], kernel[1] * groups, kernel[2:], bias=bias is not None, tensors=dict(weight=weight, bias=bias), **self.fixed_all(settings))

    conv_transpose1d = conv_transpose3d = conv_transpose2d

    def batch_norm(self: Reader, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        x = self.cells(input, "maps", "place", "vector")
        channels = x.channels if x.plain else x.cell[0]
        if not x.plain and not self.is_grid(x):
            raise self.refusal(f"takes {FORMS[x.form]} whose channels are {x.cell}: one dim of them is expected")
        if not training and running_mean is not None:
            raise self.refusal("takes its running statistics in training: set spatial.frozen_norm, which has all batch norms do so")
        if isinstance(running_mean, Kept) and running_mean.name in self.names.values():
            raise self.refusal("is called a second time on the same running statistics, which would count both: give each place a norm of its own")
        tensors = dict(running_mean=running_mean, running_var=running_var)
        if isinstance(running_mean, Kept) and (count := f"{running_mean.name.rpartition('.')[0]}.num_batches_tracked".lstrip(".")) in self.shapes:
            tensors["num_batches_tracked"] = Kept(count)
        kind, more = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[self.dims - 1], {}
        if x.form != "maps":
            kind, more = VectorNorm, dict(parts=x.channels // channels)
        return self.norm(kind, x, channels, eps, momentum, weight=weight, bias=bias, tensors=tensors, track_running_stats=running_mean is not None, **more)

    def instance_norm(self: Reader, input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5):
        x = self.map(input)
        if running_mean is not None or not use_input_stats:
            raise self.refusal("has running statistics, which instance norms have none of here: set track_running_stats=False")
        kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[self.dims - 1]
        return self.norm(kind, x, x.channels, eps, momentum, weight=weight, bias=bias)

    def group_norm(self: Reader, input, num_groups, weight=None, bias=None, eps=1e-5):
        x = self.map(input, "maps", "place", "vector")
        if x.form != "maps":
            return self.formula((x, num_groups, weight, bias, eps), {})
        return self.norm(nn.GroupNorm, x, num_groups, x.channels, eps, weight=weight, bias=bias)

    def layer_norm(self: Reader, input, normalized_shape, weight=None, bias=None, eps=1e-5):
        return self.formula((*self.over_last(input, normalized_shape), weight, bias, eps), {})

    def linear(self: Reader, input, weight, bias=None):
        return self.formula((self.cells(input, *LAST, "vector"), weight, bias), {})

    def rms_norm(self: Reader, input, normalized_shape, weight=None, eps=None):
        return self.formula((*self.over_last(input, normalized_shape), weight, eps), {})

    def matmul(self: Reader, input, other):
        x = self.cells(input, *LAST, "vector")
        if isinstance(other, Value) or len(self.shape_of(other)) != 2:
            raise self.refusal("multiplies maps, as attention does: a map whose channels come last by a matrix of weights is known")
        return self.formula((x, other), {})

    __matmul__ = matmul

    def einsum(self: Reader, equation, *operands):
        given = operands[0] if isinstance(operands[0], tuple) else operands
        read, _, written = equation.replace(" ", "").partition("->")
        places = {labels[-self.dims :] for labels, x in zip(read.split(","), given) if isinstance(x, Value) and x.form == "maps"}
        batch = {labels[:1] for labels, x in zip(read.split(","), given) if isinstance(x, Value)}
        others = "".join(labels for labels, x in zip(read.split(","), given) if not isinstance(x, Value))
        vectors = all(x.form == "vector" for x in given if isinstance(x, Value))
        of_cells = len(places) == 1 - vectors and len(batch) == 1 and "." not in equation and all(isinstance(x, (Kept, Made)) or vectors or x.form == "maps" for x in given)
        if not of_cells or written[:1] not in batch or not (vectors or written[-self.dims :] in places) or set(others) & set("".join(places | batch)):
            raise self.refusal("joins places of the image, as attention does: over channels alone, as bchw,kc->bkhw, it is known")
        return self.formula((equation, *given), {})

    def repeat(self: Reader, input, *sizes):
        return self.formula((self.cells(input), *sizes), {})

    def repeat_interleave(self: Reader, input, repeats, dim=None):
        return self.over_channels(input, (input, repeats, dim), dim)

    def relu(self: Reader, input, inplace=False):
        x = self.cells(input)
        return self.layer(nn.ReLU, x) if x.form == "maps" and x.plain else self.formula((x,), {})

    def leaky_relu(self: Reader, input, negative_slope=0.01, inplace=False):
        x = self.cells(input)
        return self.layer(nn.LeakyReLU, x, negative_slope) if x.form == "maps" and x.plain else self.formula((x, negative_slope), {})

    def dropout(self: Reader, input, p=0.5, training=True, inplace=False):
        return self.drop(nn.Dropout, input, p, training)

    def dropout2d(self: Reader, input, p=0.5, training=True, inplace=False):
        return self.drop((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)[self.dims - 1], self.map(input, "maps", "place"), p, training)

    dropout1d = dropout3d = feature_dropout = dropout2d

    def max_pool2d(self: Reader, input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        if return_indices:
            raise self.refusal("returns the places of the maxima, which are those of a tile, not of the image")
        settings = dict(kernel_size=kernel_size, stride=stride or kernel_size, padding=padding, dilation=dilation)
        kind, x = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[self.dims - 1], self.map(input)
        if has_sizes(kernel_size) and self.whole(kernel_size, x) and padding in (0, (0,) * self.dims):
            return self.of_image(lambda: Max(first=True), x, "place")
        return self.layer(kind, x, ceil_mode=ceil_mode, **self.fixed_all(settings))

    max_pool1d = max_pool3d = max_pool2d

    def avg_pool2d(self: Reader, input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        x, settings = self.map(input), dict(kernel_size=kernel_size, stride=stride or kernel_size, padding=padding)
        if has_sizes(kernel_size) and self.whole(kernel_size, x) and padding in (0, (0,) * self.dims):
            return self.of_image(Mean, x, "place")
        kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[self.dims - 1]
        more = {} if self.dims == 1 else dict(divisor_override=divisor_override)
        return self.layer(kind, x, ceil_mode=ceil_mode, count_include_pad=count_include_pad, **more, **self.fixed_all(settings))

    avg_pool1d = avg_pool3d = avg_pool2d

    def adaptive_avg_pool2d(self: Reader, input, output_size):
        x = self.map(input, "maps", "place")
        sizes = {c.shapes[0][2:] for c in self.current}
        if sizes == {(1,) * self.dims}:
            return x if x.form == "place" else self.of_image(Mean, x, "place")
        if x.form == "maps" and all(c.shapes[0] == shape for c, shape in zip(self.current, x.shapes)):
            return x
        if x.form == "place" or len(sizes) > 1:
            raise self.refusal(f"pools to {output_size}, whose cells depend on the image's size: to a grid of so many cells, as (2, 2), it is known")
        (grid,) = sizes
        return self.emit(lambda _: Mean(grid), [x], form="vector")

    adaptive_avg_pool1d = adaptive_avg_pool3d = adaptive_avg_pool2d

    def adaptive_max_pool2d(self: Reader, input, output_size, return_indices=False):
        x = self.map(input)
        if return_indices or {c.shapes[0][2:] for c in self.current} != {(1,) * self.dims}:
            raise self.refusal(f"takes the maxima of a grid of {output_size}, or their places: of the whole image, as by nn.AdaptiveMaxPool2d(1), it is known")
        return self.of_image(lambda: Max(first=True), x, "place")

    adaptive_max_pool1d = adaptive_max_pool3d = adaptive_max_pool2d

    def mean(self: Reader, input, dim=None, keepdim=False, dtype=None):
        return self.reduced(Mean, self.cells(input, *FORMS), dim, keepdim, "a mean")

    def norm(self: Reader, input, p="fro", dim=None, keepdim=False, dtype=None):
        """Of all places, or of channels."""
        x = self.cells(input)
        if self.all_of_cell(dim, x):
            return self.formula((x, p, dim, keepdim), {})
        if p not in (2, 2.0, "fro", None):
            raise self.refusal(f"takes a norm of order {p}: of order 2 it is known")
        made = self.over_places(lambda: Mean(total=True), self.applied(torch.square, x, "squares"), dim, keepdim, "a norm")
        return self.applied(_root, made, "root")

    def vector_norm(self: Reader, x, ord=2, dim=None, keepdim=False, dtype=None):
        return vars(Rules)["norm"](self, x, ord, dim, keepdim)

    def amax(self: Reader, input, dim=(), keepdim=False):
        return self.reduced(lambda: Max(first=False), self.cells(input, *FORMS), dim, keepdim, "a maximum")

    def amin(self: Reader, input, dim=(), keepdim=False):
        """The largest of what has the other sign, with the other sign."""
        x = self.cells(input)
        if self.all_of_cell(dim, x):
            return self.formula((x, dim, keepdim), {})
        made = self.over_places(lambda: Max(first=False), self.applied(torch.neg, x, "turned"), dim, keepdim, "a minimum")
        return self.applied(torch.neg, made, "back")

    def max(self: Reader, input, dim=None, keepdim=False):
        if isinstance(dim, Value):
            return self.formula((input, dim), {})
        if isinstance(input, Value) and input.form == "flat" and self.call.name == "max":
            return self.over_places(lambda: Max(first=True), input, dim, keepdim, "a maximum")
        if not self.all_of_cell(dim, self.cells(input)):
            raise self.refusal("takes a maximum: over channels it is known")
        return self.formula((input, dim, keepdim), {}, part=0)

    min = max

    def interpolate(self: Reader, input, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute_scale_factor=None, antialias=False):
        if self.is_grid(input):
            return self.spread(input, mode=mode, align_corners=align_corners)
        x = self.map(input, "maps", "place")
        if x.form == "place":
            return self.spread(x)
        if mode == "area":
            raise self.refusal("has mode area: nearest, bilinear and bicubic are known")
        factors = {tuple(m / n for m, n in zip(c.shapes[0][2:], had)) for c, had in zip(self.current, x.sizes)}
        if len(factors) > 1 or antialias:
            raise self.refusal("resizes by a factor that depends on the image's size, or with antialias: by a whole factor it is known")
        (factors,) = factors
        if all(f == 1 for f in factors):
            return x
        if any(f != int(f) for f in factors):
            raise self.refusal(f"resizes by {factors[0]:g}: by a whole factor it is known")
        return self.layer(nn.Upsample, x, scale_factor=tuple(float(f) for f in factors), mode=mode, align_corners=align_corners)

    upsample = interpolate

    def normalize(self: Reader, input, p=2.0, dim=1, eps=1e-12):
        return self.over_channels(input, (input, p, dim, eps), dim)

    def glu(self: Reader, input, dim=-1):
        return self.over_channels(input, (input, dim), dim)

    def pixel_shuffle(self: Reader, input, upscale_factor):
        return self.layer(nn.PixelShuffle, self.map(input), upscale_factor)

    def pad(self: Reader, input, pad, mode="constant", value=None):
        x, pad = self.map(input), tuple(pad)
        if (multiple := self.filled(x, pad)) is not None and mode == "constant" and not value:
            return self.emit(lambda _: Fill(multiple), [x])
        if has_sizes(pad):
            raise self.refusal("has a padding that depends on the image's size: zeros behind, up to a multiple of some pixels, are known")
        if not any(pad):
            return x
        if any(pad[2 * self.dims :]):
            if any(pad[: 2 * self.dims]):
                raise self.refusal("pads channels and places at once: do one after the other")
            return self.formula((x, pad, mode, value), {})
        sides = (*pad[: 2 * self.dims], *(0,) * (2 * self.dims - len(pad)))
        kind = {"constant": "Constant", "reflect": "Reflection", "replicate": "Replication", "circular": "Circular"}[mode]
        return self.layer(getattr(nn, f"{kind}Pad{self.dims}d"), x, sides, *((value or 0.0,) if mode == "constant" else ()))

    def cat(self: Reader, tensors, dim=0):
        empty = lambda x: isinstance(x, Made) and 0 in self.traces[0].calls[x.call].shapes[x.part]  # in the place of a map that a level has not
        maps = [self.any_form(x) for x in tensors if not empty(x)]
        if len(maps) == 1:
            return maps[0]
        if all(x.form in VECTORS for x in maps):
            maps = self.meeting(maps)
        if {x.form for x in maps} == {"maps", "place"} or self.axis(dim, maps[0]) != 1 or len({(x.form, x.sizes) for x in maps}) > 1:
            raise self.refusal("joins maps of several sizes, or along another dim than that of channels")
        return self.emit(lambda _: Cat(), maps)

    concat = concatenate = cat

    def stack(self: Reader, tensors, dim=0):
        maps = [self.cells(x) for x in tensors]
        if dim == 0 and all(x.form == "maps" for x in maps):
            return Stack(tuple(maps))
        joined = replace(maps[0], cell=(*maps[0].cell, 1))
        if self.axis(dim, joined) != 1:
            raise self.refusal("stacks maps: along a new dim of channels, or along a new first one, to be summed over that, it is known")
        return self.formula((tuple(maps), dim), {})

    def sum(self: Reader, input, dim=None, keepdim=False):
        if not isinstance(input, Stack):
            return self.reduced(lambda: Mean(total=True), self.cells(input, *FORMS), dim, keepdim, "a sum", "over all places, over channels, or over maps that were stacked")
        if dim != 0 or keepdim or len({x.shapes for x in input.maps}) > 1 or not all(x.plain for x in input.maps):
            raise self.refusal("takes a sum: over maps that were stacked it is known")
        return self.emit(lambda _: Sum(), input.maps)

    def mul(self: Reader, input, other):
        x, factor = (input, other) if isinstance(input, Value) else (other, input)
        if isinstance(factor, Made) and (made := self.dropped_images(x, factor)):
            return made
        return self.formula((input, other), {})

    multiply = mul

    def div(self: Reader, input, other, rounding_mode=None):
        made = self.formula((input, other), {} if rounding_mode is None else {"rounding_mode": rounding_mode})
        if isinstance(other, float) and rounding_mode is None:
            self.divisors[made.name] = other
        return made

    true_divide = divide = div

    def add(self: Reader, input, other, alpha=1):
        both = [input, other]
        if alpha == 1 and all(isinstance(x, Value) and x.form in ("maps", "last") for x in both) and (input.shapes, input.form, input.cell) == (other.shapes, other.form, other.cell):
            return self.emit(lambda _: Sum(), both)
        return self.formula((input, other), {} if alpha == 1 else {"alpha": alpha})

    def contiguous(self: Reader, input, memory_format=None):
        return input

    clone = contiguous

    def permute(self: Reader, input, *dims):
        return self.turned(input, dims[0] if isinstance(dims[0], tuple) else dims)

    def transpose(self: Reader, input, dim0, dim1):
        dims = list(range(self.rank(input)))
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
        return self.turned(input, dims)

    swapaxes = transpose

    def movedim(self: Reader, input, source, destination):
        rank = self.rank(input)
        dims = [d for d in range(rank) if d != source % rank]
        dims.insert(destination % rank, source % rank)
        return self.turned(input, dims)

    moveaxis = movedim

    def view(self: Reader, input, *shape):
        return self.reshaped(input)

    def flatten(self: Reader, input, start_dim=0, end_dim=-1):
        return self.reshaped(input)

    reshape = squeeze = unsqueeze = unflatten = view

    def expand(self: Reader, input, *sizes):
        x = self.cells(input, "place")
        if all(c.shapes[0] == (shape[0], *x.cell, *(1,) * self.dims) for c, shape in zip(self.current, x.shapes)):
            return x
        return self.spread(x)

    expand_as = expand

    def softmax(self: Reader, input, dim=None, **more):
        x = self.cells(input)
        if dim is None or self.axis(dim, x) != 1:
            raise self.refusal("runs over places of the image, as attention does: over channels it is known")
        return self.formula((x,), dict(dim=dim))

    log_softmax = softmax

    def chunk(self: Reader, input, chunks, dim=0):
        return self.parts(input, (input, chunks, dim), dim)

    def split(self: Reader, tensor, split_size, dim=0):
        return self.parts(tensor, (tensor, split_size, dim), dim)

    def unbind(self: Reader, input, dim=0):
        return self.parts(input, (input, dim), dim)

    def select(self: Reader, input, dim, index):
        return self.over_channels(input, (input, dim, index), dim, _PART)

    def narrow(self: Reader, input, dim, start, length):
        return self.over_channels(input, (input, dim, start, length), dim, _PART)

    def __getitem__(self: Reader, input, index):
        index, x = index if isinstance(index, tuple) else (index,), self.cells(input)
        if x.form in VECTORS and any(i is None or isinstance(i, int) for i in index):
            return self.reshaped(x)
        if self.of_channels(x, [i for i in index if i is not None]):
            return self.formula((x, index), {})
        if (made := self.cut_to(x, list(index))) is not None:
            return made
        raise self.refusal("takes a part of the image, or of the batch: of the channels, as x[:, 2:5], it is known")


def _root(x: Tensor) -> Tensor:
    """Of squares, whose gradient is 0 where they are."""
    some = x > 0
    return x.where(some, 1).sqrt() * some
