"""The functions of :mod:`distseg.layers.kernels.norm`, computed by Triton kernels on a GPU.

Each function reads its images once. The pixels of an image are split over many programs, so that a
single image keeps all processors of a GPU busy. :mod:`distseg.layers.kernels.choice` says when this
module is used.

These kernels were **never run on a GPU**. The tests run them in Triton's interpreter, on a CPU, and
compile them for GPUs. The interpreter truncates results in bfloat16, while a GPU rounds them.

An image (1, C, *size) may have any strides. A block is what a program computes at a time: ``lanes``
channels of ``pixels`` cells, which lie in rows of ``columns`` cells. Values are computed in
float32, or in float64 if the image is float64, and rounded once. Sums and moments are added in
float64, in an order that depends only on the shapes and strides of the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from distseg.comm.memory_format import lies_last
from distseg.layers.kernels.norm import Affine
from distseg.tiling.tile import Box

_BLOCK = 1024  # cells times channels of a block
_LANES = 64  # largest number of channels of a block
_COLUMNS = 128  # largest number of columns of a block with several rows
_FEW = 128  # up to this many cells, a block has several channels even if these lie apart
_PROGRAMS = 2048  # largest number of programs that sum; fixed, so that sums are equal on all GPUs

# Triton compiles a kernel anew for numbers that are 1 or divisible by 16. These numbers would gain
# nothing and differ from tile to tile. Channels, width and strides decide how values are loaded.
_SHAPE = ["depth", "height", "blocks_in_row"]
_OWN = ["plane_start", "plane_stop", "row_start", "row_stop", "column_start", "column_stop"]


def forward(x: Tensor, affine: Affine, out: Tensor) -> Tensor:
    """Apply an affine map and an activation to ``x``, write the result to ``out`` and return it.

    The arguments are those of :func:`distseg.layers.kernels.norm.forward`.
    """
    plan = _plan_of(x, out)
    if x.numel():
        with torch.cuda.device_of(x):
            _forward[plan.blocks * plan.lanes_blocks,](
                x,
                out,
                _vectors(x, *affine[:3]),
                plan.strides,
                *plan.shape,
                affine.slope,
                _dtype(x),
                **plan.form,
            )
    return out


def sums(g: Tensor, x: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    """Return the sums of g' and of g' * (x - pivot) over all pixels, (C,) float64 each.

    g' is the gradient before the activation. The arguments are those of
    :func:`distseg.layers.kernels.norm.sums`.
    """
    plan = _plan_of(g, x)
    parts = x.new_empty(2, plan.programs, x.shape[1], dtype=torch.float64)
    with torch.cuda.device_of(x):
        _sums[plan.programs * plan.lanes_blocks,](
            g,
            x,
            _vectors(x, *affine[:3]),
            parts,
            plan.per_program,
            plan.strides,
            *plan.shape,
            affine.slope,
            _dtype(x),
            **plan.form,
        )
    total, weighted = parts.sum(1)
    return total, weighted


def gradient(
    g: Tensor, x: Tensor, affine: Affine, tilt: Tensor, shift: Tensor, own: Box, out: Tensor
) -> Tensor:
    """Write to ``out`` the gradient of a norm's input, which includes that through the statistics.

    It is scale * g' on all pixels, plus tilt * (x - pivot) + shift inside ``own``, where g' is the
    gradient before the activation. The arguments are those of
    :func:`distseg.layers.kernels.norm.gradient`.
    """
    plan = _plan_of(g, x, out, own=own)
    if x.numel():
        with torch.cuda.device_of(x):
            _gradient[plan.blocks * plan.lanes_blocks,](
                g,
                x,
                out,
                _vectors(x, *affine[:3], tilt, shift),
                *plan.own,
                plan.strides,
                *plan.shape,
                affine.slope,
                _dtype(x),
                **plan.form,
            )
    return out


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations of each channel of ``x``, (C,) float64 each.

    Args:
        x: one image or a part of it, (1, C, *size).
    """
    if not x.numel():
        return x.new_zeros(2, x.shape[1], dtype=torch.float64).unbind()
    plan = _plan_of(x)
    parts = x.new_empty(4, plan.programs, x.shape[1], dtype=torch.float64)
    with torch.cuda.device_of(x):
        _moments[plan.programs * plan.lanes_blocks,](
            x, parts, plan.per_program, plan.strides, *plan.shape, **plan.form
        )
    count, apart, m2, reference = parts
    # Chan, Golub and LeVeque 1979, as in distseg.layers.moments.combine.
    of_all = (apart * count).sum(0) / count.sum(0)
    return reference[0] + of_all, (m2 + count * (apart - of_all) ** 2).sum(0)


@triton.jit(do_not_specialize=_SHAPE)
def _forward(
    x,
    out,
    vectors,
    strides,
    channels,
    depth,
    height,
    width,
    blocks_in_row,
    slope: tl.constexpr,
    dtype: tl.constexpr,
    volume: tl.constexpr,
    pixels: tl.constexpr,
    columns: tl.constexpr,
    lanes: tl.constexpr,
):
    """Compute one block of :func:`forward`."""
    shape = channels, depth, height, width, blocks_in_row
    number, channel = _program(channels, lanes)
    cells, mask = _cells(number, channel, shape, volume, pixels, columns)
    value = tl.load(x + _offsets(cells, strides[0]), mask=mask, other=0).to(dtype)
    _, z = _affine(value, vectors, channel, channels, dtype)
    y = tl.where(z > 0, z, tl.full((1, 1), slope, dtype) * z)
    tl.store(out + _offsets(cells, strides[1]), y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["per_program", *_SHAPE])
def _sums(
    g,
    x,
    vectors,
    parts,
    per_program,
    strides,
    channels,
    depth,
    height,
    width,
    blocks_in_row,
    slope: tl.constexpr,
    dtype: tl.constexpr,
    volume: tl.constexpr,
    pixels: tl.constexpr,
    columns: tl.constexpr,
    lanes: tl.constexpr,
):
    """Add the terms of :func:`sums` over ``per_program`` blocks; write them to ``parts``.

    ``parts`` is (2, programs, C).
    """
    shape = channels, depth, height, width, blocks_in_row
    total = tl.zeros((lanes, pixels), tl.float64)
    weighted = tl.zeros((lanes, pixels), tl.float64)
    number, channel = _program(channels, lanes)
    for block in range(number * per_program, (number + 1) * per_program):
        cells, mask = _cells(block, channel, shape, volume, pixels, columns)
        passed = tl.load(g + _offsets(cells, strides[0]), mask=mask, other=0).to(dtype)
        value = tl.load(x + _offsets(cells, strides[1]), mask=mask, other=0).to(dtype)
        d, z = _affine(value, vectors, channel, channels, dtype)
        passed = tl.where(z > 0, passed, tl.full((1, 1), slope, dtype) * passed)
        total += passed.to(tl.float64)
        weighted += (passed * d).to(tl.float64)
    _store_parts(parts, (tl.sum(total, 1), tl.sum(weighted, 1)), channels, lanes)


@triton.jit(do_not_specialize=[*_OWN, *_SHAPE])
def _gradient(
    g,
    x,
    out,
    vectors,
    plane_start,
    plane_stop,
    row_start,
    row_stop,
    column_start,
    column_stop,
    strides,
    channels,
    depth,
    height,
    width,
    blocks_in_row,
    slope: tl.constexpr,
    dtype: tl.constexpr,
    volume: tl.constexpr,
    pixels: tl.constexpr,
    columns: tl.constexpr,
    lanes: tl.constexpr,
):
    """Compute one block of :func:`gradient`."""
    shape = channels, depth, height, width, blocks_in_row
    number, channel = _program(channels, lanes)
    cells, mask = _cells(number, channel, shape, volume, pixels, columns)
    _, plane, row, column = cells
    owned = (plane >= plane_start) & (plane < plane_stop) & (row >= row_start) & (row < row_stop)
    owned = owned & (column >= column_start) & (column < column_stop)
    passed = tl.load(g + _offsets(cells, strides[0]), mask=mask, other=0).to(dtype)
    value = tl.load(x + _offsets(cells, strides[1]), mask=mask, other=0).to(dtype)
    d, z = _affine(value, vectors, channel, channels, dtype)
    passed = tl.where(z > 0, passed, tl.full((1, 1), slope, dtype) * passed)
    scale = _of_channels(vectors[1], channel, channels, dtype)
    tilt = _of_channels(vectors[3], channel, channels, dtype)
    shift = _of_channels(vectors[4], channel, channels, dtype)
    dx = scale * passed + tl.where(owned, tilt * d + shift, 0)
    tl.store(out + _offsets(cells, strides[2]), dx.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["per_program", *_SHAPE])
def _moments(
    x,
    parts,
    per_program,
    strides,
    channels,
    depth,
    height,
    width,
    blocks_in_row,
    volume: tl.constexpr,
    pixels: tl.constexpr,
    columns: tl.constexpr,
    lanes: tl.constexpr,
):
    """Write count, mean, squared deviations and a reference of ``per_program`` blocks to ``parts``.

    ``parts`` is (4, programs, C). The reference is the channel's first value, and the mean is
    relative to it, so that rounding does not grow with the mean.

    Every place of a block has a pivot, its value in the first block. At each place, the differences
    from the pivot and their squares are added over all blocks. The squared deviation of n values,
    the pivot among them, is at least that of the pivot alone. So the sum of squares is at most
    n + 1 times as large, and loses only as many digits as n + 1 has.
    """
    shape = channels, depth, height, width, blocks_in_row
    count = tl.zeros((lanes, pixels), tl.float64)
    pivot = tl.zeros((lanes, pixels), tl.float64)
    total = tl.zeros((lanes, pixels), tl.float64)
    squares = tl.zeros((lanes, pixels), tl.float64)
    number, channel = _program(channels, lanes)
    for block in range(number * per_program, (number + 1) * per_program):
        cells, mask = _cells(block, channel, shape, volume, pixels, columns)
        value = tl.load(x + _offsets(cells, strides[0]), mask=mask, other=0).to(tl.float64)
        pivot = tl.where(count == 0, value, pivot)
        d = tl.where(mask, value - pivot, 0)
        total += d
        squares += d * d
        count += tl.where(mask, 1.0, 0.0).to(tl.float64)
    first = tl.load(x + channel.to(tl.int64) * strides[0][0], mask=channel < channels, other=0)
    first = first.to(tl.float64)
    some = tl.maximum(count, 1.0)
    mean = pivot - first + total / some
    n = tl.sum(count, 1)
    of_all = tl.sum(count * mean, 1) / tl.maximum(n, 1.0)
    apart = mean - of_all[:, None]
    m2 = tl.sum(squares - total * total / some + count * apart * apart, 1)
    _store_parts(parts, (n, of_all, m2, tl.sum(first, 1)), channels, lanes)


@triton.jit
def _program(channels, lanes: tl.constexpr):
    """Return this program's number among those of its channels, and these channels, (lanes, 1).

    A grid has one dim, because CUDA limits the others to 65535.
    """
    blocks = tl.cdiv(channels, lanes)
    channel = tl.program_id(0) % blocks * lanes + tl.arange(0, lanes)
    return tl.program_id(0) // blocks, channel[:, None]


@triton.jit
def _cells(
    block, channel, shape, volume: tl.constexpr, pixels: tl.constexpr, columns: tl.constexpr
):
    """Return the coordinates of a block's cells, and True for those inside the image.

    A block after the last one has no cells inside the image.

    Args:
        block: the number of the block of cells.
        channel: the channels of the block, (lanes, 1).
        shape: channels, depth, height, width, and number of blocks side by side in a row.
        volume: True if the depth is more than 1.
        pixels, columns: the number of cells of a block, and of each of its rows.

    Returns:
        A tuple of channel (lanes, 1), plane, row and column (1, pixels); and the mask of the cells
            inside the image, (lanes, pixels).
    """
    channels, depth, height, width, blocks_in_row = shape
    cell = tl.arange(0, pixels)[None, :]
    row = block // blocks_in_row * (pixels // columns) + cell // columns
    # A row can have more than 2^31 cells, if it is a whole image.
    column = tl.cast(block % blocks_in_row, tl.int64) * columns + cell % columns
    mask = (row < depth * height) & (column < width) & (channel < channels)
    if volume:
        cells = channel, row // height, row % height, column
    else:
        cells = channel, row * 0, row, column
    return cells, mask


@triton.jit
def _offsets(cells, strides):
    """Return the offsets of cells from the first element of a tensor, (lanes, pixels) int64.

    Args:
        cells: channel, plane, row and column.
        strides: the tensor's strides along each of them.
    """
    channel, plane, row, column = cells
    at = plane.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2] + column * strides[3]
    return channel.to(tl.int64) * strides[0] + at


@triton.jit
def _of_channels(vector, channel, channels, dtype: tl.constexpr):
    """Load a vector's values of some channels, in the dtype in which the kernel computes."""
    return tl.load(vector + channel, mask=channel < channels, other=0).to(dtype)


@triton.jit
def _affine(value, vectors, channel, channels, dtype: tl.constexpr):
    """Return x - pivot and scale * (x - pivot) + bias.

    Args:
        value: the values x, (lanes, pixels).
        vectors: the vectors pivot, scale and bias.
        channel: the channels of the block, (lanes, 1).
        channels: the number of channels of the image.
        dtype: the dtype in which the kernel computes.
    """
    d = value - _of_channels(vectors[0], channel, channels, dtype)
    z = d * _of_channels(vectors[1], channel, channels, dtype)
    return d, z + _of_channels(vectors[2], channel, channels, dtype)


@triton.jit
def _store_parts(parts, values, channels, lanes: tl.constexpr):
    """Write the results of this program to ``parts``.

    Args:
        parts: (number of results, programs, C).
        values: the results, (lanes,) each.
        channels: the number of channels C.
        lanes: the number of channels of a block.
    """
    number, channel = _program(channels, lanes)
    programs = tl.num_programs(0) // tl.cdiv(channels, lanes)
    for i in tl.static_range(len(values)):
        part = parts + (i * programs + number) * channels + channel
        tl.store(part, values[i][:, None], mask=channel < channels)


class _Plan(NamedTuple):
    """Sizes and strides of images as a kernel takes them, and how programs share their cells.

    Attributes:
        shape: channels, depth, height, width, and number of blocks side by side in a row.
        strides: for each image, the strides along channels, planes, rows and columns.
        own: first and last + 1 of the owned cells along planes, rows and columns.
        form: the constants with which a kernel is compiled: ``volume`` (True if the depth matters),
            ``pixels``, ``columns`` and ``lanes``.
        blocks: the number of blocks of cells.
        lanes_blocks: the number of blocks of channels.
        programs: the number of programs that share the cells of a sum.
        per_program: the number of blocks of cells that each of these programs sums.
    """

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    own: tuple[int, ...]
    form: dict[str, int]
    blocks: int
    lanes_blocks: int
    programs: int
    per_program: int


def _plan_of(*images: Tensor, own: Box | None = None) -> _Plan:
    """Return the plan for images of one shape. The last image decides on the form of blocks.

    Args:
        images: the images that a kernel reads and writes, (1, C, *size).
        own: the box of the owned cells; None if all cells are owned.
    """
    x = images[-1]
    own = Box.whole(x.shape[2:]) if own is None else own
    return _plan(tuple(x.shape[1:]), tuple(y.stride()[1:] for y in images), own, lies_last(x))


@lru_cache(4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], own: Box, last: bool
) -> _Plan:
    """Return the plan for images of one shape.

    Args:
        shape: the number of channels, and the size.
        strides: for each image, the strides along channels and spatial dims.
        own: the box of the owned cells.
        last: True if the channels of a cell are adjacent in memory.
    """
    channels = shape[0]
    (depth, height, width), spatial, box = _merged(shape[1:], [s[1:] for s in strides], own)
    cells = depth * height * width
    lanes = _LANES if last else 8 if cells <= _FEW else 1
    lanes = min(lanes, _power(channels))
    pixels = min(_BLOCK // lanes, max(16, _power(cells)))
    columns = pixels if depth * height == 1 else min(_COLUMNS, pixels, _power(width))
    in_row = max(1, -(-width // columns))
    blocks = in_row * -(-depth * height // (pixels // columns))
    lanes_blocks = -(-channels // lanes)
    per_program = max(1, -(-blocks * lanes_blocks // _PROGRAMS))
    return _Plan(
        (channels, depth, height, width, in_row),
        tuple((s[0], *inner) for s, inner in zip(strides, spatial)),
        box,
        {"volume": depth > 1, "pixels": pixels, "columns": columns, "lanes": lanes},
        blocks,
        lanes_blocks,
        max(1, -(-blocks // per_program)),
        per_program,
    )


def _merged(
    size: Sequence[int], strides: Sequence[Sequence[int]], own: Box
) -> tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]]:
    """Merge adjacent dims that every image stores as one dim, and fill up to three dims.

    A whole image in one piece of memory thus becomes a single row. A dim is merged with the next
    one only if the owned cells span all of the next one.

    Args:
        size: the size of the images, 1 to 3 dims.
        strides: the strides of each image along these dims.
        own: the box of the owned cells.

    Returns:
        The size along planes, rows and columns; the strides of each image along them; and first and
            last + 1 of the owned cells along them.
    """
    if not own.pixels:
        own = Box((0,) * len(size), (0, *size[1:]))
    dims = list(zip(size, zip(*strides), own.start, own.stop))
    merged = [dims.pop()]
    while dims:
        outer, inner = dims.pop(), merged[0]
        spans = (inner[2], inner[3]) == (0, inner[0])
        apart = [a != b * inner[0] for a, b in zip(outer[1], inner[1])]
        if spans and (1 in (outer[0], inner[0]) or not any(apart)):
            kept = outer[1] if inner[0] == 1 else inner[1]
            merged[0] = (outer[0] * inner[0], kept, outer[2] * inner[0], outer[3] * inner[0])
        else:
            merged.insert(0, outer)
    merged = [(1, (0,) * len(strides), 0, 1)] * (3 - len(merged)) + merged
    sizes, of_dims, starts, stops = zip(*merged)
    return sizes, list(zip(*of_dims)), tuple(n for pair in zip(starts, stops) for n in pair)


def _power(n: int) -> int:
    """Return the smallest power of 2 that is at least ``n``, which Triton wants for blocks."""
    return 1 << max(0, n - 1).bit_length()


def _vectors(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Return vectors (C,), contiguous and on the device of ``x``."""
    return tuple(v.detach().to(x.device).contiguous() for v in vectors)


def _dtype(x: Tensor) -> tl.dtype:
    """Return Triton's dtype in which values of ``x`` are computed: float32 or wider."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32
