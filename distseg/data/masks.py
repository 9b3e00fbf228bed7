"""Read masks that encode classes by labels, colours, object ids, or polygons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from distseg.data.formats.base import Reader
from distseg.data.formats.readers import open_coloured, open_mask
from distseg.data.store.image_writer import position
from distseg.data.vector.annotated import YOLO_SUFFIX
from distseg.data.vector.burned import BurnedReader
from distseg.data.vector.layer import ValueRule, is_vector
from distseg.data.vector.placed import ImageGrid
from distseg.tiling.tile import Box

Instances = Literal["foreground", "border"]


@dataclass(frozen=True)
class MaskForm:
    """Encoding of the classes in the masks of a folder.

    Attributes:
        colours: the colour (red, green, blue) of each class; None if masks hold numbers.
        instances: how object ids become classes; None if the masks hold labels. The id 0 is
            the background, class 0. ``foreground``: all objects are class 1.
            ``border``: in addition, the pixels at which two objects touch are class 2.
        attribute: the attribute of polygons that holds the name or the label of their class. None
            makes all polygons class 1.
        names: pairs (value of this attribute, label).
    """

    colours: tuple[tuple[int, int, int], ...] | None = None
    instances: Instances | None = None
    attribute: str | None = None
    names: tuple[tuple[str, int], ...] = ()

    @property
    def rule(self) -> ValueRule:
        """Rule that gives each polygon its label, for masks that are vector files."""
        return ValueRule(self.attribute, self.names, self.instances is not None)

    def open(self, path: Path, dims: int, grid: ImageGrid | None = None, level: int = 0) -> Reader:
        """Return a reader of the labels in a mask, which has one band of integers.

        Args:
            path: the file.
            dims: number of spatial dims.
            grid: the image's size and georeference, by which polygons are placed on its pixels.
                Only vector files need it.
            level: the resolution of an OME-Zarr image; other files are read as they are.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is no mask of this form.
        """
        if grid is not None and (is_vector(path) or path.suffix.lower() == YOLO_SUFFIX):
            return self._burned(path, grid)
        if self.attribute is not None:
            raise ValueError(
                f"--attribute is {self.attribute}, the attribute of polygons that holds their "
                f"class, but the mask {path} is no vector file: leave --attribute out"
            )
        if self.colours is not None:
            return ColourReader(open_coloured(path, dims, level), self.colours)
        reader = open_mask(path, dims, level)
        if self.instances is not None:
            return InstanceReader(reader, self.instances == "border")
        return reader

    def _burned(self, path: Path, grid: ImageGrid) -> Reader:
        """Return a reader of the labels that polygons give to the pixels of an image.

        Raises:
            ValueError: the form does not fit polygons.
        """
        if self.colours is not None:
            raise ValueError(
                f"--classes gives colours to the classes, but {path} holds polygons, which have "
                "none: leave the colours out"
            )
        if self.instances is not None and self.attribute is not None:
            raise ValueError(
                f"--attribute {self.attribute} says the class of each polygon, but --instances "
                f"{self.instances} makes all polygons of {path} one class: leave one of them out"
            )
        burned = BurnedReader(path, grid, self.rule)
        if self.instances is not None:
            return InstanceReader(burned, self.instances == "border")
        return burned


PLAIN = MaskForm()


class _Labels(Reader):
    """Base class of readers that compute labels from the pixels that another reader returns."""

    bands, dtype = 1, np.dtype(np.uint8)

    def __init__(self, pixels: Reader):
        super().__init__(pixels.path)
        self.pixels, self.size = pixels, pixels.size
        self.notes, self.place, self.nodata = pixels.notes, pixels.place, None
        self.polygons = pixels.polygons

    @property
    def masked(self) -> bool:
        """True if the file, or a file beside it, marks single pixels without data."""
        return self.pixels.masked

    @property
    def overlapping(self) -> int:
        """Number of pixels read so far that are covered by polygons of different values."""
        return self.pixels.overlapping

    def read(self, box: Box) -> np.ndarray:
        """Return the labels of a box, (1, *box.size)."""
        return self.read_valid(box)[0]


class ColourReader(_Labels):
    """Reader of labels from a mask whose colours stand for classes.

    Args:
        pixels: reader of red, green and blue, uint8.
        colours: the colour of each class.
    """

    def __init__(self, pixels: Reader, colours: Sequence[Sequence[int]]):
        super().__init__(pixels)
        codes = _codes(np.array(colours, np.uint8).T)
        self._order = np.argsort(codes)
        self._codes = codes[self._order]

    def read_valid(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the labels of a box, (1, *box.size), and its validity mask.

        The validity mask is (*box.size) bool, True where there is data; None if all have data.

        Raises:
            ValueError: a colour belongs to no class.
        """
        pixels, valid = self.pixels.read_valid(box)
        codes = _codes(pixels)
        place = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        unknown = self._codes[place] != codes
        if valid is not None:
            unknown &= valid
        if unknown.any():
            first = tuple(int(n) for n in np.argwhere(unknown)[0])
            colour = "#" + "".join(f"{int(n):02x}" for n in pixels[(slice(None), *first)])
            raise ValueError(
                f"{self.path} has the colour {colour} at {position(box, first)}, which is the "
                f"colour of no class: name a class with it, such as --classes ...,other={colour}, "
                "or recolour the mask (anti-aliased or lossy pictures contain mixed colours)"
            )
        return self._order[place].astype(np.uint8)[None], valid


class InstanceReader(_Labels):
    """Reader of labels from a mask whose numbers stand for objects.

    Args:
        pixels: reader of the object ids; 0 is the background.
        border: True to give the label 2 to pixels that belong to an object and have a direct
            neighbour in another object. All other pixels of objects have the label 1.
    """

    def __init__(self, pixels: Reader, border: bool):
        super().__init__(pixels)
        self._border = border

    def read_valid(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the labels of a box, (1, *box.size), and its validity mask.

        The validity mask is (*box.size) bool, True where there is data; None if all have data.
        """
        wide = Box(
            tuple(max(0, a - self._border) for a in box.start),
            tuple(min(n, b + self._border) for b, n in zip(box.stop, self.size)),
        )
        numbers, valid = self.pixels.read_valid(wide)
        numbers = numbers[0]
        if self.pixels.nodata:  # a number 0 for no data is the background
            there = numbers != self.pixels.nodata
            valid = there if valid is None else valid & there
            numbers = np.where(there, numbers, 0)
        labels = (numbers != 0).astype(np.uint8)
        if self._border:
            for dim in range(numbers.ndim):
                one = np.moveaxis(numbers, dim, 0)
                touch = (one[1:] != one[:-1]) & (one[1:] != 0) & (one[:-1] != 0)
                along = np.moveaxis(labels, dim, 0)
                along[1:][touch] = 2
                along[:-1][touch] = 2
        inner = box.relative_to(wide).slices
        return labels[inner][None], None if valid is None else valid[inner]


def _codes(pixels: np.ndarray) -> np.ndarray:
    """Return colours, (3, *size) uint8, as one integer 0xRRGGBB for each pixel, (*size) int32."""
    red, green, blue = pixels.astype(np.int32)
    return (red << 16) | (green << 8) | blue


def named_colours(
    classes: Sequence[str],
) -> tuple[list[str], tuple[tuple[int, int, int], ...] | None]:
    """Split classes given as ``road=#ff0000`` into names and colours.

    Returns:
        The names, and the colours (red, green, blue); None for the colours if no class has one.

    Raises:
        ValueError: only some classes have a colour, a colour is not ``#rrggbb``, or two classes
            have the same colour.
    """
    parts = [text.partition("=") for text in classes]
    if not any(equals for _, equals, _ in parts):
        return list(classes), None
    colours = []
    for name, equals, colour in parts:
        digits = colour.strip().removeprefix("#")
        try:
            if len(digits) != 6:
                raise ValueError
            numbers = bytes.fromhex(digits)
        except ValueError:
            given = colour if equals else "none"
            raise ValueError(
                f"--classes gives the class {name!r} the colour {given}: give every class a colour "
                "as NAME=#rrggbb, or give colours to none"
            ) from None
        colours.append((numbers[0], numbers[1], numbers[2]))
    for number, colour in enumerate(colours):
        if colour in colours[:number]:
            first = parts[colours.index(colour)][0]
            raise ValueError(
                f"--classes gives {first!r} and {parts[number][0]!r} the same colour, so that "
                "masks cannot distinguish them: give each class its own colour"
            )
    return [name for name, _, _ in parts], tuple(colours)
