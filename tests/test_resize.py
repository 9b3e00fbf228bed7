"""Resizing by true places: any part of a map comes out as PyTorch makes it of the whole, from no more cells than it looks at."""

import pytest
import torch
import torch.nn.functional as F

from distseg.layers.layer_table import run
from distseg.models.capture.following import followed
from distseg.models.resize import FitTo, ResizeTo, kernel_of
from distseg.tiling.access_pattern import inside
from distseg.tiling.layout import LayerView
from distseg.tiling.resize import Fit, Proportional, Resize, Shifted, SizeRule, in_front, taps
from distseg.tiling.tile import Box

SIZES = [(5, 9), (9, 5), (7, 7), (1, 6), (6, 1), (16, 32), (33, 17), (3, 40)]
MODES = [
    ("nearest", None, False),
    ("nearest-exact", None, False),
    ("bilinear", False, False),
    ("bilinear", True, False),
    ("bicubic", False, False),
    ("bicubic", True, False),
]
MODES += [("area", None, False), ("bilinear", False, True), ("bicubic", False, True)]


def part_of(layer, size, result, made):
    """What a layer's part of its result is computed from."""
    spans = [
        f.for_sizes(n, m).needs(a, b)
        for f, n, m, a, b in zip(layer.access_patterns(), size, result, made.start, made.stop)
    ]
    raw = Box(*zip(*spans))
    taken = raw.intersection(Box.whole(size))
    return LayerView(size, taken, taken, taken, raw, made, result)


@pytest.mark.parametrize("mode, corners, antialias", MODES)
@pytest.mark.parametrize("factor", [None, 0.7, 1.5])
def test_a_part_is_that_of_the_whole(mode, corners, antialias, factor):
    """Values and gradients, of parts at the ends and in the midst."""
    if factor and mode == "area":
        return  # which is told no factor
    for n, m in SIZES:
        m = int(n * factor) if factor else m
        if not m:
            continue
        torch.manual_seed(0)
        x = torch.randn(2, 3, n, n + 2, dtype=torch.float64, requires_grad=True)
        result = (m, int((n + 2) * factor) if factor else m + 1)
        layer = ResizeTo(
            [SizeRule()] * 2, mode, corners, antialias, (factor, factor) if factor else None
        )
        whole = layer.made(x, result)
        assert tuple(whole.shape[2:]) == result
        for a, b in ((0, max(1, m // 2)), (m // 2, m), (m // 3, m // 3 + 1)):
            made = Box((a, 0), (b, max(1, m // 2)))
            part = part_of(layer, tuple(x.shape[2:]), result, made)
            found = run(layer, x[(..., *part.input.slices)], part.input, part)
            wanted = whole[(..., *made.slices)]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
            g = torch.randn_like(wanted)
            both = (torch.autograd.grad(y, x, g, retain_graph=True)[0] for y in (found, wanted))
            torch.testing.assert_close(*both, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mode, corners, antialias", MODES)
@pytest.mark.parametrize("n, m", SIZES)
def test_a_result_looks_at_no_more_than_is_said(mode, corners, antialias, n, m):
    """Brute force: which outputs change with each input."""
    ones = torch.eye(n, dtype=torch.float64).view(n, 1, n, 1).expand(n, 2, n, 2).contiguous()
    layer = ResizeTo([SizeRule(0, m), SizeRule()], mode, corners, antialias)
    reached = layer.made(ones, (m, 2))[:, 0, :, 0] != 0  # (input, output)
    pattern = Resize(kernel_of(mode, antialias), bool(corners))
    for j in range(m):
        first, last = pattern.for_sizes(n, m).needs(j, j + 1)
        looked = reached[:, j].nonzero()
        assert first <= looked.min() and looked.max() < last
        assert last - first <= looked.max() + 1 - looked.min() + 3


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_places_are_bounded_however_they_are_rounded(mode):
    """PyTorch rounds them by type and number of dims: cell 41 of 82 is that of another of two inputs in float32 than in float64."""
    for n, m in [(2, 82), (2, 41), (3, 123), (4, 55), (4999, 3571), (1021, 4093)]:
        found = taps(mode, False, None, n, m)
        for dtype in (torch.float32, torch.float64):
            for shape in ((n,), (n, 1), (1, n)):
                x = (
                    torch.arange(n, dtype=dtype)
                    .view(1, 1, *shape)
                    .repeat(1, 2, *(1 for _ in shape))
                )
                places = (
                    F.interpolate(x, size=[m if k == n else 1 for k in shape], mode=mode)[0, 0]
                    .flatten()
                    .long()
                    .numpy()
                )
                assert (found.first <= places).all() and (places <= found.last).all()


def test_a_frame_lies_where_the_difference_of_sizes_says():
    assert [in_front(side, 5) for side in ("half", "larger half", "all", "none")] == [2, 3, 5, 0]
    assert [in_front(side, -5) for side in ("half", "larger half", "all", "none")] == [
        -3,
        -2,
        -5,
        0,
    ]
    assert (
        Fit("half").for_sizes(7, 12) == Shifted(2)
        and Shifted(2).needs(0, 12) == (-2, 10)
        and Shifted(-3).needs(0, 4) == (3, 7)
    )


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize(
    "size, result", [((7, 9), (12, 10)), ((12, 10), (7, 9)), ((7, 9), (4, 13))]
)
def test_a_part_of_a_frame_is_that_of_the_whole(mode, size, result):
    layer = FitTo([SizeRule()] * 2, ("half", "none"), mode, 2.5 if mode == "constant" else 0.0)
    x = torch.randn(1, 2, *size, dtype=torch.float64)
    whole = layer.made(x, result)
    for made in (Box((0, 0), (2, 3)), Box((1, 4), (4, 9)), Box.whole(result)):
        part = frame_of(layer, size, result, made)
        torch.testing.assert_close(
            run(layer, x[(..., *part.input.slices)], part.input, part),
            whole[(..., *made.slices)],
            rtol=0,
            atol=0,
        )


def frame_of(layer, size, result, made):
    spans = [
        (f.for_sizes(n, m).needs(a, b), n, f.mirrored)
        for f, n, m, a, b in zip(layer.access_patterns(), size, result, made.start, made.stop)
    ]
    taken = Box(*zip(*(inside(*each[:2], each[2]) for each in spans)))
    return LayerView(
        size, taken, taken, taken, Box(*zip(*(each[0] for each in spans))), made, result
    )


class Map:
    def __init__(self, *sizes):
        self.sizes = tuple(sizes)


@pytest.mark.parametrize(
    "wanted, like, rules",
    [
        ([(9, 7), (9, 7), (9, 7)], "deep", [SizeRule(0, 9), SizeRule(0, 7)]),
        ([(13, 9), (20, 6), (41, 33)], "skip", [SizeRule(), SizeRule()]),
        ([(8, 6), (13, 4), (27, 22)], "image", [SizeRule(1, 0, 3), SizeRule(1, 0, 3)]),
        ([(25, 17), (39, 11), (81, 65)], "image", [SizeRule(1, -1, 1), SizeRule(1, -1, 1)]),
        ([(13, 50), (20, 50), (41, 50)], "skip", [SizeRule(), SizeRule(0, 50)]),
        ([(11, 300), (5, 1), (900, 4)], None, None),
    ],
)
def test_how_sizes_follow_others(wanted, like, rules):
    maps = {
        "image": Map((26, 18), (40, 12), (82, 66)),
        "skip": Map((13, 9), (20, 6), (41, 33)),
        "deep": Map((4, 3), (5, 2), (11, 9)),
    }
    found = followed(wanted, maps["deep"], maps.values())
    if like is None:
        assert found is None
    else:
        assert found[0] is maps[like] and [r.size(n) for r, n in zip(found[1], (100, 200))] == [
            r.size(n) for r, n in zip(rules, (100, 200))
        ]


@pytest.mark.parametrize("n, m", [(3, 5), (5, 3), (1, 7), (7, 1), (4, 4)])
def test_cells_that_are_all_equal_are_read_where_they_lie_in_the_image(n, m):
    pattern = Proportional(n, m)
    for a in range(m):
        for b in range(a + 1, m + 1):
            first, stop = pattern.needs(a, b)
            assert first <= a * n / m < first + 1 and stop - 1 < b * n / m <= stop
    for c in range(n + 1):
        for one in (pattern, taps("linear", False, None, n, m)):
            assert abs(one.cut(c) - c * m / n) <= 0.5, "the nearest border"
