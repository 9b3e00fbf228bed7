"""Do the masks say what the classes' names say? Looked at before anything is written, as far as it takes to be sure.

The usual mistake is a mask of 0 and 255: 255 is the label to ignore, so the second class would have no pixel, and nobody would notice. So
masks are read until each class of each split is found, which is soon where all is well, and to the end where it is not.
"""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

import numpy as np

from distseg.data.pairs import Pair
from distseg.data.readers import open_mask
from distseg.geometry.tile import Box, strips
from distseg.report.progress import SilentProgress

_STRIP_PIXELS, _ROWS = 4 << 20, 256


class Values:
    """The values of some masks, read as far as questions go."""

    def __init__(self, pairs: Sequence[Pair], shown: SilentProgress):
        self._more = _values_of(pairs, shown)
        self.seen: set[int] = set()

    def hold(self, value: int) -> bool:
        """Whether a mask has the value; reads on until it is found."""
        while value not in self.seen and (found := next(self._more, None)) is not None:
            self.seen |= found
        return value in self.seen


class Survey:
    """What the labels of each split's masks are.

    Args:
        values: mask values that stand for other labels.
        absent: classes that are known to have no pixel.
        shown: is told of each mask that was read.
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
        self.classes, self.ignore, self.values, self.absent = list(classes), ignore, dict(values), list(absent)
        names = dict.fromkeys(pair.split for pair in pairs)
        self._splits = {name: Values([p for p in pairs if p.split == name and p.mask is not None], shown) for name in names}

    def check(self) -> None:
        """Refuse masks that do not hold the classes.

        Raises:
            ValueError: with the values that masks have, and the flags to use.
        """
        unknown = [name for name in self.absent if name not in self.classes]
        if unknown:
            raise ValueError(f"--absent names {unknown[0]}, which is no class: there are {', '.join(self.classes)}")
        missing = [k for k, name in enumerate(self.classes) if name not in self.absent and not any([self._holds(split, k) for split in self._splits])]
        if missing and self._labels() - set(range(len(self.classes))):
            raise ValueError(f"{self._no_pixel(missing)}; masks hold {self._some_values()}, {self._meaning()}. {self._repair(missing)}")
        if missing and len(self._seen()) == 1:
            raise ValueError(f"{self._no_pixel(missing)}: all masks hold the one value {min(self._seen())}. {self._repair(missing)}")
        for split in self._splits:
            self._check_split(split)

    def _check_split(self, split: str) -> None:
        """Refuse a split in which pixels are ignored, and none has a class, if it is the other way round in the others: its masks are coded otherwise."""
        for k, name in enumerate(self.classes):
            others = [other for other in self._splits if other != split and self._holds(other, k)]
            if name in self.absent or not others or self._holds(split, k) or not self._holds(split, self.ignore):
                continue
            if not any([self._holds(other, self.ignore) for other in others]):
                raise ValueError(
                    f"the masks of the split {split} hold {_listed(self._splits[split].seen)}, those of {' and '.join(others)} {_listed(self._of(others))}: "
                    f"in {split} no pixel is {name}, and {self.ignore} is ignored. Give all masks the same values, or, if {name} is not in {split} indeed, say so: --absent {name}"
                )

    def _holds(self, split: str, label: int) -> bool:
        return any([self._splits[split].hold(value) for value in self._coded(label)])

    def _coded(self, label: int) -> list[int]:
        """The mask values that stand for a label."""
        return [*(value for value, known in self.values.items() if known == label), *([label] if label not in self.values else [])]

    def _labels(self) -> set[int]:
        return {self.values.get(value, value) for value in self._seen()}

    def _seen(self) -> set[int]:
        return self._of(self._splits)

    def _of(self, splits) -> set[int]:
        return set().union(*(self._splits[split].seen for split in splits))

    def _no_pixel(self, missing: list[int]) -> str:
        names = [self.classes[k] for k in missing]
        return f"no pixel of any mask is {' or '.join(names)} (label{'s' if len(names) > 1 else ''} {', '.join(map(str, missing))})"

    def _some_values(self) -> str:
        return f"the values {_listed(self._seen())}"

    def _meaning(self) -> str:
        """What becomes of the values that are no class."""
        stray = sorted(value for value in self._seen() if not 0 <= self.values.get(value, value) < len(self.classes))
        ignored = [value for value in stray if self.values.get(value, value) == self.ignore]
        unknown = [value for value in stray if value not in ignored]
        told = [f"{_listed(some)} {'is' if len(some) == 1 else 'are'} {what}" for some, what in ((ignored, "ignored"), (unknown, "no class")) if some]
        return f"of which {' and '.join(told)}"

    def _repair(self, missing: list[int]) -> str:
        """The flags that would make the masks say what was meant, if it can be guessed, and the one to insist."""
        names = ",".join(self.classes[k] for k in missing)
        insist = f"if {' and '.join(self.classes[k] for k in missing)} really {'has' if len(missing) == 1 else 'have'} no pixel, say so: --absent {names}"
        found = self._guess()
        if found:
            return f"Say which label each value stands for: --values={','.join(f'{a}={b}' for a, b in found.items())}; {insist}"
        stray = sorted(value for value in self._seen() if not 0 <= self.values.get(value, value) < len(self.classes))
        example = ", ".join(f"{k} for {self.classes[k]}" for k in missing[:3])
        return f"Say which label a value stands for, such as --values={stray[-1] if stray else 'V'}={missing[0]} ({example}); {insist}"

    def _guess(self) -> dict[int, int]:
        """As many values as classes: they are the classes in order. Fewer, but 0 and one more of two classes: the same."""
        seen = sorted(self._seen())
        if len(seen) != len(self.classes):
            return {}
        return {value: label for label, value in enumerate(seen) if value != label}


def _values_of(pairs: Sequence[Pair], shown: SilentProgress) -> Iterator[set[int]]:
    """Of each strip of each mask."""
    for pair in pairs:
        mask = open_mask(pair.mask, len(pair.size))
        for strip in strips(Box.whole(pair.size), _STRIP_PIXELS, _ROWS):
            shown.advance(0, pixels=strip.pixels)
            yield {int(value) for value in _distinct(mask.read(strip))}
        shown.advance()


def _distinct(mask: np.ndarray) -> np.ndarray:
    if mask.dtype == np.uint8:
        return np.flatnonzero(np.bincount(mask.ravel(), minlength=1))
    return np.unique(mask)


def _listed(values, most: int = 8) -> str:
    values = sorted(values)
    some = [str(v) for v in values[:most]]
    if len(values) > most:
        return ", ".join(some) + f" and {len(values) - most} more"
    return " and ".join([", ".join(some[:-1]), some[-1]] if len(some) > 1 else some) or "nothing"
