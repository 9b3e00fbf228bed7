"""Networks for volumes and for series."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class VNet3d(nn.Module):
    """Volumes with strided convolutions, PReLU, residual by repeating channels (Milletari 2016)."""

    dims = 3

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv3d(in_channels, 2 * in_channels, 5, padding=2),
            nn.BatchNorm3d(2 * in_channels),
        )
        self.down, self.mid = (
            nn.Conv3d(2 * in_channels, 8, 2, stride=2),
            nn.Conv3d(8, 8, 3, padding=1),
        )
        self.up, self.relu, self.head = (
            nn.ConvTranspose3d(8, 8, 2, stride=2),
            nn.PReLU(2 * in_channels),
            nn.Conv3d(2 * in_channels + 8, out_channels, 1),
        )

    def forward(self, x):
        skip = self.relu(self.bn1(self.conv1(x)) + torch.cat((x, x), 1))
        y = F.elu(self.down(skip))
        y = F.elu(y + self.mid(y))
        return self.head(torch.cat((skip, self.up(y)), 1))


class Anisotropic3d(nn.Module):
    """No pooling along the coarse dim, 1x3x3 kernels outside.

    Source: anisotropic nnU-Net, Isensee 2021.
    """

    dims = 3

    def __init__(self, in_channels, out_channels):
        super().__init__()

        def block(i, o, k):
            return nn.Sequential(
                nn.Conv3d(i, o, k, padding=tuple(s // 2 for s in k), bias=False),
                nn.InstanceNorm3d(o, affine=True),
                nn.LeakyReLU(1e-2, inplace=True),
            )

        self.e1, self.e2, self.d1 = (
            block(in_channels, 6, (1, 3, 3)),
            block(6, 12, (3, 3, 3)),
            block(12, 6, (1, 3, 3)),
        )
        self.pool, self.up, self.head = (
            nn.MaxPool3d((1, 2, 2)),
            nn.ConvTranspose3d(12, 6, (1, 2, 2), stride=(1, 2, 2)),
            nn.Conv3d(6, out_channels, 1),
        )

    def forward(self, x):
        skip = self.e1(x)
        return self.head(self.d1(torch.cat([skip, self.up(self.e2(self.pool(skip)))], 1)))


class Pseudo3d(nn.Module):
    """Spatial then temporal convolutions, in series and in parallel (P3D, Qiu et al. 2017)."""

    dims = 3

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.s, self.t = (
            nn.Conv3d(in_channels, 8, 1),
            nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1)),
            nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0)),
        )
        self.bn, self.head = nn.BatchNorm3d(8), nn.Conv3d(8, out_channels, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        s = F.relu(self.s(x))
        return self.head(F.relu(self.bn(s + self.t(x) + x)))


class ProjectAndExcite3d(nn.Module):
    """Means along pairs of dims, added by broadcasting, as gates (Rickmann et al. 2019)."""

    dims = 3

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.c1, self.c2, self.head = (
            nn.Conv3d(in_channels, 8, 3, padding=1),
            nn.Conv3d(8, 4, 1),
            nn.Conv3d(4, 8, 1),
            nn.Conv3d(8, out_channels, 1),
        )

    def forward(self, x):
        x = F.relu(self.stem(x))
        b, c, d, h, w = x.size()
        squeeze_d = F.adaptive_avg_pool3d(x, (d, 1, 1))
        squeeze_h = F.adaptive_avg_pool3d(x, (1, h, 1))
        squeeze_w = F.adaptive_avg_pool3d(x, (1, 1, w))
        final = sum(
            [
                squeeze_d.view(b, c, d, 1, 1),
                squeeze_h.view(b, c, 1, h, 1),
                squeeze_w.view(b, c, 1, 1, w),
            ]
        )
        return self.head(x * torch.sigmoid(self.c2(F.relu(self.c1(final)))))


class SliceWise(nn.Module):
    """2D network on slices folded into the batch, 3D fusion behind (2.5D)."""

    dims = 3

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net2d, self.fuse = (
            nn.Sequential(
                nn.Conv2d(in_channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
            ),
            nn.Conv3d(8, out_channels, (3, 1, 1), padding=(1, 0, 0)),
        )

    def forward(self, x):
        b, c, d, h, w = x.shape
        y = x.permute(0, 2, 1, 3, 4).reshape(b * d, c, h, w)
        y = self.net2d(y).view(b, d, -1, h, w).permute(0, 2, 1, 3, 4)
        return self.fuse(F.relu(y))


class DenseVoxel(nn.Module):
    """Dense volumes at half resolution, trilinear logits of two depths summed (Yu et al. 2017)."""

    dims = 3

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.l1, self.l2 = (
            nn.Conv3d(in_channels, 8, 3, 2, 1),
            nn.Conv3d(8, 4, 3, padding=1),
            nn.Conv3d(12, 4, 3, padding=1),
        )
        self.n1, self.n2, self.o1, self.o2 = (
            nn.GroupNorm(2, 8),
            nn.GroupNorm(2, 12),
            nn.Conv3d(12, out_channels, 1),
            nn.Conv3d(16, out_channels, 1),
        )

    def forward(self, x):
        y = self.stem(x)
        y = torch.cat([y, self.l1(F.relu(self.n1(y)))], 1)
        z = torch.cat([y, self.l2(F.relu(self.n2(y)))], 1)

        def up(t):
            return F.interpolate(t, size=x.shape[2:], mode="trilinear", align_corners=False)

        return up(self.o1(y)) + up(self.o2(z))


class WaveUNet(nn.Module):
    """Series with decimation and linear interpolation (Wave-U-Net, Stoller et al. 2018)."""

    dims = 1

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.d1, self.d2, self.mid = (
            nn.Conv1d(in_channels, 8, 15, padding=7),
            nn.Conv1d(8, 12, 15, padding=7),
            nn.Conv1d(12, 16, 15, padding=7),
        )
        self.u2, self.u1, self.head = (
            nn.Conv1d(28, 12, 5, padding=2),
            nn.Conv1d(20, 8, 5, padding=2),
            nn.Conv1d(8 + in_channels, out_channels, 1),
        )

    def forward(self, x):
        s1 = F.leaky_relu(self.d1(x))
        s2 = F.leaky_relu(self.d2(s1[:, :, ::2]))
        y = F.leaky_relu(self.mid(s2[:, :, ::2]))
        y = F.interpolate(y, size=s2.shape[-1], mode="linear", align_corners=True)
        y = F.leaky_relu(self.u2(torch.cat([y, s2], 1)))
        y = F.interpolate(y, size=s1.shape[-1], mode="linear", align_corners=True)
        y = F.leaky_relu(self.u1(torch.cat([y, s1], 1)))
        return torch.tanh(self.head(torch.cat([y, x], 1)))


class CausalTCN(nn.Module):
    """Dilated causal convolutions by chomping the end (TCN, Bai et al. 2018)."""

    dims = 1

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv1d(in_channels, 12, 1)
        self.convs = nn.ModuleList(
            nn.Conv1d(12, 12, 3, padding=2 * d, dilation=d) for d in (1, 2, 4, 8)
        )
        self.drop, self.head = nn.Dropout(0.2), nn.Conv1d(12, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        for conv in self.convs:
            y = conv(x)[:, :, : -conv.padding[0]].contiguous()
            x = F.relu(x + self.drop(F.relu(y)))
        return self.head(x)


class GatedWaveNet(nn.Module):
    """Gated dilated layers, skips summed (WaveNet, van den Oord et al. 2016)."""

    dims = 1

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv1d(in_channels, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=d) for d in (1, 2, 4))
        self.res, self.skips = (
            nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3)),
            nn.ModuleList(nn.Conv1d(8, 12, 1) for _ in range(3)),
        )
        self.head = nn.Conv1d(12, out_channels, 1)

    def forward(self, x):
        x, skip = self.stem(x), 0
        for gate, res, out in zip(self.gates, self.res, self.skips):
            f, g = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, dim=1)
            z = torch.tanh(f) * torch.sigmoid(g)
            skip = skip + out(z)
            x = x + res(z)
        return self.head(F.relu(skip))


class InceptionTime(nn.Module):
    """Long kernels of three sizes on a bottleneck, classifier of a series (Fawaz et al. 2020)."""

    dims = 1

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.bottleneck, self.convs = (
            nn.Conv1d(in_channels, 4, 1, bias=False),
            nn.ModuleList(nn.Conv1d(4, 4, k, padding=k // 2, bias=False) for k in (9, 19, 39)),
        )
        self.pool, self.bn, self.fc = (
            nn.Sequential(nn.MaxPool1d(3, 1, 1), nn.Conv1d(in_channels, 4, 1)),
            nn.BatchNorm1d(16),
            nn.Linear(16, out_channels),
        )

    def forward(self, x):
        z = self.bottleneck(x)
        y = F.relu(self.bn(torch.cat([c(z) for c in self.convs] + [self.pool(x)], 1)))
        return self.fc(y.mean(-1))


class SeriesLSTM(nn.Module):
    """Convolutional front, a bidirectional LSTM over time (DeepConvLSTM, Ordóñez 2016)."""

    dims = 1

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.lstm, self.head = (
            nn.Conv1d(in_channels, 8, 5, padding=2),
            nn.LSTM(8, 6, batch_first=True, bidirectional=True),
            nn.Linear(12, out_channels),
        )

    def forward(self, x):
        y, _ = self.lstm(F.relu(self.conv(x)).transpose(1, 2))
        return self.head(y).transpose(1, 2)


class DemucsBlock(nn.Module):
    """Strided encoder with GLU, transposed decoder, normalised by the input's deviation.

    Source: Défossez 2019.
    """

    dims = 1

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc, self.rewrite, self.dec = (
            nn.Conv1d(in_channels, 12, 8, 4, padding=2),
            nn.Conv1d(12, 24, 1),
            nn.ConvTranspose1d(12, out_channels, 8, 4, padding=2),
        )

    def forward(self, mix):
        mono = mix.mean(dim=1, keepdim=True)
        mean, std = mono.mean(dim=-1, keepdim=True), mono.std(dim=-1, keepdim=True)
        x = (mix - mean) / (1e-5 + std)
        x = F.glu(self.rewrite(F.relu(self.enc(x))), dim=1)
        return self.dec(x) * std + mean
