"""Networks whose code moves places of the image, in tiles of sizes that divide nothing: the serial program's gradient (:mod:`made_moved`)."""

from functools import partial

import made_moved
import pytest
import torch
import torch.nn.functional as F
from test_exact import TOLERANCE, error_of_made

import distseg
from distseg.models.capture.trace import CanNotCapture

WAYS = [
    dict(tiles_per_rank=(2, 3), exchange_every="1"),
    dict(streamed=(3, 2)),
    dict(tiles_per_rank=(2, 2), exchange_every="all"),
]
ON_RANKS = {
    2: [dict(tiles="2x1", exchange_every="2"), dict(stages=2, streamed=(2, 1))],
    3: [dict(tiles="1x3")],
}
error_of = partial(error_of_made, made_moved)


@pytest.mark.parallel(1)
@pytest.mark.parametrize("name", made_moved.FUNCTIONS)
def test_exact(comm, name):
    n = list(made_moved.FUNCTIONS).index(name)
    way, size = WAYS[n % 3], ("37x45", "33x42", "50x35")[n % 2]
    assert error_of(name, comm, way, size) <= TOLERANCE, (way, size)


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(cases=3)
@pytest.mark.parametrize(
    "name",
    [
        "unet",
        "multiple_reflect",
        "patch_merging",
        "differences",
        "attention_in_windows",
        "kernels_of_places",
        "unpooled",
    ],
)
def test_exact_on_more_ranks(comm, name):
    for way in ON_RANKS[comm.size]:
        assert error_of(name, comm, way, "37x45") <= TOLERANCE, way


@pytest.mark.parametrize("size", [(16, 20), (21, 23), (64, 36)])
@pytest.mark.parametrize(
    "name",
    [
        "unet",
        "cropped_skip",
        "multiple_constant",
        "on_both_sides",
        "down_to_multiple",
        "in_front",
        "patch_merging",
        "unpooled",
    ],
)
def test_whole_images_of_any_size(name, size):
    torch.manual_seed(0)
    model = getattr(made_moved, f"{name}_network")(3, 2).double()
    network, x = distseg.capture(model), torch.randn(2, 3, *size, dtype=torch.float64)
    assert network.multiple == 1
    network.check(size, 2)
    torch.testing.assert_close(network(x), model(x), rtol=1e-12, atol=1e-12)


REFUSED = {
    "rolled": (lambda m, x: x.roll(1, 2), "roll .* opposite borders would meet.* F.pad"),
    "flipped": (
        lambda m, x: x + x.flip(-1),
        "flip .* flips the image, so that each part would need the part on the other side",
    ),
    "a few rows": (
        lambda m, x: x - x[:, :, :5].mean((2, 3), keepdim=True),
        "__getitem__ .* takes a slice of length 5",
    ),
    "a row": (lambda m, x: x - x[:, :, 0:1], "__getitem__ .* takes a slice of length 1"),
    "a strip of many": (
        lambda m, x: x.view(len(x), 6, 2, -1, x.shape[3])[:, :, 0],
        "view .* mixes images, channels and positions, or cuts the image into windows",
    ),
    "every other place from the end": (
        lambda m, x: x[:, :, x.shape[2] // 2 :: 2],
        "takes every n-th position of the image, from a start that depends",
    ),
    "two dims in one": (
        lambda m, x: x * x.flatten(2)[..., 1:-1].mean(-1)[..., None, None],
        "takes a part of several dims of the image",
    ),
    "anywhere": (
        lambda m, x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1)),
        "grid_sample .* samples the image at positions from a grid, which may lie anywhere",
    ),
    "overlapping maxima": (
        lambda m, x: F.max_pool2d(x, 3, 1, 1, return_indices=True)[0],
        "returns the positions of the maxima with kernel_size=.*, stride=",
    ),
    "changed places": (
        lambda m, x: (lambda y, i: F.max_unpool2d(y, i + 1, 2))(
            *F.max_pool2d(x, 2, return_indices=True)
        ),
        "max_unpool2d .* takes indices that are not the unchanged indices of a max pooling",
    ),
    "circular": (
        lambda m, x: F.pad(x, (1, 1, 0, 0), mode="circular")[..., 1:-1],
        r"pad in the model \(test_moved.py, line \d+\) is circular padding, which joins opposite borders",
    ),
    "both": (
        lambda m, x: F.pad(x, (0, 1, 0, 0, 0, 1))[:, :6],
        "pads channels and spatial dims in one call",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_named(name):
    function, words = REFUSED[name]
    with pytest.raises(CanNotCapture, match=words):
        distseg.capture(made_moved.Moved(3, 2, function))
