"""Demonstration from data to pictures: ``make demo``, or ``python -m distseg.cli.demo``.

NASA's Blue Marble becomes a store. Eight MPI ranks (two sample groups, two tiles, two pipeline
stages) train a U-Net to separate ocean, land and lake. On a machine with fewer than eight cores,
four ranks train it: one sample group takes all four images of a step, so the gradient is the same.
The network is evaluated on the test images beside the per-pixel baseline, and its predictions are
drawn. Each command is printed, so that it can be repeated by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from distseg.config.units import duration

RANKS = 8
# More ranks than cores would take longer. With these flags, four ranks take the same images in each
# step, and in the same order, as eight ranks without them.
FEWER_RANKS = 4
ONE_GROUP = ("--mesh.samples", "1", "--data.images", "4")
# A rank imports torch for longer than it computes a test image.
RANKS_OF_TEST = 2
CONFIG = Path("jobs/demo.yaml")
STORE = Path("demo-data/blue-marble.h5")
RUN = Path("runs/demo")


def main() -> None:
    """Run all commands of the demo, one after another, and print their results."""
    options = _options()
    began = time.monotonic()
    if not CONFIG.exists():
        sys.exit(
            f"distseg demo: the file {CONFIG} is not in this folder: run the demo from the root of "
            "the project's checkout (make demo)"
        )
    if not STORE.exists():
        _distseg("prepare", "blue-marble", STORE)
    ranks, flags = layout(cores())
    _distseg("train", CONFIG, *flags, *options.more, ranks=ranks)
    scores = RUN / "test-scores.json"
    _distseg("evaluate", RUN, "--output", scores, ranks=RANKS_OF_TEST)
    _distseg("predict", RUN, "--output", RUN / "test", ranks=RANKS_OF_TEST)
    _distseg("plot", "curves", RUN)
    pictures = _overlays()
    _closing(json.loads(scores.read_text()), pictures, time.monotonic() - began)


def layout(cores: int) -> tuple[int, tuple[str, ...]]:
    """Return how many ranks train on ``cores`` cores, and the flags of ``distseg train``."""
    return (RANKS, ()) if cores >= RANKS else (FEWER_RANKS, ONE_GROUP)


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="distseg demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "more", nargs="*", help="Flags for distseg train, such as --train.epochs 1 (after --)."
    )
    return parser.parse_args()


def _distseg(*arguments, ranks: int = 1) -> None:
    """Run ``distseg`` with these arguments, under mpirun if ``ranks`` > 1; exit if it fails."""
    command = [sys.executable, "-m", "distseg", *map(str, arguments)]
    if ranks > 1:
        command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
    print(
        "\n$ "
        + shlex.join(
            [
                "distseg" if part == "distseg" else part
                for part in command
                if part not in (sys.executable, "-m")
            ]
        ),
        flush=True,
    )
    settings = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    environment = {**dict.fromkeys(settings, "1"), **os.environ}
    code = subprocess.run(command, env=environment).returncode
    if code:
        sys.exit(
            f"distseg demo: '{arguments[0]}' failed with exit code {code}; its message is above"
        )


def _overlays() -> list[Path]:
    pictures = []
    for prediction in sorted((RUN / "test").glob("*.h5")):
        pictures.append(prediction.with_suffix(".overlay.png"))
        _distseg("plot", "overlay", prediction, "--store", STORE, "--output", pictures[-1])
    return pictures


def _closing(scores: dict, pictures: list[Path], seconds: float) -> None:
    print(f"\nIoU on the test split ({duration(seconds)} in all)\n")
    print(f"{'':8}{'network':>9}{'colour alone':>14}")
    for name, row in scores["network"]["classes"].items():
        print(f"{name:8}{row['iou']:9.3f}{scores['colour']['classes'][name]['iou']:14.3f}")
    print("\npictures: " + ", ".join(map(str, [*pictures, RUN / "curves.png"])))


if __name__ == "__main__":
    main()
