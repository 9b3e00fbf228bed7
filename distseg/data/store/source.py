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
    """File that a store refers to, and a fingerprint of its content.

    Attributes:
        path: the path relative to the folder of the store.
        bytes: the size of the file.
        hash: the hash of its content (:func:`fingerprint`).
    """

    path: str
    bytes: int
    hash: str

    def change(self, folder: Path) -> str | None:
        """Return a phrase that says what changed in the file since the store was written.

        The result is None if nothing changed.

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
        """Return the path of the file, which is stored relative to the store's ``folder``."""
        return Path(os.path.normpath(folder / self.path))


@dataclass(frozen=True)
class Source:
    """Image file that holds the pixels of an image of a store.

    An image of the store is the whole image of the file, a slice of it, or a part of it.

    Attributes:
        files: the image file, and all other files from which the image was prepared: files beside
            it, sources of a VRT, its mask.
        dims, alpha: how the file is opened (:func:`distseg.data.formats.readers.open_image`).
        page: index of the slice of a volume in the file; None if the image is no slice.
        part: the box of the image in the file's image; None if the image is no part.
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
        """Return a source from its JSON form, as :meth:`to_json` makes it; None for None.

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
        """True if the attributes have types and values that a store may hold."""
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
        """Key of a cache of open files; slices and parts of one file have the same key."""
        return self.files[0].path, self.dims, self.alpha

    def open(self, store: str) -> Reader:
        """Return a reader of the whole image file, as a volume if the image is a slice of it.

        Args:
            store: the store that refers to the file.

        Raises:
            ValueError: a file has changed or is gone, or cannot be read.
        """
        check_unchanged([self], store)
        dims = self.dims if self.page is None else 3
        return open_image(self.files[0].at(folder_of(store)), dims, alpha=self.alpha)

    def image(self, reader: Reader) -> Reader:
        """Return the reader of the image: of ``self.part``, of slice ``self.page``, or ``reader``.

        ``reader`` is the reader of the whole file that :meth:`open` returned.

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
    """Return the files to which a new store refers, each once, with their fingerprints.

    Args:
        paths: the files; a path may occur several times.
        store: the store to be written. The results name the files relative to its folder.
    """
    folder = folder_of(store)
    return tuple(
        SourceFile(_relative(path, folder), *fingerprint(path)) for path in dict.fromkeys(paths)
    )


def folder_of(store: str | Path) -> Path:
    """Return the folder of a store, to which the paths in it are relative.

    If ``store`` is a link, it is followed.
    """
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
    """Return what changed in image files since a store was written, one phrase per changed file.

    Args:
        sources: the image files to which the store refers.
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
    """Refuse image files that have changed, or that are gone, since a store was written.

    Args:
        sources: the image files to which the store refers.
        store: the path of the store.

    Raises:
        ValueError: a file has changed or is gone; the message names the first such files.
    """
    if found := changes(sources, folder_of(store)):
        raise ValueError(
            f"{store} refers to {len(_files(sources))} files, of which {len(found)} changed since "
            f"it was prepared: {some(found, 5)}; put the files back as they were, or prepare the "
            "store anew"
        )


def _files(sources: Sequence[Source]) -> list[SourceFile]:
    """Return all files of these sources; a file that several sources name is returned once."""
    return list(dict.fromkeys(file for source in sources for file in source.files))


def _relative(path: Path, folder: Path) -> str:
    """Return the path of a file relative to a folder.

    Links in the path of the folder are followed. A file that is a link itself keeps its own name.
    """
    return os.path.relpath(os.path.join(os.path.realpath(path.parent), path.name), folder)
