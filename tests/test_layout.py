"""Who holds which cells at each layer, as pictures: arithmetic without tensors."""

from itertools import product

import pytest
from made_graphs import line
from torch import nn

from distseg.layers.graph import graph_of
from distseg.models.unet import unet
from distseg.tiling.access_pattern import Gather, Interpolate, Scatter, inside
from distseg.tiling.layout import Layout, TileBorders, exchange_points
from distseg.tiling.tile import Box, most_even_grid

CONV = ("conv", Gather(3, 1, 1, 1, 1))
POOL = ("pool", Gather(2, 2, ceil=True))
UP = ("up", Scatter(2, 2))
STASH, POP, ACT = ("stash",), ("pop", "pop"), ("act",)


def picture(steps, n, borders, every, cell, **more) -> list[str]:
    """A line a layer: held (o own, - others'), then taken, with what is beyond the image as 0."""
    graph = line(*steps)
    layout = Layout(graph, (n,), (borders,), every, **more)
    lines = []
    for layer in range(len(graph)):
        part = layout.part(layer, (cell,))
        (a, b), (c, d) = (
            (part.owned.start[0], part.owned.stop[0]),
            (part.input.start[0], part.input.stop[0]),
        )
        held = "".join(
            "o"
            if a <= x < b
            else "-"
            if part.available.start[0] <= x < part.available.stop[0]
            else "."
            for x in range(part.size[0])
        )
        taken = (
            "".join("o" if a <= x < b else "-" for x in range(c, d))
            .rjust(d, ".")
            .ljust(part.size[0], ".")
        )
        pads = "0" * (c - part.padded_input.start[0]), "0" * (part.padded_input.stop[0] - d)
        lines.append(f"{held} {pads[0]}{taken}{pads[1]}" + (" *" if layer in layout.points else ""))
    return lines


def test_an_exchange_before_every_convolution():
    assert picture([CONV, ACT, CONV], 8, (0, 4, 8), "1", 0) == [
        "oooo.... 0oooo-... *",
        "oooo.... oooo....",
        "oooo.... 0oooo-... *",
    ]


def test_a_margin_is_eaten_layer_by_layer():
    assert picture([CONV, ACT, CONV, CONV], 10, (0, 4, 7, 10), "3", 1) == [
        "....ooo... .---ooo--- *",
        "..--ooo--. ..--ooo--.",
        "..--ooo--. ..--ooo--.",
        "...-ooo-.. ...-ooo-..",
    ]


def test_levels():
    """A skip is held as far as its pop wants it; the coarse level has an exchange of its own."""
    assert picture([CONV, STASH, POOL, CONV, UP, POP, CONV], 11, (0, 4, 11), "level", 0) == [
        "oooo....... 0oooo-...... *",
        "oooo....... oooo.......",
        "oooo....... oooo.......",
        "oo.... 0oo-... *",
        "oo.... oo....",
        "oooo........ oooo........",
        "oooo....... 0oooo-...... *",
    ]


def test_deep_levels_can_share_an_exchange():
    graph = line(CONV, POOL, CONV, CONV, UP, CONV)
    assert Layout(graph, (16,), ((0, 8, 16),), "1").points == {0, 2, 3, 5}
    assert Layout(graph, (16,), ((0, 8, 16),), "1", fuse_below=5).points == {0, 2, 5}


@pytest.mark.parametrize(
    "every, points", [("1", 12), ("2", 6), ("12", 1), ("level", 5), ("all", 0)]
)
def test_the_number_of_exchanges_of_a_network(every, points):
    """Depth 2, two convolutions a level: ten of them look beyond their tile, and both linear up-samplings."""
    graph = graph_of(unet(depth=2, num_convs=2, base_channels=4, up="bilinear"))
    layout = Layout(graph, (64, 64), ((0, 32, 64), (0, 64)), every)
    assert len(layout.points) == points
    if every == "1":
        work = [
            layout.part(k, (0, 0)).output.pixels
            for k, node in enumerate(graph)
            if node.access_patterns
        ]
        own = [
            Box(*zip(*[c[:2] for c in _cuts(layout, k + 1)])).pixels
            for k, node in enumerate(graph)
            if node.access_patterns
        ]
        assert work == own


def _cuts(layout, layer):
    return layout.spans(layer)[0] if layer < len(layout.graph) else layout.result_cuts


@pytest.mark.parametrize(
    "kernel, stride, dilation, padding",
    [(3, 1, 1, 1), (4, 2, 1, 1), (2, 2, 1, 0), (3, 2, 2, 2), (7, 3, 1, 0)],
)
@pytest.mark.parametrize("ceil", [False, True])
def test_sizes_are_pytorch_s(kernel, stride, dilation, padding, ceil):
    import torch

    for n in range(13, 20):
        x = torch.zeros(1, 1, n, n)
        found = Gather(kernel, stride, dilation, padding, padding, ceil).size(n)
        if ceil and padding <= kernel // 2:
            assert (
                found == nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=True)(x).shape[2]
            )
        elif not ceil:
            assert found == nn.Conv2d(1, 1, kernel, stride, padding, dilation)(x).shape[2]
        extra = min(stride, dilation) - 1
        assert (
            Scatter(kernel, stride, dilation, padding, extra).size(n)
            == nn.ConvTranspose2d(1, 1, kernel, stride, padding, extra, 1, True, dilation)(x).shape[
                2
            ]
        )
    assert Interpolate(3).size(5) == 15


def test_what_lies_beyond_a_map_is_made_of_cells_inside_where_it_is_mirrored():
    assert inside((-2, 1), 9) == (0, 1) and inside((-2, 1), 9, mirrored=True) == (0, 3)
    assert inside((7, 12), 9) == (7, 9) and inside((7, 12), 9, mirrored=True) == (5, 9)
    assert inside((-3, -1), 9) == (0, 0)


def test_cells_fewer_than_tiles_are_refused():
    with pytest.raises(
        ValueError,
        match="layer pool computes 2 cells from 4 along a dim with 3 tiles, but each tile needs at least one",
    ):
        Layout(line(CONV, POOL), (4,), ((0, 1, 2, 4),), "1")


@pytest.mark.parametrize(
    "image, stride, ranks, grid",
    [
        ((100, 400), (4, 4), 4, "1x4"),
        ((400, 400), (4, 4), 4, "2x2"),
        ((400, 300), (4, 4), 6, "3x2"),
        ((8, 8), (8, 8), 3, "1x1"),
        ((16, 8), (8, 8), 3, "2x1"),
        ((60, 50, 20), (4, 4, 4), 8, "4x2x1"),
    ],
)
def test_the_grid_nearest_to_squares(image, stride, ranks, grid):
    assert str(most_even_grid(image, stride, ranks)) == grid


@pytest.mark.parametrize("every", ["1", "level", "2"])
def test_the_cells_of_one_tile_are_those_of_the_layout(every):
    graph = graph_of(unet(depth=2, num_convs=1, base_channels=2))
    image, borders = (44, 61), [(0, 12, 28, 44), (0, 20, 36, 61)]
    whole = Layout(graph, image, borders, every)
    along = [TileBorders.of_image(graph, d, n, b) for d, (n, b) in enumerate(zip(image, borders))]
    for cell in product(range(3), range(3)):
        tiles = [borders.only(c) for borders, c in zip(along, cell)]
        beyond = frozenset.union(*(tile.reads_beyond for tile in tiles))
        points = frozenset(exchange_points(graph, beyond, every))
        assert points == whole.points
        for number, cells in enumerate(zip(*(tile.cells(points) for tile in tiles))):
            view = whole.part(number, cell)
            held = whole.computed(graph[number].first, cell)
            boxes = (view.input, view.input.intersection(held), view.output, held)
            assert list(zip(*cells))[: len(boxes)] == [box.size for box in boxes]
