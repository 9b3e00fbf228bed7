"""The closing lines of a command, and the head of its help."""

from pathlib import Path

from distseg.cli.help import FIRST, field_documents, head
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config
from distseg.report.closing import (
    closing_of_early_stop,
    closing_of_evaluation,
    closing_of_prediction,
    closing_of_preparation,
    closing_of_training,
)


def test_preparation_ends_with_the_next_command():
    assert closing_of_preparation("my data/s.h5") == "next: distseg init 'my data/s.h5'"


def test_training_ends_with_the_best_checkpoint_and_the_next_command():
    best = {"checkpoint": "r/checkpoints/step-4", "epoch": 1, "validation": {"mean_iou": 0.5123}}
    assert closing_of_training("r", 2, 1080, 75.2, best, ["train", "val", "test"]) == [
        "trained 2 epochs, 1,080 steps in 1:15; best mean IoU 0.512 after epoch 1: "
        "r/checkpoints/step-4",
        "next: distseg evaluate r",
        "report: distseg report r",
    ]
    assert closing_of_training("r", 1, 1, 0.2, None, ["train"]) == [
        "trained 1 epoch, 1 step in 0:00; checkpoints are in r/checkpoints",
        "next: distseg predict r --images FILE",
        "report: distseg report r",
    ]
    assert closing_of_training("r", 1, 1, 0, None, ["train", "val"])[1].endswith("r --split val")


def test_evaluation_ends_with_the_score_beside_the_baseline():
    lines = closing_of_evaluation("r", {"mean_iou": 0.5}, {"mean_iou": 0.25}, "s.json")
    assert lines == [
        "mean IoU 0.500 (a classifier of single pixels: 0.250); all scores are in s.json",
        "next: distseg predict r --images FILE",
        "report: distseg report r",
    ]
    assert closing_of_evaluation("r", {"rmse": 2.5}, None, None)[0] == "RMSE 2.500"


def test_an_early_stop_says_how_long_the_score_has_not_improved():
    found = closing_of_early_stop(4, 7, {"rmse": 2.5})
    assert (
        found
        == "stopped early after epoch 7: the RMSE has not improved for 3 epochs, since epoch 4"
    )
    assert (
        closing_of_early_stop(0, 2, {}) == "stopped early after epoch 2: no validation had a score"
    )


def test_prediction_ends_with_the_folder_and_how_to_draw_it():
    maps = [Path("p/a.h5"), Path("p/b.h5")]
    assert closing_of_prediction("p", maps, "s.h5") == [
        "2 class maps in p",
        "next: distseg plot overlay p/a.h5 --store s.h5",
    ]
    assert closing_of_prediction("p", [Path("p/a.tif")], "s.h5") == ["1 class map in p"]


def test_help_begins_with_what_matters():
    text = head("train", {})
    order = [text.index(flag) for flag in ("--data.store", "--mesh.tiles", "--train.epochs")]
    assert order == sorted(order)
    documents = {kind: field_documents(kind) for kind in (Config, PatchConfig)}
    for command, names in FIRST.items():
        known = documents[PatchConfig if command == "patchgd" else Config]
        assert all(known[name] for name in names)


def test_the_whole_help_has_the_head_first(capsys):
    import pytest

    from distseg.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    told = capsys.readouterr().out
    assert not end.value.code and told.startswith("usage: distseg train [CONFIG.yaml] [--section")
    assert told.index("--data.store ") < told.index("All flags:") < told.index("--model.name NAME")
