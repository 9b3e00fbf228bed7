"""Networks that gather context at several scales and fuse it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def cbr(cin: int, cout: int, k: int = 3, s: int = 1, d: int = 1) -> nn.Sequential:
    """Return convolution, batch norm and ReLU."""
    conv = nn.Conv2d(cin, cout, k, s, d * (k // 2), d, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


def resize(x, like):
    """Return ``x`` at the resolution of ``like``, bilinearly."""
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)


class PyramidPooling(nn.Module):
    """Adaptive pools to 1, 2, 3 and 6 cells, resized and concatenated.

    Source: PSPNet, Zhao et al. 2017.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = cbr(in_channels, 12, s=2)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(b), nn.Conv2d(12, 3, 1), nn.ReLU())
            for b in (1, 2, 3, 6)
        )
        self.head = nn.Conv2d(24, out_channels, 3, padding=1)

    def forward(self, x):
        y = self.stem(x)
        h, w = y.size(2), y.size(3)
        priors = [
            F.interpolate(s(y), size=(h, w), mode="bilinear", align_corners=True)
            for s in self.stages
        ]
        return resize(self.head(torch.cat(priors + [y], 1)), x)


class ASPP(nn.Module):
    """Parallel dilated convolutions and an image pool (DeepLabV3, Chen et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = cbr(in_channels, 12, s=2)
        self.branches = nn.ModuleList([cbr(12, 6, 1)] + [cbr(12, 6, d=d) for d in (3, 6, 9)])
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), cbr(12, 6, 1))
        self.head = nn.Conv2d(30, out_channels, 1)

    def forward(self, x):
        y = self.stem(x)
        res = [b(y) for b in self.branches]
        res.append(
            F.interpolate(self.pool(y), size=y.shape[-2:], mode="bilinear", align_corners=False)
        )
        return resize(self.head(torch.cat(res, dim=1)), x)


class DenseASPP(nn.Module):
    """Dilated convolutions, each fed with all before it (Yang et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = cbr(in_channels, 12)
        self.layers = nn.ModuleList(cbr(12 + 4 * i, 4, d=d) for i, d in enumerate((2, 3, 5, 7)))
        self.head = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(28, out_channels, 1))

    def forward(self, x):
        feature = self.stem(x)
        for layer in self.layers:
            feature = torch.cat((layer(feature), feature), dim=1)
        return self.head(feature)


class StripPooling(nn.Module):
    """Means of whole rows and columns, filtered along themselves (Hou et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = cbr(in_channels, 12)
        self.conv_h, self.conv_w = (
            nn.Conv2d(12, 12, (3, 1), padding=(1, 0)),
            nn.Conv2d(12, 12, (1, 3), padding=(0, 1)),
        )
        self.fuse, self.head = nn.Conv2d(12, 12, 1), nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        _, _, h, w = x.size()
        rows = self.conv_h(F.adaptive_avg_pool2d(x, (h, 1))).expand(-1, -1, h, w)
        cols = self.conv_w(F.adaptive_avg_pool2d(x, (1, w))).expand(-1, -1, h, w)
        return self.head(x * torch.sigmoid(self.fuse(F.relu(rows + cols))))


class HybridDilation(nn.Module):
    """Residual blocks with dilations 1, 2, 5, free of gridding (HDC, Wang et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = cbr(in_channels, 12)
        self.blocks = nn.ModuleList(cbr(12, 12, d=d) for d in (1, 2, 5, 1, 2, 5))
        self.head = nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class DilatedResidual(nn.Module):
    """Strided stem, dilated blocks, and a degridding tail without residuals.

    Source: DRN, Yu et al. 2017.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.b1, self.b2 = cbr(in_channels, 12, 7, 2), cbr(12, 12, d=2), cbr(12, 12, d=4)
        self.degrid = nn.Sequential(cbr(12, 12, d=2), cbr(12, 12))
        self.head, self.up = (
            nn.Conv2d(12, out_channels, 1),
            nn.ConvTranspose2d(
                out_channels, out_channels, 4, 2, 1, groups=out_channels, bias=False
            ),
        )

    def forward(self, x):
        y = self.stem(x)
        y = y + self.b1(y)
        y = y + self.b2(y)
        return self.up(self.head(self.degrid(y)))[:, :, : x.shape[2], : x.shape[3]]


class EfficientSpatialPyramid(nn.Module):
    """Reduce, split, dilate, hierarchically add, concatenate (ESPNet, Mehta et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.reduce = cbr(in_channels, 16), nn.Conv2d(16, 4, 1)
        self.dilated = nn.ModuleList(
            nn.Conv2d(4, 4, 3, padding=d, dilation=d) for d in (1, 2, 4, 8)
        )
        self.bn, self.act, self.head = (
            nn.BatchNorm2d(16),
            nn.PReLU(16),
            nn.Conv2d(16, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        y = self.reduce(x)
        outs = [conv(y) for conv in self.dilated]
        for i in range(1, len(outs)):
            outs[i] = outs[i] + outs[i - 1]
        return self.head(self.act(self.bn(torch.cat(outs, 1) + x)))


class Inception(nn.Module):
    """1x1, 3x3, 5x5 and pooled branches (GoogLeNet, Szegedy et al. 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.b1, self.b3 = (
            nn.Conv2d(in_channels, 4, 1),
            nn.Sequential(nn.Conv2d(in_channels, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1)),
        )
        self.b5 = nn.Sequential(
            nn.Conv2d(in_channels, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 5, padding=2)
        )
        self.bp = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(in_channels, 4, 1))
        self.head = nn.Conv2d(20, out_channels, 1)

    def forward(self, x):
        return self.head(F.relu(torch.cat([self.b1(x), self.b3(x), self.b5(x), self.bp(x)], 1)))


class Res2Net(nn.Module):
    """Hierarchical residual connections between channel splits (Gao et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.convs = cbr(in_channels, 16), nn.ModuleList(cbr(4, 4) for _ in range(3))
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        xs = torch.chunk(x, 4, 1)
        ys = [xs[0]]
        for s in range(1, 4):
            ys.append(self.convs[s - 1](xs[s] if s == 1 else xs[s] + ys[-1]))
        return self.head(torch.cat(ys, 1) + x)


class Hypercolumns(nn.Module):
    """Features of all levels resized and concatenated per pixel (Hariharan et al. 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.blocks = nn.ModuleList(
            [cbr(in_channels, 8), cbr(8, 8, s=2), cbr(8, 8, s=2), cbr(8, 8, s=2)]
        )
        self.head = nn.Sequential(nn.Conv2d(32, 16, 1), nn.ReLU(), nn.Conv2d(16, out_channels, 1))

    def forward(self, x):
        size, columns = x.shape[2:], []
        for block in self.blocks:
            x = block(x)
            columns.append(F.interpolate(x, size, mode="bilinear", align_corners=True))
        return self.head(torch.cat(columns, 1))


class FeaturePyramid(nn.Module):
    """Lateral 1x1 convolutions and a top-down path by nearest upsampling (FPN, Lin et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c2, self.c3, self.c4 = cbr(in_channels, 8, s=2), cbr(8, 12, s=2), cbr(12, 16, s=2)
        self.l2, self.l3, self.l4 = nn.Conv2d(8, 8, 1), nn.Conv2d(12, 8, 1), nn.Conv2d(16, 8, 1)
        self.smooth, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, out_channels, 1)

    def _upsample_add(self, x, y):
        _, _, h, w = y.size()
        return F.interpolate(x, size=(h, w), mode="nearest") + y

    def forward(self, x):
        c2 = self.c2(x)
        c3 = self.c3(c2)
        p4 = self.l4(self.c4(c3))
        p3 = self._upsample_add(p4, self.l3(c3))
        p2 = self.smooth(self._upsample_add(p3, self.l2(c2)))
        return resize(self.head(p2), x)


class BiFPN(nn.Module):
    """Fast normalised fusion of a pyramid, down and up again (EfficientDet, Tan et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.p1, self.p2, self.p3 = cbr(in_channels, 8), cbr(8, 8, s=2), cbr(8, 8, s=2)
        self.w_td, self.w_out = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(4))
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        p1 = self.p1(x)
        p2 = self.p2(p1)
        p3 = self.p3(p2)
        w = F.relu(self.w_td)
        w = w / (w.sum(dim=1, keepdim=True) + 1e-4)
        t2 = self.convs[0](F.silu(w[0, 0] * p2 + w[0, 1] * F.interpolate(p3, p2.shape[2:])))
        o1 = self.convs[1](F.silu(w[1, 0] * p1 + w[1, 1] * F.interpolate(t2, p1.shape[2:])))
        w = F.relu(self.w_out)
        w = w / (w.sum(dim=1, keepdim=True) + 1e-4)
        o2 = self.convs[2](
            F.silu(w[0, 0] * p2 + w[0, 1] * t2 + w[0, 2] * F.max_pool2d(o1, 3, 2, 1))
        )
        o3 = self.convs[3](
            F.silu(w[1, 0] * p3 + w[1, 1] * F.max_pool2d(o2, 3, 2, 1) + w[1, 2] * p3)
        )
        return self.head(o1 + resize(o2, o1) + resize(o3, o1))


class HighResolution(nn.Module):
    """Two parallel resolutions that exchange after each stage (HRNet, Sun et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.high, self.low = cbr(in_channels, 8), cbr(8, 16, s=2)
        self.high2, self.low2 = cbr(8, 8), cbr(16, 16)
        self.to_low, self.to_high = nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 8, 1)
        self.head = nn.Conv2d(24, out_channels, 1)

    def forward(self, x):
        h = self.high(x)
        l = self.low(h)
        h, l = self.high2(h), self.low2(l)
        h, l = F.relu(h + resize(self.to_high(l), h)), F.relu(l + self.to_low(h))
        return self.head(torch.cat([h, resize(l, h)], 1))


class FastSpatialPyramid(nn.Module):
    """One max pool applied three times in a row, all kept (YOLOv5's SPPF)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.cv1, self.m = cbr(in_channels, 8, 1), nn.MaxPool2d(kernel_size=5, stride=1, padding=2)
        self.cv2 = nn.Conv2d(32, out_channels, 1)

    def forward(self, x):
        x = self.cv1(x)
        y1 = self.m(x)
        y2 = self.m(y1)
        return self.cv2(torch.cat((x, y1, y2, self.m(y2)), 1))


class GlobalConvolution(nn.Module):
    """k x 1 and 1 x k convolutions in both orders (GCN, Peng et al. 2017)."""

    def __init__(self, in_channels, out_channels, k=9):
        super().__init__()
        p = k // 2
        self.l1, self.l2 = (
            nn.Conv2d(in_channels, 8, (k, 1), padding=(p, 0)),
            nn.Conv2d(8, 8, (1, k), padding=(0, p)),
        )
        self.r1, self.r2 = (
            nn.Conv2d(in_channels, 8, (1, k), padding=(0, p)),
            nn.Conv2d(8, 8, (k, 1), padding=(p, 0)),
        )
        self.b1, self.b2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.l2(self.l1(x)) + self.r2(self.r1(x))
        return self.head(x + self.b2(F.relu(self.b1(x))))


class LargeKernelAttention(nn.Module):
    """Depthwise, depthwise dilated and pointwise convolutions as a gate (VAN, Guo et al. 2022)."""

    def __init__(self, in_channels, out_channels, dim=12):
        super().__init__()
        self.stem = cbr(in_channels, dim)
        self.conv0 = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.conv_spatial = nn.Conv2d(dim, dim, 7, stride=1, padding=9, groups=dim, dilation=3)
        self.conv1, self.head = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        u = x.clone()
        return self.head(u * self.conv1(self.conv_spatial(self.conv0(x))))


class ParseNet(nn.Module):
    """Global mean unpooled beside L2-normalised features (Liu et al. 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = cbr(in_channels, 12)
        self.scale = nn.Parameter(torch.full((1, 24, 1, 1), 10.0))
        self.head = nn.Conv2d(24, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        context = F.avg_pool2d(x, kernel_size=x.size()[2:])
        context = F.normalize(context, p=2, dim=1).repeat(1, 1, x.size(2), x.size(3))
        return self.head(torch.cat([F.normalize(x, p=2, dim=1), context], 1) * self.scale)


class ContextEncoding(nn.Module):
    """Residuals to codewords summed over all places give channel gates.

    Source: EncNet, Zhang et al. 2018.
    """

    def __init__(self, in_channels, out_channels, k=4):
        super().__init__()
        self.stem = cbr(in_channels, 8)
        self.codewords, self.scale = (
            nn.Parameter(torch.rand(k, 8) - 0.5),
            nn.Parameter(torch.rand(k) - 1),
        )
        self.fc, self.head = nn.Linear(8, 8), nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        b, d = x.shape[:2]
        t = x.view(b, d, -1).transpose(1, 2).contiguous()  # B, N, D
        residual = t.unsqueeze(2) - self.codewords  # B, N, K, D
        a = F.softmax(self.scale * residual.pow(2).sum(3), dim=2)
        e = (a.unsqueeze(3) * residual).sum(1) / t.shape[1]
        gate = torch.sigmoid(self.fc(F.relu(e).mean(1)))
        return self.head(F.relu(x + x * gate.view(b, d, 1, 1)))


class ObjectContext(nn.Module):
    """Soft object regions pooled over places, attended by each pixel (OCR, Yuan et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.aux = cbr(in_channels, 8), nn.Conv2d(8, 4, 1)
        self.query, self.key, self.value = (
            nn.Conv2d(8, 8, 1),
            nn.Conv1d(8, 8, 1),
            nn.Conv1d(8, 8, 1),
        )
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        n, c, h, w = x.shape
        probs = F.softmax(self.aux(x).view(n, 4, -1), dim=2)
        regions = torch.matmul(probs, x.view(n, c, -1).permute(0, 2, 1)).permute(0, 2, 1)  # n c k
        q, k, v = (
            self.query(x).view(n, 8, -1).permute(0, 2, 1),
            self.key(regions),
            self.value(regions),
        )
        sim = F.softmax(torch.matmul(q, k) * 8**-0.5, dim=-1)  # n hw k
        context = torch.matmul(sim, v.permute(0, 2, 1)).permute(0, 2, 1).reshape(n, 8, h, w)
        return self.head(torch.cat([context, x], dim=1))


class ReceptiveFieldBlock(nn.Module):
    """Kernels with dilations as large as themselves, scaled shortcut (RFB, Liu et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = cbr(in_channels, 12)
        self.b0 = nn.Sequential(cbr(12, 6, 1), cbr(6, 6, 3, d=1))
        self.b1 = nn.Sequential(cbr(12, 6, (3)), cbr(6, 6, 3, d=3))
        self.b2 = nn.Sequential(cbr(12, 6, 5), cbr(6, 6, 3, d=5))
        self.linear, self.head = nn.Conv2d(18, 12, 1), nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        out = torch.cat((self.b0(x), self.b1(x), self.b2(x)), 1)
        return self.head(F.relu(self.linear(out) * 0.1 + x, inplace=False))


class JointPyramidUpsampling(nn.Module):
    """Three levels brought to one, then dilated branches instead of strides.

    Source: FastFCN, Wu et al. 2019.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c3, self.c4, self.c5 = cbr(in_channels, 8, s=2), cbr(8, 8, s=2), cbr(8, 8, s=2)
        self.dilations = nn.ModuleList(
            nn.Conv2d(24, 8, 3, padding=d, dilation=d, groups=8) for d in (1, 2, 4)
        )
        self.head = nn.Conv2d(24, out_channels, 1)

    def forward(self, x):
        feats = [self.c3(x)]
        feats.append(self.c4(feats[-1]))
        feats.append(self.c5(feats[-1]))
        _, _, h, w = feats[0].size()
        feats[1:] = [
            F.interpolate(f, (h, w), mode="bilinear", align_corners=True) for f in feats[1:]
        ]
        feat = torch.cat(feats, dim=1)
        feat = torch.cat([d(feat) for d in self.dilations], dim=1)
        return F.interpolate(self.head(feat), x.size()[2:], mode="bilinear", align_corners=True)
