"""What a module calls becomes a network that computes the same, at any size and batch, or is refused by name."""

import made_networks
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distseg
from distseg.layers.graph import graph_of
from distseg.models.capture.capture import as_network, capture
from distseg.models.capture.trace import CanNotCapture
from distseg.models.layers import DropImage
from distseg.models.network import check_calls


class Called(nn.Module):
    """A convolution, and what a function does with its result."""

    def __init__(self, function, channels=6):
        super().__init__()
        self.conv, self.head, self.function = (
            nn.Conv2d(2, 6, 3, padding=1),
            nn.Conv2d(channels, 3, 1),
            function,
        )
        self.scale, self.vector, self.fc = (
            nn.Parameter(torch.rand(6, 1, 1) + 0.5),
            nn.Parameter(torch.rand(6)),
            nn.Linear(6, 6),
        )
        self.register_buffer("mean", torch.rand(1, 6, 1, 1))
        self.norm = nn.BatchNorm2d(6)
        self.blur = torch.ones(6, 1, 1, 1)
        self.register_buffer("whole", torch.ones(6, 1, 1, 1, dtype=torch.long))
        self.gru, self.lstm, self.both = (
            nn.GRU(6, 6, batch_first=True),
            nn.LSTM(6, 6, batch_first=True),
            nn.LSTM(1, 3, num_layers=2, bidirectional=True),
        )
        self.cell, self.gate = nn.LSTMCell(6, 6), nn.GRUCell(6, 6)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.head(self.function(self, self.conv(x)))


SAME = {
    "over rows": lambda m, x: x.softmax(2),
    "mean of rows": lambda m, x: x - x.mean(2, keepdim=True),
    "maximum of rows": lambda m, x: x / x.abs().amax(3, keepdim=True),
    "sum of rows": lambda m, x: x / x.abs().sum(2, keepdim=True),
    "arithmetic": lambda m, x: 1 - x + 2 * x / (3 + x**2) - (-x),
    "keywords": lambda m, x: torch.add(input=x, other=x, alpha=0.5),
    "alpha": lambda m, x: x.sub(x.sigmoid(), alpha=2),
    "parameters": lambda m, x: (x - m.mean) * m.scale + m.vector.view(1, -1, 1, 1) * m.temperature,
    "in place": lambda m, x: F.leaky_relu_(x.mul_(2).add_(1), 0.1),
    "detached": lambda m, x: x * (x * 1).detach_() + x.detach(),
    "data": lambda m, x: (
        x.view(*x.data.size()[:2], *x.data.shape[2:]) * (x * 2).data.sigmoid()
        + m.scale.data * m.mean.data
    ),
    "in place, read before": lambda m, x: (lambda y, z: y.add_(z) * z)(x * 2, x.tanh()),
    "operators in place": lambda m, x: operators(x),
    "activations": lambda m, x: (
        F.gelu(F.silu(F.elu(x)) + F.hardswish(x) + F.softplus(x)) + F.leaky_relu(x, 0.3)
    ),
    "softmax": lambda m, x: x.softmax(1) + F.log_softmax(x, dim=-3),
    "chunks": lambda m, x: torch.cat(
        [part * k for k, part in enumerate(x.chunk(3, dim=1), 1)], dim=1
    ),
    "splits": lambda m, x: torch.cat(x.split((4, 2), 1)[::-1], 1),
    "parts of the channels": lambda m, x: torch.cat((x[:, 4:], x[:, :4]), 1),
    "pool": lambda m, x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2),
    "average": lambda m, x: F.interpolate(
        F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), size=x.shape[2:]
    ),
    "to the size of a map": lambda m, x: (
        x + F.interpolate(F.max_pool2d(x, 4), size=x.shape[2:], mode="bilinear", align_corners=True)
    ),
    "to the size of an odd map": lambda m, x: (
        x
        + F.interpolate(
            F.conv2d(x, m.fc.weight.view(6, 6, 1, 1), stride=3),
            size=x.shape[2:],
            mode="bicubic",
            align_corners=True,
        )
    ),
    "a half": lambda m, x: F.interpolate(F.interpolate(x, scale_factor=0.5), size=x.shape[2:]),
    "other factors": lambda m, x: F.interpolate(
        F.interpolate(x, scale_factor=(1.5, 0.7), mode="bilinear"), size=x.shape[2:], mode="area"
    ),
    "factors of sizes": lambda m, x: F.interpolate(
        y := F.max_pool2d(x, 2, ceil_mode=True),
        scale_factor=(x.shape[2] / y.shape[2], x.shape[3] / y.shape[3]),
    ),
    "a third, anti-aliased": lambda m, x: F.interpolate(
        F.interpolate(
            x, size=(x.shape[2] // 3, x.shape[3] // 3 + 1), mode="bilinear", antialias=True
        ),
        size=x.shape[2:],
    ),
    "a fixed size": lambda m, x: F.interpolate(
        F.interpolate(x, size=(5, 7), mode="nearest-exact"), size=x.shape[2:], mode="bilinear"
    ),
    "pads": lambda m, x: F.conv2d(
        F.pad(x, (1, 1, 1, 1), mode="reflect"), m.fc.weight.view(6, 6, 1, 1).expand(6, 6, 3, 3) / 9
    ),
    "more channels": lambda m, x: F.pad(x[:, :5], (0, 0, 0, 0, 0, 1)),
    "standardised": lambda m, x: F.conv2d(
        x, (m.fc.weight - m.fc.weight.mean(1, keepdim=True))[:, :, None, None], m.fc.bias
    ),
    "channels last": lambda m, x: m.fc(F.layer_norm(x.permute(0, 2, 3, 1), (6,))).permute(
        0, 3, 1, 2
    ),
    "moved": lambda m, x: (x.movedim(1, -1) * m.vector).movedim(-1, 1).contiguous(),
    "mean": lambda m, x: x * x.mean((2, 3), keepdim=True),
    "mean of all places": lambda m, x: x + m.fc(x.mean(dim=(-2, -1))).relu()[..., None, None],
    "pooled vector": lambda m, x: (
        x * torch.sigmoid(m.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))).view(-1, 6, 1, 1)
    ),
    "vector with its batch": lambda m, x: (
        x
        * m.fc(F.adaptive_avg_pool2d(x, 1).view(x.shape[0], -1))
        .reshape(x.shape[0], x.shape[1], 1, 1)
        .expand_as(x)
    ),
    "filled up": lambda m, x: F.max_pool2d(
        F.pad(x, (0, -x.shape[3] % 8, 0, -x.shape[2] % 8)), 3, 1, 1
    )[..., : x.shape[2], : x.shape[3]],
    "sums of all places": lambda m, x: (
        x * torch.tanh(x.sum((2, 3), keepdim=True))
        + m.fc(x.permute(0, 2, 3, 1).square().sum((1, 2)))[..., None, None]
    ),
    "norms of all places": lambda m, x: (
        x / x.norm(p=2, dim=(2, 3), keepdim=True)
        + torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True) * x.norm(dim=1, keepdim=True)
    ),
    "response norm, channels last": lambda m, x: (
        lambda y: (
            y
            + torch.addcmul(
                m.vector,
                m.vector,
                y
                * (
                    (g := y.norm(p=2, dim=(1, 2), keepdim=True)) / (g.mean(-1, keepdim=True) + 1e-6)
                ),
            )
        )
    )(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "norm of nothing": lambda m, x: x * F.relu(x - 100).norm(p=2, dim=(2, 3), keepdim=True),
    "maxima of all places": lambda m, x: (
        x * x.amax((2, 3), keepdim=True)
        + F.adaptive_max_pool2d(x, 1)
        - F.max_pool2d(F.relu(x), x.shape[2:])
    ),
    "equal maxima": lambda m, x: (
        x * F.relu(x - 100).amax((2, 3), keepdim=True)
        + F.adaptive_max_pool2d(x.round(), 1)
        * F.relu(1 - x.round()).amax((-1, -2))[:, :, None, None]
    ),
    "grid": lambda m, x: (
        x
        + F.interpolate(F.adaptive_avg_pool2d(x, 2), x.shape[2:])
        + F.interpolate(F.adaptive_avg_pool2d(x, (3, 1)).tanh(), x.shape[2:], mode="bicubic")
    ),
    "grid of weights": lambda m, x: (
        x
        * F.interpolate(
            F.conv2d(
                F.adaptive_avg_pool2d(x, (3, 4)),
                m.fc.weight.view(6, 6, 1, 1).expand(6, 6, 3, 3),
                m.fc.bias,
                padding=1,
            ),
            x.shape[2:],
            mode="bilinear",
            align_corners=True,
        )
    ),
    "grid to a vector": lambda m, x: (
        x
        * F.linear(F.adaptive_avg_pool2d(x, 2).flatten(1), m.fc.weight.repeat(1, 4))[
            :, :, None, None
        ]
    ),
    "gate of channels": lambda m, x: (
        x
        * torch.sigmoid(
            x.mean(1, keepdim=True) + x.max(1, keepdim=True)[0] + x.amax(1, keepdim=True)
        )
    ),
    "norms": lambda m, x: F.group_norm(
        F.instance_norm(x, weight=m.vector, bias=m.vector), 3, m.vector, m.vector
    ),
    "batch norm": lambda m, x: F.batch_norm(x, None, None, m.vector, m.vector, True),
    "ones like a weight": lambda m, x: x * torch.ones_like(m.scale),
    "groups of channels": lambda m, x: torch.cat(
        [
            (y := x.view(len(x), 2, 3, *x.shape[2:])).sum(1),
            y[:, 0] * y.select(1, 1),
            y.amax((1, 2), keepdim=True)[:, 0],
        ],
        1,
    )[:, :6],
    "split attention": lambda m, x: split_attention(x),
    "selected paths": lambda m, x: (
        lambda p: (p * p.sum(1).mean((2, 3), keepdim=True).unsqueeze(1).softmax(2)).sum(1)
    )(torch.stack([x, x.tanh()], 1)),
    "shuffled": lambda m, x: (
        x.view(len(x), 2, 3, *x.shape[2:]).transpose(1, 2).contiguous().view(x.shape)
    ),
    "shuffled, channels last": lambda m, x: (
        x.permute(0, 2, 3, 1).unflatten(-1, (3, 2)).transpose(-1, -2).flatten(3).permute(0, 3, 1, 2)
    ),
    "heads": lambda m, x: (
        F.rms_norm(F.layer_norm(x.permute(0, 2, 3, 1).unflatten(-1, (2, 3)), (3,)), (2, 3))
        .flatten(3)
        .permute(0, 3, 1, 2)
        * m.scale
    ),
    "heads of a vector": lambda m, x: (
        x
        * x.mean((2, 3)).view(-1, 2, 3).softmax(-1).transpose(1, 2).reshape(-1, 6)[:, :, None, None]
    ),
    "gate without a dim": lambda m, x: (
        x * (x.mean(1) + x.max(1)[0]).unsqueeze(1) + x.min(1)[0][:, None]
    ),
    "matrices": lambda m, x: (
        torch.einsum("bchw,kc->bkhw", x, m.fc.weight)
        + (x.movedim(1, -1) @ m.fc.weight).movedim(-1, 1)
        + (x.mean((2, 3)) @ m.fc.weight)[..., None, None]
    ),
    "over channels": lambda m, x: (
        (x - x.logsumexp(1, keepdim=True)) / (x.std(dim=1, keepdim=True) + 1)
        + x.flip(1) * x.cumsum(1)
        + x.var(1).unsqueeze(1)
    ),
    "repeated": lambda m, x: (
        x.repeat(1, 2, 1, 1)[:, 3:9] + x.narrow(1, 2, 3).repeat_interleave(2, 1)
    ),
    "unbound": lambda m, x: torch.cat(
        [part * k for k, part in enumerate(x.view(len(x), 3, 2, *x.shape[2:]).unbind(1), 1)], 1
    ),
    "alike at fewer places": lambda m, x: (
        x * F.max_pool2d(x, 2).mean((2, 3), keepdim=True)
        + F.interpolate(
            F.interpolate(x.mean((2, 3), keepdim=True), size=(x.shape[2] // 4, x.shape[3] // 4))
            * F.max_pool2d(x, 4),
            x.shape[2:],
        )
    ),
    "stacked": lambda m, x: torch.stack([x, x * 2]).sum(0),
    "no effect": lambda m, x: F.dropout(x, 0.5, False).contiguous().clone(),
    "a norm twice": lambda m, x: m.norm(m.norm(x) + x),
    "without gradients": lambda m, x: (
        x
        + without_gradients(x)
        + without_gradients(x.mean((2, 3), keepdim=True)) * m.vector.view(6, 1, 1)
    ),
    "weights without gradients": lambda m, x: (
        x * without_gradients(m.scale)
        + m.scale * F.conv2d(x, without_gradients(m.fc.weight)[..., None, None])
    ),
    "a fixed point": lambda m, x: fixed_point(m, x),
    "frames": lambda m, x: frames(m, x),
    "pooled frames": lambda m, x: (
        lambda y: (
            (y * F.adaptive_avg_pool2d(y, 1).sigmoid() + y.mean((2, 3), keepdim=True))
            .view(len(x), 3, 2, *x.shape[2:])
            .flatten(1, 2)
        )
    )(x.reshape(-1, 2, *x.shape[2:])),
    "filters of each channel": lambda m, x: F.conv2d(
        F.pad(x.reshape(-1, 1, *x.shape[2:]), (1, 1, 1, 1), mode="replicate"),
        m.fc.weight[0].view(1, 1, 2, 3)[..., :2, :3].mean(2, keepdim=True).expand(-1, -1, 3, -1),
    ).view_as(x),
    "two batches": lambda m, x: (
        lambda y: y.chunk(2)[0] * y[len(x) :].sigmoid() + y[: len(x)].mean((2, 3), keepdim=True)
    )(two_batches(m, torch.cat((x, x.tanh()), dim=0))),
    "spectra": lambda m, x: spectra(m, x),
    "series of pixels": lambda m, x: series(m, x),
    "a depth of one": lambda m, x: F.conv3d(
        x.unsqueeze(2),
        m.fc.weight[:, :, None, None, None].expand(-1, -1, 1, 3, 3),
        m.fc.bias,
        padding=(0, 1, 1),
    ).squeeze(2),
    "stacked batches": lambda m, x: (
        two_batches(m, torch.stack([x, x.tanh()], 0).view(-1, *x.shape[1:]))
        .view(2, len(x), *x.shape[1:])
        .mean(0)
    ),
    "batches of chunks": lambda m, x: (lambda y: y[: len(x)] - y[len(x) :])(
        two_batches(m, torch.cat(x.repeat(1, 2, 1, 1).chunk(2, 1), 0))
    ),
    "norms of frames": lambda m, x: (
        lambda y: F.group_norm(
            F.instance_norm(y, weight=m.vector[:3]), 1, m.vector[:3], m.vector[3:]
        ).view_as(x)
    )(x.reshape(len(x) * 2, 3, *x.shape[2:])),
    "rows": lambda m, x: (
        lambda y: (
            F.max_pool1d(
                F.conv1d(y, m.fc.weight.view(6, 6, 1).expand(6, 6, 3), m.fc.bias, padding=1),
                3,
                1,
                1,
            )
            .view(len(x), x.shape[2], 6, -1)
            .transpose(1, 2)
        )
    )(x.transpose(1, 2).reshape(-1, 6, x.shape[3])),
    "recurrence over channels": lambda m, x: over_channels(m, x),
    "recurrent cells": lambda m, x: cells(m, x),
    "not a mask": lambda m, x: (
        torch.where(~(x > 0), x, x * 0.5)
        + torch.where(x > 0.1, torch.tensor(1.0), torch.tensor(0.25))
    ),
    "leaves": lambda m, x: (
        x * x.detach().requires_grad_(False) + x.detach().requires_grad_() * m.scale
    ),
    "TorchScript": lambda m, x: scripted(x) + x.tanh() * 2,
    "spread over frames": lambda m, x: (
        x.flatten(0, 1)
        .unsqueeze(1)
        .expand(-1, 4, -1, -1)
        .reshape(len(x), 6, 4, *x.shape[2:])
        .sum(2)
    ),
    "maxima of a grid": lambda m, x: (
        x * F.interpolate(F.adaptive_max_pool2d(x, (2, 3)), x.shape[2:])
    ),
    "places": lambda m, x: x * torch.linspace(0, 1, x.shape[-1], device=x.device),
    "filled by parts": lambda m, x: (
        filled_by_parts(x, torch.empty(x.shape, device=x.device, dtype=x.dtype))
        * filled_by_parts(x, x.new_empty(x.shape))
    ),
    "filled": lambda m, x: (
        torch.relu_(
            x * torch.empty_like(x).fill_(0.3) + torch.empty(x.size(0), 6, 1, 1).fill_(2).to(x)
        )
        - torch.zeros_like(x).add_(1)
        + torch.empty_like(x).copy_(x.tanh()) * (x * 2).zero_()
    ),
    "maximum": lambda m, x: torch.maximum(x, torch.max(x.tanh(), x.sigmoid())),
}


def operators(x):
    y = x * 1
    y += x
    y *= 0.5
    y -= 1
    return y


def same(model, size, images):
    torch.manual_seed(1)
    model = model.double().train()
    network = distseg.capture(model).train()
    own = {network.names.get(name, name): p for name, p in network.named_parameters()}
    assert all(own[name] is p for name, p in model.named_parameters())
    x = torch.randn(images, 2, *size, dtype=torch.float64)
    wanted, found = model(x.clone()), network(x.clone())
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(wanted)
    used = [p for p in model.parameters()]
    for a, b in zip(
        torch.autograd.grad((wanted * g).sum(), used, allow_unused=True),
        torch.autograd.grad((found * g).sum(), used, allow_unused=True),
    ):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    return network


@pytest.mark.covering(1)
@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("name", SAME)
def test_a_function_is_what_it_was(name, images):
    torch.manual_seed(0)
    network = same(Called(SAME[name]), (12, 20), images)
    assert network.multiple == {"pool": 2}.get(name, 1)


@pytest.mark.slow
def test_a_compiled_function_is_what_it_was():
    same(Called(lambda m, x: scripted(x) + compiled(x)), (12, 20), 5)


@pytest.mark.parametrize(
    "name",
    [
        "residual",
        "hooked_block",
        "standardised",
        "weight_normed",
        "squeezed",
        "excited",
        "convnext",
        "merged",
        "written",
        "joined_unknown",
        "again",
    ],
)
def test_a_network_is_what_it_was(name):
    torch.manual_seed(0)
    model = getattr(made_networks, name)(2, 3)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    if name not in ("written", "convnext"):  # whose dropouts are functions
        same(model, (24, 36), 3)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Tanhshrink(),
        nn.Softshrink(0.1),
        nn.Hardshrink(0.1),
        nn.Threshold(0.1, -1.0),
        nn.Softmin(1),
        nn.GLU(1),
        nn.LocalResponseNorm(3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_made_of_functions_is_captured_in_a_sequential_too(layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), layer, nn.LazyConv2d(3, 3, padding=1))
    model(torch.zeros(1, 2, 8, 8))
    graph_of(as_network(model))  # refuses layers that cannot be computed in parts
    same(model, (12, 20), 2)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


def without_gradients(x):
    with torch.no_grad():
        return x * 2


def in_place_without_gradients(x):
    with torch.no_grad():
        x.mul_(x > 0)
    return x


def part_without_gradients(x):
    with torch.no_grad():
        x[:, :2] = 0
    return x


def fixed_point(m, x):
    """The last of some iterations alone has a gradient."""
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(3):
            z = F.group_norm(
                torch.tanh(
                    F.conv2d(z, m.fc.weight[:, :, None, None], m.fc.bias) * m.scale.mul(2) + x
                ),
                3,
            )
        mask = (z > 0).to(x.dtype)
    return torch.tanh(F.conv2d(z, m.fc.weight[:, :, None, None]) + x) * mask + m.norm(
        z.view(len(x), 2, 3, *x.shape[2:]).flatten(1, 2)
    )


def watched(x):
    x.register_hook(lambda g: g * 2)
    return x


def filled_by_parts(x, made):
    made[:, :2] = x[:, :2] * 2
    made[:, 2:] = x[:, 2:].relu()
    made[:, 3] += 1
    return made


@torch.jit.script
def scripted(x):
    return x * torch.sigmoid(x)


def compiled(x):
    return torch.compile(lambda y: y.tanh() * 2)(x)


def over_channels(m, x):
    n, c, h, w = x.shape
    forward, last = m.gru(x.permute(0, 2, 3, 1).reshape(n * h * w, 1, c))
    both, (hidden, _) = m.both(x.permute(1, 0, 2, 3).reshape(c, -1, 1))
    series = m.lstm(x.mean((2, 3)).view(n, 1, c))[0][:, -1]
    found = [
        y.view(n, h, w, 6).permute(0, 3, 1, 2)
        for y in (forward[:, -1], last[-1], both.mean(0), torch.cat(hidden.unbind(0)[:2], -1))
    ]
    return sum(found) * series[:, :, None, None]


def cells(m, x):
    n, c, h, w = x.shape
    places = x.flatten(2).transpose(1, 2).reshape(-1, c)
    state = cell = torch.zeros(len(places), c, dtype=x.dtype, device=x.device)
    for _ in range(2):
        state, cell = m.cell(places, (state, cell))
    return (
        state.view(n, h * w, c).transpose(1, 2).reshape(n, c, h, w)
        * m.gate(x.mean((2, 3)), x.new_zeros(n, c))[..., None, None]
    )


def spectra(m, x):
    """Convolutions over bands too (HybridSN)."""
    y = F.conv3d(
        x.unsqueeze(1),
        m.fc.weight[:4].view(4, 1, 6, 1, 1)[:, :, :3].expand(-1, -1, -1, 3, 3),
        m.fc.bias[:4],
        padding=(0, 1, 1),
    )
    y = F.batch_norm(y, None, None, m.vector[:4], m.vector[2:], True).relu()
    y = F.max_pool3d(
        F.conv3d(
            y,
            m.fc.weight[:, :2, None, None, None].expand(-1, -1, 3, 1, 1),
            stride=(2, 1, 1),
            padding=(1, 0, 0),
            groups=2,
        ),
        (1, 3, 3),
        (1, 1, 1),
        (0, 1, 1),
    )
    y = F.group_norm(F.instance_norm(y, weight=m.vector), 2, m.vector, m.vector)
    return y.flatten(1, 2)[:, 1:7] + x


def series(m, x):
    """Each pixel's bands as a series of its own (1D networks on spectra)."""
    n, c, h, w = x.shape
    y = F.conv1d(
        x.permute(0, 2, 3, 1).reshape(n * h * w, 1, c),
        m.fc.weight[:4, None, :3],
        m.fc.bias[:4],
        padding=1,
    )
    y = F.batch_norm(y, None, None, m.vector[:4], m.vector[2:], True).relu()
    y = F.max_pool1d(
        F.group_norm(
            F.conv1d(y, m.fc.weight[:, :4, None].expand(-1, -1, 3)), 2, m.vector, m.vector
        ),
        2,
    )
    y = torch.cat([F.adaptive_avg_pool1d(y, 1), F.interpolate(y, size=3)], 2).mean(-1)
    return y.view(n, h, w, 6).permute(0, 3, 1, 2)


def two_batches(m, y):
    y = F.batch_norm(
        F.conv2d(y, m.fc.weight[:, :, None, None].expand(-1, -1, 3, 3), m.fc.bias, padding=1),
        None,
        None,
        m.vector,
        m.vector,
        True,
    )
    y = F.interpolate(F.max_pool2d(y.relu(), 3, 2, 1), size=y.shape[2:]) * m.scale + y.mean(
        1, keepdim=True
    )
    return torch.cat([y[:, :2], y[:, 2:] * y.mean((2, 3), keepdim=True)[:, 2:]], 1)


def frames(m, x):
    """Three frames of two bands each, as many images of a batch."""
    y = x.view(len(x) * 3, 2, *x.shape[2:])
    y = F.batch_norm(
        F.conv2d(y, m.fc.weight[:4, :2, None, None].expand(-1, -1, 3, 3), m.fc.bias[:4], padding=1),
        None,
        None,
        m.vector[:4],
        m.vector[2:],
        True,
    )
    y = F.interpolate(F.avg_pool2d(y.relu(), 3, 2, 1), size=x.shape[2:], mode="bilinear")
    y = F.conv_transpose2d(
        y, m.fc.weight[:4, 2:5, None, None].expand(-1, -1, 3, 3), m.fc.bias[:3], padding=1
    )
    return y.view(len(x), 3, 3, *x.shape[2:]).max(2)[0].repeat(1, 2, 1, 1) * x


def autocasting(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x * 2


def split_attention(x):
    """As ResNeSt's."""
    y = x.view(len(x), 2, 3, *x.shape[2:])
    mean = y.sum(1).mean((2, 3), keepdim=True)
    attention = (
        torch.cat([mean, mean * 2], 1)
        .view(len(x), 1, 2, -1)
        .transpose(1, 2)
        .softmax(1)
        .reshape(len(x), -1)
        .view(len(x), -1, 1, 1)
    )
    chosen = (y * attention.reshape(len(x), 2, 3, 1, 1)).sum(1)
    return torch.cat([chosen, chosen], 1)


REFUSED = {
    "a convolution of groups": (
        lambda m, x: F.conv2d(x.mean(1), m.fc.weight.view(6, 6, 1, 1)),
        r"takes a map whose channels are \(\): one dim of them is expected|forward pass of .* fails",
    ),
    "products of places": (
        lambda m, x: torch.einsum("bchw,bcHw->bcHw", x, x),
        "einsum .* multiplies each position of the image with all others, as attention does",
    ),
    "products of maps": (
        lambda m, x: x @ x.transpose(2, 3) @ x,
        "transpose .* changes the order of the spatial dims",
    ),
    "mirrored": (
        lambda m, x: x + x.flip(-1),
        "flip .* flips the image, so that each part would need the part on the other side",
    ),
    "rows summed up": (lambda m, x: x.cumsum(2), "runs over .*positions of the image"),
    "deviation of all": (
        lambda m, x: x / x.std(),
        "std .* mixes the images of a batch along all dims",
    ),
    "rows repeated": (
        lambda m, x: x.repeat(1, 1, 2, 1)[:, :, : x.shape[2]],
        "repeat .* would merge the batch or a spatial dim with channels or repeated values",
    ),
    "rows unbound": (
        lambda m, x: torch.stack(x.unbind(2), 2),
        "unbind .* cuts the image into parts|calls different functions",
    ),
    "as many channels as rows": (
        lambda m, x: x * x.mean(1, keepdim=True).repeat(1, x.shape[2], 1, 1).sum(1, keepdim=True),
        "repeat .* combines each position with all others",
    ),
    "attention": (
        lambda m, x: (
            (lambda t: (t @ t.transpose(1, 2)).softmax(-1) @ t)(x.flatten(2).transpose(1, 2))
            .transpose(1, 2)
            .view_as(x)
        ),
        r"matmul in the model \(test_capture.py, line \d+\) multiplies each position of the image with all others, as attention does",
    ),
    "attention of heads": (
        lambda m, x: (lambda t: F.scaled_dot_product_attention(t, t, t))(
            x.flatten(2).mT
        ).mT.view_as(x),
        "scaled_dot_product_attention .* is attention between all positions of the image",
    ),
    "a row": (lambda m, x: x - x[:, :, :1], "__getitem__ .* takes a slice of"),
    "another norm": (
        lambda m, x: x / x.norm(p=0, dim=(2, 3), keepdim=True),
        "norm .* takes a norm of order 0",
    ),
    "a grid that grows": (
        lambda m, x: x + F.interpolate(F.adaptive_avg_pool2d(x, (x.shape[2] // 8, 4)), x.shape[2:]),
        "pools to .* a grid that depends on the image's size",
    ),
    "a size of nothing": (
        lambda m, x: F.interpolate(
            F.interpolate(x, size=(x.shape[2] ** 2 % 97 + 1, 9)), size=x.shape[2:]
        ),
        "makes .* neither that of another feature map nor a fraction of one",
    ),
    "a factor of nothing": (
        lambda m, x: F.interpolate(
            F.interpolate(x, scale_factor=0.5 + 1 / x.shape[2]), size=x.shape[2:]
        ),
        "has a scale factor that depends on the image's size|nor a fraction of one",
    ),
    "noise": (lambda m, x: x + torch.randn_like(x), "randn_like .* draws random numbers"),
    "a function of one's own": (
        lambda m, x: Straight.apply(x),
        r"conv2d in head \(test_capture.py, line \d+\) uses the result of Straight, your own autograd.Function",
    ),
    "a function of one's own, behind a norm": (
        lambda m, x: Straight.apply(m.norm(x)),
        "uses the result of Straight, your own autograd.Function",
    ),
    "in place without gradients, behind a norm": (
        lambda m, x: in_place_without_gradients(m.norm(x)),
        "mul .* changes a tensor in place without gradients",
    ),
    "recurrence over places": (
        lambda m, x: m.gru(x.flatten(2).mT)[0].mT.view_as(x),
        r"gru in gru \(test_capture.py, line \d+\) is a recurrent layer that runs over the positions of the image one after another",
    ),
    "recurrence over rows": (
        lambda m, x: (
            m.lstm(x.permute(0, 2, 3, 1).reshape(-1, x.shape[3], 6))[0]
            .reshape(len(x), *x.shape[2:], 6)
            .permute(0, 3, 1, 2)
        ),
        r"(lstm|zeros) in lstm .* (is a recurrent layer that runs over the positions of the image one after another|has neither the size)",
    ),
    "a function of functions": (
        lambda m, x: torch.vmap(torch.sigmoid)(x),
        r"sigmoid in the model \(test_capture.py, line \d+\) is called by a function of torch.func",
    ),
    "images with each other": (
        lambda m, x: x * ((v := x.mean((2, 3))) @ v.t() @ v)[:, :, None, None],
        "mixes the images of a batch",
    ),
    "a function of one's own, of weights": (
        lambda m, x: x * Straight.apply(m.scale),
        "uses the result of Straight, your own autograd.Function",
    ),
    "in place without gradients": (
        lambda m, x: in_place_without_gradients(x * 1),
        "mul .* changes a tensor in place without gradients",
    ),
    "a part without gradients": (
        lambda m, x: part_without_gradients(x * 1),
        "setitem.* changes a tensor in place without gradients",
    ),
    "all without gradients": (
        lambda m, x: torch.set_grad_enabled(False) and None or x,
        "is computed without gradients|forward pass of .* fails",
    ),
    "a hook on a gradient": (
        lambda m, x: watched(x * 1),
        "register_hook .* changes gradients by a hook",
    ),
    "data in place": (
        lambda m, x: (x.data.clamp_(0), x)[1],
        r"clamp .* changes the data of a tensor \(test_capture.py, line \d+\) so that autograd does not see it",
    ),
    "a part of data in place": (
        lambda m, x: (x.data[:, 1].zero_(), x)[1],
        r"changes the data of a tensor \(test_capture.py, line \d+\)|indexes .* with an unsupported index|overwritten in place",
    ),
    "data that is old": (
        lambda m, x: (lambda d, y: d + y)(x.data, x.mul_(2)),
        "reads a tensor that was overwritten in place",
    ),
    "another's running statistics": (
        lambda m, x: F.batch_norm(
            m.norm(x), m.norm.running_mean, m.norm.running_var, training=True
        ),
        "uses the running statistics of another module",
    ),
    "autocast": (
        autocasting,
        r"mul in the model \(test_capture.py, line \d+\) runs under its own autocast",
    ),
    "a gradient": (
        lambda m, x: x if m.scale.grad is None else x * 2,
        r"the model \(test_capture.py, line \d+\) reads the gradient of a tensor",
    ),
    "a weight's version": (
        lambda m, x: x * (1 + m.scale._version),
        r"the model \(test_capture.py, line \d+\) reads _version of a tensor, which counts",
    ),
    "the version of a map": (
        lambda m, x: x * (1 + getattr(x, "_version")),  # noqa: B009
        r"the model \(test_capture.py, line \d+\) reads _version of a tensor",
    ),
    "an address": (
        lambda m, x: x * (1 + m.scale.data_ptr() % 2),
        r"the model \(test_capture.py, line \d+\) reads data_ptr of a tensor, its address",
    ),
    "running statistics": (
        lambda m, x: m.norm(x) * m.norm.running_var.view(-1, 1, 1),
        r"view in the model .* reads norm.running_var, which a norm updates once per step",
    ),
    "a count of passes": (
        lambda m, x: m.norm(x) * min(1, m.norm.num_batches_tracked.item()),
        r"reads norm.num_batches_tracked, which a norm updates once per step",
    ),
    "a choice by type": (
        lambda m, x: x * 2 if x.dtype == torch.float32 else x + 1,
        "call the same functions whatever dtype a tensor has",
    ),
    "a norm by type": (
        lambda m, x: F.layer_norm(x.movedim(1, -1), (6,), eps=torch.finfo(x.dtype).eps).movedim(
            -1, 1
        ),
        "is given .*, as the type of a tensor says",
    ),
    "large values in evaluation": (
        lambda m, x: F.relu(x) if m.training else F.relu6(x),
        "the network computes something different in evaluation than in training",
    ),
    "a choice": (
        lambda m, x: x * 2 if x.shape[2] > 200 else x,
        "calls different functions for different image sizes",
    ),
    "by value": (
        lambda m, x: x * 2 if x.mean() > 0 else x,
        r"(bool|item) in the model \(test_capture.py, line \d+\) reads the values of a tensor",
    ),
    "a number": (
        lambda m, x: x * x.mean().item(),
        r"item in the model .* reads the values of a tensor",
    ),
    "numbers of a weight": (
        lambda m, x: x * sum(m.scale.flatten().tolist()),
        r"tolist in the model .* reads the values of a tensor in Python: .* must not depend",
    ),
    "numbers of a parameter": (
        lambda m, x: x * m.scale.numpy(force=True).sum(),
        r"reads the values of scale in Python: ",
    ),
    "chosen values": (
        lambda m, x: x * x[x > 0].mean(),
        r"getitem in the model .* reads the values of a tensor",
    ),
    "evaluation": (
        lambda m, x: x * 2 if m.training else x,
        "the network computes something different in evaluation than in training",
    ),
    "rolled": (lambda m, x: x.roll(1, 2), "roll .* shifts the image cyclically"),
    "turned": (
        lambda m, x: x.transpose(2, 3),
        "transpose .* changes the order of the spatial dims",
    ),
    "a tensor that is no buffer": (
        lambda m, x: F.conv2d(x, m.blur, groups=6),
        "conv2d .* takes blur of the model, which is neither a parameter nor a buffer.*register_buffer",
    ),
    "a cast of a buffer": (
        lambda m, x: F.conv2d(x, m.whole.to(x.dtype), groups=6),
        "conv2d .* uses the result of to .* changes the dtype of a parameter or buffer: remove this call",
    ),
    "batches mixed": (
        lambda m, x: torch.cat((x, x * 2)).view(len(x), 2, 6, *x.shape[2:]).sum(1),
        "view .* mixes batches that were concatenated along dim 0",
    ),
    "batches of two kinds": (
        lambda m, x: (
            (torch.cat((x[:, :2], x[:, 2:4])) + x[:, :4].reshape(-1, 2, *x.shape[2:]))
            .chunk(2)[0]
            .repeat(1, 3, 1, 1)
        ),
        "add .* mixes batches",
    ),
    "part of two batches": (
        lambda m, x: torch.cat((x, x * 2))[1 : len(x) + 1],
        "__getitem__ .* mixes batches",
    ),
    "a batch": (
        lambda m, x: x - x.mean(0, keepdim=True),
        "mean .* mixes the images of a batch along dim 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_named(name):
    function, words = REFUSED[name]
    with pytest.raises(CanNotCapture, match=words):
        distseg.capture(Called(function))


def test_scripts_are_named():
    with pytest.raises(CanNotCapture, match=r"^1 is TorchScript .* whose calls distseg cannot see"):
        distseg.capture(nn.Sequential(nn.Conv2d(2, 3, 1), torch.jit.script(nn.Conv2d(3, 3, 1))))


def test_results_that_are_no_map_are_named():
    with pytest.raises(
        CanNotCapture,
        match=r"returns a dict of 'out' \(test_capture.py, line \d+\), but it must return one tensor: name in model.outputs .* such as {out: 1.0}",
    ):
        distseg.capture(Wrapped(nn.Conv2d(2, 3, 1)))
    with pytest.raises(
        CanNotCapture, match="result has the shape 2x3x.* but a segmentation network keeps the size"
    ):
        distseg.capture(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanhshrink()))


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return {"out": self.inner(x)}


def test_networks_that_want_large_images_are_compared_on_such():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.valid, self.head = (
                nn.Conv2d(2, 4, 16, 16),
                nn.Conv2d(4, 4, 5),
                nn.Linear(4, 3),
            )

        def forward(self, x):
            return self.head(self.valid(self.down(x)).mean((2, 3)))

    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        Deep()(torch.zeros(1, 2, 64, 64))
    assert distseg.capture(Deep()).of_image


class Doubling(nn.Sequential):
    def __call__(self, x):
        return super().__call__(x * 2)


class Shorter(nn.Sequential):
    def __iter__(self):
        return iter(list(self._modules.values())[:-1])


def test_lists_of_layers_that_are_called_in_another_way():
    torch.manual_seed(0)
    conv, x = nn.Conv2d(2, 3, 3, padding=1), torch.randn(1, 2, 9, 8)
    changed = nn.Conv2d(2, 3, 3, padding=1)
    changed._conv_forward = lambda x, weight, bias: F.conv2d(x, weight * 2, bias, padding=1)
    for model in (
        Doubling(conv, nn.Tanh()),
        Shorter(conv, nn.Tanh()),
        nn.Sequential(changed, nn.Tanh()),
    ):
        torch.testing.assert_close(as_network(model)(x), model(x))


class Longer(nn.Conv2d):
    """Computes more in one type, or returns something else, behind all else."""

    def forward(self, x):
        y = super().forward(x)
        z = y * 2 if self.groups == 1 or y.dtype == torch.float32 else y
        return y if y.dtype == torch.float64 else z


@pytest.mark.parametrize(
    "groups, words",
    [
        (
            1,
            "the network returns the result of conv2d in .* of torch.float64, but that of mul in .* of torch.float32",
        ),
        (2, "is called for one dtype only"),
    ],
)
def test_what_is_computed_last_by_the_type_of_a_tensor(groups, words):
    with pytest.raises(CanNotCapture, match=words):
        distseg.capture(Longer(2, 4, 3, padding=1, groups=groups))


def test_numbers_by_the_type_of_a_tensor():
    """Of a type's smallest and largest numbers, in the type that a run computes in."""

    def function(m, x):
        masked = x.masked_fill(x < 0, torch.finfo(x.dtype).min / 1e38).clamp(
            min=-torch.finfo(x.dtype).eps
        )
        return masked + torch.log(x.abs() + torch.finfo(x.dtype).tiny)

    torch.manual_seed(0)
    model = Called(function)
    network = distseg.capture(model)
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(1, 2, 8, 8, dtype=dtype)
        torch.testing.assert_close(network.to(dtype)(x), model.to(dtype)(x))


class Small(nn.Module):
    """Does something else with small images, and with many."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        return y if x.shape[2] > 30 and len(x) < 5 else y * 2


def test_images_with_which_it_does_something_else_are_refused():
    network = distseg.capture(Small())
    check_calls(network, (31, 8), 4)
    for size, images in (((30, 8), 1), ((40, 40), 5)):
        with pytest.raises(
            ValueError,
            match=f"with {images} images? of .* pixels this network does something else than with other images",
        ):
            check_calls(network, size, images)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_on_gradients_are_refused(hook):
    model = Called(SAME["mean"])
    getattr(model.fc, hook)(lambda *_: None)
    with pytest.raises(CanNotCapture, match="fc changes gradients by a hook"):
        distseg.capture(model)


def test_random_depth_is_a_layer():
    network = distseg.capture(made_networks.shallow(2, 3))
    depths = [layer for layer in network.modules() if isinstance(layer, DropImage)]
    assert [layer.p for layer in depths] == [0.5, 0.25, 0.375] and len(network.dropouts) == 3


def test_parts_that_nothing_uses_stay():
    model = made_networks.written(2, 3)
    network = distseg.capture(model)
    assert {network.names.get(name, name) for name, _ in network.named_parameters()} == {
        name for name, _ in model.named_parameters()
    }


def test_the_module_is_left_alone():
    model = made_networks.squeezed(2, 3).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    distseg.capture(model)
    assert model.training and all(module.training for module in model.modules())
    assert (
        all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        and not model[2].norm._forward_hooks
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_weight_through_a_batch_norm_is_never_taken_for_one_of_a_batch(seed):
    """Refuse a weight computed by a batch norm, whose statistics differ in evaluation."""

    class Through(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm1d(9)
            self.z = nn.Parameter(torch.randn(16, 9))

        def forward(self, x):
            return F.conv2d(self.first(x), self.norm(self.z).view(4, 4, 3, 3), padding=1)

    torch.manual_seed(seed)
    with pytest.raises(CanNotCapture, match="something different in evaluation"):
        capture(Through())
