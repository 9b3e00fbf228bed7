"""Write checkpoints while training goes on; each appears as a whole or not at all.

A step waits only for a copy of the state in memory. The ranks of one pipeline write, each its own
layers, in a thread. The files lie in a folder with a temporary name until all parts are on the
disk. The thread of the first stage then adds the manifest and renames the folder::

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
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from distseg.comm.collective import Alone
from distseg.comm.launch import raise_jointly
from distseg.comm.progress import heartbeat, waits
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
)
from distseg.training.checkpoint.tensors import write_tensors


class SilentCheckpoints:
    """Stand-in for :class:`Checkpoints` on ranks that write no checkpoints; does nothing."""

    seconds = 0.0

    def save(self, *_, **__) -> None:
        """Write no checkpoint."""

    def update(self, *_, **__) -> None:
        """Change no checkpoint."""

    def check(self) -> None:
        """Return without an error, because no thread writes."""

    def flush(self) -> None:
        """Return at once, because no thread writes."""


class Checkpoints(SilentCheckpoints):
    """Writer of a run's checkpoints, on the ranks of one pipeline.

    All other ranks have :class:`SilentCheckpoints`.

    Args:
        run: the run's folder.
        keep: number of newest checkpoints to keep, in addition to the best one.
        stages: the communicator of the pipeline, whose ranks must all see the folder. Each rank
            writes its own layers. The first rank also writes the manifest and the index.
        aside: True to write in a thread while training goes on, which needs memory for a copy of
            the state. If False, :meth:`save` returns when all is written.

    Attributes:
        seconds: seconds that writing the last checkpoint took.
    """

    def __init__(self, run: str | Path, keep: int = 2, stages=Alone(), aside: bool = False):
        self.folder, self.keep, self.stages, self.aside = Path(run) / FOLDER, keep, stages, aside
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written, self.seconds, self._began = 0, 0.0, 0.0
        self._last: Path | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        manifest: dict,
        score: float | None = None,
    ) -> Path:
        """Begin to write a checkpoint of the state after ``manifest['step']`` steps.

        Return the folder of the checkpoint, which appears only when all files are written. All
        ranks of the pipeline must call this method together.

        Args:
            model: the model, with the layers of this rank.
            optimizer: the optimizer of these layers.
            manifest: fields of the checkpoint's manifest, with at least ``step``.
            score: the score by which checkpoints are compared (higher is better), or None if it is
                not known yet.

        Raises:
            OSError: this or the previous checkpoint could not be written. The message names the
                file.
            JointFailure: with several stages, instead of OSError, on all ranks of the pipeline
                (:func:`distseg.comm.launch.raise_jointly`).
        """
        self.flush()
        self._began = time.monotonic()
        self._last = self.folder / f"step-{manifest['step']:08d}"
        partial = self.folder / f".{self._last.name}.partial"
        with self._raise_jointly():
            if self.stages.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # left by a job that was killed
                partial.mkdir(parents=True)
        state = {
            "weights": dict(model.state_dict()),
            "optimizer": optimizer_state(model, optimizer),
        }
        if self.aside:
            state = {
                kind: {name: _copy(t) for name, t in tensors.items()}
                for kind, tensors in state.items()
            }
        content = {
            "format": FORMAT,
            "version": VERSION,
            "score": score,
            "parts": self.stages.size,
            **manifest,
        }
        if self.aside:
            self._begin(lambda: self._write(partial, self._last, state, content))
            return self._last
        try:
            with self._raise_jointly():
                self._begin(lambda: self._write_part(partial, state))
                self.flush()
            with self._raise_jointly():
                if self.stages.rank == 0:
                    self._begin(lambda: self._complete(partial, self._last, content))
                    self.flush()
        except Exception:
            if self.stages.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
            raise
        return self._last

    def update(self, score: float | None = None, **fields) -> None:
        """Add fields to the last checkpoint's manifest, such as the scores of a validation.

        Only the first rank of the pipeline does this, after the checkpoint is written.

        Args:
            score: the score by which checkpoints are compared, or None if it is not known.
            fields: the fields to add.
        """
        if self.stages.rank == 0:
            self.flush()
            write_manifest(self._last, {**read_manifest(self._last), "score": score, **fields})
            self._note(self._last.name, score)

    def check(self) -> None:
        """Raise the error of the writing thread, if it had one."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def flush(self) -> None:
        """Wait until the checkpoint is written, and raise the writing thread's error, if any."""
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

    def _raise_jointly(self):
        several = self.stages.size > 1
        return raise_jointly(self.stages, "stage") if several else nullcontext()

    # The writing thread.

    def _begin(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread; :meth:`check` raises its error, if there is one."""

        def run() -> None:
            try:
                if self.aside:
                    _give_way()
                work()
            except BaseException as e:
                self._error = e
            self.seconds = time.monotonic() - self._began

        self._thread = threading.Thread(target=run, name="distseg-checkpoint", daemon=True)
        self._thread.start()

    def _write(
        self, partial: Path, final: Path, state: dict[str, dict[str, Tensor]], manifest: dict
    ) -> None:
        """Write this stage's files; on the first stage, wait for the others and finish the folder.

        Args:
            partial: the folder in which the checkpoint is written.
            final: the folder that it becomes.
            state: the tensors of each kind, by their names.
            manifest: the manifest.
        """
        self._write_part(partial, state)
        if self.stages.rank > 0:
            return
        for number in range(1, self.stages.size + 1):
            while not (partial / _part(number, self.stages.size)).exists():
                time.sleep(0.01)  # if that stage fails, its rank ends the job
        self._complete(partial, final, manifest)

    def _write_part(self, partial: Path, state: dict[str, dict[str, Tensor]]) -> None:
        """Write this rank's tensors, and then a file with their checksums.

        Args:
            partial: the folder in which the checkpoint is written.
            state: the tensors of each kind (weights, optimizer), by their names.
        """
        part, parts = self.stages.rank + 1, self.stages.size
        sums = {
            file_of(kind, part, parts): write_tensors(
                partial / file_of(kind, part, parts), state[kind], note=self._count
            )
            for kind in KINDS
        }
        write_json(partial / _part(part, parts), sums)

    def _complete(self, partial: Path, final: Path, manifest: dict) -> None:
        """Complete a checkpoint whose parts are all written.

        Write the manifest, rename the folder ``partial`` to ``final``, and update the index.
        """
        sums: dict = {}
        for number in range(1, self.stages.size + 1):
            listed = partial / _part(number, self.stages.size)
            sums.update(json.loads(listed.read_text()))
            listed.unlink()
        write_manifest(partial, {**manifest, "tensors": sums})
        _put_in_place(partial, final)
        self._note(final.name, manifest["score"])

    def _count(self, written: int) -> None:
        self._written += written

    def _note(self, name: str, score: float | None) -> None:
        """Enter a new checkpoint in the index, and delete checkpoints that are no longer kept.

        Args:
            name: the name of the checkpoint.
            score: its score; None if there is none. Without any score the last checkpoint counts as
                the best.
        """
        index = {"best": None, "best_score": None, **(read_index(self.folder) or {})}
        index["last"] = name
        # Without any score so far, the last checkpoint counts as the best.
        if index["best_score"] is None or (score is not None and score >= index["best_score"]):
            index.update(best=name, best_score=score)
        write_index(self.folder, index)
        kept = {name, index["best"], *names_of(self.folder.parent)[-max(1, self.keep) :]}
        for old in self.folder.glob("step-*"):
            if old.name not in kept:
                shutil.rmtree(old)


def set_aside(run: str | Path, after: int = -1) -> Path | None:
    """Move a run's checkpoints of steps later than ``after`` to a new folder.

    A new run in the same folder then overwrites no checkpoint of the earlier run. A run that
    resumes from an older checkpoint overwrites no later one.

    Args:
        run: the run's folder.
        after: a number of steps; by default all checkpoints are moved.

    Returns:
        The new folder ``checkpoints.N``, or None if there is nothing to move.
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
    if there := names_of(run):
        best, score = _best_of(folder, there)
        write_index(folder, {"last": there[-1], "best": best, "best_score": score})
    return aside


def _best_of(folder: Path, names: list[str]) -> tuple[str, float | None]:
    """Return the name and the score of the checkpoint with the highest score.

    If several checkpoints have this score, return the newest of them. If no checkpoint has a score,
    return the newest one and None. A checkpoint with a damaged manifest counts as one without a
    score.

    Args:
        folder: the folder ``checkpoints`` of the run.
        names: the names of the checkpoints, oldest first.
    """
    scored = []
    for name in names:
        with suppress(ValueError):
            if (score := read_manifest(folder / name).get("score")) is not None:
                scored.append((score, name))
    score, name = max(scored, default=(None, names[-1]))
    return name, score


def require_space(run: str | Path, needed: int) -> None:
    """Create the run's folder, and refuse to train if the next checkpoint does not fit on the disk.

    Args:
        run: the run's folder.
        needed: the size of a checkpoint in bytes.

    Raises:
        OSError: the disk has too little space. The message names the folder, the needed bytes and
            the free bytes.
    """
    require_disk_space(Path(run), needed, "the next checkpoint")
    Path(run).mkdir(parents=True, exist_ok=True)


def state_bytes(model: nn.Module, copies: int) -> int:
    """Return the size in bytes of a checkpoint of ``model``.

    Args:
        model: the model.
        copies: the number of values that the optimizer keeps for each weight, such as 2 for Adam.
    """
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return sum(t.nbytes for t in model.state_dict().values()) + copies * weights


def _part(number: int, parts: int) -> str:
    return f"part-{number}-of-{parts}.json"


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename ``partial`` to ``final``, which may exist, and flush the rename to the disk.

    An existing folder ``final`` first gets a temporary name, and is deleted at the end. If the job
    is killed before the end, the old folder remains under the temporary name.
    """
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(partial, final)
    to_disk(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _copy(t: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor on the CPU."""
    return torch.empty(t.shape, dtype=t.dtype).copy_(t.detach())


def _give_way() -> None:
    """Give the current thread a low priority, so that it does not slow down training."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    except (OSError, AttributeError):
        pass
