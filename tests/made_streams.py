"""Networks whose layers stand at several places: streams with one encoder, recurrences, and the like."""

import torch
import torch.nn.functional as F
from torch import nn

from distseg.comm.launch import world


def block(n, m):
    return nn.Sequential(nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU(inplace=True))


class Siamese(nn.Module):
    """One encoder for two dates, of which the second is looked at more coarsely, and differences (FC-Siam-diff)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.second, self.head = (
            block(2, 4),
            block(4, 6),
            nn.Conv2d(10, out_channels, 1),
        )

    def encode(self, x):
        y = self.first(x)
        return y, self.second(F.max_pool2d(y, 2))

    def forward(self, x):
        (a, deep), (b, deeper) = map(self.encode, x.chunk(2, 1))
        return self.head(
            torch.cat([a - b, F.interpolate((deep - deeper).abs(), size=x.shape[2:])], 1)
        )


class Recurrent(nn.Module):
    """A convolution and a norm without weights that are called three times, over the first one's result (R2U-Net)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.conv, self.norm = (
            nn.Conv2d(in_channels, 5, 1),
            nn.Conv2d(5, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5, affine=False, momentum=0.3),
        )
        self.head = nn.Conv2d(5, out_channels, 1)

    def forward(self, x):
        x = y = self.stem(x)
        for _ in range(3):
            y = F.leaky_relu(self.norm(self.conv(x + y)), 0.2)
        return self.head(y)


class Gated(nn.Module):
    """A batch norm of the vectors of two pooled maps."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.norm, self.fc, self.head = (
            nn.Conv2d(in_channels, 6, 3, padding=1),
            nn.BatchNorm1d(6),
            nn.Linear(6, 6),
            nn.Conv2d(6, out_channels, 1),
        )

    def forward(self, x):
        for _ in range(2):
            x = self.conv(x) if x.shape[1] != 6 else x.tanh()
            x = x * torch.sigmoid(self.fc(self.norm(x.mean((2, 3)))))[..., None, None]
        return self.head(x)


def flat(in_channels, out_channels):
    """A list of layers with a norm and a dropout at two places."""
    norm, drop = nn.BatchNorm2d(4), nn.Dropout2d(0.3)
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        norm,
        drop,
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        norm,
        nn.ReLU(),
        drop,
        nn.Conv2d(4, out_channels, 1),
    )


def twice(in_channels, out_channels):
    """A norm without weights at two places."""
    norm = nn.BatchNorm2d(4, affine=False)
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        norm,
        nn.Conv2d(4, 4, 3, padding=1),
        norm,
        nn.Conv2d(4, out_channels, 1),
    )


class Attending(nn.Module):
    """A norm at two places around attention between all places, which no tile has."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.norm, self.head = (
            nn.Conv2d(in_channels, 4, 3, 2, 1),
            nn.BatchNorm2d(4),
            nn.ConvTranspose2d(4, out_channels, 2, 2),
        )

    def forward(self, x):
        y = self.norm(self.stem(x))
        t = y.flatten(2).mT
        t = (t @ t.mT / 9).softmax(-1) @ t
        return self.head(self.norm(t.mT.view_as(y) + y))


class Equilibrium(nn.Module):
    """Iterations to a fixed point without gradients, with norms of the image and of the batch, and one with (DEQ)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.inject, self.conv, self.batch, self.norm = (
            nn.Conv2d(in_channels, 6, 3, padding=1),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.GroupNorm(2, 6),
        )
        self.head, self.scale = nn.Conv2d(6, out_channels, 1), nn.Parameter(torch.rand(6, 1, 1))

    def step(self, z, x):
        return (
            F.relu(self.norm(z + self.batch(self.conv(z)) + x))
            * z.mean((2, 3), keepdim=True).sigmoid()
        )

    def forward(self, x):
        x = self.inject(x)
        with torch.no_grad():
            z, scale = torch.zeros_like(x), self.scale / self.scale.norm()
            for _ in range(2):
                z = self.step(z, x)
        return self.head(
            self.step(z, x) * scale + F.interpolate(F.max_pool2d(z, 2), size=x.shape[2:])
        )


class Frames(nn.Module):
    """Bands in pairs through one encoder, as many images of a batch, and the largest of each pixel (MVCNN)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.encode = nn.Sequential(
            *block(2, 6),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(6, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.Dropout2d(0.0),
            nn.ConvTranspose2d(4, 5, 2, 2),
        )
        self.gate, self.head = nn.Conv2d(5, 5, 1), nn.Conv2d(5, out_channels, 3, padding=1)

    def forward(self, x):
        n, c, h, w = x.shape
        y = self.encode(x.reshape(n * c // 2, 2, h, w))[..., :h, :w]
        y = y * self.gate(F.adaptive_avg_pool2d(y, 1)).sigmoid()
        return self.head(y.view(n, c // 2, 5, h, w).amax(1))


class Slices(nn.Module):
    """A plane network on each slice of a volume, and a fusion of slices (2.5D)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.plane = nn.Sequential(
            *block(in_channels, 5),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(5, 4, (3, 1), padding=(1, 0), bias=False),
            nn.ConvTranspose2d(4, 4, 2, 2),
        )
        self.fuse, self.head = (
            nn.Conv3d(4, 5, (3, 1, 1), padding=(1, 0, 0)),
            nn.Conv3d(5, out_channels, 1),
        )

    def forward(self, x):
        n, c, d, h, w = x.shape
        y = self.plane(x.permute(0, 2, 1, 3, 4).reshape(n * d, c, h, w))
        return self.head(F.relu(self.fuse(y.view(n, d, 4, h, w).transpose(1, 2))))


class Batches(nn.Module):
    """Two dates as one batch through an encoder, and taken apart again (FC-Siam-conc)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.half, self.encode, self.deep = (
            in_channels // 2,
            block(in_channels // 2, 6),
            nn.Sequential(
                nn.MaxPool2d(2), *block(6, 4), nn.Upsample(scale_factor=2, mode="bilinear")
            ),
        )
        self.head = nn.Conv2d(12, out_channels, 3, padding=1)

    def forward(self, x):
        y = self.encode(torch.cat([x[:, : self.half], x[:, self.half :]]))
        y, z = y * y.mean((2, 3), keepdim=True), self.deep(y)
        a, b = z.split(len(x))
        return self.head(torch.cat([y[len(x) :, :4], a - b, F.relu(y[: len(x), 2:])], 1))


class Spectral(nn.Module):
    """Convolutions over the spectrum and the places, then over places (HybridSN)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.cubes = nn.Sequential(
            nn.Conv3d(1, 3, (3, 3, 3), padding=(0, 1, 1)),
            nn.BatchNorm3d(3),
            nn.ReLU(),
            nn.Conv3d(3, 4, (3, 3, 3), padding=1, stride=(2, 2, 1), bias=False),
            nn.InstanceNorm3d(4, affine=True),
        )
        self.plane = nn.Sequential(
            nn.Conv2d(4 * ((in_channels - 1) // 2), 6, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(6, out_channels, 1),
        )

    def forward(self, x):
        y = self.cubes(x[:, None])
        y = self.plane(y.reshape(y.size(0), -1, *y.shape[3:]))
        return F.interpolate(y, size=x.shape[2:], mode="bilinear")


class OfRank(nn.Module):
    """Computes something else on each rank."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)

    def forward(self, x):
        return self.conv(x) * (1 + world().rank)


class OfWidth(OfRank):
    """Computes something else of images of one width."""

    def forward(self, x):
        return self.conv(x) * 2 if x.shape[-1] == 44 else self.conv(x)


def stays(in_channels, out_channels):
    """A list of PyTorch's layers with a norm that stays in evaluation, as frozen parts do."""
    frozen = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    frozen.train = lambda mode=True: frozen
    frozen[1].running_mean += 0.5
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.Dropout2d(1.0),
        frozen,
        nn.Dropout(1.0),
        nn.ReLU(),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )
