"""Networks that make a vector of each image, as users write them."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
        )
        self.na, self.nb, self.cut = (
            nn.BatchNorm2d(outer),
            nn.BatchNorm2d(outer),
            nn.Conv2d(inner, outer, 1, stride),
        )

    def forward(self, x):
        return F.relu(self.cut(x) + self.nb(self.b(F.relu(self.na(self.a(x))))))


class Residual(nn.Module):
    """As ResNet."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(in_channels, 4, 7, 2, 3), nn.MaxPool2d(3, 2, 1)
        self.blocks, self.fc = (
            nn.Sequential(Block(4, 4, 1), Block(4, 6, 2)),
            nn.Linear(6, out_channels),
        )

    def forward(self, x):
        return self.fc(
            torch.flatten(F.adaptive_avg_pool2d(self.blocks(self.pool(F.relu(self.stem(x)))), 1), 1)
        )


def residual(in_channels=3, out_channels=3):
    return Residual(in_channels, out_channels)


def flat(in_channels=3, out_channels=3):
    """As MobileNet ends: a dropout of the vector."""
    body = [
        nn.Conv2d(in_channels, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
    ]
    return nn.Sequential(
        *body,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(8, 10),
        nn.GELU(),
        nn.Linear(10, out_channels),
    )


def gridded(in_channels=3, out_channels=3):
    """As VGG ends: a grid of means."""
    body = [
        nn.Conv2d(in_channels, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.InstanceNorm2d(8),
        nn.ReLU(),
    ]
    return nn.Sequential(
        *body,
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.Flatten(),
        nn.Linear(48, 10),
        nn.ReLU(True),
        nn.Dropout(),
        nn.Linear(10, out_channels),
    )


def largest(in_channels=3, out_channels=3):
    """(N, C, 1, 1) of maxima, by convolutions."""
    body = [
        nn.Conv2d(in_channels, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
    ]
    return nn.Sequential(*body, nn.AdaptiveMaxPool2d(1), nn.Conv2d(8, out_channels, 1))


class Mixed(nn.Module):
    """Means and maxima of several levels, as one vector; a norm of it."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b = nn.Conv2d(in_channels, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.coarse, self.norm, self.drop, self.fc = (
            nn.ReLU(),
            nn.BatchNorm1d(14),
            nn.Dropout(0.25),
            nn.Linear(14, out_channels),
        )

    def forward(self, x):
        fine = F.relu(self.a(x))
        coarse = self.coarse(self.b(F.max_pool2d(fine, 2)))
        return self.fc(
            self.norm(
                self.drop(
                    torch.cat(
                        (fine.mean((2, 3)), coarse.amax((2, 3)), coarse.sum((2, 3))[:, :4]), 1
                    )
                )
            )
        )


def mixed(in_channels=3, out_channels=3):
    return Mixed(in_channels, out_channels)


class Normed(nn.Module):
    """As ConvNeXt ends: a layer norm of the vector, as a map whose channels come last."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.norm, self.fc = (
            nn.Conv2d(in_channels, 8, 4, 4),
            nn.LayerNorm(8),
            nn.Linear(8, out_channels),
        )

    def forward(self, x):
        y = F.adaptive_avg_pool2d(F.gelu(self.conv(x)), 1)
        return self.fc(self.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).flatten(1))


def normed(in_channels=3, out_channels=3):
    return Normed(in_channels, out_channels)


class Attending(nn.Module):
    """Attention between places, which nothing here follows: whole images alone."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.patch, self.attention, self.fc = (
            nn.Conv2d(in_channels, 8, 4, 4),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, out_channels),
        )

    def forward(self, x):
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        return self.fc(self.attention(tokens, tokens, tokens)[0].mean(1))


def attending(in_channels=3, out_channels=3):
    return Attending(in_channels, out_channels)


class Levels(nn.Module):
    """Means of three levels, joined; what joins them begins with zeros."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(n, 6, 3, 2, 1) for n in (in_channels, 6, 6))
        self.first, self.all = nn.Linear(6, out_channels), nn.Linear(18, out_channels)
        nn.init.zeros_(self.all.weight), nn.init.zeros_(self.all.bias)

    def forward(self, x):
        found = []
        for level in self.levels:
            x = torch.tanh(level(x))
            found.append(x.mean((2, 3)))
        return self.first(found[0]) + self.all(torch.cat(found, 1))


def levels(in_channels=3, out_channels=3):
    return Levels(in_channels, out_channels)


class Pooled(nn.Module):
    """Written as many are: places as one dim, minima, a batch norm of what is pooled."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b, self.norm, self.fc = (
            nn.Conv2d(in_channels, 6, 3, 2, 1),
            nn.BatchNorm2d(6),
            nn.BatchNorm1d(24),
            nn.Linear(24, out_channels),
        )

    def forward(self, x):
        y = F.relu(self.b(self.a(x)))
        flat = y.view(y.size(0), y.size(1), -1)
        return self.fc(
            self.norm(
                torch.cat((flat.mean(-1), flat.max(2)[0], y.flatten(2).sum(2), y.amin((2, 3))), 1)
            )
        )


def pooled(in_channels=3, out_channels=3):
    return Pooled(in_channels, out_channels)


def fixed(in_channels=3, out_channels=3):
    """For images of 24x32 pixels alone."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, 4, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 6 * 8, out_channels),
    )


class Squeezed(Residual):
    """One number of each image, (N,)."""

    def forward(self, x):
        return super().forward(x).squeeze(1)


def squeezed(in_channels=3, out_channels=1):
    return Squeezed(in_channels, 1)


def patched(in_channels=3, out_channels=3):
    """Each layer halves the size without padding, so that it takes 16 pixels at least."""
    widths = [in_channels, 4, 4, 6, 6]
    halves = [
        layer
        for a, b in zip(widths, widths[1:])
        for layer in (nn.Conv2d(a, b, 2, 2), nn.BatchNorm2d(b), nn.ReLU())
    ]
    return nn.Sequential(*halves, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, out_channels))
