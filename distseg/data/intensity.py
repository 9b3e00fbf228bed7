"""Random changes of pixel values: blur, gamma, contrast, brightness and noise.

They are applied to normalised images, so 0 is the mean of a band and 1 its standard deviation.
Every pixel is computed by the same operations in the same order, whatever box a rank reads. So a
pixel has the same bits in a box as in the whole changed sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from distseg.tiling import rng
from distseg.tiling.tile import Box, numbers

_GAMMA_RANGE = np.float32(3)  # standard deviations around the mean within which gamma acts


@dataclass(frozen=True)
class Intensity:
    """Change of the pixel values of one normalised sample: blur, gamma, contrast and so on.

    Attributes:
        blur: standard deviation of a Gaussian filter, in pixels; 0 changes nothing.
        gamma: exponent of the values; 1 changes nothing.
        contrast: factor of the distance from the mean; 1 changes nothing.
        brightness: offset in standard deviations of the band; 0 changes nothing.
        noise: standard deviation of Gaussian noise, in standard deviations of the band; 0 for no
            noise.
        key: the key of the random numbers of the noise.
    """

    blur: float = 0.0
    gamma: float = 1.0
    contrast: float = 1.0
    brightness: float = 0.0
    noise: float = 0.0
    key: int = 0

    @property
    def margin(self) -> int:
        """The number of pixels at each side of a box that the blur of the box reads."""
        return math.ceil(3 * self.blur)

    def blurred(
        self, pixels: np.ndarray, absent: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the blurred pixels without the margin, and a mask of the pixels without data.

        A pixel without data has no weight and stays without data; the weights of the other pixels
        are scaled up. So the border of the image is neither dark nor bright. The mask is None if
        all pixels have data.

        Args:
            pixels: (C, *size) float32 with the margin at all sides, 0 where they have no data.
            absent: True where pixels have no data, (C or 1, *size); None if all have data.
        """
        if not self.margin:
            return pixels, absent
        weights = _gaussian(self.blur, self.margin)
        found = _filtered(pixels, weights)
        if absent is None or not absent.any():
            return found, None
        cut = (slice(None), *(slice(self.margin, -self.margin) for _ in pixels.shape[1:]))
        gone = np.ascontiguousarray(absent[cut])
        lost = _filtered(absent.astype(np.float32), weights)
        found /= np.where(gone, np.float32(1), 1 - lost)
        np.copyto(found, np.float32(0), where=gone)
        return found, gone

    def changed(self, pixels: np.ndarray, box: Box, size: tuple[int, ...]) -> np.ndarray:
        """Return pixels after gamma, contrast, brightness and noise, in this order.

        Args:
            pixels: the pixels of ``box``, (C, *box.size) float32, which may be changed in place.
            box: the box of the sample in which the pixels lie.
            size: the size of the whole sample. The noise of a pixel depends on its index in the
                whole sample, so it is the same in every box that contains the pixel.
        """
        if self.gamma != 1:
            pixels = _with_gamma(pixels, self.gamma)
        if self.contrast != 1:
            pixels = pixels * np.float32(self.contrast)
        if self.brightness:
            pixels = pixels + np.float32(self.brightness)
        if self.noise:
            noise = rng.normal_of(self.key, numbers(box, size), len(pixels))
            noise *= np.float32(self.noise)
            pixels = np.add(noise, pixels, out=noise)
        return pixels


def _gaussian(sigma: float, margin: int) -> np.ndarray:
    """Return the weights of a Gaussian filter, (2 * margin + 1,) float32; their sum is 1.

    ``sigma`` is the standard deviation in pixels.
    """
    weights = np.exp(-0.5 * (np.arange(-margin, margin + 1) / sigma) ** 2)
    return (weights / weights.sum()).astype(np.float32)


def _filtered(bands: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return bands filtered along each spatial dim, without the margin at each side.

    Args:
        bands: (C, *size) float32, with the margin.
        weights: (2 * margin + 1,) the symmetric weights of the filter.
    """
    margin, found = len(weights) // 2, []
    for values in bands:  # a band alone may fit into the processor's cache
        for dim in range(values.ndim):
            length = values.shape[dim] - 2 * margin
            before = (slice(None),) * dim

            def cut(start: int) -> np.ndarray:
                return values[(*before, slice(start, start + length))]

            total = cut(margin) * weights[margin]
            for away in range(1, margin + 1):
                pair = cut(margin - away) + cut(margin + away)
                pair *= weights[margin + away]
                total += pair
            values = total
        found.append(values)
    return np.stack(found)


def _with_gamma(pixels: np.ndarray, gamma: float) -> np.ndarray:
    """Return normalised pixels after gamma correction with the exponent ``gamma``.

    A value from -3 to 3 is scaled to 0 .. 1, raised to the power ``gamma`` and scaled back. Values
    outside this range do not change.
    """
    inside = np.clip(pixels, -_GAMMA_RANGE, _GAMMA_RANGE)
    raised = (inside + _GAMMA_RANGE) / (2 * _GAMMA_RANGE)
    np.power(raised, np.float32(gamma), out=raised)
    raised *= 2 * _GAMMA_RANGE
    raised -= _GAMMA_RANGE
    raised += pixels - inside
    return raised
