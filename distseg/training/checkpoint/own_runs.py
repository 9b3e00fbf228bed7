"""The record of a user's own runs: whose code may be imported again without being named again.

The manifest of a run may come from anywhere, and to import the network that it names runs code. A run
that this user trained in this very folder with this very code is another matter: a record of it lies
in the user's own state folder (XDG_STATE_HOME, by default ~/.local/state), outside of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from distseg.report.disk import atomic_write


def remember_run(run: str | Path, network: str, part: str = "network") -> None:
    """Record that this user trains ``network``, as package.module:function, into the folder ``run``.

    A run has a record for each ``part`` that is code of the user's, the network and the head of one of patches. Nothing is recorded, and nothing fails, where the state folder cannot be written.
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
    """Return why the code of ``network`` is not imported for ``run``; None if it is this user's own run.

    The folder must belong to this user, lie where it was trained, and the file of the network must be
    the same one with the same content.
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
        return f"the code that you trained was {record.get('code')}"
    if _digest(code) != record.get("digest"):
        return f"{code} has changed since"
    return None


def _record_of(run: str | Path, part: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = hashlib.sha256(os.path.realpath(run).encode()).hexdigest()[:32]
    return (
        Path(state) / "distseg" / "runs" / f"{name}{'' if part == 'network' else f'-{part}'}.json"
    )


def _code_of(network: str) -> Path | None:
    """Return the file of a network's module, found without importing anything."""
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
