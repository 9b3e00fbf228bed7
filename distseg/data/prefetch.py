"""Make items in advance: a thread makes the next items while the main thread computes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
_END = object()


def prefetch(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield ``items``, while a thread makes up to ``depth`` of the next items in advance.

    If making an item fails, the error is raised when the consumer asks for that item. The thread
    ends with the last item, or when the consumer stops.

    Args:
        items: an iterable whose iteration makes the items.
        depth: number of items made in advance. With 0 no thread is started, and each item is made
            when the consumer asks for it.
    """
    if depth < 1:
        yield from items
        return
    reader = _Reader(items, depth)
    try:
        yield from reader
    finally:
        reader.stop()


class _Reader:
    def __init__(self, items: Iterable, depth: int):
        self._items, self._ready = items, SimpleQueue()
        self._free, self._stopped = threading.Semaphore(depth), False
        self._thread = threading.Thread(target=self._work, name="distseg-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator:
        while True:
            item, error = self._ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            self._free.release()
            yield item

    def stop(self) -> None:
        self._stopped = True
        self._free.release()
        self._thread.join()

    def _work(self) -> None:
        try:
            source = iter(self._items)
            while self._free.acquire() and not self._stopped:
                item = next(source, _END)
                self._ready.put((item, None))
                if item is _END:
                    return
        except BaseException as e:
            self._ready.put((None, e))
