"""Small stores for tests, made in a moment."""

import numpy as np

from distseg.data.store import Store, StoreWriter
from distseg.geometry.tile import Box

CLASSES = ["ocean", "land", "lake"]


def random_image(size, bands=2, seed=0, lakes=True):
    """uint8 pixels in which no two neighbours are alike by design of chance, and labels with a small lake."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, size).astype(np.uint8)
    if lakes:
        labels[tuple(slice(n // 2, n // 2 + 3) for n in size)] = 2
    labels[tuple(slice(0, 2) for _ in size)] = 255
    return random.integers(0, 256, (bands, *size)).astype(np.uint8), labels


def write_image(writer, name, split, pixels, labels, rows=50):
    """In strips of ``rows``."""
    size = pixels.shape[1:]
    image = writer.add_image(name, size, pixels.dtype, split, labels is not None)
    for top in range(0, size[0], rows):
        box = Box((top, *(0 for _ in size[1:])), (min(top + rows, size[0]), *size[1:]))
        image.write(box, pixels[(slice(None), *box.slices)], None if labels is None else labels[box.slices])


def made_store(path, images, bands=2, **options):
    """``images``: name -> (split, pixels, labels)."""
    with StoreWriter(path, CLASSES, bands, **options) as writer:
        for name, (split, pixels, labels) in images.items():
            write_image(writer, name, split, pixels, labels)
    return Store(path)


def random_store(path, **splits):
    """``train=[(97, 131), (64, 70)]`` makes the images train0 and train1."""
    images = {}
    for split, sizes in splits.items():
        for k, size in enumerate(sizes):
            images[f"{split}{k}"] = (split, *random_image(size, seed=len(images)))
    return made_store(path, images)
