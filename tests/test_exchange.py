"""Tiles that exchange borders: each layer against its serial twin on the whole image, and the adjoint of the exchange, in float64.

A tile's own part of the output counts with the weights G there, so the serial gradients are those of <G, y>; the
distributed ones are added up over ranks.
"""

import copy
import re
from itertools import product

import pytest
import torch
from mpirunner.transport import NAME as TRANSPORT
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import distseg
from distseg.comm.mesh import Mesh
from distseg.config.settings import Config, MeshConfig, ModelConfig, SpatialConfig
from distseg.config.sizes import Size
from distseg.layers.context import Context
from distseg.layers.graph import graph_of, receptive_field
from distseg.layers.layer_table import exchange_box, node_of
from distseg.models.capture.capture import as_network
from distseg.models.layers import Pop, Stash
from distseg.models.network import Call
from distseg.models.zoo import build_model
from distseg.runtime.exchange import Exchange
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.graph import Graph
from distseg.tiling.layout import Layout
from distseg.tiling.tile import Box, TilePlacement, tiles
from distseg.training.engine import Engine
from distseg.training.verify import RandomImages, own_pieces


@pytest.fixture(autouse=True)
def same_weights_on_all_ranks():
    torch.manual_seed(0)


GRIDS = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 6: (2, 3), 9: (3, 3)}
BATCH, CHANNELS = 2, 4


def uneven(n: int, tiles: int) -> tuple[int, ...]:
    """Borders that lie on nothing: the first tiles are about half as wide as the last ones."""
    weights = [1 + k / max(1, tiles - 1) for k in range(tiles)]
    inner = [
        max(k, min(n - tiles + k, round(n * sum(weights[:k]) / sum(weights))))
        for k in range(1, tiles)
    ]
    return (0, *inner, n)


def exchange_of(
    graph, comm, size, grid, per_rank=None, every="1", borders=uneven, **more
) -> Exchange:
    """An exchange with a layout on odd borders, and of any layers: results need not have the image's size."""
    per_rank = per_rank or (1,) * len(size)
    exchange = Exchange(graph, (1,) * len(size), comm, grid, per_rank, every, **more)
    exchange._layouts[tuple(size)] = Layout(
        graph,
        size,
        [borders(n, g * p) for n, g, p in zip(size, grid, per_rank)],
        every,
        more.get("fuse_below", 0),
    )
    return exchange


def own_cells(exchange: Exchange):
    """Of this rank, row by row."""
    at, rank = [], exchange.comm.rank
    for g in reversed(exchange.grid):
        at.insert(0, rank % g)
        rank //= g
    return list(product(*(range(c * p, (c + 1) * p) for c, p in zip(at, exchange.per_rank))))


def compare(layers: list[nn.Module], graph, comm, size, grid, tolerance=1e-12, **settings) -> None:
    """Outputs and all gradients of ``layers`` on tiles against the whole image."""
    torch.manual_seed(0)
    exchange = exchange_of(graph, comm, size, grid, **settings)
    layout = exchange.layout(size)
    whole = torch.randn(BATCH, CHANNELS, *size, dtype=torch.float64).requires_grad_()
    y = nn.Sequential(*layers)(whole)
    g = torch.randn(y.shape, dtype=torch.float64)
    parameters = [p for layer in layers for p in layer.parameters()]
    wanted = torch.autograd.grad(y, [whole, *parameters], g)

    context, places, xs = Context(norm_comm=comm, batch_comm=comm), [], []
    for cell in own_cells(exchange):
        tile = layout.part(0, cell).owned
        places.append(TilePlacement(tuple(size), tile, tile, tuple(range(BATCH)), (0,) * BATCH))
        xs.append(whole.detach()[(..., *tile.slices)].clone().requires_grad_())
    context.places = places
    maps = [{0: x} for x in xs]
    compute = exchange.layers(maps, context, 0)
    for number, layer in enumerate(layers):
        for had, made in zip(maps, compute(number, layer)):
            had[number + 1] = made
    context.regions = None
    ys = [had[len(layers)] for had in maps]
    owned = [layout.owned(layout.graph.result, cell) for cell in own_cells(exchange)]
    gradients = torch.autograd.grad(
        ys, [*xs, *parameters], [g[(..., *box.slices)] for box in owned]
    )
    for found, box in zip(ys, owned):
        close(found, y[(..., *box.slices)], tolerance)
    for found, place in zip(gradients, places):
        close(found, wanted[0][(..., *place.tile.slices)], tolerance, wanted[0].abs().max())
    for found, right in zip(gradients[len(xs) :], wanted[1:]):
        close(torch.from_numpy(comm.allreduce(found.numpy())), right, tolerance)
    # No cell of the result is computed twice, none is left out.
    assert comm.allreduce(sum(box.pixels for box in owned)) == Box.whole(y.shape[2:]).pixels


def close(found, wanted, tolerance, scale=None) -> None:
    assert found.shape == wanted.shape
    scale = (wanted.abs().max() if wanted.numel() else 0) if scale is None else scale
    error = (found - wanted).abs().max() if wanted.numel() else 0
    assert error <= tolerance * max(float(scale), 1e-3), f"error {error:.1e} of {scale:.1e}"


def one(layer: nn.Module, comm, size, **settings) -> None:
    compare(
        [layer.double()],
        Graph([node_of(Call("layer", layer, (0,)), len(size))]),
        comm,
        size,
        settings.pop("grid", GRIDS[comm.size]),
        **settings,
    )


RANKS = [1, 2, 3, 6, 9]


@pytest.mark.parallel(RANKS)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", range(1, 8))
def test_convolutions(comm, kernel):
    cases = list(product((1, 2, 3, 4), (1, 2, 3), (0, kernel // 2, "more")))
    for stride, dilation, padding in cases[
        (kernel + comm.size) % 3 :: 3
    ]:  # other ones for other numbers of ranks
        padding = dilation * (kernel - 1) if padding == "more" else padding
        size = (dilation * (kernel - 1) + 13, dilation * (kernel - 1) + 17)
        one(nn.Conv2d(CHANNELS, 3, kernel, stride, padding, dilation, bias=stride == 1), comm, size)


@pytest.mark.parallel([1, 4, 6])
@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate"])
def test_convolutions_of_other_kinds(comm, mode):
    one(nn.Conv2d(CHANNELS, 4, (3, 5), (2, 1), (1, 2), padding_mode=mode), comm, (15, 13))
    one(nn.Conv2d(CHANNELS, 8, (5, 2), padding="same", groups=2, padding_mode=mode), comm, (9, 13))
    one(
        nn.Conv2d(CHANNELS, 2, 7, padding=3, dilation=1, padding_mode=mode), comm, (9, 9)
    )  # halos wider than tiles
    one(nn.Conv2d(CHANNELS, 2, 3, padding=6, dilation=6, padding_mode=mode), comm, (13, 11))


@pytest.mark.parallel(RANKS)
@pytest.mark.covering(1)
@pytest.mark.parametrize("stride", range(1, 5))
def test_transposed_convolutions(comm, stride):
    for kernel, dilation in product(range(1, 8), (1, 2, 3)):
        for padding, extra in ((0, 0), (min(1, dilation * (kernel - 1)), stride - 1)):
            one(
                nn.ConvTranspose2d(
                    CHANNELS, 6, kernel, stride, padding, extra, groups=2, dilation=dilation
                ),
                comm,
                (5, 7),
            )


@pytest.mark.parallel(RANKS)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", range(1, 6))
def test_poolings(comm, kernel):
    for stride, padding, ceil in product(range(1, 5), {0, kernel // 2}, (False, True)):
        one(nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil), comm, (18, 19))
        for include in (False, True):
            one(nn.AvgPool2d(kernel, stride, padding, ceil, include), comm, (18, 19))
    one(nn.MaxPool2d(kernel, 2, kernel // 2, dilation=2, ceil_mode=True), comm, (20, 23))
    one(nn.AvgPool2d(kernel, 2, divisor_override=3), comm, (18, 19))


@pytest.mark.parallel(RANKS)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_up_sampling(comm, mode):
    for factor in (1, 2, 3, (2, 4)):
        one(nn.Upsample(scale_factor=factor, mode=mode), comm, (5, 7))
    one(nn.PixelShuffle(2), comm, (5, 7))


@pytest.mark.parallel(RANKS)
def test_padding_layers(comm):
    for layer in (
        nn.ZeroPad2d((1, 2, 3, 0)),
        nn.ConstantPad2d((0, 5, 1, 1), 2.5),
        nn.ReflectionPad2d((2, 4, 3, 1)),
        nn.ReplicationPad2d((3, 3, 0, 4)),
    ):
        one(layer, comm, (7, 8))


@pytest.mark.parallel([1, 2, 4])
def test_volumes(comm):
    grid = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 1, 2)}[comm.size]
    for layer in (
        nn.Conv3d(CHANNELS, 3, 3, padding=1),
        nn.Conv3d(CHANNELS, 3, (1, 4, 3), (1, 2, 3), (0, 1, 1)),
        nn.ConvTranspose3d(CHANNELS, 3, 3, 2, 1, 1),
        nn.MaxPool3d(2, ceil_mode=True),
        nn.AvgPool3d(3, 2, 1),
        nn.Upsample(scale_factor=2, mode="trilinear"),
    ):
        one(layer, comm, (5, 9, 7), grid=grid)


@pytest.mark.parallel([1, 2, 4])
def test_several_tiles_a_rank(comm):
    for layer in (
        nn.Conv2d(CHANNELS, 3, 5, padding=2),
        nn.ConvTranspose2d(CHANNELS, 3, 4, 2, 1),
        nn.MaxPool2d(3, 2, 1),
    ):
        one(layer, comm, (17, 19), per_rank=(2, 3))


def net(norm=lambda: nn.Identity()) -> nn.Sequential:
    """Two levels with a skip, bilinear and transposed up-sampling, odd sizes cut at the skip."""

    def conv(a, b, k=3):
        return nn.Conv2d(a, b, k, padding=k // 2, bias=False)

    return nn.Sequential(
        conv(CHANNELS, 6), norm(), nn.LeakyReLU(0.1), conv(6, 6, 5), Stash("a"), nn.MaxPool2d(2, ceil_mode=True),
        conv(6, 8), norm.__call__() if norm is None else nn.ReLU(), Stash("b"), nn.AvgPool2d(2, ceil_mode=True),
        conv(8, 8), nn.Upsample(scale_factor=2, mode="bilinear"), Pop("b"), conv(16, 6),
        nn.ConvTranspose2d(6, 6, 2, 2), Pop("a"), conv(12, 5), norm(), nn.Tanh(), conv(5, 3), nn.Conv2d(3, 2, 1),
    ).double()  # fmt: skip


@pytest.mark.parallel([1, 2, 4, 6])
@pytest.mark.covering(1)
@pytest.mark.parametrize("every", ["1", "2", "3", "7", "level"])
@pytest.mark.parametrize("size", [(29, 37), (24, 31)])
def test_a_network_with_skips_at_every_interval(comm, every, size):
    torch.manual_seed(1)
    model = net()

    def on_grid(n, tiles):
        return (0, *(round(k * n / tiles / 4) * 4 for k in range(1, tiles)), n)

    for borders in (on_grid, uneven):
        compare(
            list(model), graph_of(model), comm, size, GRIDS[comm.size], every=every, borders=borders
        )
    compare(
        list(model),
        graph_of(model),
        comm,
        size,
        GRIDS[comm.size],
        every=every,
        per_rank=(1, 2),
        fuse_below=5,
    )


@pytest.mark.parallel(RANKS)
def test_the_exchange_and_its_adjoint(comm):
    """<F x, y> == <x, F* y> over all ranks, for halos wider than a tile, corners, several tiles and padding."""
    for seed, (kernel, per_rank) in enumerate(product((1, 3, 9), ((1, 1), (2, 1)))):
        torch.manual_seed(10 * seed + comm.rank)
        layer = nn.Conv2d(CHANNELS, CHANNELS, kernel, padding=kernel // 2)
        size = (13, 11)
        exchange = exchange_of(
            Graph([node_of(Call("c", layer, (0,)), 2)]), comm, size, GRIDS[comm.size], per_rank
        )
        layout = exchange.layout(size)
        cells = own_cells(exchange)
        parts = [layout.part(0, cell) for cell in cells]
        places = [TilePlacement(size, part.owned, part.owned, (0, 1), (0, 1)) for part in parts]
        xs = [
            torch.randn(BATCH, CHANNELS, *part.available.size, dtype=torch.float64)
            for part in parts
        ]
        frames = [exchange_box(layer, part) for part in parts]
        for halo in [
            exchange._exchange(
                0, layer, range(len(xs)), frames, xs, parts, [layout] * len(parts), cells, places
            )
        ]:
            made = halo.forward(xs)
            ys = [torch.randn(m.shape, dtype=torch.float64) for m in made]
            back = halo.adjoint(ys)

            def dot(a, b):
                return comm.allreduce(sum((p * q).sum().item() for p, q in zip(a, b)))

            scale = (dot(made, made) * dot(ys, ys)) ** 0.5
            assert abs(dot(made, ys) - dot(xs, back)) <= 1e-14 * scale


@pytest.mark.parallel([1, 4])
@pytest.mark.parametrize("per_rank", ["1x1", "2x1"])
def test_a_step_of_all_tiles_has_the_arithmetic_of_the_serial_one(comm, per_rank):
    grid = Size(GRIDS[comm.size])
    config = Config(
        ModelConfig(depth=2, num_convs=2, base_channels=4, up="transposed", norm="instance", in_channels=3, out_channels=2),
        mesh=MeshConfig(tiles=grid, reducer=TRANSPORT), spatial=SpatialConfig(exchange_every=1, tiles_per_rank=per_rank),
    )  # fmt: skip
    plain = build_model(config.model).double()
    engine = Engine(
        config, Mesh(comm, 1, grid), build_model(config.model), (61, 75), precision="fp64"
    )
    images = RandomImages(Size("61x75"), 3, 2, config.loss)
    own = own_pieces(engine, images)
    with FlopCounterMode(display=False) as mine:
        engine.backward(own)
    pixels, labels = images.whole(0)
    with FlopCounterMode(display=False) as serial:
        nn.functional.cross_entropy(plain(pixels[None]), labels[None], ignore_index=255).backward()
    assert comm.allreduce(mine.get_total_flops()) == serial.get_total_flops()


@pytest.mark.parametrize(
    "layer, words",
    [
        (nn.MaxPool2d(2, return_indices=True), "set return_indices=False"),
        (
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
            "circular padding joins opposite borders",
        ),
        (nn.CircularPad2d(1), "circular padding joins opposite borders"),
        (nn.FractionalMaxPool2d(2, output_ratio=0.5), "has no distributed counterpart"),
    ],
)
def test_layers_that_can_not_be_computed_in_parts_are_named(layer, words):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), layer, nn.Conv2d(4, 2, 1))
    with pytest.raises(
        ValueError, match=rf"layer 1 \({type(layer).__name__}\) .*{re.escape(words)}"
    ):
        graph_of(model)


def test_a_layer_of_the_user_s_own_is_captured_or_refused():
    class Scale(nn.Module):
        def forward(self, x):
            return 3 * x.tanh()

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Scale(), nn.Conv2d(4, 2, 1))
    assert [bool(node.access_patterns) for node in graph_of(as_network(model))] == [
        True,
        False,
        False,
        True,
    ]
    with pytest.raises(ValueError, match=r"layer 1 \(Scale\) is not known to work pixel by pixel"):
        graph_of(model)


@pytest.mark.parallel(4)
@pytest.mark.parametrize(
    "norm", [lambda: nn.InstanceNorm2d(6, affine=True), lambda: nn.BatchNorm2d(6), nn.Identity]
)
def test_a_user_s_own_model_as_the_documentation_says(comm, norm):
    size, grid = (37, 45), (2, 2)
    blocks = [
        nn.Sequential(nn.Conv2d(3, 6, 5, padding=2, bias=False), norm(), nn.ReLU()),
        Stash("a"),
        nn.MaxPool2d(2, ceil_mode=True),
    ]
    blocks += [
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=2, dilation=2, bias=False), norm(), nn.ELU()),
        nn.ConvTranspose2d(6, 6, 3, 2, 1, 1),
        Pop("a"),
        nn.Conv2d(12, 2, 1),
    ]
    plain = nn.Sequential(*blocks).double()
    whole = torch.randn(2, 3, *size, dtype=torch.float64)
    y = plain(whole)
    g = torch.randn_like(y)
    wanted = torch.autograd.grad(y, list(plain.parameters()), g)

    reach = receptive_field(plain)
    exchange = Exchange(graph_of(plain), reach.stride, comm, grid, every="1")
    tiled = parallelize(plain, reach, Context(norm_comm=comm, batch_comm=comm), exchange)
    box = tiles(size, grid, reach.stride)[comm.rank]
    (mine,) = tiled([whole[(..., *box.slices)]], [TilePlacement(size, box, box, (0, 1), (0, 1))])
    close(mine, y[(..., *box.slices)], 1e-12)
    for found, right in zip(
        torch.autograd.grad(mine, list(tiled.parameters()), g[(..., *box.slices)]), wanted
    ):
        close(torch.from_numpy(comm.allreduce(found.numpy())), right, 1e-11)


@pytest.mark.parallel([1, 2])
def test_a_program_of_ones_own_trains_with_the_serial_gradient(comm):
    """A module, an exchange and the sum of gradients put together by hand, against the module alone."""
    image = 60, 48
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 2, 1)
    )
    module = copy.deepcopy(plain)
    network = distseg.capture(module)
    reach = receptive_field(network)
    exchange = Exchange(graph_of(network), reach.stride, comm, grid=(1, comm.size), every="1")
    tiled = parallelize(network, reach, Context(norm_comm=comm, batch_comm=comm), exchange)
    box = tiles(image, (1, comm.size), reach.stride)[comm.rank]
    place = TilePlacement(image, tile=box, window=box, images=(0,), samples=(0,))
    (logits,) = tiled([torch.ones(1, 3, *box.size)], [place])
    target = torch.zeros(1, *image, dtype=torch.long)
    part = target[(..., *box.slices)]
    (nn.functional.cross_entropy(logits, part, reduction="sum") / target.numel()).backward()
    tiled.commit_statistics()
    nn.functional.cross_entropy(plain(torch.ones(1, 3, *image)), target).backward()
    for p, q in zip(module.parameters(), plain.parameters()):
        gradient = torch.from_numpy(comm.allreduce(p.grad.numpy()))
        assert torch.allclose(gradient, q.grad, atol=1e-5)
    assert torch.allclose(module[1].running_mean, plain[1].running_mean, atol=1e-6)


def test_statistics_that_were_not_taken_over_are_told():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2))
    reach, box = receptive_field(model), Box.whole((6, 7))
    tiled = parallelize(model, reach, Context())
    tiled([torch.rand(1, 1, 6, 7)], [TilePlacement((6, 7), box, box, (0,), (0,))])
    with pytest.warns(UserWarning, match="commit_statistics"):
        tiled.eval()
