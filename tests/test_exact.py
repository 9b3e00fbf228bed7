"""The promise: on every mesh one optimizer step equals the serial program's, in float64, to a relative 1e-12.

Loss, every gradient, every updated weight and the running statistics of batch norm are compared (distseg.training.verify), with
dropout on, a twentieth of the pixels ignored, and sizes that divide nothing.
"""

from dataclasses import replace

import pytest
from mpirunner.transport import NAME as TRANSPORT

from distseg.config.settings import (
    ApproximateConfig,
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.layers.kernels import norm as compiled
from distseg.training.verify import verify

TOLERANCE = 1e-12
BASE = Config(
    model=ModelConfig(
        depth=2,
        num_convs=2,
        base_channels=4,
        norm="instance",
        dropout=0.1,
        in_channels=3,
        out_channels=3,
    ),
    optim=OptimConfig(name="adamw", weight_decay=0.01, clip=0.1),
)


def config(
    samples=1, tiles="1x1", norm="instance", up="nearest", loss="cross_entropy", **more
) -> Config:
    """BASE on a mesh; ``more`` are fields of any other section."""
    sections = {
        "model": replace(
            BASE.model,
            norm=norm,
            up=up,
            **{"groups": 2 if norm == "group" else None, **_of(ModelConfig, more)},
        ),
        "mesh": MeshConfig(samples=samples, tiles=Size(tiles), **_of(MeshConfig, more)),
        "loss": LossConfig(name=loss, **_of(LossConfig, more)),
        "pipeline": PipelineConfig(**_of(PipelineConfig, more)),
        "spatial": SpatialConfig(**_of(SpatialConfig, more)),
        "approximate": ApproximateConfig(**_of(ApproximateConfig, more)),
        "streaming": StreamingConfig(tiles=more.get("streamed"), scratch=more.get("scratch")),
        "data": DataConfig(**_of(DataConfig, more)),
        "train": TrainConfig(**_of(TrainConfig, more)),
    }
    return replace(BASE, **sections)


def _of(section, fields):
    return {k: v for k, v in fields.items() if k in section.__dataclass_fields__}


def check(comm, image: str, **settings) -> None:
    found = config(**settings)
    report = verify(found, comm, Size(image))
    error = comm.bcast(report and report["max_error"])
    assert error <= TOLERANCE, report or "see rank 0"
    norm = found.model.norm
    if report and norm == "batch" and not found.spatial.frozen_norm:
        assert report["buffers"], "batch norm has running statistics to compare"


def error_of_made(made, name: str, comm, settings: dict, size: str) -> float:
    """Return the error of a network of a file ``made``, on an image of about this size: of the next multiple that the network wants."""
    multiple = made.MULTIPLES.get(name, 1)
    image = Size(-(-n // multiple) * multiple for n in Size(size))
    plan = replace(
        config(**settings),
        model=ModelConfig(f"{made.__name__}:{name}_network", in_channels=3, out_channels=3),
    )
    report = verify(plan, comm, image)
    return comm.bcast(report and report["max_error"])


NORMS = ["instance", "batch", "group", "none"]
UPS = ["nearest", "bilinear", "transposed"]
LOSSES = ["cross_entropy", "binary_cross_entropy", "dice", "focal", "cross_entropy + 0.5*dice"]


@pytest.mark.parallel([1, 2, 3, 4, 6, 8])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_on_every_number_of_ranks(comm, norm):
    grid = {1: "1x1", 2: "2x1", 3: "1x3", 4: "2x2", 6: "3x2", 8: "2x4"}[comm.size]
    check(comm, "97x131", tiles=grid, norm=norm)


@pytest.mark.parallel([1, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", NORMS[:3])
def test_every_norm_without_compiled_kernels(comm, norm, monkeypatch):
    """As on a GPU: PyTorch's kernels, in passes."""
    monkeypatch.setattr(compiled, "available", lambda x: False)
    check(
        comm,
        "61x75",
        tiles={1: "1x1", 4: "2x2"}[comm.size],
        norm=norm,
        exchange_every={1: "all", 4: "1"}[comm.size],
    )


@pytest.mark.parallel([2, 6])
@pytest.mark.covering(1)
@pytest.mark.parametrize("up", UPS)
def test_every_up_sampling(comm, up):
    check(comm, "61x203", tiles={2: "1x2", 6: "2x3"}[comm.size], up=up, norm="group")


@pytest.mark.parallel([1, 4])
@pytest.mark.covering(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("over", ["image", "batch"])
def test_every_loss(comm, loss, over):
    check(
        comm,
        "61x75",
        tiles={1: "1x1", 4: "1x2"}[comm.size],
        samples={1: 1, 4: 2}[comm.size],
        loss=loss,
        **({"dice_over": over} if "dice" in loss else {}),
        images=2,
    )


@pytest.mark.parallel(3)
@pytest.mark.parametrize("loss", ["binary_cross_entropy", "dice", "focal"])
def test_one_foreground_class(comm, loss):
    check(comm, "61x75", tiles="3x1", loss=loss, out_channels=1)


@pytest.mark.parallel(2)
def test_class_weights_and_label_smoothing(comm):
    weights = [0.2, 1.0, 3.0]
    check(comm, "61x75", tiles="1x2", class_weights=weights, label_smoothing=0.1)
    check(
        comm,
        "61x75",
        tiles="1x2",
        loss="focal + dice",
        class_weights=weights,
        gamma=1.5,
        smooth=0.5,
    )


@pytest.mark.parallel([4, 6, 8])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scope", ["group", "step"])
def test_samples_times_tiles(comm, norm, scope):
    samples, tiles = {4: (2, "1x2"), 6: (3, "2x1"), 8: (2, "2x2")}[comm.size]
    check(
        comm,
        "61x75",
        samples=samples,
        tiles=tiles,
        norm=norm,
        norm_scope=scope,
        images=2,
        accumulate=2,
    )


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("norm", NORMS)
def test_many_tiles_a_rank(comm, norm):
    check(
        comm,
        "97x131",
        tiles={1: "1x1", 2: "2x1"}[comm.size],
        tiles_per_rank=Size("2x3"),
        norm=norm,
        loss="dice",
        images=2,
    )


@pytest.mark.parallel([1, 2])
def test_frozen_batch_norm_one_tile_after_another(comm):
    check(
        comm,
        "61x75",
        tiles={1: "1x1", 2: "1x2"}[comm.size],
        tiles_per_rank=Size("2x2"),
        norm="batch",
        frozen_norm=True,
        loss="dice",
    )


@pytest.mark.parallel(2)
@pytest.mark.parametrize("loss", ["cross_entropy", "dice"])
def test_accumulation_without_norms_keeps_the_gradient(comm, loss):
    check(
        comm,
        "61x75",
        tiles="1x2",
        norm="none",
        loss=loss,
        **({"dice_over": "batch"} if "dice" in loss else {}),
        accumulate=3,
    )


@pytest.mark.parallel(2)
@pytest.mark.parametrize("reducer", [TRANSPORT, "auto"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_optimizers_and_reducers(comm, reducer, name):
    found = config(tiles="1x2", reducer=reducer)
    report = verify(replace(found, optim=OptimConfig(name=name, clip=0.05)), comm, Size("33x47"))
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE


@pytest.mark.parallel(4)
def test_deeper_network_on_a_size_below_its_stride(comm):
    check(
        comm, "61x203", tiles="1x4", depth=5, num_convs=1, base_channels=2, norm="group", groups=1
    )


@pytest.mark.parallel(3)
def test_a_halo_too_small_is_found_and_named(comm):
    report = verify(config(tiles="1x3", halo=4), comm, Size("61x203"))
    if report:
        assert report["max_error"] > 1e-6
        assert "smaller than this model's exact halo 22" in report["approximations"][0]


@pytest.mark.parallel(2)
def test_statistics_per_window_are_found_and_named(comm):
    report = verify(config(tiles="1x2", norms="window"), comm, Size("61x203"))
    if report:
        assert report["max_error"] > 1e-6
        assert "norms is window" in report["approximations"][0]


@pytest.mark.parallel([1, 2, 4, 6])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("every", ["1", "2", "level"])
def test_tiles_that_exchange_borders(comm, norm, every):
    grid = {1: "1x1", 2: "1x2", 4: "4x1", 6: "2x3"}[comm.size]
    check(
        comm, "61x75", tiles=grid, norm=norm, exchange_every=every, up=UPS[comm.size % 3], images=2
    )


@pytest.mark.parallel(8)
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "every, recompute", [("1", "always"), ("2", "never"), ("level", "except_last")]
)
def test_samples_times_stages_times_tiles_that_exchange_borders(comm, norm, every, recompute):
    more = dict(
        exchange_every=every,
        recompute=recompute,
        tiles_per_rank=Size("2x1"),
        fuse_below=6,
        accumulate=2,
        loss="dice",
    )
    check(comm, "61x75", samples=2, tiles="1x2", stages=2, norm=norm, **more)


@pytest.mark.parallel([3, 4])
def test_the_v_with_tiles_that_exchange_borders(comm):
    check(
        comm,
        "61x75",
        tiles={3: "1x1", 4: "2x1"}[comm.size],
        stages={3: 3, 4: 2}[comm.size],
        placement="v-shaped",
        exchange_every=3,
        accumulate=3,
    )


@pytest.mark.parallel(2)
def test_frozen_batch_norm_of_tiles_that_exchange_borders(comm):
    check(
        comm,
        "61x75",
        tiles="2x1",
        tiles_per_rank=Size("1x2"),
        norm="batch",
        frozen_norm=True,
        exchange_every=1,
        accumulate=2,
    )


@pytest.mark.parallel(4)
def test_images_smaller_than_their_network_s_reach_exchange_with_everybody(comm):
    check(
        comm,
        "61x203",
        tiles="1x4",
        depth=5,
        num_convs=1,
        base_channels=2,
        norm="group",
        groups=1,
        exchange_every="level",
    )
