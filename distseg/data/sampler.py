"""Choose the images, or crops of them, that make up an epoch.

Each sample is a pure function of (seed, epoch, index of the sample). So any rank can compute any
sample without drawing the samples before it. The order does not depend on the layout, and a resumed
run continues with the sample at which it stopped, on any mesh.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from distseg.config.settings import DataBase
from distseg.config.sizes import Size
from distseg.data.augment import Colour, Turn
from distseg.data.focus import focus_of
from distseg.data.intensity import Intensity
from distseg.data.store.store import Store
from distseg.data.surroundings import box_around, sizes_around
from distseg.data.warp import Elastic, Warp
from distseg.tiling import rng
from distseg.tiling.tile import Box, ReceptiveField


@dataclass(frozen=True)
class Sample:
    """A box of an image, and the augmentation to apply to it.

    The augmentation first warps the box, then changes its values, and then turns it.

    Attributes:
        image: the name of the image.
        box: the box of the image whose pixels count in the loss.
        turn: the flips and the rotation by a multiple of 90 degrees.
        number: the index of the sample in the epoch.
        colour: the change of the colours of each band; None if there is none.
        warp: the zoom, rotation and elastic deformation; None if there is none.
        intensity: the blur, and the changes of the values of all bands.
        around: the box of the image that the network sees: ``box`` and the context around it.
            None if there is no context.
    """

    image: str
    box: Box
    turn: Turn
    number: int
    colour: Colour | None = None
    warp: Warp | None = None
    intensity: Intensity = Intensity()
    around: Box | None = None

    @property
    def seen(self) -> Box:
        """The box of the image that the network sees, as coordinates from the start of ``box``."""
        return (self.around or self.box).relative_to(self.box)

    @property
    def size(self) -> tuple[int, ...]:
        """The size of the sample that the network sees, after the turn of the augmentation."""
        return self.turn.size(self.seen.size)

    @property
    def counted(self) -> Box:
        """The box of the turned sample whose pixels count in the loss; the rest is context."""
        seen = self.seen
        return self.turn.target(Box.whole(self.box.size).relative_to(seen), seen.size)


@dataclass(frozen=True)
class Rows:
    """Positions of one sample group's images in the list of all images of an optimizer step.

    The list is ordered by micro-batch, and within a micro-batch by group. With 2 groups and 2
    images each, group 1 has the positions 2 and 3 in micro-batch 0, and 6 and 7 in micro-batch 1.
    So all groups together compute the same micro-batches as a single group of all ranks would.

    Attributes:
        groups: number of sample groups.
        group: index of this group.
        micro_batches: number of micro-batches per optimizer step.
        images: number of images that a group has in a micro-batch.
    """

    groups: int
    group: int
    micro_batches: int
    images: int

    @property
    def total(self) -> int:
        """The number of images of all groups in an optimizer step."""
        return self.groups * self.micro_batches * self.images

    def row(self, micro_batch: int, image: int) -> int:
        """Return the position of an image in the list of all images of an optimizer step.

        Args:
            micro_batch: index of the micro-batch in the step.
            image: index of the image among those that this group has in the micro-batch.
        """
        return (micro_batch * self.groups + self.group) * self.images + image

    def of_micro_batch(self, micro_batch: int) -> list[int]:
        """Return which images of an optimizer step this group has in a micro-batch.

        The result has indices into the list of all images of the step.

        Args:
            micro_batch: index of the micro-batch in the step.
        """
        return [self.row(micro_batch, image) for image in range(self.images)]


def epoch_samples(
    store: Store,
    split: str,
    data: DataBase,
    seed: int,
    epoch: int,
    batch: int,
    context: ReceptiveField | None = None,
) -> Sequence[list[Sample]]:
    """Return the samples of each optimizer step of an epoch, as a sequence computed on access.

    An item is the list of exactly ``batch`` samples of one step. Without ``data.crop``, the samples
    are whole images in random order. The last step is filled with images from the beginning of this
    order. With ``data.crop``, crops are drawn independently. The image of a crop is drawn in
    proportion to its number of pixels, where an image smaller than the crop counts as one whole
    crop. The position of the crop in the image is uniform, or near a pixel of a class that the
    settings ``data.focus_class`` or ``data.focus_weights`` choose.

    Args:
        store: the store.
        split: the name of the split.
        data: the settings of the section ``data``.
        seed: seed of order, crops and augmentation.
        epoch: number of the epoch, which changes all random numbers.
        batch: number of samples of a step, over all sample groups and micro-batches.
        context: how many pixels around each crop the network must see at least
            (:func:`distseg.data.surroundings.box_around`); None if crops have no context.

    Raises:
        ValueError: the split is unknown; the crop and an image differ in their number of dims; or
            the settings place crops near a class, but there is no crop size, or no pixel of this
            class in the split.
    """
    return Epoch(store, split, data, seed, epoch, batch, context)


def crop_size(image, crop: Size | None) -> tuple[int, ...]:
    """Return the size of the samples of an image: the crop size, but at most the image's size.

    Args:
        image: the size of the image.
        crop: the crop size; None if samples are whole images.
    """
    return tuple(image) if crop is None else tuple(min(n, c) for n, c in zip(image, crop))


def sample_sizes(
    store: Store, data: DataBase, context: ReceptiveField | None = None, split: str = "train"
) -> dict[str, tuple[int, ...]]:
    """Return the size of the samples of each image, as a dict from the image's name.

    With ``context``, crops of one image can differ in size. Then the dict has each size only once,
    and its key is the name of an image that has samples of this size, and the size.

    Args:
        store: the store.
        data: the settings of the section ``data``.
        context: how many pixels around each crop the network must see at least
            (:func:`distseg.data.surroundings.box_around`); None if crops have no context.
        split: the name of the split.
    """
    if context is None or data.crop is None:
        return {name: crop_size(store.size(name), data.crop) for name in store.split(split)}
    found: dict[tuple[int, ...], str] = {}
    for name in store.split(split):
        image = tuple(store.size(name))
        crop = crop_size(image, data.crop)
        quarters = (0, 1) if "turn" in data.augment else (0,)
        for turn in (Turn((False,) * len(image), quarter) for quarter in quarters):
            for size in sizes_around(crop, turn.size(image), context):
                found.setdefault(size, name)
    return {f"{name} ({Size(size)})": size for size, name in found.items()}


class Epoch(Sequence):
    """Sequence of the optimizer steps of an epoch: ``epoch[step]`` is a list of samples.

    The arguments are those of :func:`epoch_samples`.
    """

    def __init__(
        self,
        store: Store,
        split: str,
        data: DataBase,
        seed: int,
        epoch: int,
        batch: int,
        context: ReceptiveField | None = None,
    ):
        self._context = None if data.crop is None else context
        self._store, self._data, self._batch, self._keys = store, data, batch, (seed, epoch)
        self._names = store.split(split)
        _check(store, self._names, data)
        self._focus = focus_of(store, split, data)
        self._order = rng.permutation(rng.key(seed, epoch, "order"), len(self._names))
        samples = len(self._names)
        if data.crop is not None:
            self._shares, all_crops = _crops(store, self._names, data.crop)
            samples = data.epoch_samples or all_crops
        self._steps = -(-samples // batch)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> list[Sample]:
        if not 0 <= step < self._steps:
            raise IndexError(step)  # ends a loop over the epoch
        numbers = range(step * self._batch, (step + 1) * self._batch)
        return [
            self._crop(number) if self._data.crop is not None else self._whole(number)
            for number in numbers
        ]

    def _whole(self, number: int) -> Sample:
        name = self._names[self._order[number % len(self._names)]]
        turn, size = self._turned(name, number)
        return self._sample(name, Box.whole(size), turn, number)

    def _crop(self, number: int) -> Sample:
        """Return a random crop: anywhere in a random image, or near a pixel of a chosen class."""
        near, where, block, pixel, *place = rng.uniform(
            rng.key(*self._keys, number, "crop"), 4 + len(self._data.crop)
        )
        if self._focus is not None and near < self._data.focus_share:
            (kind,) = rng.uniform(rng.key(*self._keys, number, "class"), 1)
            name, target = self._focus.pixel(kind, where, block, pixel)
        else:
            name, target = self._names[int(np.searchsorted(self._shares, where, "right"))], None
        turn, size = self._turned(name, number)
        origin = _origin(self._store.size(name), size, place, target)
        return self._sample(name, Box.whole(size).shifted(origin), turn, number)

    def _sample(self, name: str, box: Box, turn: Turn, number: int) -> Sample:
        """Return the sample for a box of the image ``name``, with its random augmentation.

        ``number`` is the index of the sample in the epoch, which determines the random numbers.
        """
        intensity, around = self._intensity(number), self._around(name, box, turn)
        seen = (around or box).relative_to(box)
        warp = self._warp(number, box.size, seen, intensity.margin)
        return Sample(name, box, turn, number, self._coloured(number), warp, intensity, around)

    def _around(self, name: str, box: Box, turn: Turn) -> Box | None:
        """Return the box of the image that the network sees: the crop ``box`` and its context.

        The result is None if crops have no context. The box is chosen so that in the turned image
        its start is a multiple of the network's stride.
        """
        if self._context is None:
            return None
        image = self._store.size(name)
        turned = box_around(turn.target(box, image), turn.size(image), self._context)
        return turn.source(turned, image)

    def _warp(self, number: int, size: tuple[int, ...], seen: Box, margin: int) -> Warp | None:
        """Return a random warp, or None if no setting asks for one.

        Args:
            number: the index of the sample in the epoch, which determines the warp.
            size: the size of the crop before the turn; the warp does not move its centre.
            seen: the box to warp, as coordinates from the start of the crop.
            margin: the number of pixels around ``seen`` that are warped too.
        """
        scale = self._drawn(number, "augment_scale", 1.0, logarithmic=True)
        degrees = self._drawn(number, "augment_rotate", 0.0)
        tilts = tuple(self._drawn(number, "augment_tilt", 0.0, part=f"dim {d}") for d in (1, 2))
        amplitude = self._drawn(number, "augment_elastic", 0.0)
        if (scale, degrees, *tilts, amplitude) == (1, 0, 0, 0, 0):
            return None
        elastic = None
        if amplitude:
            elastic = Elastic(
                rng.key(*self._keys, number, "elastic"),
                amplitude,
                self._data.augment_smoothness,
                tuple(a - margin for a in seen.start),
                tuple(b + margin for b in seen.stop),
            )
        return Warp(size, scale, degrees, elastic, tilts)

    def _intensity(self, number: int) -> Intensity:
        return Intensity(
            blur=self._drawn(number, "augment_blur", 0.0),
            gamma=self._drawn(number, "augment_gamma", 1.0, logarithmic=True),
            contrast=self._drawn(number, "augment_contrast", 1.0),
            brightness=self._drawn(number, "augment_brightness", 0.0),
            noise=(noise := self._drawn(number, "augment_noise", 0.0)),
            key=rng.key(*self._keys, number, "noise") if noise else 0,
        )

    def _drawn(
        self, number: int, name: str, unchanged: float, logarithmic: bool = False, part: str = ""
    ) -> float:
        """Return a random number from the range that a setting gives, or ``unchanged``.

        Args:
            number: the index of the sample in the epoch, which determines the result.
            name: the setting, such as ``augment_scale``.
            unchanged: the result if the setting is not set, and for samples that are left
                unchanged because ``data.augment_share`` is below 1.
            logarithmic: True to draw the logarithm of the number uniformly.
            part: a text that tells apart several numbers of one sample from the same setting.
        """
        ends = getattr(self._data, name)
        if ends is None:
            return unchanged
        taken, where = rng.uniform(rng.key(*self._keys, number, name + part), 2).tolist()
        if taken >= self._data.augment_share:
            return unchanged
        least, most = ends
        if logarithmic:
            return float(least * (most / least) ** where)
        return float(least + (most - least) * where)

    def _coloured(self, number: int) -> Colour | None:
        if "colour" not in self._data.augment:
            return None
        return Colour.from_uniform(
            rng.uniform(rng.key(*self._keys, number, "colour"), 2 * self._store.bands)
        )

    def _turned(self, name: str, number: int) -> tuple[Turn, tuple[int, ...]]:
        """Return a random turn, and the size of the box to read from the image for it.

        The turn makes a sample of the size that :func:`crop_size` gives from the pixels of this
        box. If the box for a turn by 90 degrees does not fit into the image, the turn is by 0 or
        180 degrees.

        Args:
            name: the name of the image.
            number: the index of the sample in the epoch, which determines the turn.
        """
        image = self._store.size(name)
        size, dims = crop_size(image, self._data.crop), len(image)
        quarter, *mirror = rng.uniform(rng.key(*self._keys, number, "turn"), 1 + dims)
        flips, quarters = (False,) * dims, 0
        if "flip" in self._data.augment:
            flips = tuple(bool(m < 0.5) for m in mirror)
        if "turn" in self._data.augment:
            fits = all(n <= m for n, m in zip(Turn(flips, 1).size(size), image))
            quarters = int(4 * quarter) if fits else 2 * int(2 * quarter)
        turn = Turn(flips, quarters)
        return turn, turn.size(size)


def _crops(store: Store, names: list[str], crop: Size) -> tuple[np.ndarray, int]:
    """Return the cumulative probabilities of the images, and the number of crops in an epoch.

    The probability of an image is the probability that a crop is drawn from it. It is in proportion
    to the image's pixels, where an image smaller than the crop counts as one whole crop.

    Args:
        store: the store.
        names: the names of the images.
        crop: the crop size.
    """
    sizes = [store.size(name) for name in names]
    weights = [
        float(Size(size).volume) * (crop.volume / Size(crop_size(size, crop)).volume)
        for size in sizes
    ]
    shares = np.cumsum(weights)
    return shares / shares[-1], number_of_crops(sizes, crop)  # No random number reaches 1.


def number_of_crops(sizes: Iterable[Sequence[int]], crop: Size) -> int:
    """Return the number of crops in an epoch.

    It is (pixels of an image) / (pixels of a crop of this image), summed over all images and
    rounded up. A crop has at most the size of its image.

    Args:
        sizes: the sizes of all images.
        crop: the crop size.
    """
    pixels: Counter[int] = Counter()  # pixels of all images whose crops have this number of pixels
    for size in sizes:
        pixels[Size(crop_size(size, crop)).volume] += Size(size).volume
    return math.ceil(sum(Fraction(total, taken) for taken, total in pixels.items()))


def _origin(image, size, place, target) -> tuple[int, ...]:
    """Return the position in the image of the first pixel of a random crop.

    Args:
        image: the size of the image.
        size: the size of the crop.
        place: random numbers in [0, 1), one per dim.
        target: the position of a pixel of the image that must lie in the crop. It lies in the
            crop's central half unless it is too near to the border of the image. None places the
            crop anywhere.
    """
    if target is None:
        return tuple(int(u * (n - c + 1)) for u, n, c in zip(place, image, size))
    return tuple(
        max(0, min(n - c, t - int((0.25 + u / 2) * c)))
        for u, n, c, t in zip(place, image, size, target)
    )


def check_tilt(data: DataBase, size: Sequence[int], image: str) -> None:
    """Refuse the setting ``data.augment_tilt`` for images that are no volumes.

    Args:
        data: the settings of the section ``data``.
        size: the size of an image.
        image: the subject and verb of the message, such as ``images have``.

    Raises:
        ValueError: ``augment_tilt`` is set, and ``size`` does not have 3 dims.
    """
    if data.augment_tilt is not None and len(size) != 3:
        raise ValueError(
            f"data.augment_tilt is {data.augment_tilt}, but {image} {len(size)} dims "
            f"({Size(size)}), and only volumes can be tilted: leave data.augment_tilt out"
        )


def _check(store: Store, names: list[str], data: DataBase) -> None:
    """Refuse settings of crops and tilts that do not fit each other or the sizes of the images."""
    for setting in ("focus_class", "focus_weights"):
        if data.crop is None and getattr(data, setting) is not None:
            raise ValueError(
                f"data.{setting} is {getattr(data, setting)!r}, but without data.crop the samples "
                f"are whole images: set data.crop, or leave data.{setting} out"
            )
    for name in names:
        check_tilt(data, store.size(name), f"image {name!r} has")
        if data.crop is not None and len(data.crop) != len(store.size(name)):
            raise ValueError(
                f"data.crop is {data.crop}, but image {name!r} has {len(store.size(name))} dims "
                f"({Size(store.size(name))}): set data.crop to a size with this number of dims"
            )
