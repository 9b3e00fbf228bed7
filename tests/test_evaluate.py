"""distseg evaluate: one confusion matrix and one row for each image, the same on any number of ranks."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from made_store import CLASSES, random_store
from test_validation import config

from distseg.cli.evaluate import run_evaluate
from distseg.cli.load import load_predictor
from distseg.comm.alone import Alone
from distseg.config.settings import LossConfig
from distseg.data.store.store import Store
from distseg.inference.boundary import boundary_counts, with_boundaries
from distseg.inference.evaluate import _partial_sums
from distseg.inference.image_scores import flat, rows_of_images, rows_of_maps
from distseg.inference.image_source import store_image
from distseg.inference.metrics import confusion, most_likely, scores
from distseg.layers.loss import Loss
from distseg.tiling.tile import Box
from distseg.training.loop import train

COUNTS = np.array(  # of two images and two classes: right, true and predicted pixels
    [[[3, 1], [4, 2], [4, 2]], [[1, 1], [5, 1], [1, 5]]]
)


def test_rows_are_scored_by_counting_and_the_worst_image_is_the_first():
    worst, best = rows_of_maps(["a", "b"], COUNTS, ["sea", "land"])
    assert (worst["image"], worst["pixels"], best["image"]) == ("b", 6, "a")
    assert worst["classes"]["sea"]["iou"] == 1 / 5 and worst["classes"]["land"]["iou"] == 1 / 5
    assert best["classes"]["sea"]["iou"] == 3 / 5 and best["classes"]["land"]["dice"] == 1 / 2
    assert worst["accuracy"] == 2 / 6 and best["mean_iou"] == (3 / 5 + 1 / 3) / 2
    assert flat(worst)["iou land"] == 1 / 5 and flat(worst)["pixels sea"] == 5
    rows = rows_of_maps(["empty", "a"], np.stack((0 * COUNTS[0], COUNTS[0])), ["sea", "land"])
    assert [row["image"] for row in rows] == ["a", "empty"], "an image without a score is the last"


def test_rows_of_whole_images():
    vectors = np.log([[0.9, 0.1], [0.3, 0.7], [0.4, 0.6]])
    rows = rows_of_images("abc", vectors, np.array([0, 0, 1]), ["cat", "dog"])
    assert [(row["image"], row["label"], row["predicted"]) for row in rows] == [
        ("b", "cat", "dog"),
        ("c", "dog", "dog"),
        ("a", "cat", "cat"),
    ]
    assert rows[0]["probability"] == pytest.approx(0.3)
    rows = rows_of_images("ab", np.array([[1.0], [5.0]]), np.array([2.0, 3.0]), ["age"])
    assert [(row["image"], row["error"]) for row in rows] == [("b", 2.0), ("a", -1.0)]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_the_table_is_that_of_whole_images_on_any_number_of_ranks(comm, shared_path, norm, capfd):
    folder = Path(shared_path)
    plan = config(folder, norm=norm)
    if comm.rank == 0:
        sizes = [(40, 48), (32, 36), (50, 34)]
        random_store(folder / "s.h5", train=[(32, 40)], test=sizes, val=sizes[:1])
        train(plan, Alone())
    comm.Barrier()
    run_evaluate(str(folder / "run"), plan, comm, "test", None, 3)
    if comm.rank:
        return
    found = json.loads((folder / "run/evaluation/test.json").read_text())
    store = Store(plan.data.store)
    predictor, manifest = load_predictor(str(folder / "run"), plan, Alone(), torch.device("cpu"))
    whole, lines = {}, {}
    for name in store.split("test"):
        truth, source = store.labels(name, Box.whole(store.size(name))), store_image(store, name)
        classes = np.zeros(truth.shape, np.uint8)
        for box, logits in predictor(source):
            classes[box.slices] = most_likely(logits)
        whole[name] = confusion(truth, classes, 3, store.ignore)
        lines[name] = boundary_counts(truth, classes, 3, store.ignore, 3)
    assert found["confusion"] == sum(whole.values()).tolist()
    assert found["digest"] == manifest["digest"]
    for row in found["images"]:
        wanted = scores(whole[row["image"]], CLASSES)
        wanted = with_boundaries(wanted, lines[row["image"]], CLASSES)
        assert {key: row[key] for key in wanted} == wanted
    wanted = with_boundaries(scores(sum(whole.values()), CLASSES), sum(lines.values()), CLASSES)
    assert (found["network"], found["tolerance"]) == (wanted, 3)
    ious = [row["mean_iou"] for row in found["images"]]
    assert ious == sorted(ious) and len(ious) == 3
    with open(folder / "run/evaluation/test.csv", newline="") as f:
        table = list(csv.DictReader(f))
    assert {"boundary iou lake", "boundary f1 lake", "mean_boundary_iou"} < set(table[0])
    assert [line["image"] for line in table] == [row["image"] for row in found["images"]]
    assert float(table[0]["iou lake"]) == found["images"][0]["classes"]["lake"]["iou"]
    told = capfd.readouterr().out
    assert "true classes down, predicted classes across" in told and "worst 3 of 3 images" in told


def test_the_loss_of_a_tile_is_summed_slab_by_slab(monkeypatch):
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(3, 7, 5)), random.integers(0, 3, (7, 5))
    loss = Loss(LossConfig(), 3)
    whole = loss.rows(torch.from_numpy(logits)[None], torch.from_numpy(labels)[None])[0]
    monkeypatch.setattr("distseg.inference.evaluate._SLAB", 2 * 3 * 5)  # two rows, and one is left
    assert _partial_sums(loss, logits, labels) == pytest.approx(whole.numpy(), rel=1e-14)
