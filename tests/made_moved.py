"""Networks whose code moves places of the image, as users write them: each is a function of features, between convolutions and norms."""

import torch
import torch.nn.functional as F
from torch import nn


class Moved(nn.Module):
    def __init__(self, in_channels, out_channels, function):
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(in_channels, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, out_channels, 3, padding=1),
        )
        self.deep, self.wide, self.fc = (
            nn.Conv2d(6, 6, 3, padding=1),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.Linear(24, 6),
        )
        self.weights, self.last, self.function = (
            nn.Conv2d(6, 9, 3, padding=1),
            nn.InstanceNorm2d(6, affine=True),
            function,
        )

    def forward(self, x):
        return self.head(F.relu(self.last(self.function(self, F.relu(self.norm(self.conv(x)))))))


def padded_to(x, skip):
    dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
    return F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])


def unet(m, x):
    maps = [x, F.max_pool2d(x, 2)]
    maps.append(F.max_pool2d(maps[1], 2))
    y = m.deep(F.max_pool2d(maps[2], 2))
    for skip in reversed(maps):
        y = (
            padded_to(F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True), skip)
            * 0.5
            + skip
        )
    return y


def cropped_skip(m, x):
    y = F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), m.deep.weight)
    for _ in range(2):
        y = F.conv2d(y, m.deep.weight)
    dy, dx = (x.size(2) - y.size(2)) // 2, (x.size(3) - y.size(3)) // 2
    return F.pad(x[:, :, dy : dy + y.size(2), dx : dx + y.size(3)] + y, (dx, dx, dy, dy))


def up_to_multiple(mode):
    def function(m, x):
        h, w = x.shape[-2:]
        y = F.max_pool2d(F.pad(x, (0, -w % 16, 0, -h % 16), mode=mode), 4)
        return F.interpolate(m.deep(y), scale_factor=4)[..., :h, :w]

    return function


def on_both_sides(m, x):
    h, w = x.shape[-2:]
    y, x_ = -h % 8, -w % 8
    z = F.pad(x, (x_ // 2, x_ - x_ // 2, y // 2, y - y // 2), mode="replicate")
    z = F.interpolate(m.deep(F.avg_pool2d(z, 8)), scale_factor=8, mode="bilinear")
    return z[:, :, y // 2 : y // 2 + h, x_ // 2 : x_ // 2 + w]


def down_to_multiple(m, x):
    h, w = x.shape[-2:]
    y = F.interpolate(m.deep(F.avg_pool2d(x[:, :, : h // 4 * 4, : w // 4 * 4], 4)), scale_factor=4)
    return F.pad(y, (0, w - y.shape[3], 0, h - y.shape[2]))


def in_front(m, x):
    return F.pad(x, (-x.shape[3] % 8, 0))[..., -x.shape[3] :]


def negative_pads(m, x):
    return F.pad(F.pad(x, (-1, 2, 2, -1), mode="reflect"), (1, -2, -2, 1))


def focus(m, x):
    y = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
    return F.interpolate(m.wide(y)[:, :6], scale_factor=2)


def patch_merging(m, x):
    y = x.permute(0, 2, 3, 1)
    h, w = y.shape[1:3]
    y = F.pad(y, (0, 0, 0, w % 2, 0, h % 2))
    y = torch.cat(
        [y[:, 0::2, 0::2, :], y[:, 1::2, 0::2, :], y[:, 0::2, 1::2, :], y[:, 1::2, 1::2, :]], -1
    )
    return F.interpolate(m.fc(F.layer_norm(y, (24,))).permute(0, 3, 1, 2), scale_factor=2)[
        :, :, :h, :w
    ]


def other_strides(m, x):
    return F.interpolate(m.deep(x[:, :, 1::2, ::3]), x.shape[2:])


def unshuffled(m, x):
    return F.pixel_shuffle(m.wide(F.pixel_unshuffle(x, 2)), 2)


def space_to_depth(m, x):
    n, c, h, w = x.shape
    y = (
        x.view(n, c, h // 2, 2, w // 2, 2)
        .permute(0, 3, 5, 1, 2, 4)
        .reshape(n, 4 * c, h // 2, w // 2)
    )
    return m.wide(y).view(n, 2, 2, c, h // 2, w // 2).permute(0, 3, 4, 1, 5, 2).reshape(n, c, h, w)


def depth_last(m, x):
    y = x.permute(0, 2, 3, 1)
    n, h, w, c = y.shape
    y = y.reshape(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)
    return F.interpolate(m.fc(y).permute(0, 3, 1, 2), scale_factor=2)


def attention_in_windows(m, x):
    n, c, h, w = x.shape
    y = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
    y = (y @ y.transpose(1, 2) * c**-0.5).softmax(-1) @ y
    return y.view(n, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


def means_of_blocks(m, x):
    n, c, h, w = x.shape
    return x + F.interpolate(x.view(n, c, h // 2, 2, w // 2, 2).mean((3, 5)), scale_factor=2)


def zeros_between(m, x):
    n, c, h, w = x.shape
    y = F.pad(x.reshape(n, c, h, 1, w, 1), [0, 1, 0, 0, 0, 1]).reshape(n, c, h * 2, w * 2)
    return F.avg_pool2d(y + x.repeat_interleave(2, 2).repeat_interleave(2, dim=3), 2)


def rows_between(m, x):
    n, c, h, w = x.shape
    y = torch.stack([x, m.deep(x)], 3).view(n, c, 2 * h, w)
    return (
        F.max_pool2d(y, (2, 1))
        * x[:, :, :, None].expand(n, c, h, 2, w).reshape(n, c, 2 * h, w)[:, :, ::2]
    )


def differences(m, x):
    dy, dx = x[:, :, 1:] - x[:, :, :-1], x[:, :, :, 1:] - x[:, :, :, :-1]
    return (
        F.pad(dy, (0, 0, 0, 1))
        + F.pad(dx, (0, 1)).abs()
        + F.pad(x.diff(dim=2), (0, 0, 1, 0))
        + F.pad(torch.diff(x, n=2), (1, 1))
    )


def sobel(m, x):
    p = F.pad(x, (1, 1, 1, 1))
    return p[:, :, 2:, 2:] - p[:, :, :-2, :-2] + 2 * p[:, :, 1:-1, 2:] - 2 * p[..., 1:-1, :-2]


def shifts(m, x):
    a, b, c = x.chunk(3, 1)
    return torch.cat(
        [F.pad(a[:, :, 1:], (0, 0, 0, 1)), F.pad(b, (2, -2)), F.pad(c[..., :-1], (1, 0))], 1
    )


def narrowed(m, x):
    y = F.pad(x.narrow(2, 1, x.shape[2] - 3).narrow(-1, 0, x.shape[3] - 1), (0, 1, 2, 1))
    return torch.cat([y[:, :3], F.pad(x[:, 3:, 1:], (0, 0, 0, 1))], 1)


def tokens(m, x):
    n, c, h, w = x.shape
    y = x.flatten(2).transpose(1, 2).reshape(n, h, w, c)[:, 1:, :-1]
    return F.pad(y, (0, 0, 1, 0, 0, 1)).permute(0, 3, 1, 2)


def kernels_of_places(m, x):
    n, c, h, w = x.shape
    windows = F.unfold(x, 3, padding=1).view(n, c, 9, h, w)
    return (windows * m.weights(x).softmax(1).unsqueeze(1)).sum(2)


def local_attention(m, x):
    n, c, h, w = x.shape
    windows = F.unfold(x, 3, padding=2, dilation=2).view(n, c, 9, h * w)
    share = (windows * x.view(n, c, 1, h * w)).sum(1, keepdim=True).softmax(2)
    return (windows * share).sum(2).view(n, c, h, w)


def unfolded_dims(m, x):
    y = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    return y.amax((-1, -2)) - y.mean((4, 5))


def patches(m, x):
    y = x.unfold(2, 4, 4).unfold(3, 4, 4)
    return (y - y.mean((-1, -2), keepdim=True)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)


def folded(m, x):
    u, v = F.unfold(x, 3, padding=1), F.unfold(x, 4, stride=4)
    return F.fold(u * u.sigmoid(), x.shape[2:], 3, padding=1) + F.fold(
        v - v.mean(1, keepdim=True), x.shape[2:], 4, stride=4
    )


def unpooled(m, x):
    y, where = F.max_pool2d(x, 2, 2, return_indices=True)
    return F.max_unpool2d(m.deep(y), where, 2, 2, output_size=x.size())


def grids(m, x):
    y = F.interpolate(F.adaptive_avg_pool2d(x, (x.shape[2] // 4, x.shape[3] // 5)), x.shape[2:])
    return (
        x
        * F.interpolate(
            F.adaptive_max_pool2d(F.relu(x - 0.5), (3, 2)), x.shape[2:], mode="bilinear"
        )
        + y
    )


def means_of_parts(m, x):
    y = F.conv2d(x, m.deep.weight).mean((2, 3), keepdim=True)
    return x * (x[:, :, 3:, :-5].mean((2, 3), keepdim=True) + y) + x * x[:, :, ::2, 1::2].amax(
        (2, 3), keepdim=True
    )


def windows_of_a_shifted_grid(m, x):
    n, c, h, w = x.shape
    y = F.pad(x, (2, 2 - w % 4 + 4, 2, 2 - h % 4 + 4))
    rows, columns = y.shape[2:]
    t = y.view(n, c, rows // 4, 4, columns // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
    t = ((t @ t.transpose(1, 2) * c**-0.5).softmax(-1) @ t).view(
        n, rows // 4, columns // 4, 4, 4, c
    )
    return t.permute(0, 5, 1, 3, 2, 4).reshape(n, c, rows, columns)[:, :, 2 : h + 2, 2 : w + 2]


SIZED = [
    means_of_parts,
    windows_of_a_shifted_grid,
    grids,
    unet,
    cropped_skip,
    on_both_sides,
    down_to_multiple,
    in_front,
    patch_merging,
    other_strides,
]
WHOLE = [
    negative_pads,
    differences,
    sobel,
    shifts,
    narrowed,
    tokens,
    kernels_of_places,
    local_attention,
    unfolded_dims,
    unpooled,
    zeros_between,
    rows_between,
]
IN_BLOCKS = {
    focus: 2,
    unshuffled: 2,
    space_to_depth: 2,
    depth_last: 2,
    attention_in_windows: 4,
    means_of_blocks: 2,
    patches: 4,
    folded: 4,
}
FUNCTIONS = {f.__name__: f for f in (*SIZED, *WHOLE, *IN_BLOCKS)} | {
    f"multiple_{mode}": up_to_multiple(mode) for mode in ("constant", "reflect")
}
MULTIPLES = {f.__name__: k for f, k in IN_BLOCKS.items()}


def __getattr__(name):
    """The network with a function, as settings name it: ``unet_network``."""
    function = FUNCTIONS.get(name.removesuffix("_network"))
    if function is None or not name.endswith("_network"):
        raise AttributeError(name)
    return lambda in_channels, out_channels: Moved(in_channels, out_channels, function)
