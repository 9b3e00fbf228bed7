"""Check at the start of a job that all ranks agree on settings, files and versions.

Ranks with different settings, file systems or versions would train a wrong model or wait for each
other for ever.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from distseg.comm.launch import JointFailure, largest

_MOST = 5  # largest number of differences in a message


def assert_consistent(comm, facts: Mapping[str, object], repair: str) -> None:
    """Check that named values, such as settings and versions, are equal on all ranks of ``comm``.

    All ranks of ``comm`` must call it together. The ranks exchange one small message, and a larger
    one only if something differs.

    Args:
        facts: this rank's values by name.
        repair: words that tell the user how to fix a difference.

    Raises:
        JointFailure: a value differs. It is raised on all ranks. The message has the name, both
            values and both ranks, and ends with ``repair``.
    """
    # Tuples are shown as users write sizes, such as 512x512.
    shown = {
        name: "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in facts.items()
    }
    digest = bytes.fromhex(_digest(json.dumps(shown, sort_keys=True)))
    # The largest and the smallest of all ranks; a word has 32 bits, so that its negative fits too.
    words = struct.unpack("<8I", digest)
    found = largest(comm, [*words, *(-word for word in words)])
    if found[:8] == [-word for word in found[8:]]:
        return
    facts_that_differ = differences(comm.allgather(shown))
    count, named = len(facts_that_differ), "; ".join(facts_that_differ[:_MOST])
    more = f"; and {count - _MOST} more" if count > _MOST else ""
    raise JointFailure(f"the ranks do not agree: {named}{more}. {repair}")


def differences(of_ranks: list[Mapping[str, str]]) -> list[str]:
    """Return a sentence for each name whose value on some rank differs from the value on rank 0.

    Args:
        of_ranks: for each rank, its values by name.
    """
    names = dict.fromkeys(name for facts in of_ranks for name in facts)
    found = []
    for name in names:
        first = of_ranks[0].get(name, "missing")
        others = [
            rank for rank, facts in enumerate(of_ranks) if facts.get(name, "missing") != first
        ]
        if others:
            more = f" (and on {len(others) - 1} more)" if len(others) > 1 else ""
            found.append(
                f"{name} is {first} on rank 0 and {of_ranks[others[0]].get(name, 'missing')} on "
                f"rank {others[0]}{more}"
            )
    return found


def settings(sections: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Flatten sections of settings: ``{"optim": {"lr": 0.1}}`` -> ``{"optim.lr": "0.1"}``."""
    return {
        f"{section}.{field}": str(value)
        for section, fields in sections.items()
        for field, value in fields.items()
    }


@lru_cache
def versions() -> dict[str, str]:
    """Return the versions of distseg (with a digest of its sources), torch and Python."""
    from importlib.metadata import version

    from distseg import __version__

    sources = sorted(p for p in Path(__file__).parents[1].rglob("*") if p.suffix in (".py", ".cpp"))
    code = _digest(*(p.read_bytes() for p in sources))
    return {
        "distseg": f"{__version__} ({code[:12]})",
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part if isinstance(part, bytes) else part.encode())
    return whole.hexdigest()
