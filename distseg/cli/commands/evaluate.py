"""Flags of ``distseg evaluate``, which scores a run on whole images."""

from __future__ import annotations

from pathlib import Path

from distseg.cli.flag_checks import check_count, check_file
from distseg.cli.job import job
from distseg.cli.parsing import command_parser, joint, parse_run, print_ignored
from distseg.config.settings import Config


def run(arguments: list[str]) -> int:
    parser = command_parser("evaluate RUN", None)
    parser.add_argument("--split", type=str, default="test", help="The split to evaluate.")
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="The JSON file for scores, confusion matrix and the table of images, which is also "
        "written beside it as NAME.csv; by default evaluation/SPLIT.json in the run's folder.",
    )
    parser.add_argument(
        "--tolerance",
        type=int,
        default=3,
        help="Pixels by which boundaries may differ in the scores boundary IoU and boundary F1; 0 "
        "leaves these scores out.",
    )

    @joint
    def settle() -> tuple[Config, dict]:
        config, flags = parse_run(parser, arguments)
        check_file(flags["output"], "--output")
        check_count("--tolerance", flags["tolerance"], 0, 1000)
        if (flags["output"] or "").lower().endswith(".csv"):
            raise ValueError(
                f"--output is {flags['output']}, but the scores are written as JSON and the table "
                "of images beside it as CSV: name a file that ends in .json"
            )
        if flags["output"]:
            check_file(str(Path(flags["output"]).with_suffix(".csv")), "--output")
        return config, flags

    with job(settle) as (config, flags, comm):
        from distseg.cli.evaluate import run_evaluate

        print_ignored(flags["left"], comm)
        return run_evaluate(
            flags["run"], config, comm, flags["split"], flags["output"], flags["tolerance"]
        )
