"""Small stores for tests, made in a moment."""

import json

import h5py
import numpy as np

from distseg.data.store import layout
from distseg.data.store.band_statistics import ClassCounts
from distseg.data.store.store import Store, StoreWriter
from distseg.tiling.tile import Box

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
        image.write(
            box, pixels[(slice(None), *box.slices)], None if labels is None else labels[box.slices]
        )


def made_store(path, images, bands=2, **options):
    """``images``: name -> (split, pixels, labels)."""
    with StoreWriter(path, CLASSES, bands, **options) as writer:
        for name, (split, pixels, labels) in images.items():
            write_image(writer, name, split, pixels, labels)
    return Store(path)


def old_store(path, images, bands=2):
    """A store of version 1, as HDF5 writes it by itself; ``images`` as above."""
    index, train = (
        [],
        np.concatenate(
            [p.reshape(bands, -1) for split, p, _ in images.values() if split == "train"], 1
        ).astype(np.float64),
    )
    with h5py.File(path, "w") as file:
        for name, (split, pixels, labels) in images.items():
            group, size = file.create_group(f"images/{name}"), pixels.shape[1:]
            group.create_dataset(
                "pixels", data=pixels, chunks=layout.pixel_chunk(bands, size, pixels.itemsize)
            )
            counts = None
            if labels is not None:
                group.create_dataset(
                    "labels",
                    data=labels,
                    chunks=layout.label_chunk(size),
                    compression="gzip",
                    compression_opts=1,
                )
                found = ClassCounts(len(CLASSES), size)
                found.add(Box.whole(size), labels)
                group.create_dataset(
                    "counts", data=found.table, dtype="u4", compression="gzip", compression_opts=1
                )
                counts = found.totals
            index.append(
                dict(
                    name=name,
                    size=size,
                    dtype=pixels.dtype.str,
                    labels=labels is not None,
                    counts=counts,
                    split=split,
                )
            )
        file.attrs.update(
            format=layout.FORMAT,
            version=1,
            complete=True,
            layout=layout.LAYOUT,
            block=layout.BLOCK,
            ignore=255,
        )
        file.attrs.update(
            bands=[f"band{b}" for b in range(bands)],
            classes=CLASSES,
            mean=train.mean(1),
            std=train.std(1),
        )
        file["index"], file["provenance"] = json.dumps(index), "{}"
    return path


def random_store(path, **splits):
    """``train=[(97, 131), (64, 70)]`` makes the images train0 and train1."""
    images = {}
    for split, sizes in splits.items():
        for k, size in enumerate(sizes):
            images[f"{split}{k}"] = (split, *random_image(size, seed=len(images)))
    return made_store(path, images)
