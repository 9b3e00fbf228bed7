"""Plant one fault after another in a copy of the code, and see whether the default tests find it.

For each fault the test files that are most likely to find it run first, then the whole default suite. Nothing outside the
copy is changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import parent, report
from benchmarks.machine import ROOT
from benchmarks.rows import Rows

QUESTION = "Which of the faults that are planted in the core of distseg do the default tests find?"
_COPIED = ("distseg", "tests", "benchmarks", "jobs", "docs", "install")
_LIMIT = 1800  # seconds of all tests on one fault


class Mutant(NamedTuple):
    """A fault: in ``file`` of distseg/ the only ``before`` becomes ``after``; ``tests`` are tried first."""

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTANTS = (
    Mutant("a window starts a stride too late", "tiling/tile.py", "max(0, (a - h) // s * s)", "max(0, -(-(a - h) // s) * s)", "tile exact"),
    Mutant("a window ends a pixel too early", "tiling/tile.py", "min(n, -(-(b + h) // s) * s)", "min(n, -(-(b + h - 1) // s) * s)", "tile exact"),
    Mutant("tiles do not begin at multiples of the stride", "tiling/tile.py", "return [(a * stride, min(b * stride, length))", "return [(a * stride, min(b * stride + 1, length))", "tile"),
    Mutant("groups train on images of other groups", "data/sampler.py", "(micro_batch * self.groups + self.group) * self.images", "(micro_batch + self.group) * self.images", "sampler verify exact"),
    Mutant("gradients are scaled up to the largest norm", "comm/reducer.py", "        if factor < 1:\n", "        if factor > 0:\n", "reducer step optim verify"),
    Mutant("a parameter without a gradient keeps the last step's", "comm/reducer.py", "                view.zero_()\n", "                pass\n", "reducer step api"),
    Mutant("gradients are not reset before a step", "comm/reducer.py", "            bucket.zero_()\n", "            pass\n", "reducer verify exact"),
    Mutant("a sum over ranks is a rank's own part", "comm/collective.py", "    total = _host(x).copy()\n", "    total = _host(x).copy()\n    return upload(torch.from_numpy(total), x.device)\n", "collective norm exact"),
    Mutant("strips of a message overlap", "comm/halo.py", "part = values[offset : offset + count]", "part = values[max(0, offset - 1) : max(0, offset - 1) + count]", "exchange"),
    Mutant("gradients of halos replace the owner's", "comm/halo.py", "                _view(dxs, strip).add_(part)\n", "                _view(dxs, strip).copy_(part)\n", "exchange"),
    Mutant("gradients of halos stay with the neighbour as well", "runtime/stored_halos.py", "stored.buffer_for(box).zero_()", "stored.buffer_for(box)", "streaming program networks"),
    Mutant("images of a norm are weighted alike", "layers/moments.py", "(parts.count / count.where(count > 0, 1)).unsqueeze(-1)", "(1 / len(parts.count) + 0 * parts.count).unsqueeze(-1)", "moments norm exact"),
    Mutant("deviations of parts' means are forgotten", "layers/moments.py", "m2 = (parts.m2 + parts.count.unsqueeze(-1) * (parts.mean - mean) ** 2).sum(0)", "m2 = parts.m2.sum(0)", "moments norm exact"),
    Mutant("running variances are biased", "layers/norm.py", "(m.count - 1).clamp(min=1) if unbiased", "m.count if unbiased", "api norm"),
    Mutant("a dropped channel keeps its spread in the norm", "layers/norm.py", "part.m2 * m * m", "part.m2 * m", "norm dropout exact"),
    Mutant("masks belong to a window's pixels, not the image's", "layers/dropout.py", "position.unsqueeze(-1) * n + torch.arange(a, b, device=device)", "position.unsqueeze(-1) * n + torch.arange(b - a, device=device)", "dropout exact"),
    Mutant("masks are the same in every epoch", "layers/dropout.py", "rng.key(seed, epoch, sample, layer", "rng.key(seed, 0, sample, layer", "dropout verify"),
    Mutant("ignored pixels count in the mean loss", "layers/loss.py", "            return _beside_a_sum(valid.count_nonzero())\n", "            return _beside_a_sum(torch.ones_like(valid).count_nonzero())\n", "loss exact"),
    Mutant("1F1B runs one forward pass too few ahead", "runtime/schedule.py", "min(stages - 1 - stage, micro_batches)", "max(0, min(stages - 2 - stage, micro_batches))", "schedule pipeline"),
    Mutant("ZB-H1 computes weights a micro-batch early", "runtime/schedule.py", "action.micro_batch >= stage:", "action.micro_batch >= stage - 1:", "schedule pipeline"),
    Mutant("frozen parameters thaw an epoch late", "runtime/optimizer.py", 'if epoch >= group["thaw"]', 'if epoch > group["thaw"]', "frozen finetune optim"),
    Mutant("objects touch across labels", "data/vector/components.py", "        return upper[same], lower[same]\n", "        return upper, lower\n", "objects"),
    Mutant("ignored pixels count in the scores", "inference/metrics.py", "valid = truth != ignore", "valid = truth >= 0", "metrics"),
    Mutant("a damaged store is read", "data/store/chunks.py", "chunk_sum(data) != self._sums[index]", "chunk_sum(data) is None", "damage store"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument("--only", nargs="*", help="parts of names of faults; by default all")
    parser.add_argument(
        "--all-tests",
        action="store_true",
        help="the slow tests too, for what the default ones miss",
    )
    options = parser.parse_args(arguments)
    chosen = [
        m for m in MUTANTS if not options.only or any(part in m.name for part in options.only)
    ]
    rows = []
    for mutant in chosen[:1] if options.quick else chosen:
        rows.append(_row(mutant, options.quick, options.all_tests))
        print(f"{rows[-1]['fault']}: {rows[-1]['found by']}", file=sys.stderr, flush=True)
    missed = sum(row["found by"] == "nothing" for row in rows)
    notes = f"{len(rows) - missed} of {len(rows)} faults are found"
    report("mutants", QUESTION, Rows(rows, {}), options, {}, notes)


def _row(mutant: Mutant, quick: bool, every: bool) -> dict:
    """Return what found a fault, and after how many seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        _plant(mutant, Path(folder))
        first = [f"tests/test_{name}.py" for name in mutant.tests.split()]
        rounds = [first[:1]] if quick else [first, []] + [["-m", ""]] * every
        found = next(filter(None, (_first_failure(Path(folder), r) for r in rounds)), "nothing")
    return {
        "fault": mutant.name,
        "file": mutant.file,
        "found by": found,
        "s": time.monotonic() - began,
    }


def _plant(mutant: Mutant, folder: Path) -> None:
    """Copy the project to ``folder``, with the fault.

    Raises:
        ValueError: the text to replace is not there exactly once.
    """
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    path = folder / "distseg" / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.before!r} is {text.count(mutant.before)} times in "
            f"{mutant.file}, but must be there once: change MUTANTS"
        )
    path.write_text(text.replace(mutant.before, mutant.after))


def _first_failure(folder: Path, arguments: Sequence[str]) -> str | None:
    """Return the first test that fails, or None if all pass."""
    run = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            run, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {_LIMIT} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    return failed[1]


if __name__ == "__main__":
    main()
