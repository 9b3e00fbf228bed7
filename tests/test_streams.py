"""Layers that stand at several places, and networks of several streams: the serial program's gradient and running statistics (:mod:`made_streams`)."""

import copy
from dataclasses import replace

import made_streams
import pytest
import torch
import torch.nn.functional as F
from made_store import random_store
from mpirunner.transport import NAME as TRANSPORT
from test_exact import TOLERANCE, config
from torch import nn

import distseg
from distseg.config.settings import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from distseg.config.sizes import Size
from distseg.layers.graph import graph_of
from distseg.models.capture.capture import as_network
from distseg.training.loop import train
from distseg.training.verify import verify

WAYS = {  # of each number of ranks
    1: [
        dict(tiles_per_rank=(2, 2), exchange_every="1", accumulate=2),
        dict(streamed=(3, 2), exchange_every="1", images=2),
    ],
    2: [dict(tiles="2x1", exchange_every="2"), dict(samples=2, images=2)],
}


def error_of(
    name: str, comm, settings: dict, size: str = "26x33", bands: int = 4, steps: int = 2
) -> float:
    plan = replace(
        config(**settings),
        model=ModelConfig(f"{made_streams.__name__}:{name}", in_channels=bands, out_channels=3),
    )
    report = verify(plan, comm, Size(size), steps=steps)
    return comm.bcast(report and report["max_error"])


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=2)
@pytest.mark.parametrize("name", ["Siamese", "Recurrent", "Gated", "flat"])
def test_norms_at_several_places(comm, name):
    for way in WAYS[comm.size]:
        assert (
            error_of(name, comm, way | (dict(images=2) if name == "Gated" else {})) <= TOLERANCE
        ), way


@pytest.mark.parallel([1, 2])
def test_iterations_without_gradients(comm):
    for way in WAYS[comm.size]:
        assert error_of("Equilibrium", comm, way, steps=1) <= TOLERANCE, way


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=2)
@pytest.mark.parametrize(
    "name, size", [("Frames", "25x34"), ("Batches", "24x34"), ("Spectral", "19x26")]
)
def test_frames_and_dates_in_the_batch(comm, name, size):
    for way in WAYS[comm.size]:
        assert error_of(name, comm, way, size, bands=6) <= TOLERANCE, way


@pytest.mark.covering(cases=1)
@pytest.mark.parallel([1, 2])
def test_slices_in_the_batch(comm):
    ways = {
        1: [dict(tiles_per_rank=(2, 2, 1), exchange_every="1", images=2), dict(streamed=(1, 2, 2))],
        2: [dict(tiles="2x1x1", exchange_every="1")],
    }
    for way in ways[comm.size]:
        assert error_of("Slices", comm, way, "8x12x10", bands=2) <= TOLERANCE, way


@pytest.mark.parallel([1, 2])
def test_norms_at_several_places_of_whole_images(comm):
    assert (
        error_of("Attending", comm, dict(samples=comm.size, images=2, accumulate=2), "16x12")
        <= TOLERANCE
    )


@pytest.mark.parallel(2)
def test_stages_do_not_share_statistics(comm):
    settings = config(stages=2)
    plan = replace(
        settings,
        model=ModelConfig(f"{made_streams.__name__}:twice", in_channels=4, out_channels=3),
        pipeline=replace(settings.pipeline, balance=(2, 3)),
    )
    with pytest.raises(
        ValueError, match="layers 1 and 3 share running statistics, but lie in the stages"
    ):
        verify(plan, comm, Size("26x33"))


@pytest.mark.parametrize("name, places", [("Siamese", 2), ("Recurrent", 3), ("flat", 2)])
def test_running_statistics_are_pytorchs(name, places):
    """Each place counts its images, one after another, wherever the network goes."""
    torch.manual_seed(0)
    model = getattr(made_streams, name)(4, 3)
    network = distseg.capture(model)
    network, model, x = (
        network.double().train(),
        copy.deepcopy(model).double().train(),
        torch.randn(3, 4, 12, 14, dtype=torch.float64),
    )
    network(x), model(x)
    own = {network.names.get(n, n): b for n, b in network.named_buffers()}
    for n, b in model.named_buffers():
        if name != "flat":  # whose masks differ
            torch.testing.assert_close(own[n], b, rtol=1e-12, atol=1e-12)
        if n.endswith("num_batches_tracked"):
            assert own[n] == places


@pytest.mark.parallel(2)
def test_ranks_that_compute_something_else_are_told(comm):
    with pytest.raises(
        ValueError,
        match="the ranks do not agree: what the network calls is .* on rank 0 and .* on rank 1",
    ):
        error_of("OfRank", comm, dict(samples=2))


@pytest.mark.parallel([1, 2])
def test_frozen_parts_and_dropouts_of_all_of_a_list_of_layers(comm):
    for way in WAYS[comm.size]:
        assert error_of("stays", comm, way) <= TOLERANCE, way


@pytest.mark.parallel([1, 2])
def test_a_size_with_which_a_network_does_something_else_is_told_before_work(comm, tmp_path):
    """Also where it is neither the smallest nor the largest image."""
    store = comm.bcast(str(tmp_path / "store.h5"))
    if comm.rank == 0:
        random_store(store, train=[(24, 36), (40, 64), (12, 44), (8, 12)], val=[(32, 32)])
    comm.Barrier()
    plan = Config(
        model=ModelConfig("made_streams:OfWidth"),
        data=DataConfig(store=store),
        train=TrainConfig(epochs=1, output=f"{store}-run"),
        mesh=MeshConfig(comm.size, reducer=TRANSPORT),
    )
    with pytest.raises(
        ValueError,
        match="with 1 image of 12x44 pixels this network does something else than with other images",
    ):
        train(plan, comm)


class Turning(nn.Module):
    """Padding that joins both sides of the image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x):
        return self.conv(F.pad(x, (1, 1, 1, 1), mode="circular"))


def test_a_layer_that_has_no_tiles_is_told_with_its_line():
    with pytest.raises(ValueError, match=r"test_streams.py, line \d+.*circular padding"):
        graph_of(as_network(Turning()))
