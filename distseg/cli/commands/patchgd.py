"""Flags of ``distseg patchgd``, which trains by patch gradient descent."""

from __future__ import annotations

from distseg.cli.commands.train import run as train
from distseg.config.patchgd import PatchConfig


def run(arguments: list[str]) -> int:
    return train(arguments, PatchConfig)
