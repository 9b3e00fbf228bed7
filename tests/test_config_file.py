"""Config files are data, whatever is in them: settings, or one clear error; and flags are the same settings."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distseg.cli.parsing import command_parser, config_from, parse
from distseg.config.file import check_value, read_settings, sections, settings_of
from distseg.config.settings import Config
from distseg.config.sizes import Size
from distseg.layers.loss import Loss
from distseg.training.conflicts import check_settings
from distseg.training.run_config import taken_over

PARSER = command_parser("train")
NAMES = [f"{section}.{field}" for section, names in sections().items() for field in names]
QUICK = dict(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def config_of(text: str, tmp_path, *flags: str) -> Config:
    (tmp_path / "c.yaml").write_text(text, newline="")
    return config_from(parse(PARSER, [str(tmp_path / "c.yaml"), *flags]))


def test_a_file_and_flags_say_the_same(tmp_path):
    text = """
# a comment
model: {depth: 2, dropout: 1e-1, norm: null}
mesh:
  tiles: 1x2
pipeline:
  balance: [3, 4]
loss:
  name: cross_entropy + dice
  class_weights: [1, 2.5, 1e1]
data:
  store: "a, b [c].h5"
  augment:
    - flip
    - "turn"
train:
  channels_last: no
  output: runs/ünï
streaming:
  memory: 4GB
"""
    found = config_of(text, tmp_path)
    flags = [
        "--model.depth=2",
        "--model.dropout=0.1",
        "--mesh.tiles=1x2",
        "--pipeline.balance=[3,4]",
        "--loss.name=cross_entropy + dice",
        "--loss.class_weights=[1,2.5,10]",
    ]
    flags += [
        "--data.store=a, b [c].h5",
        "--data.augment=[flip,turn]",
        "--train.channels_last=false",
        "--train.output=runs/ünï",
        "--memory=4GB",
    ]
    assert found == config_from(parse(PARSER, flags))
    assert (
        found.model.dropout,
        found.loss.class_weights,
        found.data.augment,
        found.streaming.memory,
    ) == (0.1, [1.0, 2.5, 10.0], ["flip", "turn"], 4 * 10**9)


def test_names_with_values(tmp_path):
    text = """
model:
  name: nets:mine
  args: {encoder_name: resnet34, encoder_weights: null, depth: 3, on: true, rates: [1, 2.5], really: yes, text: "a: {b}"}
optim:
  rates:
    encoder: 0.1
    "decoder.blocks.*": 0
  thaw: {encoder: 2}
train:
  init: a.safetensors
  init_names: {"backbone.": "encoder."}
"""
    found = config_of(text, tmp_path)
    assert found.model.args == {
        "encoder_name": "resnet34",
        "encoder_weights": None,
        "depth": 3,
        "on": True,
        "rates": [1, 2.5],
        "really": True,
        "text": "a: {b}",
    }
    assert (found.optim.rates, found.optim.thaw, found.train.init_names) == (
        {"encoder": 0.1, "decoder.blocks.*": 0.0},
        {"encoder": 2},
        {"backbone.": "encoder."},
    )
    flags = [
        "--model.name=nets:mine",
        "--model.args.encoder_name=resnet34",
        "--model.args.depth=3",
        "--optim.rates.encoder=0.1",
    ]
    typed = config_from(parse(PARSER, flags))
    assert (typed.model.args, typed.optim.rates) == (
        {"encoder_name": "resnet34", "depth": 3},
        {"encoder": 0.1},
    )
    over = config_of(text, tmp_path, "--model.args.depth=4")
    assert over.model.args == {**found.model.args, "depth": 4}
    # and back from a run's manifest
    manifest = json.loads(json.dumps(found.as_plain()))
    assert (
        config_from(
            parse(PARSER, [setting.flag for setting in settings_of(manifest, "manifest.json")])
        )
        == found
    )


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "model:\n  name: a:b\n  args: {a: {b: 1}}\n",
            r"c\.yaml, line 3: model\.args: a .*\(DS318\)",
        ),
        (
            "model:\n  name: a:b\n  args: {a: 1, a: 2}\n",
            r"'a' is a name of model\.args .*line 3 .*\(DS315\)",
        ),
        ("optim:\n  rates: {a: fast}\n", "c.yaml, line 2: optim.rates takes"),
        ("optim:\n  rates: 3\n", "c.yaml, line 2: optim.rates takes"),
        ("mesh:\n  tiles: {a: 1}\n", r"c\.yaml, line 2: mesh\.tiles .*\(DS317\)"),
    ],
)
def test_names_with_values_that_are_none_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        config_of(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffmodel:\n  depth: 2\n",
        "model:\r\n  depth: 2\r\n",
        "model:\n  depth: &d 2\ntrain:\n  epochs: *d\n",
        "mesh:\nmodel:\n  depth: 2\n",
    ],
)
def test_byte_order_marks_line_ends_references_and_empty_sections_are_fine(tmp_path, text):
    assert config_of(text, tmp_path).model.depth == 2


def test_formats_of_class_maps_may_be_named_after_endings(tmp_path):
    assert config_of("predict:\n  formats: [tif, h5]", tmp_path).predict.formats == ["tiff", "hdf5"]
    for formats, words in (
        ("[tif, tiff]", r"predict\.formats has tiff .*\(DS109\)"),
        ("[jpg]", "takes one of 'hdf5', 'h5', 'tiff', 'tif', 'png', .*, got 'jpg'"),
    ):
        with pytest.raises(ValueError, match=words):
            config_of(f"predict:\n  formats: {formats}", tmp_path)


def test_lists_of_names_need_no_brackets(tmp_path):
    found = config_of(
        "predict: {formats: gpkg, trace: deep water}\ndata: {augment: flip}", tmp_path
    )
    assert (found.predict.formats, found.predict.trace) == (["gpkg"], ["deep water"])
    assert found.data.augment == ["flip"]
    for value, formats in (("cog, gpkg", ["cog", "gpkg"]), ("[cog,gpkg]", ["cog", "gpkg"])):
        for flag in (["--predict.formats", value], [f"--predict.formats={value}"]):
            assert config_of("model:", tmp_path, *flag).predict.formats == formats
    assert (
        config_of("predict: {trace: lake}", tmp_path, "--predict.trace=null").predict.trace is None
    )
    assert config_of("model:", tmp_path, "--predict.trace", "no,on").predict.trace == ["no", "on"]
    with pytest.raises(ValueError, match="takes one of 'hdf5', .*, got 'gpk'. Did you mean gpkg?"):
        config_of("model:", tmp_path, "--predict.formats", "gpk")


def test_flags_stand_over_files_and_later_files_over_earlier_ones(tmp_path):
    (tmp_path / "more.yaml").write_text("model: {depth: 3, num_convs: 3}\n")
    found = config_of(
        "model: {depth: 2, num_convs: 2, base_channels: 2}\n",
        tmp_path,
        f"--config={tmp_path}/more.yaml",
        "--model.num_convs",
        "4",
    )
    assert (found.model.depth, found.model.num_convs, found.model.base_channels) == (3, 4, 2)


def test_every_default_goes_through_a_file(tmp_path):
    plain = {
        s.name: {f.name: getattr(s.default_factory(), f.name) for f in fields(s.default_factory)}
        for s in fields(Config)
    }
    plain = {
        s: {f: str(v) if isinstance(v, Size) else v for f, v in values.items()}
        for s, values in plain.items()
    }
    assert config_of(yaml.safe_dump(plain), tmp_path) == Config()
    assert (
        config_from(parse(PARSER, [], settings_of(json.loads(json.dumps(plain)), "a manifest")))
        == Config()
    )


def test_a_setting_that_is_wrong_is_told_with_its_line_unless_a_flag_is(tmp_path):
    with pytest.raises(
        ValueError, match="c.yaml, line 3: model.depth takes a whole number or null, got 'deep'"
    ):
        config_of("\nmodel:\n  depth: deep\n", tmp_path)
    with pytest.raises(ValueError, match="^--model.norm takes one of"):
        config_of("model:\n  norm: batch\n", tmp_path, "--model.norm", "layer")


def clear(read, *arguments):
    """What ``read`` gives, or None where it refuses in one line of bearable length."""
    try:
        return read(*arguments)
    except ValueError as e:
        text = str(e)
        assert text.strip() and "\n" not in text and len(text) < 1500, text
        assert "Traceback" not in text and "jsonargparse" not in text, text
        return None


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["1x2", "4GB", "auto", "dice", ".nan", "1e400", "&a [*a]", "[" * 30, "null", ""]
    )
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | scalars, inner, max_size=3)
    ),
    max_leaves=12,
)
likely = st.fixed_dictionaries(
    {},
    optional={
        section: trees | st.fixed_dictionaries({}, optional={f: scalars | trees for f in names})
        for section, names in sections().items()
    },
)


@settings(max_examples=60, **QUICK)
@given(tree=likely | trees)
def test_random_trees(tree, tmp_path_factory):
    """As YAML that PyYAML writes itself."""
    path = tmp_path_factory.getbasetemp() / "tree.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="replace")
    clear(lambda: config_from(parse(PARSER, [str(path)])))


@settings(max_examples=150, **QUICK)
@given(
    raw=st.binary(max_size=200)
    | st.text(alphabet="model: {}[]&*!?|>-,'\"#%@`\n\t 0a", max_size=200).map(str.encode)
)
def test_random_bytes(raw, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(raw)
    clear(read_settings, str(path))


DEMO = Path(__file__).parents[1] / "jobs/demo.yaml"


@settings(max_examples=150, **QUICK)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 10**6), st.binary(min_size=0, max_size=4), st.integers(0, 30)),
        min_size=1,
        max_size=6,
    )
)
def test_a_config_with_flipped_and_cut_bytes(edits, tmp_path_factory):
    raw = DEMO.read_bytes()
    for place, new, cut in edits:
        place %= len(raw) + 1
        raw = raw[:place] + new + raw[place + cut :]
    path = tmp_path_factory.getbasetemp() / "edited.yaml"
    path.write_bytes(raw)
    clear(read_settings, str(path))


values = (
    st.text(max_size=30)
    | scalars.map(str)
    | st.lists(scalars, max_size=3).map(str)
    | st.sampled_from(
        ["-1", "0", "1", "1.5", "true", "[1, 2]", "{}", "\0", "9" * 5000, "- " * 3000]
    )
)


@settings(max_examples=150, **QUICK)
@given(name=st.sampled_from(NAMES), value=values)
def test_random_values_of_flags(name, value):
    found = clear(lambda: config_from(parse(PARSER, [f"--{name}={value}"])))
    if found is not None:
        clear(check_settings, found)
        clear(Loss, found.loss, 3)


@settings(max_examples=60, **QUICK)
@given(tree=likely | trees)
def test_random_manifests(tree):
    """As JSON holds them."""
    try:
        tree = json.loads(json.dumps(tree))
    except (TypeError, ValueError):
        return
    if isinstance(tree, dict) and isinstance(tree.get("model"), dict):
        tree["model"]["name"] = "unet"
    clear(lambda: config_from(parse(PARSER, [], settings_of(taken_over(tree, "run"), "run"))))


@settings(max_examples=100, **QUICK)
@given(text=st.text(alphabet="[]{}&*a, -:?!\n", max_size=400))
def test_values_that_pass_are_shallow(text):
    if clear(lambda: check_value("--x", text) or True) and len(text) > 200:
        try:
            depth = most = 0
            for event in yaml.parse(text, Loader=yaml.SafeLoader):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                    event, yaml.CollectionEndEvent
                )
                most = max(most, depth)
        except yaml.YAMLError:
            return
        assert most <= 4


def test_defaults_take_the_dims_of_the_images():
    from distseg.config.settings import Config, MeshConfig
    from distseg.config.sizes import Size

    found = Config(mesh=MeshConfig(tiles=Size("1x1x2"))).with_dims(3, "8x9x10")
    assert (str(found.mesh.tiles), str(found.spatial.tiles_per_rank)) == ("1x1x2", "1x1x1")
    assert str(found.predict.tile) == "96x96x96" and found.model.dims == 3
    assert str(Config().with_dims(1, "100").predict.tile) == "1048576"
    with pytest.raises(ValueError, match=r"mesh\.tiles is 1x2, .*\(8x9x10\).*\(DS401\)"):
        Config(mesh=MeshConfig(tiles=Size("1x2"))).with_dims(3, "8x9x10")
