"""Progress of long work: a bar on a terminal, or a line every 10 seconds in a batch job's log.

The function :func:`progress` chooses the form. The code of the work is then the same on every rank,
and all ranks but one print nothing::

    with progress(len(batches), "step", "epoch 3", enabled=mesh.rank == 0) as bar:
        for batch in batches:
            bar.advance(pixels=batch.pixels, loss=loss)

    epoch 3: 120/400 steps (30%), 12.3 Mpx/s, 0:42 left, loss 0.3451
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from distseg.config.units import duration, si

SECONDS_BETWEEN_LINES = 10.0


class SilentProgress:
    """Progress that shows nothing, for ranks that do not print.

    Its methods are the interface of all progress objects.
    """

    def advance(self, n: int = 1, pixels: int = 0, **fields: float | str) -> None:
        """Count ``n`` more finished units of work.

        Args:
            n: the number of units; 0 adds pixels only.
            pixels: the number of pixels in all these units, for the rate.
            fields: values to show, such as ``loss=0.35``.
        """

    def partly(self, share: float) -> None:
        """Show the finished fraction, from 0 to 1, of the current unit of work, such as a step."""

    def __enter__(self) -> SilentProgress:
        return self

    def __exit__(self, *error) -> None:
        pass


class Progress(SilentProgress):
    """Base class that counts finished work, pixels and seconds; subclasses show the numbers.

    Args:
        total: the number of units of work.
        unit: the name of a unit in the singular, such as ``step``.
        label: the name of the work, such as ``epoch 3``.
        stream: the stream to write to; stderr by default.
        clock: function that returns the time in seconds, by default ``time.monotonic``.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        label: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.unit, self.label = total, unit, label
        self.done, self.pixels, self.fields, self.share = 0, 0, {}, 0.0
        self.stream = stream or sys.stderr
        self._clock, self._start = clock, clock()

    def advance(self, n: int = 1, pixels: int = 0, **fields: float | str) -> None:
        self.done, self.share = self.done + n, 0.0
        self.pixels += pixels
        self.fields.update(fields)
        self._show()

    def partly(self, share: float) -> None:
        self.share = min(share, 1.0)
        self._show()

    def __exit__(self, *error) -> None:
        self._finish()

    @property
    def seconds(self) -> float:
        """Seconds since the progress began."""
        return self._clock() - self._start

    def details(self) -> list[str]:
        """Return texts such as ``['12.3 Mpx/s', '40% of the next step', 'loss 0.3451']``.

        The texts are the rate, the fraction that :meth:`partly` set, and the fields of
        :meth:`advance`. The fraction is left out if :meth:`partly` was not called.
        """
        rate = [si(self.pixels / self.seconds, "px/s")] if self.pixels and self.seconds > 0 else []
        rate += [f"{self.share:.0%} of the next {self.unit}"] if self.share else []
        return rate + [
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in self.fields.items()
        ]

    def count(self) -> str:
        """Return the finished and the total number of units as text: ``'120/400 steps'``."""
        return f"{self.done}/{self.total} {self.unit}s"

    def _show(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError


class LineProgress(Progress):
    """Progress as plain lines: at most one line every 10 s, and one at the end."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._last = self._start

    def _show(self) -> None:
        """Print the finished work and the time left, unless the last line is less than 10 s old."""
        if self.done < self.total and self._clock() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = self._clock()
            done = self.done + self.share
            left = self.seconds * (self.total - done) / done if done else None
            time_left = [] if left is None else [f"{duration(left)} left"]
            self._print(
                [
                    f"{self.count()} ({done / self.total:.0%})",
                    *self.details()[:1],
                    *time_left,
                    *self.details()[1:],
                ]
            )

    def _finish(self) -> None:
        spent = duration(self.seconds)
        ended = (
            f"{self.count()} in {spent}"
            if self.done >= self.total
            else f"stopped at {self.count()} after {spent}"
        )
        self._print([ended, *self.details()])

    def _print(self, parts: list[str]) -> None:
        print(f"{self.label}: {', '.join(parts)}", file=self.stream, flush=True)


class BarProgress(Progress):
    """Progress as a tqdm bar, whose last state remains on the terminal."""

    _FORMAT = (
        "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}s "
        "[{elapsed}<{remaining}{postfix}]"
    )

    def __init__(self, *args, **kwargs):
        from tqdm import tqdm

        super().__init__(*args, **kwargs)
        self._bar = tqdm(
            total=self.total,
            unit=self.unit,
            desc=self.label,
            file=self.stream,
            bar_format=self._FORMAT,
            dynamic_ncols=True,
        )

    def _show(self) -> None:
        self._bar.set_postfix_str(", ".join(self.details()), refresh=False)
        self._bar.update(self.done - self._bar.n)

    def _finish(self) -> None:
        self._bar.close()  # close() draws the final state


def progress(
    total: int, unit: str, label: str, enabled: bool = True, stream: TextIO | None = None
) -> SilentProgress:
    """Return an object that shows progress as a bar or as lines, or shows nothing.

    It shows nothing unless ``enabled``. It is a bar if the stream is a terminal and tqdm is
    installed, else it prints lines.

    Args:
        total: the number of units of work.
        unit: the name of a unit in the singular, such as ``step`` or ``tile``.
        label: the name of the work, such as ``epoch 3``.
        enabled: True on the one rank that shows progress.
        stream: the stream to write to; stderr by default.
    """
    if not enabled:
        return SilentProgress()
    stream = stream or sys.stderr
    return (BarProgress if stream.isatty() and _has_tqdm() else LineProgress)(
        total, unit, label, stream
    )


def _has_tqdm() -> bool:
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return True
