"""The log of a run: one JSON object a line in ``log.jsonl``, so that a killed run leaves whole lines and any tool can read them.

    {"kind": "step", "step": 12, "epoch": 0, "time": 1700000000.123, "loss": 0.69, "lr": 0.001}
    {"kind": "validation", "step": 40, "epoch": 0, "time": ..., "loss": 0.5, "iou": {"land": 0.97, "lake": null}}

``step`` counts the optimizer steps that are done, ``time`` is Unix time in seconds. A number that is not finite is written as
null. A run that resumes at step n drops the lines of later steps: the file reads as if the run had never stopped. The curves
of ``distseg plot`` are drawn from the fields ``loss``, ``lr`` and ``iou``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, Iterator

from distseg.config.sizes import Size
from distseg.report.disk import atomic_write

KINDS = ("start", "step", "validation", "end")
FILE = "log.jsonl"
EVENTS = "tensorboard"


class SilentLog:
    """Writes nothing: the log of the ranks that do not write."""

    def write(self, kind: str, step: int, epoch: int, **fields: Any) -> None:
        """Append one line.

        Args:
            kind: ``start``, ``step``, ``validation`` or ``end``.
            fields: numbers, texts, and lists and dicts of them; tensors and arrays become numbers and lists.
        """

    def close(self) -> None:
        pass

    def __enter__(self) -> "SilentLog":
        return self

    def __exit__(self, *error) -> None:
        self.close()


class RunLog(SilentLog):
    """``log.jsonl`` in a folder, and TensorBoard's event files beside it where the tensorboard package is installed.

    Args:
        folder: made if it is not there.
        resumed_step: optimizer steps that the resumed checkpoint has behind it: later lines go. None for a new run,
            which keeps the log of an earlier one in the same folder as ``log.1.jsonl``, ``log.2.jsonl``, ...
        revalidates: the checkpoint does not know yet of the validation after that step, which comes again.
    """

    def __init__(
        self,
        folder: str | Path,
        tensorboard: bool = True,
        resumed_step: int | None = None,
        revalidates: bool = False,
    ):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        if resumed_step is None:
            _set_aside(folder)
        else:
            _truncate(self.path, resumed_step, revalidates)
        self._file = open(self.path, "a", buffering=1, encoding="utf-8")
        self._events = _event_writer(folder / EVENTS, resumed_step) if tensorboard else None

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
        if self._events and kind in ("step", "validation"):
            for tag, value in scalars(kind, fields):
                self._events.add_scalar(tag, value, step)

    def close(self) -> None:
        self._file.close()
        if self._events:
            self._events.close()


def open_log(
    folder: str | Path,
    tensorboard: bool,
    enabled: bool,
    resumed_step: int | None = None,
    revalidates: bool = False,
) -> SilentLog:
    """A :class:`RunLog` on the one rank that is ``enabled``, a :class:`SilentLog` on the others."""
    return RunLog(folder, tensorboard, resumed_step, revalidates) if enabled else SilentLog()


def read_log(path: str | Path) -> list[dict]:
    """The lines of a log (or of the log in a run's folder). A last line that was cut by a kill is left out.

    Raises:
        ValueError: no such file, or a line that is not JSON.
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
    """Keep the whole lines up to ``step``, that of a validation which comes again left out. The new file replaces the old at once: a kill
    leaves one or the other."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    entries = [_parse(line) for line in lines]
    _keep_damaged(
        path, [number for number, entry in enumerate(entries[:-1], 1) if entry is None]
    )  # the last one may be cut by a kill
    again = lambda entry: (
        revalidates and entry.get("step") == step and entry.get("kind") == "validation"
    )  # noqa: E731
    kept = [
        (line, entry)
        for line, entry in zip(lines, entries)
        if entry is not None and entry.get("step", 0) <= step and not again(entry)
    ]
    _tell_gaps(path, step, {entry.get("step") for _, entry in kept if entry.get("kind") == "step"})
    with atomic_write(path) as growing:
        growing.write_bytes(b"".join(line + b"\n" for line, _ in kept))


def _keep_damaged(path: Path, lines: list[int]) -> None:
    """Keep a log with damaged lines beside the one that goes on without them."""
    if lines:
        kept_as = _free(path.parent)[0]
        shutil.copyfile(path, kept_as)
        print(
            f"distseg: {path} is damaged in line {', '.join(map(str, lines[:5]))}, which is left "
            f"out; the file as it was is {kept_as.name}",
            file=sys.stderr,
        )


def _tell_gaps(path: Path, step: int, there: set[int]) -> None:
    if missing := [n for n in range(1, step + 1) if n not in there]:
        print(
            f"distseg: {path} has no entry of {len(missing)} of the {step} steps before (the "
            f"first is step {missing[0]}): the curves will have a gap",
            file=sys.stderr,
        )


def _set_aside(folder: Path) -> None:
    """Rename an earlier run's log and event files with the first number that is free."""
    if not (folder / FILE).exists():
        return
    log, events = _free(folder)
    os.replace(folder / FILE, log)
    if (folder / EVENTS).exists():
        os.replace(folder / EVENTS, events)


def _free(folder: Path) -> tuple[Path, Path]:
    """Names that nothing has yet, for a log and its event files."""
    pairs = ((folder / f"log.{n}.jsonl", folder / f"{EVENTS}.{n}") for n in count(1))
    return next(pair for pair in pairs if not any(path.exists() for path in pair))


def _event_writer(folder: Path, resumed_step: int | None):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(
            f"tensorboard is not installed (pip install tensorboard): {FILE} is written, event "
            "files are not",
            file=sys.stderr,
        )
        return None
    return SummaryWriter(
        str(folder), purge_step=None if resumed_step is None else resumed_step + 1, flush_secs=10
    )


def plain(value: Any) -> Any:
    """``value`` in JSON's types: tensors and arrays as numbers and lists, numbers that are not finite as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Size):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def scalars(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of nested fields with TensorBoard's tags: ``('validation/iou/lake', 0.7)``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from scalars(f"{tag}/{key}", inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield tag, value
