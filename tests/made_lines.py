"""Networks with lines: statistics of rows or columns of an image, functions of them, and what comes of these at all places again."""

import torch
import torch.nn.functional as F
from torch import nn


class Made(nn.Module):
    """A function of a map of six channels between two convolutions.

    Args:
        function: (module, map) -> map of as many channels.
        dims: of the image.
    """

    def __init__(self, function, in_channels, out_channels, dims=2):
        super().__init__()
        conv, norm = (
            (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1],
            (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1],
        )
        self.stem, self.head = (
            nn.Sequential(conv(in_channels, 6, 3, stride=2, padding=1), nn.Tanh()),
            conv(6, out_channels, 3, padding=1),
        )
        self.less, self.norm, self.more, self.fc = (
            conv(6, 3, 1, bias=False),
            norm(3),
            conv(3, 6, 1),
            nn.Linear(6, 6),
        )
        self.along, self.of_line, self.layer_norm = (
            nn.Conv1d(6, 6, 5, padding=2),
            nn.BatchNorm1d(6),
            nn.LayerNorm(6),
        )
        self.rows, self.columns = (
            nn.Conv2d(6, 6, (3, 1), padding=(1, 0)),
            nn.Conv2d(6, 6, (1, 3), padding=(0, 1)),
        )
        self.function, self.mode = function, ("linear", "bilinear", "trilinear")[dims - 1]

    def forward(self, x):
        y = self.head(self.function(self, self.stem(x)))
        return F.interpolate(y, x.shape[2:], mode=self.mode, align_corners=False)


def coordinates(m, x):
    n, c, h, w = x.size()
    rows, columns = (
        F.adaptive_avg_pool2d(x, (None, 1)),
        F.adaptive_avg_pool2d(x, (1, None)).permute(0, 1, 3, 2),
    )
    y = F.hardswish(m.norm(m.less(torch.cat([rows, columns], dim=2))))
    rows, columns = torch.split(y, [h, w], dim=2)
    return x * m.more(columns.permute(0, 1, 3, 2)).sigmoid() * m.more(rows).sigmoid()


def strips(m, x):
    h, w = x.shape[2:]
    rows = m.rows(F.avg_pool2d(x, (1, w))).expand(-1, -1, h, w)
    columns = F.interpolate(
        m.columns(nn.AdaptiveMaxPool2d((1, None))(x)),
        size=(h, w),
        mode="bilinear",
        align_corners=False,
    )
    return x * torch.sigmoid(m.more(m.less(F.relu(rows + columns))))


def moments(m, x):
    x = x - x.mean(3, keepdim=True) / (1 + x.std(3, keepdim=True))
    x = x / (0.5 + x.var(2, unbiased=False)).unsqueeze(2) + F.normalize(x, dim=2)
    x = x * m.of_line(x.mean(-1))[..., None].sigmoid()
    return (
        x
        + x.sum((1, 2), keepdim=True) / x.shape[2]
        + (x.mean(3, keepdim=True) * x.mean(2, keepdim=True)).tanh()
    )


def extremes(m, x):
    x = x - x.amax(3, keepdim=True) + x.max(2, keepdim=True)[0] * x.amin(2, keepdim=True)
    x = x * x.softmax(3) + x.log_softmax(2) / 9
    rounded = (x * 3).floor() / 3 + x  # of which several are the largest
    return (
        x
        + rounded.clamp(max=0.3).amax(2, keepdim=True)
        + m.fc(x.mean(2).amax(2))[..., None, None] * x.mean(-1).mean(-1)[..., None, None]
    )


def channels_last(m, x):
    x = x.permute(0, 2, 3, 1)
    x = x * m.layer_norm(x.mean(1, keepdim=True)).sigmoid() + m.fc(x.mean(2).flatten(0, 1)).view(
        len(x), -1, 1, 6
    )
    return x.permute(0, 3, 1, 2)


def along(m, x):
    line = m.along(x.mean(3))
    line = line + (torch.bmm(line.transpose(1, 2), line) / 3).softmax(-1).bmm(
        line.transpose(1, 2)
    ).transpose(1, 2)
    x = (
        x
        + line[..., None]
        + line.cumsum(-1)[..., None] / x.shape[2]
        + F.instance_norm(line).unsqueeze(-1)
    )
    both = torch.cat([line, x.amax(2)], -1).sort(-1)[0].softmax(-1)
    return (
        torch.cat([x, both[..., : x.shape[2]].unsqueeze(3).repeat(1, 1, 1, x.shape[3])], 1)[:, ::2]
        + x
    )


def of_volumes(m, x):
    n, c, d, h, w = x.shape
    deep, high = (
        F.adaptive_avg_pool3d(x, (d, 1, 1)).view(n, c, d, 1, 1),
        x.amax((2, 4)).view(n, c, 1, h, 1),
    )
    wide = F.adaptive_avg_pool3d(x, (1, 1, w))
    x = x * torch.sigmoid(m.more(F.relu(m.norm(m.less(deep + high + wide)))))
    return (
        x
        - x.mean(2, keepdim=True)
        + m.fc(x.mean((3, 4)).transpose(1, 2)).transpose(1, 2)[..., None, None]
        + x.logsumexp(4, keepdim=True) / 9
    )


class Gated(nn.Module):
    """A gate from a batch norm of the image's mean: one vector an image."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(in_channels, 5, 3, padding=1), nn.BatchNorm1d(5)
        self.mid, self.head = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, out_channels, 1)

    def forward(self, x):
        y = torch.relu(self.stem(x))
        gate = torch.sigmoid(self.norm(y.mean((2, 3))))
        return self.head(torch.relu(self.mid(y * gate[:, :, None, None])))


def of(function, dims=2):
    return lambda in_channels, out_channels: Made(function, in_channels, out_channels, dims)


FUNCTIONS = dict(
    coordinates=coordinates,
    strips=strips,
    moments=moments,
    extremes=extremes,
    channels_last=channels_last,
    along=along,
)
globals().update({f"with_{name}": of(function) for name, function in FUNCTIONS.items()})
with_volumes = of(of_volumes, 3)
