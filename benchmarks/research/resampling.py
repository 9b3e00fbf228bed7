"""Networks whose idea is how they go to other resolutions and back."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class BlurPool(nn.Module):
    """Anti-aliased downsampling by a fixed binomial filter (Zhang 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        a = torch.tensor([1.0, 2.0, 1.0])
        filt = (a[:, None] * a[None, :]) / 16
        self.register_buffer("filt", filt[None, None].repeat(8, 1, 1, 1))
        self.pad = nn.ReflectionPad2d(1)
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        y = F.relu(self.conv1(x))
        y = F.max_pool2d(y, 2, stride=1)
        y = F.conv2d(self.pad(y), self.filt, stride=2, groups=y.shape[1])
        y = F.relu(self.conv2(y))
        return F.interpolate(self.head(y), x.shape[-2:], mode="bilinear")


class SubPixelHead(nn.Module):
    """Strided encoder with a pixel shuffle to full size (ESPCN, Shi et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.conv3, self.shuffle = (
            nn.Conv2d(16, out_channels * 16, 3, padding=1),
            nn.PixelShuffle(4),
        )

    def forward(self, x):
        y = torch.tanh(self.conv1(x))
        y = torch.tanh(self.conv2(y))
        return self.shuffle(self.conv3(y))[:, :, : x.size(2), : x.size(3)]


class PixelUnshuffleStem(nn.Module):
    """Space to depth in front, depth to space behind (FFDNet, Zhang et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4 * in_channels, 24, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(inplace=True),
            nn.Conv2d(24, 4 * out_channels, 3, padding=1),
        )

    def forward(self, x):
        h, w = x.size()[-2:]
        x = F.pad(x, (0, w % 2, 0, h % 2), mode="replicate")
        x = F.pixel_shuffle(self.body(F.pixel_unshuffle(x, 2)), 2)
        return x[..., :h, :w]


class FocusStem(nn.Module):
    """Four strided slices side by side as the first layer (YOLOv5's Focus)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4 * in_channels, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, out_channels, 2, stride=2)

    def forward(self, x):
        slices = [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]]
        return self.up(F.silu(self.bn(self.conv(torch.cat(slices, 1)))))


class PatchMerging(nn.Module):
    """Swin's patch merging on channels last, norm and linear layer (Liu et al. 2021)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.norm, self.reduction = nn.LayerNorm(32), nn.Linear(32, 16, bias=False)
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        y = self.stem(x).permute(0, 2, 3, 1)
        y = F.pad(y, (0, 0, 0, y.shape[2] % 2, 0, y.shape[1] % 2))
        y0, y1 = y[:, 0::2, 0::2, :], y[:, 1::2, 0::2, :]
        y2, y3 = y[:, 0::2, 1::2, :], y[:, 1::2, 1::2, :]
        y = self.reduction(self.norm(torch.cat([y0, y1, y2, y3], -1)))
        y = self.head(y.permute(0, 3, 1, 2))
        return F.interpolate(y, scale_factor=2, mode="nearest")[:, :, : x.shape[2], : x.shape[3]]


class HaarPool(nn.Module):
    """Haar wavelets as pooling, and their inverse as unpooling (MWCNN, Liu et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.low = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Conv2d(8, out_channels, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        a, b = x[:, :, 0::2, 0::2] / 2, x[:, :, 1::2, 0::2] / 2
        c, d = x[:, :, 0::2, 1::2] / 2, x[:, :, 1::2, 1::2] / 2
        y = torch.cat((a + b + c + d, -a - b + c + d, -a + b - c + d, a - b - c + d), 1)
        ll, lh, hl, hh = F.relu(self.low(y)).chunk(4, 1)
        up = torch.zeros_like(x)
        up[:, :, 0::2, 0::2] = (ll - lh - hl + hh) / 2
        up[:, :, 1::2, 0::2] = (ll - lh + hl - hh) / 2
        up[:, :, 0::2, 1::2] = (ll + lh - hl - hh) / 2
        up[:, :, 1::2, 1::2] = (ll + lh + hl + hh) / 2
        return self.head(x + up)


class CARAFE(nn.Module):
    """Upsampling by kernels that the content predicts (Wang et al. 2019)."""

    def __init__(self, in_channels, out_channels, k=3, scale=2):
        super().__init__()
        self.k, self.scale = k, scale
        self.down = nn.Conv2d(in_channels, 8, 3, stride=2, padding=1)
        self.encoder = nn.Conv2d(8, (scale * k) ** 2, 3, padding=1)
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        y = F.relu(self.down(x))
        n, c, h, w = y.shape
        w_ = F.softmax(F.pixel_shuffle(self.encoder(y), self.scale), dim=1)  # n, k*k, 2h, 2w
        patches = F.unfold(
            F.interpolate(y, scale_factor=self.scale, mode="nearest"),
            self.k,
            dilation=self.scale,
            padding=self.k // 2 * self.scale,
        )
        patches = patches.view(n, c, self.k**2, h * self.scale, w * self.scale)
        out = torch.einsum("nkhw,nckhw->nchw", [w_, patches])
        return self.head(out)[:, :, : x.shape[2], : x.shape[3]]


class SegNetUnpool(nn.Module):
    """Max pooling indices kept for unpooling (SegNet, Badrinarayanan et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc, self.mid = nn.Conv2d(in_channels, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.dec = nn.Conv2d(8, out_channels, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.enc(x))
        y, idx = F.max_pool2d(x, 2, stride=2, return_indices=True)
        y = F.relu(self.bn(self.mid(y)))
        return self.dec(F.max_unpool2d(y, idx, 2, stride=2, output_size=x.size()))


class DySample(nn.Module):
    """Upsampling at points that the content moves (DySample, Liu et al. 2023)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.down, self.offset = (
            nn.Conv2d(in_channels, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 8, 1),
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        y = F.relu(self.down(x))
        offset = F.pixel_shuffle(self.offset(y) * 0.25, 2).permute(0, 2, 3, 1)
        h, w = offset.shape[1:3]
        gy, gx = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack((gx, gy), -1).to(y).unsqueeze(0) + offset / torch.tensor([w, h]).to(y)
        up = F.grid_sample(y, grid, align_corners=True)
        return self.head(up)[:, :, : x.shape[2], : x.shape[3]]


class TransposedOutputPadding(nn.Module):
    """Two transposed convolutions whose output padding restores an odd size (ERFNet's decoder)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(in_channels, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up1, self.up2 = (
            nn.ConvTranspose2d(16, 8, 3, 2, 1),
            nn.ConvTranspose2d(8, out_channels, 3, 2, 1),
        )

    def forward(self, x):
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(a))
        y = F.relu(self.up1(b, output_size=a.size()))
        return self.up2(y, output_size=x.shape[2:])


class AlignCorners(nn.Module):
    """Bilinear upsampling by two with aligned corners, in each of two levels."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c1, self.c2, self.c3 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(16, 8, 3, padding=1),
        )
        self.pool, self.up = (
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        a = F.relu(self.c1(x))
        b = self.up(F.relu(self.c2(self.pool(a))))
        b = b[:, :, : a.size(2), : a.size(3)]
        return self.head(F.relu(self.c3(torch.cat([a, b], 1))))


class ResizeToSkip(nn.Module):
    """ResNet-like strides on any size, decoders resize to the skip's size."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.layer1 = nn.Conv2d(in_channels, 8, 7, 2, 3), nn.Conv2d(8, 16, 3, 2, 1)
        self.layer2, self.dec1, self.dec0 = (
            nn.Conv2d(16, 16, 3, 2, 1),
            nn.Conv2d(32, 8, 3, 1, 1),
            nn.Conv2d(16, 8, 3, 1, 1),
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        c0 = F.relu(self.stem(x))
        c1 = F.relu(self.layer1(F.max_pool2d(c0, 3, 2, 1)))
        c2 = F.relu(self.layer2(c1))

        def up(y, to):
            return F.interpolate(y, size=to.shape[2:], mode="bilinear", align_corners=False)

        d1 = F.relu(self.dec1(torch.cat((up(c2, c1), c1), 1)))
        d0 = F.relu(self.dec0(torch.cat((up(d1, c0), c0), 1)))
        return up(self.head(d0), x)


class ImagePyramid(nn.Module):
    """The image at half and quarter size by interpolate, one shared net, all averaged."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, out_channels, 3, padding=1),
        )

    def forward(self, x):
        outs = [self.net(x)]
        for s in (0.5, 0.25):
            y = F.interpolate(
                x, scale_factor=s, mode="bilinear", align_corners=False, recompute_scale_factor=True
            )
            outs.append(
                F.interpolate(self.net(y), size=x.shape[2:], mode="bilinear", align_corners=False)
            )
        return torch.stack(outs).mean(0)


class LocalImportancePool(nn.Module):
    """Pooling weighted by learnt importance (LIP, Gao et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.logit = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.Sigmoid()
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        y = F.relu(self.stem(x))
        weight = (self.logit(y) * 4).exp()
        y = F.avg_pool2d(y * weight, 3, 2, 1) / F.avg_pool2d(weight, 3, 2, 1)
        return F.interpolate(
            self.head(y), size=(x.shape[2], x.shape[3]), mode="bilinear", align_corners=True
        )


class SoftPool(nn.Module):
    """Pooling weighted by exponentials of the activations (Stergiou et al. 2021)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.conv = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.head = nn.ConvTranspose2d(8, out_channels, 2, 2)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        e = torch.exp(x)
        x = F.avg_pool2d(x.mul(e), (2, 2)).mul_(4).div_(F.avg_pool2d(e, (2, 2)).mul_(4))
        return self.head(torch.tanh(self.conv(x)))


class LaplacianPyramid(nn.Module):
    """Band-pass images of a Laplacian pyramid, each with a net of its own (Ghiasi et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.fine, self.mid, self.coarse = (
            nn.Conv2d(in_channels, out_channels, 3, padding=1) for _ in range(3)
        )

    def forward(self, x):
        half = F.avg_pool2d(x, 2)
        quarter = F.avg_pool2d(half, 2)

        def up(y, like):
            return F.interpolate(y, like.shape[-2:], mode="bilinear", align_corners=False)

        bands = [x - up(half, x), half - up(quarter, half), quarter]
        y = up(self.coarse(bands[2]), half) + self.mid(bands[1])
        return up(y, x) + self.fine(bands[0])


class DataDependentUpsampling(nn.Module):
    """Linear map from a coarse pixel to a block of labels, by view and permute.

    Source: DUpsampling, Tian 2019.
    """

    def __init__(self, in_channels, out_channels, scale=4):
        super().__init__()
        self.scale = scale
        self.encoder = nn.Sequential(
            nn.Conv2d(in_channels, 16, 4, stride=4), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.w = nn.Conv2d(16, out_channels * scale * scale, 1, bias=False)

    def forward(self, x):
        x = self.w(self.encoder(x))
        n, c, h, w = x.size()
        x = x.permute(0, 3, 2, 1).contiguous().view(n, w, h * self.scale, c // self.scale)
        x = (
            x.permute(0, 2, 1, 3)
            .contiguous()
            .view(n, h * self.scale, w * self.scale, c // self.scale**2)
        )
        return x.permute(0, 3, 1, 2)


class BicubicResize(nn.Module):
    """Bicubic upsampling of the logits and area downsampling of the image."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(12, out_channels, 3, padding=1),
        )

    def forward(self, x):
        y = F.interpolate(x, scale_factor=0.5, mode="area")
        y = self.conv2(F.relu(self.conv1(y)))
        return F.interpolate(y, size=x.shape[2:], mode="bicubic", align_corners=False)


class LpPool(nn.Module):
    """Power-average pooling of order two (Sermanet et al. 2012)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(in_channels, 8, 5, padding=2), nn.LPPool2d(2, 3, stride=2)
        self.conv2 = nn.Conv2d(8, out_channels, 3, padding=1)

    def forward(self, x):
        y = self.conv2(self.pool(torch.sigmoid(self.conv1(x))))
        return F.interpolate(y, size=x.shape[2:])


class MixedPool(nn.Module):
    """Learnt mixture of max and average pooling, gated by the pixels (Lee et al. 2016)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )
        self.mask = nn.Parameter(torch.randn(8, 1, 2, 2) * 0.1)

    def forward(self, x):
        y = F.relu(self.conv1(x))
        alpha = torch.sigmoid(F.conv2d(y, self.mask, stride=2, groups=y.size(1)))
        y = alpha * F.max_pool2d(y, 2) + (1 - alpha) * F.avg_pool2d(y, 2)
        return F.interpolate(self.conv2(y), size=list(x.shape[2:]), mode="nearest-exact")


class StyleGANResample(nn.Module):
    """Upsampling by zeros and a fixed FIR filter (upfirdn, Karras et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(in_channels, 8, 3, 2, 1),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )
        k = np.outer([1, 3, 3, 1], [1, 3, 3, 1]).astype(np.float32)
        self.register_buffer("kernel", torch.from_numpy(k / k.sum() * 4))

    def forward(self, x):
        y = F.leaky_relu(self.conv1(x), 0.2)
        n, c, h, w = y.shape
        y = y.reshape(n, c, h, 1, w, 1)
        y = F.pad(y, [0, 1, 0, 0, 0, 1]).reshape(n, c, h * 2, w * 2)
        y = F.pad(y, [2, 1, 2, 1])
        y = F.conv2d(y, self.kernel[None, None].repeat(c, 1, 1, 1), groups=c)
        return self.conv2(y)[:, :, : x.shape[2], : x.shape[3]]
