"""Attention of few queries, or to few keys, is exact in tiles; that between all places is refused by name."""

from dataclasses import replace

import made_attention
import pytest
import torch
import torch.nn.functional as F
from test_capture import Called, same
from test_exact import TOLERANCE, config

import distseg
from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.models.capture.trace import CanNotCapture
from distseg.training.verify import verify

WAYS = {  # of each number of ranks
    1: [dict(streamed=(3, 2), exchange_every="1")],
    2: [dict(tiles="2x1", exchange_every="2")],
}
NETWORKS = ["latents", "memory", "pixels"]


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_exact(comm, name):
    for way in WAYS[comm.size]:
        model = ModelConfig(f"{made_attention.__name__}:{name}", in_channels=3, out_channels=3)
        report = verify(replace(config(**way), model=model), comm, Size("33x41"))
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE, way


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def whole(function):
    """Return a function of tokens (N, places, C), whose result becomes a map again."""
    return lambda m, x: function(m, tokens(x)).transpose(1, 2).reshape(len(x), -1, *x.shape[2:])


def pixels_normed(m, pixels):
    norm = m.norm
    return F.batch_norm(
        pixels, norm.running_mean, norm.running_var, norm.weight, norm.bias, m.training
    )


def residuals(centres, x):
    """Return sums of softly assigned residuals, as NetVLAD has them."""
    shares = (centres @ x).softmax(1)
    at_places = centres.expand(x.size(-1), -1, -1).permute(1, 2, 0).unsqueeze(0)
    each = x.expand(len(centres), -1, -1, -1).permute(1, 0, 2, 3) - at_places
    return F.normalize((each * shares.unsqueeze(2)).sum(-1), dim=2)


SAME = {
    "keys that are parameters": whole(
        lambda m, t: F.scaled_dot_product_attention(t, m.fc.weight, m.fc.weight.t())
    ),
    "keys that are a mean": whole(
        lambda m, t: t + F.scaled_dot_product_attention(t, t.mean(1, True), m.fc(t.mean(1, True)))
    ),
    "heads that parameters do not have": lambda m, x: (
        lambda t: F.scaled_dot_product_attention(t, m.fc.weight[:, :3], m.fc.weight[:, 3:])
    )(x.view(len(x), 2, 3, -1).mT).mT.reshape(x.shape),
    "queries": whole(
        lambda m, t: t + F.scaled_dot_product_attention(m.fc.weight, t, t).mean(1, True)
    ),
    "queries of heads": whole(
        lambda m, t: (
            t
            + (
                lambda k: F.scaled_dot_product_attention(
                    k.mean(2, True).expand(-1, -1, 4, -1), k, k
                )
            )(t.unflatten(2, (2, 3)).transpose(1, 2))
            .transpose(1, 2)
            .flatten(2)
            .sum(1, True)
        )
    ),
    "dots": lambda m, x: (
        torch.einsum("...chw,kc->...khw", x, m.fc.weight)
        * torch.einsum("b...,bk...->bk", x.mean((1, 2, 3)), x)[..., None, None]
    ),
    "dots of few dims": whole(
        lambda m, t: torch.einsum("...c,...dc", m.fc(t), (t.transpose(1, 2) @ t)[:, None])
    ),
    "sums of weighted products": lambda m, x: (
        x
        * torch.einsum("ki,nihw,njhw,kj->nk", m.fc.weight, x, x.tanh(), m.fc.weight)[
            ..., None, None
        ]
    ),
    "sums over places are added": whole(
        lambda m, t: (
            t
            * torch.baddbmm(t.mean(1, True), t.transpose(1, 2), m.fc(t), beta=0.5, alpha=0.1)
            .softmax(-1)
            .mean(1, True)
        )
    ),
    "products are added": lambda m, x: (
        torch.addmm(m.vector, x.permute(0, 2, 3, 1).reshape(-1, 6), m.fc.weight, alpha=2)
        .view(len(x), *x.shape[2:], 6)
        .permute(0, 3, 1, 2)
    ),
    "distances to codes": whole(
        lambda m, t: m.fc(torch.cdist(t, m.fc.weight.expand(len(t), -1, -1)).softmax(-1))
    ),
    "distances to means, of order 1": whole(
        lambda m, t: t / torch.cdist(t.mean(1, True), t, p=1).mT
    ),
    "the nearest code": whole(
        lambda m, t: (
            t
            + (F.embedding(torch.cdist(t, m.fc.weight).argmin(-1), m.fc.weight) - t).detach()
            + F.embedding((-t).argmax(-1), m.fc.weight, padding_idx=2)
        )
    ),
    "residuals to centres": lambda m, x: (
        x * residuals(m.fc.weight, x.flatten(2)).mean(1)[..., None, None]
    ),
    "parameters at all places": lambda m, x: (
        x * (g := m.vector.expand(*x.shape[2:], -1).sigmoid().permute(2, 0, 1))
        + torch.ones(x.shape[2:]).to(x) * g.mean((1, 2))[:, None, None]
    ),
    "traces": lambda m, x: (
        x
        / (
            1
            + torch.einsum(
                "bii->b", torch.einsum("bcp,bdp->bcd", x.flatten(2), x.flatten(2)) / 100
            )[:, None, None, None]
        )
    ),
    "batch norm of all pixels": lambda m, x: (
        pixels_normed(m, x.permute(0, 2, 3, 1).reshape(-1, 6))
        .view(len(x), *x.shape[2:], 6)
        .permute(0, 3, 1, 2)
    ),
    "a parameter of each image, longer": whole(
        lambda m, t: (
            t
            + (m.fc.weight[None].repeat(len(t), 2, 1) * torch.arange(12.0)[:, None].to(t)).mean(
                1, True
            )
        )
    ),
    "a mask of parameters": whole(
        lambda m, t: F.scaled_dot_product_attention(
            t, m.fc.weight, m.fc.weight, m.vector[None] > 0.1
        )
    ),
    "a parameter of each image": whole(
        lambda m, t: (
            t * m.vector[None, None].repeat(len(t), 1, 1)
            + m.fc.weight.expand(len(t), 6, 6).mean(1, True)
        )
    ),
}


@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("name", SAME)
def test_a_function_is_what_it_was(name, images):
    torch.manual_seed(0)
    same(Called(SAME[name]), (12, 20), images)


REFUSED = {
    "all places": (
        whole(lambda m, t: F.scaled_dot_product_attention(t, t, t)),
        "scaled_dot_product_attention .* is attention between all positions .* queries or keys whose number",
    ),
    "a causal mask": (
        whole(
            lambda m, t: F.scaled_dot_product_attention(t, m.fc.weight, m.fc.weight, is_causal=True)
        ),
        "is causal",
    ),
    "distances of places": (
        lambda m, x: (
            (lambda t: torch.cdist(t, t).mean(-1))(tokens(x))
            .view(len(x), 1, *x.shape[2:])
            .expand_as(x)
        ),
        "cdist .* compares each position of the image with all others, as attention does",
    ),
    "a mask of places": (
        whole(
            lambda m, t: F.scaled_dot_product_attention(t, m.fc.weight, m.fc.weight, t.sigmoid())
        ),
        "has a mask that is computed from the image",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_named(name):
    function, why = REFUSED[name]
    with pytest.raises(CanNotCapture, match=why):
        distseg.capture(Called(function))


@pytest.mark.parallel(1)
def test_dropout_of_weights_is_named(comm):
    model = ModelConfig(f"{made_attention.__name__}:dropping", in_channels=3, out_channels=3)
    with pytest.raises(
        ValueError,
        match=r"in function.layer.self_attn .* drops attention weights at random.*set its dropout to 0",
    ):
        verify(replace(config(), model=model), comm, Size("33x41"))


@pytest.mark.parallel(1)
@pytest.mark.parametrize(
    ("name", "offered"), [("attending", False), ("looking", False), ("unknown", True)]
)
def test_a_halo_is_offered_where_one_may_be_enough(comm, name, offered):
    model = ModelConfig(f"{made_attention.__name__}:{name}", in_channels=3, out_channels=3)
    with pytest.raises(ValueError, match="split samples only") as refused:
        verify(replace(config(tiles_per_rank=(2, 2)), model=model), comm, Size("33x41"))
    assert ("or set approximate.halo" in str(refused.value)) == offered
