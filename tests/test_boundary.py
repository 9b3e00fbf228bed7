"""Scores of boundaries: of the definition, pixel by pixel, and the same from tiles in any order."""

import itertools

import numpy as np
import pytest

from distseg.inference.boundary import ROWS, BoundaryCounter, boundary_counts, boundary_scores
from distseg.tiling.tile import Box


def counted_singly(truth, prediction, classes, ignore, tolerance):
    """Return the counts as the head of the module defines them, with a loop over pixels."""
    pixels = [p for p in itertools.product(*map(range, truth.shape)) if truth[p] != ignore]

    def near(p, radius):
        around = (range(max(0, x - radius), min(n, x + radius + 1)) for x, n in zip(p, truth.shape))
        return [q for q in itertools.product(*around) if truth[q] != ignore]

    def beside(x, radius):
        return {p for p in pixels if any(x[q] != x[p] for q in near(p, radius))}

    maps = truth, prediction
    regions, lines = ([beside(x, radius) for x in maps] for radius in (tolerance, 1))
    counts = np.zeros((ROWS, classes), np.int64)
    for c in range(classes):
        own = [{p for p in region if x[p] == c} for region, x in zip(regions, maps)]
        line = [{p for p in part if x[p] == c} for part, x in zip(lines, maps)]
        hits = [
            sum(any(q in b for q in near(p, tolerance)) for p in a) for a, b in (line, line[::-1])
        ]
        counts[:, c] = (
            len(own[0] & own[1]),
            *map(len, own),
            len(line[0]),
            hits[0],
            len(line[1]),
            hits[1],
        )
    return counts


def drawn_maps(seed, dims=2, most=14):
    random = np.random.default_rng(seed)
    size, classes = random.integers(1, most + 1, dims), int(random.integers(1, 5))
    block = random.choice([1, 2, 4])
    truth = random.integers(0, classes, [-(-n // block) for n in size]).astype(np.uint8)
    for axis in range(dims):
        truth = truth.repeat(block, axis)
    truth = truth[tuple(slice(n) for n in size)].copy()
    prediction = np.where(random.random(size) < 0.2, random.integers(0, classes, size), truth)
    ignore = int(random.choice([255, 0]))
    truth[random.random(size) < 0.1] = ignore
    return truth, prediction.astype(np.uint8), classes, ignore, int(random.integers(1, 4))


@pytest.mark.parametrize("dims", [2, 3])
def test_counts_follow_the_definition(dims):
    for seed in range(15):
        maps = drawn_maps(seed, dims, 14 if dims == 2 else 6)
        assert np.array_equal(boundary_counts(*maps), counted_singly(*maps)), seed


def grid_of(random, size):
    """Return boxes that cover an image, in any order, with borders at odd places."""
    spans = []
    for n in size:
        inside = (
            sorted(random.choice(np.arange(1, n), min(n - 1, 3 if len(size) == 2 else 1), False))
            if n > 1
            else []
        )
        borders = [0, *map(int, inside), int(n)]
        spans.append(list(zip(borders, borders[1:])))
    boxes = [Box(*map(tuple, zip(*each))) for each in itertools.product(*spans)]
    return [boxes[k] for k in random.permutation(len(boxes))]


@pytest.mark.parametrize(
    "dims, seeds", [(2, 10), (3, 2), pytest.param(2, 200, marks=pytest.mark.slow)]
)
def test_tiles_on_any_number_of_ranks_count_what_the_whole_image_does(dims, seeds, monkeypatch):
    monkeypatch.setattr("distseg.inference.boundary._STRIP", 100)
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        truth, prediction, classes, ignore, tolerance = maps = drawn_maps(
            1000 + seed, dims, 50 if dims == 2 else 9
        )
        tiles, ranks = grid_of(random, truth.shape), int(random.integers(1, 4))
        counters = [
            BoundaryCounter(truth.shape, lambda b: truth[b.slices], classes, ignore, tolerance)
            for _ in range(ranks)
        ]
        for tile in tiles:
            counters[random.integers(ranks)].add(tile, truth[tile.slices], prediction[tile.slices])
        pieces = [piece for counter in counters for piece in counter.pieces]
        counts = sum(counter.finish(pieces) for counter in counters)
        assert np.array_equal(counts, boundary_counts(*maps)), seed
        assert counters[0].complete == (ranks == 1 or len(counters[0].tiles) == len(tiles))


def square(left, side=8):
    found = np.zeros((20, 20), np.uint8)
    found[6 : 6 + side, left : left + side] = 1
    return found


def test_a_square_that_is_moved():
    """Moved by 1, it is right with a tolerance of 1; moved by 3, its sides are not."""
    for move, tolerance, f1 in ((0, 1, 1.0), (1, 1, 1.0), (3, 3, 1.0), (3, 1, None)):
        counts = boundary_counts(square(4), square(4 + move), 2, 255, tolerance)
        found = boundary_scores(counts, ["ground", "square"])["classes"]["square"]
        assert found["boundary_f1"] == f1 or f1 is None and 0 < found["boundary_f1"] < 1
    # Rings of a width of 1: 28 pixels each, of which two rows of 7 are shared after a move by 1.
    counts = boundary_counts(square(4), square(5), 2, 255, 1)
    assert boundary_scores(counts, "ab")["classes"]["b"]["boundary_iou"] == 14 / (28 + 28 - 14)


def test_ignored_pixels_make_no_contour_and_missing_classes_have_no_score():
    truth = square(4)
    hidden = np.where(truth == 0, 255, truth).astype(np.uint8)
    assert not boundary_counts(hidden, truth, 3, 255, 2).any()
    none = boundary_scores(boundary_counts(truth, 0 * truth, 3, 255, 2), "abc")["classes"]
    assert none["c"] == {"boundary_iou": None, "boundary_f1": None}
    assert none["b"] == {"boundary_iou": 0.0, "boundary_f1": 0.0}
    assert boundary_scores(np.zeros((ROWS, 2), int), "ab")["mean_boundary_f1"] is None
    counts = np.array([[3], [5], [4], [10], [5], [4], [3]])  # recall 5 / 10, precision 3 / 4
    found = boundary_scores(counts, "a")["classes"]["a"]
    assert found == {"boundary_iou": 3 / (5 + 4 - 3), "boundary_f1": pytest.approx(0.6)}
