"""Which networks of one idea each, as papers have them, run in tiles exactly?

Each is tried on images of odd sizes in two layouts on one process: tiles that exchange borders,
and tiles streamed one after another. What is not exact is to be refused with the line of code that
is in the way. A worker process tries many networks, so that PyTorch is imported once.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import parent, report
from benchmarks.ranks import job_environment
from benchmarks.research import GROUPS, collection
from benchmarks.rows import Rows

QUESTION = "Which networks of one idea each, as researchers write them, run in tiles exactly?"
KINDS = ("exact", "refused", "silent", "crash")
_QUICK = ("SqueezeExcitation", "MeanPool", "CausalTCN")
_MARK = "RESULT "


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="networks or groups (files of benchmarks/research)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="worker processes (default: %(default)s)"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=120,
        metavar="S",
        help="seconds a network (default: %(default)s)",
    )
    parser.add_argument(
        "--plain", action="store_true", help="only run each network in PyTorch, and say what fails"
    )
    parser.add_argument(
        "--worker", nargs="+", help="internal: try these networks, print a line of JSON for each"
    )
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options.worker, options.limit)
    names = chosen(options.only or (_QUICK if options.quick else None))
    if options.plain:
        return plain(names)
    shares = [names[i :: options.jobs] for i in range(min(options.jobs, len(names)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        found = {
            row["network"]: row
            for rows in pool.map(lambda share: list(rows_of(share, options.limit)), shares)
            for row in rows
        }
    rows = [found[name] for name in names]
    notes = "\n".join([*_of_groups(rows), "", *_not_exact(rows), "", closing(rows)])
    table = [{key: _short(value) for key, value in row.items()} for row in rows]
    parameters = {"images": 2, "classes": 3, "seconds a network": options.limit}
    report(
        "research_networks", QUESTION, Rows(table, {"networks": rows}), options, parameters, notes
    )


def chosen(only: Sequence[str] | None) -> list[str]:
    """Return the names of the networks that ``only`` lists by name or group; all by default.

    Raises:
        SystemExit: a name that is neither.
    """
    entries = collection()
    wrong = [name for name in only or () if name not in entries and name not in GROUPS]
    if wrong:
        raise SystemExit(
            f"--only {' '.join(wrong)}: no such network or group; groups are {', '.join(GROUPS)}"
        )
    return [n for n, entry in entries.items() if only is None or n in only or entry.group in only]


def work(names: Sequence[str], limit: int) -> None:
    """Try networks one after another; print the row of each."""
    from benchmarks.research_trial import trial
    from distseg.comm.launch import world

    warnings.simplefilter("ignore")
    comm, entries = world(), collection()
    signal.signal(signal.SIGALRM, _out_of_time)
    for name in names:
        signal.alarm(limit)
        try:
            row = trial(entries[name], comm)
        except _OutOfTime:
            row = _without_result(name, f"took longer than {limit} s")
        finally:
            signal.alarm(0)
        print(_MARK + json.dumps(row), flush=True)


class _OutOfTime(BaseException):
    """Raised by the alarm; no ``except Exception`` on the way takes it."""


def _out_of_time(*_) -> None:
    raise _OutOfTime


def rows_of(names: list[str], limit: int) -> Iterator[dict]:
    """Yield the rows of networks from worker processes.

    A process that hangs or dies costs its network alone: another one goes on behind it.
    """
    left = list(names)
    while left:
        for row in _of_worker(left, limit):
            left.remove(row["network"])
            print(
                f"{row['network']:<28}{row['kind']:<9}{row['said'][:150]}",
                file=sys.stderr,
                flush=True,
            )
            yield row
        if left:
            yield _without_result(left.pop(0), "the process ended or hung")


def _of_worker(names: list[str], limit: int) -> Iterator[dict]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.research_networks",
        "--limit",
        str(limit),
        "--worker",
        *names,
    ]
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=root,
        env=job_environment(1),
    ) as worker:
        timer = _killing(worker, 2 * limit + 60)
        for line in worker.stdout:
            if line.startswith(_MARK):
                timer.cancel()
                timer = _killing(worker, 2 * limit)
                yield json.loads(line[len(_MARK) :])
        timer.cancel()


def _killing(worker: subprocess.Popen, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, worker.kill)
    timer.daemon = True
    timer.start()
    return timer


def _without_result(name: str, why: str) -> dict:
    return {
        "group": collection()[name].group,
        "network": name,
        "kind": "crash",
        "size": "",
        "line named": None,
        "said": why,
    }


def plain(names: list[str]) -> None:
    """Run networks in PyTorch alone; print those that fail, which are then no valid examples."""
    from benchmarks.research_trial import CLASSES, IMAGES, SIZES, plain_failure

    entries = collection()
    wrong = {name: why for name in names if (why := plain_failure(entries[name]))}
    print("\n".join(f"{name}: {why}" for name, why in wrong.items()))
    settings = f"{IMAGES} images, {CLASSES} classes, {SIZES}"
    print(f"{len(names) - len(wrong)} of {len(names)} run in PyTorch ({settings})")


def _short(value):
    if isinstance(value, float):
        return f"{value:.0e}"
    return "" if value is None else value[:70] if isinstance(value, str) else value


def _of_groups(rows: list[dict]) -> list[str]:
    lines = [f"{'group':<20}" + "".join(f"{kind:>9}" for kind in ("networks", *KINDS))]
    for group in dict.fromkeys(row["group"] for row in rows):
        kinds = [row["kind"] for row in rows if row["group"] == group]
        lines.append(
            f"{group:<20}{len(kinds):>9}" + "".join(f"{kinds.count(kind):>9}" for kind in KINDS)
        )
    return lines


def _not_exact(rows: list[dict]) -> list[str]:
    return [
        f"{row['kind']}: {row['network']}: {row['said']}" for row in rows if row["kind"] != "exact"
    ]


def closing(rows: list[dict]) -> str:
    """Return a sentence with the share of exact networks and the refusals that name a line."""
    kinds = [row["kind"] for row in rows]
    exact, refused = kinds.count("exact"), kinds.count("refused")
    named = sum(bool(row["line named"]) for row in rows)
    multiples = sum(bool(row.get("only multiples")) and row["kind"] == "exact" for row in rows)
    return (
        f"{exact} of {len(rows)} networks exact ({exact / len(rows):.0%}; "
        f"{multiples} of them only on multiples of a size, where PyTorch takes any), "
        f"{refused} refused ({named} with the line of their own code), "
        f"{kinds.count('silent')} silent, {kinds.count('crash')} crashed"
    )


if __name__ == "__main__":
    main()
