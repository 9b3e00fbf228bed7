"""Count the bytes of tensors that are alive while PyTorch code runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of storages that kernels make while it is on.

    A storage counts from the call that makes it until it is freed. The scratch memory inside a
    kernel is not seen.

    Args:
        device: the type of the device whose tensors count, such as ``cpu`` or ``meta``.
        known: tensors that exist already and are not counted.

    Attributes:
        bytes: the bytes that are alive now.
        peak: the most bytes that were alive at once.
    """

    def __init__(self, device: str, known: Iterable[Tensor] = ()):
        super().__init__()
        self.device = device
        self.bytes = self.peak = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        result = kernel(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size
