"""Segments between stored maps, and the windows that a tile of a segment's result is made from."""

import pytest
import torch
from torch import nn

from distseg.layers.graph import graph_of
from distseg.layers.layer_table import cropped, run
from distseg.models.layers import Pop, Stash
from distseg.models.network import calls_of, flat_layers
from distseg.models.unet import unet
from distseg.runtime.exchange import Exchange
from distseg.tiling.segment import segments_of, tile_plan
from distseg.tiling.tile import Box, boxes_of

NETWORK = dict(depth=2, num_convs=1, base_channels=4, in_channels=2, out_channels=2, dropout=0.0)


def norms(model: nn.Module) -> list[int]:
    return [
        position
        for position, (_, layer) in enumerate(flat_layers(model))
        if isinstance(layer, (nn.InstanceNorm2d, nn.BatchNorm2d))
    ]


def test_a_unet_is_cut_before_its_norms_and_skips_are_computed_again():
    """
    layers 0: conv drop | norm act stash pool conv drop | norm act stash pool conv drop | norm act up pop conv drop | norm act up pop conv drop | ...
           0    1        2    3   4     5    6    7       8    9   10   11   12   13     14   15  16 17  18   19      20   21  22 23
    """
    model = unet(**NETWORK)
    found = segments_of(graph_of(model), norms(model))
    assert [s.nodes for s in found] == [
        (0, 1),
        (*range(2, 8),),
        (*range(8, 14),),
        (8, 9, *range(14, 20)),
        (2, 3, *range(20, 26)),
        (26, 27, 28),
    ]
    assert [s.sources for s in found] == [(0,), (2,), (8,), (8, 14), (2, 20), (26,)]


def test_without_cuts_there_is_one_segment():
    model = unet(**NETWORK, norm="none")
    (only,) = segments_of(graph_of(model), [])
    assert only.nodes == (*range(29),) and only.sources == (0,)


def test_a_skip_behind_a_convolution_is_stored_itself():
    model = nn.Sequential(
        nn.InstanceNorm2d(2),
        nn.Conv2d(2, 2, 3, padding=1),
        Stash("a"),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.InstanceNorm2d(2),
        Pop("a"),
        nn.Conv2d(4, 2, 1),
    )
    found = segments_of(graph_of(model), [0, 4])
    assert [(s.nodes, s.sources) for s in found] == [
        ((0, 1), (0,)),
        ((2, 3), (2,)),
        ((4, 5, 6), (2, 4)),
    ]


@pytest.mark.parametrize(
    "network",
    [
        NETWORK,
        NETWORK | {"up": "bilinear"},
        NETWORK | {"up": "transposed", "num_convs": 2},
        NETWORK | {"norm": "none"},
    ],
)
@pytest.mark.parametrize("size", [(29, 43), (16, 8)])
def test_a_tile_of_every_segment_comes_out_of_its_windows(network, size):
    """Each segment on windows of the whole maps before it, against the whole image's maps; windows are no larger than asked for."""
    torch.manual_seed(0)
    model = unet(**network).double().eval()
    calls, graph = calls_of(model), graph_of(model)
    layout = Exchange(graph, (4, 4), every="all").layout(size)
    maps, statistics = [torch.randn(1, 2, *size, dtype=torch.float64)], norms(model)
    with torch.no_grad():
        for call in calls:
            maps.append(
                maps[-1]
                if isinstance(call.layer, Stash)
                else call.layer(*(maps[source] for source in call.inputs))
            )
    for segment in segments_of(graph, [graph[p].first for p in statistics]):
        for box in boxes(maps[segment.result].shape[2:]):
            plan = tile_plan(layout, segment, box)
            assert all(
                Box.whole(layout.sizes[source]).contains(window)
                for source, window in plan.read.items()
            )
            there = {
                source: (maps[source][(..., *window.slices)], window)
                for source, window in plan.read.items()
            }
            with torch.no_grad():
                for number, part in zip(segment.nodes, plan.views):
                    (x, have), *others = (there[source] for source in graph[number].inputs)
                    if number in statistics:  # those of the whole map
                        whole = maps[graph[number].first]
                        mean, var = (
                            whole.mean((2, 3), keepdim=True),
                            whole.var((2, 3), correction=0, keepdim=True),
                        )
                        y = (cropped(x, have, part.input) - mean) / (
                            var + calls[number].layer.eps
                        ).sqrt()
                    elif isinstance(calls[number].layer, Stash):
                        y = cropped(x, have, part.input)
                    else:
                        y = run(calls[number].layer, x, have, part, others)
                    there[number + 1] = y, part.output
            torch.testing.assert_close(
                y, maps[segment.result][(..., *box.slices)], rtol=1e-12, atol=1e-12
            )


def test_what_tiles_are_made_from_is_counted_as_it_is_and_found_once_along_each_dim():
    graph = graph_of(unet(**NETWORK))
    layout, (segment,) = (
        Exchange(graph, (4, 4), every="all").layout((64, 96)),
        segments_of(graph, []),
    )
    for tile in boxes_of(Box.whole((64, 96)), (16, 16)):
        plan = tile_plan(layout, segment, tile)
        assert plan.read == {0: plan.views[0].available}
        assert plan.input_cells == [
            part.input.pixels for part in plan.views
        ] and plan.output_cells == [part.output.pixels for part in plan.views]
    assert layout.along.cache_info().misses == 4 + 6


def boxes(size) -> list[Box]:
    h, w = size
    return [
        Box((0, 0), (h, w)),
        Box((0, 0), (max(1, h // 3), w)),
        Box((h // 2, w // 3), (h, max(w // 3 + 1, w - 1))),
        Box((h - 1, w - 1), (h, w)),
    ]
