"""Image files that a process holds open, to read the pixels of a store that refers to files.

PNG, JPEG and other files can only be decoded as a whole. So the decoded pixels of the files that
were read last are kept, up to a fixed number of bytes.
"""

from __future__ import annotations

import threading

from distseg.data.formats.base import Reader
from distseg.data.store.source import Source

MOST_KEPT = 256 << 20  # bytes of decoded pixels of all files that are held open
_MOST_OPEN = 64  # most files that are held open


class OpenFiles:
    """Cache of the image files to which one store refers, open in one process.

    If the cache is full, the file that was used longest ago is closed first.

    Several threads may use one object. A forked process needs its own object, and must keep the
    object of its parent alive, because handles of GDAL cannot be closed after a fork.

    Args:
        store: the store.
        most_decoded: the largest number of files whose decoded pixels are kept; None for as many as
            fit into 256 MiB.
    """

    def __init__(self, store: str, most_decoded: int | None = None):
        self._store, self._lock = store, threading.Lock()
        self._most_decoded = _MOST_OPEN if most_decoded is None else most_decoded
        self._readers: dict[tuple, Reader] = {}  # the one that was used last comes last

    def reader(self, source: Source) -> Reader:
        """Return the reader of an image, and open its file unless it is open.

        Raises:
            ValueError: a file has changed or is gone, or cannot be read.
        """
        with self._lock:
            found = self._readers.pop(source.key, None)
            if found is None:
                found = source.open(self._store)
            self._readers[source.key] = found
            while len(self._readers) > 1 and not self._fits():
                self._readers.pop(next(iter(self._readers)))
        return source.image(found)

    def _fits(self) -> bool:
        """Return True if the number of open files and their decoded bytes are within the limits."""
        kept = [reader.kept for reader in self._readers.values() if reader.kept]
        return (
            sum(kept) <= MOST_KEPT
            and len(kept) <= self._most_decoded
            and len(self._readers) <= _MOST_OPEN
        )
