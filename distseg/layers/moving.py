"""Access patterns of the layers of :mod:`distseg.models.moving`, and functions that compute parts.

:mod:`distseg.layers.layer_table` adds both tables to its own.
"""

from __future__ import annotations

from torch import Tensor

from distseg.layers.fitting import cropped, fitted, padded, taken_from
from distseg.models.moving import Blocks, Overlaid, Slices, Windows
from distseg.tiling.access_pattern import AccessPattern, Gather, Scatter, Shift
from distseg.tiling.layout import LayerView
from distseg.tiling.tile import Box


def _slices_patterns(layer: Slices, dims: int) -> tuple[AccessPattern, ...]:
    each = zip(layer.start, layer.behind, layer.step)
    return tuple(
        (Shift if a >= s or b else Gather)(stride=s, before=-a, after=-b) for a, b, s in each
    )


def _slices(layer: Slices, x: Tensor, have: Box, part: LayerView) -> Tensor:
    return cropped(x, have, part.input)[(..., *(slice(None, None, s) for s in layer.step))]


def _windows_patterns(layer: Windows, dims: int) -> tuple[AccessPattern, ...]:
    each = zip(layer.kernel, layer.stride, layer.dilation, layer.padding)
    return tuple(Gather(k, s, d, p, p) for k, s, d, p in each)


def _windows(layer: Windows, x: Tensor, have: Box, part: LayerView) -> Tensor:
    return layer.unfolded(padded(*fitted(x, have, part.padded_input)))


def _blocks_patterns(layer: Blocks, dims: int) -> tuple[AccessPattern, ...]:
    return tuple(Scatter(f, f) for f in layer.factors(dims))


def _blocks(layer: Blocks, x: Tensor, have: Box, part: LayerView) -> Tensor:
    y, factors = layer(cropped(x, have, part.input)), layer.factors(len(part.size))
    first = [a - f * t for a, f, t in zip(part.output.start, factors, part.input.start)]
    return taken_from(y, first, part.output.size)


def _overlaid_patterns(layer: Overlaid, dims: int) -> tuple[AccessPattern, ...]:
    each = zip(layer.kernel, layer.stride, layer.dilation, layer.padding, layer.extra)
    return tuple(Scatter(*settings) for settings in each)


def _overlaid(layer: Overlaid, x: Tensor, have: Box, part: LayerView) -> Tensor:
    y = layer.folded(cropped(x, have, part.input))
    first = [t * s - p for t, s, p in zip(part.input.start, layer.stride, layer.padding)]
    return taken_from(y, [a - f for a, f in zip(part.output.start, first)], part.output.size)


ACCESS_PATTERNS = (
    (Slices, _slices_patterns),
    (Windows, _windows_patterns),
    (Blocks, _blocks_patterns),
    (Overlaid, _overlaid_patterns),
)
FUNCTIONS = ((Slices, _slices), (Windows, _windows), (Blocks, _blocks), (Overlaid, _overlaid))
