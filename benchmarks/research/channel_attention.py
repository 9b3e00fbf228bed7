"""Networks that weigh their channels by something that the whole image says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def conv_bn(cin: int, cout: int, k: int = 3, stride: int = 1) -> nn.Sequential:
    """Return convolution, batch norm and ReLU."""
    conv = nn.Conv2d(cin, cout, k, stride, k // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class SqueezeExcitation(nn.Module):
    """Squeeze and excitation by linear layers on a pooled vector (Hu et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 16)
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(16, 4, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(4, 16, bias=False),
            nn.Sigmoid(),
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return self.head(x * y.expand_as(x))


class EfficientChannelAttention(nn.Module):
    """Channel gates by a 1D convolution over the pooled vector (ECA, Wang et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 16)
        self.conv = nn.Conv1d(1, 1, kernel_size=3, padding=1, bias=False)
        self.head = nn.Conv2d(16, out_channels, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        y = F.adaptive_avg_pool2d(x, 1)
        y = self.conv(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        return self.head(x * torch.sigmoid(y))


class CBAM(nn.Module):
    """Channel, then spatial attention, each from means and maxima (Woo et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 16)
        self.mlp = nn.Sequential(nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1))
        self.spatial = nn.Conv2d(2, 1, 7, padding=3, bias=False)
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        avg = self.mlp(F.avg_pool2d(x, x.shape[2:]))
        mx = self.mlp(F.max_pool2d(x, x.shape[2:]))
        x = x * torch.sigmoid(avg + mx)
        pooled = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], dim=1)
        return self.head(x * torch.sigmoid(self.spatial(pooled)))


class BAM(nn.Module):
    """Bottleneck attention: a vector gate plus a dilated map gate (Park et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 16)
        self.fc1, self.bn, self.fc2 = nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 16)
        self.spatial = nn.Sequential(
            nn.Conv2d(16, 4, 1),
            nn.Conv2d(4, 4, 3, padding=4, dilation=4),
            nn.ReLU(),
            nn.Conv2d(4, 1, 1),
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        vector = self.fc2(F.relu(self.bn(self.fc1(x.mean(dim=[2, 3])))))
        gate = torch.sigmoid(vector.unsqueeze(2).unsqueeze(3) + self.spatial(x))
        return self.head(x + x * gate)


class ConcurrentSE(nn.Module):
    """Spatial and channel squeeze at once, the larger of both taken (scSE, Roy et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 12)
        self.w1, self.w2 = nn.Linear(12, 6), nn.Linear(6, 12)
        self.sse = nn.Conv2d(12, 1, 1, bias=False)
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        z = x.flatten(2).mean(-1)
        z = torch.sigmoid(self.w2(F.relu(self.w1(z))))
        return self.head(torch.max(x * z[:, :, None, None], x * self.sse(x).sigmoid()))


class SelectiveKernel(nn.Module):
    """Softmax over branches of two kernel sizes, from their sum's mean (SK, Li et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Conv2d(16, 16, 3, padding=d, dilation=d, groups=4) for d in (1, 2)
        )
        self.fc = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
        self.fcs = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        feats = torch.stack([branch(x) for branch in self.branches], dim=1)  # B, M, C, H, W
        s = feats.sum(1).mean(-1).mean(-1)
        z = self.fc(s)
        attention = torch.stack([fc(z) for fc in self.fcs], dim=1)
        attention = F.softmax(attention, dim=1)[..., None, None]
        return self.head((feats * attention).sum(dim=1))


class GatherExcite(nn.Module):
    """Gates gathered over windows of 8 pixels and resized back (GE, Hu et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 12)
        self.excite = nn.Sequential(nn.Conv2d(12, 3, 1), nn.ReLU(), nn.Conv2d(3, 12, 1))
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        gathered = F.avg_pool2d(x, 15, stride=8, padding=7, count_include_pad=False)
        gate = F.interpolate(self.excite(gathered), size=x.shape[-2:], mode="nearest")
        return self.head(x * torch.sigmoid(gate))


class GlobalContext(nn.Module):
    """Softmax-pooled context vector, transformed and added to each place.

    Source: GCNet, Cao et al. 2019.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 16)
        self.mask = nn.Conv2d(16, 1, 1)
        self.transform = nn.Sequential(
            nn.Conv2d(16, 4, 1), nn.LayerNorm([4, 1, 1]), nn.ReLU(), nn.Conv2d(4, 16, 1)
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.shape
        mask = F.softmax(self.mask(x).view(b, 1, h * w), dim=2)
        context = torch.matmul(x.view(b, 1, c, h * w), mask.unsqueeze(-1))  # B, 1, C, 1
        return self.head(x + self.transform(context.view(b, c, 1, 1)))


class DualAttentionChannel(nn.Module):
    """Channel attention by the Gram matrix of the features (DANet, Fu et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 8)
        self.gamma = nn.Parameter(torch.full((1,), 0.1))
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.size()
        query = x.view(b, c, -1)
        energy = torch.bmm(query, query.permute(0, 2, 1)) / (h * w)
        energy = torch.max(energy, -1, keepdim=True)[0].expand_as(energy) - energy
        out = torch.bmm(F.softmax(energy, dim=-1), query).view(b, c, h, w)
        return self.head(self.gamma * out + x)


class TripletAttention(nn.Module):
    """Gates on channel, height and width from pools along each other (Misra et al. 2021)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 8)
        self.cw, self.hc, self.hw = (nn.Conv2d(2, 1, 7, padding=3, bias=False) for _ in range(3))
        self.head = nn.Conv2d(8, out_channels, 1)

    def gate(self, conv, x):
        pooled = torch.cat((torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)), dim=1)
        return x * torch.sigmoid(conv(pooled))

    def forward(self, x):
        x = self.stem(x)
        a = self.gate(self.cw, x.permute(0, 2, 1, 3).contiguous()).permute(0, 2, 1, 3)
        b = self.gate(self.hc, x.permute(0, 3, 2, 1).contiguous()).permute(0, 3, 2, 1)
        return self.head((a + b + self.gate(self.hw, x)) / 3)


class CoordinateAttention(nn.Module):
    """Gates of rows and of columns from means along the other dim (Hou et al. 2021)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 16)
        self.conv1, self.bn1 = nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)
        self.conv_h, self.conv_w = nn.Conv2d(8, 16, 1), nn.Conv2d(8, 16, 1)
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        n, c, h, w = x.size()
        x_h = F.adaptive_avg_pool2d(x, (None, 1))
        x_w = F.adaptive_avg_pool2d(x, (1, None)).permute(0, 1, 3, 2)
        y = F.hardswish(self.bn1(self.conv1(torch.cat([x_h, x_w], dim=2))))
        x_h, x_w = torch.split(y, [h, w], dim=2)
        x_w = x_w.permute(0, 1, 3, 2)
        return self.head(x * self.conv_w(x_w).sigmoid() * self.conv_h(x_h).sigmoid())


class StyleRecalibration(nn.Module):
    """Gates from mean and standard deviation of each channel (SRM, Lee et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 16)
        self.cfc = nn.Parameter(torch.rand(16, 2))
        self.bn = nn.BatchNorm1d(16)
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        b, c, _, _ = x.shape
        mean = x.reshape(b, c, -1).mean(-1).unsqueeze(-1)
        std = x.reshape(b, c, -1).std(-1).unsqueeze(-1)
        u = torch.cat((mean, std), -1)
        z = (u * self.cfc).sum(-1)
        return self.head(x * torch.sigmoid(self.bn(z)).view(b, c, 1, 1))


class FrequencyChannelAttention(nn.Module):
    """Gates from DCT coefficients of a 7x7 pool of the image (FcaNet, Qin et al. 2021)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 8)
        t = torch.arange(7).float()
        basis = [torch.cos(torch.pi * u * (t + 0.5) / 7) for u in (0, 1, 2, 3)]
        pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (3, 0), (0, 3)]
        weight = torch.stack([basis[u][:, None] * basis[v][None, :] for u, v in pairs])
        self.register_buffer("weight", weight)
        self.fc = nn.Sequential(
            nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Linear(4, 8), nn.Sigmoid()
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        pooled = F.adaptive_avg_pool2d(x, (7, 7))
        y = torch.sum(pooled * self.weight, dim=[2, 3])
        return self.head(x * self.fc(y)[:, :, None, None])


class SimAM(nn.Module):
    """Parameter-free energy of each neuron against its channel's variance (Yang et al. 2021)."""

    def __init__(self, in_channels, out_channels, e_lambda=1e-4):
        super().__init__()
        self.stem = conv_bn(in_channels, 12)
        self.e_lambda = e_lambda
        self.head = nn.Conv2d(12, out_channels, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        n = x.shape[2] * x.shape[3] - 1
        d = (x - x.mean(dim=[2, 3], keepdim=True)).pow(2)
        v = d.sum(dim=[2, 3], keepdim=True) / n
        return self.head(x * torch.sigmoid(d / (4 * (v + self.e_lambda)) + 0.5))


class SplitAttention(nn.Module):
    """Radix-2 split attention (ResNeSt, Zhang et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 12)
        self.conv, self.bn0 = nn.Conv2d(12, 24, 3, padding=1, groups=2), nn.BatchNorm2d(24)
        self.fc1, self.bn1, self.fc2 = nn.Conv2d(12, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 24, 1)
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = F.relu(self.bn0(self.conv(self.stem(x))))
        batch, rchannel = x.shape[:2]
        splits = torch.split(x, rchannel // 2, dim=1)
        gap = F.adaptive_avg_pool2d(sum(splits), 1)
        atten = self.fc2(F.relu(self.bn1(self.fc1(gap))))
        atten = atten.view(batch, 1, 2, -1).transpose(1, 2)
        atten = F.softmax(atten, dim=1).reshape(batch, -1, 1, 1)
        attens = torch.split(atten, rchannel // 2, dim=1)
        return self.head(sum([att * split for att, split in zip(attens, splits)]))


class ShuffleAttention(nn.Module):
    """Grouped channel and group-normed spatial gates, then a shuffle (SA-Net, Zhang 2021)."""

    def __init__(self, in_channels, out_channels, groups=2):
        super().__init__()
        self.groups = groups
        self.stem = conv_bn(in_channels, 16)
        self.cweight, self.cbias = (
            nn.Parameter(torch.rand(1, 4, 1, 1)),
            nn.Parameter(torch.ones(1, 4, 1, 1)),
        )
        self.sweight, self.sbias = (
            nn.Parameter(torch.rand(1, 4, 1, 1)),
            nn.Parameter(torch.ones(1, 4, 1, 1)),
        )
        self.gn = nn.GroupNorm(4, 4)
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.shape
        x = x.reshape(b * self.groups, -1, h, w)
        x_0, x_1 = x.chunk(2, dim=1)
        xn = x_0 * torch.sigmoid(self.cweight * F.adaptive_avg_pool2d(x_0, 1) + self.cbias)
        xs = x_1 * torch.sigmoid(self.sweight * self.gn(x_1) + self.sbias)
        out = torch.cat([xn, xs], dim=1).reshape(b, -1, h, w)
        out = out.reshape(b, 2, -1, h, w).permute(0, 2, 1, 3, 4).reshape(b, -1, h, w)
        return self.head(out)


class DoubleAttention(nn.Module):
    """Second-order gathering into slots and distribution to places (A2-Net, Chen et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = conv_bn(in_channels, 8)
        self.a, self.b, self.v = (nn.Conv2d(8, 4, 1) for _ in range(3))
        self.project = nn.Conv2d(4, 8, 1)
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        n, _, h, w = x.shape
        feature = self.a(x).view(n, 4, -1)
        maps = F.softmax(self.b(x).view(n, 4, -1), dim=-1)
        vectors = F.softmax(self.v(x).view(n, 4, -1), dim=1)
        descriptors = torch.bmm(feature, maps.permute(0, 2, 1))
        return self.head(x + self.project(descriptors.matmul(vectors).view(n, -1, h, w)))
