"""Networks that are not ours, in every way to distribute them: exact, or refused by name, never silently wrong (:mod:`made_networks`)."""

import re
from dataclasses import replace

import made_networks
import pytest
from test_exact import TOLERANCE, config

from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.training.verify import verify

WAYS = {  # name: (ranks, settings)
    "whole": (1, dict()),
    "several tiles": (1, dict(tiles_per_rank=(2, 2))),
    "tiles": (2, dict(tiles="1x2")),
    "exchange": (2, dict(tiles="2x1", exchange_every="1")),
    "exchange every 2": (2, dict(tiles="2x1", exchange_every="2")),
    "exchange every 3": (1, dict(tiles_per_rank=(3, 2), exchange_every="3")),
    "exchange a level": (2, dict(tiles="1x2", exchange_every="level")),
    "in time": (1, dict(streamed=(2, 3))),
    "stages": (2, dict(stages=2, accumulate=2)),
    "stages, a V": (2, dict(stages=2, placement="v-shaped", accumulate=2)),
    "stages on devices": (1, dict(placement="devices", devices=["cpu", "cpu"], accumulate=2)),
    "stages, zero bubble": (2, dict(stages=2, accumulate=3, schedule="zb-h1")),
    "stages, in time": (2, dict(stages=2, streamed=(2, 1))),
    "stages, exchange": (4, dict(stages=2, tiles="2x1", exchange_every="1", accumulate=2)),
    "stages, exchange, zero bubble": (
        4,
        dict(stages=2, tiles="2x1", exchange_every="2", accumulate=2, schedule="zb-h1"),
    ),
}
EXACT = [
    "residual",
    "long_skip",
    "residuals",
    "pyramid",
    "dense",
    "one_sided",
    "dilated",
    "replicating",
    "shuffled",
    "early_norm",
    "loud_relu",
    "squeezed",
    "excited",
    "split",
    "pyramid_pool",
    "attended",
    "filled",
    "filled_means",
    "spelled",
    "convnext",
    "written",
    "merged",
    "shallow",
    "dropped",
]
EXACT += [
    "active_norm",
    "noisy_dropout",
    "hooked_norm",
    "hooked_conv",
    "hooked_block",
    "hooked_pointwise",
    "standardised",
    "blurred",
    "weight_normed",
    "joined_unknown",
]
NAMED = {  # what is said where a network cannot be computed so; ways that compute it all the same are exact
    "weight_normed_by_hook": "the weight of its layer 1 \\(Conv2d\\) is computed by hooks.*parametrizations",
    "spectral_normed": "changes 1.parametrizations.weight.0._u with each forward pass|changes its _u with each forward pass|has a parametrization",
    "spectral_normed_by_hook": "changes 1.weight_[uv] with each forward pass|changes its weight_u with each forward pass|weight of its layer 1",
    "stash_in_place": "layer 2 \\(ReLU\\) overwrites in place the feature map of stash\\('a'\\), which other layers read too",
    "softened": r"layer 1 \(Softmax\) runs over dim 2|Softmax\(dim=2\) is not taken over the channels",
    "watched": "0.weight has a hook that changes gradients",
    "orthogonal": "cannot be copied|cannot be distributed",
    "scripted": "it cannot be copied",
    "cropped": "it crops the image",
    "again": "layers 1 and 3 share a weight, but lie in the stages . and .",
    "pooling": r"data\.images is 1, .*2\.far\.2 .*\(DS402\)",
    "in_place_shared": "layer 1 \\(ReLU\\) overwrites in place the feature map of layer a, which other layers read too",
    "never_popped": "stash\\('a'\\) is never popped",
    "stashed_twice": "stash\\('a'\\) at layer 3 has the same name as the stash at layer 1",
}


def ways(ranks: int) -> list[str]:
    return [way for way, (wanted, _) in WAYS.items() if wanted == ranks]


@pytest.mark.parallel(1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ways(1))
@pytest.mark.parametrize("name", [*EXACT, *NAMED])
def test_exact_or_refused_by_name_on_one_rank(comm, name, way):
    exact_or_refused(comm, name, way)


@pytest.mark.parallel(2)
@pytest.mark.covering(cases=16)
@pytest.mark.parametrize("way", ways(2))
@pytest.mark.parametrize("name", [*EXACT, *NAMED])
def test_exact_or_refused_by_name_on_two_ranks(comm, name, way):
    exact_or_refused(comm, name, way)


@pytest.mark.parallel(4)
@pytest.mark.covering(cases=8)
@pytest.mark.parametrize("way", ways(4))
@pytest.mark.parametrize("name", [*EXACT, *NAMED])
def test_exact_or_refused_by_name_on_four_ranks(comm, name, way):
    exact_or_refused(comm, name, way)


def exact_or_refused(comm, name: str, way: str) -> None:
    try:
        assert error_of(name, comm, WAYS[way][1]) <= TOLERANCE
    except ValueError as e:
        assert name in NAMED and re.search(NAMED[name], str(e)), e


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(cases=1)
def test_batch_norm_of_vectors(comm):
    """Of two images at least."""
    for way in ways(comm.size):
        assert error_of("pooling", comm, {**WAYS[way][1], "images": 2}) <= TOLERANCE, way


@pytest.mark.parallel([1, 2])
def test_windows_with_a_halo_know_their_place(comm):
    """A grid of means is resized to the image's size, of which a window is a part."""
    settings = (
        dict(tiles_per_rank=(1, 2), halo=40) if comm.size == 1 else dict(tiles="1x2", halo=40)
    )
    assert error_of("pyramid_pool", comm, settings, size="64x256") <= TOLERANCE


@pytest.mark.parallel(1)
def test_a_halo_of_the_users_knows_nothing_of_zeros_behind(comm):
    with pytest.raises(
        ValueError, match="approximate.halo is 12, but this network pads images to a multiple"
    ):
        error_of("filled_means", comm, dict(tiles_per_rank=(1, 2), halo=12))


@pytest.mark.parallel([1, 2])
def test_images_of_any_size(comm):
    """Where a network wants multiples of some pixels: refused, or filled up as model.pad says."""
    settings = dict(streamed=(2, 2)) if comm.size == 1 else dict(tiles="1x2", exchange_every="1")
    for pad in (4, 8):
        assert error_of("levels", comm, settings, pad) <= TOLERANCE
    for pad, why in (
        (None, "sizes are multiples of 4 pixels, but an image has 25x37: set model.pad to 4"),
        (6, "the forward pass of .* fails on an image of"),
    ):
        with pytest.raises(ValueError, match=why):
            error_of("levels", comm, settings, pad)


@pytest.mark.parallel([1, 2])
def test_whole_images_refuse_nothing(comm):
    """Of a network that cannot be followed, split by samples alone; but random numbers of its own."""
    settings = dict(samples=comm.size, accumulate=2)
    assert error_of("tokens", comm, settings) <= TOLERANCE
    assert error_of("tokens", comm, {**settings, "norm_scope": "step"}) <= TOLERANCE
    assert error_of("normed_tokens", comm, {**settings, "images": 3}) <= TOLERANCE
    with pytest.raises(
        ValueError,
        match=r"rand in 2 \(made_networks.py, line \d+\) draws random numbers.*is attention between all positions of the image",
    ):
        error_of("noisy_tokens", comm, settings)


@pytest.mark.parallel(1)
def test_a_mean_is_live_where_norms_are_frozen(comm):
    """In all segments."""
    assert error_of("squeezed", comm, dict(tiles_per_rank=(2, 2), frozen_norm=True)) <= TOLERANCE
    assert error_of("squeezed", comm, dict(streamed=(2, 2), frozen_norm=True)) <= TOLERANCE


def error_of(
    name: str, comm, settings: dict, pad: int | None = None, size: str | None = None
) -> float:
    plan = replace(
        config(**settings),
        model=ModelConfig(
            f"{made_networks.__name__}:{name}", in_channels=3, out_channels=3, pad=pad
        ),
    )
    report = verify(
        plan,
        comm,
        Size(
            size
            or {
                "replicating": "24x32",
                "merged": "24x32",
                "filled": "25x37",
                "filled_means": "25x37",
                "levels": "25x37",
            }.get(name, "24x34")
        ),
    )
    return comm.bcast(report and report["max_error"])
