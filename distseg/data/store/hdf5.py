"""Open untrusted HDF5 files safely, and write HDF5 files that survive a full disk.

HDF5 follows links into other files, reads raw data from any path that a file names, loads filters
as plugins, and waits for ever on a pipe. This module opens only plain files, and checks each
dataset before it is read.

If the disk becomes full while HDF5 writes, HDF5 crashes. So this module lets HDF5 write into a
:class:`Growing` file, which hides errors from HDF5 and raises them afterwards.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

# The filters that distseg writes and reads.
_FILTERS = {h5py.h5z.FILTER_DEFLATE: "gzip", h5py.h5z.FILTER_FLETCHER32: "fletcher32"}
_LINKS = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "a link into another file"}
_ITSELF = "copy the data into the file itself"
_VERSION = ("v110", "v110")  # the first format whose structures all have checksums


def opened(path: str | Path, what: str, made_by: str) -> h5py.File:
    """Open an HDF5 file for reading, without locks.

    Args:
        path: the file.
        what: kind of the file in words, for messages, such as ``store``.
        made_by: how to make such a file, the end of each message.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the path is not a plain file, or the file is not HDF5, damaged, unfinished, or
            already opened with locks by this process.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what} {path}: {made_by}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is no file but {_kind(mode)}: {made_by}")
    with open(path, "rb"):  # raises the error of the system if this user may not read the file
        pass
    if not h5py.is_hdf5(path):
        raise ValueError(f"{path} is not an HDF5 file: {made_by}")
    try:
        return h5py.File(path, "r", driver="sec2", locking=False)
    except OSError as e:
        if "already open for write" in str(e):
            raise ValueError(
                f"{path} is unfinished, because its writer was stopped: {made_by}"
            ) from None
        if "locking flag values don't match" in str(e):
            raise ValueError(
                f"{path} is held open with locks by this same process: close it first, or open it "
                "with locking=False"
            ) from None
        raise ValueError(f"{path} is damaged or cut off ({e}): copy it again; {made_by}") from e


@dataclass(frozen=True)
class Data:
    """HDF5 dataset whose data lie in the file itself.

    Attributes:
        id: h5py's low-level handle.
        shape: the shape of the dataset.
        dtype: dtype of the values.
        chunk: the size of a chunk; None if the dataset is not chunked.
        filters: names of the filters, ``gzip`` or ``fletcher32``, in the order of writing.
    """

    id: h5py.h5d.DatasetID
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...] | None
    filters: tuple[str, ...]

    def open(self) -> h5py.Dataset:
        """Return the dataset as an :class:`h5py.Dataset`."""
        return h5py.Dataset(self.id)


def dataset(file: h5py.File, name: str) -> Data:
    """Return the dataset of this name, such as ``a/b/c``, after checking where its data lie.

    None of its data are read.

    Raises:
        ValueError: the dataset is missing, reached by a link, stored in other files, or compressed
            by a filter that distseg does not use.
    """
    where, found = file.filename, _followed(file, name)
    if not isinstance(found, h5py.h5d.DatasetID):
        raise ValueError(f"{where} is damaged, or distseg did not write it: {name} holds no data")
    properties = found.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL or properties.get_external_count():
        raise ValueError(
            f"{where}: the data of {name} are kept in other files, which are not opened: {_ITSELF}"
        )
    numbers = [properties.get_filter(k)[0] for k in range(properties.get_nfilters())]
    strange = [number for number in numbers if number not in _FILTERS]
    if strange:
        raise ValueError(
            f"{where}: {name} is stored with HDF5's filter {strange[0]}, which distseg does not "
            f"use: store it with {' or '.join(_FILTERS.values())}, or without a filter"
        )
    chunk = properties.get_chunk() if properties.get_layout() == h5py.h5d.CHUNKED else None
    return Data(
        found, found.shape, found.dtype, chunk, tuple(_FILTERS[number] for number in numbers)
    )


def _followed(file: h5py.File, name: str) -> h5py.h5g.GroupID | h5py.h5d.DatasetID:
    """Return the group or dataset of this name, such as ``a/b/c``.

    Raises:
        ValueError: the group or dataset is missing, or the name leads through a soft or external
            link, which could lead to another file.
    """
    root, parts = h5py.h5g.open(file.id, b"/"), name.split("/")
    for count in range(1, len(parts) + 1):
        path = "/".join(parts[:count])
        coded = path.encode("utf-8", "surrogateescape")
        if not root.links.exists(coded):
            raise ValueError(
                f"{file.filename} is damaged, or distseg did not write it: it has no {path}"
            )
        link = root.links.get_info(coded).type
        if link != h5py.h5l.TYPE_HARD:
            raise ValueError(
                f"{file.filename}: {path} is {_LINKS.get(link, 'a link')}, which is not followed: "
                f"{_ITSELF}"
            )
    return h5py.h5o.open(root, coded)


def strings(texts: list[str]) -> np.ndarray:
    """Return an array of texts that are padded to the same number of bytes.

    HDF5 would store texts of variable length in a heap without a checksum, where damage goes
    unseen.
    """
    coded = [text.encode("utf-8", "surrogateescape") for text in texts]
    return np.array(coded, dtype=h5py.string_dtype("utf-8", max(1, *map(len, coded))))


class Growing:
    """Writer of a new HDF5 file into an open file; it raises the errors of a full disk.

    ::

        with Growing(path, handle) as growing:
            growing.file[...] = ...
            growing.check()

    Args:
        path: the name of the file.
        handle: descriptor of the file, open for reading and writing; the file is emptied and stays
            open.

    Raises:
        OSError: the disk is full, or another system error occurred in writing. The error is raised
            by :meth:`check`, and at the end of the block.
    """

    def __init__(self, path: Path, handle: int):
        self._sink = _Sink(handle)
        os.ftruncate(handle, 0)
        self.file = h5py.File(str(path), "w", driver="fileobj", fileobj=self._sink, libver=_VERSION)

    def check(self) -> None:
        """Raise the first system error that occurred while HDF5 wrote, if any."""
        if self._sink.error is not None:
            raise self._sink.error

    def close(self) -> None:
        """Close the HDF5 file; raise the first system error that occurred while writing, if any."""
        self.file.close()
        self.check()

    def __enter__(self) -> Growing:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.close()
        else:
            self.file.close()


class _Sink:
    """File object that HDF5 writes into and that never raises an error.

    HDF5 would crash on an error. After the first error all writes are ignored. The error is kept
    in ``error``, and :class:`Growing` raises it.
    """

    def __init__(self, handle: int):
        self._handle, self._at, self._end = handle, 0, 0
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        if self.error is None:
            self._try(self._write_all, data)
        self._at += len(data)
        self._end = max(self._end, self._at)
        return len(data)

    def readinto(self, buffer) -> int:
        buffer = memoryview(buffer).cast("B")
        count = self._try(os.preadv, self._handle, [buffer], self._at) or 0
        buffer[count:] = bytes(len(buffer) - count)
        self._at += len(buffer)
        return len(buffer)

    def truncate(self, size: int) -> int:
        self._try(os.ftruncate, self._handle, size)
        self._end = size
        return size

    def flush(self) -> None:
        pass

    def _write_all(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._handle, data[done:], self._at + done)

    def _try(self, call, *arguments):
        """Return ``call(*arguments)``; after the first error, do nothing and return None."""
        if self.error is not None:
            return None
        try:
            return call(*arguments)
        except OSError as e:
            self.error = e
            return None


def _kind(mode: int) -> str:
    """Return a word for what a path is if it is not a plain file, such as ``a folder``.

    ``mode`` is the path's ``st_mode`` from :func:`os.stat`.
    """
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
