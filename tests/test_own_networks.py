"""docs/own_networks.md is true: its snippets run, and its network is computed exactly."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_exact import TOLERANCE, config

import distseg
from distseg.config import ModelConfig
from distseg.extents import Extents
from distseg.verify import verify

DOCS = Path(__file__).parents[1] / "docs/own_networks.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def mine(in_channels, out_channels):
    names = {}
    exec(next(snippet for snippet in SNIPPETS if "def mine" in snippet), names)
    return names["mine"](in_channels, out_channels)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet, capsys):
    exec(snippet, {})


@pytest.mark.parallel(4)
def test_its_network_is_exact_on_tiles_and_stages(comm):
    plan = replace(config(tiles="1x2", stages=2), model=ModelConfig(f"{__name__}:mine", in_channels=3, out_channels=2))
    report = verify(plan, comm, Extents("32x48"))
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE


def test_the_network_shares_the_modules_parameters():
    torch.manual_seed(0)
    model = mine(3, 2)
    network = distseg.capture(model)
    own = dict(network.named_parameters())
    assert all(own[name] is p for name, p in model.named_parameters()) and not network.names and network.multiple == 2
    x = torch.randn(2, 3, 24, 18)
    torch.testing.assert_close(network.train()(x), model.train()(x))
