"""The layers that PyTorch lacks for a flat U-Net: skips as a pair of layers, ``Stash(name)`` and ``Pop(name)`` or ``Add(name)``.

A flat ``nn.Sequential`` can be cut between any two layers, which is what pipelines and the joint execution of tiles
need. A skip then is a tensor put aside under a name by one layer and taken up by a later one. In a plain forward pass
they meet in a store of the current thread; executors see an edge of the network's graph (:mod:`distseg.models.network`).
``Cat`` and ``Sum`` join maps in a :class:`distseg.models.network.Network`, whose layers say what they read.
"""

from __future__ import annotations

import copy
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Callable, Iterable, Mapping, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from distseg.models.axes import Axes, closed, of_images, opened, places_of
from distseg.models.modified import hooked, unmodified
from distseg.models.receptive_field import POINTWISE
from distseg.models.resize import Follows, LooksAtSize

_local = threading.local()


def _store() -> dict[str, Tensor]:
    if not hasattr(_local, "store"):
        _local.store = {}
    return _local.store


@contextmanager
def skip_store(store: dict[str, Tensor]):
    """Layers inside stash to and pop from ``store``."""
    outer = _store()
    _local.store = store
    try:
        yield store
    finally:
        _local.store = outer


class Stash(nn.Module):
    """Put the input aside under ``name`` and pass it on."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        _store()[self.name] = x
        return x

    def extra_repr(self) -> str:
        return repr(self.name)


class Pop(nn.Module):
    """Concatenate the skip ``name`` with the input: (N, C1, ...), (N, C2, ...) -> (N, C1 + C2, ...).

    After ceil-mode pooling and x2 up-sampling the input may be one pixel longer than the skip (odd sizes): it is cut.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """``skip``: from an executor that keeps maps itself."""
        if skip is None:
            try:
                skip = _store().pop(self.name)
            except KeyError:
                raise ValueError(
                    f"pop({self.name!r}) comes before any stash({self.name!r}) in this model"
                ) from None
        return self.joined(skip, cut_to(x, skip))

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return torch.cat((skip, x), 1)

    def extra_repr(self) -> str:
        return repr(self.name)


class Add(Pop):
    """Add the skip ``name`` to the input: (N, C, ...), (N, C, ...) -> (N, C, ...). As after a :class:`Pop`, a longer input is cut."""

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return skip + x


class Join(nn.Module):
    """Several maps of a :class:`distseg.models.network.Network` in one, each cut to the size of the last, which is the smallest."""

    def forward(self, *maps: Tensor) -> Tensor:
        return self.joined(*(cut_to(x, maps[-1]) for x in maps))


class Cat(Join):
    """Channels of all: (N, C1, ...), (N, C2, ...), ... -> (N, C1 + C2 + ..., ...)."""

    @staticmethod
    def joined(*maps: Tensor) -> Tensor:
        return torch.cat(maps, 1)


class Sum(Join):
    """(N, C, ...), (N, C, ...), ... -> (N, C, ...)."""

    @staticmethod
    def joined(*maps: Tensor) -> Tensor:
        return sum(maps[1:], maps[0])


class Fill(nn.Module):
    """Zeros behind, so that sizes are multiples of so many pixels: (N, C, *size) -> (N, C, *larger)."""

    def __init__(self, multiple: int):
        super().__init__()
        self.multiple = multiple

    def forward(self, x: Tensor) -> Tensor:
        return _filled_up(x, self.multiple)

    def extra_repr(self) -> str:
        return str(self.multiple)


def _filled_up(x: Tensor, multiple: int) -> Tensor:
    # Written so, torch.export sees that the sum is a multiple whatever n is; with -n % multiple it does not.
    larger = [(n + multiple - 1) // multiple * multiple for n in x.shape[2:]]
    return F.pad(
        x, [side for n, m in zip(reversed(x.shape[2:]), reversed(larger)) for side in (0, m - n)]
    )


class CutTo(Join):
    """The part of a map that has the size of another: (N, C, *larger), (N, ?, *size) -> (N, C, *size)."""

    @staticmethod
    def joined(x: Tensor, like: Tensor) -> Tensor:
        return x


class Mean(nn.Module):
    """Of each channel over an image, or over each part of it: (N, C, *size) -> (N, C * parts, 1, ...), a *vector* of the image.

    A vector has one place, and is the same wherever the image is looked at. A channel's parts lie side by side.

    Args:
        grid: into how many parts each dim is cut, as ``nn.AdaptiveAvgPool2d`` cuts it; by default the image is one.
        total: sums instead of means.
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
    """The largest value of each channel of an image, or of each part of it: (N, C, *size) -> (N, C * parts, 1, ...), a vector.

    Args:
        first: of equal ones the gradient is the first place's, as of ``nn.AdaptiveMaxPool2d``; else they share it, as of ``torch.amax``.
        grid: as of :class:`Mean`.
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
    """A vector of the image at all places of a map, resized as ``F.interpolate`` does where it is a grid: (N, ?, *size), (N, C * parts, 1, ...) -> (N, C, *size).

    Args:
        grid: into how many parts the vector has each channel cut.
        kept: the dims of the image that it has all places of (:class:`distseg.models.lines.AlongLines`).
        settings: ``mode`` and ``align_corners``.
    """

    def __init__(self, grid: Sequence[int] = (), kept: Sequence[int] = (), **settings):
        super().__init__()
        self.grid, self.kept, self.settings = tuple(grid), tuple(kept), settings

    def forward(self, like: Tensor, x: Tensor) -> Tensor:
        size = like.shape[2:]
        return self.part(x, size, [range(n) for n in size])

    def part(self, x: Tensor, size: Sequence[int], places: Sequence[range]) -> Tensor:
        """Of a map of this size only some ``places`` of each dim."""
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
        """What each of k cells has in each of the n that they become, (k, n): resizing is linear, and goes dim by dim."""
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
    """Batch norm of vectors, as ``nn.BatchNorm1d`` of (N, C), or as ``nn.BatchNorm2d`` of (N, C, *grid): (N, C * parts, 1, ...) -> (N, C * parts, 1, ...).

    Args:
        parts: of each channel; 0 of a line, of which it follows the image's size.
    """

    def __init__(self, channels: int, *args, parts: int = 1, **kwargs):
        super().__init__(channels, *args, **kwargs)
        self.parts = parts

    def _check_input_dim(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(len(x), self.num_features, -1)).view_as(x)


class FramesNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of maps that are several images each, as ``nn.BatchNorm2d`` of (N * frames, C, *size): (N, frames * C, *size) -> (N, frames * C, *size).

    Args:
        frames: of each image; its channels lie one frame behind the other.
    """

    def __init__(self, channels: int, *args, frames: int, **kwargs):
        super().__init__(channels, *args, **kwargs)
        self.frames = frames

    def _check_input_dim(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, self.num_features, *x.shape[2:])).view_as(x)


def as_vector(x: Tensor, dims: int) -> Tensor:
    """(N, ...) -> (N, ?, 1, ...), of an image with so many dims."""
    return x.reshape(len(x), -1, *(1,) * dims)


def is_vector(x: Tensor, size: Sequence[int]) -> bool:
    """Whether a tensor that stands for ``size`` cells of a map has one place for all of them."""
    return all(n == 1 for n in x.shape[2:]) and any(
        n > 1 for n in size
    )  # numel() would fix sizes in torch.export


RANKS_OF_DROPOUTS = {"dropout1d": (3,), "dropout3d": (5,)}
"""Dims of the tensors whose channels a function drops; others are one image for it, without a dim of the batch."""


class VectorDropout(nn.Dropout):
    """Dropout of the numbers of a vector of the image: (N, C, 1, ...) -> (N, C, 1, ...)."""


class DropImage(nn.Module):
    """Stochastic depth: all of an image becomes 0 with probability ``p``, in training; (N, C, *size) -> (N, C, *size).

    Args:
        kept: what an image that is kept is multiplied by; ``evaluated``: what all are in evaluation.
    """

    def __init__(self, p: float, kept: float, evaluated: float):
        super().__init__()
        self.p, self.kept, self.evaluated = p, kept, evaluated

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x * self.evaluated if self.evaluated != 1 else x
        return (
            x
            * (torch.rand(len(x), *(1 for _ in x.shape[1:]), device=x.device) >= self.p).to(x.dtype)
            * self.kept
        )

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


class MainOutput(nn.Module):
    """In evaluation the first of several outputs that lie side by side in the channels, (N, outputs * C, *size) -> (N, C, *size); in training all."""

    def __init__(self, outputs: int):
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x[:, : x.shape[1] // self.outputs]

    def extra_repr(self) -> str:
        return str(self.outputs)


class Step(NamedTuple):
    """A function and its arguments, in which ``Map(i)`` stands for the i-th tensor at hand and ``Own(name)`` for one of a layer's own."""

    function: Callable
    args: tuple
    kwargs: dict


class Read(NamedTuple):
    """How a layer's function wants a map: with these ``axes`` (None: as it is), and as numbers of this type (None: floating point, as maps are kept)."""

    axes: Axes | None = None
    dtype: torch.dtype | None = None


class Formula(nn.Module):
    """Functions of PyTorch's that look at single cells, of one or several maps of one size: (N, C, *size), ... -> (N, C', *size).

    Args:
        steps: are done one after another; at hand are the maps, and behind them what each step makes. The last one's is the result.
        reads: how the functions want each map; vectors of the image may be among them.
        tensors: parameters and buffers by name.
        part: which of several results is meant.
        made: the axes of the result; None: it is a map as it is. Without places it is a vector of the image, kept as (N, C', 1, ...).
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
        """Return what steps make of maps, as a map with these axes."""
        y = _computed(self, steps, map(_as_read, maps, reads), maps[0])
        y = y if self.part is None else y[self.part]
        if not y.is_floating_point():  # masks and numbers of channels are kept as what maps are
            y = y.to(torch.promote_types(maps[0].dtype, torch.float32))
        if made is None:
            return y
        y = closed(y, made, self._size(maps, reads))
        return y if of_images(made) else y.expand(len(maps[0]), *(-1 for _ in y.shape[1:]))

    def _size(self, maps: Sequence[Tensor], reads: Sequence[Read]) -> Sequence[int]:
        """Return the cells of the map among ``maps``; of vectors alone one."""
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
    return (x if read.dtype == torch.bool else x.round()).to(
        read.dtype
    )  # a count comes of means, and so of rounding


class Derived(nn.Module):
    """A layer whose weights are computed from others, as by weight normalisation and standardisation.

    Args:
        inner: the layer, whose own weights are of no use.
        weights: of its parameters, how each is made.
        tensors: parameters and buffers by name.
    """

    def __init__(
        self, inner: nn.Module, weights: Mapping[str, Sequence[Step]], tensors: Mapping[str, Tensor]
    ):
        super().__init__()
        self.weights = dict(weights)
        register(self, tensors)
        inner._parameters = dict.fromkeys(inner._parameters)
        self.__dict__["inner"] = inner  # no child: it holds nothing

    def forward(self, x: Tensor) -> Tensor:
        return self.filled()(x)

    def filled(self) -> nn.Module:
        """The layer with its weights."""
        layer = copy.copy(self.inner)
        layer.__dict__["_parameters"] = dict.fromkeys(self.inner._parameters) | {
            name: _computed(self, steps) for name, steps in self.weights.items()
        }
        return layer

    def extra_repr(self) -> str:
        return repr(self.inner)


@cache
def taken() -> frozenset[str]:
    """Return the names that a layer's own tensors can't have, as it has them itself."""
    return frozenset((*dir(Formula((), ())), *dir(Derived(nn.Identity(), {}, {}))))


def register(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Parameters and buffers by name."""
    for name, tensor in tensors.items():
        layer.register_parameter(name, tensor) if isinstance(
            tensor, nn.Parameter
        ) else layer.register_buffer(name, tensor)


class Fixed(NamedTuple):
    """In the arguments of a :class:`Step`: a tensor that the user's code makes of numbers, which goes where the layer is."""

    tensor: Tensor

    def __eq__(self, other) -> bool:
        return self is other


@dataclass(frozen=True)
class ByType:
    """In the arguments of a :class:`Step`: a number that the user's code takes by the type of a tensor, as ``torch.finfo(x.dtype).eps``."""

    each: tuple[tuple[torch.dtype, float], ...]

    def of(self, dtype: torch.dtype) -> float:
        """Return the number beside a tensor of this type; of types that were not seen that of float32."""
        numbers = dict(self.each)
        return numbers.get(dtype, numbers.get(torch.float32, self.each[-1][1]))

    def __repr__(self) -> str:
        return f"({' or '.join(f'{number:g}' for _, number in self.each)}, as the type of a tensor says)"


def _computed(
    layer: nn.Module, steps: Sequence[Step], maps: Iterable[Tensor] = (), like: Tensor | None = None
) -> Tensor:
    """Return the result of the last step. Constants move to the device of ``like``, by default to that of the layer."""
    at_hand, like = list(maps), next(layer.parameters(), None) if like is None else like
    for step in steps:
        at_hand.append(
            step.function(
                *_filled(layer, step.args, at_hand, like),
                **_filled(layer, step.kwargs, at_hand, like),
            )
        )
    return at_hand[-1]


class Map(NamedTuple):
    """In the arguments of a :class:`Step`: a tensor that is at hand."""

    number: int


class Own(NamedTuple):
    """A parameter or buffer of the layer."""

    name: str


def _filled(layer: nn.Module, tree, maps: Sequence[Tensor], like: Tensor | None):
    """The arguments of a function, with the tensors in their places."""
    match tree:
        case Map():
            return maps[tree.number]
        case Own():
            return getattr(layer, tree.name)
        case Fixed():
            return _beside(tree.tensor, like)
        case ByType():
            beside = next(iter(maps), like)
            return tree.of(torch.float32 if beside is None else beside.dtype)
        case tuple():
            return tuple(_filled(layer, x, maps, like) for x in tree)
        case dict():
            return {key: _filled(layer, x, maps, like) for key, x in tree.items()}
    return tree


def _beside(x: Tensor, other: Tensor | None) -> Tensor:
    """Return a constant where ``other`` is, and of its type if the user's code asked for that of the network (which float64 stands for)."""
    if other is None:
        return x
    return x.to(
        other.device,
        other.dtype if x.dtype == torch.float64 and other.is_floating_point() else None,
    )


def on_meta(model: nn.Module) -> nn.Module:
    """A copy on the meta device, without weights."""
    parameters = {id(p): nn.Parameter(_weightless(p), p.requires_grad) for p in model.parameters()}
    return copied_with(model, parameters | {id(b): _weightless(b) for b in model.buffers()})


def outline(model: nn.Module) -> nn.Module:
    """A copy on the meta device, without weights, which works out the sizes of maps and nothing else.

    Norms and activations keep them, and skips and resized maps are worked out by arithmetic: PyTorch's own kernels of these for that device are
    Python, and import torch._dynamo, 300 modules, a second or two of each process.
    """
    copied = on_meta(model).eval()
    for layer in copied.modules():
        if isinstance(layer, (Pop, Join)):
            layer.joined = partial(_joined, layer.joined)
        elif type(layer) is nn.Upsample:
            layer.forward = partial(_resized, layer)
        elif isinstance(layer, Follows):
            layer.made = _sized
        elif isinstance(layer, LooksAtSize):
            layer.forward = layer.outlined
        elif unmodified(layer, POINTWISE):
            layer.forward = lambda input: input
    return copied


def copied_with(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """A deep copy, in which ``memo`` has the tensors; of PyTorch's own layers and ours, which hold no other modules than their children, several times as fast as copy's."""
    if id(module) in memo:
        return memo[id(module)]
    if (
        not type(module).__module__.startswith(("torch.", "distseg.models."))
        or parametrize.is_parametrized(module)
        or hooked(module)
    ):
        return copy.deepcopy(module, memo)
    memo[id(module)] = twin = type(module).__new__(type(module))
    twin.__dict__.update(
        {
            name: value.copy() if isinstance(value, (dict, set)) else value
            for name, value in vars(module).items()
        }
    )
    for field in ("_parameters", "_buffers"):
        twin.__dict__[field].update(
            {name: memo[id(x)] for name, x in getattr(module, field).items() if x is not None}
        )
    twin.__dict__["_modules"].update(
        {
            name: copied_with(child, memo)
            for name, child in module._modules.items()
            if child is not None
        }
    )
    return twin


def _weightless(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _joined(join: Callable, *maps: Tensor) -> Tensor:
    """What layers that join make of several maps."""
    x, channels = (
        maps[-1],
        sum(m.shape[1] for m in maps) if join in (Pop.joined, Cat.joined) else maps[0].shape[1],
    )
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
    """The same module for images of any size: it is given them with zeros behind, up to a multiple of so many pixels, and its result is cut to them.

    Weights and their names stay. ``model`` is changed: its class becomes one of its own.
    """
    base = type(model)

    def __reduce_ex__(self, protocol):  # pickle finds no class that was made in a function
        plain = base.__new__(base)
        plain.__dict__.update(self.__dict__)
        return padded, (plain, multiple)

    def forward(self, x: Tensor) -> Tensor:
        y = base.forward(self, _filled_up(x, multiple))
        if y.dim() < x.dim() or is_vector(y, x.shape[2:]):
            return y
        if (
            torch.compiler.is_exporting()
        ):  # a slice would be a view, whose strides depend on the size
            return _taken(y, x.shape[2:])
        return y[(..., *(slice(0, n) for n in x.shape[2:]))]

    model.__class__ = type(
        base.__name__,
        (base,),
        {"forward": forward, "__reduce_ex__": __reduce_ex__, "__module__": base.__module__},
    )
    return model


def _taken(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return the first places of each dim, as a copy."""
    for dim, n in enumerate(size, 2):
        x = x.index_select(dim, torch.arange(n, device=x.device))
    return x


def cut_to(x: Tensor, like: Tensor) -> Tensor:
    """The part of ``x`` that has the spatial size of ``like``."""
    if x.shape[2:] == like.shape[2:]:
        return x
    return x[(slice(None), slice(None), *(slice(n) for n in like.shape[2:]))]
