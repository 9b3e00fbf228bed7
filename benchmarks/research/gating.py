"""Gates, mixtures, dynamic weights, activations and regularisers of features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class CondConv(nn.Module):
    """Weights of each image mixed from experts, by grouped convolution over the batch.

    Source: Yang et al. 2019.
    """

    def __init__(self, in_channels, out_channels, experts=3):
        super().__init__()
        self.stem, self.routing = nn.Conv2d(in_channels, 8, 3, padding=1), nn.Linear(8, experts)
        self.weight = nn.Parameter(torch.randn(experts, 12, 8, 3, 3) * 0.1)
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        b, c, h, w = x.shape
        r = torch.sigmoid(self.routing(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        weight = torch.einsum("be,eoikl->boikl", r, self.weight).reshape(b * 12, 8, 3, 3)
        y = F.conv2d(x.reshape(1, b * c, h, w), weight, padding=1, groups=b)
        return self.head(F.relu(y.view(b, 12, h, w)))


class DynamicConv(nn.Module):
    """Softmax-weighted sum of the outputs of parallel kernels (Chen et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.convs = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)),
        )
        self.attention = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4)
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        pi = F.softmax(self.attention(x) / 30, dim=-1)
        out = sum(pi[:, k].view(-1, 1, 1, 1) * conv(x) for k, conv in enumerate(self.convs))
        return self.head(F.relu(out))


class MixtureOfExperts(nn.Module):
    """Experts weighted per image by a softmax gate, stacked and summed by einsum.

    Source: Jacobs et al. 1991.
    """

    def __init__(self, in_channels, out_channels, n=3):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(in_channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, out_channels, 1)
            )
            for _ in range(n)
        )
        self.gate = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, n),
            nn.Softmax(dim=1),
        )

    def forward(self, x):
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return torch.einsum("be,bechw->bchw", self.gate(x), outputs)


class TopOneExperts(nn.Module):
    """The best expert of each image alone is kept, times its gate (Switch, Fedus et al. 2022)."""

    def __init__(self, in_channels, out_channels, n=3):
        super().__init__()
        self.stem, self.experts = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(n)),
        )
        self.router, self.head = nn.Linear(8, n), nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        probs = F.softmax(self.router(x.mean((-2, -1))), dim=-1)
        value, index = probs.max(dim=-1)
        mask = F.one_hot(index, probs.size(-1)).to(x.dtype) * value[:, None]
        out = 0
        for i, expert in enumerate(self.experts):
            out = out + mask[:, i, None, None, None] * expert(x)
        return self.head(x + out)


class PixelExperts(nn.Module):
    """Experts of several scales gated at each pixel (scale attention, Chen et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.gate = nn.Conv2d(in_channels, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.experts = nn.ModuleList(
            nn.Conv2d(8, out_channels, 3, padding=d, dilation=d) for d in (1, 3, 6)
        )

    def forward(self, x):
        x = F.relu(self.stem(x))
        weights = self.gate(x).softmax(dim=1).unsqueeze(2)
        return (torch.stack([e(x) for e in self.experts], 1) * weights).sum(1)


class GatedLinear(nn.Module):
    """Linear half times the sigmoid of the other half (GLU, Dauphin et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c1, self.c2, self.head = (
            nn.Conv2d(in_channels, 24, 3, padding=1),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.Conv2d(12, out_channels, 1),
        )

    def forward(self, x):
        x = F.glu(self.c1(x), dim=1)
        return self.head(x + F.glu(self.c2(x), dim=1))


class GatedConv(nn.Module):
    """Features times a learnt soft mask in each layer (free-form inpainting, Yu et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features = nn.ModuleList(
            [nn.Conv2d(in_channels, 8, 5, padding=2), nn.Conv2d(8, 8, 3, padding=2, dilation=2)]
        )
        self.masks = nn.ModuleList(
            [nn.Conv2d(in_channels, 8, 5, padding=2), nn.Conv2d(8, 8, 3, padding=2, dilation=2)]
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        for f, m in zip(self.features, self.masks):
            x = F.elu(f(x)).mul_(torch.sigmoid(m(x)))
        return self.head(x)


class Maxout(nn.Module):
    """Maximum over pieces of channels (Goodfellow et al. 2013)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.head = (
            nn.Conv2d(in_channels, 36, 3, padding=1),
            nn.Conv2d(12, out_channels, 3, padding=1),
        )

    def forward(self, x):
        x = self.conv(x)
        x = x.view(x.shape[0], 12, 3, *x.shape[2:]).amax(2)
        return self.head(x)


class CReLU(nn.Module):
    """Positive and negative parts side by side (Shang et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(16, out_channels, 3, padding=1),
        )

    def forward(self, x):
        x = self.conv(x)
        return self.head(torch.cat((x.clamp(min=0), (-x).clamp(min=0)), 1))


class DynamicReLU(nn.Module):
    """Slopes and intercepts of a piecewise linear unit from a global vector (Chen et al. 2020)."""

    def __init__(self, in_channels, out_channels, k=2):
        super().__init__()
        self.k, self.conv = k, nn.Conv2d(in_channels, 8, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(8, 4), nn.Linear(4, 2 * k * 8)
        self.register_buffer("lambdas", torch.Tensor([1.0] * k + [0.5] * k).float())
        self.register_buffer("init_v", torch.Tensor([1.0] + [0.0] * (2 * k - 1)).float())
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.conv(x)
        theta = torch.mean(torch.mean(x, axis=-1), axis=-1)
        theta = 2 * torch.sigmoid(self.fc2(F.relu(self.fc1(theta)))) - 1
        coefs = theta.view(-1, 8, 2 * self.k) * self.lambdas + self.init_v
        x_perm = x.permute(2, 3, 0, 1).unsqueeze(-1)
        output = x_perm * coefs[:, :, : self.k] + coefs[:, :, self.k :]
        return self.head(torch.max(output, dim=-1)[0].permute(2, 3, 0, 1))


class Funnel(nn.Module):
    """Maximum of a feature and its depthwise neighbourhood (FReLU, Ma et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.funnel, self.bn = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(12, 12, 3, padding=1, groups=12),
            nn.BatchNorm2d(12),
        )
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.conv(x)
        return self.head(torch.max(x, self.bn(self.funnel(x))))


class LearntSwish(nn.Module):
    """Swish with a learnt slope per channel, and ACON's switch (Ramachandran 2017, Ma 2021)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c1, self.c2, self.beta = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(12, 12, 3, padding=1),
            nn.Parameter(torch.ones(12)),
        )
        self.p1, self.p2 = (
            nn.Parameter(torch.randn(1, 12, 1, 1)),
            nn.Parameter(torch.randn(1, 12, 1, 1)),
        )
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.c1(x)
        x = x * torch.sigmoid(self.beta.view(1, -1, 1, 1) * x)
        x = self.c2(x)
        dpx = (self.p1 - self.p2) * x
        return self.head(dpx * torch.sigmoid(dpx) + self.p2 * x)


class SineActivation(nn.Module):
    """Sines with learnt frequency (Snake, Ziyin et al. 2020) and PReLU by hand."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c1, self.c2, self.a = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(12, 12, 3, padding=1),
            nn.Parameter(torch.ones(12, 1, 1)),
        )
        self.slope, self.head = nn.Parameter(torch.tensor(0.25)), nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.c1(x)
        x = x + torch.sin(self.a * x) ** 2 / (self.a + 1e-9)
        x = self.c2(x)
        return self.head(torch.where(x > 0, x, self.slope * x))


class Involution(nn.Module):
    """Kernels of each place, shared over channels of a group (Li et al. 2021)."""

    def __init__(self, in_channels, out_channels, k=5, groups=2):
        super().__init__()
        self.k, self.groups = k, groups
        self.stem, self.reduce, self.span = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(12, 4, 1),
            nn.Conv2d(4, k * k * groups, 1),
        )
        self.bn, self.unfold, self.head = (
            nn.BatchNorm2d(4),
            nn.Unfold(k, 1, (k - 1) // 2, 1),
            nn.Conv2d(12, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        weight = self.span(F.relu(self.bn(self.reduce(x))))
        b, c, h, w = weight.shape
        weight = weight.view(b, self.groups, self.k**2, h, w).unsqueeze(2)
        out = self.unfold(x).view(b, self.groups, 12 // self.groups, self.k**2, h, w)
        return self.head((weight * out).sum(dim=3).view(b, 12, h, w))


class DynamicFilter(nn.Module):
    """A normalised 3x3 filter at each pixel, applied by nine shifts (Jia et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.filters, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 9, 3, padding=1),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x):
        x = F.relu(self.stem(x))
        f = F.softmax(self.filters(x), dim=1)
        _, _, h, w = x.shape
        padded, out = F.pad(x, (1, 1, 1, 1)), torch.zeros_like(x)
        for i in range(3):
            for j in range(3):
                out += f[:, 3 * i + j].unsqueeze(1) * padded[:, :, i : i + h, j : j + w]
        return self.head(out)


class ModulatedConv(nn.Module):
    """Weights scaled by a style vector and demodulated (StyleGAN2, Karras et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.affine = nn.Conv2d(in_channels, 8, 3, padding=1), nn.Linear(8, 8)
        self.weight, self.head = (
            nn.Parameter(torch.randn(12, 8, 3, 3)),
            nn.Conv2d(12, out_channels, 1),
        )

    def forward(self, x):
        x = F.leaky_relu(self.stem(x), 0.2)
        s = self.affine(x.mean((2, 3))) + 1
        w = self.weight.unsqueeze(0) * s.reshape(x.shape[0], 1, -1, 1, 1)
        dcoefs = (w.square().sum(dim=[2, 3, 4]) + 1e-8).rsqrt()
        y = F.conv2d(x * s[:, :, None, None], self.weight, padding=1)
        return self.head(y * dcoefs[:, :, None, None])


class DropBlock(nn.Module):
    """Squares of features dropped, drawn with torch.rand (Ghiasi et al. 2018)."""

    def __init__(self, in_channels, out_channels, p=0.1, size=3):
        super().__init__()
        self.p, self.size = p, size
        self.c1, self.c2 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )

    def drop(self, x):
        if not self.training:
            return x
        mask = (torch.rand(x.shape[0], *x.shape[2:], device=x.device) < self.p / self.size**2).to(
            x.dtype
        )
        block = 1 - F.max_pool2d(mask[:, None], self.size, stride=1, padding=self.size // 2)
        return x * block * block.numel() / block.sum()

    def forward(self, x):
        return self.c2(self.drop(F.relu(self.c1(x))))


class StochasticDepth(nn.Module):
    """Residual branches of single images dropped, timm's drop_path (Huang et al. 2016)."""

    def __init__(self, in_channels, out_channels, p=0.4):
        super().__init__()
        self.p = p
        self.stem, self.convs, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)),
            nn.Conv2d(8, out_channels, 1),
        )

    def drop_path(self, x):
        keep = 1 - self.p
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        random_tensor = x.new_empty(shape).bernoulli_(keep)
        return x * random_tensor.div_(keep) if self.training else x

    def forward(self, x):
        x = self.stem(x)
        for conv in self.convs:
            x = x + self.drop_path(F.relu(conv(x)))
        return self.head(x)


class DropoutNet(nn.Module):
    """Element, channel and alpha-free dropout in the usual places (Srivastava et al. 2014)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c1, self.c2, self.c3 = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(12, 12, 3, padding=1),
            nn.Conv2d(12, out_channels, 1),
        )
        self.d1, self.d2 = nn.Dropout2d(0.2), nn.Dropout(0.3)

    def forward(self, x):
        x = self.d1(F.relu(self.c1(x)))
        x = F.dropout(F.relu(self.c2(x)), p=0.1, training=self.training)
        return self.c3(self.d2(x))


class SquaredGate(nn.Module):
    """Product of two linear maps without activation.

    Source: MFN; NAFNet's SimpleGate, Chen et al. 2022.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.intro, self.norm = nn.Conv2d(in_channels, 8, 3, padding=1), nn.GroupNorm(1, 8)
        self.c1, self.dw, self.sca, self.c3 = (
            nn.Conv2d(8, 16, 1),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1)),
            nn.Conv2d(8, 8, 1),
        )
        self.beta, self.head = (
            nn.Parameter(torch.ones(1, 8, 1, 1) * 0.1),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )

    def forward(self, inp):
        inp = self.intro(inp)
        x1, x2 = self.dw(self.c1(self.norm(inp))).chunk(2, dim=1)
        x = x1 * x2
        x = self.c3(x * self.sca(x))
        return self.head(inp + x * self.beta)


class KolmogorovArnold(nn.Module):
    """Pixelwise radial basis expansions instead of activations (KAN, Liu et al. 2024)."""

    def __init__(self, in_channels, out_channels, grid=5):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.register_buffer("centres", torch.linspace(-2, 2, grid))
        self.spline = nn.Parameter(torch.randn(out_channels, 8, grid) * 0.1)

    def forward(self, x):
        x = self.conv(x)
        basis = torch.exp(-((x.unsqueeze(-1) - self.centres) ** 2))
        return torch.einsum("bchwg,ocg->bohw", basis, self.spline)
