"""Networks whose layers read any maps: as calls, as a graph, in segments."""

import pytest
import torch
from made_graphs import CONV
from torch import nn

from distseg.layers.graph import receptive_field
from distseg.models.layers import Add, Cat, Pop, Stash, Sum
from distseg.models.network import Network, calls_of
from distseg.runtime.partition import edges_between
from distseg.runtime.swap_layers import Folded, parallelize
from distseg.tiling.graph import Graph, Node, Skip, crossing, last_readings, skips_of
from distseg.tiling.layout import Layout
from distseg.tiling.segment import segments_of


def conv(n: int, m: int) -> nn.Module:
    return nn.Conv2d(n, m, 3, padding=1)


def test_a_network_computes_what_its_layers_read():
    torch.manual_seed(0)
    a, b, c = conv(2, 3), conv(3, 3), nn.MaxPool2d(2, ceil_mode=True)
    model = Network(
        {"a": a, "b": b, "sum": Sum(), "down": c, "up": nn.Upsample(scale_factor=2), "cat": Cat()},
        reads={"sum": ["a", "b", "a"], "cat": ["up", "image"]},
    )
    x = torch.randn(1, 2, 7, 5)
    wanted = torch.cat(
        (nn.functional.interpolate(c(2 * a(x) + b(a(x))), scale_factor=2)[..., :7, :5], x), 1
    )  # what is too long is cut
    torch.testing.assert_close(model(x), wanted)
    assert [call.inputs for call in calls_of(model)] == [(0,), (1,), (1, 2, 1), (3,), (4,), (5, 0)]
    assert list(model.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_calls_of_networks_in_networks():
    """Names are paths; a skip of a Sequential inside is an edge, and one of the outer reaches around it."""
    block = nn.Sequential(conv(3, 3), Stash("in"), nn.ReLU(), Add("in"))
    model = nn.Sequential(
        conv(2, 3),
        Stash("out"),
        Network(
            {"block": block, "one": nn.Conv2d(3, 3, 1), "sum": Sum()},
            reads={"sum": ["image", "one", "block"]},
        ),
        Pop("out"),
    )
    found = [(call.name, call.inputs) for call in calls_of(model)]
    assert found == [
        ("0", (0,)),
        ("1", (1,)),
        ("2.block.0", (2,)),
        ("2.block.1", (3,)),
        ("2.block.2", (4,)),
        ("2.block.3", (5, 3)),
        ("2.one", (6,)),
        ("2.sum", (2, 7, 6)),
        ("3", (8, 1)),
    ]


@pytest.mark.parametrize(
    "layers, reads, message",
    [
        (
            {"a": nn.ReLU()},
            {"a": ["b"]},
            "layer a reads b, but a layer can read only the results of earlier layers, or 'image'",
        ),
        ({"a": nn.ReLU(), "b": nn.ReLU()}, {"a": ["b"]}, "layer a reads b"),
        ({"a": nn.ReLU()}, {"a": []}, "layer a reads nothing"),
        (
            {"a": nn.ReLU()},
            {"b": ["a"]},
            "the argument reads has the key 'b', which is not among the layers",
        ),
        (
            {"a": nn.ReLU(), "b": nn.Sequential(nn.ReLU())},
            {"b": ["a", "image"]},
            "layer b is a Sequential, which takes one feature map, but it reads a, image: join them before it",
        ),
    ],
)
def test_networks_that_can_not_be(layers, reads, message):
    with pytest.raises(ValueError, match=message):
        Network(layers, reads)


def test_graphs_that_can_not_be():
    with pytest.raises(
        ValueError, match="layer a reads the output of layer a, which does not come before it"
    ):
        Graph([Node("a", (1,))])
    with pytest.raises(
        ValueError, match="no layer reads the output of layer b: remove it from the model"
    ):
        Graph([Node("a", (0,)), Node("b", (1,)), Node("c", (1,))])


def test_maps_go_when_they_are_read_for_the_last_time():
    inputs = [(0,), (1,), (2, 1), (3, 0), (4,)]
    assert {number: sorted(maps) for number, maps in last_readings(inputs, range(5)).items()} == {
        0: [],
        1: [],
        2: [1, 2],
        3: [0, 3],
        4: [4],
    }
    assert last_readings(inputs, range(1, 3), kept={1}) == {1: [], 2: [2]}
    assert skips_of(inputs) == [Skip(0, 3), Skip(1, 2)]


def test_what_crosses_between_stages():
    """Map 1 is read by all stages behind, straight from where it is made; map 2, at the cut, is handed on by the next stage, which reads it too."""
    inputs = [(0,), (1,), (2, 1), (3,), (4, 2, 0)]
    ranges = [range(0, 2), range(2, 3), range(3, 5)]
    assert crossing(inputs, ranges) == [(0, 0, 2), (1, 0, 1), (2, 0, 1), (2, 0, 2), (3, 1, 2)]
    assert [(e.name, e.source, e.target, e.gradient) for e in edges_between(ranges, inputs, trained={2, 3})] == [
        ("x", 0, 1, True), ("x", 1, 2, True), ("map 0", 0, 2, False), ("map 1", 0, 1, False), ("map 2", 1, 2, True),
    ]  # fmt: skip


def test_where_the_ways_of_segments_part_a_map_is_stored_if_it_is_dear():
    """Of two statistics behind one convolution: the pointwise layer before them is done twice, another convolution is not."""
    look = (CONV,) * 2
    cheap = Graph(
        [
            Node("conv", (0,), look),
            Node("norm", (1,)),
            Node("act", (2,)),
            Node("left", (3,), look),
            Node("norm2", (4,)),
            Node("right", (3,)),
            Node("sum", (5, 6)),
        ]
    )
    assert [(s.nodes, s.sources) for s in segments_of(cheap, {1, 4})] == [
        ((0,), (0,)),
        ((1, 2, 3), (1,)),
        ((1, 2, 4, 5, 6), (1, 4)),
    ]
    dear = Graph([*cheap.nodes[:2], Node("conv2", (2,), look), *cheap.nodes[3:]])
    assert [(s.nodes, s.sources) for s in segments_of(dear, {1, 4})] == [
        ((0,), (0,)),
        ((1, 2), (1,)),
        ((3,), (3,)),
        ((4, 5, 6), (3, 4)),
    ]


def test_a_map_without_margin_is_exchanged_where_it_was_joined():
    """By every second layer: the image comes in once the branch has been exchanged, so what they make together must be before it is looked at."""
    graph = Graph(
        [
            Node("a", (0,), (CONV,)),
            Node("sum", (1, 0)),
            Node("b", (2,), (CONV,)),
            Node("c", (3,), (CONV,)),
        ]
    )
    layout = Layout(graph, (12,), ((0, 6, 12),), "2")
    assert layout.points == {0, 2} and layout.part(0, (0,)).available.stop == (6,)
    assert layout.part(2, (0,)).input.stop == (8,)  # eaten by b and c


def test_only_what_one_layer_reads_is_folded_or_overwritten():
    alone = Network(
        {
            "conv": conv(2, 3),
            "norm": nn.BatchNorm2d(3),
            "act": nn.ReLU(),
            "conv2": conv(3, 3),
            "act2": nn.ReLU(),
            "head": conv(3, 1),
        }
    )
    shared = Network(
        {
            "conv": conv(2, 3),
            "norm": nn.BatchNorm2d(3),
            "act": nn.ReLU(),
            "conv2": conv(3, 3),
            "act2": nn.ReLU(),
            "sum": Sum(),
            "head": conv(3, 1),
        },
        reads={"sum": ["act2", "conv2", "norm"]},
    )
    for model, folds in ((alone, True), (shared, False)):
        parallelize(model, receptive_field(model))
        assert isinstance(model.act, Folded) == folds and model.act2.inplace == folds
