"""Read what one rank needs for a step: the windows of its tiles, and the tiles' labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from distseg.config.settings import DataConfig
from distseg.config.sizes import Size
from distseg.data.prefetch import prefetch
from distseg.data.sample_reader import label_bytes, pixel_bytes, read_labels, read_pixels
from distseg.data.sampler import Rows, Sample, epoch_samples, sample_sizes
from distseg.data.store.store import Store
from distseg.tiling.tile import Box, ReceptiveField, TilePlacement, check_grid, owned_tiles
from distseg.tiling.tile_batch import LazyTileBatch, TileBatch


def pieces(
    store: Store,
    samples: Sequence[Sample],
    grid,
    per_rank,
    coordinates,
    reach: ReceptiveField,
    pixels: bool = True,
    labels: bool = True,
) -> list[TileBatch]:
    """Return the tile batches that one rank reads for a micro-batch.

    A tile batch holds the pixels and labels of one tile for all samples of the same size. The
    sizes come in the order of their first sample. For each size, the tiles come row by row.

    Args:
        store: the store.
        samples: the samples of the micro-batch.
        grid: number of ranks along each dim that share an image.
        per_rank: number of tiles of each rank along each dim.
        coordinates: position of this rank in the grid.
        reach: the receptive field of the network, which determines the halo around a tile.
        pixels: True to read the pixels.
        labels: True to read the labels.
    """
    return [
        _read(store, those, place, pixels, labels)
        for those, place in _places(samples, grid, per_rank, coordinates, reach)
    ]


def blocks(
    store: Store,
    samples: Sequence[Sample],
    grid,
    coordinates,
    stride,
    note_bytes: Callable[[int], None],
) -> list[LazyTileBatch]:
    """Return the lazy tile batches of a rank for a micro-batch that is streamed.

    There is one for each size of samples. It covers the single tile that the rank owns of these
    samples. Boxes of its pixels and labels are read from the store while the optimizer step runs.

    Args:
        store: the store.
        samples: the samples of the micro-batch.
        grid: number of ranks along each dim that share an image.
        coordinates: position of this rank in the grid.
        stride: the total stride of the network along each dim. Tile borders lie on its multiples.
        note_bytes: called with the number of bytes of each read.
    """

    def block(those: list[Sample], place: TilePlacement) -> LazyTileBatch:
        def pixels(box: Box) -> torch.Tensor:
            note_bytes(sum(pixel_bytes(store, s, box) for s in those))
            return torch.from_numpy(read_pixels(store, those, box))

        def labels(box: Box) -> torch.Tensor:
            note_bytes(sum(label_bytes(store, s, box) for s in those))
            return read_labels(store, those, box)

        return LazyTileBatch(place, pixels, labels)

    ones, no_halo = Size((1,) * len(grid)), ReceptiveField((0,) * len(grid), stride)
    return [block(*found) for found in _places(samples, grid, ones, coordinates, no_halo)]


def _places(
    samples: Sequence[Sample], grid, per_rank, coordinates, reach: ReceptiveField
) -> Iterator[tuple[list[Sample], TilePlacement]]:
    """Yield samples of one size and a tile's placement, for each size and tile of this rank.

    The arguments are those of :func:`pieces`.
    """
    positions: dict[tuple[int, ...], list[int]] = {}
    for position, sample in enumerate(samples):
        positions.setdefault(sample.size, []).append(position)
    for size, images in positions.items():
        for tile, window in owned_tiles(size, grid, per_rank, coordinates, reach):
            yield (
                [samples[i] for i in images],
                TilePlacement(
                    size, tile, window, tuple(images), tuple(samples[i].number for i in images)
                ),
            )


def _read(
    store: Store, samples: list[Sample], place: TilePlacement, pixels: bool, labels: bool
) -> TileBatch:
    """Read one tile of samples of the same size, and return it as a tile batch.

    ``pixels`` and ``labels`` are True to read them; otherwise the tile batch has None.
    """
    return TileBatch(
        torch.from_numpy(read_pixels(store, samples, place.window)) if pixels else None,
        read_labels(store, samples, place.tile) if labels else None,
        place,
    )


class StepLoader:
    """Loader of the data that one rank needs for the optimizer steps of an epoch.

    A step has ``groups`` x ``accumulate`` x ``data.images`` samples. The samples are ordered by
    micro-batch, and within a micro-batch by group. The attribute ``steps_read`` counts the steps
    that were yielded, ``bytes_read`` the bytes that were read from the store.

    Args:
        store: the store.
        split: the split to read.
        data: the settings of the section ``data``.
        seed: seed of order, crops and augmentation.
        groups: number of sample groups (replicas).
        group: index of the sample group of this rank.
        accumulate: number of micro-batches per optimizer step.
        grid: number of ranks along each dim that share an image.
        per_rank: number of tiles of each rank along each dim.
        coordinates: position of this rank in the grid.
        reach: the receptive field of the network.
        pixels: True to read the pixels. In a pipeline, only the first stage needs them.
        labels: True to read the labels. In a pipeline, only the last stage needs them.
        streaming: True to yield :class:`LazyTileBatch`, which reads its parts during the step.
        context: how many pixels around each crop the network must see at least
            (:func:`distseg.data.surroundings.box_around`); None if crops have no context.

    Raises:
        ValueError: an image of the split has no labels, or is too small for the grid.
    """

    def __init__(
        self,
        store: Store,
        split: str,
        data: DataConfig,
        *,
        seed: int,
        groups: int,
        group: int,
        accumulate: int,
        grid,
        per_rank,
        coordinates,
        reach: ReceptiveField,
        pixels: bool = True,
        labels: bool = True,
        streaming: bool = False,
        context: ReceptiveField | None = None,
    ):
        self.store, self.split, self.data, self.seed = store, split, data, seed
        self.groups, self.group, self.accumulate = groups, group, accumulate
        self.grid, self.per_rank, self.coordinates, self.reach = grid, per_rank, coordinates, reach
        self.pixels, self.labels, self.streaming = pixels, labels, streaming
        self.context = context
        self.bytes_read = self.steps_read = 0
        self.steps_per_epoch = len(self._samples(0))
        self._check_images()

    def epoch(self, number: int, first_step: int = 0) -> Iterator[list[list[TileBatch]]]:
        """Yield the data of each optimizer step of an epoch: tile batches for each micro-batch.

        The outer list has one entry per micro-batch, the inner list one per tile batch.

        Args:
            number: the number of the epoch.
            first_step: index of the step to begin with, for example after a resumption.
        """
        samples = self._samples(number)
        steps = (
            [self._pieces(m) for m in self._micro_batches(samples[k])]
            for k in range(first_step, len(samples))
        )
        for step in prefetch(steps, self.data.prefetch):
            self.bytes_read += sum(count for _, count in step)
            self.steps_read += 1
            yield [found for found, _ in step]

    def _samples(self, epoch: int) -> Sequence[list[Sample]]:
        batch = self.groups * self.accumulate * self.data.images
        return epoch_samples(
            self.store, self.split, self.data, self.seed, epoch, batch, self.context
        )

    def _micro_batches(self, step: list[Sample]) -> list[list[Sample]]:
        rows = Rows(self.groups, self.group, self.accumulate, self.data.images)
        return [[step[row] for row in rows.of_micro_batch(m)] for m in range(self.accumulate)]

    def _pieces(self, samples: list[Sample]) -> tuple[list[TileBatch] | list[LazyTileBatch], int]:
        """Return the tile batches of a micro-batch, and the number of bytes read for them.

        With streaming nothing is read yet, so this number is 0.
        """
        if self.streaming:
            return blocks(
                self.store,
                samples,
                self.grid,
                self.coordinates,
                self.reach.stride,
                self._note_bytes,
            ), 0
        found = pieces(
            self.store,
            samples,
            self.grid,
            self.per_rank,
            self.coordinates,
            self.reach,
            self.pixels,
            self.labels,
        )
        count = 0
        for piece in found:
            for sample in (samples[i] for i in piece.place.images):
                if self.pixels:
                    count += pixel_bytes(self.store, sample, piece.place.window)
                if self.labels:
                    count += label_bytes(self.store, sample, piece.place.tile)
        return found, count

    def _note_bytes(self, count: int) -> None:
        self.bytes_read += count

    def _check_images(self) -> None:
        fine = Size(g * p for g, p in zip(self.grid, self.per_rank))
        for name in self.store.split(self.split):
            if not self.store.has_labels(name) and not self.store.of_images:
                raise ValueError(
                    f"image {name!r} of the split {self.split!r} of {self.store.path} has no "
                    "labels: prepare the store with masks"
                )
        for name, size in sample_sizes(self.store, self.data, self.context, self.split).items():
            try:
                check_grid(size, fine, self.reach.stride)
            except ValueError as e:
                raise ValueError(f"image {name!r} of {self.store.path}: {e}") from None
