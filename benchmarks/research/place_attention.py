"""Attention between places, and what stands in for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class NonLocal(nn.Module):
    """Embedded Gaussian attention over all pairs of places (Wang et al. 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.head = (
            nn.Conv2d(in_channels, 8, 3, stride=2, padding=1),
            nn.ConvTranspose2d(8, out_channels, 2, 2),
        )
        self.theta, self.phi, self.g, self.w = (
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(4, 8, 1),
        )

    def forward(self, img):
        x = F.relu(self.stem(img))
        b, _, h, w = x.shape
        theta, phi, g = (
            self.theta(x).view(b, 4, -1).permute(0, 2, 1),
            self.phi(x).view(b, 4, -1),
            self.g(x).view(b, 4, -1).permute(0, 2, 1),
        )
        f = F.softmax(torch.matmul(theta, phi), dim=-1)
        y = torch.matmul(f, g).permute(0, 2, 1).contiguous().view(b, 4, h, w)
        return self.head(x + self.w(y))[..., : img.size(2), : img.size(3)]


class EfficientAttention(nn.Module):
    """Keys normalised over places, queries over channels: linear in places (Shen et al. 2021)."""

    def __init__(self, in_channels, out_channels, heads=2):
        super().__init__()
        self.heads = heads
        self.stem, self.keys, self.queries, self.values = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, 8, 1),
        )
        self.reprojection, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(8, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        n, _, h, w = x.size()
        keys, queries = self.keys(x).reshape((n, 8, h * w)), self.queries(x).reshape(n, 8, h * w)
        values = self.values(x).reshape((n, 8, h * w))
        c = 8 // self.heads
        attended = []
        for i in range(self.heads):
            key = F.softmax(keys[:, i * c : (i + 1) * c, :], dim=2)
            query = F.softmax(queries[:, i * c : (i + 1) * c, :], dim=1)
            context = key @ values[:, i * c : (i + 1) * c, :].transpose(1, 2)
            attended.append((context.transpose(1, 2) @ query).reshape(n, c, h, w))
        return self.head(x + self.reprojection(torch.cat(attended, dim=1)))


class KernelAttention(nn.Module):
    """Linear attention with elu + 1 as feature map, by einsum (Katharopoulos et al. 2020)."""

    def __init__(self, in_channels, out_channels, dim=8):
        super().__init__()
        self.stem, self.qkv, self.head = (
            nn.Conv2d(in_channels, dim, 3, padding=1),
            nn.Linear(dim, 3 * dim),
            nn.Conv2d(dim, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        n, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("nld,nlm->ndm", k, v)
        z = 1 / (torch.einsum("nld,nd->nl", q, k.sum(dim=1)) + 1e-6)
        out = torch.einsum("nld,ndm,nl->nlm", q, kv, z)
        return self.head((tokens + out).transpose(1, 2).reshape(n, c, h, w))


class CrossCovariance(nn.Module):
    """Attention between channels of normalised queries and keys (XCiT, El-Nouby et al. 2021)."""

    def __init__(self, in_channels, out_channels, dim=8, heads=2):
        super().__init__()
        self.heads, self.temperature = heads, nn.Parameter(torch.ones(heads, 1, 1))
        self.stem, self.qkv, self.proj, self.head = (
            nn.Conv2d(in_channels, dim, 3, padding=1),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
            nn.Conv2d(dim, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        B, C, H, W = x.shape
        t = x.flatten(2).transpose(1, 2)
        qkv = self.qkv(t).reshape(B, H * W, 3, self.heads, C // self.heads).permute(2, 0, 3, 4, 1)
        q, k, v = qkv.unbind(0)  # B, heads, C', N
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature
        out = (attn.softmax(dim=-1) @ v).permute(0, 3, 1, 2).reshape(B, H * W, C)
        return self.head((t + self.proj(out)).transpose(1, 2).view(B, C, H, W))


class TransposedAttention(nn.Module):
    """Channel attention with depthwise-mixed queries (Restormer's MDTA, Zamir et al. 2022)."""

    def __init__(self, in_channels, out_channels, dim=8, heads=2):
        super().__init__()
        self.heads, self.temperature = heads, nn.Parameter(torch.ones(heads, 1, 1))
        self.stem, self.qkv, self.dw = (
            nn.Conv2d(in_channels, dim, 3, padding=1),
            nn.Conv2d(dim, 3 * dim, 1),
            nn.Conv2d(3 * dim, 3 * dim, 3, padding=1, groups=3 * dim),
        )
        self.project, self.head = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.shape
        q, k, v = (
            t.view(b, self.heads, c // self.heads, h * w)
            for t in self.dw(self.qkv(x)).chunk(3, dim=1)
        )
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * self.temperature
        return self.head(x + self.project((attn.softmax(-1) @ v).reshape(b, c, h, w)))


class WindowAttention(nn.Module):
    """Self-attention within windows of 4x4 (Swin without shift, Liu et al. 2021)."""

    def __init__(self, in_channels, out_channels, dim=8, ws=4):
        super().__init__()
        self.ws, self.stem, self.qkv = (
            ws,
            nn.Conv2d(in_channels, dim, 3, padding=1),
            nn.Linear(dim, 3 * dim),
        )
        self.bias, self.head = (
            nn.Parameter(torch.zeros(ws * ws, ws * ws)),
            nn.Conv2d(dim, out_channels, 1),
        )

    def forward(self, img):
        x = self.stem(img).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        x = F.pad(x, (0, 0, 0, -w % self.ws, 0, -h % self.ws))
        hp, wp = x.shape[1:3]
        win = (
            x.view(b, hp // self.ws, self.ws, wp // self.ws, self.ws, c)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, self.ws**2, c)
        )
        q, k, v = self.qkv(win).chunk(3, -1)
        win = (q @ k.transpose(-2, -1) * c**-0.5 + self.bias).softmax(-1) @ v
        y = (
            win.view(b, hp // self.ws, wp // self.ws, self.ws, self.ws, c)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(b, hp, wp, c)
        )
        return self.head((x + y)[:, :h, :w].permute(0, 3, 1, 2))


class AxialAttention(nn.Module):
    """Self-attention along rows, then along columns (Ho et al. 2019)."""

    def __init__(self, in_channels, out_channels, dim=8):
        super().__init__()
        self.stem, self.row, self.col, self.head = (
            nn.Conv2d(in_channels, dim, 3, 2, 1),
            nn.MultiheadAttention(dim, 2, batch_first=True),
            nn.MultiheadAttention(dim, 2, batch_first=True),
            nn.Conv2d(dim, out_channels, 1),
        )

    def forward(self, img):
        x = self.stem(img)
        b, c, h, w = x.shape
        r = x.permute(0, 2, 3, 1).reshape(b * h, w, c)
        x = x + self.row(r, r, r)[0].view(b, h, w, c).permute(0, 3, 1, 2)
        r = x.permute(0, 3, 2, 1).reshape(b * w, h, c)
        x = x + self.col(r, r, r)[0].view(b, w, h, c).permute(0, 3, 2, 1)
        return F.interpolate(self.head(x), size=img.shape[2:], mode="bilinear", align_corners=False)


class LocalSelfAttention(nn.Module):
    """Each place attends to its 5x5 neighbourhood by unfold (SASA, Ramachandran et al. 2019)."""

    def __init__(self, in_channels, out_channels, dim=8, k=5):
        super().__init__()
        self.k, self.stem, self.q, self.kv = (
            k,
            nn.Conv2d(in_channels, dim, 3, padding=1),
            nn.Conv2d(dim, dim, 1),
            nn.Conv2d(dim, 2 * dim, 1),
        )
        self.rel, self.head = (
            nn.Parameter(torch.randn(1, dim, k * k, 1, 1) * 0.1),
            nn.Conv2d(dim, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.shape
        kv = F.pad(self.kv(x), [self.k // 2] * 4).unfold(2, self.k, 1).unfold(3, self.k, 1)
        key, value = kv.reshape(b, 2 * c, h, w, -1).permute(0, 1, 4, 2, 3).split(c, 1)
        logits = (self.q(x).unsqueeze(2) * (key + self.rel)).sum(1, keepdim=True)
        return self.head((logits.softmax(2) * value).sum(2))


class VisionTransformer(nn.Module):
    """Patches as tokens through a transformer encoder layer (Dosovitskiy et al. 2021)."""

    def __init__(self, in_channels, out_channels, dim=8, p=8):
        super().__init__()
        self.patch, self.block = (
            nn.Conv2d(in_channels, dim, p, p),
            nn.TransformerEncoderLayer(dim, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
        )
        self.head = nn.ConvTranspose2d(dim, out_channels, p, p)

    def forward(self, x):
        y = self.patch(x)
        b, c, h, w = y.shape
        y = self.block(y.flatten(2).transpose(1, 2))
        return self.head(y.transpose(1, 2).reshape(b, c, h, w))


class ExternalAttention(nn.Module):
    """Attention to two learnt memories, normalised twice (Guo et al. 2022)."""

    def __init__(self, in_channels, out_channels, s=6):
        super().__init__()
        self.stem, self.mk, self.mv, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Linear(8, s, bias=False),
            nn.Linear(s, 8, bias=False),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x):
        x = F.relu(self.stem(x))
        b, c, h, w = x.size()
        attn = self.mk(x.view(b, c, h * w).permute(0, 2, 1))
        attn = F.softmax(attn, dim=1)  # over places
        attn = attn / (1e-9 + attn.sum(dim=2, keepdim=True))
        out = self.mv(attn).permute(0, 2, 1).view(b, c, h, w)
        return self.head(F.relu(x + out))


class PyramidKeys(nn.Module):
    """All pixels attend to keys pooled on a pyramid (asymmetric non-local, Zhu et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.q, self.k, self.v, self.head = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, out_channels, 1),
        )

    def psp(self, x):
        return torch.cat([F.adaptive_avg_pool2d(x, s).flatten(2) for s in (1, 3, 6)], -1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        n, c, h, w = x.shape
        q = self.q(x).view(n, 4, -1).permute(0, 2, 1)
        k, v = self.psp(self.k(x)), self.psp(self.v(x)).permute(0, 2, 1)
        context = torch.matmul(F.softmax(torch.matmul(q, k) / 2, dim=-1), v)
        return self.head(x + context.permute(0, 2, 1).reshape(n, c, h, w))


class ExpectationMaximisation(nn.Module):
    """Bases refined by expectation and maximisation over all pixels (EMANet, Li et al. 2019)."""

    def __init__(self, in_channels, out_channels, k=4, stages=2):
        super().__init__()
        self.stages, self.stem, self.head = (
            stages,
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, out_channels, 1),
        )
        mu = torch.randn(1, 8, k)
        self.register_buffer("mu", mu / (1e-6 + mu.norm(dim=1, keepdim=True)))

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.size()
        flat, mu = x.view(b, c, h * w), self.mu.repeat(b, 1, 1)
        for _ in range(self.stages):
            z = F.softmax(torch.bmm(flat.permute(0, 2, 1), mu), dim=2)
            mu = torch.bmm(flat, z / (1e-6 + z.sum(dim=1, keepdim=True)))
            mu = mu / (1e-6 + mu.norm(dim=1, keepdim=True))
        y = mu.matmul(z.permute(0, 2, 1)).view(b, c, h, w)
        return self.head(F.relu(y) + x)


class DeformableConv(nn.Module):
    """3x3 samples at learnt offsets by bilinear sampling (Dai et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.offset, self.mix, self.head = (
            nn.Conv2d(in_channels, 6, 3, padding=1),
            nn.Conv2d(6, 18, 3, padding=1),
            nn.Conv2d(54, 8, 1),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        n, c, h, w = x.shape
        offset, base, samples = (
            self.offset(x),
            F.affine_grid(torch.eye(2, 3).to(x).expand(n, 2, 3), [n, c, h, w], align_corners=False),
            [],
        )
        for k in range(9):
            dy, dx = offset[:, 2 * k] + (k // 3 - 1), offset[:, 2 * k + 1] + (k % 3 - 1)
            grid = base + torch.stack((2 * dx / w, 2 * dy / h), dim=-1)
            samples.append(F.grid_sample(x, grid, align_corners=False))
        return self.head(F.relu(self.mix(torch.cat(samples, 1))))


class CrissCross(nn.Module):
    """Attention to the pixels of one's own row and column (CCNet, Huang et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem, self.q, self.k, self.v, self.head = (
            nn.Conv2d(in_channels, 8, 3, 2, 1),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, out_channels, 1),
        )

    def forward(self, img):
        x = self.stem(img)
        q, k, v, h = self.q(x), self.k(x), self.v(x), x.shape[2]
        e_h = torch.einsum("bchw,bcgw->bhwg", q, k)
        e_w = torch.einsum("bchw,bchg->bhwg", q, k)
        a = torch.softmax(torch.cat([e_h, e_w], 3), dim=3)
        out = torch.einsum("bhwg,bcgw->bchw", a[..., :h], v) + torch.einsum(
            "bhwg,bchg->bchw", a[..., h:], v
        )
        return F.interpolate(
            self.head(x + out), size=img.shape[2:], mode="bilinear", align_corners=False
        )


class LatentQueries(nn.Module):
    """Learnt latents read the pixels and write back to them (Perceiver IO, Jaegle et al. 2022)."""

    def __init__(self, in_channels, out_channels, dim=8, n=4):
        super().__init__()
        self.stem, self.latents, self.kv, self.mix = (
            nn.Conv2d(in_channels, dim, 3, padding=1),
            nn.Parameter(torch.randn(n, dim) * 0.3),
            nn.Conv2d(dim, 2 * dim, 1),
            nn.Linear(dim, 2 * dim),
        )
        self.q, self.head = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, out_channels, 1)

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.shape
        k, v = self.kv(x).flatten(2).chunk(2, dim=1)
        read = F.scaled_dot_product_attention(
            self.latents.expand(b, -1, -1), k.transpose(1, 2), v.transpose(1, 2)
        )
        k2, v2 = self.mix(F.gelu(read)).chunk(2, dim=-1)
        write = torch.softmax(self.q(x).flatten(2).transpose(1, 2) @ k2.transpose(1, 2), -1) @ v2
        return self.head(x + write.transpose(1, 2).view(b, c, h, w))
