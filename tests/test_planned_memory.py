"""The planned activations of ranks, for the page of distseg report."""

from dataclasses import replace

import pytest

from distseg.cli.planned_memory import planned_memory, step_tensors
from distseg.config.settings import (
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.models.zoo import outline_model
from distseg.training.programs import StepPrograms

PLAIN = ModelConfig(
    depth=2, num_convs=1, base_channels=4, in_channels=3, dropout=0.0, norm="none", dims=2
)
LOSS = LossConfig("cross_entropy")  # no extra forward pass in a pipeline


def activations(images=1, norm="none", precision="fp32", side=64, **sections):
    config = Config(model=replace(PLAIN, norm=norm), loss=LOSS, data=DataConfig(images=images))
    config = replace(config, **sections).with_dims(2, f"{side}x{side}")
    programs = StepPrograms(config, outline_model(config.model, 3, 2), (side, side))
    return step_tensors(programs, precision)


def test_activations_grow_with_images_and_number_type():
    (one,), (two,), (wide,) = activations(), activations(images=2), activations(precision="fp64")
    assert two == pytest.approx(2 * one, rel=0.01)
    assert wide == pytest.approx(2 * one, rel=0.1)


def test_tiles_of_a_rank_are_held_at_once_only_if_they_run_together():
    """Exchange makes tiles run together. They hold what the whole image would, and halos."""
    cut = Size("2x2")
    together = SpatialConfig(tiles_per_rank=cut, exchange_every="1")
    (whole,) = activations()
    assert whole < activations(spatial=together)[0] < 1.6 * whole
    assert activations(spatial=SpatialConfig(tiles_per_rank=cut))[0] < 0.8 * whole


def test_tiles_take_less_than_the_whole_image():
    (whole,), mesh = activations(side=256), MeshConfig(tiles=Size("1x2"))
    (windows,) = activations(side=256, mesh=mesh)
    spatial = SpatialConfig(exchange_every="1")
    (exchanged,) = activations(side=256, mesh=mesh, spatial=spatial)
    assert whole / 2 < windows < whole and whole / 2 < exchanged < whole


def test_each_stage_holds_its_layers_and_earlier_stages_more_micro_batches():
    mesh, train = MeshConfig(stages=2), TrainConfig(accumulate=4)
    first, last = activations(mesh=mesh, train=train)
    one, other = activations(mesh=mesh)
    assert first / one > 1.5 > last / other
    v_shaped = PipelineConfig(placement="v-shaped")
    assert len(activations(mesh=mesh, pipeline=v_shaped)) == 2


def test_what_is_not_planned():
    streamed = Config(streaming=StreamingConfig(tiles=Size("2x2")))
    manifest = {"data": {"size": [64, 64]}, "config": streamed.as_plain(), "channels": [3, 2]}
    assert planned_memory(streamed, manifest, {"kind": "start", "base_memory": [1]}) is None
    old = {"data": {"size": [64, 64]}, "config": {}, "channels": [3, 2]}
    assert planned_memory(Config(), old, {"kind": "start"}) is None
