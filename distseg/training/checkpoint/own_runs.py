"""Record a user's own runs, so that the user need not name their networks again to load them.

The manifest of a run may come from anywhere, and importing the network that it names runs code. The
code is trusted if this user trained the run, in this folder and with the same file of code. The
record of a training lies in the user's state folder (XDG_STATE_HOME, by default ~/.local/state),
outside of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from distseg.report.disk import atomic_write


def remember_run(run: str | Path, network: str, part: str = "network") -> None:
    """Record that this user trains ``network`` into the folder ``run``.

    So :func:`distrusted` accepts the network's code later, and the user need not name it again. If
    the network's file is not found, or the state folder cannot be written, nothing is recorded and
    no error is raised.

    Args:
        run: the run's folder.
        network: the user's function, as package.module:function.
        part: ``network``, or ``head`` for the head of a PatchGD network. Each has its own record.
    """
    code = _code_of(network)
    path = _record_of(run, part)
    if code is None:
        return
    content = {
        "run": os.path.realpath(run),
        "network": network,
        "code": str(code),
        "digest": _digest(code),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path) as growing:
            growing.write_text(json.dumps(content, indent=1))
    except OSError:
        return


def distrusted(run: str | Path, network: str, part: str = "network") -> str | None:
    """Return the reason not to import the code of ``network`` for ``run``, or None to trust it.

    The code is trusted if the run's folder belongs to this user and lies where the run was trained,
    and if the network's file has the same path and content as in training.

    Args:
        run: the run's folder.
        network: the user's function, as package.module:function.
        part: ``network``, or ``head`` for the head of a PatchGD network.
    """
    folder, path = os.path.realpath(run), _record_of(run, part)
    try:
        record = json.loads(path.read_text())
        foreign = {os.stat(folder).st_uid, os.stat(path).st_uid} != {os.getuid()}
    except (OSError, ValueError):
        return "it was not trained by you in this folder"
    if foreign or not isinstance(record, dict) or record.get("run") != folder:
        return "it was not trained by you in this folder"
    if record.get("network") != network:
        return f"you trained {record.get('network')} in this folder"
    code = _code_of(network)
    if code is None or str(code) != record.get("code"):
        return f"you trained with the code in {record.get('code')}, and now the name means another"
    if _digest(code) != record.get("digest"):
        return f"{code} has changed since you trained"
    return None


def _record_of(run: str | Path, part: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = hashlib.sha256(os.path.realpath(run).encode()).hexdigest()[:32]
    return (
        Path(state) / "distseg" / "runs" / f"{name}{'' if part == 'network' else f'-{part}'}.json"
    )


def _code_of(network: str) -> Path | None:
    """Return the file of a network's module, or None if there is no such file.

    The file is searched for in the current folder and in ``sys.path``. Nothing is imported.
    """
    parts = network.partition(":")[0].split(".")
    for folder in [os.getcwd(), *sys.path]:
        for path in (
            Path(folder or ".", *parts).with_suffix(".py"),
            Path(folder or ".", *parts, "__init__.py"),
        ):
            if path.is_file():
                return path.resolve()
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
