"""Recurrent, unrolled and implicit networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ConvLSTMOverBands(nn.Module):
    """Convolutional LSTM that reads the bands one after another (Shi et al. 2015)."""

    def __init__(self, in_channels, out_channels, hidden=6):
        super().__init__()
        self.hidden, self.conv = hidden, nn.Conv2d(1 + hidden, 4 * hidden, 3, padding=1)
        self.head = nn.Conv2d(hidden, out_channels, 1)

    def init_hidden(self, batch_size, image_size):
        height, width = image_size
        weight = self.conv.weight
        return (
            torch.zeros(
                batch_size, self.hidden, height, width, device=weight.device, dtype=weight.dtype
            ),
            torch.zeros(
                batch_size, self.hidden, height, width, device=weight.device, dtype=weight.dtype
            ),
        )

    def forward(self, x):
        b, t, h, w = x.size()
        h_cur, c_cur = self.init_hidden(b, (h, w))
        for step in range(t):
            combined = self.conv(torch.cat([x[:, step : step + 1], h_cur], dim=1))
            cc_i, cc_f, cc_o, cc_g = torch.split(combined, self.hidden, dim=1)
            i, f, o, g = (
                torch.sigmoid(cc_i),
                torch.sigmoid(cc_f),
                torch.sigmoid(cc_o),
                torch.tanh(cc_g),
            )
            c_cur = f * c_cur + i * g
            h_cur = o * torch.tanh(c_cur)
        return self.head(h_cur)


class ConvGRUSteps(nn.Module):
    """Convolutional GRU refined for three steps on the same features (RAFT's update, Teed 2020)."""

    def __init__(self, in_channels, out_channels, ch=8):
        super().__init__()
        self.context, self.inp = (
            nn.Conv2d(in_channels, ch, 3, padding=1),
            nn.Conv2d(in_channels, ch, 3, padding=1),
        )
        self.convz, self.convr, self.convq = (nn.Conv2d(2 * ch, ch, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(ch, out_channels, 1)

    def forward(self, image):
        h, x = torch.tanh(self.context(image)), torch.relu(self.inp(image))
        for _ in range(3):
            hx = torch.cat([h, x], dim=1)
            z, r = torch.sigmoid(self.convz(hx)), torch.sigmoid(self.convr(hx))
            q = torch.tanh(self.convq(torch.cat([r * h, x], dim=1)))
            h = (1 - z) * h + z * q
        return self.head(h)


class GRUOverBands(nn.Module):
    """nn.GRU over the spectrum of each pixel, pixels in the batch.

    Source: spectral recurrences, Mou et al. 2017.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.gru, self.head = (
            nn.GRU(1, 6, batch_first=True),
            nn.Conv2d(6, out_channels, 3, padding=1),
        )

    def forward(self, x):
        n, c, h, w = x.shape
        series = x.permute(0, 2, 3, 1).reshape(n * h * w, c, 1)
        out, _ = self.gru(series)
        return self.head(out[:, -1].view(n, h, w, 6).permute(0, 3, 1, 2))


class NeuralODE(nn.Module):
    """Fourth-order Runge-Kutta steps of a convolutional vector field (Chen et al. 2018)."""

    class Field(nn.Module):
        """Vector field that sees the time as a constant channel."""

        def __init__(self, ch):
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(2, ch), nn.Conv2d(ch + 1, ch, 3, padding=1)

        def forward(self, t, x):
            tt = torch.ones_like(x[:, :1, :, :]) * t
            return self.conv(torch.cat([tt, F.relu(self.norm(x))], 1))

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.f, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            self.Field(8),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x):
        y, dt = self.stem(x), 0.5
        for i in range(2):
            t = i * dt
            k1 = self.f(t, y)
            k2 = self.f(t + dt / 2, y + dt / 2 * k1)
            k3 = self.f(t + dt / 2, y + dt / 2 * k2)
            k4 = self.f(t + dt, y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(y)


class DeepEquilibrium(nn.Module):
    """Fixed-point iterations without gradient, one with (DEQ, Bai et al. 2020)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.inject, self.conv, self.norm = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
        )
        self.head = nn.Conv2d(8, out_channels, 1)

    def step(self, z, x):
        return F.relu(self.norm(z + 0.3 * self.conv(z) + x))

    def forward(self, img):
        x = self.inject(img)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = self.step(z, x)
        return self.head(self.step(z.detach(), x))


class RecurrentConv(nn.Module):
    """Recurrent convolution over pooled frames of the image (RCNN, Liang and Hu 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.feed, self.rec, self.norms = (
            nn.Conv2d(in_channels, 10, 3, padding=1),
            nn.Conv2d(10, 10, 3, padding=1, bias=False),
            nn.ModuleList(nn.LocalResponseNorm(5) for _ in range(3)),
        )
        self.head = nn.Conv2d(10, out_channels, 1)

    def forward(self, x):
        u = self.feed(x)
        state = None
        for norm in self.norms:
            state = norm(F.relu(u if state is None else u + self.rec(state)))
        return self.head(state)


class PredictionFeedback(nn.Module):
    """The previous softmax is fed back beside the image (auto-context, Tu 2008)."""

    def __init__(self, in_channels, out_channels, steps=3):
        super().__init__()
        self.steps, self.k = steps, out_channels
        self.net = nn.Sequential(
            nn.Conv2d(in_channels + out_channels, 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, out_channels, 3, padding=1),
        )

    def forward(self, x):
        n, _, h, w = x.shape
        prob = x.new_full((n, self.k, h, w), 1.0 / self.k)
        for _ in range(self.steps):
            logits = self.net(torch.cat((x, prob), dim=1))
            prob = logits.softmax(1)
        return logits


class MeanFieldCRF(nn.Module):
    """Mean-field updates with a Gaussian of space and a learnt compatibility.

    Source: Zheng et al. 2015.
    """

    def __init__(self, in_channels, out_channels, iterations=3):
        super().__init__()
        self.iterations, self.unary = iterations, nn.Conv2d(in_channels, out_channels, 5, padding=2)
        g = torch.exp(-(torch.arange(-3, 4).float() ** 2) / 8)
        kernel = g[:, None] * g[None, :]
        kernel[3, 3] = 0
        self.register_buffer(
            "kernel", (kernel / kernel.sum()).expand(out_channels, 1, 7, 7).clone()
        )
        self.compatibility = nn.Parameter(1 - torch.eye(out_channels))

    def forward(self, x):
        unary = self.unary(x)
        q = unary
        norm = F.conv2d(torch.ones_like(unary), self.kernel, padding=3, groups=unary.size(1))
        for _ in range(self.iterations):
            message = F.conv2d(F.softmax(q, 1), self.kernel, padding=3, groups=unary.size(1)) / norm
            q = unary - torch.einsum("ij,njhw->nihw", self.compatibility, message)
        return q


class AnisotropicDiffusion(nn.Module):
    """Learnt Perona-Malik diffusion by differences to four neighbours (Chen and Pock 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.kappa, self.head = (
            nn.Conv2d(in_channels, 6, 3, padding=1),
            nn.Parameter(torch.ones(6, 1, 1)),
            nn.Conv2d(6, out_channels, 1),
        )

    def forward(self, x):
        u = self.stem(x)
        for _ in range(3):
            p = F.pad(u, (1, 1, 1, 1), mode="replicate")
            d = [
                p[:, :, :-2, 1:-1] - u,
                p[:, :, 2:, 1:-1] - u,
                p[:, :, 1:-1, :-2] - u,
                p[:, :, 1:-1, 2:] - u,
            ]
            u = u + 0.2 * sum(torch.exp(-((g / self.kappa) ** 2)) * g for g in d)
        return self.head(u)


class LearntISTA(nn.Module):
    """Unrolled convolutional sparse coding with soft thresholds (LISTA, Gregor and LeCun 2010)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.dictionary, self.theta = (
            nn.Parameter(torch.randn(12, in_channels, 5, 5) * 0.05),
            nn.Parameter(torch.full((1, 12, 1, 1), 0.01)),
        )
        self.head = nn.Conv2d(12, out_channels, 1)

    def soft(self, z):
        return torch.sign(z) * F.relu(torch.abs(z) - self.theta)

    def forward(self, x):
        z = self.soft(F.conv2d(x, self.dictionary, padding=2))
        for _ in range(2):
            residual = x - F.conv_transpose2d(z, self.dictionary, padding=2)
            z = self.soft(z + F.conv2d(residual, self.dictionary, padding=2))
        return self.head(z)


class CellularAutomaton(nn.Module):
    """Perception by fixed filters, per-cell MLP, residual updates (Mordvintsev et al. 2020)."""

    def __init__(self, in_channels, out_channels, ch=8):
        super().__init__()
        self.ch, self.cin, self.cout = ch, in_channels, out_channels
        self.w1, self.w2 = nn.Conv2d(3 * ch, 24, 1), nn.Conv2d(24, ch, 1, bias=False)
        sobel = torch.outer(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])) / 8
        identity = torch.zeros(3, 3)
        identity[1, 1] = 1
        self.register_buffer("filters", torch.stack([identity, sobel, sobel.t()])[:, None])

    def forward(self, x):
        state = F.pad(x, (0, 0, 0, 0, 0, self.ch - self.cin))
        for _ in range(3):
            n, c, h, w = state.shape
            y = F.pad(state.reshape(n * c, 1, h, w), [1, 1, 1, 1], "circular")
            y = F.conv2d(y, self.filters).reshape(n, -1, h, w)
            state = state + self.w2(torch.relu(self.w1(y)))
        return state[:, -self.cout :]


class TotalVariationUnrolled(nn.Module):
    """Gradient descent on a smoothed total variation, unrolled (Chambolle-like nets)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.step, self.lam = (
            nn.Conv2d(in_channels, out_channels, 3, padding=1),
            nn.Parameter(torch.tensor(0.2)),
            nn.Parameter(torch.tensor(0.5)),
        )

    def forward(self, x):
        f = self.stem(x)
        u = f.clone()
        for _ in range(3):
            dx, dy = F.pad(torch.diff(u, dim=3), (0, 1)), F.pad(torch.diff(u, dim=2), (0, 0, 0, 1))
            norm = torch.sqrt(dx.square() + dy.square() + 1e-2)
            px, py = dx / norm, dy / norm
            div = px - F.pad(px, (1, 0))[..., :-1] + py - F.pad(py, (0, 0, 1, 0))[..., :-1, :]
            u = u - self.step * (u - f - self.lam * div)
        return u


class ActiveMemory(nn.Module):
    """Convolutional gated units with shared weights over depth (Neural GPU, Kaiser 2016)."""

    def __init__(self, in_channels, out_channels, ch=8):
        super().__init__()
        self.embed, self.u, self.r, self.c = (
            nn.Conv2d(in_channels, ch, 1),
            *(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(3)),
        )
        self.out = nn.Conv2d(ch, out_channels, 1)

    def forward(self, x):
        s, states = self.embed(x).tanh(), []
        while len(states) < 4:
            u, r = self.u(s).sigmoid(), self.r(s).sigmoid()
            s = u * s + (1 - u) * self.c(r * s).tanh()
            states += [s]
        return self.out(torch.stack(states).max(dim=0).values)
