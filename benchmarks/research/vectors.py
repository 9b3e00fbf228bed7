"""Classifiers: one vector of logits an image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def trunk(cin: int, cout: int) -> nn.Sequential:
    """Return a small strided convolutional trunk."""
    return nn.Sequential(
        nn.Conv2d(cin, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, cout, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class MeanPool(nn.Module):
    """Global mean and a linear layer (network in network, Lin et al. 2014)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.classifier = trunk(in_channels, 16), nn.Linear(16, out_channels)

    def forward(self, x):
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        return self.classifier(x)


class ConcatPool(nn.Module):
    """Mean and maximum concatenated, batch norm and dropout in the head (fastai)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.ap, self.mp = (
            trunk(in_channels, 12),
            nn.AdaptiveAvgPool2d(1),
            nn.AdaptiveMaxPool2d(1),
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(24, 16),
            nn.ReLU(),
            nn.Linear(16, out_channels),
        )

    def forward(self, x):
        x = self.features(x)
        return self.head(torch.cat([self.mp(x), self.ap(x)], 1))


class GeM(nn.Module):
    """Generalised mean with a learnt power (Radenović et al. 2019)."""

    def __init__(self, in_channels, out_channels, eps=1e-6):
        super().__init__()
        self.features, self.p, self.eps, self.fc = (
            trunk(in_channels, 16),
            nn.Parameter(torch.ones(1) * 3),
            eps,
            nn.Linear(16, out_channels),
        )

    def forward(self, x):
        x = self.features(x)
        x = F.avg_pool2d(x.clamp(min=self.eps).pow(self.p), (x.size(-2), x.size(-1))).pow(
            1.0 / self.p
        )
        return self.fc(x.flatten(1))


class LogSumExpPool(nn.Module):
    """Smooth maximum of the class maps (Pinheiro and Collobert 2015)."""

    def __init__(self, in_channels, out_channels, r=4.0):
        super().__init__()
        self.features, self.maps, self.r = trunk(in_channels, 16), nn.Conv2d(16, out_channels, 1), r

    def forward(self, x):
        s = self.maps(self.features(x))
        n = s.shape[-2] * s.shape[-1]
        return (
            torch.logsumexp(self.r * s.flatten(2), dim=-1)
            - torch.log(torch.tensor(float(n), dtype=s.dtype))
        ) / self.r


class TopKPool(nn.Module):
    """Mean of the k largest scores of each class (Kalchbrenner et al. 2014; MIL)."""

    def __init__(self, in_channels, out_channels, k=5):
        super().__init__()
        self.features, self.maps, self.k = trunk(in_channels, 16), nn.Conv2d(16, out_channels, 1), k

    def forward(self, x):
        s = self.maps(self.features(x)).flatten(2)
        return s.topk(self.k, dim=2)[0].mean(dim=2)


class MaxMinPool(nn.Module):
    """Most and least positive regions added (WELDON, Durand et al. 2016)."""

    def __init__(self, in_channels, out_channels, kmax=3, kmin=3, alpha=0.7):
        super().__init__()
        self.features, self.maps, self.kmax, self.kmin, self.alpha = (
            trunk(in_channels, 16),
            nn.Conv2d(16, out_channels, 1),
            kmax,
            kmin,
            alpha,
        )

    def forward(self, x):
        x = self.maps(self.features(x))
        b, c, h, w = x.size()
        ordered, _ = torch.sort(x.view(b, c, h * w), dim=2, descending=True)
        return ordered.narrow(2, 0, self.kmax).mean(2) + ordered.narrow(
            2, h * w - self.kmin, self.kmin
        ).mean(2).mul(self.alpha)


class SpatialPyramid(nn.Module):
    """Maxima of 1, 4 and 16 cells flattened (SPP, He et al. 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.fc = trunk(in_channels, 8), nn.Linear(8 * 21, out_channels)

    def forward(self, x):
        x = self.features(x)
        return self.fc(
            torch.cat([F.adaptive_max_pool2d(x, n).view(x.size(0), -1) for n in (1, 2, 4)], 1)
        )


class BilinearPooling(nn.Module):
    """Outer products summed over places, signed root, normalised (Lin et al. 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.fc = trunk(in_channels, 8), nn.Linear(64, out_channels)

    def forward(self, x):
        x = self.features(x)
        n, c, h, w = x.shape
        x = x.view(n, c, h * w)
        x = torch.bmm(x, torch.transpose(x, 1, 2)) / (h * w)
        x = x.view(n, c * c)
        x = F.normalize(torch.sign(x) * torch.sqrt(torch.abs(x) + 1e-5))
        return self.fc(x)


class CovariancePooling(nn.Module):
    """Covariance with Newton-Schulz square root, upper triangle (iSQRT-COV, Li et al. 2018)."""

    def __init__(self, in_channels, out_channels, c=6):
        super().__init__()
        self.features, self.fc = trunk(in_channels, c), nn.Linear(c * (c + 1) // 2, out_channels)

    def forward(self, x):
        x = self.features(x).flatten(2)
        x = x - x.mean(-1, keepdim=True)
        cov = x @ x.transpose(1, 2) / x.shape[-1]
        c = cov.shape[-1]
        eye = torch.eye(c, dtype=x.dtype, device=x.device)
        trace = cov.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None] + 1e-6
        y, z = cov / trace + 1e-3 * eye, eye.expand_as(cov)
        for _ in range(3):
            t = 0.5 * (3.0 * eye - z.bmm(y))
            y, z = y.bmm(t), t.bmm(z)
        i, j = torch.triu_indices(c, c)
        return self.fc((y * trace.sqrt())[:, i, j])


class NetVLAD(nn.Module):
    """Residuals to soft-assigned centres, summed, normalised twice (Arandjelović et al. 2016)."""

    def __init__(self, in_channels, out_channels, k=4, d=8):
        super().__init__()
        self.features, self.conv, self.centroids = (
            trunk(in_channels, d),
            nn.Conv2d(d, k, 1),
            nn.Parameter(torch.rand(k, d)),
        )
        self.fc = nn.Linear(k * d, out_channels)

    def forward(self, x):
        x = F.normalize(self.features(x), p=2, dim=1)
        n, c = x.shape[:2]
        soft = F.softmax(self.conv(x).view(n, 4, -1), dim=1)
        flat = x.view(n, c, -1)
        residual = flat.expand(4, -1, -1, -1).permute(1, 0, 2, 3) - self.centroids.expand(
            flat.size(-1), -1, -1
        ).permute(1, 2, 0).unsqueeze(0)
        vlad = (residual * soft.unsqueeze(2)).sum(dim=-1)
        vlad = F.normalize(F.normalize(vlad, p=2, dim=2).view(n, -1), p=2, dim=1)
        return self.fc(vlad)


class AttentionMIL(nn.Module):
    """Softmax attention over all places as instances (Ilse et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.attention = (
            trunk(in_channels, 12),
            nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 1)),
        )
        self.classifier = nn.Linear(12, out_channels)

    def forward(self, x):
        h = self.features(x).flatten(2).transpose(1, 2)  # B, N, L
        a = F.softmax(self.attention(h).transpose(2, 1), dim=2)
        return self.classifier(torch.bmm(a, h).squeeze(1))


class GatedMIL(nn.Module):
    """Gated attention, tanh times sigmoid, by 1x1 convolutions and a sum (Ilse et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.v, self.u, self.w = (
            trunk(in_channels, 12),
            nn.Conv2d(12, 6, 1),
            nn.Conv2d(12, 6, 1),
            nn.Conv2d(6, 1, 1),
        )
        self.classifier = nn.Linear(12, out_channels)

    def forward(self, x):
        h = self.features(x)
        a = self.w(torch.tanh(self.v(h)) * torch.sigmoid(self.u(h)))
        a = torch.exp(a - a.amax(dim=(2, 3), keepdim=True))
        a = a / a.sum(dim=(2, 3), keepdim=True)
        return self.classifier((a * h).sum(dim=(2, 3)))


class DualStreamMIL(nn.Module):
    """The critical instance, picked by argmax, attends to all others (DSMIL, Li et al. 2021)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.scores, self.q, self.fc = (
            trunk(in_channels, 8),
            nn.Linear(8, 1),
            nn.Linear(8, 4),
            nn.Linear(8, out_channels),
        )

    def forward(self, x):
        h = self.features(x).flatten(2).permute(0, 2, 1)
        c = self.scores(h)
        m = c.argmax(dim=1, keepdim=True).expand(-1, -1, h.size(2))
        critical = torch.gather(h, 1, m)
        a = torch.softmax(self.q(h) @ self.q(critical).transpose(1, 2) / 2.0, dim=1)
        return self.fc((a * h).sum(1)) + c.amax(1)


class NoisyOr(nn.Module):
    """One less the product of the complements, in logs (noisy-or MIL, Maron 1997)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.maps = trunk(in_channels, 12), nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        logits = self.maps(self.features(x)) - 4.0
        log_none = F.logsigmoid(-logits).sum((-1, -2))
        return torch.log(-torch.expm1(log_none)) - log_none


class SoftArgmax(nn.Module):
    """Expected coordinates of feature maps (spatial softmax, Finn et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.fc = trunk(in_channels, 8), nn.Linear(16, out_channels)

    def forward(self, x):
        x = self.features(x)
        n, c, h, w = x.shape
        pos_y, pos_x = torch.meshgrid(
            torch.linspace(-1.0, 1.0, h, dtype=x.dtype),
            torch.linspace(-1.0, 1.0, w, dtype=x.dtype),
            indexing="ij",
        )
        attention = F.softmax(x.reshape(-1, h * w), dim=-1)
        ex = torch.sum(pos_x.reshape(-1) * attention, dim=1, keepdim=True)
        ey = torch.sum(pos_y.reshape(-1) * attention, dim=1, keepdim=True)
        return self.fc(torch.cat([ex, ey], 1).view(n, c * 2))


class FlattenVGG(nn.Module):
    """Adaptive pool to 7x7, flattened into large linear layers (VGG, Simonyan 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.avgpool = trunk(in_channels, 6), nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(6 * 49, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, out_channels)
        )

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(x.view(x.size(0), -1))


class SoftHistogram(nn.Module):
    """Learnt soft histogram of each channel (Wang et al. 2016; Peeples et al. 2021)."""

    def __init__(self, in_channels, out_channels, bins=5):
        super().__init__()
        self.features, self.centres, self.widths = (
            trunk(in_channels, 6),
            nn.Parameter(torch.linspace(0, 2, bins)),
            nn.Parameter(torch.ones(bins)),
        )
        self.fc = nn.Linear(6 * bins, out_channels)

    def forward(self, x):
        x = self.features(x)
        counts = torch.exp(-((self.widths * (x[..., None] - self.centres)) ** 2))
        counts = counts / counts.sum(-1, keepdim=True)
        return self.fc(counts.mean(dim=(2, 3)).flatten(1))


class MomentPool(nn.Module):
    """Mean, standard deviation, skewness and kurtosis (statistics pooling, x-vectors)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.fc = trunk(in_channels, 8), nn.Linear(32, out_channels)

    def forward(self, x):
        x = self.features(x)
        var, mean = torch.var_mean(x, dim=(2, 3), keepdim=True, unbiased=False)
        z = (x - mean) / torch.sqrt(var + 1e-5)
        moments = [mean, var.sqrt(), z.pow(3).mean((2, 3), True), z.pow(4).mean((2, 3), True)]
        return self.fc(torch.cat(moments, 1).squeeze(-1).squeeze(-1))


class ClassActivation(nn.Module):
    """Mean of class maps weighted by their own softmax over places.

    Source: attention by class, CSRA, Zhu 2021.
    """

    def __init__(self, in_channels, out_channels, lam=0.2):
        super().__init__()
        self.features, self.head, self.lam = (
            trunk(in_channels, 12),
            nn.Conv2d(12, out_channels, 1, bias=False),
            lam,
        )

    def forward(self, x):
        score = self.head(self.features(x)) / torch.norm(
            self.head.weight, dim=1, keepdim=True
        ).transpose(0, 1)
        score = score.flatten(2)
        base_logit = torch.mean(score, dim=2)
        att_logit = torch.sum(score * torch.softmax(score * 2, dim=2), dim=2)
        return base_logit + self.lam * att_logit


class MultiLevelVectors(nn.Module):
    """Pooled vectors of all levels side by side, linear layer behind (deeply pooled features)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(in_channels, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)]
        )
        self.fc = nn.Linear(24, out_channels)

    def forward(self, x):
        vectors = []
        for conv in self.convs:
            x = F.relu(conv(x))
            vectors.append(x.mean(-1).mean(-1))
        return self.fc(F.layer_norm(torch.cat(vectors, dim=-1), (24,)))


class PrototypeClassifier(nn.Module):
    """Smallest distance of any place to each prototype (ProtoPNet, Chen et al. 2019)."""

    def __init__(self, in_channels, out_channels, per_class=3):
        super().__init__()
        self.features, self.prototypes = (
            trunk(in_channels, 8),
            nn.Parameter(torch.rand(out_channels * per_class, 8, 1, 1)),
        )
        self.last = nn.Linear(out_channels * per_class, out_channels, bias=False)

    def forward(self, x):
        x = self.features(x)
        ones = torch.ones_like(self.prototypes)
        x2 = F.conv2d(input=x**2, weight=ones)
        p2 = torch.sum(self.prototypes**2, dim=(1, 2, 3)).view(-1, 1, 1)
        distances = F.relu(x2 - 2 * F.conv2d(x, self.prototypes) + p2)
        smallest = -F.max_pool2d(-distances, kernel_size=(distances.size()[2], distances.size()[3]))
        smallest = smallest.view(-1, self.prototypes.shape[0])
        return self.last(torch.log((smallest + 1) / (smallest + 1e-4)))


class MedianPool(nn.Module):
    """Median over all places of each channel."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.features, self.fc = trunk(in_channels, 8), nn.Linear(8, out_channels)

    def forward(self, x):
        return self.fc(self.features(x).flatten(2).median(dim=-1).values)
