"""Every pair of settings on a small network: exact, or refused by the table of :mod:`distseg.check`; never silently wrong, never a traceback."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from distseg.check import refused
from distseg.config import Config, LossConfig, MeshConfig, ModelConfig, OptimConfig
from distseg.extents import Extents
from distseg.verify import verify

TOLERANCE = 1e-12
BASE = Config(
    model=ModelConfig(depth=2, base_channels=2, num_convs=1, in_channels=2, out_channels=3, norm="instance", dropout=0.2),
    mesh=MeshConfig(reducer="mpi"),
    loss=LossConfig(name="cross_entropy"),
    optim=OptimConfig(name="adam", lr=1e-2),
)
SETTINGS = {
    "mesh.samples": [2],
    "mesh.tiles": [Extents("2x1"), Extents("1x2")],
    "mesh.stages": [2],
    "mesh.reducer": ["auto"],
    "pipeline.placement": ["v", "devices"],
    "pipeline.schedule": ["gpipe", "1f1b"],
    "pipeline.recompute": ["except_last", "always"],
    "spatial.tiles_per_rank": [Extents("2x2"), Extents("1x3")],
    "spatial.in_time": ["together", "recompute", "spill"],
    "spatial.scratch": ["memory"],
    "spatial.exchange_every": ["1", "2", "level"],
    "spatial.fuse_below": [8],
    "spatial.halo": [4],
    "spatial.norm_scope": ["step", "window"],
    "spatial.frozen_norm": [True],
    "run.memory": ["4GB"],
    "train.accumulate": [2],
    "train.channels_last": [True],
    "data.images": [2],
    "loss.name": ["dice", "focal", "binary_cross_entropy + dice"],
    "loss.class_weights": [[1.0, 2.0, 0.5]],
    "loss.label_smoothing": [0.1],
    "loss.dice_over": ["batch"],
    "model.norm": ["batch", "group", "none"],
    "model.dropout": [0.0],
    "model.up": ["bilinear", "transposed"],
    "model.num_convs": [2],
    "optim.name": ["sgd"],
    "optim.clip": [0.1],
}
ALSO = {  # what a setting can not be without
    ("pipeline.placement", "devices"): {"pipeline.devices": ["cpu", "cpu"]},
    ("spatial.tiles_per_rank", Extents("1x3")): {},
}
EVERY = [(name, value) for name, values in SETTINGS.items() for value in values]
PAIRS = [pair for pair in combinations(EVERY, 2) if pair[0][0] != pair[1][0]]
TRIPLES = [t for t in combinations(EVERY, 3) if len({name for name, _ in t}) == 3]


def with_settings(config: Config, settings) -> Config:
    sections: dict[str, dict] = {}
    for name, value in settings:
        for key, v in {name: value, **ALSO.get((name, value) if not isinstance(value, list) else (), {})}.items():
            section, _, field = key.partition(".")
            sections.setdefault(section, {})[field] = v
    return replace(config, **{section: replace(getattr(config, section), **fields) for section, fields in sections.items()})


def ranks_of(settings) -> int:
    chosen = dict(settings)
    return chosen.get("mesh.samples", 1) * chosen.get("mesh.tiles", Extents("1x1")).volume * chosen.get("mesh.stages", 1)


def outcome(comm, settings) -> str:
    """exact, an error, or the refusal."""
    try:
        config = with_settings(BASE, settings)
        report = verify(config, comm, Extents("20x24"))
    except ValueError as e:
        return f"refused: {e}"
    error, told = comm.bcast(report and (report["max_error"], report["approximations"]))
    return "exact" if error <= TOLERANCE else f"approximate, as told: {told}" if told else f"WRONG: {error:.1e}"
