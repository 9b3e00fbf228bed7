"""Networks that are not ours, in every way to distribute them: exact, or refused by name, never silently wrong (:mod:`made_networks`)."""

import re
from dataclasses import replace

import made_networks
import pytest
from test_exact import TOLERANCE, config

from distseg.config import ModelConfig
from distseg.extents import Extents
from distseg.verify import verify

WAYS = {  # name: (ranks, settings)
    "several tiles": (1, dict(tiles_per_rank=(2, 2))),
    "tiles": (2, dict(tiles="1x2")),
    "exchange": (2, dict(tiles="2x1", exchange_every="1")),
    "exchange every 2": (2, dict(tiles="2x1", exchange_every="2")),
    "exchange every 3": (1, dict(tiles_per_rank=(3, 2), exchange_every="3")),
    "exchange a level": (2, dict(tiles="1x2", exchange_every="level")),
    "in time": (1, dict(tiles_per_rank=(2, 3), in_time="spill")),
    "stages": (2, dict(stages=2, accumulate=2)),
    "stages, a V": (2, dict(stages=2, placement="v", accumulate=2)),
    "stages on devices": (1, dict(placement="devices", devices=["cpu", "cpu"], accumulate=2)),
    "stages, zero bubble": (2, dict(stages=2, accumulate=3, schedule="zb-h1")),
    "stages, in time": (2, dict(stages=2, tiles_per_rank=(2, 1), in_time="spill")),
    "stages, exchange": (4, dict(stages=2, tiles="2x1", exchange_every="1", accumulate=2)),
    "stages, exchange, zero bubble": (4, dict(stages=2, tiles="2x1", exchange_every="2", accumulate=2, schedule="zb-h1")),
}
EXACT = ["residual", "long_skip", "residuals", "pyramid", "dense", "one_sided", "dilated", "replicating", "shuffled", "early_norm", "loud_relu", "squeezed", "excited", "convnext", "written"]
NAMED = {  # what is said where a network can't be computed so; ways that compute it all the same are exact
    "active_norm": "layer 1 \\(ActiveNorm\\) is a BatchNorm2d that has a forward of its own.*of its own behind or before a plain BatchNorm2d",
    "noisy_dropout": "layer 1 \\(NoisyDropout\\) is a Dropout that has a forward of its own",
    "hooked_norm": "layer 1 \\(BatchNorm2d\\) is a BatchNorm2d that has hooks",
    "hooked_conv": "layer 1 \\(Conv2d\\), which has hooks, looks beyond a pixel",
    "hooked_block": "layer 1 \\(Sequential\\), which has hooks, looks beyond a pixel",
    "hooked_pointwise": "never",
    "standardised": "layer 1 \\(StandardConv\\), which has a forward of its own, looks beyond a pixel",
    "blurred": "layer 1 \\(BlurPool\\), which has a forward of its own, looks beyond a pixel",
    "weight_normed": "which has a parametrization of its weight, looks beyond a pixel",
    "weight_normed_by_hook": "the weight of its layer 1 \\(Conv2d\\) is computed by hooks.*parametrizations",
    "spectral_normed": "which has a parametrization of its weight|layer 1 \\(ParametrizedConv2d\\) changes its _u with each forward pass",
    "spectral_normed_by_hook": "which has hooks|layer 1 \\(Conv2d\\) changes its weight_u with each forward pass|weight of its layer 1",
    "stash_in_place": "layer 2 \\(ReLU\\) overwrites in place what stash\\('a'\\) has put aside",
    "pooling": "data.images is 1, but the batch norm 2.far.2 takes statistics of one vector an image",
    "joined_unknown": "layer gate \\(Gate\\) is called with 2 maps, and what it makes of them is not known",
    "in_place_shared": "layer 1 \\(ReLU\\) overwrites in place what layer a has put aside",
    "never_popped": "stash\\('a'\\) is never popped",
    "stashed_twice": "stash\\('a'\\) at layer 3 comes before the pop of the one at layer 1",
}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", [*EXACT, *NAMED])
def test_exact_or_refused_by_name(comm, name):
    for way, (ranks, settings) in WAYS.items():
        if ranks != comm.size:
            continue
        try:
            assert error_of(name, comm, settings) <= TOLERANCE, way
        except ValueError as e:
            assert name in NAMED and re.search(NAMED[name], str(e)), f"{way}: {e}"


@pytest.mark.parallel([1, 2, 4])
def test_batch_norm_of_vectors(comm):
    """Of two images at least."""
    for way, (ranks, settings) in WAYS.items():
        if ranks == comm.size:
            assert error_of("pooling", comm, {**settings, "images": 2}) <= TOLERANCE, way


def error_of(name: str, comm, settings: dict) -> float:
    plan = replace(config(**settings), model=ModelConfig(f"{made_networks.__name__}:{name}", in_channels=3, out_channels=3))
    report = verify(plan, comm, Extents("24x32" if name == "replicating" else "24x34"))
    return comm.bcast(report and report["max_error"])
