"""Residual, dense and cheap blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    """ResNet bottleneck with a projection in the strided one (He et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.down = (
            nn.Conv2d(in_channels, 16, 3, padding=1),
            nn.Sequential(nn.Conv2d(16, 16, 1, stride=2), nn.BatchNorm2d(16)),
        )
        self.conv1, self.conv2, self.conv3 = (
            nn.Conv2d(16, 4, 1),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.Conv2d(4, 16, 1),
        )
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(16)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        y = self.relu(self.stem(x))
        identity = self.down(y)
        out = self.relu(self.bn1(self.conv1(y)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return F.interpolate(
            self.head(self.relu(out)), x.shape[2:], mode="bilinear", align_corners=False
        )


class DenseBlock(nn.Module):
    """Concatenated growth with a list of features (DenseNet, Huang et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(in_channels + 6 * i),
                nn.ReLU(),
                nn.Conv2d(in_channels + 6 * i, 6, 3, padding=1),
            )
            for i in range(3)
        )
        self.head = nn.Conv2d(in_channels + 18, out_channels, 1)

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, linear projection (MobileNetV2, Sandler et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.conv = nn.Sequential(
            nn.Conv2d(8, 32, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU6(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU6(inplace=True),
            nn.Conv2d(32, 8, 1, bias=False),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.conv(x))


class ChannelShuffle(nn.Module):
    """Grouped 1x1 convolutions and a shuffle of channels (ShuffleNet, Zhang et al. 2018)."""

    def __init__(self, in_channels, out_channels, groups=4):
        super().__init__()
        self.groups = groups
        self.stem, self.g1, self.g2 = (
            nn.Conv2d(in_channels, 16, 3, padding=1),
            nn.Conv2d(16, 16, 1, groups=groups),
            nn.Conv2d(16, 16, 1, groups=groups),
        )
        self.dw, self.bn, self.head = (
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, out_channels, 1),
        )

    def shuffle(self, x):
        b, c, h, w = x.data.size()
        x = x.view(b, self.groups, c // self.groups, h, w)
        x = torch.transpose(x, 1, 2).contiguous()
        return x.view(b, -1, h, w)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.g2(self.bn(self.dw(self.shuffle(F.relu(self.g1(x))))))))


class ShuffleSplit(nn.Module):
    """Half of the channels untouched, then shuffled (ShuffleNetV2, Ma et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.dw, self.pw = (
            nn.Conv2d(in_channels, 16, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 8, 1),
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        x1, x2 = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        out = torch.cat((x1, F.relu(self.pw(self.dw(x2)))), dim=1)
        return self.head(out.unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2))


class Ghost(nn.Module):
    """Cheap linear maps make half of the features (GhostNet, Han et al. 2020)."""

    def __init__(self, in_channels, out_channels, oup=15):
        super().__init__()
        self.oup = oup
        self.primary = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.cheap = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Conv2d(oup, out_channels, 1)

    def forward(self, x):
        x1 = self.primary(x)
        out = torch.cat([x1, self.cheap(x1)], dim=1)
        return self.head(out[:, : self.oup, :, :])


class RepVGG(nn.Module):
    """3x3, 1x1 and identity branches, each with batch norm (Ding et al. 2021)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 12, 3, padding=1)
        self.dense = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12))
        self.one, self.identity = (
            nn.Sequential(nn.Conv2d(12, 12, 1, bias=False), nn.BatchNorm2d(12)),
            nn.BatchNorm2d(12),
        )
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(self.dense(x) + self.one(x) + self.identity(x)))


class ConvNeXtBlock(nn.Module):
    """7x7 depthwise, layer norm, MLP on channels last, layer scale (Liu et al. 2022)."""

    def __init__(self, in_channels, out_channels, dim=12):
        super().__init__()
        self.stem, self.dwconv = (
            nn.Conv2d(in_channels, dim, 1),
            nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim),
        )
        self.norm, self.pwconv1, self.pwconv2 = (
            nn.LayerNorm(dim, eps=1e-6),
            nn.Linear(dim, 4 * dim),
            nn.Linear(4 * dim, dim),
        )
        self.gamma, self.head = (
            nn.Parameter(1e-1 * torch.ones(dim)),
            nn.Conv2d(dim, out_channels, 1),
        )

    def forward(self, x):
        input = x = self.stem(x)
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)  # (N, C, H, W) -> (N, H, W, C)
        x = self.pwconv2(F.gelu(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return self.head(input + x)


class ConvMixer(nn.Module):
    """Patches, depthwise residuals and pointwise layers (Trockman and Kolter 2022)."""

    class Residual(nn.Module):
        """x + fn(x)."""

        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return self.fn(x) + x

    def __init__(self, in_channels, out_channels, dim=16, patch=3):
        super().__init__()

        def block():
            return nn.Sequential(
                self.Residual(
                    nn.Sequential(
                        nn.Conv2d(dim, dim, 5, groups=dim, padding="same"),
                        nn.GELU(),
                        nn.BatchNorm2d(dim),
                    )
                ),
                nn.Conv2d(dim, dim, 1),
                nn.GELU(),
                nn.BatchNorm2d(dim),
            )

        self.net = nn.Sequential(
            nn.Conv2d(in_channels, dim, patch, stride=patch),
            nn.GELU(),
            nn.BatchNorm2d(dim),
            block(),
            block(),
        )
        self.head = nn.Conv2d(dim, out_channels, 1)

    def forward(self, x):
        return F.interpolate(self.head(self.net(x)), size=x.shape[-2:], mode="bilinear")


class FactorisedResidual(nn.Module):
    """Non-bottleneck 1D: 3x1 and 1x3, plain and dilated (ERFNet, Romera et al. 2018)."""

    def __init__(self, in_channels, out_channels, d=3):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 12, 3, padding=1)
        self.c31, self.c13 = (
            nn.Conv2d(12, 12, (3, 1), padding=(1, 0)),
            nn.Conv2d(12, 12, (1, 3), padding=(0, 1)),
        )
        self.d31, self.d13 = (
            nn.Conv2d(12, 12, (3, 1), padding=(d, 0), dilation=(d, 1)),
            nn.Conv2d(12, 12, (1, 3), padding=(0, d), dilation=(1, d)),
        )
        self.bn1, self.bn2, self.dropout, self.head = (
            nn.BatchNorm2d(12, eps=1e-3),
            nn.BatchNorm2d(12, eps=1e-3),
            nn.Dropout2d(0.3),
            nn.Conv2d(12, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        y = F.relu(self.bn1(self.c13(F.relu(self.c31(x)))))
        y = self.bn2(self.d13(F.relu(self.d31(y))))
        if self.dropout.p != 0:
            y = self.dropout(y)
        return self.head(F.relu(y + x))


class Fire(nn.Module):
    """Squeeze and expand without norms (SqueezeNet, Iandola et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.squeeze, self.e1, self.e3 = (
            nn.Conv2d(in_channels, 4, 1),
            nn.Conv2d(4, 8, 1),
            nn.Conv2d(4, 8, 3, padding=1),
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.squeeze(x).relu_()
        return self.head(torch.cat([self.e1(x).relu(), self.e3(x).relu()], 1))


class Reversible(nn.Module):
    """Additive coupling of two halves (RevNet, Gomez et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.f = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU())
            for _ in range(3)
        )
        self.g = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU())
            for _ in range(3)
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x1, x2 = torch.tensor_split(self.stem(x), 2, dim=1)
        for f, g in zip(self.f, self.g):
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
        return self.head(torch.cat((x1, x2), 1))


class Highway(nn.Module):
    """Transform gates between a layer and its input (Srivastava et al. 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.h, self.t = (
            nn.Conv2d(in_channels, 12, 1),
            nn.Conv2d(12, 12, 3, padding=1),
            nn.Conv2d(12, 12, 3, padding=1),
        )
        nn.init.constant_(self.t.bias, -1.0)
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        t = torch.sigmoid(self.t(x))
        return self.head(torch.lerp(x, F.relu(self.h(x)), t))


class Octave(nn.Module):
    """Features at two frequencies with four paths between them (Chen et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.h0, self.l0 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(in_channels, 8, 3, padding=1),
        )
        self.hh, self.hl, self.lh, self.ll = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.pool, self.up, self.head = (
            nn.AvgPool2d(2, 2),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(16, out_channels, 1),
        )

    def forward(self, x):
        h, l = F.relu(self.h0(x)), F.relu(self.l0(self.pool(x)))
        h, l = F.relu(self.hh(h) + self.up(self.lh(l))), F.relu(self.ll(l) + self.hl(self.pool(h)))
        return self.head(torch.cat([h, self.up(l)], dim=1))


class ShiftBlock(nn.Module):
    """Channels moved by a pixel in four directions instead of convolved (Shift, Wu et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.p1, self.p2, self.head = (
            nn.Conv2d(in_channels, 20, 1),
            nn.Conv2d(20, 20, 1),
            nn.Conv2d(20, out_channels, 1),
        )

    def shift(self, x):
        out = torch.zeros_like(x)
        out[:, 0:4, :, :-1] = x[:, 0:4, :, 1:]
        out[:, 4:8, :, 1:] = x[:, 4:8, :, :-1]
        out[:, 8:12, :-1, :] = x[:, 8:12, 1:, :]
        out[:, 12:16, 1:, :] = x[:, 12:16, :-1, :]
        out[:, 16:] = x[:, 16:]
        return out

    def forward(self, x):
        x = F.relu(self.p1(x))
        x = x + F.relu(self.p2(self.shift(x)))
        return self.head(self.shift(x))


class CrossStagePartial(nn.Module):
    """Half of the features past a block, joined behind it (CSPNet, Wang et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()

        def cbs(i, o, k):
            return nn.Sequential(
                nn.Conv2d(i, o, k, padding=k // 2, bias=False),
                nn.BatchNorm2d(o),
                nn.SiLU(inplace=True),
            )

        self.cv1, self.m, self.cv2 = (
            cbs(in_channels, 16, 1),
            nn.ModuleList(cbs(8, 8, 3) for _ in range(2)),
            nn.Conv2d(32, out_channels, 1),
        )

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class PartialChannels(nn.Module):
    """Convolution of a quarter of the channels, in place (FasterNet, Chen et al. 2023)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.partial = (
            nn.Conv2d(in_channels, 16, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
        )
        self.mlp, self.head = (
            nn.Sequential(nn.Conv2d(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 16, 1)),
            nn.Conv2d(16, out_channels, 1),
        )

    def forward(self, x):
        shortcut = self.stem(x)
        x = shortcut.clone()
        x[:, :4, :, :] = self.partial(shortcut[:, :4, :, :])
        return self.head(shortcut + self.mlp(x))


class PoolMixer(nn.Module):
    """Token mixing by average pooling less identity (PoolFormer, Yu et al. 2022)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.embed, self.norm1, self.norm2 = (
            nn.Conv2d(in_channels, 12, 3, 2, 1),
            nn.GroupNorm(1, 12),
            nn.GroupNorm(1, 12),
        )
        self.pool, self.mlp = (
            nn.AvgPool2d(3, 1, 1, count_include_pad=False),
            nn.Sequential(nn.Conv2d(12, 24, 1), nn.GELU(), nn.Conv2d(24, 12, 1)),
        )
        self.scale1, self.scale2 = (
            nn.Parameter(0.1 * torch.ones(12)),
            nn.Parameter(0.1 * torch.ones(12)),
        )
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, img):
        x = self.embed(img)
        y = self.norm1(x)
        x = x + self.scale1.unsqueeze(-1).unsqueeze(-1) * (self.pool(y) - y)
        x = x + self.scale2.unsqueeze(-1).unsqueeze(-1) * self.mlp(self.norm2(x))
        return F.interpolate(self.head(x), size=img.shape[2:], mode="bilinear", align_corners=False)


class BinaryWeights(nn.Module):
    """Signs of weights with a straight-through gradient (XNOR-Net, Rastegari et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.weight = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Parameter(torch.randn(12, 12, 3, 3) * 0.1),
        )
        self.bn, self.head = nn.BatchNorm2d(12), nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        scale = self.weight.abs().mean(dim=(1, 2, 3), keepdim=True)
        binary = scale.detach() * torch.sign(self.weight)
        weight = binary.detach() - self.weight.clamp(-1, 1).detach() + self.weight.clamp(-1, 1)
        return self.head(F.hardtanh(self.bn(F.conv2d(x, weight, padding=1))))


class ZeroInitResidual(nn.Module):
    """Residuals with learnt scalar from small values, pre-activation.

    Source: ReZero, Bachlechner et al. 2021.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.convs = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.ModuleList(nn.Conv2d(12, 12, 3, padding=1) for _ in range(3)),
        )
        self.alphas, self.head = (
            nn.ParameterList(nn.Parameter(torch.tensor(0.1)) for _ in range(3)),
            nn.Conv2d(12, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        for alpha, conv in zip(self.alphas, self.convs):
            x = torch.addcmul(x, alpha, conv(F.relu(x)))
        return self.head(x)


class MixConv(nn.Module):
    """Depthwise kernels of three sizes on splits of the channels (Tan and Le 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.splits = nn.Conv2d(in_channels, 16, 1), [6, 5, 5]
        self.convs = nn.ModuleList(
            nn.Conv2d(c, c, k, padding=k // 2, groups=c) for c, k in zip(self.splits, (3, 5, 7))
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        parts = self.stem(x).split(self.splits, 1)
        return self.head(F.hardswish(torch.cat([c(t) for t, c in zip(parts, self.convs)], 1)))
