"""Capture a module as a :class:`distseg.models.network.Network` of supported layers.

The captured network holds the parameters and buffers of the user's model, not copies.
:mod:`distseg.models.capture.trace` records the calls of the forward pass on images of several
sizes. The rules of :mod:`distseg.models.capture.rules` turn the calls into layers. A call without a
rule raises an error that names the call. A number that differs between the image sizes is taken to
depend on the image's size; a number that is the same for all sizes is taken for a fixed setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial

import torch
from torch import nn

from distseg.models.bands import bands_of, dims_of, is_recorded, record_images
from distseg.models.capture.by_type import WIDE, numbers_by_type, with_numbers
from distseg.models.capture.checks import check_left, picture
from distseg.models.capture.compare import TooSmall, check_same
from distseg.models.capture.reader import DIFFERENT, Reader
from distseg.models.capture.rules import made
from distseg.models.capture.trace import CanNotCapture, Hidden, Trace, alike, trace
from distseg.models.capture.views import check_copy, check_views
from distseg.models.layers import on_meta
from distseg.models.modified import known, modification_of
from distseg.models.network import Network, flat_layers, inexact, is_flat, refusals, unbounded
from distseg.models.passes import generators_kept, scripted
from distseg.models.pointwise import POINTWISE_LAYERS

# Units of the traced image sizes, in pixels. The second unit is for networks whose image sizes must
# be multiples of more than 64.
_UNITS = (64, 256)
# Image sizes of the traces, in units.
_COUNTS = ((3, 5, 4), (4, 3, 5), (7, 4, 3))
# Multiples of a smaller unit that are added to these sizes, to test whether such sizes work.
_ODD = ((0, 1, 3), (1, 2, 0), (3, 5, 1))
# Side of the image for the comparison, for 1, 2 and 3 dims.
_SIDE = (256, 64, 64)


def as_network(model: nn.Module) -> nn.Module:
    """Return ``model`` itself if it is a network of supported layers, else its captured network.

    If the capture fails, return ``model`` unchanged, and store the error message under ``model`` in
    the dict :data:`distseg.models.network.refusals`.
    """
    if (
        is_flat(model)
        and all(map(_is_supported, (layer for _, layer in flat_layers(model))))
        and not _repeats_layers(model)
        and not _has_other_dropout(model)
        and not _overrides_train(model)
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
    """Return the name of a module or parameter with a gradient hook; None without such hooks."""
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


def _is_supported(layer: nn.Module) -> bool:
    """Return True if distseg can compute a layer on parts of an image without a capture.

    Return False for a modified layer, such as one with hooks.
    """
    kind = known(type(layer))
    return (
        not isinstance(layer, _OF_IMAGES)
        and (kind in POINTWISE_LAYERS or not _is_made_of_functions(kind))
        and type(layer) is kind is not nn.Module
        and modification_of(layer) is None
        and not layer._modules
        and not isinstance(layer, _DRAW)
    )


def _is_made_of_functions(kind: type) -> bool:
    """Return True if a capture makes layers of the function calls in modules of this class.

    The classes are LocalResponseNorm and all in ``torch.nn.modules.activation``, whose modules call
    for example ``F.softmax``. This includes pointwise activations, although these modules could
    also be used unchanged on a part of an image.
    """
    return kind.__module__ == nn.modules.activation.__name__ or kind is nn.LocalResponseNorm


def _repeats_layers(model: nn.Module) -> bool:
    """Return True if a network calls the same norm or dropout object several times.

    Distributed layers hold the statistics and masks of one call only. So such a network is
    captured: a capture makes a layer for each call.
    """
    layers = [layer for _, layer in flat_layers(model) if isinstance(layer, _OF_A_PLACE)]
    return len(set(layers)) < len(layers)


def _has_other_dropout(model: nn.Module) -> bool:
    """Return True if a Dropout1d or Dropout3d layer does not fit the images' number of dims.

    For example, in a network of 2D images, ``nn.Dropout3d`` takes a tensor (N, C, H, W) for one
    image (C, D, H, W) without a batch dim.
    """
    drops = [layer for layer in model.modules() if isinstance(layer, (nn.Dropout1d, nn.Dropout3d))]
    with suppress(ValueError):
        return bool(drops) and any(
            not isinstance(layer, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)[dims_of(model) - 1])
            for layer in drops
        )
    return False


def _overrides_train(model: nn.Module) -> bool:
    """Return True if a module overrides ``train`` or ``eval``, as networks with frozen parts do."""
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
    """Return a network of supported layers that computes the same as ``model``.

    Args:
        model: a module (N, C, *size) -> (N, C', *size), or (N, C') for whole images, on any device.
            It is not changed.
        in_channels: C; by default the most likely number with which a forward pass succeeds.

    Returns:
        a network that holds the parameters and buffers of ``model``.

    Raises:
        CanNotCapture: the message names the operation, the module that calls it and the line of
            code, and says how to fix it.
    """
    if (hooked := hook_on_gradients(model)) is not None:
        raise CanNotCapture(
            f"{hooked} changes gradients by a hook, which would run on each part of an image "
            f"separately: remove the hook"
        )
    if (script := scripted(model)) is not None:
        raise CanNotCapture(
            f"{script} is TorchScript (torch.jit.script or trace), whose calls distseg cannot "
            "see: write it in plain PyTorch"
        )
    check_views(model)
    with generators_kept():
        return _captured(model, in_channels)


def _captured(model: nn.Module, in_channels: int | None) -> Network:
    """Return the network captured from a model that passed the first checks of :func:`capture`.

    Trace the model on several image sizes, turn the traces into layers, and compare the results of
    network and model. Arguments and errors are those of :func:`capture`.
    """
    try:
        empty = on_meta(model).double()
    except Exception as e:
        # A module's own __deepcopy__ may raise anything.
        raise CanNotCapture(
            f"the network cannot be copied: make copy.deepcopy(model) work, which fails with "
            f"{' '.join(str(e).split())[:300]}"
        ) from e
    check_copy(model, empty)
    record_images(model, in_channels)
    try:
        dims = dims_of(model)
        likeliest = [bands_of(model)] if is_recorded(model) else _channels_to_try(model)
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
        """Refuse the model if its forward pass depends on the passes that ran before it.

        Run the same pass in a fresh copy of the model, and in a copy that has already run other
        passes. The two must agree in the result, and neither may change the model's tensors.

        Args:
            size, batch: the image size and the number of images of the compared passes.

        Raises:
            Hidden: a tensor changes, or a pass has another result or leaves another state after
                other passes.
        """
        others = [
            partial(trace, channels=channels, size=other, batch=batch) for other in (sizes[1], size)
        ]
        last = partial(trace, channels=channels, size=size, batch=batch)
        check_left(
            lambda: on_meta(model).double().train(), before, picture(empty), last, others, alike
        )

    @cache
    def traced(size: tuple[int, ...]) -> Trace:
        """Return a trace of images of this size, and leave random generators unchanged."""
        with generators_kept():
            return trace(empty, channels, size)

    read = partial(Reader, rule=made, source=traced)
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
        # A network whose output is a vector needs the whole image.
        refused.everywhere = refused.everywhere or len(call.shapes[whole.result.part]) != 2 + dims
        # Of the two units, report the error at the smaller one.
        raise refused
    for smaller in (2**k for k in range(unit.bit_length() - 1)):
        odd = [tuple(n + smaller * o for n, o in zip(size, add)) for size, add in zip(sizes, _ODD)]
        with suppress(CanNotCapture):
            found, multiple = read(shapes, sizes + odd, seen(odd, traces)), smaller
            break
    look(sizes[0], 2)
    network = found.network(model)
    network.multiple, network.fingerprint = multiple, whole.fingerprint
    for module in (model, network):
        record_images(module, channels, dims)

    @cache
    def check(size: tuple[int, ...], images: int) -> None:
        with generators_kept():
            seen_now = with_numbers(trace(empty, channels, size, images), numbers)
            look(size, images)
        seen_too = read(shapes, [*found.sizes, size], [*found.traces, seen_now])
        if (other := found.differs(seen_too)) is not None:
            raise CanNotCapture(
                f"the output size of layer {other} follows another formula for images of "
                f"{'x'.join(map(str, size))} pixels than for the image sizes that distseg traced: "
                "compute it by one formula for all sizes"
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
    """Return traces of a model in float32 and bfloat16, by dtype.

    A dtype in which the model cannot be traced is left out.

    Args:
        channels, size: shape of the traced images, (N, channels, *size).
    """
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        with suppress(CanNotCapture):
            found[dtype] = trace(on_meta(model).to(dtype), channels, size)
    return found


def _channels_to_try(model: nn.Module) -> list[int]:
    """Return the numbers of image channels to try, for a model whose number is not known.

    The first number is the most likely one (:func:`distseg.models.bands.bands_of`). Up to four
    others come from the model's convolutions, because any of them may be called first.
    """
    first = bands_of(model)
    others = sorted(
        {m.in_channels for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)} - {first}
    )
    return [first, *others[:4]]


def _first_trace(
    empty: nn.Module, likeliest: Sequence[int], size: Sequence[int]
) -> tuple[int, Trace]:
    """Trace the network with several numbers of image channels; return the first that works.

    Return (number of channels, trace).

    Args:
        empty: a copy of the network on the meta device.
        likeliest: the numbers of channels to try, in this order.
        size: the size of the image.

    Raises:
        CanNotCapture: the network fails with each number; the message is that for the first one.
    """
    for channels in likeliest[:-1]:
        with suppress(CanNotCapture):
            return channels, trace(empty, channels, size)
    if len(likeliest) > 1:
        with suppress(CanNotCapture):
            return likeliest[-1], trace(empty, likeliest[-1], size)
    # Trace once more, to raise the reason.
    return likeliest[0], trace(empty, likeliest[0], size)
