"""Dropout that does not know of tiles: the masks are those of the whole image."""

import numpy as np
import pytest
import torch
from torch import nn

from distseg.layers.context import Context
from distseg.layers.dropout import KeyedDropout, channel_mask, element_mask
from distseg.tiling.tile import Box, ReceptiveField, TilePlacement, tiles, window

SAMPLES = (7, 12)


def masks(layer: nn.Module, image, stride, grid, samples=SAMPLES, **context):
    """The mask of each window of a grid, as (window in cells, mask)."""
    reach = ReceptiveField(tuple(2 * s for s in stride), stride)
    twin = KeyedDropout(layer, Context(**context), stride, "enc0_drop0")
    for t in tiles(image, grid, stride):
        place = TilePlacement(image, t, window(t, image, reach), (0, 1), samples)
        twin.context.places = [place]
        box = place.window.coarsened(stride)
        yield box, twin(torch.ones(len(samples), 5, *box.size))


@pytest.mark.parametrize(
    "image, stride, grid",
    [((13, 22), (2, 2), (2, 3)), ((13, 22), (1, 4), (3, 1)), ((9, 10, 13), (2, 1, 4), (2, 3, 2))],
)
@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.Dropout2d(0.4), nn.Dropout3d(0.4)])
def test_windows_of_every_grid_see_the_whole_images_mask(layer, image, stride, grid):
    one = tuple(1 for _ in image)
    ((_, whole),) = masks(layer, image, stride, one)
    for box, found in masks(layer, image, stride, grid):
        assert torch.equal(found, whole[(slice(None), slice(None), *box.slices)])
    pixels = whole.flatten(2)
    by_channel = bool((pixels == pixels[..., :1]).all())
    assert by_channel == (not isinstance(layer, nn.Dropout))
    assert not torch.equal(whole[0], whole[1]), "samples have masks of their own"


def test_a_mask_depends_on_seed_epoch_sample_and_layer_alone():
    def draw(name="a", samples=(7,), **context):
        twin = KeyedDropout(nn.Dropout2d(0.5), Context(**context), (1, 1), name)
        twin.context.places = [
            TilePlacement(
                (1, 1), Box.whole((1, 1)), Box.whole((1, 1)), tuple(range(len(samples))), samples
            )
        ]
        return twin(torch.ones(len(samples), 64, 1, 1))

    first = draw()
    assert torch.equal(first, draw())
    for other in (draw(seed=1), draw(epoch=1), draw(samples=(8,)), draw(name="b")):
        assert not torch.equal(first, other)
    assert torch.equal(draw(samples=(3, 7))[1], first[0]), "not on its place in the batch"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p):
    kept = channel_mask(p, 5, 20000)
    assert set(np.unique(kept)) == {0.0, 1 / (1 - p)}
    assert abs((kept == 0).double().mean() - p) < 0.015
    assert abs(kept.mean() - 1) < 0.1
    elements = element_mask(p, 5, 10, (40, 50), Box.whole((40, 50)), None)
    assert abs((elements == 0).double().mean() - p) < 0.015
    assert set(np.unique(elements)) == {0.0, 1 / (1 - p)}  # as nn.Dropout's in float64


def test_elements_are_drawn_by_position():
    """A box of a mask is that box, not the first pixels of the stream."""
    whole = element_mask(0.5, 1, 2, (6, 7), Box.whole((6, 7)), None)
    part = element_mask(0.5, 1, 2, (6, 7), Box((2, 3), (5, 6)), None)
    assert torch.equal(part, whole[:, 2:5, 3:6])


def test_evaluation_and_p_0_are_the_identity():
    x = torch.randn(1, 3, 2, 2)
    twin = KeyedDropout(nn.Dropout2d(0.9), Context(), (1, 1), "a")
    assert twin.eval()(x) is x
    assert KeyedDropout(nn.Dropout2d(0), Context(), (1, 1), "a")(x) is x


def test_the_gradient_is_masked_alike():
    ((_, y),) = masks(nn.Dropout2d(0.5), (4, 4), (1, 1), (1, 1))
    twin = KeyedDropout(nn.Dropout2d(0.5), Context(), (1, 1), "enc0_drop0")
    twin.context.places = [
        TilePlacement((4, 4), Box.whole((4, 4)), Box.whole((4, 4)), (0, 1), SAMPLES)
    ]
    x = torch.ones(2, 5, 4, 4, requires_grad=True)
    twin(x).sum().backward()
    assert torch.equal(x.grad, y)
