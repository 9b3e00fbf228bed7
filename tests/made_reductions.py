"""Networks that take statistics of the image and compute with them, and with numbers made of its size."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Made(nn.Module):
    """A function of a map of six channels between two convolutions.

    Args:
        function: (module, map) -> map of as many channels.
    """

    def __init__(self, function, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, 6, 3, stride=2, padding=1), nn.Tanh())
        self.vector, self.fc, self.head = (
            nn.Parameter(torch.rand(6)),
            nn.Linear(6, 6),
            nn.Conv2d(6, out_channels, 3, padding=1),
        )
        self.kernels, self.each = (
            nn.Parameter(torch.randn(6, 6, 3, 3) / 9),
            nn.Parameter(torch.randn(3, 3) / 9),
        )
        self.function = function

    def forward(self, x):
        y = self.head(self.function(self, self.stem(x)))
        return F.interpolate(y, x.shape[2:], mode="bilinear", align_corners=False)


def numbers(m, x):
    n, c, h, w = x.shape
    y = (
        x
        + x.sum((2, 3), keepdim=True) / (h * w)
        + (x.flatten(2).sum(-1) / x.shape[2] / x.shape[3]).view(n, c, 1, 1)
    )
    d = (y - y.mean((2, 3), keepdim=True)).pow(2)
    y = y * torch.sigmoid(d / (4 * (d.sum((2, 3), keepdim=True) / (h * w - 1) + 1e-4)) + 0.5)
    gram = torch.bmm(y.flatten(2), y.flatten(2).transpose(1, 2)) / math.sqrt(h * w)
    y = y + gram.mean(-1).view(n, c, 1, 1) * (1.0 / (x.numel() // n))
    y = (
        y
        - (
            torch.logsumexp(3 * x.flatten(2), dim=-1)
            - torch.log(torch.tensor(float(h * w), dtype=x.dtype))
        ).view(n, c, 1, 1)
        / 3
    )
    y = (
        y
        + (x.flatten(2).logsumexp(2) - math.log(h * w))[:, :, None, None]
        * m.vector.view(1, -1, 1, 1)
        / h**0.5
    )
    return y * (1 - 1 / (2.0 * h)) + (w - 1) / w * x


def numpy_words(m, x):
    y = x - x.mean(axis=(2, 3), keepdims=True)
    y = y / y.std(axis=1, keepdims=True).add(1)
    v = (
        x.flatten(start_dim=2).sum(axis=-1).unsqueeze(dim=-1).unsqueeze(dim=-1)
        / x.shape[2:].numel()
    )
    y = torch.concatenate([y, y * v], axis=1).unflatten(dim=1, sizes=(2, 6)).sum(axis=1)
    a, b = y.permute(dims=(0, 2, 3, 1)).split(split_size=3, dim=-1)
    return (
        torch.stack([a, b], axis=-1).flatten(start_dim=3).permute(0, 3, 1, 2)
        + v.squeeze(dim=-1)[..., None]
    )


def ranked(m, x):
    flat = x.flatten(2)
    y = (
        x
        + flat.topk(5, dim=2)[0].mean(2)[:, :, None, None]
        - flat.topk(k=3, dim=-1, largest=False).values.flatten(1).mean(1).view(-1, 1, 1, 1)
    )
    tokens = flat.transpose(1, 2)
    y = y * m.fc(tokens.topk(4, dim=1).values).mean(1)[..., None, None]
    y = y + flat.relu().kthvalue(2, dim=2)[0][..., None, None]
    return (
        y + (x.relu() * 0.5).round().flatten(2).topk(7)[0].sum(2)[..., None, None]
    )  # many equal ones


def statistics(m, x):
    n, c, h, w = x.shape
    y = x / (
        x.norm(3, dim=(2, 3), keepdim=True) + x.flatten(2).norm(float("-inf"), -1)[..., None, None]
    ) + F.layer_norm(x.flatten(2), (h * w,)).view_as(x)
    y = (
        y
        + F.lp_pool2d(x, 2, x.shape[2:])
        + x / (torch.count_nonzero(x > 0, dim=(2, 3)) + 1)[..., None, None]
    )
    least, most = torch.aminmax(x.flatten(2), dim=2)
    y = y * (most - least).view(n, c, 1, 1) + x.flatten(1).max(1)[0].view(-1, 1, 1, 1) * (
        x > 0.9
    ).flatten(2).any(-1)[..., None, None] * (x < 2).flatten(2).all(2).view(n, c, 1, 1)
    y = y + x * F.layer_norm(x.view(n, 3, 2, h, w), (2, h, w)).view_as(x)
    return y + x * (F.normalize(x.flatten(1), dim=1) * (h * w)).view_as(x)


def of_vectors(m, x):
    v, u = x.mean((2, 3)), x.amax((2, 3))
    y = (
        x * F.pairwise_distance(v, u).view(-1, 1, 1, 1)
        + m.fc.weight[v.argmax(1)][..., None, None]
        * F.bilinear(v, u, m.kernels.flatten(2)[..., :6])[..., None, None]
    )
    i = torch.triu_indices(6, 6, offset=4)
    y = (
        y
        + torch.bmm(v.unsqueeze(2), u.unsqueeze(1))[:, i[0], i[1]].sum(1).view(-1, 1, 1, 1)
        + x.gather(1, v.argsort(dim=1)[..., None, None].expand_as(x))
    )
    return (
        y
        + torch.tensordot(x, m.vector.view(6, 1), dims=([1], [0])).permute(0, 3, 1, 2)
        + torch.tensordot(v, m.each.repeat(2, 2), 1)[..., None, None]
    )


def image_weights(m, x):
    n, c, h, w = x.shape
    s = m.fc(x.mean((2, 3)))
    kernels = s.view(n, 1, c, 1, 1) * m.kernels
    kernels = kernels * (kernels.square().sum([2, 3, 4]) + 1e-8).rsqrt().view(n, 6, 1, 1, 1)
    y = F.conv2d(
        x.reshape(1, n * c, h, w), kernels.reshape(n * 6, c, 3, 3), padding=1, groups=n
    ).view(n, 6, h, w)
    each = F.conv2d(
        y.view(1, -1, h, w),
        s.view(n * c, 1, 1, 1) * m.each,
        s.flatten(),
        padding="same",
        dilation=2,
        groups=n * c,
    )
    y = y + each.view(n, c, h, w)
    low = F.conv2d(
        y.reshape(1, n * c, h, w),
        kernels[:, :, ::2].reshape(-1, 3, 3, 3),
        stride=(2, 1),
        padding=(1, 1),
        groups=2 * n,
    )
    return y * F.interpolate(low.reshape(n, -1, *low.shape[2:]), size=(h, w))


def experts(m, x):
    gates = m.fc(x.mean((2, 3))).softmax(-1)
    value, index = gates.max(dim=-1)
    mask = F.one_hot(index, gates.size(-1)).to(x.dtype) * value[:, None]
    best = torch.zeros_like(gates).scatter(1, gates.topk(2, dim=1)[1], 1.0) * gates
    return (
        x * mask[:, :, None, None]
        + x * best[..., None, None]
        + x * gates.median(1, keepdim=True)[0][..., None, None]
    )


def of_fewer_places(m, x):
    low = F.conv2d(x, m.kernels[:, :, :, :2].tanh(), stride=2)
    return x * m.fc(low.mean((2, 3)))[..., None, None]


def of(function):
    return lambda in_channels, out_channels: Made(function, in_channels, out_channels)


FUNCTIONS = dict(
    numbers=numbers,
    numpy_words=numpy_words,
    ranked=ranked,
    statistics=statistics,
    of_vectors=of_vectors,
    image_weights=image_weights,
    experts=experts,
    of_fewer_places=of_fewer_places,
)
globals().update({f"with_{name}": of(function) for name, function in FUNCTIONS.items()})
