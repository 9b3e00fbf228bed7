"""Networks as users write them, each with something that a tool which knows layers by their class gets wrong."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from distseg.models.layers import Add, Cat, Pop, Stash, Sum
from distseg.models.network import Network


class ActiveNorm(nn.BatchNorm2d):
    """A norm with its activation, as many code bases have it."""

    def forward(self, x):
        return F.leaky_relu(super().forward(x), 0.1)


class EarlyNorm(nn.BatchNorm2d):
    """A plain one with another default."""

    def __init__(self, channels):
        super().__init__(channels, eps=1e-3)


class NoisyDropout(nn.Dropout):
    def forward(self, x):
        return super().forward(x) + 0.25


class StandardConv(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class BlurPool(nn.Conv2d):
    """Blurs with a fixed kernel before it takes every second pixel."""

    def __init__(self, channels):
        super().__init__(channels, channels, 3, 2, 1, groups=channels, bias=False)

    def forward(self, x):
        kernel = torch.ones_like(self.weight) / 9 * self.weight.mean()
        return F.conv2d(x, kernel, None, self.stride, self.padding, groups=self.groups)


class LoudRelu(nn.ReLU):
    """A subclass that computes something else."""

    def forward(self, x):
        return F.silu(x) * 2


def _doubled(layer):
    layer.register_forward_hook(lambda layer, given, made: 2 * made)
    return layer


def residual(in_channels, out_channels):
    """An ordinary block whose skip is put aside before any layer looks beyond a tile."""
    block = [
        Stash("a"),
        nn.Conv2d(in_channels, in_channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(in_channels, in_channels, 5, padding=2),
        Add("a"),
    ]
    return nn.Sequential(
        *block,
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


def long_skip(in_channels, out_channels):
    """A skip around the whole network."""
    inner = [
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 4, 3, padding=1),
    ]
    return nn.Sequential(
        Stash("image"),
        *inner,
        Pop("image"),
        nn.Conv2d(in_channels + 4, 4, 3, padding=1),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


def residuals(in_channels, out_channels):
    """Residual blocks with live norms, of another size and another number of channels, whose shortcuts have a norm of their own on the same map."""
    layers = {
        "stem": nn.Conv2d(in_channels, 4, 3, padding=1),
        "norm1": nn.InstanceNorm2d(4), "act1": nn.ReLU(), "conv1": nn.Conv2d(4, 6, 3, stride=2, padding=1),
        "norm2": nn.InstanceNorm2d(6), "act2": nn.ReLU(), "conv2": nn.Conv2d(6, 6, 3, padding=1),
        "norm3": nn.BatchNorm2d(4), "short": nn.Conv2d(4, 6, 1, stride=2), "sum": Sum(),
        "act3": nn.ReLU(), "conv3": nn.Conv2d(6, 6, 3, padding=2, dilation=2), "sum2": Sum(),
        "up": nn.Upsample(scale_factor=2), "cat": Cat(), "head": nn.Conv2d(10, out_channels, 1),
    }  # fmt: skip
    return Network(
        layers,
        reads={
            "norm3": ["stem"],
            "sum": ["conv2", "short"],
            "sum2": ["sum", "conv3"],
            "cat": ["up", "stem"],
        },
    )


def pyramid(in_channels, out_channels):
    """Several dilations of one map side by side, the last of which sees far, joined with the image."""
    layers = {"stem": nn.Conv2d(in_channels, 4, 3, padding=1), "act": nn.ReLU()}
    branches = {f"look{d}": nn.Conv2d(4, 3, 3, padding=d, dilation=d) for d in (1, 2, 5)}
    layers |= branches | {
        "cat": Cat(),
        "norm": nn.GroupNorm(3, 9 + in_channels),
        "mix": nn.Conv2d(9 + in_channels, 4, 1),
        "far": nn.Conv2d(4, 4, 3, padding=1),
    }
    layers |= {
        "one": nn.Conv2d(4, 4, 1),
        "sum": Sum(),
        "head": nn.Conv2d(4, out_channels, 3, padding=1),
    }
    return Network(
        layers,
        reads={name: ["act"] for name in branches}
        | {"cat": [*branches, "image"], "sum": ["far", "mix", "act", "one"]},
    )


def dense(in_channels, out_channels):
    """Every map read by all later ones of its level, and levels joined across, as in UNet++; a Sequential inside with a skip of its own."""

    def block(n, m):
        return nn.Sequential(
            nn.Conv2d(n, m, 3, padding=1),
            nn.BatchNorm2d(m),
            Stash("in"),
            nn.LeakyReLU(0.1),
            nn.Conv2d(m, m, 3, padding=1),
            Add("in"),
        )

    layers = {
        "a0": block(in_channels, 3), "down": nn.MaxPool2d(2, ceil_mode=True), "b0": block(3, 4), "up0": nn.Upsample(scale_factor=2, mode="bilinear"),
        "cat1": Cat(), "a1": block(7, 3), "down2": nn.AvgPool2d(2, ceil_mode=True), "cat2": Cat(), "b1": block(7, 4), "up1": nn.ConvTranspose2d(4, 4, 2, stride=2),
        "cat3": Cat(), "a2": block(10, 3), "head": nn.Conv2d(3, out_channels, 1),
    }  # fmt: skip
    return Network(
        layers,
        reads={
            "cat1": ["up0", "a0"],
            "down2": ["a1"],
            "cat2": ["down2", "b0"],
            "cat3": ["up1", "a1", "a0"],
        },
    )


def joined_unknown(in_channels, out_channels):
    """A layer of the user's that takes two maps."""
    return Network(
        {
            "a": nn.Conv2d(in_channels, 4, 3, padding=1),
            "b": nn.Conv2d(4, 4, 3, padding=1),
            "gate": Gate(),
            "head": nn.Conv2d(4, out_channels, 3, padding=1),
        },
        reads={"gate": ["a", "b"]},
    )


def in_place_shared(in_channels, out_channels):
    """An activation in place on a map that the sum reads too."""
    layers = {
        "a": nn.Conv2d(in_channels, 4, 3, padding=1),
        "act": nn.ReLU(inplace=True),
        "b": nn.Conv2d(4, 4, 3, padding=1),
        "sum": Sum(),
        "head": nn.Conv2d(4, out_channels, 1),
    }
    return Network(layers, reads={"sum": ["a", "b"]})


class Gate(nn.Module):
    def forward(self, a, b):
        return a * torch.sigmoid(b)


class Squeezed(nn.Module):
    """Squeeze and excitation of a residual block, as most write it."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.pool, self.fc1, self.fc2 = (
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, 2, 1),
            nn.Conv2d(2, channels, 1),
        )

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)))
        return x + y * torch.sigmoid(self.fc2(F.relu(self.fc1(self.pool(y)))))


class Excited(nn.Module):
    """The same by vectors, and a gate of each place by the mean and the maximum of its channels."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.fc = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Linear(channels, channels),
        )
        self.places = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x):
        y = self.conv(x)
        y = y * torch.sigmoid(self.fc(y.mean((2, 3))))[:, :, None, None]
        y = y * torch.sigmoid(
            self.places(torch.cat((y.mean(1, keepdim=True), y.max(1, keepdim=True)[0]), 1))
        )
        return y + x


class Pooling(nn.Module):
    """A branch that is the mean of the image, normalised, beside a dilated one, as in DeepLab."""

    def __init__(self, channels):
        super().__init__()
        self.near = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=2, dilation=2, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
        )
        norm = nn.BatchNorm2d(
            4, eps=0.01
        )  # as means of noise hardly differ, a smaller one makes digits of rounding
        self.far = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1, bias=False), norm, nn.ReLU()
        )
        self.mix = nn.Conv2d(8, channels, 1)

    def forward(self, x):
        far = F.interpolate(self.far(x), size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.mix(torch.cat((self.near(x), far), 1))


class ConvNext(nn.Module):
    """Its norm over channels and its linear layers see maps whose channels come last."""

    def __init__(self, channels):
        super().__init__()
        self.depthwise, self.norm = (
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            nn.LayerNorm(channels),
        )
        self.fc1, self.fc2, self.gamma = (
            nn.Linear(channels, 2 * channels),
            nn.Linear(2 * channels, channels),
            nn.Parameter(torch.full((channels,), 0.5)),
        )

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = F.dropout(self.fc2(F.gelu(self.fc1(y))), 0.2, self.training)
        return x + (self.gamma * y).permute(0, 3, 1, 2)


def _around(block, in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.MaxPool2d(2),
        block,
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


def squeezed(in_channels, out_channels):
    return _around(Squeezed(4), in_channels, out_channels)


class Split(nn.Module):
    """Attention between groups of channels, as ResNeSt's, channels in another order, and a mean over the image used at more places."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.gate = (
            nn.Conv2d(channels, 2 * channels, 3, padding=1, groups=2),
            nn.Conv2d(channels, 2 * channels, 1),
        )

    def forward(self, x):
        y = self.conv(x).relu()
        n, channels, height, width = y.shape
        y = y.view(n, 2, channels // 2, height, width)
        mean = y.sum(1).mean((2, 3), keepdim=True)
        share = (
            self.gate(mean)
            .view(n, 1, 2, -1)
            .transpose(1, 2)
            .softmax(1)
            .reshape(n, 2, channels // 2, 1, 1)
        )
        chosen = (y * share).sum(1)
        turned = chosen.view(n, 2, -1, height, width).transpose(1, 2).reshape(n, -1, height, width)
        return turned + F.max_pool2d(F.interpolate(x, scale_factor=2) * mean.sigmoid(), 2)


def split(in_channels, out_channels):
    return _around(Split(4), in_channels, out_channels)


def excited(in_channels, out_channels):
    return _around(Excited(4), in_channels, out_channels)


def pooling(in_channels, out_channels):
    return _around(Pooling(4), in_channels, out_channels)


class Pyramid(nn.Module):
    """Pools of an image to grids of several sizes, as PSPNet's, one of them with a batch norm."""

    def __init__(self, channels):
        super().__init__()
        self.one, self.two, self.norm, self.three = (
            nn.Conv2d(channels, 2, 1),
            nn.Conv2d(channels, 3, 1, bias=False),
            nn.BatchNorm2d(3),
            nn.Conv2d(channels, 2, 3, padding=1),
        )
        self.join = nn.Conv2d(channels + 7, channels, 3, padding=1)

    def forward(self, x):
        one = F.interpolate(self.one(F.adaptive_avg_pool2d(x, 1)), x.shape[2:], mode="bilinear")
        two = F.interpolate(
            F.relu(self.norm(self.two(F.adaptive_avg_pool2d(x, 2)))),
            x.shape[2:],
            mode="bilinear",
            align_corners=True,
        )
        three = F.interpolate(
            self.three(F.adaptive_avg_pool2d(x, (3, 2))), x.shape[2:], mode="bicubic"
        )
        return self.join(torch.cat((x, one, two, three), 1))


def pyramid_pool(in_channels, out_channels):
    return _around(Pyramid(4), in_channels, out_channels)


class Attended(nn.Module):
    """Channels weighed by means and maxima of an image, as CBAM's, and by its norms, as ConvNeXt V2's, of values that many places share."""

    def __init__(self, channels):
        super().__init__()
        self.fc, self.conv, self.scale = (
            nn.Linear(channels, channels),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Parameter(torch.rand(channels)),
        )
        self.most = nn.AdaptiveMaxPool2d(1)

    def forward(self, x):
        y = F.relu(self.conv(x))
        shared = (y * 4).clamp(max=1)
        weights = (
            self.fc(F.avg_pool2d(y, y.shape[2:]).flatten(1))
            + self.fc(self.most(y).flatten(1)) * shared.amax((2, 3))
            + self.most(shared).flatten(1)
        )
        y = (y * weights.sigmoid()[:, :, None, None]).permute(0, 2, 3, 1)
        norms = y.norm(p=2, dim=(1, 2), keepdim=True)
        y = y + self.scale * (y * (norms / (norms.mean(-1, keepdim=True) + 1e-6)))
        return x + y.permute(0, 3, 1, 2) * torch.tanh(x.sum((2, 3), keepdim=True))


def attended(in_channels, out_channels):
    return _around(Attended(4), in_channels, out_channels)


class Levels(nn.Module):
    """Two levels whose maps are joined as they are: images must be multiples of 4 pixels."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(in_channels, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.up, self.norm, self.head = (
            nn.ConvTranspose2d(8, 4, 2, 2),
            nn.BatchNorm2d(4),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.norm(self.b(F.max_pool2d(a, 2))))
        c = F.interpolate(F.relu(self.c(F.max_pool2d(b, 2))), scale_factor=2, mode="bilinear")
        return self.head(torch.cat((a, self.up(torch.cat((b, c), 1))), 1))


class Filled(Levels):
    """The same for any images."""

    def forward(self, x):
        height, width = x.shape[-2:]
        return super().forward(F.pad(x, (0, -width % 4, 0, (4 - height % 4) % 4)))[
            :, :, :height, :width
        ]


def levels(in_channels, out_channels):
    return Levels(in_channels, out_channels)


def filled(in_channels, out_channels):
    return Filled(in_channels, out_channels)


class FilledMeans(nn.Module):
    """Means and a grid of a map with zeros behind, which count; maps of the filled size are deep enough to lie in the zeros alone."""

    def __init__(self, channels):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x):
        height, width = x.shape[2:]
        y = F.gelu(self.a(F.pad(x, (0, -width % 8, 0, -height % 8))))
        deep = F.interpolate(F.gelu(self.b(F.max_pool2d(y, 8))), scale_factor=8, mode="bilinear")
        y = (
            y * y.mean((2, 3), keepdim=True)
            + deep
            + F.interpolate(F.adaptive_avg_pool2d(y, (2, 3)), size=y.shape[2:], mode="bilinear")
        )
        return y[..., :height, :width]


def filled_means(in_channels, out_channels):
    return nn.Sequential(
        FilledMeans(in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
    )


class Spelled(nn.Module):
    """Means of an image in spellings of their own."""

    def __init__(self, channels, out_channels):
        super().__init__()
        self.conv, self.fc, self.weight = (
            nn.Conv2d(channels, 6, 3, padding=1),
            nn.Linear(12, 6),
            nn.Parameter(torch.rand(6, 6)),
        )
        self.head = nn.Conv2d(6, out_channels, 3, padding=1)

    def forward(self, x):
        y = F.gelu(self.conv(x - x.mean((2, 3), keepdim=True) + F.adaptive_avg_pool2d(x, 1)))
        levels = self.fc(torch.cat((y.mean((2, 3)), F.avg_pool2d(y, 2).mean((2, 3))), 1))
        mixed = F.normalize(torch.einsum("nc,kc->nk", levels, self.weight), dim=1)
        grid = F.adaptive_avg_pool2d(y, 3)
        y = y * torch.sigmoid(grid.mean((2, 3), keepdim=True)) + F.interpolate(
            grid * y.mean((2, 3), keepdim=True), size=y.shape[2:]
        )
        return self.head(
            F.normalize(y, dim=1)
            / torch.norm(y, p=2, dim=(2, 3), keepdim=True)
            * mixed[..., None, None]
        )


def spelled(in_channels, out_channels):
    return Spelled(in_channels, out_channels)


class NormedTokens(nn.Module):
    """Norms of vectors in a module that is not followed, and images that see each other."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.tokens, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            Tokens(8),
            nn.Conv2d(8, out_channels, 3, padding=1),
        )
        self.batch, self.group = nn.BatchNorm1d(8), nn.GroupNorm(2, 8)

    def forward(self, x):
        y = self.tokens(F.relu(self.conv(x)))
        vector = y.mean((2, 3))
        return self.head(
            y * (self.batch(vector) + self.group(vector) - vector.mean(0))[:, :, None, None]
        )


def normed_tokens(in_channels, out_channels):
    return NormedTokens(in_channels, out_channels)


class Tokens(nn.Module):
    """Attention between all places of a deep map, whose calls are not followed."""

    def __init__(self, channels):
        super().__init__()
        self.norm, self.attention, self.drop = (
            nn.LayerNorm(channels),
            nn.MultiheadAttention(channels, 2, batch_first=True),
            nn.Dropout2d(0.3),
        )
        self.batch, self.squeeze = nn.BatchNorm2d(channels), nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        y = self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).view_as(x)
        return self.drop(F.relu(self.batch(x + y))) * self.squeeze(y).sigmoid()


def tokens(in_channels, out_channels):
    return _around(Tokens(4), in_channels, out_channels)


class NoisyTokens(Tokens):
    def forward(self, x):
        return super().forward(x) * (torch.rand(len(x), 1, 1, 1, device=x.device) > 0.1).to(x.dtype)


def noisy_tokens(in_channels, out_channels):
    return _around(NoisyTokens(4), in_channels, out_channels)


def convnext(in_channels, out_channels):
    return _around(ConvNext(4), in_channels, out_channels)


class Written(nn.Module):
    """A U-Net as one writes it, with functions, layers that stand at two places, a part that nothing uses, and a resize to the skip's size."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.down, self.deep, self.up = (
            nn.Conv2d(in_channels, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(8, 4, 3, padding=1),
        )
        self.head, self.norm, self.act, self.spare = (
            nn.Conv2d(4, out_channels, 1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Conv2d(2, 2, 3),
        )

    def forward(self, x):
        skip = self.act(self.down(x))
        y = F.dropout2d(F.avg_pool2d(skip, 2), 0.3, self.training)
        y = self.act(self.norm(self.deep(y)))
        a, b = F.silu(y).chunk(2, dim=1)
        y = torch.cat((a * 2, b - 1), dim=1)
        y = F.interpolate(y, size=skip.shape[-2:], mode="nearest")
        y = self.up(torch.cat((skip, y), dim=1))
        y += 0.5
        return self.head(F.leaky_relu_(y, 0.2))


class Merged(nn.Module):
    """Maps of several levels, up-sampled with aligned corners and added up as a stack, as in a feature pyramid."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(in_channels, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, 2, 1),
            nn.Conv2d(4, 4, 3, 2, 1),
        )
        self.up2, self.up4 = (
            nn.UpsamplingBilinear2d(scale_factor=2),
            nn.Upsample(scale_factor=4, mode="bilinear", align_corners=True),
        )
        self.norm, self.head = nn.BatchNorm2d(4), nn.Conv2d(4, out_channels, 3, padding=1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.relu(a))
        merged = torch.stack([a, self.up2(b), self.up4(self.c(F.relu(b)))]).sum(dim=0)
        return self.head(
            F.interpolate(
                F.max_pool2d(F.relu(self.norm(merged)), 2),
                size=x.shape[2:],
                mode="bilinear",
                align_corners=True,
            )
        )


def merged(in_channels, out_channels):
    return Merged(in_channels, out_channels)


class Shallow(nn.Module):
    """Stochastic depth as three libraries write it."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.a, self.b, self.c = (
            nn.Conv2d(in_channels, 4, 3, padding=1),
            *(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)),
        )
        self.head = nn.Conv2d(4, out_channels, 1)

    def forward(self, x):
        x = F.relu(self.first(x))
        shape = (len(x), 1, 1, 1)
        if not self.training:
            return self.head(self._all(x))
        y = self.a(x)
        x = x + y * y.new_empty(shape).bernoulli_(0.5).div_(0.5)
        y = self.b(x)
        x = x + y * torch.empty(shape, dtype=y.dtype, device=y.device).bernoulli_(0.75).div_(0.75)
        y = torch.div(self.c(x), 0.625)
        return self.head(
            x + y * torch.floor(0.625 + torch.rand(shape, dtype=y.dtype, device=y.device))
        )

    def _all(self, x):
        x = x + self.a(x)
        x = x + self.b(x)
        return x + self.c(x)


class Dropped(nn.Module):
    """In place, of what is read again."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.drop, self.head = (
            nn.Conv2d(in_channels, 4, 3, padding=1),
            nn.Dropout(0.3, inplace=True),
            nn.Conv2d(4, out_channels, 3, padding=1),
        )

    def forward(self, x):
        x = self.first(x) * 1
        y = self.drop(x)
        y = y + x
        F.dropout2d(y, 0.5, self.training, True)
        return self.head(y)


def dropped(in_channels, out_channels):
    return Dropped(in_channels, out_channels)


def watched(in_channels, out_channels):
    """A hook that changes a gradient."""
    model = _with(nn.Tanh(), in_channels, out_channels)
    model[0].weight.register_hook(lambda g: 3 * g)
    return model


def orthogonal(in_channels, out_channels):
    return _with(
        parametrizations.orthogonal(nn.Conv2d(4, 4, 3, padding=1)), in_channels, out_channels
    )


def scripted(in_channels, out_channels):
    return _with(torch.jit.script(LoudRelu()), in_channels, out_channels)


def cropped(in_channels, out_channels):
    """A shift by a pixel."""
    return _with(nn.ZeroPad2d((1, -1, 0, 0)), in_channels, out_channels)


def shallow(in_channels, out_channels):
    return Shallow(in_channels, out_channels)


class Again(nn.Module):
    """A convolution at two places, and far apart."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.same, self.head = (
            nn.Conv2d(in_channels, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, out_channels, 3, padding=1),
        )

    def forward(self, x):
        return self.head(self.same(F.relu(self.same(self.first(x)))))


def again(in_channels, out_channels):
    return Again(in_channels, out_channels)


def written(in_channels, out_channels):
    return Written(in_channels, out_channels)


def one_sided(in_channels, out_channels):
    """Padding before, an even kernel behind it: as many pixels, but another middle."""
    return nn.Sequential(
        nn.ZeroPad2d((1, 0, 1, 0)),
        nn.Conv2d(in_channels, 4, 2),
        nn.ReLU(),
        nn.ZeroPad2d((0, 3, 0, 3)),
        nn.Conv2d(4, 4, 4),
        nn.InstanceNorm2d(4),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


def dilated(in_channels, out_channels):
    """An even kernel with gaps: at the middle of what a cell looks at there is nothing."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.ReLU(),
        nn.ZeroPad2d((1, 2, 1, 2)),
        nn.Conv2d(4, 4, 2, dilation=3),
        nn.ReLU(),
        nn.Conv2d(4, out_channels, 1),
    )


def replicating(in_channels, out_channels):
    """Padding wider than the deepest map."""
    down = [nn.Conv2d(in_channels, 4, 3, padding=1), *(nn.MaxPool2d(2) for _ in range(3))]
    deep = nn.Conv2d(4, 4, 9, padding=4, padding_mode="replicate")
    return nn.Sequential(
        *down,
        deep,
        nn.ReLU(),
        nn.Upsample(scale_factor=8),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


def shuffled(in_channels, out_channels):
    """The last layer is no convolution, and the last convolution has other channels."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(4, 4 * out_channels, 1),
        nn.PixelShuffle(2),
    )


def stash_in_place(in_channels, out_channels):
    """What is put aside is overwritten by the next layer: PyTorch's own result has the skip activated too."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        Stash("a"),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        Pop("a"),
        nn.Conv2d(8, out_channels, 3, padding=1),
    )


def early_norm(in_channels, out_channels):
    return _with(EarlyNorm(4), in_channels, out_channels)


def active_norm(in_channels, out_channels):
    return _with(ActiveNorm(4), in_channels, out_channels)


def noisy_dropout(in_channels, out_channels):
    return _with(NoisyDropout(0.5), in_channels, out_channels)


def loud_relu(in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        LoudRelu(),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


def hooked_norm(in_channels, out_channels):
    return _with(_doubled(nn.BatchNorm2d(4)), in_channels, out_channels)


def hooked_conv(in_channels, out_channels):
    return _with(_doubled(nn.Conv2d(4, 4, 3, padding=1)), in_channels, out_channels)


def hooked_block(in_channels, out_channels):
    """Hooks of a Sequential inside the flat one."""
    return _with(
        _doubled(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())), in_channels, out_channels
    )


def hooked_pointwise(in_channels, out_channels):
    return _with(_doubled(nn.Conv2d(4, 4, 1)), in_channels, out_channels)


def standardised(in_channels, out_channels):
    return _with(StandardConv(4, 4, 3, padding=1), in_channels, out_channels)


def blurred(in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        BlurPool(4),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


def weight_normed(in_channels, out_channels):
    return _with(
        parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1)), in_channels, out_channels
    )


def weight_normed_by_hook(in_channels, out_channels):
    return _with(weight_norm(nn.Conv2d(4, 4, 3, padding=1)), in_channels, out_channels)


def spectral_normed(in_channels, out_channels):
    return _with(
        parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)), in_channels, out_channels
    )


def spectral_normed_by_hook(in_channels, out_channels):
    return _with(spectral_norm(nn.Conv2d(4, 4, 3, padding=1)), in_channels, out_channels)


def softened(in_channels, out_channels):
    """Over the rows of the image, not over channels."""
    return _with(nn.Softmax(dim=2), in_channels, out_channels)


def never_popped(in_channels, out_channels):
    return _with(Stash("a"), in_channels, out_channels)


def stashed_twice(in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        Stash("a"),
        nn.ReLU(),
        Stash("a"),
        nn.Conv2d(4, 4, 3, padding=1),
        Pop("a"),
        nn.Conv2d(8, out_channels, 3, padding=1),
    )


def _with(layer, in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        layer,
        nn.ReLU(),
        nn.Conv2d(4, out_channels, 3, padding=1),
    )


def cancelling(in_channels=3, out_channels=3):
    """Maps far from zero, of which a norm leaves the last digits."""
    first = nn.Conv2d(in_channels, 4, 3, padding=1)
    nn.init.constant_(first.bias, 1e6)
    return nn.Sequential(
        first, nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, out_channels, 3, padding=1)
    )
