"""Demonstration from data to pictures: ``make demo``, or ``python -m distseg.cli.demo``.

NASA's Blue Marble becomes a store. Eight MPI ranks (two sample groups, two tiles, two pipeline
stages) train a U-Net to separate ocean, land and lake. The test images are evaluated beside the
per-pixel baseline, predicted and drawn. Each command is printed, so that it can be repeated by
hand.
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
CONFIG = Path("jobs/demo.yaml")
STORE = Path("demo-data/blue-marble.h5")
RUN = Path("runs/demo")


def main() -> None:
    options = _options()
    began = time.monotonic()
    if not CONFIG.exists():
        sys.exit(
            f"distseg demo: {CONFIG} is not here: run it from the root of the project's checkout "
            "(make demo)"
        )
    if not STORE.exists():
        _distseg("prepare", "blue-marble", STORE)
    _distseg("train", CONFIG, *options.more, ranks=RANKS)
    scores = RUN / "test-scores.json"
    _distseg("evaluate", RUN, "--output", scores, ranks=RANKS)
    _distseg("predict", RUN, "--output", RUN / "test", ranks=RANKS)
    _distseg("plot", "curves", RUN)
    pictures = _overlays()
    _closing(json.loads(scores.read_text()), pictures, time.monotonic() - began)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="distseg demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "more", nargs="*", help="Flags for distseg train, such as --train.epochs 1 (after --)."
    )
    return parser.parse_args()


def _distseg(*arguments, ranks: int = 1) -> None:
    """Run a subcommand, under mpirun if it takes several ranks; exit if it fails."""
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
