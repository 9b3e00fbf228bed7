"""Flags of ``distseg prepare``, which packs images and masks into a store."""

from __future__ import annotations

from collections.abc import Iterable

from distseg.cli.flag_checks import check_count, check_file
from distseg.cli.parsing import command_parser, joint, parse_plain
from distseg.config.sizes import Size

# Example data sets that the command can make itself, instead of reading folders of images.
_EXAMPLES = ("blue-marble", "gigapixel", "ultramnist")

_ONLY_FOLDERS = (
    "masks labels classes values ignore alpha pages instances attribute dry_run recursive "
    "reference parts level split"
).split()
_ONLY_ULTRAMNIST = "images digits sum_below noise".split()
_NOT_WITH_LABELS = (
    "masks values ignore absent instances attribute dry_run recursive parts"
).split()
_ONLY_WITH_MASKS = "values ignore instances attribute".split()


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("prepare", None)
    _add_flags(parser)
    parsed = parse_plain(parser, arguments)
    _check_source(parser, parsed)
    check_file(parsed.output, "the store")
    check_count("--level", parsed.level, 0)
    from distseg.cli.prepare import run_prepare

    return run_prepare(parsed)


def _add_flags(parser) -> None:
    """Add the arguments of ``distseg prepare`` to a parser: source, output and the flags."""
    parser.add_argument(
        "source",
        help="The folder of images, or an example: blue-marble, gigapixel (one grey image from the "
        "Blue Marble) or ultramnist (images of digits, labelled with the sum of the digits).",
    )
    parser.add_argument("output", help="The HDF5 store to write.")
    parser.add_argument(
        "--masks",
        type=str | None,
        default=None,
        help="The folder of masks, paired by file names; or one file of polygons for all images "
        "(GeoJSON, GeoPackage, shapefile, COCO).",
    )
    parser.add_argument(
        "--attribute",
        type=str | None,
        default=None,
        help="If masks are polygons of several classes: the attribute that holds the name or the "
        "label of a polygon's class. By default all polygons are the second class.",
    )
    parser.add_argument(
        "--labels",
        type=str | None,
        default=None,
        help="If each image has one label: a CSV file with the columns image, label and perhaps "
        "split; or the word folders, if the images lie in folders named after classes.",
    )
    parser.add_argument(
        "--classes",
        type=str | None,
        default=None,
        help="Names of the classes in the order of their labels: background,road,building. If "
        "colours of masks stand for classes: background=#000000,road=#ff0000.",
    )
    parser.add_argument(
        "--values",
        type=str | None,
        default=None,
        help="Mask values that stand for other labels: 255=1,128=2. With --attribute also names: "
        "forest=2,water=0.",
    )
    parser.add_argument(
        "--ignore", type=int, default=255, help="Label of pixels to ignore in losses and scores."
    )
    parser.add_argument(
        "--nodata",
        type=str | None,
        default=None,
        help="The number that stands for no data in images, such as -9999 or nan; by default "
        "what a TIFF file says of itself.",
    )
    parser.add_argument(
        "--alpha",
        choices=["mask", "band"],
        default=None,
        help="Meaning of the images' alpha channel: mask, pixels with alpha 0 have no data (the "
        "default); or band, alpha is a band like the others.",
    )
    parser.add_argument(
        "--instances",
        choices=["foreground", "border"],
        default=None,
        help="If masks hold a number for each object and 0 for the background: foreground makes "
        "all objects class 1; border also makes pixels where two objects touch class 2.",
    )
    parser.add_argument(
        "--dry-run",
        dest="dry_run",
        action="store_true",
        help="Check names, pairs, sizes and types, print what was found, and write nothing. All "
        "pixels are checked only without this flag.",
    )
    parser.add_argument(
        "--recursive",
        action="store_true",
        help="Read the subfolders of the folders of images and masks too; both must have the same.",
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="Refer to the image files instead of copying their pixels into the store. Labels are "
        "still stored. The files must stay as they are, at the same place relative to the store.",
    )
    parser.add_argument(
        "--pages",
        choices=["bands", "volume", "images"],
        default=None,
        help="What the pages of a TIFF file, or the first axis of an npy array, are: bands of one "
        "image, slices of a volume, or separate images.",
    )
    parser.add_argument(
        "--parts",
        type=Size | None,
        default=None,
        help="Cut each image into parts that share no pixel, such as 4x4 (rows x columns), which "
        "are assigned to the splits. So one large image is enough for train, val and test.",
    )
    parser.add_argument(
        "--level",
        type=int,
        default=0,
        help="The resolution of OME-Zarr images and masks: 0 is the highest, 1 the next one.",
    )
    parser.add_argument(
        "--absent",
        type=str | None,
        default=None,
        help="Classes that may have no pixel in the masks: road,tree.",
    )
    parser.add_argument(
        "--split",
        type=str,
        default="0.8,0.1,0.1",
        help="Shares of train, val and test, if the source has no folders with these names.",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="Seed of the split, and of ultramnist's images."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing store.")
    parser.add_argument(
        "--size",
        type=Size | None,
        default=None,
        help="Size of the gigapixel image, by default 16000x64000, or of the images of "
        "ultramnist, by default 512x512.",
    )
    parser.add_argument(
        "--images",
        type=str,
        default="2000,250,500",
        help="For ultramnist: number of images for train, val and test.",
    )
    parser.add_argument(
        "--digits", type=str, default="3-5", help="For ultramnist: number of digits in an image."
    )
    parser.add_argument(
        "--sum-below",
        dest="sum_below",
        type=int | None,
        default=None,
        help="For ultramnist: use only sums below this number, with the same number of images for "
        "each sum. Gupta et al. 2023 use 10.",
    )
    parser.add_argument(
        "--noise",
        type=int,
        default=16,
        help="For ultramnist: background pixels are drawn uniformly from the integers below this "
        "number; the largest pixel value is 255. Gupta et al. 2023 use 0, no noise.",
    )


def _check_source(parser, parsed) -> None:
    """Refuse flags that do not concern the source of images, or the kind of its labels.

    Raises:
        ValueError: a flag has another value than its default, but is for other sources.
    """

    def given(flags: Iterable[str]) -> Iterable[str]:
        """Return those of some flags that the user has set to a value other than the default."""
        return (flag for flag in flags if parsed[flag] != parser.get_default(flag))

    if parsed.source in _EXAMPLES:
        # The seed draws the images of ultramnist, and the split of folders.
        seed = () if parsed.source == "ultramnist" else ("seed",)
        for flag in given((*_ONLY_FOLDERS, *seed)):
            raise ValueError(
                f"--{flag.replace('_', '-')} is for folders of images, but the source is "
                f"{parsed.source}, which sets this itself: leave the flag out"
            )
    if parsed.source != "ultramnist":
        for flag in given(_ONLY_ULTRAMNIST):
            raise ValueError(
                f"--{flag.replace('_', '-')} is for the source ultramnist, not for "
                f"{parsed.source}: leave the flag out"
            )
    if parsed.labels is not None:
        for flag in given(_NOT_WITH_LABELS):
            raise ValueError(
                f"--{flag.replace('_', '-')} is about masks, but --labels gives each image one "
                "label: leave one of them out"
            )
    if parsed.masks is None:
        for flag in given(_ONLY_WITH_MASKS):
            raise ValueError(
                f"--{flag} {parsed[flag]} is about masks, but no masks are given: give --masks "
                f"FOLDER, or leave --{flag} out"
            )
