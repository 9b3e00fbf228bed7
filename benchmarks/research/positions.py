"""Networks that know where in the image a pixel is."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class CoordConv(nn.Module):
    """Two channels of coordinates from -1 to 1 beside the image (Liu et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels + 2, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, out_channels, 1)
        )

    def forward(self, x):
        n, _, h, w = x.shape
        ys = (
            torch.linspace(-1, 1, h, device=x.device, dtype=x.dtype)
            .view(1, 1, h, 1)
            .expand(n, 1, h, w)
        )
        xs = (
            torch.linspace(-1, 1, w, device=x.device, dtype=x.dtype)
            .view(1, 1, 1, w)
            .expand(n, 1, h, w)
        )
        return self.net(torch.cat([x, ys, xs], dim=1))


class RadialCoordConv(nn.Module):
    """The original CoordConv code: arange, repeat, transpose, and a radius channel."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.head = (
            nn.Conv2d(in_channels + 3, 12, 3, padding=1),
            nn.Conv2d(12, out_channels, 1),
        )

    def forward(self, input_tensor):
        batch_size, _, x_dim, y_dim = input_tensor.size()
        xx_channel = torch.arange(x_dim).repeat(1, y_dim, 1).transpose(1, 2)
        yy_channel = torch.arange(y_dim).repeat(1, x_dim, 1)
        xx_channel = xx_channel.float() / (x_dim - 1) * 2 - 1
        yy_channel = yy_channel.float() / (y_dim - 1) * 2 - 1
        xx_channel = xx_channel.repeat(batch_size, 1, 1, 1).type_as(input_tensor)
        yy_channel = yy_channel.repeat(batch_size, 1, 1, 1).type_as(input_tensor)
        rr = torch.sqrt(torch.pow(xx_channel - 0.5, 2) + torch.pow(yy_channel - 0.5, 2))
        ret = torch.cat([input_tensor, xx_channel, yy_channel, rr], dim=1)
        return self.head(F.relu(self.conv(ret)))


class SinusoidalPositions(nn.Module):
    """Sines and cosines of both coordinates added to features (Vaswani 2017, 2D as in DETR)."""

    def __init__(self, in_channels, out_channels, dim=16):
        super().__init__()
        self.dim, self.stem, self.head = (
            dim,
            nn.Conv2d(in_channels, dim, 3, padding=1),
            nn.Conv2d(dim, out_channels, 3, padding=1),
        )

    def forward(self, x):
        x = self.stem(x)
        mask = torch.ones(x.shape[0], x.shape[2], x.shape[3], dtype=x.dtype, device=x.device)
        y_embed, x_embed = mask.cumsum(1), mask.cumsum(2)
        dim_t = 100 ** (2 * torch.arange(self.dim // 4, dtype=x.dtype) / (self.dim // 2))
        pos = torch.cat(
            [
                f(e[:, :, :, None] / dim_t)
                for e in (y_embed, x_embed)
                for f in (torch.sin, torch.cos)
            ],
            dim=3,
        )
        return self.head(F.relu(x + pos.permute(0, 3, 1, 2)))


class LearntPositions(nn.Module):
    """Learnt embedding of a coarse grid, resized to the features (ViT at other sizes)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.embed, self.pos = (
            nn.Conv2d(in_channels, 12, 4, stride=4),
            nn.Parameter(torch.randn(1, 12, 8, 8) * 0.02),
        )
        self.head = nn.ConvTranspose2d(12, out_channels, 4, stride=4)

    def forward(self, x):
        y = self.embed(x)
        y = y + F.interpolate(self.pos, size=y.shape[-2:], mode="bicubic", align_corners=False)
        return self.head(F.gelu(y))


class RowColumnEmbedding(nn.Module):
    """nn.Embedding of rows and of columns, summed (DETR's learnt positions)."""

    def __init__(self, in_channels, out_channels, dim=12):
        super().__init__()
        self.row_embed, self.col_embed = nn.Embedding(128, dim), nn.Embedding(128, dim)
        self.stem, self.head = (
            nn.Conv2d(in_channels, dim, 3, padding=1),
            nn.Conv2d(dim, out_channels, 3, padding=1),
        )

    def forward(self, x):
        x = self.stem(x)
        h, w = x.shape[-2:]
        i, j = torch.arange(w, device=x.device), torch.arange(h, device=x.device)
        pos = self.col_embed(i).unsqueeze(0) + self.row_embed(j).unsqueeze(1)
        return self.head(F.relu(x + pos.permute(2, 0, 1).unsqueeze(0)))


class FourierFeatures(nn.Module):
    """Random Fourier features of coordinates mixed with pixels (Tancik et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.register_buffer("b", torch.randn(2, 6) * 3)
        self.net = nn.Sequential(
            nn.Conv2d(in_channels + 12, 16, 1), nn.ReLU(), nn.Conv2d(16, out_channels, 3, padding=1)
        )

    def forward(self, x):
        n, _, h, w = x.shape
        grid = torch.stack(
            torch.meshgrid(torch.arange(h) / h, torch.arange(w) / w, indexing="ij"), dim=-1
        ).to(x)
        proj = 2 * math.pi * grid @ self.b
        feats = torch.cat([proj.sin(), proj.cos()], dim=-1).permute(2, 0, 1)
        return self.net(torch.cat([x, feats.unsqueeze(0).repeat(n, 1, 1, 1)], 1))


class BorderDistance(nn.Module):
    """Vignetting corrected by a learnt polynomial of the distance from the centre."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.coef = nn.Parameter(torch.tensor([0.1, -0.05]))
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, out_channels, 1)
        )

    def forward(self, x):
        h, w = x.shape[2], x.shape[3]
        yy = (torch.arange(h, dtype=x.dtype) - (h - 1) / 2) / h
        xx = (torch.arange(w, dtype=x.dtype) - (w - 1) / 2) / w
        r2 = yy[:, None] ** 2 + xx[None, :] ** 2
        return self.net(x * (1 + self.coef[0] * r2 + self.coef[1] * r2**2))


class SpatialTransformer(nn.Module):
    """Image warped by an affine map that a small net predicts (Jaderberg et al. 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.loc, self.fc = nn.Conv2d(in_channels, 8, 5, stride=2), nn.Linear(8, 6)
        self.fc.weight.data.mul_(0.01)
        self.fc.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, out_channels, 1)
        )

    def forward(self, x):
        theta = self.fc(F.relu(self.loc(x)).mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        return self.net(F.grid_sample(x, grid, align_corners=False))


class CausalMask(nn.Module):
    """Masked kernels that see only what lies above and to the left.

    Source: PixelCNN, van den Oord 2016.
    """

    class MaskedConv2d(nn.Conv2d):
        """Convolution whose later weights are zeroed in forward."""

        def __init__(self, kind, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", torch.ones_like(self.weight))
            k = self.kernel_size[0]
            self.mask[:, :, k // 2, k // 2 + (kind == "B") :] = 0
            self.mask[:, :, k // 2 + 1 :] = 0

        def forward(self, x):
            return F.conv2d(x, self.weight * self.mask, self.bias, self.stride, self.padding)

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b = (
            self.MaskedConv2d("A", in_channels, 12, 7, padding=3),
            self.MaskedConv2d("B", 12, 12, 3, padding=1),
        )
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        return self.head(F.relu(self.b(F.relu(self.a(x)))))


class PanoramaPadding(nn.Module):
    """Circular in width, reflecting in height (360-degree images)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(in_channels, 12, 5), nn.Conv2d(12, out_channels, 3)

    def padded(self, x, p):
        return F.pad(F.pad(x, (p, p, 0, 0), mode="circular"), (0, 0, p, p), mode="reflect")

    def forward(self, x):
        return self.c2(self.padded(F.relu(self.c1(self.padded(x, 2))), 1))
