"""Networks whose passes draw random numbers, or call layers in ways by which masks and statistics would be others than PyTorch's."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Around(nn.Module):
    """A convolution, a function of its result, and another convolution.

    Args:
        function: called with the module and the map.
        whole: the places of the image are sorted, so that the network is not followed and images stay whole.
        drop: the dropout that ``function`` has as ``drop``.
    """

    def __init__(
        self, function, whole: bool = False, drop: nn.Module | None = None, in_channels: int = 2
    ):
        super().__init__()
        self.first, self.block, self.last = (
            nn.Conv2d(in_channels, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 3, 1),
        )
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm2d(4)
        self.function, self.whole, self.drop = function, whole, drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.whole:
            x = x * x.flatten(2).sort(-1).values.view_as(x)
        return self.last(self.function(self, x))


def kept(x: Tensor, keep: float = 0.7) -> Tensor:
    """A 0 or 1 for each image."""
    return x.new_empty(len(x), 1, 1, 1).bernoulli_(keep)


def both_modalities(m: Around, x: Tensor) -> Tensor:
    """One draw leaves out both branches of an image."""
    if not m.training:
        return x + m.block(x)
    mask = kept(x)
    return x * mask + m.block(x) * mask


def both_scales(m: Around, x: Tensor) -> Tensor:
    """One draw leaves out the maps of two scales."""
    fine, coarse = m.block(x), m.block(F.max_pool2d(x, 2))
    if m.training:
        mask = kept(x) / 0.7
        fine, coarse = fine * mask, coarse * mask
    return fine + F.interpolate(coarse, size=fine.shape[2:])


def rate_of_the_layer(m: Around, x: Tensor) -> Tensor:
    return F.dropout(x, m.drop.p, m.training)


def attention_dropout(m: Around, x: Tensor) -> Tensor:
    """Drop attention weights as timm's transformers do."""
    tokens = F.avg_pool2d(x, 8).flatten(2).transpose(1, 2)
    made = F.scaled_dot_product_attention(
        tokens, tokens, tokens, dropout_p=m.drop.p if m.training else 0.0
    )
    return x + made.mean(1)[:, :, None, None]


def large_images_alone(m: Around, x: Tensor) -> Tensor:
    """Noise, where images are larger than those that a check begins with."""
    return x + 0.1 * torch.randn_like(x) if m.training and x.shape[-1] > 300 else x


def windows(m: Around, x: Tensor) -> Tensor:
    """Dropout in windows that lie in the dim of the batch, as in Swin."""
    n, c, h, w = x.shape
    cut = x.view(n, c, h // 8, 8, w // 8, 8).permute(0, 2, 4, 3, 5, 1).reshape(-1, 64, c)
    return (
        m.drop(m.linear(cut))
        .view(n, h // 8, w // 8, 8, 8, c)
        .permute(0, 5, 1, 3, 2, 4)
        .reshape(n, c, h, w)
    )


def frames(m: Around, x: Tensor) -> Tensor:
    """Dropout of groups of channels that lie in the dim of the batch."""
    return m.drop(x.reshape(2 * len(x), -1, *x.shape[2:])).view_as(x)


def of_all_images(m: Around, x: Tensor) -> Tensor:
    """One mask for all images."""
    return x + m.drop(
        m.linear.weight[None, :, :, None].mean(2, keepdim=True).expand(1, 4, *x.shape[2:])
    )


def tokens(m: Around, x: Tensor) -> Tensor:
    """Dropout of tokens (N, L, C)."""
    made = x.flatten(2).transpose(1, 2)
    return (made + m.drop(m.linear(made))).transpose(1, 2).view_as(x)


def vector(m: Around, x: Tensor) -> Tensor:
    """Dropout of a vector of the image."""
    return x * m.drop(m.linear(x.mean((2, 3))))[:, :, None, None]


def twice(m: Around, x: Tensor) -> Tensor:
    """One dropout at two places."""
    return m.drop(x) - m.drop(x)


def once(m: Around, x: Tensor) -> Tensor:
    return m.drop(x)


def evaluated_behind(m: Around, x: Tensor) -> Tensor:
    """A norm in evaluation behind its own pass in training, whose running statistics it then reads."""
    y = m.norm(m.block(x))
    was = m.norm.training
    m.norm.eval()
    z = m.norm(m.block(x / 2))
    m.norm.train(was)
    return y + y * z.sigmoid()


def evaluated_before(m: Around, x: Tensor) -> Tensor:
    """The other way round, which is known: it reads what the step before left."""
    was = m.norm.training
    m.norm.eval()
    with torch.no_grad():
        z = m.norm(m.block(x / 2))
    m.norm.train(was)
    y = m.norm(m.block(x))
    return y + y * z.sigmoid()


def looked_at(m: Around, x: Tensor) -> Tensor:
    """Numbers of the map, so that nobody follows the pass."""
    return x if float(x.abs().max()) < 1e9 else x * 0


def evaluated_unseen(m: Around, x: Tensor) -> Tensor:
    return evaluated_behind(m, looked_at(m, x))


def statistics_read_unseen(m: Around, x: Tensor) -> Tensor:
    """Read running statistics that a norm has just moved."""
    y = m.norm(looked_at(m, x))
    return y - m.norm.running_mean.view(1, -1, 1, 1)


def less_its_batch(m: Around, x: Tensor) -> Tensor:
    """Statistics of the batch by hand."""
    return x - x.mean((0, 2, 3), keepdim=True)


def by_their_number(m: Around, x: Tensor) -> Tensor:
    return x * 2 if len(x) == 1 else x


def norm(m: Around, x: Tensor) -> Tensor:
    return m.norm(x)


def norm_of_frames(m: Around, x: Tensor) -> Tensor:
    """A norm of groups of channels that lie in the dim of the batch."""
    return m.frames(x.reshape(2 * len(x), -1, *x.shape[2:])).view_as(x)


def norm_by_function(m: Around, x: Tensor) -> Tensor:
    """A function that moves the running statistics of a layer."""
    return F.batch_norm(
        x, m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias, m.training
    )


class Wired(nn.Module):
    """Channels in an order, and a scale, of Python's and NumPy's random numbers, which ``__init__`` draws."""

    def __init__(self, in_channels: int = 3, out_channels: int = 3):
        super().__init__()
        self.order, self.scale = random.sample(range(8), 8), float(np.random.rand())
        self.first, self.last = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x)[:, self.order]) * self.scale)


def twice_network(in_channels=3, out_channels=3):
    return Around(
        lambda m, x: F.relu(m.drop(m.norm(m.drop(x)))), True, nn.Dropout2d(0.3), in_channels
    )


def joined_network(in_channels=3, out_channels=3):
    return Around(less_its_batch, True, None, in_channels)


def frames_network(kind, frozen=False, in_channels=3, out_channels=3):
    """A network on whole images, with a norm of two frames of each.

    Args:
        kind: batch, instance or group.
        frozen: it stays in evaluation, with statistics of its own.
    """
    made = Around(norm_of_frames, True, None, in_channels)
    made.frames = {
        "batch": nn.BatchNorm2d,
        "instance": nn.InstanceNorm2d,
        "group": lambda n: nn.GroupNorm(1, n),
    }[kind](2)
    if frozen:
        made.frames.running_mean.uniform_(), made.frames.running_var.uniform_(0.5, 2)
        made.frames.train = lambda mode=True: made.frames
        made.frames.training = False
    return made
