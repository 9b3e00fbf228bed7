"""Tiles and windows as pictures, and their promises on random images."""

import random

import pytest

from distseg.tiling.tile import (
    Box,
    BoxGrid,
    ChosenBoxes,
    ReceptiveField,
    TilePlacement,
    boxes_of,
    check_grid,
    factorings,
    most_even_grid,
    owned_tiles,
    split,
    strips,
    tiles,
    window,
)


def picture(image, boxes) -> str:
    """The pixels of an image with the letters of the boxes that hold them."""
    rows = [["."] * image[1] for _ in range(image[0])]
    for letter, box in zip("abcdefghij", boxes):
        for y in range(box.start[0], box.stop[0]):
            for x in range(box.start[1], box.stop[1]):
                assert rows[y][x] == ".", "tiles overlap"
                rows[y][x] = letter
    return "\n".join("".join(row) for row in rows)


def test_tiles_of_an_odd_image():
    found = picture((5, 11), tiles((5, 11), grid=(2, 3), stride=(2, 2)))
    assert found == "\n".join(
        ["aaaabbbbccc", "aaaabbbbccc", "ddddeeeefff", "ddddeeeefff", "ddddeeeefff"]
    )


def test_windows_of_the_modules_picture():
    image, reach = (131,), ReceptiveField(halo=(20,), stride=(32,))
    found = [
        (str(tile), str(window(tile, image, reach))) for tile in tiles(image, (2,), reach.stride)
    ]
    assert found == [("[0:64]", "[0:96]"), ("[64:131]", "[32:131]")]


@pytest.mark.parametrize(
    "length, parts, stride, ranges",
    [
        (131, 1, 32, [(0, 131)]),
        (131, 2, 32, [(0, 64), (64, 131)]),
        (131, 5, 32, [(0, 32), (32, 64), (64, 96), (96, 128), (128, 131)]),
        (131, 4, 1, [(0, 33), (33, 66), (66, 98), (98, 131)]),
        (65, 2, 32, [(0, 32), (32, 65)]),
        (3, 1, 32, [(0, 3)]),
        (1, 1, 1, [(0, 1)]),
    ],
)
def test_split(length, parts, stride, ranges):
    assert split(length, parts, stride) == ranges


def random_cases(count: int):
    draw = random.Random(0)
    for _ in range(count):
        dims = draw.choice([1, 2, 3])
        stride = tuple(draw.choice([1, 2, 3, 4, 8, 32]) for _ in range(dims))
        image = tuple(draw.randint(1, 7) * s + draw.randint(0, s - 1) for s in stride)
        grid = tuple(draw.randint(1, -(-n // s)) for n, s in zip(image, stride))
        yield image, grid, ReceptiveField(tuple(draw.randint(0, 3 * s) for s in stride), stride)


def test_tiles_cover_the_image_once_on_the_stride_grid_and_evenly():
    for image, grid, reach in random_cases(500):
        found = tiles(image, grid, reach.stride)
        assert sum(t.pixels for t in found) == Box.whole(image).pixels
        corners = {t.start for t in found}
        assert len(corners) == len(found)
        for t in found:
            assert Box.whole(image).contains(t) and t.pixels > 0
            for d, (a, b, n, s) in enumerate(zip(t.start, t.stop, image, reach.stride)):
                assert a % s == 0 and (b % s == 0 or b == n)
                assert b == n or any(u.start[d] == b for u in found), "a gap"
                assert abs((b - a) - n / grid[d]) <= s, "even within a cell"


def test_windows_hold_the_halo_lie_on_the_grid_and_inside_the_image():
    for image, grid, reach in random_cases(300):
        for t in tiles(image, grid, reach.stride):
            w = window(t, image, reach)
            assert Box.whole(image).contains(w) and w.contains(t)
            for a, b, wa, wb, h, s, n in zip(
                t.start, t.stop, w.start, w.stop, reach.halo, reach.stride, image
            ):
                assert wa % s == 0 and (wb % s == 0 or wb == n)
                assert wa == 0 or h <= a - wa < h + s, (
                    "the halo, and no more than rounding to the grid"
                )
                assert wb == n or h <= wb - b < h + s


def test_tiles_per_rank_are_the_ranks_share_of_a_finer_grid():
    """4x4 tiles over 2x2 ranks: a rank owns a block of 2x2 neighbours, so its windows overlap least."""
    image, reach = (16, 18), ReceptiveField((2, 2), (2, 2))
    owner = {}
    for rank, at in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        for tile, win in owned_tiles(image, (2, 2), (2, 2), at, reach):
            owner[tile.start] = rank
            assert win == window(tile, image, reach)
    every = tiles(image, (4, 4), reach.stride)
    grid = [[owner[every[4 * y + x].start] for x in range(4)] for y in range(4)]
    assert grid == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]


def test_a_grid_is_the_list_of_its_boxes():
    spans = [[(0, 4), (4, 6), (6, 7)], [(2, 3), (3, 9)]]
    grid = BoxGrid(spans)
    every = [Box((y, x), (v, u)) for y, v in spans[0] for x, u in spans[1]]
    assert (len(grid), list(grid), grid[1:5:2]) == (6, every, every[1:5:2])
    assert [grid[n] for n in range(-6, 6)] == every * 2
    assert [grid.number_of(box) for box in every] == list(range(6))
    with pytest.raises(IndexError):
        grid[6]
    with pytest.raises(ValueError):
        grid.number_of(Box((0, 2), (4, 9)))
    chosen = ChosenBoxes(grid, [5, 1, 2])
    assert (len(chosen), list(chosen)) == (3, [every[5], every[1], every[2]])
    assert list(chosen[1:]) == [every[1], every[2]] and not ChosenBoxes(grid, [])


def test_refuses_a_grid_that_is_too_fine_and_names_the_largest():
    with pytest.raises(
        ValueError,
        match="grid of 3x6 tiles is too fine for an image of 97x131 pixels.*stride 32x32.*largest grid that fits is 4x5",
    ):
        tiles((97, 131), (3, 6), (32, 32))
    assert len(tiles((97, 131), (4, 5), (32, 32))) == 20
    with pytest.raises(ValueError, match="2 spatial dims .97x131., a grid of 3 dims"):
        check_grid((97, 131), (1, 1, 1), (32, 32))


def test_boxes():
    box = Box((2, 4), (7, 9))
    assert (box.size, box.pixels, box.slices) == ((5, 5), 25, (slice(2, 7), slice(4, 9)))
    assert box.relative_to(Box((1, 1), (9, 9))) == Box((1, 3), (6, 8))
    assert box.coarsened((2, 4)) == Box((1, 1), (4, 3))
    assert Box.whole((9, 9)).contains(box) and not box.contains(Box((2, 4), (7, 10)))
    assert TilePlacement((9, 9), box, Box((1, 1), (9, 9)), (0,), (0,)).owned == Box((1, 3), (6, 8))


def test_what_boxes_share_that_do_not_touch_lies_in_the_first():
    """A kernel that is told where its cells are owned must not be sent beyond them."""
    a, left, right = Box((0, 12), (31, 33)), Box((0, 0), (31, 5)), Box((4, 36), (20, 75))
    assert a.intersection(right) == Box((4, 33), (20, 33)) and a.intersection(left) == Box(
        (0, 12), (31, 12)
    )
    assert a.intersection(Box((4, 20), (99, 75))) == Box((4, 20), (31, 33))


def test_boxes_of_a_size():
    found = picture((5, 11), boxes_of(Box((1, 0), (5, 10)), (3, 4)))
    assert found == "\n".join(
        ["...........", "aaaabbbbcc.", "aaaabbbbcc.", "aaaabbbbcc.", "ddddeeeeff."]
    )


@pytest.mark.parametrize(
    "cells, rows, starts",
    [(15, 1, [2, 5, 8, 11]), (15, 2, [2, 4, 6, 8, 10]), (21, 2, [2, 6, 10]), (0, 4, [2, 6, 10])],
)
def test_strips_have_at_most_as_many_cells_and_a_multiple_of_the_rows(cells, rows, starts):
    found = list(strips(Box((2, 0), (12, 5)), cells, rows))
    assert found == [Box((a, 0), (b, 5)) for a, b in zip(starts, [*starts[1:], 12])]


def test_the_most_even_grid_has_the_least_border():
    draw = random.Random(1)
    for _ in range(100):
        dims = draw.choice([2, 3])
        image = tuple(draw.randint(4, 90) for _ in range(dims))
        found = most_even_grid(image, (1,) * dims, draw.randint(1, 16))

        def border(grid):
            """Return the area of all sides of all tiles but those of the image."""
            volume = Box.whole(image).pixels
            return sum((g - 1) * volume // n for g, n in zip(grid, image))

        fitting = [
            grid
            for grid in factorings(found.volume, dims)
            if all(g <= n for g, n in zip(grid, image))
        ]
        assert border(found) <= min(map(border, fitting)) + dims
