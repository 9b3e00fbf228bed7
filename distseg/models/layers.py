"""Layers that PyTorch lacks: skips in an ``nn.Sequential``, joins, vectors and formulas.

An ``nn.Sequential`` that lists single layers can be cut between any two layers, as pipelines and
tiles need it. A skip is then a pair of layers: ``Stash(name)`` stores a tensor under a name, and
``Pop(name)`` or ``Add(name)`` takes the tensor. In a plain forward pass the tensor is kept in a
store of the current thread. Executors treat the pair as an edge of the network's graph instead
(:mod:`distseg.models.network`). ``Cat`` and ``Sum`` join feature maps in a
:class:`distseg.models.network.Network`, which lists the maps that each layer reads.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from distseg.models.axes import Axes, closed, of_images, opened, places_of
from distseg.models.modified import hooked, unmodified
from distseg.models.outlines import CONVOLUTIONS, POOLS, convolved, pooled
from distseg.models.pointwise import POINTWISE_LAYERS
from distseg.models.resize import Follows, LooksAtSize

_local = threading.local()


def _store() -> dict[str, Tensor]:
    if not hasattr(_local, "store"):
        _local.store = {}
    return _local.store


@contextmanager
def skip_store(store: dict[str, Tensor]):
    """Let all ``Stash`` and ``Pop`` layers of this thread use ``store`` inside the context.

    ``store`` maps the name of a skip to its tensor. ``{}`` makes a forward pass independent of
    skips that other passes have stored.
    """
    outer = _store()
    _local.store = store
    try:
        yield store
    finally:
        _local.store = outer


class Stash(nn.Module):
    """A layer that begins a skip: it stores its input under ``name`` and returns the input."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        _store()[self.name] = x
        return x

    def extra_repr(self) -> str:
        return repr(self.name)


class Pop(nn.Module):
    """A layer that ends a skip: it concatenates the skip ``name`` with its input.

    Shapes are (N, C1, ...), (N, C2, ...) -> (N, C1 + C2, ...), with the channels of the skip first.
    After ceil-mode pooling and x2 up-sampling, the input may be one pixel longer than a skip of odd
    size. The input is then cut to the size of the skip.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Return the skip and ``x`` concatenated along the channels (:class:`Add`: added).

        Args:
            x: the input of the layer.
            skip: the skip, from an executor that stores maps itself. By default it is the tensor
                that the :class:`Stash` of this name stored.

        Raises:
            ValueError: ``skip`` is not given, and no :class:`Stash` has stored it.
        """
        if skip is None:
            try:
                skip = _store().pop(self.name)
            except KeyError:
                raise ValueError(
                    f"pop({self.name!r}) comes before any stash({self.name!r}) in this model: "
                    f"put a Stash({self.name!r}) before it"
                ) from None
        return self.joined(skip, cut_to(x, skip))

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return torch.cat((skip, x), 1)

    def extra_repr(self) -> str:
        return repr(self.name)


class Add(Pop):
    """A layer that ends a skip: it adds the skip ``name`` to its input.

    Shapes are (N, C, ...), (N, C, ...) -> (N, C, ...). An input that is longer than the skip is
    cut to the size of the skip.
    """

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return skip + x


class Join(nn.Module):
    """Base class of layers that join several feature maps, by a sum or a concatenation.

    The maps may differ in size. All are cut to the size of the last one, which must be the
    smallest.
    """

    def forward(self, *maps: Tensor) -> Tensor:
        return self.joined(*(cut_to(x, maps[-1]) for x in maps))


class Cat(Join):
    """A layer that concatenates feature maps along the channels.

    Shapes are (N, C1, ...), (N, C2, ...), ... -> (N, C1 + C2 + ..., ...). Maps that are larger than
    the last one are cut to its size.
    """

    @staticmethod
    def joined(*maps: Tensor) -> Tensor:
        return torch.cat(maps, 1)


class Sum(Join):
    """A layer that adds feature maps: (N, C, ...), (N, C, ...), ... -> (N, C, ...).

    Maps that are larger than the last one are cut to its size.
    """

    @staticmethod
    def joined(*maps: Tensor) -> Tensor:
        return sum(maps[1:], maps[0])


class Fill(nn.Module):
    """Zero-padding at the end of each spatial dim, to a size that is a multiple of ``multiple``.

    Shapes are (N, C, *size) -> (N, C, *larger).
    """

    def __init__(self, multiple: int):
        super().__init__()
        self.multiple = multiple

    def forward(self, x: Tensor) -> Tensor:
        return _filled_up(x, self.multiple)

    def extra_repr(self) -> str:
        return str(self.multiple)


def _filled_up(x: Tensor, multiple: int) -> Tensor:
    # torch.export can prove that this expression is a multiple for every n; for -n % multiple it
    # cannot.
    larger = [(n + multiple - 1) // multiple * multiple for n in x.shape[2:]]
    return F.pad(
        x, [side for n, m in zip(reversed(x.shape[2:]), reversed(larger)) for side in (0, m - n)]
    )


class CutTo(Join):
    """A layer that crops a map to the size of another map.

    Shapes are (N, C, *larger), (N, ?, *size) -> (N, C, *size), where ? is any number of channels.
    """

    @staticmethod
    def joined(x: Tensor, like: Tensor) -> Tensor:
        return x


class Mean(nn.Module):
    """Mean of each channel over an image, or over each cell of a grid.

    Shapes are (N, C, *size) -> (N, C * parts, 1, ...), where parts is the number of grid cells. The
    parts of a channel are adjacent. The result is a *vector* of the image: it has a single
    position, and every tile has the same value of it.

    Args:
        grid: the number of parts along each dim, as in ``nn.AdaptiveAvgPool2d``; by default the
            whole image is one part.
        total: True to compute sums instead of means.
    """

    def __init__(self, grid: Sequence[int] = (), total: bool = False):
        super().__init__()
        self.grid, self.total = tuple(grid), total

    def forward(self, x: Tensor) -> Tensor:
        dims = tuple(range(2, x.dim()))
        if not self.grid:
            return x.sum(dims, keepdim=True) if self.total else x.mean(dims, keepdim=True)
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(dims) - 1]
        return as_vector(pool(x, self.grid), len(dims))

    def extra_repr(self) -> str:
        return f"grid={self.grid}" * bool(self.grid) + "total" * self.total


class Max(Mean):
    """Maximum of each channel over an image, or over each cell of a grid, as a vector.

    Shapes are (N, C, *size) -> (N, C * parts, 1, ...).

    Args:
        first: if True, the first of several equal maxima gets the whole gradient, as in
            ``nn.AdaptiveMaxPool2d``. If False, equal maxima share it, as in ``torch.amax``.
        grid: the number of parts along each dim; by default the whole image is one part.
    """

    def __init__(self, first: bool, grid: Sequence[int] = ()):
        super().__init__(grid)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.grid:
            pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[
                x.dim() - 3
            ]
            return as_vector(pool(x, self.grid), x.dim() - 2)
        flat = x.flatten(2)
        return as_vector(flat.max(2)[0] if self.first else flat.amax(2), x.dim() - 2)

    def extra_repr(self) -> str:
        return f"first={self.first}" + f", grid={self.grid}" * bool(self.grid)


class Spread(nn.Module):
    """Expansion of a vector of the image to all positions of a map.

    Shapes are (N, ?, *size), (N, C * parts, 1, ...) -> (N, C, *size). The first input is the map,
    with any number of channels; only its size is used. ``parts`` is the number of values that the
    vector has for each channel. By default it is 1, and this value is repeated.

    Args:
        grid: the shape of a channel's values if they are a grid, as :class:`Mean` makes it. The
            grid is resized to the map as ``F.interpolate`` does.
        kept: the dims of the image along which the vector has a value for each position
            (:class:`distseg.models.lines.AlongLines`). Along the other dims it is repeated.
        settings: ``mode`` and ``align_corners`` of ``F.interpolate``, needed with ``grid``.
    """

    def __init__(self, grid: Sequence[int] = (), kept: Sequence[int] = (), **settings):
        super().__init__()
        self.grid, self.kept, self.settings = tuple(grid), tuple(kept), settings

    def forward(self, like: Tensor, x: Tensor) -> Tensor:
        size = like.shape[2:]
        return self.part(x, size, [range(n) for n in size])

    def part(self, x: Tensor, size: Sequence[int], places: Sequence[range]) -> Tensor:
        """Return the part of the layer's result (N, C, *size) inside a box, such as a tile.

        Args:
            x: the vector (N, C * parts, 1, ...), the layer's second input. It has ``parts`` values
                for each channel: one for each cell of ``grid``, or for each position along
                ``kept``. Without both, ``parts`` is 1.
            size: the spatial size of the whole map.
            places: the box: for each spatial dim the range of positions to return.
        """
        if self.kept:
            x = x.reshape(len(x), -1, *(n if d in self.kept else 1 for d, n in enumerate(size)))
            x = x[
                (
                    ...,
                    *(
                        slice(a.start, a.stop) if d in self.kept else slice(None)
                        for d, a in enumerate(places)
                    ),
                )
            ]
        if not self.grid:
            return x.expand(-1, -1, *map(len, places))
        y = x.reshape(len(x), -1, *self.grid)
        for dim, (k, n, wanted) in enumerate(zip(self.grid, size, places), 2):
            shares = self._shares(k, n).to(x.device)[:, wanted.start : wanted.stop]
            y = torch.tensordot(y.movedim(dim, -1), shares.to(y.dtype), 1).movedim(-1, dim)
        return y

    def _shares(self, k: int, n: int) -> Tensor:
        """Return the weights (k, n) with which a resize computes n cells from k along one dim.

        Entry (i, j) is the weight of input cell i in output cell j. A resize is linear, so row i is
        the result for an input in which cell i is 1 and all others are 0.
        """
        mode = {"linear": "bilinear", "trilinear": "bilinear"}.get(
            self.settings["mode"], self.settings["mode"]
        )
        ones = torch.eye(k, dtype=torch.float64).view(1, k, k, 1)
        return F.interpolate(
            ones, size=(n, 1), mode=mode, align_corners=self.settings["align_corners"]
        )[0, :, :, 0]

    def extra_repr(self) -> str:
        return f"grid={self.grid}" * bool(self.grid) + f"kept={self.kept}" * bool(self.kept)


class VectorNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of vectors that have ``parts`` numbers for each channel, (N, C * parts, 1, ...).

    The shape does not change. The layer equals ``nn.BatchNorm1d`` on (N, C), or ``nn.BatchNorm2d``
    on (N, C, *grid) with a grid of ``parts`` cells.

    Args:
        channels: C.
        parts: the number of values that the vector has for each channel, such as the number of
            cells of a grid (:class:`Mean`). The values of a channel share their statistics. 0 if
            this number depends on the image's size, as for the means of all rows.
        args, kwargs: further arguments of ``nn.BatchNorm1d``.
    """

    def __init__(self, channels: int, *args, parts: int = 1, **kwargs):
        super().__init__(channels, *args, **kwargs)
        self.parts = parts

    def _check_input_dim(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(len(x), self.num_features, -1)).view_as(x)


class FramesNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of maps that hold several frames of each image, (N, frames * C, *size).

    The shape does not change. The layer equals ``nn.BatchNorm2d`` on (N * frames, C, *size).

    Args:
        channels: C, the number of channels of a frame. The channels of a frame are adjacent.
        frames: the number of frames of each image.
        args, kwargs: further arguments of ``nn.BatchNorm2d``.
    """

    def __init__(self, channels: int, *args, frames: int, **kwargs):
        super().__init__(channels, *args, **kwargs)
        self.frames = frames

    def _check_input_dim(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, self.num_features, *x.shape[2:])).view_as(x)


def as_vector(x: Tensor, dims: int) -> Tensor:
    """Return a tensor (N, ...) as a vector of images with ``dims`` spatial dims, (N, C, 1, ...).

    All dims but the first become the C channels.
    """
    return x.reshape(len(x), -1, *(1,) * dims)


def is_vector(x: Tensor, size: Sequence[int]) -> bool:
    """Return True if ``x`` has a single position although its map has several positions.

    ``size`` is the spatial size of the map. For example, the mean of each channel (N, C, 1, 1) is a
    vector of an image of 64 x 64 pixels.
    """
    # numel() would fix the sizes in torch.export.
    return all(n == 1 for n in x.shape[2:]) and any(n > 1 for n in size)


RANKS_OF_DROPOUTS = {"dropout1d": (3,), "dropout3d": (5,)}
"""Possible numbers of dims of a batch, for each of these dropout functions.

A tensor with fewer dims is a single image for the function.
"""


class VectorDropout(nn.Dropout):
    """Dropout of the elements of a vector of the image: (N, C, 1, ...) -> (N, C, 1, ...)."""


class DropImage(nn.Module):
    """Stochastic depth: in training a whole image becomes 0 with probability ``p``.

    The shape (N, C, *size) does not change.

    Args:
        p: the probability that an image is dropped.
        kept: the factor for images that are kept in training, usually 1 / (1 - p).
        evaluated: the factor for all images in evaluation, usually 1.
    """

    def __init__(self, p: float, kept: float, evaluated: float):
        super().__init__()
        self.p, self.kept, self.evaluated = p, kept, evaluated

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x * self.evaluated if self.evaluated != 1 else x
        drawn = torch.rand(len(x), *(1 for _ in x.shape[1:]), device=x.device)
        return x * (drawn >= self.p).to(x.dtype) * self.kept

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


class MainOutput(nn.Module):
    """A layer that keeps the first of several outputs in evaluation, and all outputs in training.

    The outputs are stacked along the channels. Shapes in evaluation are (N, C, *size) ->
    (N, C * part / whole, *size).

    Args:
        part, whole: the number of channels of the first output and of all outputs, or a pair of
            numbers in the same proportion.
    """

    def __init__(self, part: int, whole: int):
        super().__init__()
        self.part, self.whole = part, whole

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x[:, : x.shape[1] * self.part // self.whole]

    def extra_repr(self) -> str:
        return f"{self.part} of {self.whole}"


class Step(NamedTuple):
    """One function call of a layer such as :class:`Formula`: a function and its arguments.

    In the arguments, ``Own(name)`` stands for a parameter or buffer of the layer. ``Map(i)`` stands
    for tensor i of a list, which has the inputs of the layer and then the result of each step.

    Attributes:
        function: the PyTorch function to call.
        args, kwargs: its positional and keyword arguments.
    """

    function: Callable
    args: tuple
    kwargs: dict


class Read(NamedTuple):
    """Description of how one input of a :class:`Formula` is rearranged and cast before use.

    Attributes:
        axes: the axes of the tensor that the layer's functions take, such as those of
            (N, H * W, C); None if they take the map (N, C, *size) itself.
        dtype: the dtype to which the values are converted, for example ``torch.bool`` for a mask;
            None to leave them in the floating-point dtype of the map.
    """

    axes: Axes | None = None
    dtype: torch.dtype | None = None


class Formula(nn.Module):
    """A layer that applies pointwise PyTorch functions to one or several maps of the same size.

    ``Formula([Step(torch.mul, (Map(0), Map(1)), {})], [Read(), Read()])``, for example, multiplies
    two maps. Shapes are (N, C, *size), ... -> (N, C', *size).

    Args:
        steps: the functions, in order. A step can use the maps and the results of earlier steps.
            The result of the last step is the result of the layer.
        reads: for each map, how its dims are rearranged before the functions take it. Some of the
            maps may be vectors of the image (:class:`Mean`).
        tensors: parameters and buffers by name.
        part: the index of the result, if the last function returns several results.
        made: the meaning of each dim of the result, if they must be rearranged to (N, C', *size);
            None if they need not be. A result without spatial dims is a vector of the image. It is
            kept as (N, C', 1, ...).
    """

    def __init__(
        self,
        steps: Sequence[Step],
        reads: Sequence[Read],
        tensors: Mapping[str, Tensor] = {},
        part: int | None = None,
        made: Axes | None = None,
    ):
        super().__init__()
        self.steps, self.reads, self.part, self.made = tuple(steps), tuple(reads), part, made
        register(self, tensors)

    def forward(self, *maps: Tensor) -> Tensor:
        return self.computed(maps, self.steps, self.reads, self.made)

    def computed(
        self,
        maps: Sequence[Tensor],
        steps: Sequence[Step],
        reads: Sequence[Read],
        made: Axes | None,
    ) -> Tensor:
        """Run ``steps`` on the inputs of the layer, and return the result of the last step.

        ``forward`` gives the layer's own ``steps``, ``reads`` and ``made``. A subclass may give
        others, such as steps in which lengths depend on the size of the image.

        Args:
            maps: the inputs of the layer: maps (N, C, *size) and vectors (N, C, 1, ...).
            steps: the functions to run, in order.
            reads: for each input, the form in which the functions take it.
            made: the axes of the last function's result; None if this is a map already.

        Returns:
            A map (N, C', *size) or a vector (N, C', 1, ...), in a floating-point dtype.
        """
        y = _computed(self, steps, map(_as_read, maps, reads), like=maps[0])
        y = y if self.part is None else y[self.part]
        if not y.is_floating_point():
            # Maps are floating-point numbers, also those that hold masks and channel numbers.
            y = y.to(torch.promote_types(maps[0].dtype, torch.float32))
        if made is None:
            return y
        y = closed(y, made, self._size(maps, reads))
        return y if of_images(made) else y.expand(len(maps[0]), *(-1 for _ in y.shape[1:]))

    def _size(self, maps: Sequence[Tensor], reads: Sequence[Read]) -> Sequence[int]:
        """Return the spatial size of the first input that is a map; (1, ...) if all are vectors.

        Args:
            maps: the inputs of the layer.
            reads: the form of each input, whose axes show whether the input is a map or a vector.
        """
        sizes = (
            x.shape[2:] for x, read in zip(maps, reads) if read.axes is None or places_of(read.axes)
        )
        return next(sizes, (1,) * (maps[0].dim() - 2))

    def extra_repr(self) -> str:
        return ", ".join(
            getattr(step.function, "__name__", str(step.function)) for step in self.steps
        )


def _as_read(x: Tensor, read: Read) -> Tensor:
    x = x if read.axes is None else opened(x, read.axes)
    if read.dtype is None:
        return x
    # A count may be the result of a mean, and so differ from a whole number by rounding.
    return (x if read.dtype == torch.bool else x.round()).to(read.dtype)


class Derived(nn.Module):
    """A layer whose weights are computed from other tensors, as in weight normalisation.

    Args:
        inner: the layer; its own weights are not used.
        weights: the steps that compute each parameter of ``inner``, by the parameter's name.
        tensors: parameters and buffers of this layer by name, from which the steps compute.
    """

    def __init__(
        self, inner: nn.Module, weights: Mapping[str, Sequence[Step]], tensors: Mapping[str, Tensor]
    ):
        super().__init__()
        self.weights = dict(weights)
        register(self, tensors)
        inner._parameters = dict.fromkeys(inner._parameters)
        self.__dict__["inner"] = inner  # not a child module, since it holds no weights

    def forward(self, x: Tensor) -> Tensor:
        return self.filled(x)(x)

    def filled(self, x: Tensor) -> nn.Module:
        """Return a copy of ``inner`` with the computed weights.

        Args:
            x: the layer's input. If this layer has no parameters, the weights are computed on the
                device of ``x``, otherwise on that of the parameters.
        """
        like = next(self.parameters(), None)
        if like is None:  # under autocast x may have 16 bits; constants have 32 or more
            like = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
        layer = copy.copy(self.inner)
        layer.__dict__["_parameters"] = dict.fromkeys(self.inner._parameters) | {
            name: _computed(self, steps, like=like) for name, steps in self.weights.items()
        }
        return layer

    def extra_repr(self) -> str:
        return repr(self.inner)


@cache
def taken() -> frozenset[str]:
    """Return the names that a tensor of a ``Formula`` or ``Derived`` layer must not have.

    These are the names of attributes of the two classes.
    """
    return frozenset((*dir(Formula((), ())), *dir(Derived(nn.Identity(), {}, {}))))


def register(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Register tensors in a layer by name: parameters as parameters, other tensors as buffers."""
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            layer.register_parameter(name, tensor)
        else:
            layer.register_buffer(name, tensor)


class Fixed(NamedTuple):
    """An argument of a :class:`Step`: a constant tensor of the user's code.

    When the layer runs, the tensor is moved to the layer's device.
    """

    tensor: Tensor

    def __eq__(self, other) -> bool:
        return self is other


@dataclass(frozen=True)
class ByType:
    """An argument of a :class:`Step`: a number that depends on the dtype of a tensor.

    An example is ``torch.finfo(x.dtype).eps``. ``each`` has pairs (dtype, number).
    """

    each: tuple[tuple[torch.dtype, float], ...]

    def number(self, dtype: torch.dtype) -> float:
        """Return the number for a dtype.

        If ``each`` has no number for this dtype, return the number for float32. If it has none for
        float32 either, return its last number.
        """
        numbers = dict(self.each)
        return numbers.get(dtype, numbers.get(torch.float32, self.each[-1][1]))

    def __repr__(self) -> str:
        numbers = " or ".join(f"{number:g}" for _, number in self.each)
        return f"({numbers}, as the type of a tensor says)"


def _computed(
    layer: nn.Module, steps: Sequence[Step], maps: Iterable[Tensor] = (), *, like: Tensor
) -> Tensor:
    """Run the steps on the maps, and return the result of the last step.

    Args:
        layer: the layer that holds the parameters and buffers for :class:`Own`.
        steps: the functions, in order.
        maps: the inputs of the steps; none if they read only parameters, buffers and constants.
        like: a tensor to whose device constants are moved.
    """
    available = list(maps)
    for step in steps:
        args = _filled(layer, step.args, available, like)
        kwargs = _filled(layer, step.kwargs, available, like)
        available.append(step.function(*args, **kwargs))
    return available[-1]


class Map(NamedTuple):
    """An argument of a :class:`Step`: an input map, or the result of an earlier step.

    In a layer with two inputs, ``Map(0)`` and ``Map(1)`` are the inputs, ``Map(2)`` is the result
    of the first step, and so on.
    """

    number: int


class Own(NamedTuple):
    """An argument of a :class:`Step`: the parameter or buffer of the layer with this name."""

    name: str


def _filled(layer: nn.Module, tree, maps: Sequence[Tensor], like: Tensor):
    """Return a step's arguments with a tensor or number in place of each placeholder.

    Placeholders are :class:`Map`, :class:`Own`, :class:`Fixed` and :class:`ByType`.

    Args:
        layer: the layer that holds the parameters and buffers for :class:`Own`.
        tree: the arguments: a value or placeholder, or a nested tuple or dict of these.
        maps: the tensors for :class:`Map`: the inputs of the layer, then the results of the steps
            before this one.
        like: a tensor to whose device constants are moved.
    """
    match tree:
        case Map():
            return maps[tree.number]
        case Own():
            return getattr(layer, tree.name)
        case Fixed():
            return _beside(tree.tensor, like)
        case ByType():
            return tree.number(next(iter(maps), like).dtype)
        case tuple():
            return tuple(_filled(layer, x, maps, like) for x in tree)
        case dict():
            return {key: _filled(layer, x, maps, like) for key, x in tree.items()}
    return tree


def _beside(x: Tensor, other: Tensor) -> Tensor:
    """Return the constant tensor ``x`` on the device of ``other``.

    A float64 constant is also cast to the dtype of ``other`` if that is floating point: a capture
    runs in float64, so a constant of the network's dtype is stored in float64. Constants of other
    dtypes keep their dtype.
    """
    return x.to(
        other.device,
        other.dtype if x.dtype == torch.float64 and other.is_floating_point() else None,
    )


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device, where its weights have shapes but no values."""
    parameters = {id(p): nn.Parameter(_weightless(p), p.requires_grad) for p in model.parameters()}
    return copied_with(model, parameters | {id(b): _weightless(b) for b in model.buffers()})


def outline(model: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device that computes only the sizes of maps.

    Norms and activations return their input. The sizes of skips, resized maps, convolutions and
    pools are computed by arithmetic, because PyTorch's meta kernels for them import torch._dynamo,
    which takes seconds, or sympy, which takes 40 MB.
    """
    copied = on_meta(model).eval()
    for layer in copied.modules():
        if isinstance(layer, (Pop, Join)):
            layer.joined = partial(_joined, layer.joined)
        elif type(layer) is nn.Upsample:
            layer.forward = partial(_resized, layer)
        elif unmodified(layer, CONVOLUTIONS):
            layer.forward = partial(convolved, layer)
        elif unmodified(layer, POOLS) and not getattr(layer, "return_indices", False):
            layer.forward = partial(pooled, layer)
        elif isinstance(layer, Follows):
            layer.made = _sized
        elif isinstance(layer, LooksAtSize):
            layer.forward = layer.outlined
        elif unmodified(layer, POINTWISE_LAYERS):
            layer.forward = lambda input: input
    return copied


def copied_with(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Return a deep copy of a module in which given tensors replace its parameters and buffers.

    Modules of PyTorch and distseg hold no modules except their children, so they can be copied much
    faster than by ``copy.deepcopy``.

    Args:
        module: the module. It is not changed.
        memo: the new tensor for each parameter and buffer, by the ``id`` of the old one. As in
            ``copy.deepcopy``, the copies of modules are added.
    """
    if id(module) in memo:
        return memo[id(module)]
    if (
        not type(module).__module__.startswith(("torch.", "distseg.models."))
        or parametrize.is_parametrized(module)
        or hooked(module)
    ):
        return copy.deepcopy(module, memo)
    memo[id(module)] = copied = type(module).__new__(type(module))
    copied.__dict__.update(
        {
            name: value.copy() if isinstance(value, (dict, set)) else value
            for name, value in vars(module).items()
        }
    )
    for field in ("_parameters", "_buffers"):
        copied.__dict__[field].update(
            {name: memo[id(x)] for name, x in getattr(module, field).items() if x is not None}
        )
    copied.__dict__["_modules"].update(
        {
            name: copied_with(child, memo)
            for name, child in module._modules.items()
            if child is not None
        }
    )
    return copied


def _weightless(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _joined(join: Callable, *maps: Tensor) -> Tensor:
    """Return a meta tensor of the shape that ``join(*maps)`` has, without calling ``join``.

    Args:
        join: the method ``joined`` of a :class:`Pop` or :class:`Join` layer.
        maps: the maps to join, on the meta device.
    """
    x, channels = maps[-1], maps[0].shape[1]
    if join in (Pop.joined, Cat.joined):
        channels = sum(m.shape[1] for m in maps)
    return torch.empty(x.shape[0], channels, *x.shape[2:], dtype=x.dtype, device="meta")


def _sized(x: Tensor, size: Sequence[int]) -> Tensor:
    return torch.empty(*x.shape[:2], *size, dtype=x.dtype, device="meta")


def _resized(layer: nn.Upsample, x: Tensor) -> Tensor:
    wanted, dims = layer.size if layer.size is not None else layer.scale_factor, x.dim() - 2
    each = wanted if isinstance(wanted, tuple) else (wanted,) * dims
    size = (
        each if layer.size is not None else (math.floor(n * by) for n, by in zip(x.shape[2:], each))
    )
    return _sized(x, size)


def padded(model: nn.Module, multiple: int) -> nn.Module:
    """Make a module take images of any size, by zero-padding them to a multiple of pixels.

    Zeros are appended at the end of each dim, and the result is cut to the size of the image.
    ``model`` is changed and returned: its class is replaced by a subclass. Weights and their names
    do not change.
    """
    base = type(model)

    def reduce(self, protocol):
        # pickle cannot find a class that was made in a function.
        plain = base.__new__(base)
        plain.__dict__.update(self.__dict__)
        return padded, (plain, multiple)

    def forward(self, x: Tensor) -> Tensor:
        y = base.forward(self, _filled_up(x, multiple))
        if y.dim() < x.dim() or is_vector(y, x.shape[2:]):
            return y
        if torch.compiler.is_exporting():
            # A slice would be a view, whose strides depend on the size.
            return _taken(y, x.shape[2:])
        return y[(..., *(slice(0, n) for n in x.shape[2:]))]

    model.__class__ = type(
        base.__name__,
        (base,),
        {"forward": forward, "__reduce_ex__": reduce, "__module__": base.__module__},
    )
    return model


def _taken(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return a copy of the part of a map with the first ``size[d]`` positions along each dim d."""
    for dim, n in enumerate(size, 2):
        x = x.index_select(dim, torch.arange(n, device=x.device))
    return x


def cut_to(x: Tensor, like: Tensor) -> Tensor:
    """Return the first part of ``x`` (N, C, *larger), of the spatial size of ``like``."""
    if x.shape[2:] == like.shape[2:]:
        return x
    return x[(slice(None), slice(None), *(slice(n) for n in like.shape[2:]))]
