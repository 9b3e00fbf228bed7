"""Networks in which few queries, keys or codes meet all places of the image."""

import torch
import torch.nn.functional as F
from torch import nn


class Latents(nn.Module):
    """Learnt queries read the pixels, think, and write back to them."""

    def __init__(self, in_channels, out_channels, dim=8):
        super().__init__()
        self.stem, self.head = nn.Conv2d(in_channels, dim, 3, 2, 1), nn.Conv2d(dim, out_channels, 1)
        self.latents = nn.Parameter(torch.randn(3, dim))
        self.read = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.think = nn.TransformerEncoderLayer(dim, 2, 12, dropout=0.0, batch_first=True)
        self.q, self.kv, self.norm = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.LayerNorm(dim)

    def forward(self, image):
        x = F.relu(self.stem(image))
        b, c, h, w = x.shape
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        latents = self.latents.unsqueeze(0).repeat(b, 1, 1)
        read, shares = self.read(latents, tokens, tokens)
        latents = self.think(latents + read)
        q = self.q(tokens).view(b, h * w, 2, c // 2).transpose(1, 2)
        k, v = self.kv(latents).view(b, -1, 2, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        y = (tokens + y + shares.transpose(1, 2).mean(2, keepdim=True)).transpose(1, 2)
        return F.interpolate(self.head(y.reshape(b, c, h, w)), image.shape[2:])


class Memory(nn.Module):
    """Each pixel looks at parameters, and a class token at all pixels."""

    def __init__(self, in_channels, out_channels, dim=8):
        super().__init__()
        self.stem, self.head = nn.Conv2d(in_channels, dim, 3, 1, 1), nn.Conv2d(dim, out_channels, 1)
        self.memory, self.bias = (
            nn.Parameter(torch.randn(1, 5, dim)),
            nn.Parameter(torch.randn(1, 5)),
        )
        self.look = nn.MultiheadAttention(dim, 2)
        self.token = nn.Parameter(torch.randn(dim))

    def forward(self, x):
        x = F.relu(self.stem(x))
        memory = self.memory.expand(len(x), -1, -1).transpose(0, 1)
        tokens = x.flatten(2).permute(2, 0, 1)
        tokens = tokens + self.look(tokens, memory, memory, attn_mask=None, need_weights=False)[0]
        keys = tokens.transpose(0, 1)
        y = F.scaled_dot_product_attention(keys, self.memory, self.memory, self.bias)
        pooled = F.scaled_dot_product_attention(
            self.token.expand(len(x), 1, -1), keys, y, scale=0.5
        )
        return self.head((y * pooled.sigmoid()).transpose(1, 2).reshape(x.shape))


def latents(in_channels, out_channels):
    return Latents(in_channels, out_channels)


def memory(in_channels, out_channels):
    return Memory(in_channels, out_channels)


class Pixels(nn.Module):
    """Pixels of all images as a table: norms, codes, and a sum by soft code."""

    def __init__(self, in_channels, out_channels, dim=6):
        super().__init__()
        self.stem, self.head = (
            nn.Conv2d(in_channels, dim, 3, 1, 1),
            nn.Linear(2 * dim, out_channels),
        )
        self.norm, self.codes = nn.BatchNorm1d(dim), nn.Parameter(torch.randn(4, dim))

    def forward(self, x):
        n, _, h, w = x.shape
        table = self.norm(self.stem(x).permute(0, 2, 3, 1).reshape(-1, self.codes.shape[1]))
        near = torch.cdist(table, self.codes)
        code = F.embedding(near.argmin(1), self.codes) + torch.softmax(-near, 1) @ self.codes
        tokens = table.view(n, h * w, -1)
        sums = torch.einsum("b...k,b...c->bkc", near.softmax(1).view(n, h * w, -1), tokens)
        code = code.view(n, h * w, -1) * sums.sum(1, keepdim=True).tanh()
        return self.head(torch.cat((tokens, code), -1)).transpose(1, 2).reshape(n, -1, h, w)


def pixels(in_channels, out_channels):
    return Pixels(in_channels, out_channels)


class Unknown(nn.Module):
    """A convolution, and a function that nobody follows."""

    def __init__(self, in_channels, out_channels, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(in_channels, out_channels, 3, 1, 1), function

    def forward(self, x):
        return self.function(self.conv(x))


def attending(in_channels, out_channels):
    return Unknown(in_channels, out_channels, _attending)


def looking(in_channels, out_channels):
    return Unknown(in_channels, out_channels, lambda x: torch.special.i0e(x).mean((2, 3)))


def dropping(in_channels, out_channels):
    layer = nn.TransformerDecoderLayer(out_channels, 1, 4)
    return Unknown(in_channels, out_channels, Dropping(layer))


class Dropping(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        means = x.mean((2, 3))[None]
        return x * self.layer(means, means)[0, :, :, None, None]


def unknown(in_channels, out_channels):
    return Unknown(in_channels, out_channels, torch.special.i0e)


def _attending(x):
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens).transpose(1, 2).reshape(x.shape)
