"""Networks whose weights are buffers, frozen, or computed: blurs, edge filters, resamplers, norms without a parameter."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def binomial(channels: int, dims: int = 2) -> torch.Tensor:
    """Return a blur filter (channels, 1, *(4,) * dims) that is not symmetric, so that a mirrored one shows."""
    line = torch.tensor([1.0, 3.0, 3.0, 2.0])
    kernel = line
    for _ in range(dims - 1):
        kernel = kernel.unsqueeze(-1) * line
    return (kernel / kernel.sum()).expand(channels, 1, *kernel.shape).clone()


class Around(nn.Module):
    """A convolution, what ``middle`` of a subclass does with its six channels, and a convolution."""

    def __init__(self, in_channels: int, out_channels: int, dims: int = 2):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.head = (
            conv(in_channels, 6, 3, padding=1),
            conv(6, out_channels, 3, padding=1),
        )
        self.register_buffer("filter", binomial(6, dims))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x):
        return self.head(self.middle(F.silu(self.first(x))))


class Blurred(Around):
    """Blur pool."""

    def middle(self, x):
        return F.interpolate(
            F.conv2d(F.pad(x, (1, 2, 1, 2), mode="reflect"), self.filter, stride=2, groups=6),
            scale_factor=2,
        )


class Blurred1d(Around):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels, dims=1)

    def middle(self, x):
        return F.conv_transpose1d(
            F.conv1d(x, self.filter, stride=2, padding=1, groups=6),
            self.filter * 2,
            stride=2,
            padding=1,
            groups=6,
        )


class Blurred3d(Around):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels, dims=3)

    def middle(self, x):
        return F.conv_transpose3d(
            F.conv3d(x, self.filter, stride=2, padding=1, groups=6),
            self.filter,
            stride=2,
            padding=1,
            groups=6,
        )


class Resampled(Around):
    """Down and up by one fixed filter, with a norm between, as the networks of diffusion models do."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.norm, self.deep = nn.GroupNorm(2, 6), nn.Conv2d(6, 6, 3, padding=1)

    def middle(self, x):
        down = F.conv2d(x, self.filter.to(x.dtype), stride=2, padding=1, groups=6)
        down = down + self.deep(F.silu(self.norm(down)))
        return x + F.conv_transpose2d(down, self.filter.mul(4), stride=2, padding=1, groups=6)


class Repeated(Around):
    """One filter for all channels, turned as a convolution proper is, computed where no gradient is wanted."""

    def middle(self, x):
        with torch.no_grad():
            kernel = torch.flip(self.filter[:1], [2, 3]).type_as(x)
        blurred = F.conv2d(F.pad(x, (1, 2, 1, 2)), kernel.repeat(x.shape[1], 1, 1, 1), groups=6)
        return blurred + F.conv2d(
            x, kernel.detach().expand(6, -1, -1, -1), padding="same", groups=6
        )


class Edges(nn.Module):
    """Fixed filters that look at the image before any layer with a weight of its own does."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        sobel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
        self.register_buffer("sobel", sobel.expand(in_channels, 1, 3, 3).clone(), persistent=False)
        self.norm, self.head = (
            nn.BatchNorm2d(2 * in_channels),
            nn.Conv2d(2 * in_channels, out_channels, 3, padding=1),
        )

    def forward(self, x):
        edges = F.conv2d(x, self.sobel, padding=1, groups=x.shape[1])
        return self.head(self.norm(torch.cat((x, edges.abs()), 1)))


class GroupNormed(Around):
    def middle(self, x):
        return F.group_norm(x, 2, self.scale, self.shift)


class HalfFixed(Around):
    """Norms and a convolution that learn either their weight or their bias."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.weight, self.bias = (
            nn.Parameter(torch.rand(6, 6, 3, 3) - 0.5),
            nn.Parameter(torch.rand(6)),
        )
        self.factor = nn.Parameter(torch.rand(6) + 0.5)
        self.register_buffer("mixer", torch.randn(6, 6, 1, 1))

    def middle(self, x):
        x = F.conv2d(x, self.weight, self.shift, padding=1)
        x = F.relu(F.instance_norm(x, weight=self.scale, bias=self.bias))
        x = F.conv2d(x, self.mixer, self.bias)
        return F.batch_norm(x, None, None, self.factor, self.shift, True)


class ComputedNorms(Around):
    """Norms whose weight is computed, or that have a bias alone."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.factor, self.bias, self.shift, self.last = (
            nn.Parameter(torch.rand(6)) for _ in range(4)
        )

    def middle(self, x):
        x = F.group_norm(x, 3, 1 + self.factor, self.bias)
        x = F.batch_norm(x, None, None, None, self.shift * self.scale, True)
        return F.instance_norm(x, weight=self.last)


class OfCells(Around):
    """Buffers as weights of what looks at single cells, and of vectors of the image."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.register_buffer("matrix", torch.randn(6, 6) / 3)

    def middle(self, x):
        x = F.prelu(x, self.scale)
        x = F.linear(x.permute(0, 2, 3, 1), self.matrix, self.shift).permute(0, 3, 1, 2)
        return x * torch.sigmoid(F.linear(x.mean((2, 3)), self.matrix, self.shift))[..., None, None]


class Shared(Around):
    """One filter at several places, far apart."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.deep, self.more = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)

    def middle(self, x):
        for conv in (self.deep, self.more):
            x = F.silu(
                conv(F.avg_pool2d(F.conv2d(F.pad(x, (2, 2, 2, 2)), self.filter, groups=6), 2, 1))
            )
        return F.conv2d(x, self.filter, padding="same", groups=6)


def fixed(layer: nn.Module) -> nn.Module:
    """Make buffers of a layer's parameters, which keep their names."""
    for name, p in list(layer.named_parameters(recurse=False)):
        delattr(layer, name)
        layer.register_buffer(name, p.detach().clone())
    return layer


def frozen_layers(in_channels, out_channels):
    """A list of PyTorch's own layers, of which some keep their weights as buffers, and one a weight that is not trained."""
    layers = [
        nn.Conv2d(in_channels, 6, 3, padding=1),
        fixed(nn.BatchNorm2d(6)),
        nn.ReLU(),
        fixed(nn.Conv2d(6, 6, 3, 2, 1)),
    ]
    layers += [
        fixed(nn.GroupNorm(2, 6)),
        nn.LeakyReLU(0.1),
        fixed(nn.ConvTranspose2d(6, 6, 2, 2)),
        fixed(nn.PReLU(6)),
        nn.Conv2d(6, 6, 3, padding=1),
    ]
    layers[-1].weight.requires_grad_(False)
    return nn.Sequential(*layers, nn.Conv2d(6, out_channels, 1))


class WeightNormed(nn.Sequential):
    """The first convolution's weight is computed."""

    def __init__(self, in_channels, out_channels):
        normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(in_channels, 6, 3, padding=1))
        super().__init__(normed, nn.ReLU(), nn.Conv2d(6, out_channels, 3, padding=1))


class StandardConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        flat = F.batch_norm(
            w.reshape(1, len(w), -1), None, None, training=True, momentum=0.0, eps=1e-6
        )
        return self._conv_forward(x, flat.reshape_as(w), self.bias)


class Standardised(nn.Module):
    """Standardised weights in all convolutions, as of BiT and NF-ResNets."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.second = (
            StandardConv(in_channels, 6, 5, 2, 2),
            StandardConv(6, 6, 3, padding=1),
        )
        self.norm, self.head = nn.GroupNorm(2, 6), StandardConv(6, out_channels, 3, padding=1)

    def forward(self, x):
        y = self.second(F.relu(self.norm(self.first(x))))
        return self.head(F.interpolate(y, scale_factor=2))


class Streams(nn.Module):
    """An encoder for each part of the bands."""

    def __init__(self, in_channels, out_channels, parts=(3, 1), dims=2):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.parts, self.encoders = parts, nn.ModuleList(conv(n, 4, 3, padding=1) for n in parts)
        self.head = conv(4 * len(parts), out_channels, 3, padding=1)

    def forward(self, x):
        found = [
            F.relu(encoder(part)) for encoder, part in zip(self.encoders, x.split(self.parts, 1))
        ]
        return self.head(torch.cat(found, 1))


def streams(in_channels, out_channels):
    """Return a network for colours and what else there is."""
    return Streams(in_channels, out_channels, (in_channels - 1, 1))


def pair(in_channels, out_channels):
    return Streams(in_channels, out_channels, (2, 1))


def three_streams(in_channels, out_channels):
    return Streams(in_channels, out_channels, (4, 2, 1))


def streams1d(in_channels, out_channels):
    return Streams(in_channels, out_channels, (2, 1), dims=1)


def streams3d(in_channels, out_channels):
    return Streams(in_channels, out_channels, (2, 1), dims=3)


class Deeper(nn.Module):
    """Made and called in another order, of which the last encoder sees the image first and alone."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.head, self.second = nn.Conv2d(12, out_channels, 1), nn.Conv2d(8, 12, 3, padding=1)
        self.first = nn.Conv2d(
            in_channels, 8, 3, padding=1, groups=in_channels if 8 % in_channels == 0 else 1
        )

    def forward(self, x):
        return self.head(F.relu(self.second(F.relu(self.first(x)))))


class Coordinates(nn.Module):
    """The image and a function of it, so that the first convolution takes more channels than the image has."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.head = (
            nn.Conv2d(in_channels + 2, 6, 3, padding=1),
            nn.Conv2d(6, out_channels, 3, padding=1),
        )

    def forward(self, x):
        return self.head(
            F.relu(self.first(torch.cat((x, x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1)))
        )


class NormFirst(nn.Module):
    """Layers over channels before any convolution."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.norm, self.embed, self.head = (
            nn.LayerNorm(in_channels),
            nn.Linear(in_channels, 20),
            nn.Conv2d(20, out_channels, 3, padding=1),
        )

    def forward(self, x):
        return self.head(F.gelu(self.embed(self.norm(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2))


class NoConvolution(nn.Module):
    """A classifier of single pixels, and a mean of their neighbours."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.hidden, self.norm, self.head = (
            nn.Linear(in_channels, 8),
            nn.BatchNorm2d(8),
            nn.Linear(8, out_channels),
        )

    def forward(self, x):
        y = F.relu(self.norm(self.hidden(x.movedim(1, -1)).movedim(-1, 1)))
        return self.head(F.avg_pool2d(y, 3, 1, 1).movedim(1, -1)).movedim(-1, 1)


class Functional(nn.Module):
    """Convolutions as functions of weights that no layer of PyTorch's holds."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.bias = (
            nn.Parameter(torch.randn(6, in_channels, 3, 3) / 5),
            nn.Parameter(torch.zeros(6)),
        )
        self.depthwise, self.head = (
            nn.Parameter(torch.randn(6, 1, 3, 3)),
            nn.Parameter(torch.randn(out_channels, 6, 1, 1)),
        )

    def forward(self, x):
        y = F.relu(F.conv2d(x, self.first, self.bias, padding=1))
        return F.conv2d(F.conv2d(y, self.depthwise, padding=1, groups=6), self.head)


class Twice(nn.Module):
    """Two halves of the bands through one encoder with batch norms, and what differs, as networks for changes do."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.half = in_channels // 2
        self.encoder = nn.Sequential(
            nn.Conv2d(self.half, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.BatchNorm2d(6, affine=False),
        )
        self.head = nn.Conv2d(6, out_channels, 3, padding=1)

    def forward(self, x):
        return self.head((self.encoder(x[:, : self.half]) - self.encoder(x[:, -self.half :])).abs())


class Levels(Around):
    """One block with a batch norm at two levels, and again and again at one."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.block = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=0.3), nn.SiLU()
        )

    def middle(self, x):
        for _ in range(2):
            x = x + self.block(x)
        deep = self.block(F.max_pool2d(x, 2))
        return x + F.interpolate(deep, size=x.shape[2:], mode="nearest")


class MadeInForward(Around):
    """Filters by constants that the code makes in float32, by PyTorch and of an array of NumPy's."""

    def middle(self, x):
        blur = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16
        edges = torch.from_numpy(np.array([[0.1, -0.1], [0.3, -0.3]], np.float32))
        x = F.conv2d(x, blur.expand(x.shape[1], 1, 3, 3), padding=1, groups=x.shape[1])
        return F.conv2d(
            F.pad(x, (0, 1, 0, 1)), edges.repeat(x.shape[1], 1, 1, 1), groups=x.shape[1]
        )


class Lazy(nn.Sequential):
    """The number of bands is that of the first image."""

    def __init__(self, in_channels, out_channels):
        super().__init__(
            nn.LazyConv2d(6, 3, padding=1),
            nn.LazyBatchNorm2d(),
            nn.ReLU(),
            nn.LazyConv2d(out_channels, 3, padding=1),
        )


class Unshuffled(nn.Module):
    """A pixel of the first convolution's is four of the image."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.head = (
            nn.Conv2d(4 * in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 4 * out_channels, 3, padding=1),
        )
        self.down, self.up = nn.PixelUnshuffle(2), nn.PixelShuffle(2)

    def forward(self, x):
        return self.up(self.head(F.relu(self.first(self.down(x)))))


class Described(nn.Module):
    """A vector of an image, by standardised convolutions and a blur."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.second, self.last = (
            StandardConv(in_channels, 6, 3, padding=1),
            StandardConv(6, 6, 3, padding=1),
            nn.Linear(6, out_channels),
        )
        self.register_buffer("filter", binomial(6))

    def forward(self, x):
        y = F.conv2d(F.relu(self.first(x)), self.filter, stride=2, padding=1, groups=6)
        return self.last(F.relu(self.second(y)).mean((2, 3)))
