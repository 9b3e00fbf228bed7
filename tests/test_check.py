"""No setting is without effect in silence: refused where no mesh or model makes it act, told where only today's do not."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from distseg.check import RULES, check_effects, notes, of, with_store
from distseg.cli import _config, _parse, _parser
from distseg.config import Config
from distseg.extents import Extents
from distseg.models.unet import unet

ACTS = {  # what makes each setting of the table act; with the setting alone it does not
    "model.groups": ({"model.groups": 4}, {"model.norm": "group"}),
    "pipeline.recompute": ({"pipeline.recompute": "always", "run.memory": "4GB"}, {"run.memory": None}),
    "spatial.fuse_below": ({"spatial.fuse_below": 8}, {"spatial.exchange_every": "1"}),
    "spatial.scratch": ({"spatial.scratch": "/tmp"}, {"run.memory": "4GB"}),
    "spatial.tiles_per_rank": ({"spatial.tiles_per_rank": Extents("2x2"), "run.memory": "4GB"}, {"run.memory": None}),
    "data.focus_share": ({"data.focus_share": 0.9}, {"data.focus_class": "lake"}),
    "data.epoch_samples": ({"data.epoch_samples": 9}, {"data.crop": Extents("8x8")}),
    "optim.momentum": ({"optim.momentum": 0.5}, {"optim.name": "sgd"}),
}


def config(settings: dict) -> Config:
    found = Config()
    for setting, value in settings.items():
        section, _, field = setting.partition(".")
        found = replace(found, **{section: replace(getattr(found, section), **{field: value})})
    return found


def test_the_defaults_are_not_refused():
    check_effects(Config())
    assert notes(Config(), unet(depth=1, num_convs=1, base_channels=2)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.setting)
def test_a_setting_without_effect_is_refused_and_acts_beside_another(rule):
    alone, beside = ACTS[rule.setting]
    with pytest.raises(ValueError, match=rf"^{rule.setting} is {of(config(alone), rule.setting)}, but .*(leave|set|give)"):
        check_effects(config(alone))
    check_effects(config({**alone, **beside}))


def test_every_setting_of_the_table_is_one():
    known = {f"{section.name}.{field.name}" for section in fields(Config) for field in fields(section.default_factory)}
    assert {rule.setting for rule in RULES} == ACTS.keys() <= known


@pytest.mark.parametrize("name", ["zoo", "own"])
def test_groups_are_a_matter_of_the_network(name):
    """The demo's norm is batch by itself; a function of the user's does with groups what it likes."""
    if name == "zoo":
        with pytest.raises(ValueError, match="model.groups is 4, but model.norm is batch"):
            check_effects(config({"model.name": "demo", "model.groups": 4}))
        check_effects(config({"model.name": "demo", "model.norm": "group", "model.groups": 4}))
    else:
        check_effects(config({"model.name": "nets:mine", "model.groups": 4}))


@pytest.mark.parametrize("path", sorted(Path("jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_that_come_along_are_accepted(path):
    found = _config(_parse(_parser("train"), [str(path)]))
    check_effects(found)
    assert found.data.store and notes(found, unet(depth=1, num_convs=1, base_channels=2, norm=found.model.norm)) == []


@pytest.mark.parametrize(
    "settings, norm, words",
    [
        ({"spatial.norm_scope": "step"}, "instance", "spatial.norm_scope step is without effect: the model has no batch norm"),
        ({"spatial.norm_scope": "step"}, "batch", None),
        ({"spatial.norm_scope": "window"}, "instance", None),
        ({"spatial.norm_scope": "window"}, "none", "spatial.norm_scope window is without effect: the model has no norm"),
        ({"spatial.frozen_norm": True}, "none", "spatial.frozen_norm is without effect: the model has no norm"),
        ({"pipeline.placement": "v"}, "none", "pipeline.placement v is without effect: mesh.stages is 1"),
        ({"pipeline.placement": "v", "mesh.stages": 2}, "none", None),
        ({"mesh.compression": "fp16"}, "none", "mesh.compression fp16 is without effect: one rank holds all of the gradient"),
        ({"mesh.compression": "fp16", "mesh.samples": 2}, "none", None),
    ],
)
def test_notes(settings, norm, words):
    assert notes(config(settings), unet(depth=1, num_convs=1, base_channels=2, norm=norm)) == ([words] if words else [])


def test_groups_that_do_not_divide_the_channels():
    model = unet(depth=1, num_convs=1, base_channels=4, norm="group", groups=3)
    words = "model.groups 3 does not divide the channels of enc0_norm0, so it takes 1"
    assert notes(config({"model.norm": "group", "model.groups": 3}), model) == [words]
    assert notes(config({"model.norm": "group", "model.groups": 2}), unet(depth=1, num_convs=1, base_channels=4, norm="group", groups=2)) == []


def test_the_stores_ignore_value_holds_unless_another_is_set():
    assert with_store(Config(), 7).loss.ignore_index == 7
    assert with_store(config({"loss.ignore_index": 7}), 7).loss.ignore_index == 7
    with pytest.raises(ValueError, match="loss.ignore_index is 3, but the labels of a.h5 have 7 where nothing counts: leave loss.ignore_index out, or prepare the store with --ignore 3"):
        with_store(config({"loss.ignore_index": 3, "data.store": "a.h5"}), 7)
