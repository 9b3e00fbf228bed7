"""Rules for functions that reshape maps, or that take, join or change channels.

They also cover functions that make a tensor from numbers, such as ``torch.ones``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distseg.models.axes import Axes, Axis, axes_of, channels_of, places_of
from distseg.models.capture.arranging import cut_to, expanded, indexed, over_channels, parts, turned
from distseg.models.capture.assigning import assigned, assigns_to_places
from distseg.models.capture.folding import joined_batches
from distseg.models.capture.moved import places_taken
from distseg.models.capture.placing import joined_positions
from distseg.models.capture.reader import POSITIONS, Reader, follows_size, has_sizes
from distseg.models.capture.regrouping import reshaped
from distseg.models.capture.trace import Kept, Made
from distseg.models.capture.values import Value
from distseg.models.layers import Cat, Formula, Map, Read, Step

_PART = "takes a part of the image or of the batch; supported: a part of the channels"


class Channels:
    """Rules for calls of functions that reshape, index, join or fill tensors.

    Each method is the rule for the PyTorch function of the same name. Its argument ``self`` is not
    an object of this class but the :class:`Reader` that captures the network. The method adds
    layers for the reader's current call, and returns their output, a :class:`Value`.
    """

    # the same values in another shape or type

    def permute(self: Reader, input, *given, dims=None):
        dims = given or (dims,)
        return turned(self, self.value(input), dims[0] if isinstance(dims[0], tuple) else dims)

    def transpose(self: Reader, input, dim0, dim1):
        x = self.value(input)
        dims = list(range(x.rank))
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
        return turned(self, x, dims)

    swapaxes = swapdims = transpose

    def t(self: Reader, input, *_):
        x = self.value(input)
        return turned(self, x, range(x.rank)[::-1])

    T = t

    def mT(self: Reader, input, *_):
        return vars(Channels)["transpose"](self, input, -1, -2)

    def movedim(self: Reader, input, source, destination):
        x = self.value(input)
        pairs = dict(zip(self.dims_of(destination, x), self.dims_of(source, x)))
        rest = iter(d for d in range(x.rank) if d not in pairs.values())
        return turned(self, x, [pairs[d] if d in pairs else next(rest) for d in range(x.rank)])

    moveaxis = movedim

    def view(self: Reader, input, *shape, **named):
        return reshaped(self, self.value(input))

    reshape = flatten = squeeze = unsqueeze = unflatten = view_as = reshape_as = view

    def expand(self: Reader, input, *sizes):
        if isinstance(input, Value):
            return expanded(self, input)
        return _expanded_over(self, input) if follows_size(self.current) else None

    expand_as = broadcast_to = expand

    def repeat(self: Reader, input, *sizes):
        if not isinstance(input, Value):
            return _expanded_over(self, input) if follows_size(self.current) else None
        x = self.value(input)
        return expanded(self, x) if has_sizes(sizes) else self.formula((x, *sizes), {})

    tile = repeat

    def contiguous(self: Reader, input, memory_format=None):
        return self.value(input)

    clone = contiguous

    def copy(self: Reader, input, src, non_blocking=False):
        x = self.value(src)
        if (
            self.made(x) != x.axes
            or x.dtype is not None
            or not self.call.dtypes[0].is_floating_point
        ):
            raise self.refusal(
                f"copies {x!r} of {_numbers(x.dtype)} numbers to a tensor of shape "
                f"{self.call.shapes[0]} of {_numbers(self.call.dtypes[0])} numbers: give both "
                f"tensors the same shape, and a floating-point dtype"
            )
        return x

    def requires_grad(self: Reader, input, wanted=True):
        # PyTorch allows this only for a tensor without a gradient function.
        return input

    def to(self: Reader, input, *settings, **more):
        return _cast(self, input)

    type_as = type = float = double = long = int = bool = to

    def cuda(self: Reader, input, *_, **more):
        raise self.refusal(
            "moves a tensor to a fixed device: use the device of x, as in torch.zeros(..., "
            "device=x.device)"
        )

    cpu = cuda

    # some of the channels

    def chunk(self: Reader, input, chunks, dim=0):
        return parts(self, input, (input, chunks, dim), dim)

    def split(
        self: Reader,
        tensor,
        split_size=None,
        dim=0,
        *,
        split_size_or_sections=None,
        split_sizes=None,
    ):
        return parts(
            self, tensor, (tensor, split_size or split_size_or_sections or split_sizes, dim), dim
        )

    split_with_sizes = split

    def tensor_split(
        self: Reader, input, sections=None, dim=0, *, indices_or_sections=None, indices=None
    ):
        return parts(self, input, (input, sections or indices_or_sections or indices, dim), dim)

    def unbind(self: Reader, input, dim=0):
        return parts(self, input, (input, dim), dim)

    def select(self: Reader, input, dim, index):
        return over_channels(self, input, (input, dim, index), dim, _PART)

    def index_select(self: Reader, input, dim, index):
        return over_channels(self, input, (input, dim, index), dim, _PART)

    def gather(self: Reader, input, dim, index):
        return over_channels(self, input, (input, dim, index), dim, _PART)

    def embedding(
        self: Reader,
        input,
        weight,
        padding_idx=None,
        max_norm=None,
        norm_type=2.0,
        scale_grad_by_freq=False,
        sparse=False,
    ):
        options = {
            "max_norm": max_norm is not None,
            "scale_grad_by_freq": scale_grad_by_freq,
            "sparse": sparse,
        }
        if used := " and ".join(name for name, is_used in options.items() if is_used):
            raise self.refusal(
                f"changes its weights or their gradients by {used}, which is not supported: leave "
                f"out {used}"
            )
        return self.formula((input, weight, padding_idx), {})

    def take_along_dim(self: Reader, input, indices, dim=None):
        return over_channels(self, input, (input, indices, dim), dim, _PART)

    def one_hot(self: Reader, tensor, num_classes=-1):
        return self.formula((tensor, num_classes), {})

    def diagonal(self: Reader, input, offset=0, dim1=0, dim2=1):
        return over_channels(self, input, (input, offset, dim1, dim2), (dim1, dim2), _PART)

    def triu(self: Reader, input, diagonal=0):
        return over_channels(self, input, (input, diagonal), (-2, -1), _PART)

    tril = triu

    def cumsum(self: Reader, input, dim):
        return over_channels(self, input, (input, dim), dim)

    cumprod = cumsum

    def prod(self: Reader, input, dim=None, keepdim=False):
        return over_channels(
            self,
            input,
            (input, dim, keepdim) if dim is not None else (input,),
            dim,
            "multiplies all positions of the image with each other; supported: over channels",
        )

    def __getitem__(self: Reader, input, index):
        if not isinstance(input, Value) and isinstance(index, Value) and index.dtype == torch.int64:
            # An index into learned vectors.
            return self.formula((input, index), {})
        index, x = index if isinstance(index, tuple) else (index,), self.value(input)
        if (made := cut_to(self, x, index)) is not None:
            return made
        x, rest = places_taken(self, x, index) if not x.vector else (x, index)
        if all(i is Ellipsis or i == slice(None) for i in rest):
            return x
        return indexed(self, x, rest)

    # channels that are changed

    def changed(self: Reader, input, index, value):
        """Add layers for the assignment ``input[index] = value``; return the changed ``input``."""
        x = self.value(input)
        if isinstance(index, Value):
            if index.axes != x.axes or isinstance(value, (Value, Kept, Made)):
                raise self.refusal(
                    "assigns to positions that a mask selects; supported: torch.where, or a mask "
                    "of the tensor's own shape and a number as value"
                )
            return self.formula((x, index, value), {})
        index = index if isinstance(index, tuple) else (index,)
        if not x.vector and assigns_to_places(x, index, len(self.traces)):
            return assigned(self, x, index, value)
        return indexed(self, x, index, value)

    def index_copy(self: Reader, input, dim, index, source, **more):
        return over_channels(self, input, (input, dim, index, source), dim, _PART)

    def index_add(self: Reader, input, dim, index, source, *, alpha=1):
        return over_channels(self, input, (input, dim, index, source), dim, _PART)

    def index_fill(self: Reader, input, dim, index, value):
        return over_channels(self, input, (input, dim, index, value), dim, _PART)

    def scatter(self: Reader, input, dim, index, src):
        return over_channels(self, input, (input, dim, index, src), dim, _PART)

    scatter_add = scatter

    # several maps

    def cat(self: Reader, tensors, dim=0):
        # Some networks join an empty tensor where a level has no map.
        def empty(x):
            return isinstance(x, Made) and 0 in self.traces[0].calls[x.call].shapes[x.part]

        given = list(joined_positions(self, tuple(x for x in tensors if not empty(x))))
        maps = [x for x in given if isinstance(x, Value)]
        if len(given) == 1:
            return maps[0]
        if (
            len(maps) == len(given)
            and dim in (0, -maps[0].rank)
            and (made := joined_batches(self, maps)) is not None
        ):
            return made
        if not all(self.of_channels(dim, x) for x in maps) or len({x.rank for x in maps}) > 1:
            raise self.refusal(
                f"concatenates {' and '.join(map(repr, dict.fromkeys(maps)))} along dim {dim}; "
                f"supported: feature maps with the same number of dims, along channels"
            )
        if all(x.vector for x in maps):
            maps = self.meeting(maps)
        at = dim % maps[0].rank
        if len({(x.sizes, x.axes[:at], x.axes[at + 1 :]) for x in maps}) > 1:
            raise self.refusal(
                f"concatenates {' and '.join(map(repr, maps))}, whose other dims differ in size or "
                f"order: bring them to the same dims before (resize, permute or reshape)"
            )
        if (
            len(maps) == len(given)
            and all(x.plain for x in maps)
            or all(x.vector and x.axes[1] == Axis(cell=x.channels) for x in maps)
            and at == 1
            and len(maps) == len(given)
        ):
            cell = sum(x.axes[1].cell for x in maps)
            return self.emit(
                lambda _: Cat(),
                maps,
                axes=(maps[0].axes[0], maps[0].axes[1]._replace(cell=cell), *maps[0].axes[2:]),
            )
        return self.formula((tuple(given), dim), {})

    concat = concatenate = cat

    def stack(self: Reader, tensors, dim=0):
        tensors = joined_positions(self, tensors)
        maps = [self.value(x) for x in tensors if isinstance(x, Value)]
        made = self.formula((tensors, dim), {})
        if len(maps) == len(tensors) and dim == 0:
            self.stacks[made.name] = tuple(maps)
        return made

    # tensors made from numbers

    def zeros_like(self: Reader, input, **settings):
        return self.formula((input,), {}) if isinstance(input, Value) else None

    ones_like = zeros_like

    def full_like(self: Reader, input, fill_value, **settings):
        return self.formula((input, fill_value), {}) if isinstance(input, Value) else None

    def zeros(self: Reader, *size, **settings):
        return _alike(self, 0.0)

    def ones(self: Reader, *size, **settings):
        return _alike(self, 1.0)

    def full(self: Reader, size, fill_value, **settings):
        return _alike(self, fill_value)

    def new_zeros(self: Reader, input, *size, **settings):
        return _alike(self, 0.0)

    def new_ones(self: Reader, input, *size, **settings):
        return _alike(self, 1.0)

    def new_full(self: Reader, input, size, fill_value, **settings):
        return _alike(self, fill_value)

    def new_tensor(self: Reader, input, data, **settings):
        return None

    def empty_like(self: Reader, input, **settings):
        return None

    new_empty = empty_like


def _numbers(dtype: torch.dtype | None) -> str:
    """Return a dtype in words, for messages; None stands for the floating-point dtype of maps."""
    if dtype is None or dtype.is_floating_point:
        return "floating-point"
    return str(dtype).removeprefix("torch.")


def _cast(reader: Reader, x: Any) -> Value | None:
    """Return ``x`` after the current call, a cast; only a cast to an integer or bool has an effect.

    No layer is added, because the run sets the precision of maps, and a call such as ``x.float()``
    is recorded as a cast to float64. Return None if ``x`` is not computed from the image.

    Raises:
        CanNotCapture: the call casts to another floating-point type, such as float16.
    """
    if not isinstance(x, Value):
        return None
    dtype = reader.call.dtypes[0]
    if dtype == torch.float64:
        return replace(x, dtype=None)  # masks are stored as numbers
    if dtype.is_floating_point:
        raise reader.refusal(
            f"casts to {str(dtype).removeprefix('torch.')}: remove it, as train.precision sets the "
            f"dtype"
        )
    return reader.applied(partial(Tensor.to, dtype=dtype), [x], "cast")


def _alike(reader: Reader, value: Any) -> Value | None:
    """Add a layer for a call that fills a new tensor with one number; return the layer's output.

    An example is ``torch.zeros(n, 1, h, w)``. The output is a map, or a vector of the image. Return
    None if the tensor's shape does not depend on the image's size: it is then a constant and needs
    no layer.

    Args:
        value: the number with which the tensor is filled.
    """
    if not follows_size(reader.current):
        return None
    found = _places_of_result(reader)
    if found is None:
        raise reader.refusal(
            f"makes a tensor of {reader.call.shapes[0]}, which has neither the size of an earlier "
            "feature map nor that of the image: take the size of a feature map, as in x.shape[2:]"
        )
    like, axes = found
    fill = partial(_filled, channels=channels_of(axes), value=value, places=bool(places_of(axes)))
    return reader.emit(
        lambda _: Formula((Step(fill, (Map(0),), {}),), (Read(),)), [like], axes=axes
    )


def _expanded_over(reader: Reader, x: Any) -> Value:
    """Add a layer that expands a parameter as the current call does, and return its output.

    An example is ``bias.expand(n, -1, *y.shape[2:])``. The output is a map or a vector.

    Args:
        x: reference to the parameter, or to a tensor computed from parameters.
    """
    found = _places_of_result(reader)
    if found is None:
        raise reader.refusal(
            f"expands a parameter to {reader.call.shapes[0]}, which has neither the size of an "
            "earlier feature map nor that of the image: take the size of a feature map, as in "
            "x.shape[2:]"
        )
    like, axes = found
    shape = reader.shape_of(x)
    if any(n != 1 and not axis.of_channels for n, axis in zip(reversed(shape), reversed(axes))):
        raise reader.refusal(
            f"takes a tensor of {shape} with a separate value for each position of the image or "
            f"for each image: {POSITIONS}"
        )
    if any(n not in (1, axis.cell) for n, axis in zip(reversed(shape), reversed(axes))):
        raise reader.refusal(
            f"repeats a tensor of {shape} along dims longer than 1; supported: along dims of "
            "length 1, and over images. To repeat channels, use torch.cat"
        )
    own: dict[str, Kept] = {}
    steps: list[Step] = []
    written = reader._written(x, [like], own, steps, {})
    steps.append(Step(_Over(axes), (Map(0), written), {}))
    return reader.emit(
        lambda found: Formula(tuple(steps), (Read(),), found, None, axes), [like], own, axes=axes
    )


class _Over:
    """Callable that repeats a tensor at all positions of a map and for each of the map's images.

    It takes the map (N, C, *size), of which it reads only the shape and dtype, and the tensor.

    Args:
        axes: the meaning of each dim of the result, such as (N, channels, H, W).
    """

    __name__ = "expand"

    def __init__(self, axes: Axes):
        self.axes = axes

    def __call__(self, like: Tensor, x: Tensor) -> Tensor:
        lengths = [
            axis.cell
            * (len(like) if axis.batch else 1)
            * math.prod(like.shape[2 + d] for d in axis.places)
            for axis in self.axes
        ]
        return x.to(like.dtype).expand(lengths) if x.is_floating_point() else x.expand(lengths)


def _places_of_result(reader: Reader) -> tuple[Value, Axes] | None:
    """Find a map of the same size as the current call's result; return it and the result's axes.

    Later maps are tried first. Return None if no map so far has this size.
    """
    shapes, batches = [c.shapes[0] for c in reader.current], [t.batch for t in reader.traces]
    tried = set()
    for like in reversed(reader.values.values()):
        if like.vector or like.sizes in tried:
            continue
        tried.add(like.sizes)
        axes = axes_of(shapes, batches, like.sizes)
        if (
            axes
            and sum(axis.batch for axis in axes) <= 1
            and places_of(axes) in ((), tuple(range(reader.dims)))
            and not any(axis.mixed for axis in axes)
        ):
            return like, axes
    return None


def _filled(x: Tensor, channels: int, value: Any, places: bool) -> Tensor:
    return x.new_full(
        (len(x), channels, *(x.shape[2:] if places else (1 for _ in x.shape[2:]))), value
    )
