"""A network over several images, dealt to the ranks: what evaluation and prediction of whole images have in common."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Callable, Iterator, Sequence

import numpy as np

from distseg.comm.watch import heartbeat
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.report.progress import progress
from distseg.tiling.tile import Box


def in_rounds(
    predictor: Predictor, scenes: Sequence[Callable[[], ImageSource]], sizes: Sequence[Sequence[int]], world, what: str,
    work: Callable[[int, Iterator[tuple[Box, np.ndarray]]], None], stop: Callable[[], bool],
) -> bool:  # fmt: skip
    """Have every image computed, of which each rank does its share; whether all were. Collective over ``world``.

    Args:
        scenes: open the images, of these ``sizes``.
        what: is said beside the bar.
        work: is given an image's number and (tile, logits) of this rank's share of it, and goes through these.
        stop: asked after each round, on all ranks, for the same answer: whether to give up.
    """
    together, shares = predictor.deal_images(sizes)
    part, mine = predictor.among(together), shares[predictor.replicas.rank]
    ends = {
        share.image: number
        for number, round in enumerate(zip_longest(*shares))
        for share in filter(None, round)
    }  # in which round an image is done
    with progress(len(scenes), "image", what, enabled=world.rank == 0) as bar:
        for number in range(max(map(len, shares))):
            for share in mine[number : number + 1]:
                scene = scenes[share.image]()
                heartbeat(f"image {scene.name}")
                work(share.image, part(scene, share.tiles))
            done = [image for image, end in ends.items() if end == number]
            bar.advance(len(done), pixels=sum(math.prod(sizes[image]) for image in done))
            if stop():
                return False
    return True
