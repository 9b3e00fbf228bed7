"""Norm and activation of one image or a part of it, (1, C, *size), by the compiled kernels.

The formulas are in norm.cpp. Parameters are (C,) vectors of float32, or of float64 if the image is
float64. In memory, either the channels of a pixel or the pixels of a row must be adjacent. Views of
tiles and of their owned parts satisfy this, so they are not copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from distseg.comm.memory_format import channels_last, lies_last
from distseg.layers.kernels.build import library
from distseg.tiling.tile import Box

_TYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class Affine(NamedTuple):
    """Affine map and activation: z = scale * (x - pivot) + bias, y = z if z > 0 else slope * z.

    A norm layer computes this formula once its statistics are known. Pivot, scale and bias are
    vectors (C,). With slope 1 there is no activation.
    """

    pivot: Tensor
    scale: Tensor
    bias: Tensor
    slope: float = 1.0


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("channels", "depth", "height", "width", "channels_last")
    ]
    _fields_ += [("own", ctypes.c_int64 * 6), ("threads", ctypes.c_int64)]


class _Norm(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("images", "groups", "joint")] + [
        (name, ctypes.c_double) for name in ("eps", "slope", "p")
    ]


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("channel", "plane", "row")]


def available(x: Tensor) -> bool:
    """Return True if the compiled kernels can take the images ``x``, (B, C, *size).

    This holds for CPU tensors in float32, float64 or bfloat16 with 1 to 3 spatial dims, if the
    kernels could be compiled.
    """
    return (
        x.device.type == "cpu" and x.dtype in _TYPES and 3 <= x.dim() <= 5 and library() is not None
    )


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations of each channel of ``x``, (C,) float64 each.

    Args:
        x: one image or a part of it, (1, C, *size).
    """
    found = torch.empty(2, x.shape[1], dtype=torch.float64)
    _call("moments", lies_last(x), [x], [], [found[0], found[1]])
    return found[0], found[1]


def forward(x: Tensor, affine: Affine, out: Tensor) -> Tensor:
    """Apply an affine map and an activation to ``x``, write the result to ``out`` and return it.

    Args:
        x: one image or a part of it, (1, C, *size).
        affine: the parameters of the formula that :class:`Affine` documents.
        out: ``x`` itself or ``torch.empty_like(x)``.
    """
    last = lies_last(x)
    written = _in_runs(out, last)
    _call("forward", last, [x, written], affine)
    return _into(out, written)


def sums(g: Tensor, x: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    """Return the sums of g' and of g' * (x - pivot) over all pixels, (C,) float64 each.

    g' is the gradient of the loss by z, the value before the activation: g where z > 0, else slope
    * g (:class:`Affine`).

    Args:
        g: the gradient of the loss by y, the result of :func:`forward`, (1, C, *size).
        x: the input of :func:`forward`, (1, C, *size).
        affine: the affine map and activation of :func:`forward`.
    """
    found = torch.empty(2, x.shape[1], dtype=torch.float64)
    _call("sums", lies_last(x), [g, x], affine, [found[0], found[1]])
    return found[0], found[1]


def gradient(
    g: Tensor, x: Tensor, affine: Affine, tilt: Tensor, shift: Tensor, own: Box, out: Tensor
) -> Tensor:
    """Write to ``out`` the gradient of a norm's input, which includes that through the statistics.

    It is scale * g' on all pixels, plus tilt * (x - pivot) + shift on the pixels inside ``own``.
    :func:`sums` explains g'.

    Args:
        g: the gradient of the loss by y, the result of :func:`forward`, (1, C, *size).
        x: the input of :func:`forward`, (1, C, *size).
        affine: the affine map and activation of :func:`forward`.
        tilt, shift: vectors (C,) that give the gradient through the statistics.
        own: the box of the owned cells, over which the statistics were taken.
        out: ``torch.empty_like(x)``; it is returned.
    """
    last = lies_last(x)
    written = _in_runs(out, last)
    _call("gradient", last, [g, x, written], [*affine, tilt, shift], own=own)
    return _into(out, written)


class Norm(NamedTuple):
    """Settings of a norm layer that computes its statistics from the images it is given.

    The images must be whole, not tiles.

    Attributes:
        groups: number of groups in group norm; 0 if each channel has its own statistics.
        joint: True if all images share statistics, as in batch norm.
        eps: the number that is added to the variance.
        slope: slope of the activation after the norm.
        p: probability of the channel dropout before the norm.
        keys: key of each image's dropout mask (:func:`distseg.tiling.rng.key`), or None without
            dropout.
    """

    groups: int
    joint: bool
    eps: float
    slope: float = 1.0
    p: float = 0.0
    keys: Sequence[int] | None = None

    def rows(self, images: int) -> int:
        """Return the number of rows of the statistics: 1 in batch norm, else one for each image."""
        return 1 if self.joint else images


def norm_forward(
    x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dropout, norm and activation of whole images in one call.

    Args:
        x: the images, (B, C, *size).
        norm: the settings.
        weight, bias: the norm's parameters (C,), or None.

    Returns:
        The result y, (B, C, *size); the mean and the sum of squared deviations, (2, rows, C) or
            (2, rows, groups) float64, with one row in batch norm and else one for each image; and
            the tensor ``numbers`` that :func:`norm_backward` needs.
    """
    last = lies_last(x)
    x = _in_runs(x, last)
    y = torch.empty_like(x)
    plan = _plan(
        norm[:5],
        norm.keys is not None,
        last,
        x.shape,
        (x.stride(), y.stride()),
        torch.get_num_threads(),
    )
    channels = x.shape[1]
    statistics = torch.empty(2, norm.rows(len(x)), norm.groups or channels, dtype=torch.float64)
    numbers = torch.empty(plan.images, 5, channels, dtype=torch.float64)
    keys = None if norm.keys is None else (ctypes.c_uint64 * plan.images)(*norm.keys)
    weight, bias = _widened(weight, x), _widened(bias, x)
    _function("norm_forward", x.dtype)(
        *plan.arguments,
        x.data_ptr(),
        y.data_ptr(),
        keys,
        _address(weight),
        _address(bias),
        statistics.data_ptr(),
        statistics.data_ptr() + 4 * statistics.numel(),
        numbers.data_ptr(),
    )
    return y, statistics, numbers


def norm_backward(
    g: Tensor, x: Tensor, norm: Norm, weight: Tensor | None, numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, (B, C, *size), and of weight and bias, (C,) float64 each.

    Args:
        g: the gradient of the loss by the result y of :func:`norm_forward`.
        x, norm, weight: the arguments of :func:`norm_forward`.
        numbers: the last result of :func:`norm_forward`.
    """
    last = lies_last(x)
    g, x = _in_runs(g, last), _in_runs(x, last)
    dx, channels = torch.empty_like(x), x.shape[1]
    plan = _plan(
        norm[:5],
        norm.keys is not None,
        last,
        x.shape,
        (g.stride(), x.stride(), dx.stride()),
        torch.get_num_threads(),
    )
    found = torch.empty(2, channels, dtype=torch.float64)
    weight, numbers = _widened(weight, x), numbers.expand(plan.images, -1, -1).contiguous()
    _function("norm_backward", x.dtype)(
        *plan.arguments,
        g.data_ptr(),
        x.data_ptr(),
        dx.data_ptr(),
        _address(weight),
        numbers.data_ptr(),
        found.data_ptr(),
        found.data_ptr() + 8 * channels,
    )
    return dx, found[0], found[1]


class _Plan(NamedTuple):
    """Arguments of a compiled kernel for whole images, except the addresses of tensors.

    Attributes:
        images: the number of images as the kernel sees them. It is 1 for a batch that the kernel
            takes as one image (:func:`_as_one`).
        arguments: the shape, the norm's settings, and for each tensor its strides inside an image
            and between images, all as C values.
    """

    images: int
    arguments: tuple


@lru_cache(4096)
def _plan(
    norm: tuple,
    keyed: bool,
    last: bool,
    shape: Sequence[int],
    strides: Sequence[Sequence[int]],
    threads: int,
) -> _Plan:
    """Return a kernel's arguments for tensors of the given shape and strides.

    The arguments are cached, because making them takes as long as the norm of a small feature map.

    Args:
        norm: the fields of :class:`Norm` without ``keys``.
        keyed: True if each image has a dropout mask.
        last: True if channels come last in memory.
        shape: the shape of all tensors.
        strides: the strides of each tensor.
        threads: the number of threads that compute.
    """
    norm = Norm(*norm)
    tensors = _merged(last, *(torch.empty_strided(shape, each, device="meta") for each in strides))
    if norm.joint and not keyed:
        tensors = _as_one(tensors)
    images, form = len(tensors[0]), _shape_of(tuple(tensors[0].shape[1:]), last, None, threads)
    structures = (
        form,
        _Norm(images, norm.groups, norm.joint, norm.eps, norm.slope, norm.p),
        *map(_strides, tensors),
    )
    return _Plan(images, (*map(ctypes.byref, structures), *(x.stride(0) for x in tensors)))


def _as_one(images: Sequence[Tensor]) -> Sequence[Tensor]:
    """Turn each batch (B, C, H, W) into one image (1, C, B, H, W), for a norm over the batch.

    The kernel then takes all B images as one volume. Batches of volumes (B, C, D, H, W) are
    returned unchanged, because the kernel has no fourth spatial dim.

    Args:
        images: the batches that a kernel call reads and writes, all of one shape.
    """
    return images if images[0].dim() > 4 else [x.transpose(0, 1)[None] for x in images]


def _merged(last: bool, *images: Tensor) -> Sequence[Tensor]:
    """Flatten the pixels of contiguous images to one row for each channel, (B, C, pixels).

    The kernel loads a channel's parameters once for each row. With short rows, this would take most
    of the time. The images are returned unchanged if one of them is not contiguous, or if channels
    come last in memory (``last`` is True).
    """
    return (
        [x.flatten(2) for x in images]
        if not last and all(x.is_contiguous() for x in images)
        else images
    )


def _widened(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a parameter, contiguous and in the dtype that the kernel needs for an image ``x``.

    This dtype is float64 for an image in float64, else float32. A parameter of None stays None.
    """
    if parameter is None:
        return None
    wanted = torch.promote_types(x.dtype, torch.float32)
    return (
        parameter
        if parameter.dtype == wanted and parameter.is_contiguous()
        else parameter.detach().to(wanted).contiguous()
    )


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@cache
def _function(name: str, dtype: torch.dtype):
    """Return the compiled function ``name`` for this dtype, with its argument types set."""
    found = getattr(library(), f"{name}_{_TYPES[dtype]}")
    structures, batches, arrays = {"norm_forward": (4, 2, 8), "norm_backward": (5, 3, 7)}[name]
    found.argtypes = (
        [ctypes.c_void_p] * structures + [ctypes.c_int64] * batches + [ctypes.c_void_p] * arrays
    )
    found.restype = None
    return found


def _call(
    name: str,
    last: bool,
    images: Sequence[Tensor],
    parameters: Sequence[Tensor | float],
    outputs: Sequence[Tensor] = (),
    own: Box | None = None,
) -> None:
    """Call a compiled kernel that reads and writes images and other tensors of their shape.

    Args:
        name: the name of the kernel without its dtype, such as ``forward``.
        last: True if channels come last in memory. Images with another layout are copied.
        images: the tensors of pixels that the kernel reads and writes, all of one shape and dtype.
        parameters: vectors and numbers. Vectors are cast to the dtype that the kernel computes in.
        outputs: float64 tensors that the kernel writes to.
        own: the box of the owned cells, or None if all cells are owned.
    """
    images = [_in_runs(image, last) for image in images]
    size = images[0].shape[2:]
    if own is not None and not Box.whole(size).contains(own):
        # The kernel checks no bounds and would write outside the tensor.
        raise ValueError(
            f"the box of owned cells, {own}, reaches beyond a feature map of {tuple(size)} cells: "
            "give a box in the coordinates of this feature map"
        )
    if own in (None, Box.whole(size)):
        images, own = _merged(last, *images), None
    x = images[0]
    kept = [_widened(p, x) if isinstance(p, Tensor) else ctypes.c_double(p) for p in parameters]
    pointers = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a
        for a in (*images, *kept, *outputs)
    ]
    function = getattr(library(), f"{name}_{_TYPES[x.dtype]}")
    function(
        ctypes.byref(_shape(x, last, own)),
        *(ctypes.byref(_strides(image)) for image in images),
        *pointers,
    )


def _shape(x: Tensor, last: bool, own: Box | None = None) -> _Shape:
    return _shape_of(tuple(x.shape[1:]), last, own, torch.get_num_threads())


@lru_cache(4096)
def _shape_of(shape: tuple[int, ...], last: bool, own: Box | None, threads: int) -> _Shape:
    channels, *size = shape
    flat = (slice(0, 1),) * (3 - len(size))
    size = (1,) * len(flat) + tuple(size)
    box = (
        Box.whole(size)
        if own is None
        else Box(tuple(s.start for s in flat) + own.start, tuple(s.stop for s in flat) + own.stop)
    )
    ends = (n for pair in zip(box.start, box.stop) for n in pair)
    return _Shape(channels, *size, last, (ctypes.c_int64 * 6)(*ends), threads)


def _strides(x: Tensor) -> _Strides:
    plane, row, _ = (0, 0, 0, *x.stride()[2:])[-3:]
    return _Strides(x.stride(1), plane, row)


def _into(out: Tensor, written: Tensor) -> Tensor:
    """Return ``out``, after copying the kernel's result to it if the kernel wrote elsewhere.

    Args:
        out: the tensor that is to hold the result.
        written: the tensor to which the kernel wrote. It is ``out``, or a copy of ``out`` with
            another memory layout.
    """
    return out if written is out else out.copy_(written)


def _in_runs(x: Tensor, last: bool) -> Tensor:
    """Return ``x`` if its rows are contiguous in memory, otherwise a contiguous copy.

    A row holds adjacent pixels: all their channels if ``last`` is True, else one channel.
    """
    channels, width = x.shape[1], x.shape[-1]
    # A row of one pixel is contiguous in both layouts, whatever its stride.
    apart = x.stride(-1) if width > 1 else channels if last else 1
    if apart == (channels if last else 1) and (not last or x.stride(1) == 1):
        return x
    return x.contiguous(memory_format=channels_last(x.dim()) if last else torch.contiguous_format)
