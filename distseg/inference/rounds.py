"""Apply a network to several images that are dealt to the ranks.

Evaluation and prediction of whole images share this loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import numpy as np

from distseg.comm.progress import heartbeat
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.report.progress import progress
from distseg.tiling.tile import Box


def in_rounds(
    predictor: Predictor,
    sources: Sequence[Callable[[], ImageSource]],
    sizes: Sequence[Sequence[int]],
    world,
    what: str,
    work: Callable[[int, Iterator[tuple[Box, np.ndarray]]], None],
    stop: Callable[[], bool],
) -> bool:
    """Apply a network to images that are divided among the ranks.

    The result is False if ``stop`` ended the work, True otherwise. All ranks of ``world`` must call
    it together.

    Args:
        predictor: the network; each rank computes its share.
        sources: for each image, a function that opens it.
        sizes: the size of each image in pixels.
        world: the communicator of all ranks.
        what: the text beside the progress bar.
        work: function that is called with the index of an image and an iterator of (tile, logits)
            over this rank's tiles. It must exhaust the iterator.
        stop: function that is called after each round, in which each rank computes its tiles of at
            most one image. It must return the same value on all ranks. True ends the work.
    """
    together, shares = predictor.deal_images(sizes)
    part, mine = predictor.among(together), shares[predictor.replicas.rank]
    ends: dict[int, int] = {}  # the round in which each image is done
    for number, round in enumerate(zip_longest(*shares)):
        ends |= {share.image: number for share in filter(None, round)}
    with progress(len(sources), "image", what, enabled=world.rank == 0) as bar:
        for number in range(max(map(len, shares))):
            for share in mine[number : number + 1]:
                source = sources[share.image]()
                heartbeat(f"image {source.name}")
                work(share.image, part(source, share.tiles))
            done = [image for image, end in ends.items() if end == number]
            bar.advance(len(done), pixels=sum(math.prod(sizes[image]) for image in done))
            if stop():
                return False
    return True
