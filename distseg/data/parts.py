"""Cut images into parts that share no pixel, so that one large image gives several splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from distseg.config.sizes import Size
from distseg.data.folders import SPLITS
from distseg.data.pairs import Pair, assign_splits, check_alike
from distseg.tiling.tile import Box

_AXES = "src"  # letters for slice, row and column in the names of parts


def cut(
    pairs: Sequence[Pair], parts: Size, shares: Sequence[float] | None, seed: int
) -> list[Pair]:
    """Cut images with their masks into parts, and return a pair of image and mask for each part.

    Lengths of an image's parts differ by at most a pixel. The part in row 0 and column 2, both
    counted from 0, is named ``NAME_r0c2``.

    Args:
        pairs: the images with their masks.
        parts: number of parts along each dim.
        shares: fractions of the parts for train, val and test, to which they are assigned at random
            (:func:`distseg.data.pairs.assign_splits`). None leaves parts in their image's split.
        seed: seed of the random assignment.

    Raises:
        ValueError: ``parts`` has another number of dims than an image, an image has fewer pixels
            than parts along a dim, or a part has the name of another image.
    """
    found = [part for pair in pairs for part in _parts_of(pair, parts)]
    check_alike(found)
    if shares is None:
        return found
    split_of = assign_splits([pair.name for pair in found], shares, seed)
    return [replace(pair, split=split_of[pair.name]) for pair in found]


def note_on_parts(pairs: Sequence[Pair], parts: Size) -> str:
    """Return a note for the user: the number of parts in each split, and a warning about scores.

    Parts of one image resemble each other, so scores on them are likely too good.

    Args:
        pairs: the parts with their masks.
        parts: number of parts along each dim.
    """
    counts = [sum(pair.split == split for pair in pairs) for split in SPLITS]
    listed = ", ".join(f"{count} for {split}" for count, split in zip(counts, SPLITS) if count)
    return (
        f"note: each image is cut into {parts} parts ({listed}), which share no pixel. Parts of "
        "one image resemble each other, so scores on them are likely better than on another image"
    )


def _parts_of(pair: Pair, parts: Size) -> list[Pair]:
    """Cut one image into parts, and return a pair of image and mask for each part.

    Raises:
        ValueError: the image cannot be cut into these parts.
    """
    if len(parts) != len(pair.size) or any(n > size for n, size in zip(parts, pair.size)):
        raise ValueError(
            f"--parts is {parts}, but {pair.image} has {len(pair.size)} dims ({Size(pair.size)}): "
            "give one number for each dim, at most the number of pixels along it"
        )
    found = []
    for index in product(*map(range, parts)):
        box = Box(
            tuple(n * k // count for n, k, count in zip(pair.size, index, parts)),
            tuple(n * (k + 1) // count for n, k, count in zip(pair.size, index, parts)),
        )
        where = "".join(f"{axis}{k}" for axis, k in zip(_AXES[-len(index) :], index))
        found.append(
            replace(
                pair, name=f"{pair.name}_{where}", size=box.size, part=box, whole=tuple(pair.size)
            )
        )
    return found
