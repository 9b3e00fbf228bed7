"""Rules that turn a recorded PyTorch call into layers.

Each method of a rule class has the name and the arguments of a PyTorch function. Feature maps among
its arguments are :class:`distseg.models.capture.values.Value`, and it returns the value of the
result. Pointwise functions need no rule (:mod:`distseg.models.pointwise`).
:mod:`distseg.models.capture.rules_channels` has the rules for channels,
:mod:`distseg.models.capture.rules_statistics` has the rules for statistics.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from distseg.models.axes import Axis, places_of
from distseg.models.capture.arranging import filled_up, whole
from distseg.models.capture.depth import over_depth, through
from distseg.models.capture.folding import Deep, Folded, is_alone, of_joined, unfolded
from distseg.models.capture.image_weights import convolved
from distseg.models.capture.lining import of_lines, rows_pooled, rows_taken
from distseg.models.capture.moved import padded
from distseg.models.capture.reader import Reader, has_sizes
from distseg.models.capture.reducing import of_image
from distseg.models.capture.rules_channels import Channels
from distseg.models.capture.rules_moving import Moving
from distseg.models.capture.rules_places import Places
from distseg.models.capture.rules_statistics import Statistics
from distseg.models.capture.trace import Kept, Made, found_in
from distseg.models.capture.values import Value
from distseg.models.layers import (
    RANKS_OF_DROPOUTS,
    ByType,
    Fill,
    FramesNorm,
    Max,
    Mean,
    Sum,
    VectorNorm,
)
from distseg.models.pointwise import POINTWISE_FUNCTIONS
from distseg.models.resize import ResizeTo


def made(reader: Reader, args: tuple, kwargs: dict) -> Any:
    """Add layers for the current call, and return the result, or a tuple of results.

    The current call is the recorded call that is being turned into layers. In its arguments and
    results, a :class:`Value` stands for each tensor that is computed from the image.

    Args:
        args, kwargs: the call's arguments.

    Raises:
        CanNotCapture: the call is not supported. The message names the call and how to fix it.
    """
    if any(x.joined for x in found_in((args, kwargs), Value)):
        return of_joined(reader, _made, args, kwargs)
    return _made(reader, args, kwargs)


def _made(reader: Reader, args: tuple, kwargs: dict) -> Any:
    """Add layers for the current call by the rule for its function, and return the result.

    A pointwise function without a rule of its own becomes a pointwise layer. The arguments are
    those of :func:`made`.
    """
    name = reader.call.name
    numbers = found_in((args, kwargs), ByType)
    if numbers and name not in POINTWISE_FUNCTIONS | _ARITHMETIC:
        raise reader.refusal(
            f"is given the number {numbers[0]!r}, but a number that depends on a dtype is "
            "supported only in pointwise functions: write a plain number instead"
        )
    tracks = name == "instance_norm" and any(
        x is not None for x in (*args[1:3], kwargs.get("running_mean"))
    )
    if (
        args
        and isinstance(args[0], Value)
        and len(found_in((args, kwargs), Value)) == 1
        and is_alone(args[0], name)
        and not tracks
    ):
        return reader.formula(args, kwargs)
    if rule := _RULES.get(name):
        try:
            return rule(reader, *args, **kwargs)
        except Folded as raised:
            return unfolded(reader, rule, raised, args, kwargs)
        except Deep as raised:
            return through(reader, rule, raised, args, kwargs)
    if name in POINTWISE_FUNCTIONS:
        return reader.pointwise(args, kwargs)
    raise reader.refusal(
        "is not supported: write it as convolutions, poolings, up-samplings, norms and "
        "pointwise functions"
    )


_ARITHMETIC = set(
    "add mul multiply div true_divide __add__ __radd__ __mul__ __rmul__ __truediv__".split()
)
_OF_MAXIMA = (
    "returns the positions of the maxima (return_indices=True), which would be positions in a "
    "tile, not in the image: set return_indices=False"
)


class Rules:
    """Rules for calls of convolutions, norms, poolings, dropouts and recurrent cells.

    Each method is the rule for the PyTorch function of the same name. Its argument ``self`` is not
    an object of this class but the :class:`Reader` that captures the network. The method adds
    layers for the reader's current call, and returns their output, a :class:`Value`.
    """

    def conv2d(self: Reader, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        given, x = (input, weight, bias, stride, padding, dilation, groups), self.value(input)
        if isinstance(weight, Value) or isinstance(bias, Value):
            return convolved(self, x, *given[1:])
        kernel = self.shape_of(weight)
        if (
            x.vector
            or not x.plain
            and self.of_channels(1, x)
            and set(kernel[2:]) == {1}
            and set(self.each(stride)) == {1}
            and set(self.each(padding)) <= {0, "valid"}
        ):
            return self.formula(given, {})
        settings = dict(
            stride=self.each(stride),
            padding=self.each(padding),
            dilation=self.each(dilation),
            groups=groups,
        )
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.dims - 1]
        return self.layer(
            kind,
            self.map(x),
            kernel[1] * groups,
            kernel[0],
            kernel[2:],
            bias=bias is not None,
            tensors=dict(weight=weight, bias=bias),
            **self.fixed_all(settings),
        )

    conv1d = conv3d = conv2d

    def conv_transpose2d(
        self: Reader,
        input,
        weight,
        bias=None,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        dilation=1,
    ):
        x, kernel = self.map(input), self.shape_of(weight)
        settings = dict(
            stride=self.each(stride),
            padding=self.each(padding),
            output_padding=self.each(output_padding),
            dilation=self.each(dilation),
            groups=groups,
        )
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[self.dims - 1]
        return self.layer(
            kind,
            x,
            kernel[0],
            kernel[1] * groups,
            kernel[2:],
            bias=bias is not None,
            tensors=dict(weight=weight, bias=bias),
            **self.fixed_all(settings),
        )

    conv_transpose1d = conv_transpose3d = conv_transpose2d

    def linear(self: Reader, input, weight, bias=None):
        x = self.value(input)
        if not self.of_channels(-1, x):
            raise self.refusal(
                f"multiplies {x!r} with a separate weight for each position, but a tile has only "
                "some positions: permute the input so that channels are the last dim"
            )
        return self.formula((x, weight, bias), {})

    def batch_norm(
        self: Reader,
        input,
        running_mean,
        running_var,
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    ):
        x = self.value(input)
        settings = running_mean, running_var, weight, bias, training, momentum, eps
        if not training and running_mean is not None:
            return self.formula((x, *settings), {})
        # The batch dim has all pixels, each with a series: (N * H * W, C, T).
        if (
            x.rank == 3
            and x.axes[0] == Axis(True, 1, tuple(range(self.dims)))
            and all(axis.of_channels for axis in x.axes[1:])
        ):
            deep = replace(
                x, axes=(Axis(True), *x.axes[1:], *(Axis(places=(d,)) for d in range(self.dims)))
            )
            return replace(
                over_depth(self, vars(Rules)["batch_norm"], deep, (deep, *settings), {}),
                axes=x.axes,
            )
        # The batch dim has all pixels of all images: (N * H * W, C).
        flat = x.rank == 2 and x.axes[0] == Axis(True, 1, tuple(range(self.dims)))
        channels = x.channels if flat else _one_dim_of_channels(self, x)
        if (
            isinstance(running_mean, Kept)
            and self.keepers.setdefault(running_mean.name, self.call.module) != self.call.module
        ):
            raise self.refusal(
                "uses the running statistics of another module: call that module, or give each "
                "module statistics of its own"
            )
        tensors = dict(running_mean=running_mean, running_var=running_var)
        if (
            isinstance(running_mean, Kept)
            and (count := f"{running_mean.name.rpartition('.')[0]}.num_batches_tracked".lstrip("."))
            in self.shapes
        ):
            tensors["num_batches_tracked"] = Kept(count)
        kind, more = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[self.dims - 1], {}
        if x.vector:
            kind, more = VectorNorm, dict(parts=0 if x.line else x.channels // channels)
        elif self.folding and self.folding.times > 1:
            channels //= self.folding.times
            kind, more = FramesNorm, dict(frames=self.folding.times)
        return self.norm(
            kind,
            x,
            channels,
            eps,
            momentum,
            weight=weight,
            bias=bias,
            tensors=tensors,
            track_running_stats=running_mean is not None,
            **more,
        )

    def instance_norm(
        self: Reader,
        input,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
    ):
        x = self.value(input)
        if x.line and running_mean is None and use_input_stats:
            return self.formula((x, None, None, weight, bias, True, momentum, eps), {})
        if x.vector or _one_dim_of_channels(self, x) != x.channels:
            raise self.refusal(
                f"normalises {x!r} by an instance norm; supported: a feature map (N, C, ...) with "
                "all channels in dim 1: permute or reshape it to this form"
            )
        if running_mean is not None or not use_input_stats:
            raise self.refusal(
                "has running statistics, which are not supported for instance norms: set "
                "track_running_stats=False"
            )
        if self.folding:
            return self.norm(
                nn.GroupNorm,
                x,
                x.channels // self.folding.each,
                x.channels,
                eps,
                weight=weight,
                bias=bias,
            )
        kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[self.dims - 1]
        return self.norm(kind, x, x.channels, eps, momentum, weight=weight, bias=bias)

    def group_norm(self: Reader, input, num_groups, weight=None, bias=None, eps=1e-5):
        x = self.value(input)
        if x.vector:
            return self.formula((x, num_groups, weight, bias, eps), {})
        if _one_dim_of_channels(self, x) != x.channels:
            raise self.refusal(
                f"normalises {x!r} by a group norm; supported: a feature map (N, C, ...) with all "
                "channels in dim 1: permute or reshape it to this form"
            )
        return self.norm(
            nn.GroupNorm,
            x,
            num_groups * (self.folding.times if self.folding else 1),
            x.channels,
            eps,
            weight=weight,
            bias=bias,
        )

    def layer_norm(self: Reader, input, normalized_shape, weight=None, bias=None, eps=1e-5):
        x, over = self.value(input), tuple(normalized_shape)
        dims = range(x.rank - len(over), x.rank)
        if self.of_channels(tuple(dims), x):
            return self.formula((x, over, weight, bias, eps), {})
        if weight is not None or bias is not None:
            raise self.refusal(
                "normalises over positions of the image with a separate weight for each position, "
                "but a tile has only some positions: normalise over channels, or without weights "
                "(elementwise_affine=False)"
            )
        kept = x.axes[: x.rank - len(over)]
        cells = [axis.cell for axis in kept if axis.cell != 1]
        if (
            x.vector
            or sorted(places_of(x.axes[len(kept) :])) != list(range(self.dims))
            or any(axis.mixed for axis in kept)
        ):
            raise self.refusal(
                f"normalises over some dims of {x!r}; supported: over channels, over all "
                "positions, or over both"
            )
        return self.layer(nn.GroupNorm, x, math.prod(cells), x.channels, eps, False, axes=x.axes)

    def rms_norm(self: Reader, input, normalized_shape, weight=None, eps=None):
        x, over = self.value(input), tuple(normalized_shape)
        if not self.of_channels(tuple(range(x.rank - len(over), x.rank)), x):
            raise self.refusal(
                "normalises over positions of the image, which is not supported: permute the "
                "input so that channels are the last dims"
            )
        return self.formula((x, over, weight, eps), {})

    def local_response_norm(self: Reader, input, size, alpha=1e-4, beta=0.75, k=1.0):
        return self.formula((self.map(input), size, alpha, beta, k), {})

    def gru(
        self: Reader, input, hx, weights, biases, layers, dropout, training, both_ways, batch_first
    ):
        x = self.value(input)
        if x.rank == 3 and dropout and training and layers > 1:
            raise self.refusal(
                "has dropout between its layers: use one module per layer, with nn.Dropout between "
                "them"
            )
        along = 1 if batch_first else 0
        if x.rank != 3 or x.axes[along].places or x.axes[along].batch or not self.of_channels(2, x):
            raise self.refusal(
                "is a recurrent layer that runs over the positions of the image one after another "
                f"({x!r}), but a tile has only some positions; supported: a sequence of channels "
                "at each position"
            )
        given = (x, hx, weights, biases, layers, dropout, training, both_ways, batch_first)
        return tuple(self.formula(given, {}, part) for part in range(len(self.call.shapes)))

    lstm = rnn_tanh = rnn_relu = gru

    def gru_cell(self: Reader, input, hx, *weights):
        x = self.value(input)
        if not self.of_channels(-1, x):
            raise self.refusal(
                f"multiplies the last dim of {x!r}, which is not channels, so each position has "
                "its own weight, which is not supported: permute the input so that channels are "
                "the last dim, as in (N, H, W, C)"
            )
        return self.formula((input, hx, *weights), {})

    rnn_tanh_cell = rnn_relu_cell = gru_cell

    def lstm_cell(self: Reader, input, hx, *weights):
        x = self.value(input)
        if not self.of_channels(-1, x):
            raise self.refusal(
                f"multiplies the last dim of {x!r}, which is not channels, so each position has "
                "its own weight, which is not supported: permute the input so that channels are "
                "the last dim, as in (N, H, W, C)"
            )
        return tuple(self.formula((input, hx, *weights), {}, part) for part in range(2))

    def prelu(self: Reader, input, weight):
        x = self.value(input)
        if self.shape_of(weight) not in ((), (1,)) and not self.of_channels(1, x):
            raise self.refusal(
                f"takes {x!r}, but has a slope for each channel: permute the input so that "
                f"channels are dim 1"
            )
        return self.formula((x, weight), {})

    def relu(self: Reader, input, inplace=False):
        x = self.value(input)
        return self.layer(nn.ReLU, x) if x.plain else self.formula((x,), {})

    def leaky_relu(self: Reader, input, negative_slope=0.01, inplace=False):
        x = self.value(input)
        return (
            self.layer(nn.LeakyReLU, x, negative_slope)
            if x.plain
            else self.formula((x, negative_slope), {})
        )

    def glu(self: Reader, input, dim=-1):
        if not self.of_channels(dim, self.value(input)):
            raise self.refusal(
                "splits a spatial dim into two parts, but only channels can be split: set dim to "
                "the dim of channels, which is 1 for an input (N, C, H, W)"
            )
        return self.formula((input, dim), {})

    def dropout(self: Reader, input, p=0.5, training=True, inplace=False):
        return self.drop(nn.Dropout, input, p, training)

    def dropout2d(self: Reader, input, p=0.5, training=True, inplace=False):
        x, ranks = self.value(input), RANKS_OF_DROPOUTS.get(self.call.name)
        if ranks and x.rank not in ranks and training and p:
            raise self.refusal(
                f"is given a tensor of {x.rank} dims, which PyTorch takes for one image without a "
                f"batch dim: use nn.Dropout1d for inputs of 3 dims, nn.Dropout2d for 4 and "
                f"nn.Dropout3d for 5"
            )
        if (
            not (
                x.plain or x.vector and not x.line and x.axes[1:2] and x.axes[1].cell == x.channels
            )
            and training
            and p
        ):
            raise self.refusal(
                f"drops channels of {x!r}; supported: a feature map (N, C, ...): permute or "
                "reshape it to this form"
            )
        return self.drop((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)[self.dims - 1], x, p, training)

    dropout1d = dropout3d = feature_dropout = dropout2d

    def max_pool2d(
        self: Reader,
        input,
        kernel_size,
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
        return_indices=False,
    ):
        if return_indices:
            raise self.refusal(_OF_MAXIMA)
        settings = dict(
            kernel_size=kernel_size,
            stride=stride or kernel_size,
            padding=padding,
            dilation=dilation,
        )
        kind, x = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[self.dims - 1], self.map(input)
        if (
            has_sizes(kernel_size)
            and whole(self, kernel_size, x)
            and padding in (0, (0,) * self.dims)
        ):
            return of_image(self, x, lambda: Max(first=True))
        if has_sizes(kernel_size) and (over := rows_taken(self, x, kernel_size, padding, dilation)):
            return of_lines(self, x, over, lambda: Max(first=True))
        return self.layer(kind, x, ceil_mode=ceil_mode, **self.fixed_all(settings))

    max_pool1d = max_pool3d = max_pool2d

    def avg_pool2d(
        self: Reader,
        input,
        kernel_size,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    ):
        x = self.map(input)
        settings = dict(kernel_size=kernel_size, stride=stride or kernel_size, padding=padding)
        if (
            has_sizes(kernel_size)
            and whole(self, kernel_size, x)
            and padding in (0, (0,) * self.dims)
        ):
            return of_image(self, x, Mean)
        if (
            has_sizes(kernel_size)
            and divisor_override is None
            and (over := rows_taken(self, x, kernel_size, padding))
        ):
            return of_lines(self, x, over, Mean)
        kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[self.dims - 1]
        more = {} if self.dims == 1 else dict(divisor_override=divisor_override)
        return self.layer(
            kind,
            x,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            **more,
            **self.fixed_all(settings),
        )

    avg_pool1d = avg_pool3d = avg_pool2d

    def adaptive_avg_pool2d(self: Reader, input, output_size):
        x = self.value(input)
        sizes = {c.shapes[0][-self.dims :] for c in self.current}
        if x.grid and (sizes == {x.grid} or set(x.grid) == {1} and sizes == {(1,) * self.dims}):
            return x
        if x.vector:
            return self.formula((x, output_size), {})
        x = self.map(x)
        if sizes == {(1,) * self.dims}:
            return of_image(self, x, Mean)
        if all(c.shapes[0] == shape for c, shape in zip(self.current, x.shapes)):
            return x
        if over := rows_pooled(self, x):
            return of_lines(self, x, over, Mean)
        if len(sizes) > 1 and all(
            len(set(along)) > 1 for along in zip(*(c.shapes[0][-self.dims :] for c in self.current))
        ):
            like, rules = self.followed(x, tuple(c.shapes[0][2:] for c in self.current))
            return self.following(lambda: ResizeTo(rules, "area"), x, like, rules)
        if len(sizes) > 1:
            raise self.refusal(
                f"pools to {output_size}, a grid that depends on the image's size along some dims "
                f"only; supported: a grid of a fixed size, such as (2, 2)"
            )
        (grid,) = sizes
        return _to_grid(self, x, Mean(grid))

    adaptive_avg_pool1d = adaptive_avg_pool3d = adaptive_avg_pool2d

    def adaptive_max_pool2d(self: Reader, input, output_size, return_indices=False):
        x = self.map(input)
        sizes = {c.shapes[0][2:] for c in self.current}
        if not return_indices and (over := rows_pooled(self, x)):
            return of_lines(self, x, over, lambda: Max(first=True))
        if return_indices:
            raise self.refusal(_OF_MAXIMA)
        if len(sizes) > 1:
            raise self.refusal(
                f"pools to {output_size}, a grid that depends on the image's size; supported: a "
                "grid of fixed size, such as (2, 2)"
            )
        if sizes == {(1,) * self.dims}:
            return of_image(self, x, lambda: Max(first=True))
        return _to_grid(self, x, Max(True, sizes.pop()))

    adaptive_max_pool1d = adaptive_max_pool3d = adaptive_max_pool2d

    def lp_pool2d(self: Reader, input, norm_type, kernel_size, stride=None, ceil_mode=False):
        x, p = self.map(input), float(norm_type)
        kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[self.dims - 1]
        powers = self.applied(partial(torch.pow, exponent=p), [x], "powers")
        if has_sizes(kernel_size) and whole(self, kernel_size, x):
            total = of_image(self, powers, partial(Mean, total=True), "total")
            return self.applied(partial(_rooted, count=1, p=p), [total], "root")
        settings = self.fixed_all(
            dict(kernel_size=self.each(kernel_size), stride=self.each(stride or kernel_size))
        )
        means = self.layer(kind, powers, ceil_mode=ceil_mode, **settings)
        return self.applied(
            partial(_rooted, count=math.prod(settings["kernel_size"]), p=p), [means], "root"
        )

    lp_pool1d = lp_pool3d = lp_pool2d

    def pad(self: Reader, input, pad, mode="constant", value=None):
        x, pad = self.value(input), tuple(pad)
        if x.vector:
            return self.formula((x, self.fixed(pad, "padding"), mode, value), {})
        if (
            x.plain
            and (multiple := filled_up(self, x, pad)) is not None
            and mode == "constant"
            and not value
        ):
            return self.emit(lambda _: Fill(multiple), [x])
        return padded(self, x, pad, mode, value)

    def mul(self: Reader, input, other):
        x, factor = (input, other) if isinstance(input, Value) else (other, input)
        if isinstance(factor, Made) and (made := self.dropped_images(x, factor)):
            return made
        return self.pointwise((input, other), {})

    multiply = mul

    def div(self: Reader, input, other, rounding_mode=None):
        made = self.pointwise(
            (input, other), {} if rounding_mode is None else {"rounding_mode": rounding_mode}
        )
        if isinstance(other, float) and rounding_mode is None:
            self.divisors[made.name] = other
        return made

    true_divide = divide = div

    def add(self: Reader, input, other, alpha=1):
        both = [input, other]
        if (
            alpha == 1
            and all(isinstance(x, Value) and not x.vector and x.dtype is None for x in both)
            and (input.shapes, input.axes) == (other.shapes, other.axes)
        ):
            return self.emit(lambda _: Sum(), both, axes=input.axes)
        return self.pointwise((input, other), {} if alpha == 1 else {"alpha": alpha})


def _to_grid(reader: Reader, x: Value, layer: Mean) -> Value:
    """Add a layer that pools a map to a grid of fixed size; return its output (N, C, *grid).

    Args:
        x: the map (N, C, *size).
        layer: the adaptive pooling, a mean or a maximum, with the grid as ``layer.grid``.
    """
    return reader.emit(
        lambda _: layer,
        [x],
        axes=(
            x.axes[0],
            x.axes[1],
            *(axis._replace(cell=n, places=()) for axis, n in zip(x.axes[2:], layer.grid)),
        ),
    )


def _one_dim_of_channels(reader: Reader, x: Value) -> int:
    """Return C, the length of dim 1, of a map or vector (N, C, ...).

    Refuse a map that has channels in another dim too, and a tensor whose first two dims are not
    images and channels.
    """
    reader.unfold(x)
    there = x.rank > 1 and x.axes[0] == Axis(True) and x.axes[1].of_channels and not x.axes[1].whole
    if not there or not x.vector and any(axis.cell != 1 for axis in x.axes[2:]):
        raise reader.refusal(
            f"takes {x!r}, but images and channels must come first: permute it to (N, C, ...)"
        )
    return x.axes[1].cell


def _rooted(means: torch.Tensor, count: int, p: float) -> torch.Tensor:
    """Return the result of ``F.lp_pool2d``: (sum of x ** p) ** (1 / p) over each window.

    Args:
        means: the mean of x ** p over each window.
        count: the number of cells in a window, so that the sum is ``count`` times the mean.
        p: the exponent.
    """
    return (torch.sign(means) * torch.relu(torch.abs(means))).mul(count).pow(1.0 / p)


_RULES = {
    name: rule
    for group in (Rules, Channels, Moving, Places, Statistics)
    for name, rule in vars(group).items()
    if not name.startswith("__") or name in ("__getitem__", "__matmul__", "__rmatmul__")
}
