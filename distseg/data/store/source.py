"""Files to which a store refers instead of holding their pixels.

A store that ``distseg prepare --reference`` wrote names the image file of each image. A fingerprint
of each file, its size and a hash of pieces of it, tells changed files before work starts. Checksums
of all chunks tell any other change when a chunk is read (:mod:`distseg.data.store.file_pixels`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from distseg.config.sizes import Size
from distseg.data.folders import some
from distseg.data.formats.base import PageReader, PartReader, Reader
from distseg.data.formats.readers import open_image
from distseg.data.store.layout import digest
from distseg.tiling.tile import Box

_PIECES, _PIECE = 16, 4096  # pieces of a file that a hash covers, and bytes of each
_THREADS = 16  # parallel file systems answer many requests at once


@dataclass(frozen=True)
class SourceFile:
    """File that a store refers to, and its fingerprint.

    Attributes:
        path: the path relative to the folder of the store.
        bytes: the size of the file.
        hash: the hash of its content (:func:`fingerprint`).
    """

    path: str
    bytes: int
    hash: str

    def change(self, folder: Path) -> str | None:
        """Return in words what is different from when the store was written; None if nothing is.

        Args:
            folder: the folder of the store.
        """
        path = self.at(folder)
        if path.exists() and not path.is_file():
            return f"{path} is no plain file"
        try:
            size, content = fingerprint(path)
        except FileNotFoundError:
            return f"{path} is gone"
        except OSError as e:
            return f"{path} cannot be read ({e.strerror})"
        if size != self.bytes:
            return f"{path} has {size} bytes instead of {self.bytes}"
        if content != self.hash:
            return f"{path} has other content, of the hash {content} instead of {self.hash}"
        return None

    def at(self, folder: Path) -> Path:
        """Return the path of the file, if the store lies in ``folder``."""
        return Path(os.path.normpath(folder / self.path))


@dataclass(frozen=True)
class Source:
    """Image file from which the pixels of an image are read.

    Attributes:
        files: the image file, and all other files from which the image was prepared: files beside
            it, sources of a VRT, its mask.
        dims, alpha: how the file is opened (:func:`distseg.data.formats.readers.open_image`).
        page: index of the slice that is the image; None for the whole file.
        part: the part of the file's image that is the image; None for all of it.
    """

    files: tuple[SourceFile, ...]
    dims: int | None
    alpha: str
    page: int | None
    part: Box | None = None

    def to_json(self) -> dict:
        """Return the source in types that JSON can hold."""
        files = [[file.path, file.bytes, file.hash] for file in self.files]
        part = None if self.part is None else [list(self.part.start), list(self.part.stop)]
        return {**vars(self), "files": files, "part": part}

    @classmethod
    def from_json(cls, found: dict | None) -> Source | None:
        """Return the source that :meth:`to_json` converted; None for None.

        Raises:
            KeyError, TypeError, ValueError: ``found`` is not valid.
        """
        if found is None:
            return None
        files = tuple(SourceFile(path, size, text) for path, size, text in found["files"])
        part = found.get("part")
        box = None if part is None else Box(*(tuple(corner) for corner in part))
        return cls(files, found["dims"], found["alpha"], found["page"], box)

    @property
    def valid(self) -> bool:
        """True if each value is one that a store may have."""
        corners = () if self.part is None else (*self.part.start, *self.part.stop)
        numbers = (self.dims, self.page, *corners, *(file.bytes for file in self.files))
        corners_fit = self.part is None or len(self.part.start) == len(self.part.stop)
        texts = (self.alpha, *(text for file in self.files for text in (file.path, file.hash)))
        return (
            bool(self.files)
            and corners_fit
            and all(n is None or (type(n) is int and n >= 0) for n in numbers)
            and all(isinstance(text, str) and "\0" not in text for text in texts)
        )

    @property
    def key(self) -> tuple:
        """The key of the open file among others; slices and parts of one file share it."""
        return self.files[0].path, self.dims, self.alpha

    def open(self, store: str) -> Reader:
        """Return a reader of the whole image file; of a volume if the image is a slice.

        Args:
            store: the store that refers to the file.

        Raises:
            ValueError: a file has changed or is gone, or cannot be read.
        """
        check_unchanged([self], store)
        dims = self.dims if self.page is None else 3
        return open_image(self.files[0].at(folder_of(store)), dims, alpha=self.alpha)

    def image(self, reader: Reader) -> Reader:
        """Return the reader of the image: of ``part`` or of the slice ``page``, or ``reader``.

        Raises:
            ValueError: the file has too few slices or pixels.
        """
        if self.part is not None:
            if not Box.whole(reader.size).contains(self.part):
                raise ValueError(
                    f"{reader.path} has {Size(reader.size)} pixels, but the store refers to its "
                    f"part from {self.part.start} to {self.part.stop}: prepare the store anew"
                )
            return PartReader(reader, self.part)
        if self.page is not None and self.page >= reader.size[0]:
            raise ValueError(
                f"{reader.path} has {reader.size[0]} slices, but the store refers to slice "
                f"{self.page} (from 0): prepare the store anew"
            )
        return reader if self.page is None else PageReader(reader, self.page)


def source_files(paths: Iterable[Path], store: Path) -> tuple[SourceFile, ...]:
    """Return files with their fingerprints, each once, for a new store.

    Args:
        paths: the files.
        store: the store to be written.
    """
    folder = folder_of(store)
    return tuple(
        SourceFile(_relative(path, folder), *fingerprint(path)) for path in dict.fromkeys(paths)
    )


def folder_of(store: str | Path) -> Path:
    """Return the folder to which paths in a store are relative. Links to a store are followed."""
    return Path(os.path.realpath(store)).parent


def fingerprint(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes, and a hash of 16 pieces of 4 KiB all over the file.

    A copy of the file has the same fingerprint.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        step = max(_PIECE, (size - _PIECE) // (_PIECES - 1))
        starts = [*range(0, size - _PIECE, step)][: _PIECES - 1] + [max(0, size - _PIECE)]
        return size, digest(b"".join(os.pread(file.fileno(), _PIECE, at) for at in starts))


def changes(sources: Sequence[Source], folder: Path) -> list[str]:
    """Return in words what changed in files since a store was written, one text for each file.

    Args:
        sources: the sources of the images.
        folder: the folder of the store.
    """
    files = _files(sources)
    if len(files) < _THREADS:
        found = [file.change(folder) for file in files]
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(lambda file: file.change(folder), files))
    return [change for change in found if change is not None]


def check_unchanged(sources: Sequence[Source], store: str) -> None:
    """Refuse files that have changed, or that are gone, since a store was written.

    Args:
        sources: the sources of the images.
        store: the store.

    Raises:
        ValueError: there are such files; the message names the first of them.
    """
    if found := changes(sources, folder_of(store)):
        raise ValueError(
            f"{store} refers to {len(_files(sources))} files, of which {len(found)} changed since "
            f"it was prepared: {some(found, 5)}; put the files back as they were, or prepare the "
            "store anew"
        )


def _files(sources: Sequence[Source]) -> list[SourceFile]:
    """Return the files of the sources, each once."""
    return list(dict.fromkeys(file for source in sources for file in source.files))


def _relative(path: Path, folder: Path) -> str:
    """Return the path of a file relative to a folder. A file that is a link keeps its own name."""
    return os.path.relpath(os.path.join(os.path.realpath(path.parent), path.name), folder)
