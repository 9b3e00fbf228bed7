"""What a manifest from anywhere may say to evaluation and prediction, and what not."""

from dataclasses import asdict, replace

import pytest

from distseg.config.settings import (
    Config,
    ModelConfig,
    PipelineConfig,
    PredictConfig,
    RunConfig,
    StreamingConfig,
)
from distseg.training.run_config import TAKEN, check_model, left_behind, taken_over


def manifest(**sections) -> dict:
    return asdict(replace(Config(), **sections))


def test_code_folders_devices_and_threads_are_not_taken_over():
    config = manifest(
        model=ModelConfig("nets:mine", depth=3),
        pipeline=PipelineConfig(placement="devices", devices=["cuda:7"], balance=[5]),
        predict=PredictConfig(scratch="/elsewhere"),
        run=RunConfig(threads=7, timeout=0),
        streaming=StreamingConfig(memory="4GB"),
    )
    config["spatial"]["scratch"] = config["train"]["output"] = "/elsewhere"
    found = taken_over(config, "run")
    assert (
        "/elsewhere" not in str(found) and "cuda:7" not in str(found) and "nets" not in str(found)
    )
    assert found["model"]["depth"] == 3 and "name" not in found["model"]
    assert found["run"] == {"device": "auto"} and found["pipeline"] == {"schedule": "auto"}
    assert left_behind(config, asdict(Config())) == [
        "pipeline.devices ['cuda:7']",
        "predict.scratch /elsewhere",
        "run.threads 7",
        "run.timeout 0",
    ]


def test_what_results_depend_on_is_taken_over():
    found = taken_over(manifest(), "run")
    assert found.keys() == TAKEN.keys() - {"patchgd"} and found["spatial"].keys() == {
        "exchange_every",
        "fuse_below",
        "norm_scope",
    }
    assert found["train"].keys() == {"precision", "channels_last"} and "store" in found["data"]
    assert left_behind(manifest(), asdict(Config())) == []


@pytest.mark.parametrize(
    "own, words",
    [
        ("nets:mine", None),
        ("unet", "add --model.name nets:mine$"),
        (
            "nets:other",
            "with the network nets:mine, not nets:other: .* add --model.name nets:mine$",
        ),
    ],
)
def test_code_is_named_again(own, words):
    config = manifest(model=ModelConfig("nets:mine"))
    if words is None:
        check_model(config, ModelConfig(own), "run")
    else:
        with pytest.raises(ValueError, match=words):
            check_model(config, ModelConfig(own), "run")


@pytest.mark.parametrize(
    "field, value", [("depth", 3), ("norm", "batch"), ("dropout", 0.5), ("seed", 1)]
)
def test_a_network_other_than_the_runs_is_refused(field, value):
    with pytest.raises(
        ValueError,
        match=f"model.{field} is {value}, but run was trained with .*: leave --model.{field} out",
    ):
        check_model(manifest(), replace(ModelConfig(), **{field: value}), "run")


@pytest.mark.parametrize(
    "config", [None, [], {}, {"model": None}, {"model": []}, {"model": {}}, {"model": {"name": 5}}]
)
def test_no_network_is_told(config):
    with pytest.raises(
        ValueError, match="run: manifest.json names no network .*: use another checkpoint"
    ):
        taken_over(config, "run")
