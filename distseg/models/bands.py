"""Find the number of bands (channels) and of spatial dims of the images that a network takes.

Both numbers are recorded where they are known: from the store, from ``model.in_channels``, or from
a trace of the network. Otherwise they are found by trial forward passes. They cannot be read from
the first convolution of a module: its weight may be computed, it may read some of the bands only,
or other layers may come before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distseg.models.layers import outline, skip_store
from distseg.models.meta import OnMeta
from distseg.models.passes import eager

_CONV = nn.modules.conv._ConvNd
_SIDE = 256  # pixels along each dim of the images that are tried
_USUAL = range(1, 17)  # numbers of bands that are tried if the channels of convolutions do not fit
# Number of channel numbers whose sums of 2 and 3 are tried: a network may split the bands among
# several streams.
_SUMMED = 6


@dataclass(frozen=True)
class Images:
    """Known facts about the images that a network takes, and about its result for one image.

    Attributes:
        bands, dims: numbers of bands and of spatial dims; None if not known yet.
        guesses: numbers of bands to try first if ``bands`` is not known.
        answer: the shape of the network's result for one image of ``_SIDE`` pixels along each dim.
            None if no trial forward pass has been run, or if none succeeded.
    """

    bands: int | None = None
    dims: int | None = None
    guesses: tuple[int, ...] = ()
    answer: tuple[int, ...] | None = None


_known: WeakKeyDictionary[nn.Module, Images] = WeakKeyDictionary()
_answers: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()
_NOTHING = Images()


def record_images(
    model: nn.Module, bands: int | None = None, dims: int | None = None, guesses: Sequence[int] = ()
) -> None:
    """Record the numbers of bands and of spatial dims of the images that ``model`` takes.

    Args:
        bands, dims: the numbers of bands and of spatial dims, which replace recorded numbers. None
            keeps a recorded number.
        guesses: numbers of bands to try first, before those of earlier calls.
    """
    before = _known.get(model, _NOTHING)
    _known[model] = replace(
        before,
        bands=bands or before.bands,
        dims=dims or before.dims,
        guesses=(*guesses, *before.guesses),
    )


def record_like(model: nn.Module, other: nn.Module) -> nn.Module:
    """Record that ``model`` takes the same images as ``other``; return ``model``."""
    record_images(model, bands_of(other), dims_of(other))
    return model


def is_recorded(model: nn.Module) -> bool:
    """Return True if a network's number of bands is known and :func:`bands_of` need not guess it.

    It is known if :func:`record_images` has recorded it, or if a trial forward pass finds it.
    """
    return _recorded_images(model).bands is not None


def bands_of(model: nn.Module) -> int:
    """Return the number of bands of a network's images.

    This is the recorded number or, if there is none, the first number with which a trial forward
    pass succeeds. If none succeeds, it is the first guess or, without guesses, the number of input
    channels of the first convolution.

    Raises:
        ValueError: no number is recorded, none fits, and the network has no convolution.
    """
    found = _recorded_images(model)
    if found.bands or found.guesses:
        return found.bands or found.guesses[0]
    return first_convolution(model).in_channels


def dims_of(model: nn.Module) -> int:
    """Return the number of spatial dims of a network's images, recorded or found by trial.

    Raises:
        ValueError: no number is recorded, none fits, and the network has no convolution.
    """
    options = _dims(model)
    if len(options) == 1:
        return options[0]
    return _recorded_images(model).dims or len(first_convolution(model).kernel_size)


def first_convolution(model: nn.Module) -> nn.Module:
    """Return the first convolution of a module.

    Raises:
        ValueError: the module has no convolution.
    """
    found = next((m for m in model.modules() if isinstance(m, _CONV)), None)
    if found is None:
        raise ValueError(
            "this model has no convolution layer that tells the number of bands of its images, "
            "and it fails with each number of bands that was tried: set model.in_channels"
        )
    return found


def channels_of(model: nn.Module) -> tuple[int, int]:
    """Return the number of bands of a network's images and the number of channels of its result.

    If the result cannot be computed on the meta device, the second number is the number of output
    channels of the network's last convolution.
    """
    bands, made = bands_of(model), answer_of(model)
    if made:
        return bands, made[1]
    return bands, [m for m in model.modules() if isinstance(m, _CONV)][-1].out_channels


@torch.no_grad()
def answer_of(model: nn.Module, size: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Return the shape of a network's result for one image, or None if it cannot be computed.

    Args:
        model: the network.
        size: the size of the image, for networks that take a single size only. The shape is then
            stored, and returned by later calls without a size.

    Raises:
        ValueError: the result is one number for each image, without a dim of outputs.
    """
    if size is None and model in _answers:
        return _answers[model]
    found = _recorded_images(model)
    made = found.answer if size is None else None
    if made is None:
        with suppress(Exception):
            # User code may need another size, or a tensor with values, which meta tensors lack.
            made = _tried(outline(model), bands_of(model), size or (_SIDE,) * dims_of(model))
    if made is not None and len(made) < 2:
        raise ValueError(
            "this network returns a tensor (N,) for N images, without a dim of outputs: "
            "let it return (N, 1)"
        )
    if size is not None and made:
        _answers[model] = made
    return made


def fitting(model: nn.Module) -> Images | None:
    """Find by trial a number of bands and of spatial dims with which a network runs.

    A number of dims that is recorded in the model is kept, but not a number of bands. The most
    likely numbers of bands come first. Return None if no combination runs, or if the network cannot
    run on the meta device.
    """
    return _searched(model, _likely(model), _dims(model))


def _recorded_images(model: nn.Module) -> Images:
    """Return what is known about a network's images; find the missing numbers by trial passes.

    If no trial succeeds, return only what is recorded.
    """
    known = _known.get(model, _NOTHING)
    dims = _dims(model)
    if known.bands is not None and len(dims) == 1:
        return known
    if (found := _searched(model, [known.bands] if known.bands else _likely(model), dims)) is None:
        return known
    _known[model] = found = replace(known, bands=found.bands, dims=found.dims, answer=found.answer)
    return found


@torch.no_grad()
def _searched(model: nn.Module, bands: Sequence[int], dims: Sequence[int]) -> Images | None:
    """Find the first combination of bands and dims with which a forward pass succeeds.

    The passes run on the meta device. Return None if no combination succeeds, or if the network
    cannot run on that device.

    Args:
        model: the network.
        bands: the numbers of bands to try, in order.
        dims: the numbers of spatial dims to try, in order. All ``bands`` are tried with the first
            number before the second.
    """
    shadow = None
    for count, channels in ((d, n) for d in dims for n in bands):
        try:
            shadow = outline(model) if shadow is None else shadow
            answer = _tried(shadow, channels, (_SIDE,) * count)
            return Images(channels, count, answer=answer)
        except Exception as e:
            if "meta" in str(e):
                return None  # the network needs real tensors, whatever the image
    return None


def _tried(shadow: nn.Module, bands: int, size: Sequence[int]) -> tuple[int, ...] | None:
    """Run a network on one image, and return the shape of its result (1, ...).

    Return None if the result is not a tensor. Errors of the network are not caught.

    Args:
        shadow: a copy of the network on the meta device
            (:func:`distseg.models.layers.outline`).
        bands: the number of bands of the image.
        size: the size of the image.
    """
    dtype = next((p.dtype for p in shadow.parameters() if p.is_floating_point()), torch.float32)
    with skip_store({}), eager(), OnMeta():
        made = shadow(torch.empty(1, bands, *size, device="meta", dtype=dtype))
    return tuple(made.shape) if isinstance(made, Tensor) else None


def _likely(model: nn.Module) -> list[int]:
    """Return the numbers of bands to try, the most likely first."""
    return list(dict.fromkeys(n for n in _numbers(model) if n > 0))


def _numbers(model: nn.Module) -> Iterator[int]:
    """Yield numbers of bands to try, the most likely first; some may be repeated."""
    yield from _known.get(model, _NOTHING).guesses
    convs = [m.in_channels for m in model.modules() if isinstance(m, _CONV)]
    yield from convs[:1]
    yield from sorted(set(convs))[:4]
    yield from _USUAL
    weights = [p for p in _made(model) if 3 <= p.dim() <= 5]
    # A weight of F.conv2d has the shape (outputs, bands, ...), or (bands, 1, ...) if depthwise.
    yield from (p.shape[p.shape[1] > 1] for p in weights[:2])
    yield from (m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    some = sorted(set(convs))[:_SUMMED]
    yield from (sum(parts) for count in (2, 3) for parts in combinations(some, count))


def _dims(model: nn.Module) -> list[int]:
    """Return the numbers of spatial dims that a network's images may have, most likely first."""
    if dims := _known.get(model, _NOTHING).dims:
        return [dims]
    if convs := list(
        dict.fromkeys(len(m.kernel_size) for m in model.modules() if isinstance(m, _CONV))
    ):
        return convs
    named = [
        int(kind[-2]) for kind in map(_class_name, model.modules()) if re.search("[123]d$", kind)
    ]
    return list(
        dict.fromkeys([*named, *(p.dim() - 2 for p in _made(model) if 3 <= p.dim() <= 5), 2, 3, 1])
    )


def _made(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a network that have a shape already.

    The parameters of lazy layers, such as ``nn.LazyConv2d``, get their shape in the first pass.
    """
    return (p for p in model.parameters() if not is_lazy(p))


def _class_name(module: nn.Module) -> str:
    return type(module).__name__
