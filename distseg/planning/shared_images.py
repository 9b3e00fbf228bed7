"""Predict what a rank computes besides its layers because other ranks have parts of its images.

A halo exchange copies tensors, and a norm whose statistics several ranks share reads its feature
map once more. Both move bytes (:attr:`distseg.planning.machine.Machine.sharing`), and both call
some small operations, whose time does not depend on the size of a tensor (``Machine.exchange``).
The seconds of the messages themselves are counted elsewhere.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from distseg.planning.machine import Machine

MOMENTS = 3 * 8  # bytes of the moments (count, mean, sum of squares) of a channel in float64
Bytes = TypeVar("Bytes", float, np.ndarray)
"""Bytes of one tile, or an array with those of several tiles."""


def exchange_seconds(machine: Machine, owned: Bytes, halo: Bytes) -> tuple[Bytes, Bytes]:
    """Return the seconds that a rank computes for a halo exchange, forward and backward.

    Args:
        machine: the machine.
        owned, halo: bytes as for :func:`exchange_bytes`.
    """
    there, back = exchange_bytes(owned, halo)
    return (
        machine.exchange + there / machine.sharing_rate,
        machine.exchange + back / machine.sharing_rate,
    )


def exchange_bytes(owned: Bytes, halo: Bytes) -> tuple[Bytes, Bytes]:
    """Return the bytes that a rank reads and writes for a halo exchange, forward and backward.

    Forward, the owned cells are copied into a tensor that has space for the halo. The cells for
    other ranks are copied into messages, and those of other ranks from messages into the tensor.
    Backward, gradients are copied into messages, and those from messages are added in place. A copy
    reads and writes each byte; an addition also reads the sum so far.

    Args:
        owned: bytes of the layer's input that the rank has before the exchange.
        halo: bytes that the rank receives; it sends about as many.
    """
    return 2 * owned + 4 * halo, 5 * halo


def norm_seconds(machine: Machine, size: Bytes) -> tuple[Bytes, Bytes]:
    """Return the additional seconds, (forward, backward), of a norm whose statistics are shared.

    Args:
        machine: the machine.
        size: bytes of the norm's feature map on this rank.
    """
    there, back = norm_bytes(size)
    return (
        machine.exchange + there / machine.sharing_rate,
        machine.exchange + back / machine.sharing_rate,
    )


def norm_bytes(size: Bytes) -> tuple[Bytes, Bytes]:
    """Return the additional bytes, (forward, backward), that a norm with shared statistics reads.

    A norm of images that one rank has whole reads each channel twice in a row, the second time from
    the cache. If statistics are shared, the message comes between the two, and the feature map is
    read from memory again. In the backward pass, the gradient of the feature map is read again too.

    Args:
        size: bytes of the norm's feature map on this rank.
    """
    return size, 2 * size
