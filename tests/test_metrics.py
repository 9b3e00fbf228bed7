"""Scores of a small map, by counting."""

import math

import numpy as np
import pytest

from distseg.inference.metrics import confusion, most_likely, score_of, scores

TRUTH = np.array([[0, 0, 1], [1, 1, 255]])
FOUND = np.array([[0, 1, 1], [1, 0, 2]])
MATRIX = [  # truth down, prediction across; class 2 is only found where the truth is ignored
    [1, 1, 0],
    [1, 2, 0],
    [0, 0, 0],
]


def test_confusion():
    assert confusion(TRUTH, FOUND, 3, ignore=255).tolist() == MATRIX
    halves = sum(confusion(t, f, 3, 255) for t, f in zip(TRUTH, FOUND))
    assert halves.tolist() == MATRIX, "it adds up over tiles"


def test_scores():
    found = scores(np.array(MATRIX), ["sea", "land", "lake"])
    third, half = pytest.approx(1 / 3), pytest.approx(1 / 2)
    two_thirds = pytest.approx(2 / 3)
    assert found["classes"] == {
        "sea": {"iou": third, "dice": half, "accuracy": half, "pixels": 2},
        "land": {"iou": half, "dice": two_thirds, "accuracy": two_thirds, "pixels": 3},
        "lake": {"iou": None, "dice": None, "accuracy": None, "pixels": 0},
    }
    assert (found["mean_iou"], found["mean_dice"], found["accuracy"]) == (
        pytest.approx(5 / 12),
        pytest.approx(7 / 12),
        pytest.approx(3 / 5),
    )


def test_nothing_known_has_no_score():
    found = scores(np.zeros((2, 2), int), ["a", "b"])
    assert (found["mean_iou"], found["accuracy"]) == (None, None)


def test_a_class_found_where_there_is_none_counts_against_it():
    assert scores(np.array([[3, 1], [0, 0]]), ["a", "b"])["classes"]["b"] == {
        "iou": 0,
        "dice": 0,
        "accuracy": None,
        "pixels": 0,
    }


@pytest.mark.parametrize(
    "validation, score",
    [
        ({"mean_iou": 0.4, "accuracy": 0.9}, 0.4),
        ({"mean_iou": None, "accuracy": None}, None),
        ({"accuracy": 0.9}, 0.9),
        ({"rmse": 3.0, "r2": 0.5}, -3.0),
        ({"rmse": math.nan, "r2": math.nan}, None),
    ],
)
def test_a_higher_score_is_a_better_network(validation, score):
    assert score_of(validation) == score


def test_most_likely():
    assert most_likely(np.array([[[0.1, -0.1], [0, 2]]])).tolist() == [[1, 0], [0, 1]]
    assert most_likely(np.array([[[1.0, 3]], [[2, 2]], [[0, 9]]])).tolist() == [[1, 2]]
    assert most_likely(np.zeros((3, 2, 2))).dtype == np.uint8
