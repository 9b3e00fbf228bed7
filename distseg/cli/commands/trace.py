"""Flags of ``distseg trace``, which writes the objects of class maps."""

from __future__ import annotations

from distseg.cli.flag_checks import check_count, check_folder
from distseg.cli.parsing import command_parser, joint, parse_plain


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("trace", None)
    parser.add_argument(
        "maps", nargs="+", help="Class maps NAME.h5 or NAME.tif, or label maps (TIFF, PNG, npy)."
    )
    parser.add_argument("--output", type=str, default="objects", help="Folder for the results.")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=["gpkg", "geojson", "objects"],
        default=["gpkg"],
        help="gpkg: GeoPackage; geojson: in WGS 84; objects: a TIFF with each pixel's object.",
    )
    parser.add_argument(
        "--classes",
        nargs="+",
        default=None,
        help="Names or numbers of the classes whose objects are written; by default all.",
    )
    parser.add_argument(
        "--least", type=int, default=1, help="Leave out polygons of objects with fewer pixels."
    )
    parsed = parse_plain(parser, arguments)
    check_count("--least", parsed.least)
    check_folder(parsed.output, "--output")
    from distseg.cli.trace import trace_maps

    for line in trace_maps(
        parsed.maps, parsed.output, parsed.formats, parsed.classes, parsed.least
    ):
        print(line)
    return 0
