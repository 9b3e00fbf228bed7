"""Flags of ``distseg train``, which trains on any number of ranks."""

from __future__ import annotations

from distseg.cli.flag_checks import check_folder
from distseg.cli.job import job
from distseg.cli.parsing import command_parser, config_from, joint, parse
from distseg.comm.signals import listening
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config


def run(arguments: list[str], kind: type = Config) -> int:
    """Train with the settings of a config, and return the exit status.

    Args:
        arguments: the flags.
        kind: the class of the config: Config for exact training, PatchConfig for PatchGD.
    """

    @joint
    def settle() -> tuple[Config | PatchConfig, dict]:
        parser = command_parser("patchgd" if kind is PatchConfig else "train", kind)
        config = config_from(parse(parser, arguments), kind)
        check_folder(config.train.output, "train.output")
        return config, {}

    with listening(), job(settle, lambda config: config.train.output) as (config, _, comm):
        from distseg.cli.plan_layouts import with_best_layout
        from distseg.training.loop import train

        train(with_best_layout(config, comm), comm)
    return 0
