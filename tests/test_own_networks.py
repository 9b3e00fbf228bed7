"""docs/own_networks.md is true: its snippets run, and its network is computed exactly."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_store import random_store
from test_exact import TOLERANCE, config
from torch import nn

import distseg
from distseg.cli.load import load_predictor
from distseg.comm.alone import Alone
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PredictConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.data.store.store import Store
from distseg.inference.image_source import store_image
from distseg.models.bands import channels_of
from distseg.tiling.tile import Box
from distseg.training.loop import train
from distseg.training.verify import prepare, verify

DOCS = Path(__file__).parents[1] / "docs/own_networks.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def mine(in_channels, out_channels):
    names = {}
    exec(next(snippet for snippet in SNIPPETS if "def mine" in snippet), names)
    return names["mine"](in_channels, out_channels)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet, capsys):
    exec(snippet, {})


def two_classes(**fields):
    return nn.Sequential(nn.Conv2d(3, 2, 3, padding=1))


def test_without_data_a_network_may_return_another_number_of_classes_than_the_guess():
    plan = Config(model=ModelConfig(f"{__name__}:two_classes"))
    assert channels_of(prepare(plan, Size("16x16")).model) == (3, 2)


@pytest.mark.parallel(4)
def test_its_network_is_exact_on_tiles_and_stages(comm):
    plan = replace(
        config(tiles="1x2", stages=2),
        model=ModelConfig(f"{__name__}:mine", in_channels=3, out_channels=2),
    )
    report = verify(plan, comm, Size("32x48"))
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE


def folder(tmp_path) -> Path:
    """Of a run of one epoch with the network of the docs."""
    random_store(tmp_path / "store.h5", train=[(32, 48)], val=[(32, 32)])
    plan = Config(
        model=ModelConfig(f"{__name__}:mine"), data=DataConfig(store=str(tmp_path / "store.h5")), train=TrainConfig(epochs=1, output=str(tmp_path / "run")),
        mesh=MeshConfig(reducer="mpi"), predict=PredictConfig(tile=Size((16, 16))),
    )  # fmt: skip
    train(plan, Alone())
    return tmp_path / "run"


def test_a_trained_module_comes_back(tmp_path):
    """Under its own names, with the predictor's result."""
    run = folder(tmp_path)
    copied = shutil.copytree(run, tmp_path / "from-elsewhere")
    with pytest.raises(
        ValueError,
        match="was trained with the network test_own_networks:mine, .*: build the network and pass it as model",
    ):
        distseg.load(copied)
    model = distseg.load(copied, mine(2, 3), normalise=False)
    own = distseg.load(run).network.state_dict()  # trained here by this user: imported again
    assert all(torch.equal(x, own[name]) for name, x in model.state_dict().items())
    predictor, _ = load_predictor(
        str(run),
        Config(
            model=ModelConfig(f"{__name__}:mine"),
            predict=PredictConfig(tile=Size((16, 16))),
            train=TrainConfig(precision="fp32"),
        ),
        Alone(),
        torch.device("cpu"),
    )
    store = Store(tmp_path / "store.h5")
    source = store_image(store, "val0")
    whole = model(torch.from_numpy(source.read(Box.whole(source.size))).unsqueeze(0))[0].detach()
    for box, logits in predictor(source):
        torch.testing.assert_close(
            torch.from_numpy(logits), whole[(..., *box.slices)], rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ValueError, match="is of another model"):
        distseg.load(run, torch.nn.Conv2d(2, 3, 1))


def test_the_network_shares_the_modules_parameters():
    torch.manual_seed(0)
    model = mine(3, 2)
    network = distseg.capture(model)
    own = dict(network.named_parameters())
    assert (
        all(own[name] is p for name, p in model.named_parameters())
        and not network.names
        and network.multiple == 1
    )
    x = torch.randn(2, 3, 24, 18)
    torch.testing.assert_close(network.train()(x), model.train()(x))
