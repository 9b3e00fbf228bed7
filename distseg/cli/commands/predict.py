"""Flags of ``distseg predict``, which writes class maps of whole images."""

from __future__ import annotations

from distseg.cli.flag_checks import check_count, check_folder
from distseg.cli.job import job
from distseg.cli.parsing import command_parser, joint, parse_run, print_ignored
from distseg.config.settings import Config


def run(arguments: list[str]) -> int:
    parser = command_parser("predict RUN", None)
    parser.add_argument(
        "--images",
        type=str,
        nargs="+",
        default=None,
        help="Image files; by default the store's images of --split.",
    )
    parser.add_argument(
        "--split",
        type=str | None,
        default=None,
        help="The split of the store to predict; test by default.",
    )
    parser.add_argument(
        "--output",
        type=str,
        default="predictions",
        help="Folder for the class maps, NAME.h5 and NAME.png.",
    )
    parser.add_argument(
        "--nodata",
        type=str | None,
        default=None,
        help="The number that stands for no data in --images, such as -9999 or nan; by default "
        "what a TIFF file says of itself.",
    )
    parser.add_argument(
        "--level",
        type=int,
        default=0,
        help="The resolution of OME-Zarr images in --images: 0 is the highest, 1 the next one.",
    )

    @joint
    def settle() -> tuple[Config, dict]:
        config, flags = parse_run(parser, arguments)
        if flags["images"] is not None and flags["split"] is not None:
            raise ValueError(
                f"--split {flags['split']} names images of the store, but --images names image "
                "files: leave one of them out"
            )
        check_folder(flags["output"], "--output")
        check_count("--level", flags["level"], 0)
        return config, flags

    with job(settle) as (config, flags, comm):
        from distseg.cli.predict import run_predict

        print_ignored(flags["left"], comm)
        return run_predict(
            flags["run"],
            config,
            comm,
            flags["images"],
            flags["split"] or "test",
            flags["output"],
            flags["nodata"],
            flags["level"],
        )
