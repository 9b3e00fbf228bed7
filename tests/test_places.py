"""Networks whose cells lie where the size of the image says, on images of sizes that divide nothing: the serial program's gradient (:mod:`made_places`)."""

from dataclasses import replace

import made_places
import pytest
from test_exact import TOLERANCE, config

from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.training.verify import verify

WAYS = {  # of each number of ranks
    1: [dict(tiles_per_rank=(2, 2)), dict(streamed=(3, 2), exchange_every="1")],
    2: [dict(tiles="2x1", exchange_every="2"), dict(stages=2, streamed=(2, 1))],
    4: [dict(tiles="2x1", stages=2, exchange_every="1", accumulate=2)],
}
RESIZED = ["strided_unet", "nearest_unet", "feature_pyramid", "fractions"]


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=3)
@pytest.mark.parametrize("name", RESIZED)
def test_exact(comm, name):
    for way in WAYS[comm.size]:
        assert error_of(name, comm, way) <= TOLERANCE, way


@pytest.mark.parallel([3, 4])
def test_exact_on_more_ranks(comm):
    for way in WAYS.get(comm.size, [dict(tiles="1x3")]):
        assert error_of("feature_pyramid", comm, way, "57x75") <= TOLERANCE, way


@pytest.mark.parallel(1)
@pytest.mark.parametrize("size", ["5x3", "97x131", "64x32"])
def test_any_size(comm, size):
    """Very small ones, of one tile, and multiples of all strides."""
    assert (
        error_of("strided_unet", comm, {} if size == "5x3" else dict(streamed=(2, 2)), size)
        <= TOLERANCE
    )


@pytest.mark.parallel(1)
@pytest.mark.parametrize("setting", [dict(halo=40), dict(norms="window")])
def test_windows_that_stand_for_images_are_refused(comm, setting):
    with pytest.raises(
        ValueError,
        match="approximate.(halo is 40|norms is window), so that windows .* the result of layer interpolate depends on the size of the whole image",
    ):
        error_of("strided_unet", comm, dict(tiles_per_rank=(2, 2), **setting))


def error_of(name: str, comm, settings: dict, size: str = "33x41") -> float:
    plan = replace(
        config(**settings),
        model=ModelConfig(f"{made_places.__name__}:{name}", in_channels=3, out_channels=3),
    )
    report = verify(plan, comm, Size(size))
    return comm.bcast(report and report["max_error"])
