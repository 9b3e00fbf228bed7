"""From any network to a :class:`distseg.models.network.Network` of layers that are known, with the very parameters of its own.

What the network calls is seen (:mod:`distseg.models.capture.trace`) on images of several sizes. Calls become layers by the rules of
:mod:`distseg.models.capture.rules`, and what no rule knows is refused by name. Numbers that follow the image's size are told from settings by
comparing the sizes.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from typing import Sequence

import torch
from torch import nn

from distseg.models.bands import bands_of, dims_of, is_told, tell
from distseg.models.capture.by_type import WIDE, numbers_by_type, with_numbers
from distseg.models.capture.compare import TooSmall, check_same
from distseg.models.capture.hidden import check_left, picture
from distseg.models.capture.reader import DIFFERENT, Reader
from distseg.models.capture.rules import made
from distseg.models.capture.trace import CanNotCapture, Hidden, Trace, alike, trace
from distseg.models.layers import on_meta
from distseg.models.modified import known, modification_of
from distseg.models.network import Network, flat_layers, inexact, is_flat, refusals, unbounded
from distseg.models.passes import generators_kept, scripted

_UNITS = (64, 256)  # pixels; the second for networks that want images to be multiples of more
_COUNTS = ((3, 5, 4), (4, 3, 5), (7, 4, 3))  # sizes that networks are looked at, in units
_ODD = ((0, 1, 3), (1, 2, 0), (3, 5, 1))  # and what is added to them, in units of the multiple
_SIDE = (256, 64, 64)  # of the image that both are compared on, by the number of its dims


def as_network(model: nn.Module) -> nn.Module:
    """A network of layers that are known: the model itself if it is one, else what it is captured as; where that fails the model as it is, and ``refusals`` have why."""
    if (
        is_flat(model)
        and all(map(_is_known, (layer for _, layer in flat_layers(model))))
        and not _stands_twice(model)
        and not _drops_otherwise(model)
        and not _stays_in_evaluation(model)
        and hook_on_gradients(model) is None
    ):
        return model
    try:
        return capture(model)
    except CanNotCapture as e:
        refusals[model] = str(e)
        if isinstance(e, Hidden):
            inexact.add(model)
        if e.everywhere:
            unbounded.add(model)
        return model


def hook_on_gradients(model: nn.Module) -> str | None:
    """Return the name of a module or parameter whose gradient a hook of the user's is called with; None if there is none."""
    every = nn.modules.module
    if every._global_backward_hooks or every._global_backward_pre_hooks:
        return "every module (register_module_full_backward_hook)"
    modules = (
        name or "the model"
        for name, m in model.named_modules()
        if m._backward_hooks or m._backward_pre_hooks
    )
    parameters = (
        name
        for name, p in model.named_parameters()
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    )
    return next(modules, None) or next(parameters, None)


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer computes what its class, PyTorch's or ours, says, and that has a twin for parts of an image."""
    return (
        not isinstance(layer, _OF_IMAGES)
        and type(layer) is known(type(layer)) is not nn.Module
        and modification_of(layer) is None
        and not layer._modules
        and not isinstance(layer, _DRAW)
    )


def _stands_twice(model: nn.Module) -> bool:
    """Tell whether a flat network has a norm or dropout at several places, whose statistics and masks belong to a place."""
    layers = [layer for _, layer in flat_layers(model) if isinstance(layer, _OF_A_PLACE)]
    return len(set(layers)) < len(layers)


def _drops_otherwise(model: nn.Module) -> bool:
    """Tell whether a network has a dropout for images of other dims than its own, to which PyTorch's functions do something else."""
    drops = [layer for layer in model.modules() if isinstance(layer, (nn.Dropout1d, nn.Dropout3d))]
    with suppress(ValueError):
        return bool(drops) and any(
            not isinstance(layer, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)[dims_of(model) - 1])
            for layer in drops
        )
    return False


def _stays_in_evaluation(model: nn.Module) -> bool:
    """Tell whether a module has a way of its own to go over to training, as frozen parts have that stay in evaluation."""
    return any(
        "train" in vars(module)
        or "eval" in vars(module)
        or type(module).train is not nn.Module.train
        for module in model.modules()
    )


_OF_A_PLACE = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.modules.dropout._DropoutNd,
)
_DRAW = (
    nn.RReLU,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
_OF_IMAGES = (
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.Flatten,
    nn.Unflatten,
    nn.Linear,
)


def capture(model: nn.Module, in_channels: int | None = None) -> Network:
    """The same network as layers that are known.

    Args:
        model: (N, C, *size) -> (N, C', *size), or (N, C') for whole images; on any device. It is not changed.
        in_channels: C; by default the likeliest number with which a forward pass goes through.

    Returns:
        a network with the very parameters and buffers of the model.

    Raises:
        CanNotCapture: naming the operation, the module that calls it, the line of code, and what would help.
    """
    if (hooked := hook_on_gradients(model)) is not None:
        raise CanNotCapture(
            f"{hooked} changes gradients by a hook, which parts of an image would have each to "
            f"itself: leave it out"
        )
    if (script := scripted(model)) is not None:
        raise CanNotCapture(
            f"{script} is TorchScript (torch.jit.script or trace), whose calls can't be seen: "
            f"write it in plain PyTorch"
        )
    with generators_kept():
        return _captured(model, in_channels)


def _captured(model: nn.Module, in_channels: int | None) -> Network:
    """Do what :func:`capture` says."""
    try:
        empty = on_meta(model).double()
    except Exception as e:  # a module's own way to be copied may fail by any
        raise CanNotCapture(f"it can't be copied: {' '.join(str(e).split())[:300]}") from e
    tell(model, in_channels)
    try:
        dims = dims_of(model)
        likeliest = [bands_of(model)] if is_told(model) else _guessed(model)
    except ValueError as e:
        raise CanNotCapture(str(e)) from None
    before = picture(empty.train())
    shapes = {
        name: tuple(x.shape)
        for name, x in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }

    def seen(sizes: Sequence[tuple[int, ...]], before: list[Trace]) -> list[Trace]:
        return [
            *before,
            *(
                with_numbers(trace(empty, channels, size, batch=2 + n % 2), numbers)
                for n, size in enumerate(sizes, len(before))
            ),
        ]

    sizes = [tuple(_UNITS[0] * n for n in counts[:dims]) for counts in _COUNTS]
    channels, whole = _first_trace(empty, likeliest, sizes[0])

    def look(size: tuple[int, ...], batch: int) -> None:
        """Refuse what the passes up to now left behind."""
        others = [
            partial(trace, channels=channels, size=other, batch=batch) for other in (sizes[1], size)
        ]
        last = partial(trace, channels=channels, size=size, batch=batch)
        check_left(
            lambda: on_meta(model).double().train(), before, picture(empty), last, others, alike
        )

    @cache
    def passed(size: tuple[int, ...]) -> Trace:
        """Return a trace for what is computed of an image's size, whatever else is going on."""
        with generators_kept():
            return trace(empty, channels, size)

    read = partial(Reader, rule=made, source=passed)
    look(sizes[0], 2)
    numbers = numbers_by_type({WIDE: whole, **_in_other_types(model, channels, sizes[0])})
    whole = with_numbers(whole, numbers)
    refused = found = None
    for unit in _UNITS:
        sizes = [tuple(unit * n for n in counts[:dims]) for counts in _COUNTS]
        traces = seen(sizes[1:], [whole]) if unit == _UNITS[0] else seen(sizes, [])
        try:
            found, multiple = read(shapes, sizes, traces), unit
            break
        except CanNotCapture as e:
            refused = refused or e
            if str(e) == DIFFERENT:
                break
    if found is None:
        call = whole.calls[whole.result.call]
        refused.everywhere = (
            refused.everywhere or len(call.shapes[whole.result.part]) != 2 + dims
        )  # a vector of the image
        raise refused  # at multiples of the smaller one
    for smaller in (2**k for k in range(unit.bit_length() - 1)):
        odd = [tuple(n + smaller * o for n, o in zip(size, add)) for size, add in zip(sizes, _ODD)]
        with suppress(CanNotCapture):
            found, multiple = read(shapes, sizes + odd, seen(odd, traces)), smaller
            break
    look(sizes[0], 2)
    network = found.network(model)
    network.multiple, network.fingerprint = multiple, whole.fingerprint
    for module in (model, network):
        tell(module, channels, dims)

    @cache
    def check(size: tuple[int, ...], images: int) -> None:
        with generators_kept():
            seen_now = with_numbers(trace(empty, channels, size, images), numbers)
            look(size, images)
        seen_too = read(shapes, [*found.sizes, size], [*found.traces, seen_now])
        if (other := found.differs(seen_too)) is not None:
            raise CanNotCapture(
                f"the size of what {other} makes follows other sizes than it does with other images"
            )

    network.check = check
    side = max(_SIDE[dims - 1], multiple)
    try:
        check_same(model, found.network, channels, (side,) * dims)
    except TooSmall:
        check_same(model, found.network, channels, (2 * side,) * dims)
    return network


def _in_other_types(
    model: nn.Module, channels: int, size: Sequence[int]
) -> dict[torch.dtype, Trace]:
    """Return traces in the types of runs, where the network runs in them."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        with suppress(CanNotCapture):
            found[dtype] = trace(on_meta(model).to(dtype), channels, size)
    return found


def _guessed(model: nn.Module) -> list[int]:
    """Return numbers of bands to try where no image that was tried fits: those of the first convolution that is made, or of another one, which is called first."""
    first = bands_of(model)
    others = sorted(
        {m.in_channels for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)} - {first}
    )
    return [first, *others[:4]]


def _first_trace(
    empty: nn.Module, likeliest: Sequence[int], size: Sequence[int]
) -> tuple[int, Trace]:
    """Return the number of bands of a network's images, and a trace with such an image."""
    for channels in likeliest[:-1]:
        with suppress(CanNotCapture):
            return channels, trace(empty, channels, size)
    if len(likeliest) > 1:
        with suppress(CanNotCapture):
            return likeliest[-1], trace(empty, likeliest[-1], size)
    return likeliest[0], trace(empty, likeliest[0], size)  # which tells why
