"""Attention of few queries, or to few keys, is exact in tiles; that between all places is refused by name."""

from dataclasses import replace

import made_attention
import pytest
import torch
import torch.nn.functional as F
from test_capture import Called, same
from test_exact import TOLERANCE, config

import distseg
from distseg.config import ModelConfig
from distseg.extents import Extents
from distseg.models.trace import CanNotCapture
from distseg.verify import verify

WAYS = {  # of each number of ranks
    1: [dict(tiles_per_rank=(3, 2), in_time="spill", exchange_every="1")],
    2: [dict(tiles="2x1", exchange_every="2")],
}
NETWORKS = ["latents", "memory"]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_exact(comm, name):
    for way in WAYS[comm.size]:
        model = ModelConfig(f"{made_attention.__name__}:{name}", in_channels=3, out_channels=3)
        report = verify(replace(config(**way), model=model), comm, Extents("33x41"))
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE, way


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def whole(function):
    """Return a function of tokens (N, places, C), whose result becomes a map again."""
    return lambda m, x: function(m, tokens(x)).transpose(1, 2).reshape(len(x), -1, *x.shape[2:])


SAME = {
    "keys that are parameters": whole(lambda m, t: F.scaled_dot_product_attention(t, m.fc.weight, m.fc.weight.t())),
    "keys that are a mean": whole(lambda m, t: t + F.scaled_dot_product_attention(t, t.mean(1, True), m.fc(t.mean(1, True)))),
    "heads that parameters do not have": lambda m, x: (lambda t: F.scaled_dot_product_attention(t, m.fc.weight[:, :3], m.fc.weight[:, 3:]))(x.view(len(x), 2, 3, -1).mT).mT.reshape(x.shape),
    "queries": whole(lambda m, t: t + F.scaled_dot_product_attention(m.fc.weight, t, t).mean(1, True)),
    "queries of heads": whole(lambda m, t: t + (lambda k: F.scaled_dot_product_attention(k.mean(2, True).expand(-1, -1, 4, -1), k, k))(t.unflatten(2, (2, 3)).transpose(1, 2)).transpose(1, 2).flatten(2).sum(1, True)),
    "a mask of parameters": whole(lambda m, t: F.scaled_dot_product_attention(t, m.fc.weight, m.fc.weight, m.vector[None] > 0.1)),
    "a parameter of each image": whole(lambda m, t: t * m.vector[None, None].repeat(len(t), 1, 1) + m.fc.weight.expand(len(t), 6, 6).mean(1, True)),
}


@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("name", SAME)
def test_a_function_is_what_it_was(name, images):
    torch.manual_seed(0)
    same(Called(SAME[name]), (12, 20), images)




REFUSED = {
    "all places": (whole(lambda m, t: F.scaled_dot_product_attention(t, t, t)), "scaled_dot_product_attention .* is attention between places .* queries, or keys, whose number"),
    "a causal mask": (whole(lambda m, t: F.scaled_dot_product_attention(t, m.fc.weight, m.fc.weight, is_causal=True)), "is causal"),
    "a mask of places": (whole(lambda m, t: F.scaled_dot_product_attention(t, m.fc.weight, m.fc.weight, t.sigmoid())), "has a mask that is computed from the image"),
    "longer": (whole(lambda m, t: t + m.fc.weight[None].repeat(len(t), 2, 1).mean(1, True)), r"repeats a tensor of \(1, 6, 6\) along dims longer than 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_named(name):
    function, why = REFUSED[name]
    with pytest.raises(CanNotCapture, match=why):
        distseg.capture(Called(function))
