"""Which image goes with which mask, and into which split: found and checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import numpy as np

from distseg import rng
from distseg.data.readers import SUFFIXES, open_image, open_mask
from distseg.extents import Extents

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Pair:
    """An image file, its mask if there are masks, and what the header of the image says."""

    name: str
    split: str
    image: Path
    mask: Path | None
    size: tuple[int, ...]
    bands: int
    dtype: np.dtype
    nodata: int | float | None = None  # the number that stands for no data, where the file says so


def find_pairs(images: Path, masks: Path | None, shares: Sequence[float], seed: int, dims: int | None = None) -> list[Pair]:
    """All pairs of two folders, with their splits: by the folders train, val and test inside, or by ``shares``.

    Raises:
        ValueError: no images, files without a partner, or headers that disagree.
    """
    folders = [split for split in SPLITS if (images / split).is_dir()]
    if folders:
        _refuse_loose_files(images, folders)
        files = [(split, *pair) for split in folders for pair in _paired(images / split, masks and masks / split)]
    else:
        together = _paired(images, masks)
        split_of = assign_splits([image.stem for image, _ in together], shares, seed)
        files = [(split_of[image.stem], image, mask) for image, mask in together]
    if not any(split == "train" for split, _, _ in files):
        raise ValueError(f"none of the {len(files)} images of {images} is in the split 'train', from which the store takes mean and deviation of each band: put one there")
    pairs = [_opened(split, image, mask, dims) for split, image, mask in files]
    _check_alike(pairs)
    return pairs


def assign_splits(names: Sequence[str], shares: Sequence[float], seed: int) -> dict[str, str]:
    """The split of each name: its keyed random number orders the names, the shares cut the order.

    A share above 0 gets at least one image where there are enough.
    """
    shares = [*shares, *(0.0 for _ in SPLITS)][: len(SPLITS)]
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"the shares of {', '.join(SPLITS)} are not negative and add up to 1, got {shares}")
    counts = [int(share * len(names) + 1e-9) for share in shares]
    while sum(counts) < len(names):
        counts[int(np.argmax([share * len(names) - count for share, count in zip(shares, counts)]))] += 1
    for needy in (k for k, share in enumerate(shares) if share and not counts[k]):
        if max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
            counts[needy] = 1
    order = sorted(names, key=lambda name: (rng.key(seed, "split", name), name))
    return dict(zip(order, np.repeat(SPLITS, counts).tolist()))


def _image_files(folder: Path) -> dict[str, Path]:
    """Stem -> file, in order of the names."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
            if path.stem in found:
                raise ValueError(f"{found[path.stem]} and {path} differ in their endings only: remove one")
            found[path.stem] = path
    if not found:
        raise ValueError(f"the folder {folder} holds no image ({' '.join(SUFFIXES)})")
    return found


def _paired(images: Path, masks: Path | None) -> list[tuple[Path, Path | None]]:
    left = _image_files(images)
    if masks is None:
        return [(path, None) for path in left.values()]
    right = _image_files(masks)
    lonely = _lonely(left, right, f"images of {images} have no mask") + _lonely(right, left, f"masks of {masks} have no image")
    if lonely:
        raise ValueError(f"{' and '.join(lonely)}: an image and its mask have the same name, but for the ending")
    return [(left[stem], right[stem]) for stem in left]


def _lonely(these: dict[str, Path], those: dict[str, Path], what: str) -> list[str]:
    names = sorted(these.keys() - those.keys())
    return [f"{len(names)} {what} ({_some(names)})"] if names else []


def _some(names: list[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _refuse_loose_files(images: Path, folders: list[str]) -> None:
    loose = [p.name for p in sorted(images.iterdir()) if p.suffix.lower() in SUFFIXES]
    if loose:
        raise ValueError(f"{images} has the folders {', '.join(folders)} and images beside them ({_some(loose)}): move these into a folder")


def _opened(split: str, image: Path, mask: Path | None, dims: int | None) -> Pair:
    reader = open_image(image, dims)
    if mask is not None:
        size = open_mask(mask, len(reader.size)).size
        if size != reader.size:
            raise ValueError(f"{image} has {Extents(reader.size)} pixels, but its mask {mask} has {Extents(size)}: they must lie on each other")
    return Pair(image.stem, split, image, mask, reader.size, reader.bands, reader.dtype, reader.nodata)


def _check_alike(pairs: list[Pair]) -> None:
    """One number of bands, dims and one type of numbers; no name twice."""
    first = pairs[0]
    known: dict[str, Pair] = {}
    for pair in pairs:
        for what, a, b in (
            ("bands", first.bands, pair.bands),
            ("dims", len(first.size), len(pair.size)),
            ("type", str(first.dtype), str(pair.dtype)),
        ):
            if a != b:
                raise ValueError(f"the images differ in their {what}: {first.image} has {a}, {pair.image} has {b}; convert them to one form")
        if known.setdefault(pair.name, pair) is not pair:
            raise ValueError(f"{known[pair.name].image} and {pair.image} have the same name: rename one")
