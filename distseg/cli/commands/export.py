"""Flags of ``distseg export``, which writes a network for use without distseg."""

from __future__ import annotations

from distseg.cli.flag_checks import check_folder
from distseg.cli.parsing import command_parser, joint, parse_run


@joint
def run(arguments: list[str]) -> int:
    parser = command_parser("export RUN", None)
    parser.add_argument(
        "--output", type=str, default="exported", help="Folder for export.json and the files."
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=["safetensors", "torch", "onnx"],
        default=None,
        help="model.safetensors, model.pt2 (torch.export), model.onnx; by default safetensors "
        "and torch, or only safetensors for a network of PatchGD.",
    )
    config, flags = parse_run(parser, arguments)
    check_folder(flags["output"], "--output")
    from distseg.cli.export import export

    for path in export(flags["run"], config.model, flags["output"], flags["formats"]):
        print(path)
    return 0
