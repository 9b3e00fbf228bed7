"""The images that a network takes: their number of bands (channels) and of spatial dims.

Both are told where they are known: by the store, by ``model.in_channels``, by a trace of the network. Elsewhere they are found by trying, since the first
convolution of a module need not be what sees the image: its weight may be computed, it may see some of the bands, or other layers may come before it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distseg.models.layers import outline, skip_store
from distseg.models.meta import OnMeta
from distseg.models.passes import eager

_CONV = nn.modules.conv._ConvNd
_SIDE = 256  # pixels of the images that are tried
_USUAL = range(1, 17)  # bands that are tried where no convolution's fit
_SUMMED = 6  # numbers of channels whose sums are tried, as of streams with bands of their own


@dataclass(frozen=True)
class Images:
    """Facts about a network's images.

    Attributes:
        bands, dims: None where not known yet.
        guesses: numbers of bands that are tried first.
        answer: the shape that the network makes of one image of ``_SIDE`` pixels a side, where it was found by trying.
    """

    bands: int | None = None
    dims: int | None = None
    guesses: tuple[int, ...] = ()
    answer: tuple[int, ...] | None = None


_known: WeakKeyDictionary[nn.Module, Images] = WeakKeyDictionary()
_answers: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()
_NOTHING = Images()


def tell(
    model: nn.Module, bands: int | None = None, dims: int | None = None, guesses: Sequence[int] = ()
) -> None:
    """Note what is known of the images that ``model`` takes."""
    before = _known.get(model, _NOTHING)
    _known[model] = replace(
        before,
        bands=bands or before.bands,
        dims=dims or before.dims,
        guesses=(*guesses, *before.guesses),
    )


def tell_like(model: nn.Module, other: nn.Module) -> nn.Module:
    """Note that ``model`` takes the images that ``other`` takes; returns ``model``."""
    tell(model, bands_of(other), dims_of(other))
    return model


def is_told(model: nn.Module) -> bool:
    """Return True if the number of bands is a fact, told or found, and no guess."""
    return _settled(model).bands is not None


def bands_of(model: nn.Module) -> int:
    """Return the number of bands of a network's images: what was told, else what fits, else what the first convolution takes.

    Raises:
        ValueError: nothing was told, nothing fits, and there is no convolution.
    """
    found = _settled(model)
    return found.bands or next(iter((*found.guesses, first_convolution(model).in_channels)))


def dims_of(model: nn.Module) -> int:
    """Return the number of spatial dims of a network's images; errors as of :func:`bands_of`."""
    options = _dims(model)
    if len(options) == 1:
        return options[0]
    return _settled(model).dims or len(first_convolution(model).kernel_size)


def first_convolution(model: nn.Module) -> nn.Module:
    """Return the first convolution that a module holds.

    Raises:
        ValueError: there is none.
    """
    found = next((m for m in model.modules() if isinstance(m, _CONV)), None)
    if found is None:
        raise ValueError(
            "this model has no convolution layer to read the bands of its images from, and those that were tried do not fit: set model.in_channels"
        )
    return found


def channels_of(model: nn.Module) -> tuple[int, int]:
    """Return a network's (bands, outputs), the outputs as far as they can be worked out, else those of the last convolution."""
    bands, made = bands_of(model), answer_of(model)
    return bands, made[1] if made else [m for m in model.modules() if isinstance(m, _CONV)][
        -1
    ].out_channels


@torch.no_grad()
def answer_of(model: nn.Module, size: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Return the shape of what a network makes of one image; None where that can't be worked out.

    Args:
        size: of the image, for networks that take one size alone; it then holds for later calls too.

    Raises:
        ValueError: it makes one number of each image, without a dim of outputs.
    """
    if size is None and model in _answers:
        return _answers[model]
    found = _settled(model)
    made = found.answer if size is None else None
    if made is None:
        with suppress(Exception):  # a module of the user's may want another size, or numbers
            made = _tried(outline(model), bands_of(model), size or (_SIDE,) * dims_of(model))
    if made is not None and len(made) < 2:
        raise ValueError(
            "this network makes (N,) of N images, one number of each: let it keep the dim of outputs, (N, 1)"
        )
    if size is not None and made:
        _answers[model] = made
    return made


def fitting(model: nn.Module) -> Images | None:
    """Return the bands and dims of images that a network takes, the likeliest ones, whatever was told; None where none are found."""
    return _searched(model, _likely(model), _dims(model))


def _settled(model: nn.Module) -> Images:
    """Return what is known of a network's images, and find what is not."""
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
    """Return the first of these numbers with which a forward pass without numbers goes through."""
    shadow = None
    for count, channels in ((d, n) for d in dims for n in bands):
        try:
            shadow = outline(model) if shadow is None else shadow
            answer = _tried(shadow, channels, (_SIDE,) * count)
            return Images(channels, count, answer=answer)
        except Exception as e:
            if "meta" in str(e):  # it wants numbers, with any images
                return None
    return None


def _tried(shadow: nn.Module, bands: int, size: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape that an outline makes of one image; None where that is no tensor."""
    dtype = next((p.dtype for p in shadow.parameters() if p.is_floating_point()), torch.float32)
    with skip_store({}), eager(), OnMeta():
        made = shadow(torch.empty(1, bands, *size, device="meta", dtype=dtype))
    return tuple(made.shape) if isinstance(made, Tensor) else None


def _likely(model: nn.Module) -> list[int]:
    """Return numbers of bands in the order in which they are tried."""
    return list(dict.fromkeys(n for n in _numbers(model) if n > 0))


def _numbers(model: nn.Module) -> Iterator[int]:
    yield from _known.get(model, _NOTHING).guesses
    convs = [m.in_channels for m in model.modules() if isinstance(m, _CONV)]
    yield from convs[:1]
    yield from sorted(set(convs))[:4]
    yield from _USUAL
    weights = [p for p in _made(model) if 3 <= p.dim() <= 5]
    yield from (
        p.shape[p.shape[1] > 1] for p in weights[:2]
    )  # of a convolution's function; depthwise ones have one channel each
    yield from (m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    some = sorted(set(convs))[:_SUMMED]
    yield from (sum(parts) for count in (2, 3) for parts in combinations(some, count))


def _dims(model: nn.Module) -> list[int]:
    """Return the numbers of spatial dims that a network's images may have, the likeliest first."""
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
    """Yield the parameters that have a shape: lazy layers have none before their first pass."""
    return (p for p in model.parameters() if not is_lazy(p))


def _class_name(module: nn.Module) -> str:
    return type(module).__name__
