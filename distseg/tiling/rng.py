"""A counter-based random number generator, whose numbers do not depend on the layout.

A layout must not change dropout masks, augmentation or the order of samples. So no number may
depend on how many numbers were drawn before it. Each number is a hash of its purpose: (seed,
epoch, sample, layer, position). The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, OOPSLA 2014). Its output is a bijective mix of a counter that
advances by the golden ratio.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def key(*parts: int | str) -> int:
    """Return a 64-bit key of random numbers, made of parts such as ``(seed, epoch, 'dropout')``.

    A string enters the key as its CRC-32.
    """
    k = 0
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else int(part)
        k = _mix((k + _GOLDEN * ((number & _MASK) + 1)) & _MASK)
    return k


def uniform(k: int, count: int) -> np.ndarray:
    """Return the first ``count`` random numbers of key ``k``, as float64 in [0, 1)."""
    return uniform_of(k, np.arange(count, dtype=np.uint64))


def uniform_of(k: int, positions: np.ndarray) -> np.ndarray:
    """Return the random numbers of key ``k`` at the given positions, as float64 in [0, 1).

    Position ``n`` has number ``n`` of the sequence of the key, ``uniform(k, n + 1)[n]``.

    Args:
        k: the key, as :func:`key` returns it.
        positions: whole numbers of at least 0, of any shape, which is also the shape of the result.
    """
    return (_bits(k, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal_of(k: int, positions: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` normal random numbers of key ``k`` for each position, as float32.

    A number is one of the 65536 quantiles of the normal distribution, chosen by 16 random bits. So
    it lies between -4.33 and 4.33. The variance is 1 to a relative 3e-5.

    Args:
        k: the key, as :func:`key` returns it.
        positions: whole numbers of at least 0, of any shape.
        count: numbers for each position; the result is (count, *positions.shape).
    """
    quantiles = _quantiles()
    found = np.empty((count, *positions.shape), np.float32)
    for n in range(count):
        word, lane = divmod(n, 4)  # 64 bits are enough for four numbers
        if lane == 0:
            bits = _bits(key(k, word), positions)
        found[n] = quantiles[(bits >> np.uint64(16 * lane)).astype(np.uint16)]
    return found


@lru_cache
def _quantiles() -> np.ndarray:
    """Return the normal distribution's quantiles at (n + 1/2) / 65536, (65536,) float32."""
    inverse = NormalDist().inv_cdf
    lower = np.array([inverse((n + 0.5) / 65536) for n in range(32768)], np.float32)
    return np.concatenate([lower, -lower[::-1]])


def _bits(k: int, positions: np.ndarray) -> np.ndarray:
    """Return 64 random bits of key ``k`` at each position, a uint64 array like ``positions``."""
    with np.errstate(over="ignore"):
        z = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(k)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
        return z ^ (z >> np.uint64(31))


def permutation(k: int, count: int) -> np.ndarray:
    """Return the numbers 0 .. count-1 in a random order that depends only on key ``k``."""
    return np.argsort(uniform(k, count), kind="stable")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def uniform_at(k: int, positions: torch.Tensor) -> torch.Tensor:
    """Return the random numbers of key ``k`` at the given positions, as float64 in [0, 1).

    Position ``n`` has number ``n`` of the sequence of the key, ``uniform(k, n + 1)[n]``. The
    numbers are computed on the device of ``positions``.

    Args:
        k: the key, as :func:`key` returns it.
        positions: an int64 tensor of any shape, which is also the shape of the result.
    """

    def shift(z: torch.Tensor, bits: int) -> torch.Tensor:
        # torch has no unsigned 64-bit arithmetic: a mask makes the right shift a logical one.
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = (positions + 1) * _signed(_GOLDEN) + _signed(k)
    z = (z ^ shift(z, 30)) * _signed(_MIX1)
    z = (z ^ shift(z, 27)) * _signed(_MIX2)
    z = z ^ shift(z, 31)
    return shift(z, 11).to(torch.float64) * 2.0**-53
