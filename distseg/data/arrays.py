"""Images and targets that a user holds in memory or in a file, read box by box.

An array is anything with ``shape`` that takes slices: a tensor, a NumPy array or memory map, a
dataset of h5py or zarr. Only the boxes that a rank needs are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from distseg.config.sizes import Size
from distseg.layers.packed_targets import TargetForm
from distseg.tiling.tile import Box

_WIDER = {np.dtype("u2"): np.int32, np.dtype("u4"): np.int64, np.dtype("u8"): np.int64}


class Arrays:
    """Images, or targets of images, that a user gives as arrays; they may differ in their size.

    Args:
        given: one array (B, ..., *size), one image without its batch dim, or a list of images.
        dims: number of spatial dims.
        lead: the numbers of dims that one image may have before its spatial dims, such as (1,) for
            (C, *size).
        what: name of the user's argument, for error messages.
        batch: True if an array has a batch dim, False if not. With None, an array is a batch if its
            shape without the first dim is that of an image that ``lead`` allows.

    Raises:
        ValueError: ``given`` has no shape, or a wrong number of dims.
    """

    def __init__(self, given, dims: int, lead: Sequence[int], what: str, batch: bool | None = None):
        self.dims, self._batch = dims, None
        self.is_list = isinstance(given, (list, tuple))
        if self.is_list:
            self._images = [_array(one, what) for one in given]
        else:
            array = _array(given, what)
            if batch is None:
                batch = len(array.shape) - dims - 1 in lead
            self._batch, self._images = (array, []) if batch else (None, [array])
        shapes = [self._batch.shape] if self._batch is not None else [x.shape for x in self._images]
        extra = 1 if self._batch is not None else 0
        for shape in shapes:
            if len(shape) - dims - extra not in lead:
                wanted = " or ".join(
                    f"({', '.join([*['channels'] * n, *['size'] * dims])})" for n in lead
                )
                raise ValueError(
                    f"{what} has the shape {tuple(shape)}, but an image of {dims} spatial dims has "
                    f"{wanted}, or one dim more for a batch: add or drop a dim"
                )

    @property
    def is_batch(self) -> bool | None:
        """True for an array with a batch dim, False for one image, None for several in a list.

        A list of one image counts as one image.
        """
        if self._batch is not None:
            return True
        return False if len(self._images) == 1 else None

    def __len__(self) -> int:
        return len(self._images) if self._batch is None else self._batch.shape[0]

    def size(self, image: int) -> tuple[int, ...]:
        """Return the size in pixels of the image with the index ``image``."""
        shape = self._shape(image)
        return tuple(map(int, shape[len(shape) - self.dims :]))

    def channels(self, image: int) -> int:
        """Return the number of channels of the image with the index ``image``."""
        shape = self._shape(image)
        return int(shape[len(shape) - self.dims - 1])

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        """The dtype of the first image, and its shape without the spatial dims, such as (C,)."""
        shape = tuple(map(int, self._shape(0)))[self._batch is not None :]
        array = self._images[0] if self._batch is None else self._batch
        return str(array.dtype), shape[: len(shape) - self.dims]

    @property
    def target_form(self) -> TargetForm:
        """The dtype, after :func:`widened`, and the channels of the first target."""
        array = self._images[0] if self._batch is None else self._batch
        dtype = array.dtype
        if not isinstance(dtype, torch.dtype):
            dtype = torch.from_numpy(np.empty(0, _readable(dtype))).dtype
        lead = self.form[1]
        return TargetForm(
            dtype if dtype.is_floating_point else torch.int64, lead[0] if lead else None
        )

    def _shape(self, image: int):
        return self._images[image].shape if self._batch is None else self._batch.shape

    def read(self, images: Sequence[int], box: Box) -> Tensor:
        """Return the pixels of one box in several images, (images, ..., *box.size).

        Args:
            images: the indices of the images, which must have the same size.
            box: the box of pixels to read.
        """
        if self._batch is None:
            return torch.stack([_read(self._images[i], (), box, self.dims) for i in images])
        if list(images) == list(range(images[0], images[-1] + 1)):
            return _read(self._batch, (slice(images[0], images[-1] + 1),), box, self.dims)
        return torch.stack([_read(self._batch, (i,), box, self.dims) for i in images])

    def by_size(self, images: Sequence[int]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Group images by size: yield each size, and the indices of the images that have it.

        The sizes are in the order in which they first occur.

        Args:
            images: the indices of the images to group.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for image in images:
            found.setdefault(self.size(image), []).append(image)
        yield from found.items()


class Stacked:
    """Several inputs of a network, read as one input in which their channels are concatenated.

    Args:
        parts: the images of each input.

    Raises:
        ValueError: the inputs differ in their number of images or in the size of an image.
    """

    def __init__(self, parts: Sequence[Arrays]):
        self.parts = list(parts)
        first = self.parts[0]
        for number, part in enumerate(self.parts[1:], 1):
            if len(part) != len(first):
                raise ValueError(
                    f"input 0 has {len(first)} images, but input {number} has {len(part)}: give "
                    "the same number of images for each input"
                )
            for image in range(len(first)):
                if part.size(image) != first.size(image):
                    raise ValueError(
                        f"input 0 of image {image} has {Size(first.size(image))} pixels, but "
                        f"input {number} has {Size(part.size(image))}: resize one of them"
                    )
        self.size, self.by_size = first.size, first.by_size
        self.is_batch, self.is_list = first.is_batch, first.is_list

    def __len__(self) -> int:
        return len(self.parts[0])

    def channels(self, image: int) -> int:
        """Return the number of channels of all inputs together, for the image of this index."""
        return sum(part.channels(image) for part in self.parts)

    def read(self, images: Sequence[int], box: Box) -> Tensor:
        """Return the pixels of one box in several images, (images, channels, *box.size).

        Args:
            images: the indices of the images, which must have the same size.
            box: the box of pixels to read.
        """
        return torch.cat([part.read(images, box) for part in self.parts], 1)


class OutputTargets:
    """Targets of several outputs of a network, one for each output.

    Args:
        parts: the targets of each output: images, or one number for each image (images,).
        forms: the dtype and the channels of the targets of each output.
    """

    def __init__(self, parts: Sequence[Arrays | Tensor], forms: Sequence[TargetForm]):
        self.parts, self.forms = list(parts), list(forms)


def _array(given, what: str):
    """Return ``given`` unchanged if it is an array, and as a tensor if it is a number.

    Args:
        given: one image, one batch of images, or one target.
        what: name of the argument, for error messages.

    Raises:
        ValueError: ``given`` is no array and no number, is complex, or requires a gradient.
    """
    if isinstance(given, (int, float)):
        return torch.tensor(given)
    if not hasattr(given, "shape") or not hasattr(given, "__getitem__"):
        raise ValueError(
            f"{what} is a {type(given).__name__}, but an array is needed that has a shape and "
            "takes slices: a tensor, a NumPy array or memory map, a dataset of h5py or zarr"
        )
    if "complex" in str(getattr(given, "dtype", "")):
        raise ValueError(
            f"{what} has the dtype {given.dtype}, but real numbers are needed: give its real part, "
            "or real and imaginary part as two channels"
        )
    if isinstance(given, Tensor) and given.requires_grad:
        raise ValueError(
            f"{what} has requires_grad, but gradients are computed for parameters only: give "
            f"{what}.detach()"
        )
    return given


def _read(array, lead: tuple, box: Box, dims: int) -> Tensor:
    """Return a box of an array as a tensor, in a dtype that PyTorch has.

    Args:
        array: the array. Its dims are those indexed by ``lead``, then channels if it has any, then
            the spatial dims.
        lead: indices along the first dims of the array, such as the image in a batch.
        box: the box along the last dims.
        dims: number of spatial dims.
    """
    between = (slice(None),) * (len(array.shape) - len(lead) - dims)
    found = array[(*lead, *between, *box.slices)]
    if isinstance(found, Tensor):
        return found.detach()
    found = np.asarray(found)
    return torch.from_numpy(np.ascontiguousarray(found, dtype=_readable(found.dtype)))


def _readable(dtype) -> np.dtype:
    """Return the dtype that PyTorch has for values of a NumPy dtype."""
    dtype = np.dtype(dtype)
    return np.dtype(_WIDER.get(dtype, dtype.newbyteorder("=")))


def widened(targets: Tensor) -> Tensor:
    """Return integer targets as int64 and floating-point targets unchanged.

    In a smaller integer dtype, labels could not be compared with any ``ignore_index``.
    """
    return targets if targets.is_floating_point() else targets.long()
