"""A distseg command in which one rank meets with a fault; as a program, on the ranks of a job (benchmarks/faults.py).

    mpirun -n 4 python -m benchmarks.faulty FOLDER '{"rank": 1, "place": "validation", "count": 2, "signal": "SIGSTOP"}' train config.yaml ...

A *place* is what the rank says of itself to its guardian (:mod:`distseg.comm.watch`): the fault comes when a text with these words is said
for the count-th time, or, with ``"after": seconds``, so long after the first step began. It comes once: FOLDER/fault has its moment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from distseg.cli.main import main
from distseg.comm import progress
from distseg.comm.launch import identify


def install(folder: Path, fault: dict) -> None:
    """Have the fault come where it should."""
    seen, write, mark = [0], progress._write, folder / "fault"

    def strike() -> None:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        mark.write_text(repr(time.time()))
        os.kill(os.getpid(), getattr(signal, fault["signal"]))

    def noting(at: int, text: str) -> None:
        write(at, text)
        if fault["place"] in text and text:
            seen[0] += 1
            if seen[0] == fault["count"]:
                if fault.get("after"):
                    threading.Timer(fault["after"], strike).start()
                else:
                    strike()

    progress._write = noting


if __name__ == "__main__":
    folder, fault = Path(sys.argv[1]), json.loads(sys.argv[2])
    if identify().rank == fault["rank"] and not (folder / "fault").exists():
        install(folder, fault)
    sys.argv[1:] = sys.argv[3:]
    main()  # as a program
