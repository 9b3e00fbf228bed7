"""Progress of a file that is written in phases, each of which goes over all pixels of an image."""

from __future__ import annotations

from collections.abc import Sequence

from distseg.comm.progress import heartbeat
from distseg.report.progress import SilentProgress, progress

_MEGA = 1_000_000
_SHOWN = 1 << 26  # pixels from which the progress is shown; smaller files are written soon


class FileProgress:
    """Display of the phases of writing a file, which are also reported to the guardian.

    It is used in a ``with`` block. Calling it with a number of pixels counts these as finished; the
    next phase begins when all pixels of a phase are finished.

    Args:
        name: the name of the file.
        phases: the names of the phases, in order.
        pixels: the number of pixels that each phase goes over.
    """

    def __init__(self, name: str, phases: Sequence[str], pixels: int):
        self._name, self._phases, self._pixels = name, phases, pixels
        self._done = 0  # pixels, in all phases together
        self._bar = SilentProgress()

    def __enter__(self) -> FileProgress:
        self._begin(0)
        return self

    def __exit__(self, *error) -> None:
        self._bar.__exit__(*error)

    def __call__(self, pixels: int) -> None:
        while pixels and self._done < len(self._phases) * self._pixels:
            phase, before = divmod(self._done, self._pixels)
            part = min(pixels, self._pixels - before)
            self._done, pixels = self._done + part, pixels - part
            after = before + part
            self._bar.advance(after // _MEGA - before // _MEGA, part)
            heartbeat(f"{self._name}, {self._phases[phase]}, {after / self._pixels:.0%}")
            if after == self._pixels and phase + 1 < len(self._phases):
                self._bar.__exit__(None, None, None)
                self._begin(phase + 1)

    def _begin(self, phase: int) -> None:
        """Show the progress of the phase with the index ``phase``."""
        self._bar = progress(
            self._pixels // _MEGA,
            "megapixel",
            f"{self._name}, {self._phases[phase]}",
            enabled=self._pixels >= _SHOWN,
        ).__enter__()
