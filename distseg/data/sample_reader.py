"""Read boxes of samples: pixels, normalised and augmented, and labels.

Which boxes a rank reads is decided in :mod:`distseg.data.loader`. A box is in the coordinates of
the augmented sample, which is a crop with its context. Only the part of the image that the box
needs is read. A pixel has the same bits in a box as in the whole augmented sample.
"""

from __future__ import annotations

import numpy as np
import torch

from distseg.data.sampler import Sample
from distseg.data.store.store import Store
from distseg.data.warp import Reading
from distseg.tiling.tile import Box, boxes_of
from distseg.tiling.tile_batch import labels_of_images

_AT_ONCE = 1 << 20  # pixels of a warped box that are read at once


def read_pixels(store: Store, samples: list[Sample], box: Box) -> np.ndarray:
    """Return the pixels of one box of each sample, (B, bands, *box.size) float32.

    Values without data, and values from outside the image, are 0.
    """
    return np.stack([_pixels(store, sample, box) for sample in samples])


def read_patches(store: Store, sample: Sample, boxes: list[Box]) -> np.ndarray:
    """Return the pixels of several boxes of one sample, (boxes, bands, *size) float32.

    All boxes have the same size. Values without data, and values from outside the image, are 0.
    """
    if sample.warp is not None or sample.intensity.margin:
        return np.stack([_pixels(store, sample, box) for box in boxes])
    sources = [_unturned(sample, box) for box in boxes]
    pixels, absent = store.read_masked_boxes(
        sample.image, [source.shifted(sample.box.start) for source in sources]
    )
    return np.stack(
        [
            _finished(sample, pixels[:, k], None if absent is None else absent[:, k], source)
            for k, source in enumerate(sources)
        ]
    )


def read_labels(store: Store, samples: list[Sample], box: Box) -> torch.Tensor:
    """Return the labels of one box of each sample.

    Labels of pixels are (B, *box.size) uint8, with ``store.ignore`` outside the image and in the
    context of a crop. Labels of whole images are (B, 1, ..., 1), one 1 for each spatial dim: int64
    for classes, float32 for numbers to predict. Only the box at the origin gets the label of an
    image. Other boxes get ``store.ignore`` or NaN, so that each image counts once.
    """
    if store.of_images:
        return labels_of_images(
            torch.tensor([store.label(s.image) for s in samples]), box, store.ignore
        )
    return torch.from_numpy(np.stack([_counted_labels(store, sample, box) for sample in samples]))


def pixel_bytes(store: Store, sample: Sample, box: Box) -> int:
    """Return how many bytes of pixels are read from the store for a box of a sample."""
    boxes = [_with_margin(sample, part) for part in _parts(sample, box)]
    return store.dtype(sample.image).itemsize * store.bands * _pixels_in(store, sample, boxes)


def label_bytes(store: Store, sample: Sample, box: Box) -> int:
    """Return how many bytes of labels are read from the store for a box of a sample."""
    counted = box.intersection(sample.counted)
    if not counted.pixels:
        return 0
    return _pixels_in(store, sample, [_unturned(sample, part) for part in _parts(sample, counted)])


def _pixels_in(store: Store, sample: Sample, boxes: list[Box]) -> int:
    """Return the number of pixels of the image that are read for boxes of a sample.

    Args:
        store: the store of the image.
        sample: the sample.
        boxes: boxes of the sample before it is flipped or rotated by ``sample.turn``.
    """
    return sum(_inside(store, sample, _source(store, sample, box)).pixels for box in boxes)


def _parts(sample: Sample, box: Box) -> list[Box]:
    """Return the parts of ``box`` that are read one after another, to limit the memory in use.

    A box of a warped sample may need a much larger box of the image. Without a warp, ``box``
    itself is the only part.
    """
    if sample.warp is None or box.pixels <= _AT_ONCE:
        return [box]
    dims = len(box.size)
    return boxes_of(box, (max(1, int(_AT_ONCE ** (1 / dims))),) * dims)


def _pixels(store: Store, sample: Sample, box: Box) -> np.ndarray:
    """Return the pixels of a box of a sample, read in parts, (bands, *box.size) float32."""
    parts = _parts(sample, box)
    if len(parts) == 1:
        return _pixels_at_once(store, sample, box)
    found = np.empty((store.bands, *box.size), np.float32)
    for part in parts:
        place = (slice(None), *part.relative_to(box).slices)
        found[place] = _pixels_at_once(store, sample, part)
    return found


def _counted_labels(store: Store, sample: Sample, box: Box) -> np.ndarray:
    """Return the labels of a box of a sample, (*box.size) uint8.

    Pixels in the context of the crop have the label ``store.ignore``.
    """
    counted = box.intersection(sample.counted)
    if counted == box:
        return _labels(store, sample, box)
    found = np.full(box.size, store.ignore, np.uint8)
    if counted.pixels:
        found[counted.relative_to(box).slices] = _labels(store, sample, counted)
    return found


def _labels(store: Store, sample: Sample, box: Box) -> np.ndarray:
    """Return the labels of a box of a sample, read in parts, (*box.size) uint8."""
    parts = _parts(sample, box)
    if len(parts) == 1:
        return _labels_at_once(store, sample, box)
    found = np.empty(box.size, np.uint8)
    for part in parts:
        found[part.relative_to(box).slices] = _labels_at_once(store, sample, part)
    return found


def _pixels_at_once(store: Store, sample: Sample, box: Box) -> np.ndarray:
    """Return the pixels of a box of a sample, read in one piece, (bands, *box.size) float32."""
    margined = _with_margin(sample, box)
    pixels, absent = _read_padded(store, sample, _source(store, sample, margined))
    if sample.warp is not None:
        pixels, absent = _reading(store, sample, margined).pixels(pixels, absent)
    pixels, absent = sample.intensity.blurred(pixels, absent)
    return _finished(sample, pixels, absent, _unturned(sample, box))


def _labels_at_once(store: Store, sample: Sample, box: Box) -> np.ndarray:
    """Return the labels of a box of a sample, read in one piece, (*box.size) uint8."""
    unturned = _unturned(sample, box)
    source = _source(store, sample, unturned)
    inside = _inside(store, sample, source)
    if inside == source:
        labels = store.labels(sample.image, source)
    else:
        labels = np.full(source.size, store.ignore, np.uint8)
        if inside.pixels:
            labels[inside.relative_to(source).slices] = store.labels(sample.image, inside)
    if sample.warp is not None:
        labels = _reading(store, sample, unturned).labels(labels)
    return sample.turn.apply(labels)


def _finished(
    sample: Sample, pixels: np.ndarray, absent: np.ndarray | None, box: Box
) -> np.ndarray:
    """Return pixels after the changes of values and colours, and after the turn.

    These are the last steps of the augmentation. Pixels without data become 0.

    Args:
        sample: the sample.
        pixels: the warped and blurred pixels, (C, *box.size) float32.
        absent: True where pixels have no data, (C or 1, *box.size); None if all have data.
        box: the box of the sample before it is flipped or rotated by ``sample.turn``.
    """
    pixels = sample.intensity.changed(pixels, box.relative_to(sample.seen), sample.seen.size)
    if sample.colour is not None:
        pixels = sample.colour.apply(pixels)
    if absent is not None:
        pixels = np.where(absent, np.float32(0), pixels)
    return sample.turn.apply(pixels)


def _read_padded(store: Store, sample: Sample, source: Box) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the pixels of a box that may extend beyond the image, and a mask of missing values.

    Args:
        store: the store of the image.
        sample: the sample, which names the image.
        source: the box of the image.

    Returns:
        Pixels (bands, *source.size) float32, and (bands or 1, *source.size) bool, True for values
        without data and outside the image. The mask is None if all values have data.
    """
    inside = _inside(store, sample, source)
    if inside == source:
        return store.read_masked(sample.image, source)
    pixels = np.zeros((store.bands, *source.size), np.float32)
    if not inside.pixels:
        return pixels, np.ones((1, *source.size), bool)
    place = (slice(None), *inside.relative_to(source).slices)
    pixels[place], missing = store.read_masked(sample.image, inside)
    absent = np.ones((1 if missing is None else store.bands, *source.size), bool)
    absent[place] = False if missing is None else missing
    return pixels, absent


def _unturned(sample: Sample, box: Box) -> Box:
    """Return the box of the crop that ``sample.turn`` flips or rotates to ``box``.

    Its coordinates count from the start of the crop.
    """
    seen = sample.seen
    return sample.turn.source(box, seen.size).shifted(seen.start)


def _with_margin(sample: Sample, box: Box) -> Box:
    """Return the box of the crop from which ``box`` of a sample is computed, with pixels for blur.

    The result is in the crop before ``sample.turn`` flips or rotates it.
    """
    box, margin = _unturned(sample, box), sample.intensity.margin
    return Box(tuple(a - margin for a in box.start), tuple(b + margin for b in box.stop))


def _reading(store: Store, sample: Sample, box: Box) -> Reading:
    """Return the object that interpolates a box of a warped sample from pixels of the image.

    Args:
        store: the store of the image.
        sample: the sample.
        box: the box of the sample before it is flipped or rotated by ``sample.turn``.
    """
    return Reading(sample.warp, box, sample.box.start, store.size(sample.image))


def _source(store: Store, sample: Sample, box: Box) -> Box:
    """Return the box of the image from which a box of a sample is computed.

    ``box`` is a box of the sample before ``sample.turn`` flips or rotates it. The result may
    extend beyond the image.
    """
    if sample.warp is None:
        return box.shifted(sample.box.start)
    return _reading(store, sample, box).source


def _inside(store: Store, sample: Sample, source: Box) -> Box:
    """Return the part of the box ``source`` that lies in the image of the sample.

    If no part of it lies there, the result is a box without pixels.
    """
    return Box.whole(store.size(sample.image)).intersection(source)
