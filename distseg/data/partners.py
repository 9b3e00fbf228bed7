"""Pair the names of images with those of masks."""

from __future__ import annotations

import os
from collections.abc import Sequence


def partners(images: Sequence[str], masks: Sequence[str]) -> dict[str, str]:
    """Return the mask's name of each image's name.

    Names are equal, or they are equal without a part at the beginning or the end that all names of
    masks have in common, and without such a part of images. If no such parts pair all images with
    all masks, the equal names are returned.

    Args:
        images: names of images without endings, all different.
        masks: names of masks without endings, all different.
    """
    equal = {name: name for name in images if name in set(masks)}
    if len(equal) == len(images) == len(masks) or len(images) != len(masks):
        return equal
    found: dict[str, str] | None = None
    for cut_images in _cuts(images):
        keys = {_cut(name, cut_images): name for name in images}
        for cut_masks in _cuts(masks):
            there = {_cut(name, cut_masks): name for name in masks}
            if len(keys) == len(there) == len(images) and keys.keys() == there.keys():
                pairs = {keys[key]: there[key] for key in keys}
                if found is not None and pairs != found:
                    return equal  # two ways to pair them
                found = pairs
    return equal if found is None else found


def _cuts(names: Sequence[str]) -> list[tuple[int, int]]:
    """Return how many letters may be cut from the beginning and the end of all names.

    What is cut ends, or begins, at a sign such as ``_`` or at the border between letters and
    digits, so that no number is cut in two.
    """
    first = names[0]
    begin = len(os.path.commonprefix(list(names)))
    end = len(os.path.commonprefix([name[::-1] for name in names]))
    shortest = min(map(len, names))
    begins = [n for n in range(min(begin, shortest - 1) + 1) if _is_border(first, n)]
    ends = [n for n in range(min(end, shortest - 1) + 1) if _is_border(first, len(first) - n)]
    return [(a, b) for a in begins for b in ends if a + b < shortest]


def _cut(name: str, cut: tuple[int, int]) -> str:
    return name[cut[0] : len(name) - cut[1]]


def _is_border(name: str, at: int) -> bool:
    """Return True if a word or number of ``name`` ends or begins at a place between letters."""
    if at in (0, len(name)):
        return True
    before, after = name[at - 1], name[at]
    return not (before.isalpha() and after.isalpha() or before.isdigit() and after.isdigit())
