"""Weights that are buffers, frozen or computed are exact in every way to distribute a network."""

from dataclasses import replace

import made_weights
import pytest
import torch
from made_store import random_store
from safetensors.torch import load_file
from test_exact import TOLERANCE, config

import distseg
from distseg.cli.export import export
from distseg.comm.alone import Alone
from distseg.config.settings import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.layers import Derived
from distseg.models.network import user_names
from distseg.training.engine import Engine
from distseg.training.loop import train
from distseg.training.verify import verify

WAYS = {  # name: (ranks, settings)
    "whole": (1, dict()),
    "tiles": (1, dict(tiles_per_rank=(2, 2))),
    "exchange": (1, dict(tiles_per_rank=(3, 2), exchange_every="1")),
    "in time": (1, dict(streamed=(2, 3))),
    "exchange on ranks": (2, dict(tiles="1x2", exchange_every="2")),
    "stages": (2, dict(stages=2, accumulate=2)),
    "zero bubble": (2, dict(stages=2, accumulate=3, schedule="zb-h1", recompute="always")),
    "stages, in time": (2, dict(stages=2, streamed=(2, 1))),
}
NETWORKS = {  # name: the ways it is tried in
    "Blurred": ("tiles", "in time", "exchange on ranks", "zero bubble"),
    "Blurred1d": ("exchange", "in time"),
    "Blurred3d": ("exchange", "in time"),
    "Resampled": ("exchange", "in time", "zero bubble"),
    "Repeated": ("tiles", "exchange"),
    "GroupNormed": ("tiles", "in time"),
    "HalfFixed": ("exchange", "in time", "zero bubble"),
    "ComputedNorms": ("exchange", "in time", "stages"),
    "OfCells": ("exchange", "in time"),
    "Shared": ("exchange", "stages, in time"),
    "frozen_layers": ("exchange", "in time", "zero bubble"),
    "Edges": ("exchange", "in time", "stages"),
    "WeightNormed": ("exchange", "in time", "zero bubble"),
    "Standardised": ("tiles", "exchange", "in time", "exchange on ranks"),
    "streams": ("tiles", "in time", "zero bubble"),
    "pair": ("exchange", "in time", "stages"),
    "three_streams": ("tiles", "in time"),
    "streams1d": ("exchange", "in time"),
    "streams3d": ("exchange", "in time"),
    "Deeper": ("exchange", "in time"),
    "Coordinates": ("tiles", "in time"),
    "NormFirst": ("exchange", "in time"),
    "NoConvolution": ("exchange", "in time", "stages, in time"),
    "Functional": ("exchange", "in time", "zero bubble"),
    "Twice": ("whole", "exchange", "in time", "exchange on ranks"),
    "Levels": ("tiles", "exchange", "in time", "exchange on ranks"),
    "MadeInForward": ("whole", "exchange", "in time"),
    "Lazy": ("exchange", "in time", "stages"),
    "Unshuffled": ("whole",),
}
BANDS = {"three_streams": 7, "streams": 5}  # of others 3


def error_of(comm, name: str, way: str, size: str = "24x36") -> float:
    dims = {"1d": 1, "3d": 3}.get(name[-2:], 2)
    size = {1: "48", 2: size, 3: "8x12x6"}[dims]
    settings = dict(WAYS[way][1])
    if dims != 2:
        cut = "streamed" if "streamed" in settings else "tiles_per_rank"
        settings[cut] = {1: (3,), 3: (2, 2, 1)}[dims]
        settings["tiles"] = "x".join("1" * dims)
    plan = replace(
        config(**settings),
        model=ModelConfig(
            f"{made_weights.__name__}:{name}", in_channels=BANDS.get(name, 3), out_channels=3
        ),
    )
    report = verify(plan, comm, Size(size))
    return comm.bcast(report and report["max_error"])


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=6)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n.endswith("3d") else n for n in NETWORKS]
)
def test_exact(comm, name):
    for way in NETWORKS[name]:
        if WAYS[way][0] == comm.size:
            assert error_of(comm, name, way) <= TOLERANCE, way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_constants_alone_are_computed_beside_the_input(dtype):
    """A network that is captured on the CPU computes on a GPU. The device "meta" stands for it."""
    network = as_network(made_weights.MadeInForward(3, 3))
    image = torch.empty(1, 6, 9, 9, device="meta", dtype=dtype)
    weights = [
        layer.filled(image)._parameters["weight"]
        for layer in network.modules()
        if isinstance(layer, Derived)
    ]
    assert len(weights) == 2
    assert all(weight.is_meta and weight.dtype == torch.float32 for weight in weights)


@pytest.mark.parametrize("way", ["exchange", "in time"])
def test_buffers_and_frozen_weights_have_no_gradient(monkeypatch, way):
    update, held = Engine.update, []

    def watched(self, rate):
        tensors = [
            *self.model.named_buffers(),
            *((name, p) for name, p in self.model.named_parameters() if not p.requires_grad),
        ]
        held.extend(name for name, x in tensors if x.grad is not None)
        return update(self, rate)

    monkeypatch.setattr(Engine, "update", watched)
    for name in ("HalfFixed", "frozen_layers"):
        error_of(Alone(), name, way)
    assert held == []


def test_names_are_the_modules_own():
    """Those of checkpoints, of which a run is resumed, loaded and exported."""
    for kind in (
        made_weights.Resampled,
        made_weights.HalfFixed,
        made_weights.frozen_layers,
        made_weights.Twice,
    ):
        model = kind(2, 3)
        network = as_network(model)
        own = user_names(network.state_dict().items(), network)
        assert own.keys() == model.state_dict().keys()
        assert all(
            tensor.data_ptr() == own[name].data_ptr() for name, tensor in model.state_dict().items()
        )


@pytest.mark.parametrize("name", ["Resampled", "Twice"])
def test_a_run_is_loaded_and_exported(tmp_path, name):
    random_store(tmp_path / "store.h5", train=[(32, 48)], val=[(32, 32)])
    model, data = ModelConfig(f"made_weights:{name}"), DataConfig(store=str(tmp_path / "store.h5"))
    train(
        Config(
            model=model,
            data=data,
            train=TrainConfig(epochs=1, output=str(tmp_path / "run")),
            mesh=MeshConfig(reducer="mpi"),
        ),
        Alone(),
    )
    fresh = getattr(made_weights, name)(2, 3)
    loaded = distseg.load(tmp_path / "run", getattr(made_weights, name)(2, 3)).network
    moved = {
        key for key, x in fresh.state_dict().items() if not torch.equal(x, loaded.state_dict()[key])
    }
    fixed = {
        key for key, _ in fresh.named_buffers() if "running" not in key and "tracked" not in key
    }
    assert moved == fresh.state_dict().keys() - fixed
    export(
        str(tmp_path / "run"), model, str(tmp_path / "out"), ["safetensors", "torch"]
    )  # which holds the program against the module
    assert load_file(tmp_path / "out/model.safetensors").keys() == loaded.state_dict().keys()
