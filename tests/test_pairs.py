"""Every pair of settings, and many triples, on a small network: exact, or refused by the table of :mod:`distseg.training.conflicts`; never silent, never a traceback."""

import random
import re
from itertools import combinations

import pytest
from mpirunner.transport import NAME as TRANSPORT
from test_check import config

from distseg.config.settings import Config, LossConfig, MeshConfig, ModelConfig
from distseg.config.sizes import Size
from distseg.training.conflicts import RULES
from distseg.training.verify import verify

TOLERANCE = 1e-12
BASE = Config(
    model=ModelConfig(
        depth=2,
        base_channels=2,
        num_convs=1,
        in_channels=2,
        out_channels=3,
        norm="instance",
        dropout=0.2,
    ),
    mesh=MeshConfig(reducer=TRANSPORT),
    loss=LossConfig(name="cross_entropy"),
)
TILES = {"spatial.tiles_per_rank": Size("2x3")}
MESH = [{"mesh.samples": 2}, {"mesh.tiles": Size("2x1")}, {"mesh.stages": 2}]
OTHERS = [  # each with what it cannot do without
    {"pipeline.placement": "v-shaped"},
    {"pipeline.placement": "devices", "pipeline.devices": ["cpu", "cpu"]},
    {"pipeline.schedule": "1f1b"},
    {"pipeline.schedule": "zb-h1"},
    {"pipeline.recompute": "always"},
    TILES,
    {"streaming.tiles": Size("2x3"), "model.norm": "none"},
    {"streaming.tiles": Size("2x3")},
    {"streaming.tiles": Size("2x3"), "streaming.scratch": "memory"},
    {"spatial.exchange_every": "1"},
    {"spatial.exchange_every": "level"},
    {"spatial.exchange_every": "1", "spatial.fuse_below": 8},
    {"approximate.halo": 4},
    {"spatial.norm_scope": "step", "model.norm": "batch"},
    {"approximate.norms": "window"},
    {"approximate.gradients": "fp16"},
    {"spatial.frozen_norm": True, "model.norm": "batch"},
    {"streaming.memory": "4GB"},
    {"train.accumulate": 2},
    {"train.channels_last": True},
    {"data.images": 2},
    {"loss.name": "dice"},
    {"loss.name": "dice", "loss.dice_over": "batch"},
    {"loss.name": "0.5*binary_cross_entropy + focal"},
    {"loss.class_weights": [1.0, 2.0, 0.5]},
    {"model.norm": "batch"},
    {"model.norm": "group"},
    {"model.dropout": 0.0},
    {"model.up": "bilinear"},
    {"model.up": "transposed"},
]
NAMED = [rf"{re.escape(rule.setting)}.* is .*, but .*\({rule.code}\)" for rule in RULES]
NAMED.append(r"streaming\.memory is .*, but streaming\.tiles .*\(DS208\)")
NAMED.append(r"loss.\w+ is .*, but no term of loss.name .* uses it")


def combined(*chosen: dict) -> dict | None:
    """All settings of several choices; None where two want another value of one."""
    found: dict = {}
    for settings in chosen:
        if any(found.get(name, value) != value for name, value in settings.items()):
            return None
        found |= settings
    return found


def cases(ranks: int, triples: int) -> dict[str, dict]:
    """Return cases of so many ranks by name: all pairs of settings, beside the axes of the mesh that make the ranks, and some triples."""
    axes = [combined(*those) for those in combinations(MESH, ranks.bit_length() - 1)]
    pairs = [
        combined(mesh, *those)
        for mesh in axes
        for those in (combinations(OTHERS, 2) if ranks == 1 else [(other,) for other in OTHERS])
    ]
    more = [
        combined(mesh, *those)
        for mesh in axes
        for those in combinations(OTHERS, 3 if ranks == 1 else 2)
    ]
    more = [settings for settings in more if settings is not None]
    found = [settings for settings in pairs if settings is not None] + random.Random(ranks).sample(
        more, triples
    )
    return named(found)


def named(found: list[dict]) -> dict[str, dict]:
    """Return settings by their names and values."""
    return {
        ", ".join(f"{name.partition('.')[2]} {value}" for name, value in settings.items()): settings
        for settings in found
    }


def outcome(comm, settings: dict) -> str:
    """Return ``exact``, ``told``, ``refused: why`` or ``wrong: error``."""
    try:
        report = verify(config(settings, BASE), comm, Size("20x24"))
    except ValueError as e:
        return f"refused: {e}" if any(re.match(named, str(e)) for named in NAMED) else f"wrong: {e}"
    error, told = comm.bcast(report and (report["max_error"], report["approximations"]))
    return "exact" if error <= TOLERANCE else "told" if told else f"wrong: {error:.1e}"


STAGES = named(
    [
        settings
        for settings in OTHERS
        if {"pipeline.placement", "pipeline.schedule", "pipeline.recompute"} & {*settings}
        and "pipeline.devices" not in settings
    ]
)
ALONE = named([settings for settings in OTHERS if settings not in STAGES.values()])
ONE, TWO, FOUR = cases(1, 60), cases(2, 60), cases(4, 30)


@pytest.mark.parallel(1)
@pytest.mark.parametrize("case", ALONE)
def test_one_setting_alone_is_not_refused(comm, case):
    assert outcome(comm, ALONE[case]) in ("exact", "told")


@pytest.mark.parallel(2)
@pytest.mark.parametrize("case", STAGES)
def test_one_setting_of_pipelines_alone_is_not_refused(comm, case):
    assert outcome(comm, {"mesh.stages": 2, **STAGES[case]}) in ("exact", "told")


@pytest.mark.parallel(1)
@pytest.mark.covering(cases=24)
@pytest.mark.parametrize("case", ONE)
def test_one_rank_is_exact_or_refused(comm, case):
    assert not outcome(comm, ONE[case]).startswith("wrong")


@pytest.mark.parallel(2)
@pytest.mark.covering(cases=20)
@pytest.mark.parametrize("case", TWO)
def test_two_ranks_are_exact_or_refuse(comm, case):
    assert not outcome(comm, TWO[case]).startswith("wrong")


@pytest.mark.parallel(4)
@pytest.mark.covering(cases=8)
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_are_exact_or_refuse(comm, case):
    assert not outcome(comm, FOUR[case]).startswith("wrong")
