"""Shapes of convolutions and pools by arithmetic are those that PyTorch computes."""

import pytest
import torch
from torch import nn

from distseg.models.layers import outline
from distseg.models.outlines import convolved, pooled

LAYERS = [
    nn.Conv1d(2, 5, 3, padding=1),
    nn.Conv2d(2, 5, (3, 2), stride=(2, 3), padding=(2, 0), dilation=(2, 1)),
    nn.Conv2d(2, 4, 4, padding="same", groups=2),
    nn.Conv2d(2, 5, 3, padding="valid", padding_mode="reflect"),
    nn.Conv3d(2, 5, 3, stride=2),
    nn.ConvTranspose1d(2, 5, 3, stride=3, padding=1, output_padding=2, dilation=2),
    nn.ConvTranspose2d(2, 6, (2, 3), stride=(2, 1), output_padding=(1, 0), groups=2),
    nn.ConvTranspose3d(2, 5, 2),
    nn.MaxPool1d(3, 2, padding=1, dilation=2),
    nn.MaxPool2d(2, ceil_mode=True),
    nn.MaxPool2d((3, 2), stride=(1, 2), ceil_mode=True, padding=(1, 0)),
    nn.MaxPool3d(2),
    nn.AvgPool1d(2),
    nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True),
    nn.AvgPool3d((2, 1, 3), ceil_mode=True),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("n", [7, 8, 13])
def test_shapes_are_those_of_pytorch(layer, n):
    dims = int(type(layer).__name__[-2])
    x = torch.zeros(3, 2, *(n + d for d in range(dims)))
    replaced = outline(layer)
    assert replaced.forward.func in (convolved, pooled)
    assert replaced(x.to("meta")).shape == layer(x).shape


@pytest.mark.parametrize(
    "shape, text",
    [
        ((1, 3, 9, 9), "it takes 2 channels of 2 dims, but its input has the shape 1x3x9x9"),
        ((1, 2, 9), "it takes 2 channels of 2 dims, but its input has the shape 1x2x9"),
        ((1, 2, 9, 2), "its input of 9x2 is too small"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(shape, text):
    layer, x = nn.Conv2d(2, 5, 3), torch.zeros(shape)
    with pytest.raises(RuntimeError, match=text):
        outline(layer)(x.to("meta"))
    if shape != (1, 2, 9):  # PyTorch takes it for an image without a batch
        with pytest.raises(RuntimeError):
            layer(x)


def test_changed_layers_compute_their_own_shapes():
    layer, pool = nn.Conv2d(2, 5, 3), nn.MaxPool2d(2, return_indices=True)
    layer.register_forward_hook(lambda layer, given, made: made[..., 1:])
    x = torch.zeros(1, 2, 9, 9, device="meta")
    assert outline(layer)(x).shape == (1, 5, 7, 6)
    assert [y.shape for y in outline(pool)(x)] == [(1, 2, 4, 4)] * 2
