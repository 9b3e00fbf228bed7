"""Networks that normalise in their own way, or move a norm's scale by a condition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ConvNeXtNorm(nn.Module):
    """Layer norm over channels written out for channels first (ConvNeXt, Liu et al. 2022)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 12, 4, stride=4)
        self.weight, self.bias = nn.Parameter(torch.ones(12)), nn.Parameter(torch.zeros(12))
        self.head = nn.ConvTranspose2d(12, out_channels, 4, stride=4)

    def forward(self, x):
        x = self.stem(x)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        x = self.weight[:, None, None] * x + self.bias[:, None, None]
        return self.head(F.gelu(x))


class PermutedLayerNorm(nn.Module):
    """nn.LayerNorm on channels last, there and back by permute."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(in_channels, 16, 3, padding=1), nn.LayerNorm(16)
        self.conv2 = nn.Conv2d(16, out_channels, 3, padding=1)

    def forward(self, x):
        x = self.conv1(x).permute(0, 2, 3, 1)
        x = F.gelu(self.norm(x))
        return self.conv2(x.permute(0, 3, 1, 2).contiguous())


class SwitchableNorm(nn.Module):
    """Learnt mixture of instance, layer and batch statistics (Luo et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.weight, self.bias = (
            nn.Parameter(torch.ones(1, 8, 1, 1)),
            nn.Parameter(torch.zeros(1, 8, 1, 1)),
        )
        self.mean_weight, self.var_weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.head = nn.Conv2d(8, out_channels, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        n, c, h, w = x.size()
        y = x.view(n, c, -1)
        mean_in, var_in = y.mean(-1, keepdim=True), y.var(-1, keepdim=True)
        temp = var_in + mean_in**2
        mean_ln = mean_in.mean(1, keepdim=True)
        var_ln = temp.mean(1, keepdim=True) - mean_ln**2
        mean_bn = mean_in.mean(0, keepdim=True)
        var_bn = temp.mean(0, keepdim=True) - mean_bn**2
        mw, vw = F.softmax(self.mean_weight, 0), F.softmax(self.var_weight, 0)
        mean = mw[0] * mean_in + mw[1] * mean_ln + mw[2] * mean_bn
        var = vw[0] * var_in + vw[1] * var_ln + vw[2] * var_bn
        y = ((y - mean) / (var + 1e-5).sqrt()).view(n, c, h, w)
        return self.head(F.relu(y * self.weight + self.bias))


class FilterResponseNorm(nn.Module):
    """Filter response norm and thresholded linear unit (Singh and Krishnan 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 12, 3, padding=1)
        self.tau, self.beta = (
            nn.Parameter(torch.zeros(1, 12, 1, 1)),
            nn.Parameter(torch.zeros(1, 12, 1, 1)),
        )
        self.gamma, self.eps = nn.Parameter(torch.ones(1, 12, 1, 1)), 1e-6
        self.head = nn.Conv2d(12, out_channels, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        nu2 = torch.mean(x**2, dim=[2, 3], keepdim=True)
        x = x * torch.rsqrt(nu2 + abs(self.eps))
        return self.head(torch.max(self.gamma * x + self.beta, self.tau))


class WSConv2d(nn.Conv2d):
    """Convolution with standardised weights."""

    def forward(self, x):
        weight = self.weight
        weight = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
        std = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
        weight = weight / std.expand_as(weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class WeightStandardisation(nn.Module):
    """Standardised weights in all convolutions, with group norm (Qiao et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net = nn.Sequential(
            WSConv2d(in_channels, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(inplace=True),
            WSConv2d(16, 16, 3, stride=2, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(inplace=True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(16, out_channels, 1),
        )

    def forward(self, x):
        return self.net(x)[:, :, : x.shape[2], : x.shape[3]]


class WeightNormed(nn.Module):
    """Weight-normalised convolutions (Salimans and Kingma 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.conv1 = norm(nn.Conv2d(in_channels, 16, 3, padding=1))
        self.conv2 = norm(nn.Conv2d(16, 16, 3, padding=2, dilation=2))
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = F.elu(self.conv1(x))
        return self.head(x + F.elu(self.conv2(x)))


class GlobalResponseNorm(nn.Module):
    """Global response norm over the L2 norms of channels (ConvNeXt V2, Woo et al. 2023)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.pw1, self.pw2 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Linear(8, 32),
            nn.Linear(32, 8),
        )
        self.gamma, self.beta = (
            nn.Parameter(torch.zeros(1, 1, 1, 32) + 0.1),
            nn.Parameter(torch.zeros(1, 1, 1, 32)),
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        y = F.gelu(self.pw1(x.permute(0, 2, 3, 1)))
        gx = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
        y = self.gamma * (y * nx) + self.beta + y
        return self.head(x + self.pw2(y).permute(0, 3, 1, 2))


class EvoNormS0(nn.Module):
    """x sigmoid(v x) over the standard deviation of a group (Liu et al. 2020)."""

    def __init__(self, in_channels, out_channels, groups=4):
        super().__init__()
        self.groups = groups
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.gamma, self.beta, self.v = (nn.Parameter(torch.ones(1, 16, 1, 1)) for _ in range(3))
        self.head = nn.Conv2d(16, out_channels, 3, padding=1)

    def group_std(self, x):
        n, c, h, w = x.size()
        x = torch.reshape(x, (n, self.groups, c // self.groups, h, w))
        var = torch.var(x, dim=(2, 3, 4), keepdim=True).expand_as(x)
        return torch.reshape(torch.sqrt(var + 1e-5), (n, c, h, w))

    def forward(self, x):
        x = self.conv(x)
        x = x * torch.sigmoid(self.v * x) / self.group_std(x) * self.gamma + self.beta
        return self.head(x)


class PositionalNorm(nn.Module):
    """Norm over channels at each place, moments given to the decoder (PONO, Li et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc, self.mid = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(12, 12, 3, padding=1),
        )
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.enc(x)
        mean = x.mean(dim=1, keepdim=True)
        std = x.var(dim=1, keepdim=True).add(1e-5).sqrt()
        y = F.relu(self.mid((x - mean) / std))
        y = y * std
        y += mean
        return self.head(y)


class LocalResponseNorm(nn.Module):
    """AlexNet's local response norm across channels (Krizhevsky et al. 2012)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.lrn = nn.Conv2d(in_channels, 16, 5, padding=2), nn.LocalResponseNorm(5)
        self.conv2 = nn.Conv2d(16, out_channels, 3, padding=1)

    def forward(self, x):
        return self.conv2(self.lrn(F.relu(self.conv1(x), inplace=True)))


class PixelNorm(nn.Module):
    """Feature vectors of unit length at each pixel (progressive GAN, Karras et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(in_channels, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1),
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        for conv in [self.conv1, self.conv2]:
            x = F.leaky_relu(conv(x), 0.2)
            x = x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-8)
        return self.head(x)


class BatchInstanceNorm(nn.Module):
    """Learnt gate between batch norm and instance norm (Nam and Kim 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 12, 3, padding=1)
        self.bn, self.inorm = nn.BatchNorm2d(12, affine=False), nn.InstanceNorm2d(12)
        self.gate = nn.Parameter(torch.full((12,), 0.5))
        self.head = nn.Conv2d(12, out_channels, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        rho = self.gate.clamp(0, 1).view(1, -1, 1, 1)
        return self.head(F.relu(rho * self.bn(x) + (1 - rho) * self.inorm(x)))


class IBN(nn.Module):
    """Half of the channels by instance norm, half by batch norm (IBN-Net, Pan et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.IN, self.BN = nn.InstanceNorm2d(8, affine=True), nn.BatchNorm2d(8)
        self.head = nn.Conv2d(16, out_channels, 3, padding=1)

    def forward(self, x):
        split = torch.split(self.conv(x), 8, 1)
        out = torch.cat((self.IN(split[0].contiguous()), self.BN(split[1].contiguous())), 1)
        return self.head(torch.relu_(out))


class AdaptiveInstanceNorm(nn.Module):
    """Instance norm whose scale and shift a style vector of the image gives (Huang et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.content, self.style = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(in_channels, 8, 3, stride=2),
        )
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 24))
        self.head = nn.Conv2d(12, out_channels, 3, padding=1)

    def forward(self, x):
        style = self.mlp(F.relu(self.style(x)).mean([2, 3]))
        scale, shift = style.view(-1, 24, 1, 1).chunk(2, 1)
        y = F.instance_norm(self.content(x))
        return self.head(F.relu((1 + scale) * y + shift))


class FiLM(nn.Module):
    """Feature-wise affine modulation in two layers from one global vector (Perez et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.generator = nn.Linear(in_channels, 32)
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        film = self.generator(x.mean((2, 3))).reshape(x.size(0), 2, 2, 8)
        for i, conv in enumerate((self.conv1, self.conv2)):
            gamma, beta = film[:, i, 0], film[:, i, 1]
            x = F.relu(gamma[..., None, None] * conv(x) + beta[..., None, None])
        return self.head(x)


class SpatiallyAdaptive(nn.Module):
    """Norm with maps of scale and shift from the resized input (SPADE, Park et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.down, self.norm = (
            nn.Conv2d(in_channels, 16, 3, stride=2, padding=1),
            nn.InstanceNorm2d(16),
        )
        self.shared = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.gamma, self.beta = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        y = self.norm(self.down(x))
        segmap = F.relu(self.shared(F.interpolate(x, size=y.size()[2:], mode="nearest")))
        y = y * (1 + self.gamma(segmap)) + self.beta(segmap)
        return F.interpolate(
            self.head(F.relu(y)), size=x.size()[2:], mode="bilinear", align_corners=False
        )


class RMSNorm(nn.Module):
    """Root mean square norm over channels (Zhang and Sennrich 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.scale = (
            nn.Conv2d(in_channels, 16, 3, padding=1),
            nn.Parameter(torch.ones(16)),
        )
        self.head = nn.Conv2d(16, out_channels, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        x = F.normalize(x, dim=1) * (16**0.5) * self.scale.view(1, -1, 1, 1)
        return self.head(F.silu(x))


class FrozenBatchNorm(nn.Module):
    """Batch norm that an overridden train() keeps in evaluation mode, as in detectors."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(in_channels, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.head = nn.Conv2d(12, out_channels, 3, padding=1)

    def train(self, mode=True):
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        return self

    def forward(self, x):
        return self.head(F.relu(self.bn(self.conv(x))))


class TrackedInstanceNorm(nn.Module):
    """Instance norm with affine weights and running statistics (nnU-Net's old default)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.InstanceNorm2d(12, affine=True, track_running_stats=True),
        )
        self.head = nn.Conv2d(12, out_channels, 3, padding=1)

    def forward(self, x):
        return self.head(F.leaky_relu(self.norm(self.conv(x)), 1e-2, inplace=True))


class MeanOnlyBatchNorm(nn.Module):
    """Only the mean of batch and places is taken away, variance is left.

    Source: Salimans and Kingma 2016.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.bias = (
            nn.Conv2d(in_channels, 12, 3, padding=1, bias=False),
            nn.Parameter(torch.zeros(12)),
        )
        self.head = nn.Conv2d(12, out_channels, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        x = x - x.mean(dim=(0, 2, 3), keepdim=True) + self.bias[None, :, None, None]
        return self.head(F.relu(x))


class DivisiveNorm(nn.Module):
    """Learnt divisive normalisation over channels (GDN, Ballé et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 5, stride=2, padding=2)
        self.beta, self.gamma = nn.Parameter(torch.ones(8)), nn.Parameter(0.1 * torch.eye(8))
        self.head = nn.ConvTranspose2d(8, out_channels, 5, stride=2, padding=2, output_padding=1)

    def forward(self, x):
        y = self.conv(x)
        norm = F.conv2d(y * y, self.gamma.abs().view(8, 8, 1, 1), self.beta.abs())
        return self.head(y / torch.sqrt(norm))[..., : x.shape[-2], : x.shape[-1]]
