"""Networks with two streams, two dates or two resolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def conv(cin: int, cout: int, stride: int = 1) -> nn.Sequential:
    """Return convolution, batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride, 1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)
    )


class LateFusion(nn.Module):
    """Colour and depth in encoders of their own, logits averaged (Eitel et al. 2015)."""

    bands = 4

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.rgb, self.depth = (
            nn.Sequential(conv(3, 8), nn.Conv2d(8, out_channels, 1)),
            nn.Sequential(conv(1, 8), nn.Conv2d(8, out_channels, 1)),
        )

    def forward(self, x):
        rgb, depth = x[:, :3], x[:, 3:]
        return 0.5 * (self.rgb(rgb) + self.depth(depth))


class FuseNet(nn.Module):
    """Depth features added into the colour stream at each level (Hazirbas et al. 2016)."""

    bands = 4

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.r1, self.r2, self.d1, self.d2 = conv(3, 8), conv(8, 8), conv(1, 8), conv(8, 8)
        self.up, self.head = (
            nn.ConvTranspose2d(8, 8, 2, 2),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )

    def forward(self, x):
        rgb, depth = torch.split(x, [3, 1], dim=1)
        d = self.d1(depth)
        r = self.r1(rgb) + d
        r, d = F.max_pool2d(r, 2), F.max_pool2d(d, 2)
        r = self.r2(r) + self.d2(d)
        return self.head(self.up(r))


class SeparationGate(nn.Module):
    """Each stream gated by both, then softmax-weighted (SA-Gate, Chen et al. 2020)."""

    bands = 4

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.rgb, self.dep, self.fc = (
            conv(3, 8),
            conv(1, 8),
            nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16), nn.Sigmoid()),
        )
        self.gate, self.head = nn.Conv2d(16, 2, 1), nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        rgb, dep = self.rgb(x[:, 0:3]), self.dep(x[:, 3][:, None])
        g = self.fc(torch.cat([rgb, dep], 1).mean([2, 3]))[..., None, None]
        rgb, dep = rgb + dep * g[:, 8:], dep + rgb * g[:, :8]
        a = F.softmax(self.gate(torch.cat([rgb, dep], dim=1)), dim=1)
        return self.head(rgb * a[:, 0:1] + dep * a[:, 1:2])


class SiameseDifference(nn.Module):
    """Shared encoder on two dates, absolute differences to the decoder.

    Source: FC-Siam-diff, Daudt 2018.
    """

    bands = 6

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.e1, self.e2, self.dec, self.head = (
            conv(3, 8),
            conv(8, 12),
            conv(20, 8),
            nn.Conv2d(8, out_channels, 1),
        )

    def encode(self, x):
        a = self.e1(x)
        return a, self.e2(F.max_pool2d(a, 2))

    def forward(self, x):
        before, after = x.chunk(2, dim=1)
        (a1, a2), (b1, b2) = self.encode(before), self.encode(after)
        y = F.interpolate((a2 - b2).abs(), size=a1.shape[2:])
        return self.head(self.dec(torch.cat([y, torch.abs(a1 - b1)], 1)))


class SiameseBatch(nn.Module):
    """Two dates put into the batch for a shared encoder, then concatenated (FC-Siam-conc)."""

    bands = 6

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc, self.head = (
            nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1),
                nn.GroupNorm(2, 8),
                nn.ReLU(),
                nn.Conv2d(8, 8, 3, padding=1),
            ),
            nn.Conv2d(16, out_channels, 3, padding=1),
        )

    def forward(self, x):
        n = x.size(0)
        both = self.enc(torch.cat([x[:, :3], x[:, 3:]], dim=0))
        return self.head(torch.cat([both[:n], both[n:]], dim=1))


class Correlation(nn.Module):
    """Cost volume over displacements by shifts (FlowNetC, Dosovitskiy et al. 2015)."""

    bands = 6

    def __init__(self, in_channels, out_channels, d=2):
        super().__init__()
        self.d, self.enc, self.head = (
            d,
            conv(3, 8),
            nn.Conv2d((2 * d + 1) ** 2 + 8, out_channels, 3, padding=1),
        )

    def forward(self, x):
        a, b = self.enc(x[:, :3]), self.enc(x[:, 3:])
        h, w = a.shape[-2:]
        b, d, cost = F.pad(b, [self.d] * 4), self.d, []
        for i in range(2 * d + 1):
            for j in range(2 * d + 1):
                cost.append((a * b[:, :, i : i + h, j : j + w]).mean(dim=1, keepdim=True))
        return self.head(torch.cat([F.leaky_relu(torch.cat(cost, 1), 0.1), a], 1))


class SpectralGroups(nn.Module):
    """Bands in groups through one shared network, maxima over groups (set of views, MVCNN)."""

    bands = 6

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc, self.head = conv(2, 8), nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.enc(x.view(b * 3, 2, h, w))
        y = y.view(b, 3, 8, h, w).max(dim=1)[0]
        return self.head(y)


class TemporalAttention(nn.Module):
    """Weights of dates from a pixel's own series, softmax over time (L-TAE-like, Garnot 2021)."""

    bands = 6

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc, self.key, self.query, self.head = (
            nn.Conv2d(2, 8, 3, padding=1),
            nn.Conv2d(8, 4, 1),
            nn.Parameter(torch.randn(4)),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x):
        b, _, h, w = x.shape
        f = self.enc(x.reshape(b * 3, 2, h, w))
        score = torch.einsum("nchw,c->nhw", self.key(f), self.query).view(b, 3, h, w)
        a = torch.softmax(score, dim=1)
        return self.head(torch.einsum("bthw,btchw->bchw", a, f.view(b, 3, 8, h, w)))


class BiSeNet(nn.Module):
    """Wide spatial path and deep context path, fused with a vector gate (Yu et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.spatial, self.c1, self.c2 = (
            nn.Sequential(conv(in_channels, 8, 2), conv(8, 8, 2)),
            nn.Sequential(conv(in_channels, 8, 2), conv(8, 8, 2)),
            nn.Sequential(conv(8, 12, 2), conv(12, 12, 2)),
        )
        self.arm, self.ffm, self.a1, self.a2 = (
            nn.Sequential(nn.Conv2d(12, 12, 1), nn.Sigmoid()),
            conv(20, 12),
            nn.Conv2d(12, 4, 1),
            nn.Conv2d(4, 12, 1),
        )
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        sp = self.spatial(x)
        cx = self.c2(self.c1(x))
        tail = torch.mean(cx, dim=(2, 3), keepdim=True)
        cx = cx * self.arm(tail) + tail
        cx = F.interpolate(cx, size=sp.size()[-2:], mode="bilinear", align_corners=True)
        f = self.ffm(torch.cat((sp, cx), dim=1))
        atten = torch.sigmoid(self.a2(F.relu(self.a1(F.avg_pool2d(f, f.size()[2:])))))
        return F.interpolate(self.head(f + f * atten), scale_factor=4, mode="nearest")[
            ..., : x.size(2), : x.size(3)
        ]


class ImageCascade(nn.Module):
    """Quarter, half and full image in branches that are summed upwards.

    Source: ICNet, Zhao et al. 2018.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.low, self.mid, self.full = (
            nn.Sequential(conv(in_channels, 8, 2), conv(8, 8)),
            conv(in_channels, 8, 2),
            conv(in_channels, 8, 2),
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        half = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)
        quarter = F.interpolate(x, scale_factor=0.25, mode="bilinear", align_corners=False)
        a, b, c = self.low(quarter), self.mid(half), self.full(x)
        y = F.relu(F.interpolate(a, size=b.shape[2:], mode="bilinear", align_corners=False) + b)
        y = F.relu(F.interpolate(y, size=c.shape[2:], mode="bilinear", align_corners=False) + c)
        return F.interpolate(self.head(y), size=x.shape[2:], mode="bilinear", align_corners=False)


class PanSharpening(nn.Module):
    """High frequencies of one band added to upsampled others (PanNet, Yang et al. 2017)."""

    bands = 4

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 3, 3, padding=1)
        )
        self.head = nn.Conv2d(3, out_channels, 1)

    def forward(self, x):
        ms, pan = F.avg_pool2d(x[:, :3], 3, stride=2, padding=1), x[:, 3:4]

        def high(t):
            return t - F.avg_pool2d(t, 5, stride=1, padding=2)

        up = F.interpolate(ms, size=pan.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(up + self.net(torch.cat([high(up), high(pan)], 1)))


class GuidedFilter(nn.Module):
    """Logits smoothed by a guided filter with the image as guide (Wu et al. 2018)."""

    def __init__(self, in_channels, out_channels, r=2):
        super().__init__()
        self.r, self.net, self.guide = (
            r,
            nn.Conv2d(in_channels, out_channels, 3, padding=1),
            nn.Conv2d(in_channels, out_channels, 1),
        )

    def box(self, x):
        return F.avg_pool2d(x, 2 * self.r + 1, 1, self.r, count_include_pad=False)

    def forward(self, img):
        x, y = self.guide(img), self.net(img)
        mean_x, mean_y = self.box(x), self.box(y)
        cov = self.box(x * y) - mean_x * mean_y
        var = self.box(x * x) - mean_x**2
        a = cov / (var + 1e-2)
        b = mean_y - a * mean_x
        return self.box(a) * x + self.box(b)


class SharedWeightsBatch(nn.Module):
    """Logits of the image and of its transpose by the same weights, averaged (symmetry prior)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, out_channels, (3, 5), padding=(1, 2)),
        )

    def forward(self, x):
        return (self.net(x) + self.net(x.transpose(2, 3)).transpose(2, 3)) / 2
