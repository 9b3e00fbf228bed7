"""Networks that begin with, or go through, filters and features that nobody trains."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class SobelStem(nn.Module):
    """Sobel gradients and their magnitude beside the image."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        kx = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
        self.register_buffer("kx", kx.repeat(in_channels, 1, 1, 1))
        self.register_buffer("ky", kx.t().repeat(in_channels, 1, 1, 1))
        self.c1, self.c2 = (
            nn.Conv2d(2 * in_channels, 12, 3, padding=1),
            nn.Conv2d(12, out_channels, 1),
        )

    def forward(self, x):
        gx = F.conv2d(x, self.kx, padding=1, groups=x.shape[1])
        gy = F.conv2d(x, self.ky, padding=1, groups=x.shape[1])
        magnitude = torch.sqrt(gx**2 + gy**2 + 1e-6)
        return self.c2(F.relu(self.c1(torch.cat((x, magnitude), dim=1))))


class GaborFilters(nn.Module):
    """Gabor kernels made in forward from learnt frequencies and angles (Alekseev and Bobe 2019)."""

    def __init__(self, in_channels, out_channels, n=8, k=7):
        super().__init__()
        self.freq, self.theta = (
            nn.Parameter(torch.rand(n) + 0.5),
            nn.Parameter(torch.rand(n) * math.pi),
        )
        self.sigma, self.psi = nn.Parameter(torch.full((n,), 2.0)), nn.Parameter(torch.rand(n))
        r = torch.arange(k).float() - k // 2
        y, x = torch.meshgrid(r, r, indexing="ij")
        self.register_buffer("y", y)
        self.register_buffer("x", x)
        self.mix, self.head = nn.Conv2d(in_channels, 1, 1), nn.Conv2d(n, out_channels, 3, padding=1)

    def forward(self, img):
        t = self.theta.view(-1, 1, 1)
        u = self.x * torch.cos(t) + self.y * torch.sin(t)
        g = torch.exp(-0.5 * (self.x**2 + self.y**2) / self.sigma.view(-1, 1, 1) ** 2)
        g = g * torch.cos(self.freq.view(-1, 1, 1) * u + self.psi.view(-1, 1, 1))
        return self.head(F.relu(F.conv2d(self.mix(img), g.unsqueeze(1), padding=g.shape[-1] // 2)))


class DifferenceOfGaussians(nn.Module):
    """Separable Gaussian blurs of growing sigma, neighbours subtracted (Lowe 2004)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.sigmas = (1.0, 1.6, 2.6)
        self.head = nn.Sequential(
            nn.Conv2d(in_channels * 3, 12, 1), nn.ReLU(), nn.Conv2d(12, out_channels, 3, padding=1)
        )

    def blur(self, x, sigma):
        r = int(3 * sigma + 0.5)
        g = torch.exp(-0.5 * (torch.arange(-r, r + 1, dtype=x.dtype, device=x.device) / sigma) ** 2)
        g = (g / g.sum()).view(1, 1, -1, 1).repeat(x.size(1), 1, 1, 1)
        x = F.conv2d(F.pad(x, (0, 0, r, r), mode="reflect"), g, groups=x.size(1))
        return F.conv2d(F.pad(x, (r, r, 0, 0), mode="reflect"), g.transpose(2, 3), groups=x.size(1))

    def forward(self, x):
        levels = [x] + [self.blur(x, s) for s in self.sigmas]
        return self.head(torch.cat([a - b for a, b in zip(levels, levels[1:])], 1))


class LocalContrast(nn.Module):
    """Local mean and deviation by box filters, subtracted and divided (Jarrett et al. 2009)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 12, 3, padding=1), nn.Tanh(), nn.Conv2d(12, out_channels, 1)
        )

    def forward(self, x):
        mean = F.avg_pool2d(x, 9, stride=1, padding=4, count_include_pad=False)
        x = x - mean
        std = F.avg_pool2d(x * x, 9, stride=1, padding=4, count_include_pad=False).sqrt()
        return self.net(x / torch.clamp(std, min=0.1))


class StructureTensor(nn.Module):
    """Eigenvalues of the smoothed structure tensor as features (Förstner 1987)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.mix, self.head = (
            nn.Conv2d(in_channels, 1, 1),
            nn.Sequential(
                nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, out_channels, 1)
            ),
        )

    def forward(self, x):
        g = self.mix(x)
        gx = (
            F.pad(g, (1, 1, 0, 0), mode="replicate")[..., 2:]
            - F.pad(g, (1, 1, 0, 0), mode="replicate")[..., :-2]
        ) / 2
        gy = (
            F.pad(g, (0, 0, 1, 1), mode="replicate")[..., 2:, :]
            - F.pad(g, (0, 0, 1, 1), mode="replicate")[..., :-2, :]
        ) / 2
        a, b, c = (F.avg_pool2d(t, 5, 1, 2) for t in (gx * gx, gx * gy, gy * gy))
        root = torch.sqrt((a - c) ** 2 + 4 * b**2 + 1e-6)
        return self.head(torch.cat([g, (a + c + root) / 2, (a + c - root) / 2], dim=1))


class LocalBinaryConv(nn.Module):
    """Fixed sparse binary filters, learnt 1x1 mixtures (LBC, Juefei-Xu et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        conv.weight.data = torch.randint(-1, 2, conv.weight.shape).float()
        conv.weight.requires_grad = False
        self.fixed, self.mix, self.head = (
            conv,
            nn.Conv2d(16, 12, 1),
            nn.Conv2d(12, out_channels, 3, padding=1),
        )

    def forward(self, x):
        return self.head(self.mix(torch.sigmoid(self.fixed(x))))


class Scattering(nn.Module):
    """Moduli of complex wavelets, then a low pass with stride (Bruna and Mallat 2013)."""

    def __init__(self, in_channels, out_channels, angles=4):
        super().__init__()
        y, x = np.mgrid[-3:4, -3:4]
        kernels = []
        for a in range(angles):
            u = x * math.cos(math.pi * a / angles) + y * math.sin(math.pi * a / angles)
            kernels.append(np.exp(-(x**2 + y**2) / 4.0) * np.exp(1j * 1.5 * u))
        k = torch.from_numpy(np.stack(kernels))[:, None]
        self.register_buffer("real", k.real.float().repeat(in_channels, 1, 1, 1))
        self.register_buffer("imag", k.imag.float().repeat(in_channels, 1, 1, 1))
        self.head = nn.Conv2d(in_channels * angles, out_channels, 3, padding=1)

    def forward(self, x):
        re = F.conv2d(x, self.real, padding=3, groups=x.shape[1])
        im = F.conv2d(x, self.imag, padding=3, groups=x.shape[1])
        s = F.avg_pool2d(torch.hypot(re, im + 1e-3), 4, 2, 1)
        return F.interpolate(
            self.head(torch.log1p(s)), size=x.shape[2:], mode="bilinear", align_corners=False
        )


class BlockDCT(nn.Module):
    """8x8 block cosine transform as the first layer (learning in the frequency domain, Xu 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        n = torch.arange(8.0)
        d = torch.cos(math.pi / 8 * (n[None] + 0.5) * n[:, None]) / 2
        self.weight = nn.Parameter(
            (d[:, None, :, None] * d[None, :, None, :]).reshape(64, 1, 8, 8), requires_grad=False
        )
        self.bn, self.conv, self.up = (
            nn.BatchNorm2d(64 * in_channels),
            nn.Conv2d(64 * in_channels, 16, 1),
            nn.ConvTranspose2d(16, out_channels, 8, stride=8),
        )

    def forward(self, x):
        n, c, h, w = x.shape
        y = F.conv2d(x.reshape(n * c, 1, h, w), self.weight, stride=8)
        y = y.reshape(n, c * 64, y.size(2), y.size(3))
        return self.up(F.relu(self.conv(self.bn(y))))


class ColourSpace(nn.Module):
    """Image normalised by constants and taken to other colours by a fixed matrix in forward."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.mean, self.std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
        self.net = nn.Sequential(
            nn.Conv2d(2 * in_channels, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, out_channels, 1)
        )

    def forward(self, x):
        mean = torch.tensor(self.mean, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)
        std = torch.tensor(self.std).to(x).view(1, 3, 1, 1)
        matrix = x.new_tensor(
            [[0.299, 0.587, 0.114], [-0.147, -0.289, 0.436], [0.615, -0.515, -0.1]]
        )
        yuv = torch.tensordot(x.permute(0, 2, 3, 1), matrix, dims=([3], [1])).permute(0, 3, 1, 2)
        return self.net(torch.cat(((x - mean) / std, yuv), 1))


class VegetationIndices(nn.Module):
    """Normalised differences of band pairs, appended (as in remote sensing)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.pairs = [(i, j) for i in range(in_channels) for j in range(i)]
        self.net = nn.Sequential(
            nn.Conv2d(in_channels + len(self.pairs), 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, out_channels, 1),
        )

    def forward(self, x):
        bands = x.sigmoid()
        extra = [
            (bands[:, i] - bands[:, j]) / (bands[:, i] + bands[:, j] + 1e-6) for i, j in self.pairs
        ]
        return self.net(torch.cat([x, torch.stack(extra, dim=1)], 1))


class TotalVariationFeature(nn.Module):
    """Absolute differences to the right and lower neighbour, averaged as a feature."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(16, out_channels, 3, padding=1),
        )

    def forward(self, x):
        x = self.conv(x)
        tv = torch.zeros_like(x)
        tv[:, :, :, :-1] += (x[:, :, :, 1:] - x[:, :, :, :-1]).abs()
        tv[:, :, :-1, :] += (x[:, :, 1:, :] - x[:, :, :-1, :]).abs()
        return self.head(torch.cat([x, tv], dim=1))


class CentralDifference(nn.Module):
    """Convolution less its kernel sum at the centre (CDC, Yu et al. 2020)."""

    def __init__(self, in_channels, out_channels, theta=0.7):
        super().__init__()
        self.conv, self.theta, self.head = (
            nn.Conv2d(in_channels, 12, 3, padding=1, bias=False),
            theta,
            nn.Conv2d(12, out_channels, 3, padding=1),
        )

    def forward(self, x):
        out_normal = self.conv(x)
        kernel_diff = self.conv.weight.sum(2).sum(2)[:, :, None, None]
        out_diff = F.conv2d(input=x, weight=kernel_diff, bias=self.conv.bias, stride=1, padding=0)
        return self.head(F.relu(out_normal - self.theta * out_diff))


class ConstrainedFirstLayer(nn.Module):
    """High-pass residual filter: centre -1, others sum to one (Bayar and Stamm 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, in_channels, 24))
        self.net = nn.Sequential(
            nn.Conv2d(6, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, out_channels, 1)
        )

    def forward(self, x):
        w = self.weight / self.weight.sum(-1, keepdim=True)
        minus = -torch.ones(*w.shape[:2], 1, dtype=w.dtype, device=w.device)
        kernel = torch.cat((w[:, :, :12], minus, w[:, :, 12:]), dim=2).view(6, -1, 5, 5)
        return self.net(F.conv2d(x, kernel, padding=2))


class MorphologyLayer(nn.Module):
    """Dilation and erosion as pools, with top-hats as features (Mondal et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.head = (
            nn.Conv2d(in_channels, 6, 3, padding=1),
            nn.Conv2d(24, out_channels, 3, padding=1),
        )

    def forward(self, x):
        x = self.stem(x)

        def dilate(t):
            return F.max_pool2d(t, 5, 1, 2)

        def erode(t):
            return -F.max_pool2d(-t, 5, 1, 2)

        return self.head(
            torch.cat([x, dilate(x) - erode(x), x - dilate(erode(x)), erode(dilate(x)) - x], 1)
        )


class FourierUnit(nn.Module):
    """Convolution of the image's spectrum (FFC, Chi et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.conv, self.head = (
            nn.Conv2d(in_channels, 6, 3, padding=1),
            nn.Conv2d(12, 12, 1),
            nn.Conv2d(6, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        f = torch.fft.rfft2(x, norm="ortho")
        f = F.relu(self.conv(torch.cat([f.real, f.imag], 1)))
        f = torch.complex(*f.chunk(2, 1))
        return self.head(x + torch.fft.irfft2(f, s=x.shape[-2:], norm="ortho"))
