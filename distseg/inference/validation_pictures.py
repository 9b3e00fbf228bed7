"""Pictures of validation images for loggers: image, truth, prediction and errors side by side.

A picture shows the middle of an image at full resolution; of a volume, the middle slice. The
predicted classes come from the validation itself, so nothing is computed twice.
"""

from __future__ import annotations

import numpy as np

from distseg.data.picture import rgb
from distseg.data.store.store import Store
from distseg.report.overlay import errors_over_grey
from distseg.report.style import UNLABELLED, class_colors
from distseg.tiling.tile import Box

_IMAGES = 2  # number of images; the first ones of the split
_SIDE = 384  # longest side of a panel, in pixels
_GAP = 4  # pixels between two panels


class ValidationPictures:
    """Collector of the predicted classes that the pictures of validation images show.

    Each rank collects the classes that it computes; rank 0 draws the pictures.

    Args:
        store: the store of the images.
        split: the name of the split.
    """

    def __init__(self, store: Store, split: str):
        self._store = store
        self._names = store.split(split)[:_IMAGES]
        self._boxes = [_middle(store.size(name)) for name in self._names]
        self._pieces: list[tuple[int, Box, np.ndarray]] = []

    def add(self, image: int, tile: Box, classes: np.ndarray) -> None:
        """Keep the part of a tile's predicted classes that a picture shows.

        Args:
            image: the index of the image in the split.
            tile: the tile.
            classes: the predicted classes of the tile.
        """
        if image < len(self._boxes):
            shown = tile.intersection(self._boxes[image])
            if shown.pixels:
                part = classes[shown.relative_to(tile).slices]
                self._pieces.append((image, shown, part.astype(np.uint8)))

    def gathered(self, world) -> list[tuple[str, np.ndarray]]:
        """Gather the predicted classes of all ranks on rank 0, and draw the pictures there.

        Rank 0 gets the image's name and the pixels, (H, W, 3) uint8, of each picture; other ranks
        get an empty list. All ranks of ``world`` must call it together.
        """
        every = world.gather(self._pieces, root=0)
        if every is None:
            return []
        pieces = [piece for part in every for piece in part]
        return [
            (name, self._drawn(name, box, [piece[1:] for piece in pieces if piece[0] == image]))
            for image, (name, box) in enumerate(zip(self._names, self._boxes))
        ]

    def _drawn(self, name: str, box: Box, pieces: list[tuple[Box, np.ndarray]]) -> np.ndarray:
        """Draw the picture of a box of an image, (H, W, 3) uint8.

        Args:
            name: the name of the image.
            box: the part of the image that the picture shows.
            pieces: boxes that cover ``box``, with their predicted classes.
        """
        store, flat = self._store, box.size[-2:]
        found = np.zeros(box.size, np.uint8)
        for part, classes in pieces:
            found[part.relative_to(box).slices] = classes
        truth = store.labels(name, box).reshape(flat)
        image = store.read(name, box)[:3]
        valid = store.valid(name, box)
        valid = None if valid is None else valid.reshape(flat)
        return panels(
            rgb(image.reshape(len(image), *flat), store.nodata(name), valid),
            truth,
            found.reshape(flat),
            class_colors(store.classes, _colours(store)),
            store.ignore,
        )


def panels(
    image: np.ndarray, truth: np.ndarray, found: np.ndarray, colours: np.ndarray, ignore: int
) -> np.ndarray:
    """Draw an image, its true classes, its predicted classes and the errors side by side.

    The result is (H, W, 3) uint8.

    Args:
        image: the image's colours, (H, W', 3) uint8.
        truth: the labels, (H, W').
        found: the predicted classes, (H, W').
        colours: the colours of the classes, (classes, 3) uint8.
        ignore: the label of pixels that are not evaluated; they are grey and never errors.
    """
    labelled = truth != ignore
    table = np.vstack([colours, class_colors([""], [UNLABELLED])])
    shown = [
        image,
        table[np.where(labelled, truth, len(colours))],
        table[found],
        errors_over_grey(image, labelled & (truth != found)),
    ]
    gap = np.full((len(image), _GAP, 3), 255, np.uint8)
    return np.concatenate([part for panel in shown for part in (panel, gap)][:-1], axis=1)


def _middle(size: tuple[int, ...]) -> Box:
    """Return the box in the middle of an image that a picture shows; in a volume, of one slice."""
    sides = (*(1 for _ in size[:-2]), *(min(n, _SIDE) for n in size[-2:]))
    start = tuple((n - side) // 2 for n, side in zip(size, sides))
    return Box(start, tuple(a + side for a, side in zip(start, sides)))


def _colours(store: Store) -> list | None:
    """Return the colours that a store has for its classes; None if it has no colours."""
    found = getattr(store, "colours", None)
    return None if found is None else found.tolist()
