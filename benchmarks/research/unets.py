"""Encoders and decoders with skips of all kinds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DoubleConv(nn.Sequential):
    """Two convolutions with batch norm."""

    def __init__(self, cin, cout):
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
        )


class PadUpUNet(nn.Module):
    """U-Net that pads what it upsampled to the skip's size (milesial's Pytorch-UNet)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.inc, self.down1, self.down2 = (
            DoubleConv(in_channels, 8),
            DoubleConv(8, 16),
            DoubleConv(16, 16),
        )
        self.up1, self.up2 = DoubleConv(32, 8), DoubleConv(16, 8)
        self.up, self.outc = (
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            nn.Conv2d(8, out_channels, 1),
        )

    def join(self, x1, x2):
        x1 = self.up(x1)
        diff_y, diff_x = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return torch.cat([x2, x1], dim=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        y = self.up1(self.join(x3, x2))
        return self.outc(self.up2(self.join(y, x1)))


class ValidUNet(nn.Module):
    """Unpadded convolutions, skips cropped in the middle, mirrored border.

    Source: Ronneberger et al. 2015.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
        )
        self.mid = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.dec = nn.Sequential(nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        h, w = x.shape[2:]
        x = F.pad(x, (8, 8 + w % 2, 8, 8 + h % 2), mode="reflect")
        skip = self.enc(x)
        y = self.up(self.mid(F.max_pool2d(skip, 2)))
        dy, dx = (skip.shape[2] - y.shape[2]) // 2, (skip.shape[3] - y.shape[3]) // 2
        skip = skip[:, :, dy : dy + y.shape[2], dx : dx + y.shape[3]]
        return self.head(self.dec(torch.cat((skip, y), 1)))[:, :, :h, :w]


class AttentionGateUNet(nn.Module):
    """Skips gated by the deeper level (Attention U-Net, Oktay et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc, self.mid = DoubleConv(in_channels, 8), DoubleConv(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.w_g = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
        self.w_x = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
        self.psi = nn.Sequential(nn.Conv2d(4, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())
        self.dec, self.head = DoubleConv(16, 8), nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        skip = self.enc(x)
        g = self.up(self.mid(F.max_pool2d(skip, 2)))
        skip = skip * self.psi(F.relu(self.w_g(g) + self.w_x(skip)))
        return self.head(self.dec(torch.cat((skip, g), dim=1)))


class NestedUNet(nn.Module):
    """Dense nested skips between levels (U-Net++, Zhou et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.x00, self.x10, self.x20 = (
            DoubleConv(in_channels, 8),
            DoubleConv(8, 8),
            DoubleConv(8, 8),
        )
        self.x01, self.x11, self.x02 = DoubleConv(16, 8), DoubleConv(16, 8), DoubleConv(24, 8)
        self.pool, self.up = (
            nn.MaxPool2d(2, 2),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        )
        self.final1, self.final2 = nn.Conv2d(8, out_channels, 1), nn.Conv2d(8, out_channels, 1)

    def forward(self, input):
        x0_0 = self.x00(input)
        x1_0 = self.x10(self.pool(x0_0))
        x0_1 = self.x01(torch.cat([x0_0, self.up(x1_0)], 1))
        x2_0 = self.x20(self.pool(x1_0))
        x1_1 = self.x11(torch.cat([x1_0, self.up(x2_0)], 1))
        x0_2 = self.x02(torch.cat([x0_0, x0_1, self.up(x1_1)], 1))
        return (self.final1(x0_1) + self.final2(x0_2)) / 2


class FullScaleUNet(nn.Module):
    """Each decoder level reads all levels (U-Net 3+, Huang et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.e1, self.e2, self.e3 = DoubleConv(in_channels, 8), DoubleConv(8, 8), DoubleConv(8, 8)
        self.d2, self.d1 = DoubleConv(24, 8), DoubleConv(24, 8)
        self.head = nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        e1 = self.e1(x)
        e2 = self.e2(F.max_pool2d(e1, 2, ceil_mode=True))
        e3 = self.e3(F.max_pool2d(e2, 2, ceil_mode=True))

        def up(y, to):
            return F.interpolate(y, size=to.shape[2:], mode="bilinear")

        d2 = self.d2(torch.cat((F.max_pool2d(e1, 2, 2, ceil_mode=True), e2, up(e3, e2)), 1))
        return self.head(self.d1(torch.cat((e1, up(d2, e1), up(e3, e1)), 1)))


class RecurrentResidualUNet(nn.Module):
    """Convolutions applied thrice with the same weights, in residual blocks.

    Source: R2U-Net, Alom et al. 2018.
    """

    class Recurrent(nn.Module):
        """Convolution that reads its own output again."""

        def __init__(self, ch, t=2):
            super().__init__()
            self.t, self.conv = (
                t,
                nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU()),
            )

        def forward(self, x):
            for i in range(self.t):
                if i == 0:
                    x1 = self.conv(x)
                x1 = self.conv(x + x1)
            return x1

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c1, self.r1 = nn.Conv2d(in_channels, 8, 1), self.Recurrent(8)
        self.c2, self.r2 = nn.Conv2d(8, 8, 1), self.Recurrent(8)
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        x = self.c1(x)
        a = x + self.r1(x)
        y = self.c2(F.max_pool2d(a, 2))
        b = F.interpolate(y + self.r2(y), size=a.shape[2:])
        return self.head(torch.cat([a, b], 1))


class ResUNet(nn.Module):
    """Pre-activated residual units with strided shortcuts (Zhang et al. 2018)."""

    class MicroBatch(nn.Module):
        """Residual unit with a projected shortcut."""

        def __init__(self, cin, cout, stride=1):
            super().__init__()
            self.bn1, self.conv1 = nn.BatchNorm2d(cin), nn.Conv2d(cin, cout, 3, stride, 1)
            self.bn2, self.conv2 = nn.BatchNorm2d(cout), nn.Conv2d(cout, cout, 3, 1, 1)
            self.skip = nn.Conv2d(cin, cout, 1, stride)

        def forward(self, x):
            y = self.conv1(F.relu(self.bn1(x)))
            return self.conv2(F.relu(self.bn2(y))) + self.skip(x)

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.e1, self.e2, self.e3 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            self.MicroBatch(8, 12, 2),
            self.MicroBatch(12, 16, 2),
        )
        self.d2, self.d1, self.head = (
            self.MicroBatch(28, 12),
            self.MicroBatch(20, 8),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x):
        e1 = self.e1(x)
        e2 = self.e2(e1)
        e3 = self.e3(e2)
        d2 = self.d2(torch.cat((F.interpolate(e3, e2.shape[2:]), e2), 1))
        return self.head(self.d1(torch.cat((F.interpolate(d2, e1.shape[2:]), e1), 1)))


class LinkNet(nn.Module):
    """Decoders whose output is added to the encoder's (Chaurasia and Culurciello 2017)."""

    class Decoder(nn.Module):
        """1x1, transposed, 1x1."""

        def __init__(self, cin, cout):
            super().__init__()
            self.c1, self.up = (
                nn.Conv2d(cin, cin // 4, 1),
                nn.ConvTranspose2d(cin // 4, cin // 4, 3, 2, 1, 1),
            )
            self.c2, self.bn = nn.Conv2d(cin // 4, cout, 1), nn.BatchNorm2d(cout)

        def forward(self, x):
            return F.relu(self.bn(self.c2(F.relu(self.up(F.relu(self.c1(x)))))))

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.e1, self.e2 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.Conv2d(16, 16, 3, 2, 1),
        )
        self.d2, self.d1, self.head = (
            self.Decoder(16, 16),
            self.Decoder(16, 8),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x):
        e0 = F.relu(self.stem(x))
        e1 = F.relu(self.e1(e0))
        d2 = self.d2(F.relu(self.e2(e1))) + e1
        return self.head(self.d1(d2) + e0)


class ENetBottleneck(nn.Module):
    """Initial block of conv and pool, zero-padded channels in the shortcut.

    Source: ENet, Paszke et al. 2016.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.init = nn.Conv2d(in_channels, 16 - in_channels, 3, stride=2, padding=1)
        self.c1, self.c2, self.c3 = (
            nn.Conv2d(16, 6, 2, stride=2),
            nn.Conv2d(6, 6, (5, 1), padding=(2, 0)),
            nn.Conv2d(6, 24, 1),
        )
        self.c2b, self.act, self.drop = (
            nn.Conv2d(6, 6, (1, 5), padding=(0, 2)),
            nn.PReLU(),
            nn.Dropout2d(0.1),
        )
        self.head = nn.ConvTranspose2d(24, out_channels, 4, stride=4)

    def forward(self, x):
        x = self.act(torch.cat([self.init(x), F.max_pool2d(x, 2, stride=2)], 1))
        main = F.max_pool2d(x, 2)
        n, ch, h, w = main.size()
        padding = torch.zeros(n, 24 - ch, h, w, dtype=x.dtype, device=x.device)
        main = torch.cat((main, padding), 1)
        ext = self.drop(self.c3(self.c2b(self.c2(self.act(self.c1(x))))))
        return self.head(self.act(main + ext))


class Tiramisu(nn.Module):
    """Dense blocks down and up (FC-DenseNet, Jégou et al. 2017)."""

    class Dense(nn.ModuleList):
        """Layers that see all before them; returns only the new features where ``new``."""

        def __init__(self, cin, growth, n, new=False):
            super().__init__(
                nn.Sequential(
                    nn.BatchNorm2d(cin + i * growth),
                    nn.ReLU(),
                    nn.Conv2d(cin + i * growth, growth, 3, padding=1),
                    nn.Dropout2d(0.2),
                )
                for i in range(n)
            )
            self.new = new

        def forward(self, x):
            found = []
            for layer in self:
                out = layer(x)
                x = torch.cat([x, out], 1)
                found.append(out)
            return torch.cat(found, 1) if self.new else x

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.d1, self.td = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            self.Dense(8, 4, 2),
            nn.Conv2d(16, 16, 1),
        )
        self.mid, self.tu = self.Dense(16, 4, 2, new=True), nn.ConvTranspose2d(8, 8, 3, stride=2)
        self.u1, self.head = self.Dense(24, 4, 2), nn.Conv2d(32, out_channels, 1)

    def forward(self, x):
        skip = self.d1(self.stem(x))
        y = self.tu(self.mid(F.max_pool2d(self.td(skip), 2)))
        dy, dx = (y.size(2) - skip.size(2)) // 2, (y.size(3) - skip.size(3)) // 2
        y = y[:, :, dy : dy + skip.size(2), dx : dx + skip.size(3)]
        return self.head(self.u1(torch.cat([y, skip], 1)))


class MultiResUNet(nn.Module):
    """3x3, 5x5, 7x7 as chained convolutions, residual path on the skip.

    Source: Ibtehaz and Rahman 2020.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(in_channels, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.short, self.bn = nn.Conv2d(in_channels, 12, 1), nn.BatchNorm2d(12)
        self.path3, self.path1 = nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(12, 12, 1)
        self.mid, self.up, self.head = (
            DoubleConv(12, 16),
            nn.ConvTranspose2d(16, 12, 2, 2),
            nn.Conv2d(24, out_channels, 1),
        )

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.b(a))
        y = F.relu(self.bn(self.short(x) + torch.cat([a, b, F.relu(self.c(b))], axis=1)))
        skip = F.relu(self.path3(y) + self.path1(y))
        return self.head(torch.cat([self.up(self.mid(F.max_pool2d(y, (2, 2)))), skip], axis=1))


class NestedUStage(nn.Module):
    """A U inside a block, dilated at the bottom, with residual (RSU of U2-Net, Qin et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()

        def rebn(i, o, d=1):
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=d, dilation=d), nn.BatchNorm2d(o), nn.ReLU(True)
            )

        self.convin, self.c1, self.c2, self.c3, self.c4 = (
            rebn(in_channels, 12),
            rebn(12, 6),
            rebn(6, 6),
            rebn(6, 6),
            rebn(6, 6, 2),
        )
        self.c3d, self.c2d, self.c1d = rebn(12, 6), rebn(12, 6), rebn(12, 12)
        self.pool, self.side = (
            nn.MaxPool2d(2, stride=2, ceil_mode=True),
            nn.Conv2d(12, out_channels, 3, padding=1),
        )

    def forward(self, x):
        hxin = self.convin(x)
        hx1 = self.c1(hxin)
        hx2 = self.c2(self.pool(hx1))
        hx3 = self.c3(self.pool(hx2))
        hx3d = self.c3d(torch.cat((self.c4(hx3), hx3), 1))
        hx3dup = F.interpolate(hx3d, size=hx2.shape[2:], mode="bilinear")
        hx2d = self.c2d(torch.cat((hx3dup, hx2), 1))
        hx2dup = F.interpolate(hx2d, size=hx1.shape[2:], mode="bilinear")
        return self.side(self.c1d(torch.cat((hx2dup, hx1), 1)) + hxin)


class WNet(nn.Module):
    """Two U-Nets in a row, the second reads the image and the first's softmax.

    Source: Xia and Kulis 2017.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.enc1, self.dec1 = DoubleConv(in_channels, 8), nn.Conv2d(8, out_channels, 3, padding=1)
        self.enc2, self.dec2 = (
            DoubleConv(in_channels + out_channels, 8),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )

    def once(self, x, enc, dec):
        y = enc(F.avg_pool2d(x, 2))
        return dec(F.interpolate(y, x.shape[2:], mode="bilinear", align_corners=False))

    def forward(self, x):
        first = F.softmax(self.once(x, self.enc1, self.dec1), dim=1)
        return self.once(torch.cat([x, first], 1), self.enc2, self.dec2)


class StackedHourglass(nn.Module):
    """Two hourglasses by recursion, predictions fed back between them (Newell et al. 2016)."""

    class Hourglass(nn.Module):
        """Recursive level."""

        def __init__(self, depth, ch):
            super().__init__()
            self.up1, self.low1, self.low3 = (nn.Conv2d(ch, ch, 3, padding=1) for _ in range(3))
            self.low2 = type(self)(depth - 1, ch) if depth > 1 else nn.Conv2d(ch, ch, 3, padding=1)

        def forward(self, x):
            low = F.relu(self.low1(F.max_pool2d(x, 2)))
            low = F.relu(self.low3(self.low2(low)))
            return F.relu(self.up1(x)) + F.interpolate(low, scale_factor=2)

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.pre, self.hgs = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.ModuleList(self.Hourglass(2, 8) for _ in range(2)),
        )
        self.outs, self.back = (
            nn.ModuleList(nn.Conv2d(8, out_channels, 1) for _ in range(2)),
            nn.Conv2d(out_channels, 8, 1),
        )

    def forward(self, x):
        x = self.pre(x)
        preds = []
        for hg, out in zip(self.hgs, self.outs):
            y = hg(x)
            preds.append(out(y))
            x = x + y + self.back(preds[-1])
        return torch.stack(preds, 1).mean(1)


class OvercompleteUNet(nn.Module):
    """A branch that goes up before it comes down (KiU-Net, Valanarasu et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.up1, self.down1 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.e1, self.e2, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x):
        ki = F.relu(F.interpolate(self.up1(x), scale_factor=(2, 2), mode="bilinear"))
        ki = F.relu(F.max_pool2d(self.down1(ki), 2, 2))
        u = F.relu(F.max_pool2d(self.e1(x), 2, 2))
        u = F.interpolate(F.relu(self.e2(u)), size=ki.shape[2:], mode="bilinear")
        return self.head(torch.add(ki, u))


class SideOutputs(nn.Module):
    """Side logits of all levels, resized and fused by a 1x1 convolution (HED, Xie and Tu 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(in_channels, 8, 3, padding=1),
                nn.Conv2d(8, 8, 3, padding=1),
                nn.Conv2d(8, 8, 3, padding=1),
            ]
        )
        self.sides = nn.ModuleList(nn.Conv2d(8, out_channels, 1) for _ in range(3))
        self.fuse = nn.Conv2d(3 * out_channels, out_channels, 1)

    def forward(self, x):
        h, w = x.shape[-2:]
        sides = []
        for i, (conv, side) in enumerate(zip(self.convs, self.sides)):
            x = F.relu(conv(x if i == 0 else F.max_pool2d(x, 2)))
            sides.append(F.interpolate(side(x), size=(h, w), mode="bilinear", align_corners=False))
        return self.fuse(torch.cat(sides, dim=1))


class PaddedToMultiple(nn.Module):
    """Any size padded to a multiple of 8 in forward, cropped at the end.

    Source: as in restoration nets.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.encs = nn.ModuleList([DoubleConv(in_channels, 8), DoubleConv(8, 8), DoubleConv(8, 8)])
        self.decs, self.head = (
            nn.ModuleList([DoubleConv(16, 8), DoubleConv(16, 8)]),
            nn.Conv2d(8, out_channels, 1),
        )

    def check_image_size(self, x):
        _, _, h, w = x.size()
        return F.pad(x, (0, (8 - w % 8) % 8, 0, (8 - h % 8) % 8), "reflect")

    def forward(self, x):
        h, w = x.shape[2:]
        x, skips = self.check_image_size(x), []
        for enc in self.encs:
            x = enc(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.interpolate(x, scale_factor=2) + skips.pop()
        for dec in self.decs:
            x = dec(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)[:, :, :h, :w]
