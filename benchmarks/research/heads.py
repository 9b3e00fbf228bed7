"""Networks whose idea is in the last layers: what is predicted, from what, how often."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def body(cin: int, ch: int = 12) -> nn.Sequential:
    """Return two convolutions with group norm."""
    return nn.Sequential(
        nn.Conv2d(cin, ch, 3, padding=1),
        nn.GroupNorm(3, ch),
        nn.ReLU(),
        nn.Conv2d(ch, ch, 3, padding=1),
        nn.ReLU(),
    )


class CosineHead(nn.Module):
    """Scaled cosine similarity to class vectors (Gidaris and Komodakis 2018)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.weight, self.scale = (
            body(in_channels),
            nn.Parameter(torch.randn(out_channels, 12)),
            nn.Parameter(torch.tensor(10.0)),
        )

    def forward(self, x):
        x = F.normalize(self.body(x), dim=1)
        w = F.normalize(self.weight, dim=1)
        return self.scale * F.conv2d(x, w[:, :, None, None])


class CosineSimilarityHead(nn.Module):
    """F.cosine_similarity of each pixel to each class embedding by broadcasting."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.embeddings = body(in_channels), nn.Embedding(out_channels, 12)

    def forward(self, x):
        x = self.body(x).unsqueeze(1)
        w = self.embeddings.weight[None, :, :, None, None]
        return F.cosine_similarity(x, w, dim=2) / 0.1


class PrototypeHead(nn.Module):
    """Negative squared distance to class prototypes (Snell et al. 2017)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.prototypes = body(in_channels), nn.Parameter(torch.randn(out_channels, 12))

    def forward(self, x):
        f = self.body(x).permute(0, 2, 3, 1)
        d = ((f.unsqueeze(-2) - self.prototypes) ** 2).sum(-1)
        return -d.permute(0, 3, 1, 2)


class TokenLinearHead(nn.Module):
    """Pixels as tokens (N, HW, C) through linear layers and back (SegFormer's MLP head)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.down, self.p1, self.p2 = (
            body(in_channels),
            nn.Conv2d(12, 16, 3, 2, 1),
            nn.Linear(12, 8),
            nn.Linear(16, 8),
        )
        self.fuse, self.head = nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        c1 = self.body(x)
        c2 = self.down(c1)
        n = x.shape[0]
        t1 = (
            self.p1(c1.flatten(2).transpose(1, 2))
            .permute(0, 2, 1)
            .reshape(n, -1, c1.shape[2], c1.shape[3])
        )
        t2 = (
            self.p2(c2.flatten(2).transpose(1, 2))
            .permute(0, 2, 1)
            .reshape(n, -1, c2.shape[2], c2.shape[3])
        )
        t2 = F.interpolate(t2, size=c1.size()[2:], mode="bilinear", align_corners=False)
        return self.head(F.relu(self.fuse(torch.cat([t2, t1], dim=1))))


class HeadEnsemble(nn.Module):
    """Mean of the probabilities of several heads, in logs (deep sub-ensembles, Valdenegro 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.heads = (
            body(in_channels),
            nn.ModuleList(nn.Conv2d(12, out_channels, k, padding=k // 2) for k in (1, 3, 5)),
        )

    def forward(self, x):
        x = self.body(x)
        logs = torch.stack([F.log_softmax(head(x), dim=1) for head in self.heads])
        return torch.logsumexp(logs, dim=0) - torch.log(
            torch.tensor(len(self.heads), dtype=logs.dtype)
        )


class MixtureOfSoftmaxes(nn.Module):
    """Several softmaxes weighted per pixel (Yang et al. 2018)."""

    def __init__(self, in_channels, out_channels, k=3):
        super().__init__()
        self.k, self.classes, self.body = k, out_channels, body(in_channels)
        self.prior, self.logits = (
            nn.Conv2d(12, k, 1, bias=False),
            nn.Conv2d(12, k * out_channels, 1),
        )

    def forward(self, x):
        x = self.body(x)
        prior = self.prior(x).softmax(1)
        n, _, h, w = x.shape
        prob = self.logits(x).view(n, self.k, self.classes, h, w).softmax(2)
        return (prob * prior[:, :, None]).sum(1).add(1e-8).log()


class MultiSampleDropout(nn.Module):
    """The head averaged over several dropout masks (Inoue 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.head = body(in_channels), nn.Conv2d(12, out_channels, 1)
        self.dropouts = nn.ModuleList(nn.Dropout2d(p) for p in (0.1, 0.2, 0.3))

    def forward(self, x):
        x = self.body(x)
        return sum(self.head(d(x)) for d in self.dropouts) / len(self.dropouts)


class BoundaryGate(nn.Module):
    """An edge branch that gates and joins the semantic one (Gated-SCNN, Takikawa et al. 2019)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.edge, self.edge_out = (
            body(in_channels),
            nn.Conv2d(12, 8, 3, padding=1),
            nn.Conv2d(8, 1, 1),
        )
        self.head = nn.Conv2d(21, out_channels, 3, padding=1)

    def forward(self, x):
        f = self.body(x)
        e = F.relu(self.edge(f))
        alpha = torch.sigmoid(self.edge_out(e))
        return self.head(torch.cat((f * (alpha + 1), e, alpha), dim=1))


class OrdinalHead(nn.Module):
    """Cumulative logits with ordered thresholds turned into class scores.

    Source: CORAL, Cao et al. 2020.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.score = body(in_channels), nn.Conv2d(12, 1, 1)
        self.steps = nn.Parameter(torch.zeros(out_channels - 1))

    def forward(self, x):
        s = self.score(self.body(x))
        thresholds = torch.cumsum(F.softplus(self.steps), 0).view(1, -1, 1, 1)
        above = torch.sigmoid(s - thresholds)
        one, zero = torch.ones_like(above[:, :1]), torch.zeros_like(above[:, :1])
        above = torch.cat((one, above, zero), 1)
        return torch.log(above[:, :-1] - above[:, 1:] + 1e-8)


class TextEmbeddingHead(nn.Module):
    """Pixels compared with fixed embeddings of class names (LSeg, Li et al. 2022)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.project = body(in_channels), nn.Conv2d(12, 16, 1)
        self.register_buffer("text", F.normalize(torch.randn(out_channels, 16), dim=-1))
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.0)

    def forward(self, x):
        f = self.project(self.body(x))
        f = f / f.norm(dim=1, keepdim=True)
        return self.logit_scale.exp() * torch.einsum("bchw,kc->bkhw", f, self.text)


class MaskQueries(nn.Module):
    """Class queries attend to all pixels, then make masks by dot products.

    Source: MaskFormer, Cheng 2021.
    """

    def __init__(self, in_channels, out_channels, dim=12):
        super().__init__()
        self.body, self.queries = (
            body(in_channels, dim),
            nn.Parameter(torch.randn(out_channels, dim) * 0.1),
        )
        self.k, self.v, self.norm, self.mlp = (
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
            nn.LayerNorm(dim),
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)),
        )

    def forward(self, x):
        f = self.body(x)
        tokens = f.flatten(2).transpose(1, 2)
        att = torch.softmax(self.queries @ self.k(tokens).transpose(1, 2) * 12**-0.5, dim=-1)
        q = self.norm(self.queries + att @ self.v(tokens))
        return torch.einsum("bqc,bchw->bqhw", self.mlp(q), f)


class PointwiseRefine(nn.Module):
    """Coarse logits and fine features through a shared pixel MLP (PointRend at every pixel)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.fine, self.coarse, self.coarse_head = (
            nn.Conv2d(in_channels, 12, 3, padding=1),
            nn.Conv2d(12, 16, 3, 2, 1),
            nn.Conv2d(16, out_channels, 1),
        )
        self.fc1, self.fc2, self.pred = (
            nn.Conv1d(12 + out_channels, 16, 1),
            nn.Conv1d(16 + out_channels, 16, 1),
            nn.Conv1d(16 + out_channels, out_channels, 1),
        )

    def forward(self, x):
        fine = F.relu(self.fine(x))
        coarse = F.interpolate(
            self.coarse_head(F.relu(self.coarse(fine))),
            size=x.shape[-2:],
            mode="bilinear",
            align_corners=False,
        )
        n, _, h, w = x.shape
        c = coarse.reshape(n, -1, h * w)
        y = torch.cat((fine.reshape(n, -1, h * w), c), dim=1)
        for layer in (self.fc1, self.fc2):
            y = torch.cat((F.relu(layer(y)), c), dim=1)
        return self.pred(y).view(n, -1, h, w)


class DeepSupervision(nn.Module):
    """Logits of three levels at full size, returned as a list for a loss each (Lee et al. 2015)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.c1, self.c2, self.c3 = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, 2, 1),
            nn.Conv2d(8, 8, 3, 2, 1),
        )
        self.outs = nn.ModuleList(nn.Conv2d(8, out_channels, 1) for _ in range(3))

    def forward(self, x):
        feats = [F.relu(self.c1(x))]
        feats.append(F.relu(self.c2(feats[-1])))
        feats.append(F.relu(self.c3(feats[-1])))
        return [
            F.interpolate(o(f), size=x.shape[2:], mode="bilinear", align_corners=False)
            for o, f in zip(self.outs, feats)
        ]


class AuxiliaryHead(nn.Module):
    """Main and auxiliary logits in a dict (torchvision's segmentation models)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.backbone, self.deep = body(in_channels), nn.Conv2d(12, 12, 3, 2, 1)
        self.classifier, self.aux = nn.Conv2d(12, out_channels, 1), nn.Conv2d(12, out_channels, 1)

    def forward(self, x):
        size, result = x.shape[-2:], {}
        low = self.backbone(x)
        result["out"] = F.interpolate(
            self.classifier(F.relu(self.deep(low))), size=size, mode="bilinear", align_corners=False
        )
        result["aux"] = self.aux(low)
        return result


class ImageLevelPrior(nn.Module):
    """Logits adjusted by image-level class scores from a pooled branch.

    Source: multi-task, EncNet-like.
    """

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.body, self.pixel, self.image = (
            body(in_channels),
            nn.Conv2d(12, out_channels, 1),
            nn.Linear(12, out_channels),
        )

    def forward(self, x):
        f = self.body(x)
        presence = torch.sigmoid(self.image(f.amax(dim=(-2, -1))))
        return self.pixel(f) + torch.log(presence + 1e-6)[..., None, None]


class TestTimeFlips(nn.Module):
    """Mean over flips of the input inside forward (equivariant by averaging)."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.net = nn.Sequential(body(in_channels), nn.Conv2d(12, out_channels, 3, padding=1))

    def forward(self, x):
        out = self.net(x) + self.net(x.flip(-1)).flip(-1)
        return (out + torch.flip(self.net(torch.flip(x, [2])), [2])) / 3
