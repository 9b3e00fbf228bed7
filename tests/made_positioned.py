"""Networks that know where in the image a pixel is, and how large it is, as users write them (:mod:`made_moved`)."""

import math

import torch
import torch.nn.functional as F
from made_moved import Moved
from torch import nn


class Positioned(Moved):
    def __init__(self, *args):
        super().__init__(*args)
        self.grid, self.other, self.row = (
            nn.Parameter(torch.randn(1, 6, 8, 8)),
            nn.Parameter(torch.randn(1, 6, 5, 9)),
            nn.Parameter(torch.randn(6, 600, 1)),
        )
        self.rows, self.two = nn.Embedding(600, 6), nn.Parameter(torch.randn(2))
        self.down = nn.Conv2d(6, 6, 3, stride=2, padding=1)


def coordinates(m, x):
    n, _, h, w = x.shape
    ys = (
        torch.linspace(-1, 1, h, device=x.device, dtype=x.dtype).view(1, 1, h, 1).expand(n, 1, h, w)
    )
    xs = (
        torch.linspace(-1, 1, w, device=x.device, dtype=x.dtype).view(1, 1, 1, w).expand(n, 1, h, w)
    )
    return torch.cat([x[:, :4], ys, xs], dim=1) + x


def radius(m, x):
    n, _, h, w = x.size()
    xx = torch.arange(h).repeat(1, w, 1).transpose(1, 2).float() / (h - 1) * 2 - 1
    yy = torch.arange(w).repeat(1, h, 1).float() / (w - 1) * 2 - 1
    xx, yy = xx.repeat(n, 1, 1, 1).type_as(x), yy.repeat(n, 1, 1, 1).type_as(x)
    return x + torch.cat([x[:, :3], xx, yy, torch.sqrt((xx - 0.5) ** 2 + (yy - 0.5) ** 2)], dim=1)


def sinusoids(m, x):
    mask = torch.ones(x.shape[0], x.shape[2], x.shape[3], dtype=x.dtype, device=x.device)
    scale = 100 ** (2 * torch.arange(2, dtype=x.dtype) / 3)
    found = torch.cat(
        [
            f(e[:, :, :, None] / scale)
            for e in (mask.cumsum(1), mask.cumsum(2))
            for f in (torch.sin, torch.cos)
        ],
        dim=3,
    )
    return x + found.permute(0, 3, 1, 2)[:, :6]


def learned_grid(m, x):
    y = m.down(x)
    y = y * F.interpolate(m.grid, size=y.shape[2:], mode="bilinear", align_corners=True)
    return F.interpolate(y, x.shape[2:]) + F.interpolate(m.other, size=x.shape[2:], mode="bicubic")


def rows_and_columns(m, x):
    h, w = x.shape[-2:]
    found = m.rows(torch.arange(w, device=x.device)).unsqueeze(0) + m.rows(
        torch.arange(h, device=x.device)
    ).unsqueeze(1)
    return (x + found.permute(2, 0, 1).unsqueeze(0)) * m.row[:, :h]


def fourier(m, x):
    n, _, h, w = x.shape
    grid = torch.stack(
        torch.meshgrid(torch.arange(h) / h, torch.arange(w) / w, indexing="ij"), dim=-1
    ).to(x)
    found = 2 * math.pi * grid @ m.fc.weight[:2, :3]
    return x + torch.cat([found.sin(), found.cos()], dim=-1).permute(2, 0, 1).unsqueeze(0).repeat(
        n, 1, 1, 1
    )


def vignette(m, x):
    h, w = x.shape[2], x.shape[3]
    yy, xx = (
        (torch.arange(h, dtype=x.dtype) - (h - 1) / 2) / h,
        (torch.arange(w, dtype=x.dtype) - (w - 1) / 2) / w,
    )
    r = yy[:, None] ** 2 + xx[None, :] ** 2
    return x * (1 + m.two[0] * r + m.two[1] * r**2)


def of_tokens(m, x):
    n, c, h, w = x.shape
    places = torch.arange(h * w, device=x.device)[:, None] * torch.exp(
        torch.arange(6, device=x.device) / -6
    )
    return (x.flatten(2).transpose(1, 2) + torch.sin(places)).transpose(1, 2).view(n, c, h, w)


def soft_argmax(m, x):
    n, c, h, w = x.shape
    ys = torch.linspace(0, 1, h).view(h, 1).expand(h, w).reshape(-1).to(x)
    return x * (x.flatten(2).softmax(-1) * ys).sum(-1)[:, :, None, None]


def numbers(m, x):
    x = x * torch.arange(x.shape[2] // 2, dtype=x.dtype).sum().cos() + x.shape[3] % 7
    return x * (x.shape[2] / 100) + 1 / x.shape[3] - x / math.sqrt(x.shape[2] * x.shape[3])


def chequered(m, x):
    mask = (torch.arange(x.shape[2])[:, None] + torch.arange(x.shape[3])[None]) % 2 == 0
    return torch.where(mask, x, m.deep(x)) + m.deep(x).masked_fill(~mask, 0.5)


def without_gradients(m, x):
    with torch.no_grad():
        places = torch.arange(x.shape[3], device=x.device, dtype=x.dtype)
        places = places / places.max()
    ones = x.new_ones(1, 1, *x.shape[2:]).cumsum(2) / x.shape[2]
    return x * places * ones + torch.ones_like(x[:, :1]).cumsum(3)


def framed(m, x):
    inner = torch.zeros(1, 1, *x.shape[2:], dtype=x.dtype, device=x.device)
    inner[:, :, 1:-1, 1:-1] = 1
    y = x * 1
    y[:, :, :1] = 0
    y[..., -1] = 0.5
    return y + inner * x


def inverse_wavelets(m, x):
    a, b, c, d = x[:, :, 0::2, 0::2], x[:, :, 1::2, 0::2], x[:, :, 0::2, 1::2], x[:, :, 1::2, 1::2]
    up = torch.zeros_like(x)
    up[:, :, 0::2, 0::2] = m.deep(a + b + c + d)
    up[:, :, 1::2, 0::2] = a + b - c - d
    up[:, :, 0::2, 1::2] = a - b + c - d
    up[:, :, 1::2, 1::2] = a - b - c + d
    return up


def shifted_channels(m, x):
    y = torch.zeros_like(x)
    y[:, :2, :-1] = x[:, :2, 1:]
    y[:, 2:4, 1:] = x[:, 2:4, :-1]
    y[:, 4:] = x[:, 4:]
    return y


def pasted(m, x):
    up = F.interpolate(m.deep(F.max_pool2d(x, 2)), scale_factor=2)
    y = x.clone()
    y[:, :, : up.shape[2], : up.shape[3]] = up
    y[:, :, 1:] += x[:, :, :-1]
    y[..., 1::2] = x.mean((2, 3), keepdim=True)
    return y


class Pixels(nn.Module):
    """Channels that are shifted between layers of single pixels: no layer looks beyond a tile, but for what the shifts move."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.second, self.head = (
            nn.Conv2d(in_channels, 6, 1),
            nn.Conv2d(6, 6, 1),
            nn.Conv2d(6, out_channels, 1),
        )

    def forward(self, x):
        x = F.relu(self.first(x))
        x = x + F.relu(self.second(shifted_channels(self, x)))
        return self.head(shifted_channels(self, x))


class Patches(nn.Module):
    """A learned embedding of a grid, at the size of patches of 4 x 4 pixels."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.embed, self.grid = (
            nn.Conv2d(in_channels, 6, 4, stride=4),
            nn.Parameter(torch.randn(1, 6, 8, 8)),
        )
        self.head = nn.ConvTranspose2d(6, out_channels, 4, stride=4)

    def forward(self, x):
        x = self.embed(x)
        return self.head(
            F.gelu(
                x + F.interpolate(self.grid, size=x.shape[-2:], mode="bicubic", align_corners=False)
            )
        )


pixels_network, patches_network = Pixels, Patches
FUNCTIONS = {
    f.__name__: f
    for f in (
        coordinates,
        radius,
        sinusoids,
        learned_grid,
        rows_and_columns,
        fourier,
        vignette,
        of_tokens,
        soft_argmax,
        numbers,
        chequered,
        without_gradients,
    )
} | {f.__name__: f for f in (framed, inverse_wavelets, shifted_channels, pasted)}
MULTIPLES = {"inverse_wavelets": 2, "patches": 4}


def __getattr__(name):
    """The network with a function, as settings name it: ``radius_network``."""
    function = FUNCTIONS.get(name.removesuffix("_network"))
    if function is None or not name.endswith("_network"):
        raise AttributeError(name)
    return lambda in_channels, out_channels: Positioned(in_channels, out_channels, function)
