"""Segments between stored maps, and the windows that a tile of a segment's result is made from."""

import pytest
import torch
from torch import nn

from distseg.geometry.segment import chain, segments_of
from distseg.geometry.tile import Box, boxes_of
from distseg.models.layers import Pop, Stash, flat_layers, skip_store
from distseg.models.unet import unet
from distseg.spatial.exchange import Exchange
from distseg.spatial.links import links_of
from distseg.spatial.local import cropped, run

NETWORK = dict(depth=2, num_convs=1, base_channels=4, in_channels=2, out_channels=2, dropout=0.0)


def norms(model: nn.Module) -> list[int]:
    return [position for position, (_, layer) in enumerate(flat_layers(model)) if isinstance(layer, (nn.InstanceNorm2d, nn.BatchNorm2d))]


def test_a_unet_is_cut_before_its_norms_and_skips_are_computed_again():
    """
    layers 0: conv drop | norm act stash pool conv drop | norm act stash pool conv drop | norm act up pop conv drop | norm act up pop conv drop | ...
           0    1        2    3   4     5    6    7       8    9   10   11   12   13     14   15  16 17  18   19      20   21  22 23
    """
    model = unet(**NETWORK)
    found = segments_of(links_of(model), norms(model))
    assert [s.layers for s in found] == [range(0, 2), range(2, 8), range(8, 14), range(14, 20), range(20, 26), range(26, 29)]
    assert [{pop: (skip.source, skip.stash) for pop, skip in s.skips.items()} for s in found] == [{}, {}, {}, {17: (8, 10)}, {23: (2, 4)}, {}]
    assert found[3].sources == [8, 14] and list(found[3].skips[17].layers) == [8, 9]


def test_without_cuts_there_is_one_segment():
    model = unet(**NETWORK, norm="none")
    (only,) = segments_of(links_of(model), [])
    assert only.layers == range(0, 29) and not only.skips


def test_a_skip_behind_a_convolution_is_stored_itself():
    model = nn.Sequential(nn.InstanceNorm2d(2), nn.Conv2d(2, 2, 3, padding=1), Stash("a"), nn.Conv2d(2, 2, 3, padding=1), nn.InstanceNorm2d(2), Pop("a"), nn.Conv2d(4, 2, 1))
    found = segments_of(links_of(model), [0, 4])
    assert [s.layers for s in found] == [range(0, 2), range(2, 4), range(4, 7)]
    assert found[2].skips[5].source == found[2].skips[5].stash == 2


@pytest.mark.parametrize("network", [NETWORK, NETWORK | {"up": "bilinear"}, NETWORK | {"up": "transposed", "num_convs": 2}, NETWORK | {"norm": "none"}])
@pytest.mark.parametrize("size", [(29, 43), (16, 8)])
def test_a_tile_of_every_segment_comes_out_of_its_windows(network, size):
    """Each segment on windows of the whole maps before it, against the whole image's maps; windows are no larger than asked for."""
    torch.manual_seed(0)
    model = unet(**network).double().eval()
    layers, links = [layer for _, layer in flat_layers(model)], links_of(model)
    layout = Exchange(links, (4, 4), every="all").layout(size)
    maps, skips = [torch.randn(1, 2, *size, dtype=torch.float64)], {}
    stashed = {}
    with torch.no_grad(), skip_store(skips):
        for layer in layers:
            if isinstance(layer, Stash):
                stashed[layer.name] = maps[-1]
            maps.append(layer(maps[-1]))
    statistics = [p for p in norms(model)]
    for segment in segments_of(links, statistics):
        start, stop = segment.layers.start, segment.layers.stop
        if start in statistics:  # its statistics are those of the whole map
            whole = maps[start]
            mean, var = whole.mean((2, 3), keepdim=True), whole.var((2, 3), correction=0, keepdim=True)
        for box in boxes(maps[stop].shape[2:]):
            way = chain(layout, segment, box)
            assert Box.whole(layout.sizes[start]).contains(way.given)
            x, have, held = maps[start][(..., *way.given.slices)], way.given, {}
            for pop, skip in segment.skips.items():
                held[skip.name] = stashed[skip.name][(..., *way.skips[pop].slices)]
            with torch.no_grad():
                for position, part in zip(segment.layers, way.parts):
                    layer = layers[position]
                    if position == start and start in statistics:
                        x = (cropped(x, have, part.taken) - mean) / (var + layer.eps).sqrt()
                    else:
                        if isinstance(layer, Pop):
                            held[layer.name] = cropped(held[layer.name], way.skips.get(position, part.skip), part.made)
                        with skip_store(held):
                            x = run(layer, x, have, part)
                    have = part.made
            torch.testing.assert_close(x, maps[stop][(..., *box.slices)], rtol=1e-12, atol=1e-12)


def test_what_tiles_are_made_from_is_counted_as_it_is_and_found_once_along_each_dim():
    links = links_of(unet(**NETWORK))
    layout, (segment,) = Exchange(links, (4, 4), every="all").layout((64, 96)), segments_of(links, [])
    for tile in boxes_of(Box.whole((64, 96)), (16, 16)):
        way = chain(layout, segment, tile)
        assert way.given == way.parts[0].given
        assert way.takes == [part.taken.pixels for part in way.parts] and way.makes == [part.made.pixels for part in way.parts]
    assert layout.along.cache_info().misses == 4 + 6


def boxes(size) -> list[Box]:
    h, w = size
    return [Box((0, 0), (h, w)), Box((0, 0), (max(1, h // 3), w)), Box((h // 2, w // 3), (h, max(w // 3 + 1, w - 1))), Box((h - 1, w - 1), (h, w))]
