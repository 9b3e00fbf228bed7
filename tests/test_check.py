"""No setting is without effect in silence: refused where no mesh or model makes it act, told where only today's do not."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from distseg.cli.parsing import command_parser, config_from, parse
from distseg.config.file import sections, sections_in, suggestion
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import (
    ApproximateConfig,
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    SpatialConfig,
    TrainConfig,
)
from distseg.models.unet import unet
from distseg.training.conflicts import (
    RULES,
    Facts,
    check_groups,
    check_norms,
    check_settings,
    norms_of,
    patch_notes,
    smallest,
    with_store,
)

KINDS = (PatchConfig, Config)
SHARED = [section for section in sections(PatchConfig) if section != "patchgd"]


def config(settings: dict, base: Config = Config()) -> Config:
    sections: dict[str, dict] = {}
    for setting, value in settings.items():
        section, _, field = setting.partition(".")
        sections.setdefault(section, {})[field] = value
    return Config(
        **{
            section.name: replace(getattr(base, section.name), **sections.get(section.name, {}))
            for section in fields(Config)
        }
    )


def network(found: Config):
    return unet(depth=1, num_convs=1, base_channels=2, norm=found.model.norm or "instance")


def notes_on(found: Config, model) -> list[str]:
    return Facts(found, norms_of(model)).notes()


def test_the_defaults_are_not_refused():
    check_settings(Config())
    assert notes_on(Config(), unet(depth=1, num_convs=1, base_channels=2)) == []


@pytest.mark.parametrize("section", SHARED)
def test_a_setting_of_patchgd_is_one_of_exact_training_too(section):
    """Settings that both kinds of training share are declared once, in a base class if need be."""
    patches, exact = (kind.__dataclass_fields__[section].default_factory for kind in KINDS)
    shared = patches if patches.__base__ is object else patches.__base__
    assert issubclass(exact, shared)


def test_no_setting_of_exact_training_alone_is_one_of_patchgd():
    """The message on each says why."""
    own = [
        f"{section.name}.{field.name}"
        for section in fields(Config)
        for field in fields(section.default_factory)
        if field.name not in sections(PatchConfig).get(section.name, ())
    ]
    assert {"mesh.stages", "streaming.memory", "approximate.halo", "train.accumulate"} < set(own)
    for setting in own:
        why = suggestion(f"--{setting}", [], PatchConfig)
        assert "exact training (distseg train)" in why or "PatchGD has patchgd." in why, setting


def test_every_setting_of_the_table_is_one():
    known = {
        f"{section.name}.{field.name}"
        for section in fields(Config)
        for field in fields(section.default_factory)
    }
    known |= {section.name for section in fields(Config)}
    assert {name for rule in RULES for name in (rule.setting, rule.other)} <= known


def test_groups_are_a_matter_of_the_network():
    """A function of the user's does with groups what it likes."""
    check_settings(config({"model.name": "nets:mine", "model.groups": 4}))


@pytest.mark.parametrize("path", sorted(Path("jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_that_come_along_are_accepted(path):
    kind = PatchConfig if "patchgd" in sections_in(str(path)) else Config
    found = config_from(parse(command_parser("train", kind), [str(path)]), kind)
    model = unet(depth=1, num_convs=1, base_channels=2, norm=found.model.norm)
    if kind is PatchConfig:
        check_groups(found.model)
        assert (
            found.data.store
            and patch_notes(found.patchgd, found.model, found.mesh, found.approximate, model) == []
        )
    else:
        check_settings(found)
        assert found.data.store and notes_on(found, model) == []


@pytest.mark.parametrize(
    "settings, norm, words",
    [
        (
            {"spatial.norm_scope": "step"},
            "instance",
            "spatial.norm_scope step is without effect: the model has no batch norm",
        ),
        ({"spatial.norm_scope": "step"}, "batch", None),
        ({"approximate.norms": "window"}, "instance", None),
        (
            {"approximate.norms": "window"},
            "none",
            "approximate.norms window is without effect: the model has no norm",
        ),
        (
            {"spatial.frozen_norm": True},
            "none",
            "spatial.frozen_norm is without effect: the model has no norm",
        ),
        (
            {"pipeline.placement": "v-shaped"},
            "none",
            "pipeline.placement v-shaped is without effect: mesh.stages is 1",
        ),
        ({"pipeline.placement": "v-shaped", "mesh.stages": 2}, "none", None),
        (
            {"approximate.gradients": "fp16"},
            "none",
            "approximate.gradients fp16 is without effect: mesh.samples and mesh.tiles are 1, so ranks sum no gradients",
        ),
        ({"approximate.gradients": "fp16", "mesh.samples": 2}, "none", None),
    ],
)
def test_notes(settings, norm, words):
    assert notes_on(config(settings), unet(depth=1, num_convs=1, base_channels=2, norm=norm)) == (
        [words] if words else []
    )


def test_groups_that_do_not_divide_the_channels():
    model = unet(depth=1, num_convs=1, base_channels=4, norm="group", groups=3)
    words = "model.groups 3 does not divide the channels of enc0_norm0, so the number of groups of this norm is 1"
    assert notes_on(config({"model.norm": "group", "model.groups": 3}), model) == [words]
    assert (
        notes_on(
            config({"model.norm": "group", "model.groups": 2}),
            unet(depth=1, num_convs=1, base_channels=4, norm="group", groups=2),
        )
        == []
    )


def test_the_stores_ignore_value_holds_unless_another_is_set():
    store = SimpleNamespace(path="a.h5", ignore=7)
    assert with_store(LossConfig(), store).ignore_index == 7
    assert with_store(LossConfig(ignore_index=7), store).ignore_index == 7
    with pytest.raises(ValueError, match=r"loss\.ignore_index is 3, .*a\.h5 .* 7: .*\(DS406\)"):
        with_store(LossConfig(ignore_index=3), store)


def check_sizes(found: Config, model, sizes: dict) -> None:
    check_norms(model, sizes, found.spatial, found.approximate, found.norm_images)


def test_an_image_too_small_for_a_norm_is_named_before_work():
    """Sizes that are smaller in every dim decide; a batch norm counts the images of a batch."""
    sizes = {"large": (64, 64), "sliver": (24, 4), "wide": (8, 400)}
    assert list(smallest(sizes)) == ["sliver", "wide"]
    deep = unet(depth=5, base_channels=2, norm="instance")
    with pytest.raises(ValueError, match=r"'sliver' of 24x4 pixels .*mid_norm0 .*\(DS403\)"):
        check_sizes(Config(), deep, sizes)
    check_sizes(Config(), deep, {"large": (64, 64)})
    check_sizes(Config(approximate=ApproximateConfig(norms="window")), deep, sizes)
    batch = unet(depth=5, base_channels=2, norm="batch")
    with pytest.raises(ValueError, match=r"sliver.*\(DS403\)"):
        check_sizes(Config(), batch, sizes)
    check_sizes(Config(data=DataConfig(images=2)), batch, sizes)
    check_sizes(Config(spatial=SpatialConfig(frozen_norm=True)), batch, sizes)
    whole = Config(spatial=SpatialConfig(norm_scope="step"), mesh=MeshConfig(samples=2))
    check_sizes(whole, batch, sizes)
    later = Config(spatial=SpatialConfig(norm_scope="step"), train=TrainConfig(accumulate=2))
    with pytest.raises(ValueError, match=r"sliver.*\(DS403\)"):
        check_sizes(later, batch, sizes)  # a batch norm does not see the next micro-batch
