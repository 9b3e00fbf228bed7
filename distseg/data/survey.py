"""Check that the masks contain the classes, before a store is written.

The usual mistake is a mask of 0 and 255: 255 is the label to ignore, so the second class would
silently have no pixel. So the masks of each split are read until every class is found. If all is
well, few masks are read; if a class is missing, all masks are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from distseg.data.pairs import Pair
from distseg.report.progress import SilentProgress
from distseg.tiling.tile import Box, strips

_STRIP_PIXELS, _ROWS = 4 << 20, 256


class Values:
    """Set of the values in the masks of one split; a mask is read only when it is needed.

    The attribute ``seen`` holds the values found so far. :meth:`hold` reads more masks.

    Args:
        pairs: images with their masks; each pair must have a mask.
        shown: the progress display, advanced with each mask.
    """

    def __init__(self, pairs: Sequence[Pair], shown: SilentProgress):
        self._more = _values_of(pairs, shown)
        self.seen: set[int] = set()

    def hold(self, values: set[int]) -> bool:
        """Return True if a mask of the split contains at least one of these values.

        Masks are read until one of the values is found.
        """
        while not values & self.seen and (found := next(self._more, None)) is not None:
            self.seen |= found
        return bool(values & self.seen)


class Survey:
    """Checker that finds out if the masks of each split contain all classes.

    Args:
        pairs: images with their masks; images without a mask are left out.
        classes: names in the order of their labels.
        ignore: the label of pixels to ignore.
        values: dict from mask values to labels. A value that is not in it is a label itself.
        absent: classes that may have no pixel.
        shown: the progress display, advanced with each mask.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        classes: Sequence[str],
        ignore: int,
        values: Mapping[int, int],
        absent: Sequence[str] = (),
        shown: SilentProgress = SilentProgress(),
    ):
        self.classes, self.ignore = list(classes), ignore
        self.values, self.absent = dict(values), list(absent)
        masks: dict[str, list[Pair]] = {}
        for pair in pairs:
            masks.setdefault(pair.split, []).extend([pair] if pair.mask is not None else [])
        self._splits = {split: Values(those, shown) for split, those in masks.items()}

    def check(self) -> set[int]:
        """Refuse masks that seem to encode the classes by other values than expected.

        A class may be missing from all masks. This is an error if the masks hold values that stand
        for no class, such as the label to ignore, or if all masks hold the same single value. A
        class may also be missing from one split only. This is an error if the masks of this split
        seem to use other values than the masks of the other splits.

        Returns:
            The values that were found in the masks. Masks that were not needed for the check are
            not read, and can hold more values.

        Raises:
            ValueError: a class is missing in one of these ways, or ``absent`` names an unknown
                class. The message names the values in the masks and the flags to use.
        """
        unknown = [name for name in self.absent if name not in self.classes]
        if unknown:
            raise ValueError(
                f"--absent names {unknown[0]}, which is no class: the classes are "
                f"{', '.join(self.classes)}"
            )
        wanted = [k for k, name in enumerate(self.classes) if name not in self.absent]
        missing = [k for k in wanted if not any(self._holds(split, k) for split in self._splits)]
        seen = self._seen(self._splits)
        if missing and self._stray(seen):
            raise ValueError(
                f"{self._no_pixel(missing)}; {self._meaning(seen)}. {self._repair(missing, seen)}"
            )
        if missing and len(seen) == 1:
            words = f"{self._no_pixel(missing)}: all masks hold only the value {min(seen)}"
            raise ValueError(f"{words}. {self._repair(missing, seen)}")
        for split in self._splits:
            for k in wanted:
                self._check_split(split, k)
        return self._seen(self._splits)

    def _check_split(self, split: str, k: int) -> None:
        """Refuse a split whose masks seem to use other values than the masks of other splits.

        Args:
            split: the split.
            k: the label of a class.

        Raises:
            ValueError: ``split`` has pixels to ignore but no pixel of the class, while other splits
                have pixels of the class but no pixel to ignore.
        """
        others = [other for other in self._splits if other != split and self._holds(other, k)]
        if not others or self._holds(split, k) or not self._holds(split, self.ignore):
            return
        if not any(self._holds(other, self.ignore) for other in others):
            name, here = self.classes[k], _listed(self._splits[split].seen)
            there = _listed(self._seen(others))
            raise ValueError(
                f"the masks of the split {split} hold {here}, but the masks of "
                f"{' and '.join(others)} hold {there}: the pixels of {split} with the label "
                f"{self.ignore} are ignored, but are probably {name}. Use the same values in all "
                f"masks, or, if {split} really has no pixel of {name}, set --absent {name}"
            )

    def _holds(self, split: str, label: int) -> bool:
        coded = {value for value, known in self.values.items() if known == label}
        return self._splits[split].hold(coded if label in self.values else coded | {label})

    def _seen(self, splits: Iterable[str]) -> set[int]:
        return set().union(*(self._splits[split].seen for split in splits))

    def _label(self, value: int) -> int:
        return self.values.get(value, value)

    def _stray(self, seen: set[int]) -> list[int]:
        """Return the mask values that stand for no class, sorted."""
        return sorted(value for value in seen if not 0 <= self._label(value) < len(self.classes))

    def _no_pixel(self, missing: list[int]) -> str:
        labels = f"label{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"no pixel of any mask is {' or '.join(self.classes[k] for k in missing)} ({labels})"

    def _meaning(self, seen: set[int]) -> str:
        """Return a phrase that lists the values in the masks and says which stand for no class."""
        ignored = [value for value in self._stray(seen) if self._label(value) == self.ignore]
        unknown = [value for value in self._stray(seen) if value not in ignored]
        kinds = [
            (some, what) for some, what in ((ignored, "ignored"), (unknown, "no class")) if some
        ]
        parts = [
            f"{_listed(some)} {'is' if len(some) == 1 else 'are'} {what}" for some, what in kinds
        ]
        hold = f"masks hold the value{'s' if len(seen) > 1 else ''} {_listed(seen)}"
        return f"{hold}, of which {' and '.join(parts)}"

    def _repair(self, missing: list[int], seen: set[int]) -> str:
        """Return the end of an error message, which says which flags the user should give.

        The flags are --values, which maps mask values to labels, and --absent, which allows classes
        without pixels. If there are more values than classes, --instances is named too.

        Args:
            missing: labels of the classes that have no pixel.
            seen: the values in the masks.
        """
        names = [self.classes[k] for k in missing]
        has = "has" if len(names) == 1 else "have"
        insist = f"if {' and '.join(names)} really {has} no pixel, set --absent {','.join(names)}"
        in_order = {value: label for label, value in enumerate(sorted(seen)) if value != label}
        if len(seen) == len(self.classes) and in_order:
            flag = ",".join(f"{value}={label}" for value, label in in_order.items())
            return f"Say which label each value stands for: --values={flag}; {insist}"
        example = ", ".join(f"{k} for {self.classes[k]}" for k in missing[:3])
        stray = self._stray(seen) or ["VALUE"]
        flag = f"--values={stray[-1]}={missing[0]}"
        objects = "if masks hold a number for each object, set --instances foreground; "
        return (
            f"Say which label a value stands for, such as {flag} ({example}); "
            f"{objects * (len(seen) > len(self.classes))}{insist}"
        )


def _values_of(pairs: Sequence[Pair], shown: SilentProgress) -> Iterator[set[int]]:
    """Yield the set of values in each strip of rows of each mask, one strip after another."""
    for pair in pairs:
        mask = pair.open_mask()
        for strip in strips(Box.whole(pair.size), _STRIP_PIXELS, _ROWS):
            shown.advance(0, pixels=strip.pixels)
            labels, valid = mask.read_valid(strip)
            yield set(_distinct(labels if valid is None else labels[0][valid]).tolist())
        shown.advance()


def _distinct(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.bincount(mask.ravel())) if mask.dtype == np.uint8 else np.unique(mask)


def _listed(values: Iterable[int], most: int = 8) -> str:
    """Return sorted values as text, such as ``0, 1 and 255``.

    Values after the first ``most`` are only counted: ``0, 1 and 3 more``.
    """
    texts = [str(value) for value in sorted(values)]
    if len(texts) > most:
        return f"{', '.join(texts[:most])} and {len(texts) - most} more"
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]])) or "nothing"
