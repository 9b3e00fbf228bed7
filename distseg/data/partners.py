"""Pair the names of images with the names of masks."""

from __future__ import annotations

import os
from collections.abc import Sequence


def partners(images: Sequence[str], masks: Sequence[str]) -> dict[str, str]:
    """Return the name of the mask that belongs to each image, as a dict from images to masks.

    Names match if they are equal without a beginning and an end that all names of masks, or all
    names of images, have in common. This rule is used only if it pairs all images with all masks in
    exactly one way. Otherwise only images and masks with equal names are paired. For example, the
    images ``a_1`` and ``a_2`` are paired with the masks ``a_1_mask`` and ``a_2_mask``.

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
    """Return the ways to cut a common beginning and a common end from all names.

    Each way is a pair: the number of characters to cut at the beginning, and at the end. A cut
    never splits a word or a number: it lies next to a sign such as ``_``, or between letters and
    digits. For the names ``a_1`` and ``a_2`` the pairs are (0, 0), (1, 0) and (2, 0).
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
    """Return True if a cut into ``name[:at]`` and ``name[at:]`` splits no word and no number."""
    if at in (0, len(name)):
        return True
    before, after = name[at - 1], name[at]
    return not (before.isalpha() and after.isalpha() or before.isdigit() and after.isdigit())
