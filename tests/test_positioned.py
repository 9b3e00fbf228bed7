"""Networks that know where in the image a pixel is, in tiles: the serial program's gradient (:mod:`made_positioned`)."""

from functools import partial

import made_positioned
import pytest
import torch
from test_exact import TOLERANCE, error_of_made

import distseg
from distseg.models.capture.positions import Positions
from distseg.models.capture.trace import CanNotCapture

WAYS = [dict(tiles_per_rank=(2, 3), exchange_every="1"), dict(streamed=(3, 2))]
ON_RANKS = {
    2: [dict(tiles="2x1", exchange_every="2"), dict(stages=2, streamed=(2, 1))],
    3: [dict(tiles="1x3")],
}
error_of = partial(error_of_made, made_positioned)


@pytest.mark.parallel(1)
@pytest.mark.covering(cases=7)
@pytest.mark.parametrize("name", made_positioned.FUNCTIONS)
def test_exact(comm, name):
    n = list(made_positioned.FUNCTIONS).index(name)
    assert error_of(name, comm, WAYS[n % 2], ("37x45", "33x42")[n % 3 % 2]) <= TOLERANCE


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(cases=3)
@pytest.mark.parametrize(
    "name",
    [
        "coordinates",
        "learned_grid",
        "rows_and_columns",
        "framed",
        "inverse_wavelets",
        "pixels",
        "patches",
    ],
)
def test_exact_on_more_ranks(comm, name):
    for way in ON_RANKS[comm.size]:
        assert error_of(name, comm, way, "37x45") <= TOLERANCE, way


@pytest.mark.parallel(1)
def test_windows_that_stand_for_images_are_refused(comm):
    with pytest.raises(ValueError, match="depends on the size of the whole image"):
        error_of("coordinates", comm, dict(tiles_per_rank=(2, 2), halo=40), "37x45")


@pytest.mark.covering(cases=2)
@pytest.mark.parametrize(
    "name", ["sinusoids", "learned_grid", "rows_and_columns", "numbers", "pasted"]
)
def test_whole_images_of_several_sizes(name):
    torch.manual_seed(0)
    model = getattr(made_positioned, f"{name}_network")(3, 2).double()
    network = distseg.capture(model)
    for images, size in ((1, (16, 20)), (3, (21, 23)), (2, (64, 36))):
        network.check(size, images)
        x = torch.randn(images, 3, *size, dtype=torch.float64)
        torch.testing.assert_close(network(x), model(x), rtol=1e-12, atol=1e-12)


def test_coordinates_are_there_as_rows_and_columns_alone():
    network = distseg.capture(made_positioned.coordinates_network(3, 2).double())
    layer = next(layer for layer in network.modules() if isinstance(layer, Positions))
    made = layer.part(
        torch.zeros(2, 1, 5, 7), (1000, 2000), (1000, 2000), [range(10, 15), range(20, 27)]
    )
    assert made.shape == (2, 1, 5, 7) and made.untyped_storage().nbytes() <= 8 * 1000


REFUSED = {
    "the number of images": (
        lambda m, x: x / len(x),
        "depends on the number of images in the batch",
    ),
    "each image's number": (
        lambda m, x: x * torch.arange(len(x), dtype=x.dtype).view(-1, 1, 1, 1),
        "uses the result of arange .* depends on the number of images in the batch",
    ),
    "noise of places": (
        lambda m, x: x + torch.rand(x.shape[2:], dtype=x.dtype),
        "draws random numbers",
    ),
    "a list of rows": (
        lambda m, x: made_positioned.F.pad(changed(x, [1, 3]), (0, 0)),
        "assigns to positions of the image by an index that is neither a slice nor a number",
    ),
}


def changed(x, index):
    y = x * 1
    y[:, :, index] = 0
    return y


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_named(name):
    function, words = REFUSED[name]
    with pytest.raises(CanNotCapture, match=words):
        distseg.capture(made_positioned.Positioned(3, 2, function))
