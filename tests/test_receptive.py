"""Halo and stride: of known networks, by hand, and against a brute-force probe by autograd."""

import made_networks
import pytest
import torch
from torch import nn

from distseg.config.settings import ModelConfig
from distseg.layers.graph import graph_of, receptive_field
from distseg.models import probing
from distseg.models.probing import probed_reach
from distseg.models.unet import unet
from distseg.models.zoo import _builder, outline_model


def conv(i, o, k=3, **more):
    return nn.Conv2d(i, o, k, **{"padding": k // 2, **more})


def test_a_network_of_the_paper_on_the_meta_device():
    """The others, and what the table says of them, are in test_models.py."""
    with torch.device("meta"):
        model = _builder("summit-small")()
    found = probed_reach(model)
    assert (found.halo, found.stride) == ((190, 190), (32, 32))
    assert all(p.is_meta for p in model.parameters()), "the model is not touched"


BY_HAND = {
    "a 1x1 conv": (nn.Sequential(conv(3, 4, 1)), (0, 0), (1, 1)),
    "two 3x3": (
        nn.Sequential(conv(3, 4), nn.ReLU(), nn.BatchNorm2d(4), conv(4, 2)),
        (2, 2),
        (1, 1),
    ),
    "dilated": (nn.Sequential(conv(3, 4, 3, dilation=4, padding=4)), (4, 4), (1, 1)),
    "padding in words": (nn.Sequential(conv(3, 4, 5, padding="same")), (2, 2), (1, 1)),
    "depthwise": (nn.Sequential(conv(4, 4, 7, groups=4), conv(4, 2, 1)), (3, 3), (1, 1)),
    "flat kernels": (
        nn.Sequential(
            nn.Conv2d(3, 4, (1, 7), padding=(0, 3)), nn.Conv2d(4, 4, (3, 1), padding=(1, 0))
        ),
        (1, 3),
        (1, 1),
    ),
    "pooled in one dim": (
        nn.Sequential(
            conv(1, 1), nn.MaxPool2d((1, 4)), conv(1, 1), nn.Upsample(scale_factor=(1, 4))
        ),
        (2, 5),
        (1, 4),
    ),
    "pixels shuffled": (
        nn.Sequential(conv(3, 4, 2, stride=2, padding=0), nn.PixelShuffle(2)),
        (0, 0),
        (2, 2),
    ),
    "reflecting": (nn.Sequential(conv(3, 4, 3, padding_mode="reflect")), (1, 1), (1, 1)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    model, halo, stride = BY_HAND[name]
    found = probed_reach(model)
    assert (found.halo, found.stride) == (halo, stride)


def test_volumes():
    found = probed_reach(unet(depth=2, num_convs=1, base_channels=2, dims=3))
    assert found == probed_reach(
        unet(depth=2, num_convs=1, base_channels=2, dims=3, up="nearest", norm="batch")
    )
    assert (found.halo, found.stride) == ((11, 11, 11), (4, 4, 4))


class Residual(nn.Module):
    """Not flat: a plain module with a branch, functions and a concatenation."""

    def __init__(self):
        super().__init__()
        self.first, self.down, self.deep, self.last = (
            conv(2, 4),
            conv(4, 8, stride=2),
            conv(8, 8, 5),
            conv(12, 3),
        )
        self.norm = nn.InstanceNorm2d(8)

    def forward(self, x):
        x = torch.relu(self.first(x))
        y = nn.functional.interpolate(
            self.norm(self.deep(self.down(x))), scale_factor=2.0, mode="nearest"
        )
        return self.last(torch.cat((x, y[..., : x.shape[2], : x.shape[3]]), 1))


BRUTE = {
    "residual": Residual(),
    "u-net": unet(
        depth=2, num_convs=1, base_channels=2, in_channels=1, norm="none", dropout=0, up="bilinear"
    ),
    "transposed": nn.Sequential(
        conv(2, 3), nn.AvgPool2d(2), conv(3, 3, 5), nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1)
    ),
    "stride 6": nn.Sequential(
        nn.AvgPool2d(2), conv(2, 2), nn.AvgPool2d(3), conv(2, 2), nn.Upsample(scale_factor=6)
    ),
}


FLAT = ["residual", "long_skip", "one_sided", "replicating", "shuffled", "early_norm"]


@pytest.mark.parametrize(
    "name",
    [
        *FLAT,
        *("u-net", "transposed", "stride 6"),
        *("tiny", "demo", "summit-small", "gigapixel-4492"),
    ],
)
def test_what_is_worked_out_is_what_is_measured(name):
    model = (
        getattr(made_networks, name)(3, 3)
        if name in FLAT
        else BRUTE.get(name) or outline_model(ModelConfig(name))
    )
    graph_of(model)  # which raises where it would have to be measured
    assert receptive_field(model) == probed_reach(model)


def test_gaps_are_counted():
    """The probe looks behind a border on the stride grid, and of a kernel with gaps no cell there looks across it by chance."""
    model = made_networks.dilated(3, 3)
    assert receptive_field(model).halo == (3, 3) and probed_reach(model).halo < (3, 3)


def test_a_flat_model_that_changes_the_size():
    with pytest.raises(
        ValueError,
        match="an image of .* pixels along dim 0 comes out as .*, but a segmentation network keeps the size",
    ):
        receptive_field(nn.Sequential(conv(3, 4), nn.Conv2d(4, 2, 3)))


def brute_force(model: nn.Module, length: int = 96) -> tuple[int, int]:
    """(halo, stride) along the rows from the whole Jacobian of row sums, with random weights; norms out, maxima as means."""
    model = nn.Sequential(model).double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MaxPool2d):
                setattr(parent, name, nn.AvgPool2d(2))
            if isinstance(child, nn.InstanceNorm2d):
                setattr(parent, name, nn.Identity())
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    x = torch.rand(1, first.in_channels, length, 12, dtype=torch.float64) + 0.5
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(0.5, 1.5)
    rows = torch.autograd.functional.jacobian(lambda x: model(x).sum((0, 1, 3)), x).sum(
        (1, 2, 4)
    )  # (out row, in row)
    inside = range(length // 3, 2 * length // 3)
    stride = next(
        s
        for s in range(1, 20)
        if all(torch.allclose(rows[r, 24:72], rows[r + s, 24 + s : 72 + s]) for r in inside)
    )
    border = length // 2 // stride * stride
    before = border - int(rows[border:, :].abs().sum(0).nonzero().min())
    after = int(rows[:border, :].abs().sum(0).nonzero().max()) - border + 1
    return max(before, after), stride


@pytest.mark.parametrize("name", BRUTE)
def test_against_the_whole_jacobian(name):
    torch.manual_seed(0)
    found = probed_reach(BRUTE[name])
    assert (found.halo[0], found.stride[0]) == brute_force(BRUTE[name])
    assert found.halo[0] == found.halo[1]


class PixelAttention(nn.Module):
    def forward(self, x):
        q = x.flatten(2)
        return (q @ (q.transpose(1, 2) @ q).softmax(-1)).view_as(x)


class SqueezeExcite(nn.Module):
    """Multiplies by what the whole image says: a probe of zeros would not see it."""

    def forward(self, x):
        return x * x.mean((2, 3), keepdim=True)


class MeanAdded(nn.Module):
    def forward(self, x):
        return x + x.mean((2, 3), keepdim=True)


@pytest.mark.timeout(15)
@pytest.mark.parametrize("layer", [PixelAttention, SqueezeExcite, MeanAdded])
def test_a_layer_that_looks_at_the_whole_image_is_refused(layer, monkeypatch):
    monkeypatch.setattr(
        probing, "_LENGTHS", probing._LENGTHS[:3]
    )  # attention over a strip costs its length squared
    with pytest.raises(ValueError, match="looks at the whole image"):
        probed_reach(nn.Sequential(conv(3, 4), layer(), conv(4, 2)))


@pytest.mark.timeout(15)
def test_a_grid_that_hangs_on_the_images_size_is_refused():
    with pytest.raises(ValueError, match="align_corners|stride|whole image"):
        probed_reach(
            nn.Sequential(
                conv(3, 4),
                nn.MaxPool2d(2),
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            )
        )


@pytest.mark.parametrize("layer", [nn.Softmax(dim=-1), nn.Softmax(dim=2), nn.LogSoftmax(dim=3)])
def test_a_softmax_over_pixels_is_no_pointwise_layer(layer):
    with pytest.raises(ValueError, match="Softmax|whole image"):
        probed_reach(nn.Sequential(conv(3, 4), layer))
    assert probed_reach(nn.Sequential(conv(3, 4), nn.Softmax(dim=1))).halo == (1, 1)


@pytest.mark.parametrize(
    "model, message",
    [
        (
            nn.Sequential(conv(3, 4), nn.AdaptiveAvgPool2d(1)),
            "comes out as .1, 1., but a segmentation network keeps the size",
        ),
        (nn.Sequential(conv(3, 4, padding=0)), "keeps the size"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")),
            "circular padding, which joins opposite borders",
        ),
        (
            nn.Sequential(nn.ReLU()),
            r"no convolution layer .* give probed_reach\(model, dims=..., in_channels=...\)",
        ),
    ],
)
def test_what_can_not_be_cut_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        probed_reach(model)


def test_a_model_without_convolutions_by_its_dims():
    found = probed_reach(nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1)), dims=2, in_channels=3)
    assert (found.halo, found.stride) == ((1, 1), (1, 1))


def test_the_model_is_not_changed():
    model = unet(depth=2, num_convs=1, base_channels=2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    probed_reach(model)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
