"""Read the pixels of an image from the image file that a store refers to.

A store without pixels holds the checksums of their chunks. They are verified on every read, so
pixels that differ from those that were prepared raise an error, whatever the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from distseg.config.sizes import Size
from distseg.data.formats.base import Reader
from distseg.data.store.chunks import Chunked, Damage, Sums
from distseg.data.store.layout import chunk_sum, file_chunk
from distseg.data.store.open_files import OpenFiles
from distseg.data.store.source import Source
from distseg.tiling.tile import Box, boxes_of, strips

_READ_BYTES = 64 << 20  # bytes of pixels that are read at a time


class FilePixels(Chunked):
    """Reader of the pixels of an image from the image file to which a store refers.

    Args:
        shape: (bands, *size).
        dtype: dtype of the pixels.
        path: the store, for messages.
        what: the content in words, for messages, such as ``pixels of image 'a'``.
        source: the image file.
        files: the image files that this process holds open.
        handle: file descriptor of the open store, which holds the checksums.
        sums: the position of the checksums in the store.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype,
        path: str,
        what: str,
        source: Source,
        files: OpenFiles,
        handle: int,
        sums: Sums,
    ):
        super().__init__(shape, file_chunk(shape), dtype, path, what, leading=1)
        self._source, self._files = source, files
        self._sums = self._read_sums(handle, sums)

    def loaded(
        self, indices: Iterable[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yield the index of each of these chunks and its pixels, as :meth:`load` returns them.

        Adjacent chunks are read together, so that a tile of the image file that several chunks
        touch is decoded once.
        """
        reader = self._opened()
        most = max(1, _READ_BYTES // (math.prod(self.chunk) * self.dtype.itemsize))
        for block in merged([Box(i[1:], tuple(n + 1 for n in i[1:])) for i in sorted(indices)]):
            for part in strips(block, most):
                yield from self._read_part(reader, part)

    def load(self, index: tuple[int, ...]) -> np.ndarray:
        """Return the pixels of the chunk with this index, (*self.chunk).

        A chunk at the border has its full size, and so exceeds the image; there it is 0.

        Raises:
            Damage: the pixels differ from those that were prepared.
            ValueError: the image file has changed, is gone, or cannot be read.
        """
        return next(self.loaded([index]))[1]

    def damage(self, index: tuple[int, ...], how: str) -> Damage:
        """Return an error that names the image file and a damaged chunk.

        ``index`` is its number along each dim. ``how`` says what is wrong with its pixels, such as
        ``differ from those prepared``.
        """
        return Damage(
            f"{self._source.files[0].path}, to which {self._path} refers: {self._words(index)} "
            f"{how}: put the file back as it was, or prepare the store anew"
        )

    def _opened(self) -> Reader:
        """Return the reader of the image file.

        Raises:
            ValueError: the image has another size or dtype than the store says.
        """
        reader = self._files.reader(self._source)
        found, expected = (reader.bands, *reader.size), self.shape
        if (found, reader.dtype) != (expected, self.dtype):
            raise Damage(
                f"{reader.path} has {Size(found)} values of {reader.dtype}, but {self._path}, "
                f"which refers to it, says {Size(expected)} of {self.dtype}: prepare the store anew"
            )
        return reader

    def _read_part(self, reader: Reader, part: Box) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Read a part of the image in one piece; yield each chunk's index and pixels.

        Args:
            reader: the reader of the image file.
            part: the box of the chunks' numbers along the spatial dims.

        Raises:
            Damage: the pixels of a chunk differ from those that were prepared.
        """
        indices = [(0, *box.start) for box in boxes_of(part, (1,) * len(part.start))]
        hull = self.place(indices[0]).hull(self.place(indices[-1]))
        pixels = reader.read(Box(hull.start[1:], hull.stop[1:]))
        for index in indices:
            place = self.place(index)
            chunk = np.zeros(self.chunk, self.dtype)
            chunk[tuple(slice(0, n) for n in place.size)] = pixels[place.relative_to(hull).slices]
            if chunk_sum(chunk) != self._sums[index]:
                raise self.damage(
                    index,
                    "differ from those that were prepared (wrong checksum). The file has changed, "
                    "or another version of its decoder reads other values",
                )
            yield index, chunk


def merged(boxes: Sequence[Box]) -> list[Box]:
    """Return fewer boxes that cover the same cells: boxes with a common side are joined.

    Args:
        boxes: boxes that do not overlap, sorted by their starts.
    """
    found = list(boxes)
    for dim in reversed(range(len(found[0].start) if found else 0)):
        done: list[Box] = []
        last: dict[tuple, Box] = {}  # the last box, by its extent along the other dims
        for box in found:
            key = tuple(side for k, side in enumerate(zip(box.start, box.stop)) if k != dim)
            before = last.get(key)
            if before is not None and before.stop[dim] == box.start[dim]:
                box = before.hull(box)
            elif before is not None:
                done.append(before)
            last[key] = box
        found = sorted([*done, *last.values()], key=_start)
    return found


def _start(box: Box) -> tuple[int, ...]:
    return box.start
