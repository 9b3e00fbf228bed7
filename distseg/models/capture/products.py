"""Make layers for matrix products of maps, which sum over channels or over all positions.

A sum over all positions occurs in channel attention. Products between positions, as in attention
over the image, are refused.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from distseg.models.axes import Axis, places_of
from distseg.models.capture.reader import Reader
from distseg.models.capture.reducing import product
from distseg.models.capture.values import Value
from distseg.models.layers import Mean

BETWEEN_PLACES = (
    "multiplies each position of the image with all others, as attention does, but a part of an "
    "image does not have all positions; supported: products of channels at each position, and "
    "their sums over all positions"
)


def matmul(reader: Reader, a: Any, b: Any) -> Value:
    """Add layers that compute ``a @ b``, and return the result.

    Args:
        a, b: maps, vectors or parameters; at least one is computed from the image.
    """
    return _summed(reader, a, b) or reader.formula((a, b), {})


def added(reader: Reader, x: Any, a: Any, b: Any, beta: float, alpha: float) -> Value:
    """Add layers for ``beta * x + alpha * (a @ b)`` (``torch.baddbmm``); return the result."""
    if (made := _summed(reader, a, b)) is None:
        return reader.formula((x, a, b), dict(beta=beta, alpha=alpha))
    return reader.applied(partial(_sum, beta=beta, alpha=alpha), (made, x), "sum", made.axes)


def _sum(product: torch.Tensor, x: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    return beta * x + alpha * product


def _summed(reader: Reader, a: Any, b: Any) -> Value | None:
    """Add layers for ``a @ b`` if the product sums over all positions, and return the result.

    Return None if it sums over channels: the caller then adds a layer that computes it at each
    position. Refuse other products, such as those of each position with all others.
    """
    x = a if isinstance(a, Value) else reader.value(b)
    if not isinstance(a, Value) or not isinstance(b, Value):
        shape = reader.shape_of(b if x is a else a)
        along = -1 if x is a or len(shape) < 1 or x.rank < 2 else -2
        if not reader.of_channels(along, x):
            raise reader.refusal(
                f"multiplies {x!r} with a separate weight for each position, but a tile has only "
                "some positions: permute the tensor so that the product sums over channels"
            )
        return None
    if min(a.rank, b.rank) < 3:
        raise reader.refusal(
            f"multiplies {a!r} with {b!r}, which mixes the images of a batch, but images are "
            f"computed separately: give both tensors a batch dim, (N, ..., ...)"
        )
    left, right = a.axes[-1], b.axes[-2]
    if left.of_channels and right.of_channels:
        if a.axes[-2].places and b.axes[-1].places:
            raise reader.refusal(BETWEEN_PLACES, everywhere=True)
        return None
    lone = [left.places, right.places] == [
        tuple(range(reader.dims))
    ] * 2 and left.cell == right.cell == 1
    if (
        not lone
        or a.axes[:-2] != b.axes[:-2]
        or places_of(a.axes[:-1])
        or places_of(b.axes[:-2] + b.axes[-1:])
        or not a.axes[-2].of_channels
        or not b.axes[-1].of_channels
    ):
        raise reader.refusal(BETWEEN_PLACES, everywhere=True)
    axes = (*a.axes[:-1], b.axes[-1])
    return product(reader, a, b, math.prod(axis.cell for axis in a.axes[:-2]), axes)


def einsum(reader: Reader, equation: str, operands: Sequence[Any]) -> Value:
    """Add layers for a call of ``torch.einsum``, and return the result.

    Args:
        operands: maps, vectors and parameters; at least one is computed from the image.

    Raises:
        CanNotCapture: the call sums over images or over some spatial dims only, or multiplies each
            position with others.
    """
    labels, written = _spelled(reader, equation, operands)
    axes = _axes_of_labels(reader, labels, operands)
    if missing := [label for label, axis in axes.items() if axis.batch and label not in written]:
        raise reader.refusal(
            f"sums over the images of a batch (letter {missing[0]} of the equation), but images "
            "are computed separately: keep this letter in the result"
        )
    summed = [label for label, axis in axes.items() if axis.places and label not in written]
    if not summed:
        return reader.formula((f"{','.join(labels)}->{written}", *operands), {})
    if sorted(d for label in summed for d in axes[label].places) != list(range(reader.dims)) or any(
        axes[label].places for label in written
    ):
        raise reader.refusal(
            "sums over only some dims of the image; supported: sum over all positions, or over "
            "channels"
        )
    made = tuple(axes[label] for label in written)
    if (pair := _pair(labels, operands, written, axes)) is not None:
        heads, a, b = pair
        return product(reader, a, b, math.prod(axes[label].cell for label in heads), made)
    kept = written + "".join(sorted(summed, key=lambda label: axes[label].places))
    each = partial(torch.einsum, f"{','.join(labels)}->{kept}")
    each = reader.applied(each, operands, "products", tuple(axes[label] for label in kept))
    return reader.emit(lambda _: Mean(total=True), [each], axes=made)


def distances(reader: Reader, a: Any, b: Any, p: float, mode: str) -> Value:
    """Add a layer for the distances between two sets of vectors, as ``torch.cdist`` computes them.

    One of the two sets may be the channels of a map at all positions. PyTorch chooses its formula
    by the number of vectors, which differs between an image and a tile. So if positions are among
    the vectors, the layer always uses the formula for many vectors in the default mode.

    Args:
        a, b: the vectors, (..., vectors, channels).
        p, mode: ``p`` and ``compute_mode`` of ``torch.cdist``.
    """
    axes = [reader.axes_of(x) for x in (a, b)]
    if places_of(axes[0][-2:-1]) and places_of(axes[1][-2:-1]):
        raise reader.refusal(BETWEEN_PLACES.replace("multiplies", "compares"), everywhere=True)
    if not all(of[-1].of_channels for of in axes):
        raise reader.refusal(
            "measures distances between channels over positions of the image, but only distances "
            "between positions over channels are supported: permute both tensors so that channels "
            "are the last dim"
        )
    if (
        places_of((*axes[0][-2:-1], *axes[1][-2:-1]))
        and mode == "use_mm_for_euclid_dist_if_necessary"
    ):
        mode = "use_mm_for_euclid_dist"
    return reader.formula((a, b), dict(p=p, compute_mode=mode))


def _spelled(reader: Reader, equation: str, operands: Sequence[Any]) -> tuple[list[str], str]:
    """Return (letters of each operand, letters of the result) of an ``einsum`` equation.

    New letters take the place of an ellipsis: "...c,cd->...d" with an operand of three dims gives
    (["abc", "cd"], "abd").
    """
    read, arrow, written = equation.replace(" ", "").partition("->")
    labels = read.split(",")
    if len(labels) != len(operands):
        raise reader.refusal(
            f"has the equation {equation}, but {len(operands)} tensors: give one tensor for each "
            "input of the equation (inputs are separated by commas)"
        )
    once = [label for label, count in Counter(read.replace(",", "")).items() if count == 1]
    if not arrow:
        written = "..." * ("..." in read) + "".join(sorted(label for label in once if label != "."))
    ranks = [x.rank if isinstance(x, Value) else len(reader.shape_of(x)) for x in operands]
    missing = [rank - len(of) + 3 if "..." in of else 0 for rank, of in zip(ranks, labels)]
    free = [letter for letter in string.ascii_letters if letter not in equation]
    dots = "".join(free[: max(missing)])
    labels = [of.replace("...", dots[len(dots) - n :]) for of, n in zip(labels, missing)]
    return labels, written.replace("...", dots)


def _axes_of_labels(
    reader: Reader, labels: Sequence[str], operands: Sequence[Any]
) -> dict[str, Axis]:
    """Return, for each letter of an ``einsum`` equation, what its dim holds.

    A dim holds the images, channels, or the positions along a spatial dim.

    Args:
        labels: the letters of each operand, such as "nchw".
        operands: maps, vectors and parameters.

    Raises:
        CanNotCapture: a letter stands for different dims in two maps, or two letters stand for the
            same spatial dim or for the images.
    """
    found: dict[str, Axis] = {}
    for letters, x in zip(labels, operands):
        if isinstance(x, Value):
            twice = [axis for label, axis in zip(letters, x.axes) if letters.count(label) > 1]
            if len(letters) != x.rank or not all(axis.of_channels for axis in twice):
                raise reader.refusal(
                    f"has the letters {letters} for {x!r}: use one letter for each of its {x.rank} "
                    f"dims, and different letters for dims that hold images or positions"
                )
            for label, axis in zip(letters, x.axes):
                if found.get(label, Axis()) == Axis():  # of length 1, so it is broadcast
                    found[label] = axis
                elif axis not in (Axis(), found[label]):
                    raise reader.refusal(
                        f"multiplies "
                        f"{' with '.join(repr(y) for y in operands if isinstance(y, Value))}, "
                        f"but the letter {label} stands for different dims in them: use another "
                        "letter for one of them"
                    )
    for letters, x in zip(labels, operands):
        if isinstance(x, Value):
            continue
        for label, n in zip(letters, reader.shape_of(x)):
            if found.get(label, Axis()) == Axis():
                found[label] = Axis(cell=n)
            elif n != 1 and not found[label].of_channels:
                raise reader.refusal(
                    f"takes a tensor of {reader.shape_of(x)} with a separate value for each "
                    f"position of the image or for each image (letter {label}), but a tile has "
                    f"only some positions: use one value for each channel, or one value for all"
                )
    batches = {label for label, axis in found.items() if axis.batch}
    places = [d for axis in found.values() for d in axis.places]
    if len(batches) > 1 or len(set(places)) < len(places):
        raise reader.refusal(
            BETWEEN_PLACES
            if len(batches) < 2
            else "multiplies images of a batch with each other, but each image is computed by "
            "itself: keep the batch dim in both tensors and in the result",
            everywhere=True,
        )
    return found


def _pair(
    labels: Sequence[str], operands: Sequence[Any], written: str, axes: dict[str, Axis]
) -> tuple[str, Value, Value] | None:
    """Return (heads, a, b) if an ``einsum`` is a batched matrix product of two maps; else None.

    ``heads`` has the letters of the channel dims that both maps have. An example is
    "nhixy,nhjxy->nhij", with heads "h".

    Args:
        labels: the letters of each operand.
        operands: the tensors; ``a`` and ``b`` of the result, if both are maps.
        written: the letters of the result.
        axes: for each letter, what its dim holds.
    """
    if len(operands) != 2 or not all(isinstance(x, Value) and not x.vector for x in operands):
        return None
    if any(len(set(letters)) < len(letters) for letters in labels):
        return None
    if any(
        x.axes != tuple(axes[label] for label in letters) for x, letters in zip(operands, labels)
    ):
        return None
    cells = [[label for label in letters if axes[label].of_channels] for letters in labels]
    heads = [label for label in cells[0] if label in cells[1]]
    others = [[label for label in of if label not in heads] for of in cells]
    batch = [label for label in written if axes[label].batch]
    in_order = list(written) == [*batch, *heads, *others[0], *others[1]] and all(
        of == [*heads, *rest] for of, rest in zip(cells, others)
    )
    return ("".join(heads), *operands) if in_order else None
