"""Statistics of images, numbers made of their sizes, and functions of both (:mod:`made_reductions`): the serial program's gradient, in tiles and streamed ones."""

from dataclasses import replace

import made_reductions
import pytest
import torch
from test_exact import TOLERANCE, config

import distseg
from distseg.config import ModelConfig
from distseg.extents import Extents
from distseg.verify import verify

WAYS = {  # of each number of ranks
    1: [dict(tiles_per_rank=(3, 2), in_time="spill", exchange_every="1")],
    2: [dict(tiles="2x1", exchange_every="2"), dict(stages=2, tiles_per_rank=(2, 1), in_time="spill")],
}


@pytest.mark.parametrize("name", made_reductions.FUNCTIONS)
def test_is_what_it_was(name):
    torch.manual_seed(0)
    model = getattr(made_reductions, f"with_{name}")(2, 3).double()
    network = distseg.capture(model)
    for images, size in ((1, (13, 22)), (3, (33, 18))):
        x = torch.randn(images, 2, *size, dtype=torch.float64)
        both = []
        for each in (model, network):
            y = each(x)
            both.append((y, *torch.autograd.grad((y * y).sum(), list(model.parameters()), allow_unused=True)))
        for wanted, found in zip(*both):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", made_reductions.FUNCTIONS)
def test_exact(comm, name):
    for way in WAYS[comm.size]:
        plan = replace(config(**way), model=ModelConfig(f"{made_reductions.__name__}:with_{name}", in_channels=3, out_channels=3))
        report = verify(plan, comm, Extents("33x41"))
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE, way
