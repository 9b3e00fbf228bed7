"""List the runs in a folder: progress, best checkpoint, mesh and versions of each."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

from distseg.training.checkpoint.files import FOLDER, find, names_of, read_run_manifest
from distseg.training.resume import position_of


def runs_in(folder: str | Path) -> list[Path]:
    """Return the folders of all runs in ``folder`` and below, ``folder`` itself included.

    Raises:
        FileNotFoundError: there is no run.
    """
    folder = Path(folder)
    found = sorted(
        {path.parent for path in folder.rglob(FOLDER) if path.is_dir() and names_of(path.parent)}
    )
    if not found:
        raise FileNotFoundError(f"no run in {folder}: name a folder with runs (train.output) in it")
    return found


def describe(run: Path) -> dict:
    """Return the row of a run in the table of ``distseg runs``, as a dict from column to value.

    The row of a damaged run has only its folder and the damage.
    """
    try:
        last, best = read_run_manifest(find(run, "last")), find(run, "best")
        score = read_run_manifest(best).get("score")
    except (ValueError, OSError) as e:
        return {"run": str(run), "state": f"damaged: {e}"}
    mesh, versions = last["config"].get("mesh", {}), last.get("versions", {})
    done, wanted = last["epoch"], last["config"].get("train", {}).get("epochs")
    patience = last["config"].get("train", {}).get("patience")
    return {
        "run": str(run),
        "state": "trains"
        if _trains(run)
        else "whole"
        if wanted and done >= wanted
        else "stopped early"
        if patience and position_of(last).waited >= patience
        else "to be continued",
        "epochs": f"{done}/{wanted}",
        "steps": last["step"],
        "best": best.name,
        "score": None if score is None else round(score, 4),
        "checkpoints": len(names_of(run)),
        "mesh": f"{mesh.get('samples')} x ({mesh.get('tiles')}) x {mesh.get('stages')}",
        "distseg": versions.get("distseg", "before 0.2"),
        "torch": versions.get("torch", "-"),
        "host": last.get("host", "-"),
        "written": time.strftime("%Y-%m-%d %H:%M", time.localtime(last["time"]))
        if "time" in last
        else "-",
    }


def _trains(run: Path) -> bool:
    """Return True if a job that trains the run holds the run's lock, else False."""
    try:
        with open(run / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
