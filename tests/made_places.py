"""Networks whose cells lie at places that the size of the image says, as users write them."""

import torch
import torch.nn.functional as F
from torch import nn


def conv(n, m, k=3, **more):
    return nn.Conv2d(n, m, k, padding=k // 2, **more)


class StridedUNet(nn.Module):
    """An encoder with strides, and a decoder that resizes to the skip, as most have it."""

    def __init__(self, in_channels, out_channels, **how):
        super().__init__()
        self.a, self.b, self.c = conv(in_channels, 4), conv(4, 6, stride=2), conv(6, 8, stride=2)
        self.norm, self.up1, self.up0, self.head = (
            nn.BatchNorm2d(6),
            conv(14, 6),
            conv(10, 4),
            nn.Conv2d(4, out_channels, 1),
        )
        self.how = how

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.norm(self.b(a)))
        y = self.c(b)
        for skip, up in ((b, self.up1), (a, self.up0)):
            y = F.relu(up(torch.cat((F.interpolate(y, size=skip.shape[2:], **self.how), skip), 1)))
        return self.head(y)


def strided_unet(in_channels, out_channels):
    return StridedUNet(in_channels, out_channels, mode="bilinear", align_corners=False)


def nearest_unet(in_channels, out_channels):
    return StridedUNet(in_channels, out_channels, mode="nearest")


class Levels(nn.Module):
    """A feature pyramid: levels are added to those above, resized to the first, and the result to the image."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.down = nn.ModuleList([conv(n, 4, stride=2) for n in (in_channels, 4, 4)])
        self.side = nn.ModuleList([nn.Conv2d(4, 3, 1) for _ in range(3)])
        self.norm, self.join, self.head = (
            nn.GroupNorm(3, 9),
            conv(9, 6),
            nn.Conv2d(6, out_channels, 1),
        )

    def forward(self, x):
        maps = []
        y = x
        for down, side in zip(self.down, self.side):
            y = F.relu(down(y))
            maps.append(side(y))
        for k in (1, 0):
            maps[k] = maps[k] + F.interpolate(maps[k + 1], size=maps[k].shape[-2:], mode="nearest")
        first, *others = maps
        y = torch.cat(
            [
                first,
                *(
                    F.interpolate(m, size=first.shape[2:], mode="bicubic", align_corners=True)
                    for m in others
                ),
            ],
            1,
        )
        return F.interpolate(
            self.head(F.relu(self.join(self.norm(y)))),
            size=x.shape[2:],
            mode="bilinear",
            align_corners=False,
        )


def feature_pyramid(in_channels, out_channels):
    return Levels(in_channels, out_channels)


class Branches(nn.Module):
    """Branches at three fractions of the image's size, and one of a fixed size."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.branches, self.head = (
            conv(in_channels, 4),
            nn.ModuleList([conv(4, 4) for _ in range(4)]),
            nn.Conv2d(4, out_channels, 1),
        )

    def forward(self, x):
        y = F.relu(self.first(x))
        half = F.interpolate(y, scale_factor=0.5, mode="bilinear")
        larger = F.interpolate(y, scale_factor=1.5)
        third = F.interpolate(y, size=(x.shape[2] // 3, x.shape[3] // 3), mode="area")
        fixed = F.interpolate(y, size=(6, 5), mode="bilinear", antialias=True)
        made = [branch(m) for branch, m in zip(self.branches, (half, larger, third, fixed))]
        return self.head(y + sum(F.interpolate(m, size=x.shape[2:], mode="bilinear") for m in made))


def fractions(in_channels, out_channels):
    return Branches(in_channels, out_channels)
