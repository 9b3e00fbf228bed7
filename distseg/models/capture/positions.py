"""Layer for values at each position that depend only on the image's size and on parameters.

Examples are coordinates, positional encodings and learned positions. The user's calls run for the
size of the whole image, and a tile takes its part of the result. Pointwise calls, and other calls
that keep values at their positions, run only on the tile's part. For example, in
``sin(torch.arange(h)[:, None] / scales)`` only ``arange`` runs for the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distseg.models.axes import Axes, closed
from distseg.models.capture.constants import CASTS, FACTORIES
from distseg.models.capture.inplace import out_of_place
from distseg.models.capture.trace import Called, Kept, Made
from distseg.models.capture.wide import call_wide
from distseg.models.layers import as_vector, register
from distseg.models.meta import found_in
from distseg.models.resize import LooksAtSize

Labels = tuple[int | None, ...]
"""For each dim of a tensor, the spatial dim that it holds.

-1 stands for all spatial dims, flattened; None means that the dim holds no spatial dim.
"""


class Number(NamedTuple):
    """Reference to a number among the arguments of a recorded call, such as ``h`` in ``x / h``.

    Attributes:
        call: index of the call in the trace.
        way: the position among the arguments: ("args", index) or ("kwargs", name).
    """

    call: int
    way: tuple

    def value(self, calls: Sequence[Called]) -> float:
        """Look up the number in the recorded calls of a forward pass, and return it."""
        kind, key = self.way
        return getattr(calls[self.call], kind)[key]


class Marked(NamedTuple):
    """Reference to a mask of the positions of the image to which a recorded call assigns.

    For example, ``x[:, :, 1:3] = 0`` assigns to two rows.

    Attributes:
        call: index of the assignment in the trace.
        entries: pairs (spatial dim, place of the dim's entry in the index). In the example, the
            only pair is (0, 2).
    """

    call: int
    entries: tuple[tuple[int, int], ...]

    def mask(self, calls: Sequence[Called], d: int, n: int) -> Tensor:
        """Return a mask (n,) of the positions that the index selects along spatial dim ``d``.

        It is True everywhere if the index has no entry for this dim.

        Args:
            calls: the calls of the forward pass.
            n: the size of the map along this dim.
        """
        index, found = calls[self.call].args[1], torch.zeros(n, dtype=torch.bool)
        for place, entry in self.entries:
            if place == d:
                found[index[entry] if isinstance(index, tuple) else index] = True
                return found
        return ~found


@dataclass(frozen=True)
class Plan:
    """Recipe for a tensor that depends on the image's size and parameters, but not on its values.

    It lists the user's calls that compute the tensor, by their indices in the trace.

    Attributes:
        wanted: reference to the tensor, number or mask to compute.
        calls: the indices of the calls on which it depends, in order.
        labels: for each result of these calls, the spatial dim that each of its dims runs along
            (:data:`Labels`).
        cellwise: the indices of the calls that a tile can run on its own part of the arguments,
            such as pointwise calls.
    """

    wanted: Made | Number | Marked
    calls: tuple[int, ...]
    labels: Mapping[Made, Labels]
    cellwise: frozenset[int]


class Positions(LooksAtSize):
    """Layer that computes values for each position of a map, such as coordinates.

    The values are equal for all images. The inputs are a map (N, ?, *size) and the image
    (N, ?, *image), of which only the sizes are used; ? is any number of channels. The result is
    (N, C, *size), or a vector if the values do not differ between positions.

    Args:
        source: function that returns the calls of the user's forward pass for an image size.
        plan: which of these calls the layer computes, and what it returns.
        axes: the meaning of each dim of the result (:class:`distseg.models.axes.Axis`). The user's
            tensor has length 1 along dims in which it is constant.
        names: names of parameters and buffers in the user's module, by their names in this layer.
        tensors: parameters and buffers, by their names in this layer.
    """

    def __init__(
        self,
        source: Callable[[tuple[int, ...]], Sequence[Called]],
        plan: Plan,
        axes: Axes,
        names: Mapping[str, str],
        tensors: Mapping[str, Tensor],
    ):
        super().__init__()
        self.source, self.plan, self.axes = source, plan, axes
        self.names = {user: own for own, user in names.items()}
        register(self, tensors)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        if x.is_meta:
            return self.outlined(x, image)
        return self.part(x, image.shape[2:], x.shape[2:], [range(n) for n in x.shape[2:]])

    def part(
        self, x: Tensor, image: Sequence[int], size: Sequence[int], places: Sequence[range]
    ) -> Tensor:
        """Return the part of the layer's result at the given positions, such as those of a tile.

        The result has the dtype of ``x``. It has at least the precision of float32 if its values
        are integers, or under autocast.

        Args:
            x: a tensor (N, ...). It gives the number of images, the dtype and the device.
            image: size of the whole image.
            size: size of the whole map.
            places: for each spatial dim, the range of positions of the part.
        """
        # Half precision cannot represent all whole numbers above 256.
        wide = torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            y = _Values(self, self.source(tuple(image)), x, size, places).cut(self.plan.wanted)
        dtype = (
            x.dtype
            if y.is_floating_point() and not wide
            else torch.promote_types(x.dtype, torch.float32)
        )
        y = y.to(x.device, dtype)
        return self._closed(
            y[(None,) * (len(self.axes) - y.dim())], len(x), [len(r) for r in places]
        )

    def _closed(self, y: Tensor, images: int, size: Sequence[int]) -> Tensor:
        """Rearrange a result of user code to (N, C, *size), or (N, C, 1, ...) without positions.

        Args:
            y: the result, with a dim for each of ``axes``.
            images: the number of images N.
            size: the size of the positions in ``y``.

        Raises:
            ValueError: the values differ between the images of the batch.
        """
        for dim, axis in enumerate(self.axes):
            if axis.batch and y.shape[dim] > 1:
                if not bool((y == y.narrow(dim, 0, 1)).all()):
                    raise ValueError(
                        "the network computes values at each position from the index of the image "
                        "in the batch, but an image has another index in a micro-batch than in the "
                        "whole batch: compute the same values for all images"
                    )
                y = y.narrow(dim, 0, 1)
        lengths = []
        for axis in self.axes:
            if axis.batch:
                lengths.append(images)
            elif axis.places:
                lengths.append(math.prod(size[d] for d in axis.places))
            else:
                lengths.append(axis.cell)
        y = y.expand(lengths)
        made = closed(y, self.axes, size)
        return made if any(axis.places for axis in self.axes) else as_vector(made, len(size))

    def outlined(self, x: Tensor, image: Tensor) -> Tensor:
        size = x.shape[2:] if any(axis.places for axis in self.axes) else (1 for _ in x.shape[2:])
        return x.new_empty(len(x), math.prod(axis.cell for axis in self.axes), *size)

    def extra_repr(self) -> str:
        return f"{len(self.plan.calls)} calls"


class _Values:
    """Results of the recorded calls that a :class:`Positions` layer repeats, for one tile.

    A call runs on the tile's part alone if it can (:attr:`Plan.cellwise`), otherwise on the whole
    map.

    Args:
        layer: the layer with the plan and the parameters.
        calls: the calls of the user's forward pass for this size.
        like: a tensor on the device of the results.
        size: the size of the whole map.
        places: for each spatial dim, the range of the tile's positions.
    """

    def __init__(
        self,
        layer: Positions,
        calls: Sequence[Called],
        like: Tensor,
        size: Sequence[int],
        places: Sequence[range],
    ):
        self.layer, self.plan, self.calls = layer, layer.plan, calls
        self.like, self.size, self.places = like, tuple(size), places
        self._whole: dict[int, list[Tensor]] = {}
        self._cut: dict[int, list[Tensor]] = {}

    def _mask(self, marked: Marked) -> Tensor:
        """Return a mask that is True at those positions of the tile that an assignment selects.

        The mask has a dim for each of the layer's ``axes``, of length 1 where the dim has no
        positions.
        """
        found = torch.ones((1,) * len(self.layer.axes), dtype=torch.bool)
        for dim, axis in enumerate(self.layer.axes):
            for d in axis.places:
                along = marked.mask(self.calls, d, self.size[d])[
                    self.places[d].start : self.places[d].stop
                ]
                found = found & along.view(
                    [-1 if k == dim else 1 for k in range(len(self.layer.axes))]
                )
        return found.to(self.like.device)

    def cut(self, x: Made | Number | Marked) -> Tensor:
        """Return the tile's part of a tensor or mask; return a number as a tensor of shape ().

        Args:
            x: reference to the tensor, mask or number.
        """
        if isinstance(x, Marked):
            return self._mask(x)
        if isinstance(x, Number):
            return torch.tensor(
                float(x.value(self.calls)), dtype=torch.float64, device=self.like.device
            )
        if x.call in self.plan.cellwise:
            if x.call not in self._cut:
                self._cut[x.call] = self._made(x.call, self.cut)
            return self._cut[x.call][x.part]
        y = self.whole(x)
        for dim, place in enumerate(self.plan.labels[x]):
            if place is not None and place < 0:  # all spatial dims in one
                y = y.unflatten(dim, self.size)[
                    (
                        *(slice(None) for _ in range(dim)),
                        *(slice(r.start, r.stop) for r in self.places),
                    )
                ]
                y = y.flatten(dim, dim + len(self.size) - 1)
            elif place is not None:
                y = y.narrow(dim, self.places[place].start, len(self.places[place]))
        return y

    def whole(self, x: Made) -> Tensor:
        if x.call not in self._whole:
            self._whole[x.call] = self._made(x.call, self.whole)
        return self._whole[x.call][x.part]

    def _made(self, number: int, value: Callable[[Made], Tensor]) -> list[Tensor]:
        """Run one of the recorded calls that the layer repeats, and return its results.

        Args:
            number: the index of the call.
            value: a function that returns the tensor of a reference among the call's arguments.
        """
        call = self.calls[number]
        if (found := self._of_type(call, value)) is None:
            args = self._filled(call.args, value)
            kwargs = {
                key: self._filled(value, value)
                for key, value in call.kwargs.items()
                if key not in _SETTINGS
            }
            if call.name in FACTORIES and not call.name.startswith("new_"):
                kwargs["device"] = self.like.device
            found = [
                y.to(self.like.device)
                for y in found_in(call_wide(out_of_place(call.function), args, kwargs), Tensor)
            ]
        return found if call.graded else [y.detach() for y in found]

    def _of_type(self, call: Called, value: Callable[[Made], Tensor]) -> list[Tensor] | None:
        """Return [result] of a call that casts or makes a tensor; None for other calls.

        Examples are ``x.float()``, ``torch.zeros(3)`` and ``x.new_tensor(values)``.

        Args:
            value: function that returns the tensor to which a reference points.
        """
        kind, device = call.dtypes[0] if call.dtypes else None, self.like.device
        if call.name in MOVES:
            (x,) = self._filled(call.args[:1], value)
            return [x.to(kind)]
        if isinstance(value := _fill(call), (bool, int, float)):
            return [torch.full((), value, dtype=kind, device=device).expand(call.shapes[0])]
        if call.name.startswith("new_"):
            args = self._filled(call.args[1:], value)
            return [getattr(torch.zeros((), dtype=kind, device=device), call.name)(*args)]
        return None

    def _filled(self, tree: Any, value: Callable[[Made], Tensor]) -> Any:
        """Return the arguments of a recorded call, with a tensor in place of each reference."""
        match tree:
            case Made():
                return value(tree)
            case Kept():
                return getattr(self.layer, self.layer.names[tree.name])
            case tuple():
                return tuple(self._filled(x, value) for x in tree)
            case dict():
                return {key: self._filled(x, value) for key, x in tree.items()}
            case torch.device():
                return self.like.device
        return tree


MOVES = CASTS | {"cpu", "cuda"}
LIKE = {"zeros_like", "ones_like", "full_like"}
_SETTINGS = ("device", "pin_memory", "requires_grad", "memory_format")


def _fill(call: Called) -> Any:
    """Return the number with which a recorded call fills a tensor, such as 1 for ``torch.ones``.

    Return None for calls that do not fill a tensor with one number.
    """
    if call.name in ("full_like", "full", "new_full"):
        return (
            call.kwargs["fill_value"]
            if "fill_value" in call.kwargs
            else call.args[2 if call.name == "new_full" else 1]
        )
    return {"zeros": 0, "ones": 1}.get(call.name.removeprefix("new_").removesuffix("_like"))
