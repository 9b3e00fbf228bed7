"""Products of matrices of maps: over channels by the place, over all places by a sum (channel attention), but not between places (attention)."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any, Sequence

import torch

from distseg.models.axes import Axes, Axis, places_of
from distseg.models.layers import Mean
from distseg.models.reader import Reader
from distseg.models.reducing import of_image, product
from distseg.models.values import Value

BETWEEN_PLACES = (
    "multiplies places of the image with all others, as attention does: parts of an image do not have them; products of channels at each place, and their sums over all places, are known"
)


def matmul(reader: Reader, a: Any, b: Any) -> Value:
    """Return ``a @ b`` of maps, vectors, parameters."""
    x = a if isinstance(a, Value) else reader.value(b)
    if not isinstance(a, Value) or not isinstance(b, Value):
        shape = reader.shape_of(b if x is a else a)
        along = -1 if x is a or len(shape) < 1 or x.rank < 2 else -2
        if not reader.of_channels(along, x):
            raise reader.refusal(f"multiplies places of {x!r} with weights, one for each place: over channels it is known")
        return reader.formula((a, b), {})
    if min(a.rank, b.rank) < 3:
        raise reader.refusal(f"multiplies {a!r} with {b!r}, and so joins the images of a batch, which are computed apart from each other")
    left, right = a.axes[-1], b.axes[-2]
    if left.of_channels and right.of_channels:
        if a.axes[-2].places and b.axes[-1].places:
            raise reader.refusal(BETWEEN_PLACES)
        return reader.formula((a, b), {})
    lone = [left.places, right.places] == [tuple(range(reader.dims))] * 2 and left.cell == right.cell == 1
    if not lone or a.axes[:-2] != b.axes[:-2] or places_of(a.axes[:-1]) or places_of(b.axes[:-2] + b.axes[-1:]) or not a.axes[-2].of_channels or not b.axes[-1].of_channels:
        raise reader.refusal(BETWEEN_PLACES)
    axes = (*a.axes[:-1], b.axes[-1])
    return product(reader, a, b, math.prod(axis.cell for axis in a.axes[:-2]), axes)


def einsum(reader: Reader, equation: str, operands: Sequence[Any]) -> Value:
    """Return a sum of products by Einstein's convention."""
    read, arrow, written = equation.replace(" ", "").partition("->")
    labels = read.split(",")
    if not arrow:
        written = "".join(sorted(label for label, count in Counter(read.replace(",", "")).items() if count == 1))
    if "." in equation or len(labels) != len(operands):
        raise reader.refusal("is told dots: name all dims, as in bchw,kc->bkhw")
    axes = _axes_of_labels(reader, labels, operands)
    if missing := [label for label, axis in axes.items() if axis.batch and label not in written]:
        raise reader.refusal(f"sums over the images of a batch (dim {missing[0]}), which are computed apart from each other")
    summed = [label for label, axis in axes.items() if axis.places and label not in written]
    if not summed:
        return reader.formula((f"{','.join(labels)}->{written}", *operands), {})
    if sorted(d for label in summed for d in axes[label].places) != list(range(reader.dims)) or any(axes[label].places for label in written):
        raise reader.refusal("sums over rows or columns of the image alone: over all places, and over channels, it is known")
    made = tuple(axes[label] for label in written)
    if (pair := _pair(labels, operands, written, axes)) is not None:
        heads, a, b = pair
        return product(reader, a, b, math.prod(axes[label].cell for label in heads), made)
    kept = written + "".join(sorted(summed, key=lambda label: axes[label].places))
    maps = [x for x in operands if isinstance(x, Value)]
    each = reader.applied(partial(torch.einsum, f"{','.join(labels)}->{kept}"), maps, "products", tuple(axes[label] for label in kept)) if len(maps) == len(operands) else None
    if each is None:
        raise reader.refusal("sums over all places with weights among the factors: multiply them before or behind")
    return reader.emit(lambda _: Mean(total=True), [each], axes=made)


def _axes_of_labels(reader: Reader, labels: Sequence[str], operands: Sequence[Any]) -> dict[str, Axis]:
    """Return what each label's dim is.

    Raises:
        CanNotCapture: two maps have different dims by one label, or one place has two.
    """
    found: dict[str, Axis] = {}
    for letters, x in zip(labels, operands):
        if isinstance(x, Value):
            if len(letters) != x.rank or len(set(letters)) < len(letters):
                raise reader.refusal(f"is told {letters} of {x!r}: a letter of its own for each dim is known")
            for label, axis in zip(letters, x.axes):
                if found.setdefault(label, axis) != axis:
                    raise reader.refusal(f"multiplies {' with '.join(repr(y) for y in operands if isinstance(y, Value))}, whose dims {label} are not alike")
    for letters, x in zip(labels, operands):
        if not isinstance(x, Value) and any(not found[label].of_channels for label in letters if label in found):
            raise reader.refusal(f"takes a tensor of {reader.shape_of(x)} with a value of its own for each place of the image, or for each image, which parts of an image do not know")
        if not isinstance(x, Value):
            for label, n in zip(letters, reader.shape_of(x)):
                found.setdefault(label, Axis(cell=n))
    batches = {label for label, axis in found.items() if axis.batch}
    places = [d for axis in found.values() for d in axis.places]
    if len(batches) > 1 or len(set(places)) < len(places):
        raise reader.refusal(BETWEEN_PLACES if len(batches) < 2 else "multiplies images of a batch with each other, which are computed apart")
    return found


def _pair(labels: Sequence[str], operands: Sequence[Any], written: str, axes: dict[str, Axis]) -> tuple[str, Value, Value] | None:
    """Return the heads, and the two maps, of a sum of products that is one of matrices; None of any other."""
    if len(operands) != 2 or not all(isinstance(x, Value) and not x.vector for x in operands):
        return None
    cells = [[label for label in letters if axes[label].of_channels] for letters in labels]
    heads = [label for label in cells[0] if label in cells[1]]
    others = [[label for label in of if label not in heads] for of in cells]
    batch = [label for label in written if axes[label].batch]
    in_order = list(written) == [*batch, *heads, *others[0], *others[1]] and all(of == [*heads, *rest] for of, rest in zip(cells, others))
    return ("".join(heads), *operands) if in_order else None
