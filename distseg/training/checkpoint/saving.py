"""Writes checkpoints while the training goes on: each appears whole or not at all, and holds up a step for a copy in memory only.

The ranks of one pipeline write, each its own layers, in a thread of its own. What they write lies in a folder of another
name until all parts are on the disk; the thread of the first stage then adds the manifest and gives the folder its name::

    main thread   step - copy - step - step - step ...
    writer              +--- weights, optimizer, part-2-of-3.json ---+            (each stage)
    first stage's            ... all parts are there: manifest.json, rename ---+
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from itertools import count
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor, nn

from distseg.comm.collective import Alone
from distseg.comm.watch import heartbeat, waits
from distseg.report.disk import require_disk_space, to_disk
from distseg.training.checkpoint.files import (
    FOLDER,
    FORMAT,
    KINDS,
    VERSION,
    file_of,
    names_of,
    optimizer_state,
    read_index,
    read_manifest,
    write_index,
    write_json,
    write_manifest,
)  # fmt: skip
from distseg.training.checkpoint.tensors import write_tensors


class SilentCheckpoints:
    """Of the ranks that do not write."""

    seconds = 0.0

    def save(self, *_, **__) -> None:
        pass

    def update(self, *_, **__) -> None:
        pass

    def check(self) -> None:
        pass

    def flush(self) -> None:
        pass


class Checkpoints(SilentCheckpoints):
    """The checkpoints of a run; written by the ranks of one pipeline (all others have :class:`SilentCheckpoints`).

    Args:
        keep: last checkpoints kept, beside the best.
        stages: the communicator of the pipeline, whose ranks all see the folder. The first one writes what is not a stage's own.
        aside: write while the training goes on, which takes a copy of the state in memory; else :meth:`save` returns when all is written.

    Attributes:
        seconds: that the last checkpoint took to be written.
    """

    def __init__(self, run: str | Path, keep: int = 2, stages=Alone(), aside: bool = False):
        self.folder, self.keep, self.stages, self.aside = Path(run) / FOLDER, keep, stages, aside
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written, self.seconds = 0, 0.0
        self._last: Path | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        manifest: dict,
        score: float | None = None,
    ) -> Path:
        """Begin to write the state after ``manifest['step']`` steps. Collective over the stages.

        Raises:
            OSError: the one before could not be written; naming the file.
        """
        self.flush()
        self._last = self.folder / f"step-{manifest['step']:08d}"
        partial = self.folder / f".{self._last.name}.partial"
        if self.stages.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # of a job that was killed
            partial.mkdir(parents=True)
        self.stages.Barrier()
        state = {
            "weights": dict(model.state_dict()),
            "optimizer": optimizer_state(model, optimizer),
        }
        if self.aside:
            state = {
                kind: {name: _copy(t) for name, t in tensors.items()}
                for kind, tensors in state.items()
            }
        what = {
            "format": FORMAT,
            "version": VERSION,
            "score": score,
            "parts": self.stages.size,
            **manifest,
        }
        self._begin(lambda: self._write(partial, self._last, state, what))
        if not self.aside:
            self.flush()
        return self._last

    def update(self, score: float | None = None, **fields) -> None:
        """Add to the last checkpoint's manifest what is known by now, such as a validation's scores."""
        if self.stages.rank == 0:
            self.flush()
            write_manifest(self._last, {**read_manifest(self._last), "score": score, **fields})
            self._note(self._last.name, score)

    def check(self) -> None:
        """Raise what the writer met with, if anything."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def flush(self) -> None:
        """Wait until all is written."""
        if self._thread is not None:
            seen = -1
            waits("the checkpoint to be written")
            while self._thread.is_alive():
                self._thread.join(0.2)
                if self._written != seen:
                    seen = self._written
                    heartbeat(f"checkpoint, {seen / 1e6:.0f} MB written")
            self._thread = None
            waits("")
        self.check()

    # in the writer

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            began = time.monotonic()
            try:
                if self.aside:
                    _give_way()
                work()
            except BaseException as e:
                self._error = e
            self.seconds = time.monotonic() - began

        self._thread = threading.Thread(target=run, name="distseg-checkpoint", daemon=True)
        self._thread.start()

    def _write(
        self, partial: Path, final: Path, state: dict[str, dict[str, Tensor]], manifest: dict
    ) -> None:
        part, parts = self.stages.rank + 1, self.stages.size
        sums = {
            file_of(kind, part, parts): write_tensors(
                partial / file_of(kind, part, parts), state[kind], note=self._count
            )
            for kind in KINDS
        }
        write_json(partial / _part(part, parts), sums)
        if part > 1:
            return
        for number in range(1, parts + 1):
            told = partial / _part(number, parts)
            while not told.exists():  # should that stage fail, its rank ends the job
                time.sleep(0.01)
            sums.update(json.loads(told.read_text()))
            told.unlink()
        write_manifest(partial, {**manifest, "tensors": sums})
        _put_in_place(partial, final)
        self._note(final.name, manifest["score"])

    def _count(self, written: int) -> None:
        self._written += written

    def _note(self, name: str, score: float | None) -> None:
        index = {"best": None, "best_score": None, **(read_index(self.folder) or {})}
        index["last"] = name
        # Without any score so far, the last one is as good as any.
        if index["best_score"] is None or (score is not None and score >= index["best_score"]):
            index.update(best=name, best_score=score)
        write_index(self.folder, index)
        kept = {name, index["best"], *names_of(self.folder.parent)[-max(1, self.keep) :]}
        for old in self.folder.glob("step-*"):
            if old.name not in kept:
                shutil.rmtree(old)


def set_aside(run: str | Path, after: int = -1) -> Path | None:
    """Move a run's checkpoints of more than ``after`` steps to a folder ``checkpoints.1`` and so on; returns it, or None where there is none.

    So a new run in an old folder, or one that resumes from an earlier checkpoint, overwrites nothing.
    """
    folder = Path(run) / FOLDER
    later = [name for name in names_of(run) if int(name.removeprefix("step-")) > after]
    if not later:
        return None
    aside = next(path for n in count(1) if not (path := folder.with_name(f"{FOLDER}.{n}")).exists())
    if after < 0:
        os.replace(folder, aside)
        return aside
    aside.mkdir()
    for name in later:
        os.replace(folder / name, aside / name)
    index, there = read_index(folder) or {}, names_of(run)
    if there:
        best = index.get("best") if index.get("best") in there else None
        write_index(
            folder,
            {
                "last": there[-1],
                "best": best or there[-1],
                "best_score": index.get("best_score") if best else None,
            },
        )
    return aside


def check_room(run: str | Path, needed: int) -> None:
    """Refuse to train where the next checkpoint would not fit; the run's folder is made.

    Raises:
        OSError: naming the folder, what it takes and what is free.
    """
    require_disk_space(Path(run), needed, "the next checkpoint")
    Path(run).mkdir(parents=True, exist_ok=True)


def state_bytes(model: nn.Module, copies: int) -> int:
    """What a checkpoint of ``model`` takes with an optimizer that keeps so many numbers a weight."""
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return sum(t.nbytes for t in model.state_dict().values()) + copies * weights


def _part(number: int, parts: int) -> str:
    return f"part-{number}-of-{parts}.json"


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename, also over an older folder of that name, of which one or the other is there after a kill."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(partial, final)
    to_disk(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _copy(t: Tensor) -> Tensor:
    """On the CPU, contiguous, in memory of its own."""
    return torch.empty(t.shape, dtype=t.dtype).copy_(t.detach())


def _give_way() -> None:
    """Let the writer run where nobody else wants the core."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    except (OSError, AttributeError):
        pass
