"""Cost of each augmentation beside reading the same crops: pixels and labels of one rank, as a training step reads them.

The store lies in the system's page cache. With `data.prefetch`, a thread reads crops while the step before computes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import measure, parent, repeats_of, report
from distseg.config.settings import DataConfig
from distseg.config.sizes import Size
from distseg.data.sample_reader import read_labels, read_pixels
from distseg.data.sampler import Sample, epoch_samples
from distseg.data.store.store import Store, StoreWriter
from distseg.tiling.tile import Box, strips

QUESTION = "What does each augmentation cost beside reading a crop?"
CASES: dict[str, dict] = {
    "none": {},
    "flip, turn, colour": dict(augment=["flip", "turn", "colour"]),
    "scale": dict(augment_scale=[0.8, 1.25]),
    "rotate": dict(augment_rotate=[-15, 15]),
    "elastic": dict(augment_elastic=[4, 8]),
    "blur": dict(augment_blur=[0.5, 1]),
    "gamma": dict(augment_gamma=[0.7, 1.5]),
    "contrast": dict(augment_contrast=[0.75, 1.25]),
    "brightness": dict(augment_brightness=[-0.3, 0.3]),
    "noise": dict(augment_noise=[0.05, 0.1]),
}
CASES["all"] = {name: value for case in CASES.values() for name, value in case.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(9)])
    parser.add_argument(
        "--size", type=Size, default=Size("4096x4096"), help="of the image (default: %(default)s)"
    )
    parser.add_argument("--crop", type=Size, default=Size("512x512"), help="(default: %(default)s)")
    parser.add_argument("--bands", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--crops", type=int, default=20, help="that a turn reads (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.size, options.crop, options.crops = Size((300, 300)), Size((70, 70)), 3
    with tempfile.TemporaryDirectory() as folder:
        store = _store(Path(folder) / "s.h5", options.bands, options.size)
        cases = {
            name: _reading(store, _samples(store, settings, options.crop, options.crops))
            for name, settings in CASES.items()
        }
        results = measure(cases, repeats_of(options), baseline="none")
    parameters = {
        "size": str(options.size),
        "crop": str(options.crop),
        "bands": options.bands,
        "crops": options.crops,
    }
    notes = f"{options.crops} crops of {options.crop} of an image of {options.size} with {options.bands} bands of bytes, pixels and labels; the store in the page cache"
    report("augmentation", QUESTION, results, options, parameters, notes)


def _samples(store: Store, settings: dict, crop: Size, count: int) -> list[Sample]:
    data = DataConfig(crop=crop, epoch_samples=count, **settings)
    return [sample for step in epoch_samples(store, "train", data, 0, 0, 1) for sample in step]


def _reading(store: Store, samples: list[Sample]) -> Callable[[], None]:
    def run() -> None:
        for sample in samples:
            box = Box.whole(sample.size)
            read_pixels(store, [sample], box)
            read_labels(store, [sample], box)

    return run


def _store(path: Path, bands: int, size: Size) -> Store:
    random = np.random.default_rng(0)
    with StoreWriter(path, ["x", "y"], bands) as writer:
        image = writer.add_image("a", size, np.uint8, "train", labels=True)
        for strip in strips(Box.whole(size), 256 * size[1], 256):
            image.write(
                strip,
                random.integers(0, 255, (bands, *strip.size)).astype(np.uint8),
                random.integers(0, 2, strip.size).astype(np.uint8),
            )
    return Store(path)


if __name__ == "__main__":
    main()
