"""The distributed norms against PyTorch's own layers on whole images, in float64.

An image of 13x22 pixels and stride 2 has a feature map of 7x11, cut into 2x3 uneven tiles dealt to the ranks in turn.
Windows overlap, and their halos carry gradient too: a rank's output on window w counts with weights G_w, so the serial
gradient of the feature map is that of sum_w <G_w, y[w]>, and the distributed one the sum of its windows' parts.
"""

import copy

import pytest
import torch
from torch import nn

from distseg.comm.collective import Alone
from distseg.layers import norm as norms
from distseg.layers.context import Context
from distseg.layers.kernels import norm as compiled
from distseg.layers.norm import DistributedNorm, commit
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.tile import Box, ReceptiveField, TilePlacement, tiles, window

IMAGE, CELLS, REACH = (13, 22), (7, 11), ReceptiveField((3, 3), (2, 2))
IMAGES, CHANNELS = 2, 6

LAYERS = {
    "instance": nn.InstanceNorm2d(CHANNELS),
    "instance affine": nn.InstanceNorm2d(CHANNELS, affine=True),
    "group": nn.GroupNorm(3, CHANNELS),
    "group plain": nn.GroupNorm(2, CHANNELS, affine=False),
    "batch": nn.BatchNorm2d(CHANNELS),
    "batch plain": nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False),
}


def layer_of(name: str) -> nn.Module:
    layer = copy.deepcopy(LAYERS[name]).double()
    for p in layer.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    return layer


def places(rank: int = 0, size: int = 1, grid=(2, 3)) -> list[TilePlacement]:
    every = tiles(IMAGE, grid, REACH.stride)
    return [
        TilePlacement(IMAGE, t, window(t, IMAGE, REACH), tuple(range(IMAGES)), (0,) * IMAGES)
        for t in every[rank::size]
    ]


def cells(place: TilePlacement) -> tuple:
    return (slice(None), slice(None), *place.window.coarsened(REACH.stride).slices)


def twin_of(layer: nn.Module, comm=Alone(), **context) -> DistributedNorm:
    return DistributedNorm(
        copy.deepcopy(layer), Context(norm_comm=comm, batch_comm=comm, **context), REACH.stride, "n"
    )


def feature_map(seed: int, dtype=torch.float64) -> torch.Tensor:
    x = torch.randn(
        IMAGES, CHANNELS, *CELLS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (x * torch.arange(1.0, CHANNELS + 1).view(-1, 1, 1) + 5).to(dtype)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_the_whole_images(comm, name):
    torch.manual_seed(0)
    layer, whole = layer_of(name), feature_map(1).requires_grad_()
    everyone = places()
    weights = [torch.randn(whole[cells(p)].shape, dtype=torch.float64) for p in everyone]
    y = layer(whole)
    sum((w * y[cells(p)]).sum() for w, p in zip(weights, everyone)).backward()

    norm, mine = twin_of(layer, comm), places(comm.rank, comm.size)
    norm.context.places = mine
    xs = [whole.detach()[cells(p)].requires_grad_() for p in mine]
    ys = norm.joint(xs)
    torch.autograd.backward(ys, weights[comm.rank :: comm.size])
    gradient = torch.zeros_like(whole)
    for x, p in zip(xs, mine):
        gradient[cells(p)] += x.grad

    def close(a, b):
        return torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)

    for out, p in zip(ys, mine):
        close(out, y[cells(p)])
    close(torch.from_numpy(comm.allreduce(gradient.numpy())), whole.grad)
    for ours, theirs in zip(norm.parameters(), layer.parameters()):
        close(torch.from_numpy(comm.allreduce(ours.grad.numpy())), theirs.grad)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("name", ["instance", "group", "batch"])
def test_adjoint(comm, name):
    """<J v, g> == <v, J* g>, with J v of the serial layer by forward differentiation and J* g of the distributed one."""
    torch.manual_seed(0)
    layer, whole, v = layer_of(name), feature_map(1), feature_map(2)
    _, jv = torch.func.jvp(
        layer
        if name != "batch"
        else lambda x: nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, True),
        (whole,),
        (v,),
    )
    everyone = places()
    g = [torch.randn(whole[cells(p)].shape, dtype=torch.float64) for p in everyone]
    forward = sum((jv[cells(p)] * w).sum().item() for p, w in zip(everyone, g))

    norm, mine = twin_of(layer, comm), places(comm.rank, comm.size)
    norm.context.places = mine
    xs = [whole[cells(p)].requires_grad_() for p in mine]
    gradients = torch.autograd.grad(norm.joint(xs), xs, g[comm.rank :: comm.size])
    backward = comm.allreduce(sum((v[cells(p)] * d).sum().item() for p, d in zip(mine, gradients)))
    assert backward == pytest.approx(forward, rel=1e-11)


@pytest.fixture(params=["compiled", "PyTorch's, by passes", "PyTorch's, whole"])
def kernels(request, monkeypatch):
    """The three ways to compute a norm."""
    if request.param != "compiled":
        monkeypatch.setattr(compiled, "available", lambda x: False)
    if request.param == "PyTorch's, by passes":
        monkeypatch.setattr(DistributedNorm, "is_local", lambda self, xs: False)
    return request.param


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["instance", "instance affine", "group", "batch"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float64, 1e-13)]
)
def test_all_kernels_give_the_norm_and_its_activation(name, layout, dtype, tolerance, kernels):
    """Against float64; the precision of the answer, and its type, are the input's."""
    torch.manual_seed(0)
    layer, whole = (
        layer_of(name).to(torch.promote_types(dtype, torch.float32)),
        feature_map(1, dtype).contiguous(memory_format=layout),
    )
    g = feature_map(2, dtype)
    slope = 0.2 if dtype != torch.bfloat16 else 1.0  # a sign that rounding turns is no error
    exact = copy.deepcopy(layer).double()
    x = whole.double().requires_grad_()
    y = nn.functional.leaky_relu(exact(x), slope)
    y.backward(g.double())
    wanted = [y, x.grad, *(p.grad for p in exact.parameters())]
    norm = twin_of(layer)
    norm.slope = slope
    norm.context.places = places(grid=(1, 1))
    assert norm.is_local([whole]) == (
        kernels == "PyTorch's, whole"
        and dtype != torch.float64
        and (name != "group" or layout == torch.contiguous_format)
    )
    x = whole.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = norm(x)
    y.backward(g)
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    for found, right in zip([y, x.grad, *(p.grad for p in norm.parameters())], wanted):
        assert (found.double() - right).norm() <= tolerance * right.norm(), found.shape


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "dtype, little", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-4)]
)
def test_pytorchs_kernels_are_as_exact_as_ours_on_windows_with_halos(
    name, layout, dtype, little, monkeypatch
):
    """Rounded once: tilt and shift in bfloat16 would make the gradient wrong by up to 2e-2."""
    torch.manual_seed(0)
    layer, whole, g = layer_of(name).float(), feature_map(1, dtype) + 20, feature_map(2, dtype)

    def found(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            if not ours:
                patch.setattr(compiled, "available", lambda x: False)
            norm = twin_of(layer.to(torch.promote_types(dtype, torch.float32)))
            norm.slope, norm.context.places = 0.2, places()

            def laid(t, p):
                return t[cells(p)].to(dtype).contiguous(memory_format=layout)

            xs, gs = zip(
                *((laid(whole, p).requires_grad_(), laid(g, p)) for p in norm.context.places)
            )
            ys = norm.joint(list(xs))
            torch.autograd.backward(ys, gs)

            def join(parts):
                return torch.cat([part.detach().flatten().double() for part in parts])

            return [
                join(ys),
                join(x.grad for x in xs),
                *(p.grad.double() for p in norm.parameters()),
            ]

    exact = found(torch.float64, True)

    def errors(ours):
        return [((a - b).norm() / b.norm()).item() for a, b in zip(found(dtype, ours), exact)]

    for mine, theirs in zip(errors(True), errors(False)):
        assert theirs <= max(1.2 * mine, little), (mine, theirs)


class TestFolded:
    """Channels dropped before a norm, and the activation behind it, are computed in the norm's own passes."""

    @pytest.mark.parametrize("name", LAYERS)
    @pytest.mark.parametrize("dtype, little", [(torch.float64, 1e-11), (torch.float32, 2e-5)])
    def test_as_three_layers(self, name, dtype, little, kernels):
        torch.manual_seed(1)
        inner, whole, g = layer_of(name), feature_map(1).requires_grad_(), feature_map(2)
        model = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Dropout2d(0.4), inner, nn.LeakyReLU(0.1)
        ).double()
        tiled = parallelize(
            copy.deepcopy(model).to(dtype), ReceptiveField((0, 0), (1, 1)), Context(seed=3)
        )
        assert [type(layer).__name__ for layer in tiled.layers] == [
            "Conv2d",
            "Folded",
            "DistributedNorm",
            "Folded",
        ]
        box = Box.whole(CELLS)
        place = TilePlacement(CELLS, box, box, tuple(range(IMAGES)), (0,) * IMAGES)
        norm = tiled.layers[2]
        mask = norm.dropout[0].channels_of(place, CHANNELS)
        assert 0 < (mask == 0).sum() < mask.numel()
        y = model[3](inner(model[0](whole) * mask.view(IMAGES, CHANNELS, 1, 1)))
        y.backward(g)
        x = whole.detach().to(dtype).requires_grad_()
        (ours,) = tiled([x], [place])
        ours.backward(g.to(dtype))

        def close(a, b):
            assert (a - b).norm() <= little * b.norm(), (a - b).abs().max()

        close(ours, y)
        close(x.grad, whole.grad)
        for mine, theirs in zip(norm.parameters(), inner.parameters()):
            close(mine.grad, theirs.grad)

    def test_what_is_folded(self):
        layers = (
            nn.Dropout(0.1),
            nn.BatchNorm2d(4),
            nn.GELU(),
            nn.InstanceNorm2d(4),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.ReLU(),
        )
        model = nn.Sequential(nn.Conv2d(4, 4, 1), *layers)
        kinds = [
            type(layer).__name__
            for layer in parallelize(model, ReceptiveField((0, 0), (1, 1))).layers[1:]
        ]
        assert kinds == [
            "KeyedDropout",
            "DistributedNorm",
            "GELU",
            "DistributedNorm",
            "Folded",
            "KeyedDropout",
            "ReLU",
        ]
        assert (model[2].slope, model[4].slope) == (1.0, 0.0)


@pytest.mark.parallel([1, 2])
def test_running_statistics_are_deferred_batch_norms(comm):
    """All images of a step, over micro-batches and sample groups, enter once: their mean and biased variance."""
    norms = [
        twin_of(nn.BatchNorm2d(channels, momentum=0.3).double(), groups_comm=comm)
        for channels in (2, CHANNELS)
    ]
    steps = [
        [
            [feature_map(100 * step + 10 * micro + group) for group in range(comm.size)]
            for micro in range(2)
        ]
        for step in range(2)
    ]
    mean, var = (
        torch.zeros(CHANNELS, dtype=torch.float64),
        torch.ones(CHANNELS, dtype=torch.float64),
    )
    for step in steps:
        for norm in norms:
            norm.context.places = places()
            for micro in step:
                norm.joint(
                    [micro[comm.rank][cells(p)][:, : norm.channels] for p in norm.context.places]
                )
            before = mean[: norm.channels]
            assert torch.equal(norm.running_mean, before), "nothing moves before the step is done"
        commit(norms, comm)
        values = torch.cat([x for micro in step for x in micro]).transpose(0, 1).flatten(1)
        mean = 0.7 * mean + 0.3 * values.mean(1)
        var = 0.7 * var + 0.3 * values.var(1, correction=0)
        for norm in norms:
            torch.testing.assert_close(norm.running_mean, mean[: norm.channels], rtol=1e-12, atol=0)
            torch.testing.assert_close(norm.running_var, var[: norm.channels], rtol=1e-12, atol=0)
        mean, var = norms[1].running_mean.clone(), norms[1].running_var.clone()
    assert all(norm.num_batches_tracked == 2 and not norm.seen for norm in norms)


def test_calls_of_one_layer_enter_its_running_statistics_one_after_another():
    """Places of one user's layer, called twice and once, beside a layer with another momentum."""
    first, again, other = (twin_of(layer_of("batch")) for _ in range(3))
    again.keeper, other.momentum = [first], 0.3
    wanted = [norm.running_mean.clone() for norm in (first, other)]
    for seed, norm in enumerate((first, first, other, again)):
        norm.turn = len(norm.seen)
        norm.context.places = places(grid=(1, 1))
        norm.joint([feature_map(seed)])
        mean = feature_map(seed).transpose(0, 1).flatten(1).mean(1)
        wanted[norm is other].lerp_(mean, norm.momentum)
    commit([first, other, again], Alone())
    for norm, mean in zip((first, other, again), (*wanted, wanted[0])):
        torch.testing.assert_close(norm.running_mean, mean, rtol=1e-12, atol=1e-12)
    assert [int(n.num_batches_tracked) for n in (first, other, again)] == [3, 1, 3]


def test_a_forward_pass_is_counted_once_and_a_repeated_one_is_not(kernels):
    norm, x = twin_of(layer_of("batch").float()), feature_map(1, torch.float32)
    norm.context.places = places(grid=(1, 1))
    with norm.context.repeating():
        norm(x)
    assert not norm.seen
    norm(x)
    ((seen,),) = norm.seen.values()
    var, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(seen.mean, mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(seen.var, var, rtol=1e-5, atol=0)


def test_evaluation_uses_running_statistics_and_leaves_them():
    layer = layer_of("batch")
    layer(feature_map(3))
    layer.eval()
    norm = twin_of(layer).eval()
    norm.context.places = places()
    for p, y in zip(
        norm.context.places, norm.joint([feature_map(1)[cells(p)] for p in norm.context.places])
    ):
        torch.testing.assert_close(y, layer(feature_map(1))[cells(p)])
    assert not norm.seen and not norm.active


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", ["joint", "evaluated", "pending"])
def test_a_lone_image_keeps_its_channels_last(name, way, monkeypatch):
    """And its gradient, where it is a part of a larger map: kernels behind tell the format by the strides."""
    monkeypatch.setattr(norms, "_SMALL", 0)
    norm = twin_of(layer_of(name).float())
    norm.context.places = [
        TilePlacement((12, 20), Box.whole((12, 20)), Box.whole((12, 20)), (0,), (0,))
    ]
    whole = torch.randn(1, CHANNELS, 7, 11).contiguous(memory_format=torch.channels_last)
    x = whole[..., 1:, :10].requires_grad_(way != "evaluated")
    if way == "pending":
        pending = norm.pending(norm.statistics(norm.moments(x.detach(), 0, None)))
        y = pending(x, 0, None, 1.0)
    elif way == "joint":
        y = norm(x)
    else:
        with torch.no_grad():
            y = norm.eval()(x)
    found = [y]
    if way != "evaluated":
        (g,) = torch.autograd.grad(
            y, x, torch.randn(y.shape).contiguous(memory_format=torch.channels_last)
        )
        found.append(g)
    if way == "pending":
        pending.finalize()
        found.append(pending.with_statistics_grad(g, x.detach(), Box.whole(x.shape[2:]), 0, None))
    for t in found:
        assert (
            t.stride()
            == torch.empty(t.shape).contiguous(memory_format=torch.channels_last).stride()
        )


@pytest.mark.parallel(2)
@pytest.mark.parametrize("name", ["instance affine", "group", "batch"])
def test_per_window(comm, name):
    """norm_scope window: every window, halo included, is an image of its own; no rank waits for another."""
    torch.manual_seed(0)
    layer, whole = layer_of(name), feature_map(1)
    norm, mine = twin_of(layer, comm, per_window=True), places(comm.rank, comm.size)
    norm.context.places = mine
    if comm.rank:
        mine = norm.context.places = mine[:2]  # ranks need not have as many
    for p, y in zip(mine, norm.joint([whole[cells(p)] for p in mine])):
        torch.testing.assert_close(y, layer(whole[cells(p)]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["instance", "batch"])
def test_one_pixel_a_channel_is_no_sample(kind, dtype):
    """... whichever kernel would have done it."""
    norm = twin_of(layer_of(kind).to(dtype))
    norm.context.places = [TilePlacement((1, 1), Box.whole((1, 1)), Box.whole((1, 1)), (0,), (0,))]
    with pytest.raises(
        ValueError,
        match="n: a norm needs at least 2 values per channel, but .* has 1: .*larger image or crop, or a smaller model.depth",
    ):
        norm(torch.zeros(1, CHANNELS, 1, 1, dtype=dtype))


@pytest.mark.parametrize(
    "layer, message",
    [
        (
            nn.InstanceNorm2d(4, track_running_stats=True),
            "enc.n: instance norm with running statistics is not supported: set track_running_stats=False",
        ),
        (
            nn.BatchNorm2d(4, momentum=None),
            "enc.n: batch norm with a cumulative average .* give it a momentum",
        ),
    ],
)
def test_layers_without_a_twin(layer, message):
    with pytest.raises(ValueError, match=message):
        DistributedNorm(layer, Context(), (1, 1), "enc.n")


def test_the_twin_keeps_names_and_tensors():
    layer = layer_of("batch")
    twin = DistributedNorm(layer, Context(), (1, 1), "n")
    assert twin.state_dict().keys() == layer.state_dict().keys()
    assert twin.weight is layer.weight and twin.running_var is layer.running_var
