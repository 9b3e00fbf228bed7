"""Log of a run: one JSON object per line in ``log.jsonl``.

A killed run leaves complete lines, and any tool can read them::

    {"kind": "step", "step": 12, "epoch": 0, "time": 1700000000.123, "loss": 0.69, "lr": 0.001}
    {"kind": "validation", "step": 40, "epoch": 0, "time": ..., "loss": 0.5, "iou": {"lake": null}}

``step`` is the number of completed optimizer steps, and ``time`` is Unix time in seconds. A number
that is not finite is written as null. A run that resumes at step n removes the lines of later
steps, so that the file reads as if the run had never stopped. ``distseg plot`` draws its curves
from the fields ``loss``, ``lr`` and ``iou``. The log passes its numbers on to the loggers of
``train.loggers`` (:mod:`distseg.report.loggers`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from distseg.config.sizes import Size
from distseg.report.disk import atomic_write
from distseg.report.loggers.csv_tables import FILES as TABLES
from distseg.report.loggers.interface import LoggedRun, named_values
from distseg.report.loggers.opening import opened_loggers
from distseg.report.loggers.tensorboard_events import FOLDER as EVENTS

KINDS = ("start", "step", "validation", "end")
FILE = "log.jsonl"
_NAMES = (FILE, EVENTS, *TABLES.values())  # of a run


class SilentLog:
    """Log that writes nothing, for ranks that do not write.

    Its methods are the interface of a log.
    """

    def write(self, kind: str, step: int, epoch: int, **fields: Any) -> None:
        """Append one line to the log.

        Args:
            kind: ``start``, ``step``, ``validation`` or ``end``.
            step: the number of completed optimizer steps.
            epoch: the number of the epoch, counted from 0.
            fields: further fields of the line: numbers, texts, and lists and dicts of these.
                Tensors and arrays are converted to numbers and lists.
        """

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Pass a picture on to the loggers.

        Args:
            step: the number of completed optimizer steps.
            name: the name of the picture.
            pixels: (H, W, 3) uint8.
        """

    def close(self, complete: bool = True) -> None:
        """Close the files of the log, and end the loggers.

        Args:
            complete: False if an error, a signal or a time limit ended the run.
        """

    def __enter__(self) -> SilentLog:
        return self

    def __exit__(self, kind, *_) -> None:
        self.close(complete=kind is None)


class RunLog(SilentLog):
    """Log that writes ``log.jsonl`` and passes numbers and pictures on to loggers.

    Args:
        folder: the folder of the run, created if missing.
        loggers: names of loggers, as in ``train.loggers``.
        resumed_step: the number of optimizer steps of the resumed checkpoint. Lines of later steps
            are removed. None for a new run, which renames an earlier log in the folder to
            ``log.1.jsonl``, ``log.2.jsonl``, ...
        revalidates: True if the run validates again at ``resumed_step``, because the checkpoint was
            written before the validation of this step. The old line of the validation is then
            removed.
        alive: function that is called several times a second while the log waits for its loggers.
    """

    def __init__(
        self,
        folder: str | Path,
        loggers: Sequence[str] = (),
        resumed_step: int | None = None,
        revalidates: bool = False,
        alive: Callable[[], None] = lambda: None,
    ):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        if resumed_step is None:
            _set_aside(folder)
        else:
            _truncate(self.path, resumed_step, revalidates)
        self._file = open(self.path, "a", buffering=1, encoding="utf-8")
        run = LoggedRun(folder, resumed_step, revalidates)
        self._loggers = opened_loggers(loggers, run, alive)

    def write(self, kind: str, step: int, epoch: int, **fields: Any) -> None:
        assert kind in KINDS and "time" not in fields, (kind, KINDS, sorted(fields))
        fields = plain(fields)
        line = {
            "kind": kind,
            "step": int(step),
            "epoch": int(epoch),
            "time": round(time.time(), 3),
            **fields,
        }
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        numbers = _numbers(fields)
        for logger in self._loggers:
            if kind == "start":
                logger.start(fields.get("config", {}))
            elif kind != "end":
                logger.scalars(kind, step, epoch, numbers)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        for logger in self._loggers:
            logger.picture(step, name, pixels)

    def close(self, complete: bool = True) -> None:
        self._file.close()
        for logger in self._loggers:
            logger.end(complete)


def open_log(
    folder: str | Path,
    loggers: Sequence[str],
    enabled: bool,
    resumed_step: int | None = None,
    revalidates: bool = False,
    alive: Callable[[], None] = lambda: None,
) -> SilentLog:
    """Return a :class:`RunLog` if ``enabled``, else a :class:`SilentLog`.

    ``enabled`` should be True on one rank only. The other arguments are those of :class:`RunLog`.
    """
    if not enabled:
        return SilentLog()
    return RunLog(folder, loggers, resumed_step, revalidates, alive)


def read_log(path: str | Path) -> list[dict]:
    """Return the lines of a log as dicts, without a last line that is incomplete after a kill.

    Args:
        path: the log file, or the folder of its run.

    Raises:
        ValueError: the file does not exist, or a line is not a JSON object.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.exists():
        raise ValueError(
            f"there is no log at {path}: give the folder of a run (train.output) or its {FILE}"
        )
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    entries = [_parse(line) for line in lines]
    for number, (line, entry) in enumerate(zip(lines[:-1], entries), 1):
        if entry is None:
            raise ValueError(
                f"{path}, line {number} is not a JSON object: {line[:60]!r}; remove the line, or "
                "give a log that distseg wrote"
            )
    return [entry for entry in entries if entry is not None]


def _parse(line: str | bytes) -> dict | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _truncate(path: Path, step: int, revalidates: bool) -> None:
    """Remove damaged lines, and lines of steps later than ``step``, from a log.

    The new file replaces the old file atomically: if the process is killed, one of the two exists.

    Args:
        path: the log.
        step: the number of optimizer steps of the resumed checkpoint.
        revalidates: True to remove also the line of the validation at ``step``.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    entries = [_parse(line) for line in lines]
    # The last line does not count as damaged: a kill may have cut it.
    _keep_damaged(path, [number for number, entry in enumerate(entries[:-1], 1) if entry is None])
    kept = []
    for line, entry in zip(lines, entries):
        if entry is None or entry.get("step", 0) > step:
            continue
        at_step = entry.get("step") == step and entry.get("kind") == "validation"
        if not (revalidates and at_step):
            kept.append((line, entry))
    _tell_gaps(path, step, {entry.get("step") for _, entry in kept if entry.get("kind") == "step"})
    with atomic_write(path) as growing:
        growing.write_bytes(b"".join(line + b"\n" for line, _ in kept))


def _keep_damaged(path: Path, lines: list[int]) -> None:
    """Copy a damaged log to a new file ``log.N.jsonl``, and print a warning with the new name.

    The run then continues its log without the damaged lines.

    Args:
        path: the log.
        lines: the numbers of the damaged lines. If there are none, nothing is done.
    """
    if lines:
        kept_as = _numbered(path, _free(path.parent))
        shutil.copyfile(path, kept_as)
        print(
            f"distseg: {path} is damaged in line {', '.join(map(str, lines[:5]))}, which is left "
            f"out; the file as it was is {kept_as.name}",
            file=sys.stderr,
        )


def _tell_gaps(path: Path, step: int, there: set[int]) -> None:
    """Print a warning if steps up to ``step`` have no line in the log.

    Args:
        path: the log, for the message.
        step: the last step that should be in the log.
        there: the steps that have a line.
    """
    if missing := [n for n in range(1, step + 1) if n not in there]:
        print(
            f"distseg: {path} has no entry for {len(missing)} of the first {step} steps, beginning "
            f"with step {missing[0]}: the curves will have a gap",
            file=sys.stderr,
        )


def _set_aside(folder: Path) -> None:
    """Rename the log, tables and event files of an earlier run to new names.

    The new names have a number, such as ``log.1.jsonl``.
    """
    if not (folder / FILE).exists():
        return
    number = _free(folder)
    for path in (folder / name for name in _NAMES):
        if path.exists():
            os.replace(path, _numbered(path, number))


def _free(folder: Path) -> int:
    """Return the smallest number N, from 1, for which no file such as ``log.N.jsonl`` exists."""
    return next(
        n for n in count(1) if not any(_numbered(folder / name, n).exists() for name in _NAMES)
    )


def _numbered(path: Path, number: int) -> Path:
    """Return a path whose name has a number: ``log.2.jsonl`` for ``log.jsonl`` and 2."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def plain(value: Any) -> Any:
    """Return ``value`` converted to types that JSON supports.

    Tensors and arrays become numbers and lists. Numbers that are not finite become None.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Size):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _numbers(fields: dict) -> dict[str, float]:
    """Return the numbers in nested dicts as one dict, such as ``{"iou/lake": 0.7}``."""
    return {
        name: value
        for name, value in named_values(fields, "/")
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
