"""Every refusal of a setting has a code, an example, and one place for its wording: docs/refusals.md.

After a change of a message, write the page anew and read its diff:

    DISTSEG_TEST_REWRITE=1 python -m pytest tests/test_refusals.py
"""

import ast
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from test_check import config, network
from torch import nn

from distseg.cli.parsing import command_parser, parse
from distseg.config.file import check_value, read_settings, settings_of
from distseg.config.patchgd import PatchConfig, PatchgdConfig
from distseg.config.refusal import SettingError
from distseg.config.settings import (
    ApproximateConfig,
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    PipelineConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.layers import VectorNorm
from distseg.models.unet import unet
from distseg.training.conflicts import (
    check_auto,
    check_labels,
    check_norms,
    check_patience,
    check_settings,
    with_store,
)
from distseg.training.surroundings import context_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/refusals.md"
SOURCES = (
    *("config/settings.py", "config/patchgd.py", "config/sizes.py", "config/file.py"),
    "training/conflicts.py",
)


@dataclass
class Example:
    """Something that is refused with a code.

    Attributes:
        code: the code at the end of the message.
        given: settings by name; or the text of the config file c.yaml; or a function that is refused.
        words: what the function does, for the page.
        repair: settings with which the same settings are accepted, or None if nothing is tried.
        kind: the class of the config, for the text of a file.
    """

    code: str
    given: dict | str | Callable[[], object]
    words: str = ""
    repair: dict | None = None
    kind: type = Config

    def provoke(self) -> None:
        if isinstance(self.given, dict):
            accept(self.given)
        elif isinstance(self.given, str):
            Path("c.yaml").write_text(self.given)
            read_settings("c.yaml", self.kind)
        else:
            self.given()

    def message(self) -> str:
        with pytest.raises(SettingError) as refused:
            self.provoke()
        assert refused.value.code == self.code
        return str(refused.value)

    def shown(self) -> str:
        if isinstance(self.given, dict):
            return ", ".join(f"`{name}: {written(value)}`" for name, value in self.given.items())
        if isinstance(self.given, str):
            return f"`{self.given}`" + " (PatchGD)" * (self.kind is PatchConfig)
        return self.words


def accept(settings: dict) -> None:
    """Do what a training does with its settings before it reads the data."""
    if any(name.startswith("patchgd.") for name in settings):
        PatchConfig(patchgd=PatchgdConfig(**{n.partition(".")[2]: v for n, v in settings.items()}))
    else:
        found = config(settings)
        check_settings(found, network(found))


def written(value) -> str:
    """Return a value as it stands in a config file."""
    value = str(value) if isinstance(value, Size) else value
    return yaml.safe_dump(value, default_flow_style=True, width=1000).partition("\n")[0]


def reading(path: str, content: bytes = b"", special: Callable[[str], None] | None = None):
    """Return a function that reads a config file with this content, or one that ``special`` makes."""

    def read():
        if special:
            special(path)
        elif content:
            Path(path).write_bytes(content)
        read_settings(path)

    return read


def store(of_images: bool = False, classes: str = "lake road") -> SimpleNamespace:
    return SimpleNamespace(
        path="store.h5",
        classes=classes.split(),
        ignore=255,
        of_images=of_images,
        splits={"train": ["a"]},
        split=lambda name: ["a"],
        size=lambda name: (32, 32),
    )


def labels(model: nn.Module, loss: str = "cross_entropy", data: DataConfig | None = None, **kinds):
    """Return a function that checks a network and a loss against a store of some kind."""
    return lambda: check_labels(store(**kinds), model, data or DataConfig(), LossConfig(name=loss))


SMALL = unet(depth=1, num_convs=1, base_channels=2)
VECTORS = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
CIRCULAR = as_network(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")))
DEEP = unet(depth=5, base_channels=2, norm="instance")
DEVICES = {"pipeline.placement": "devices", "pipeline.devices": ["cpu", "cpu"]}
MEMORY, TIME = {"streaming.memory": "4GB"}, {"streaming.tiles": Size("2x2")}

EXAMPLES = (
    # The value of one setting.
    Example("DS101", {"data.crop": [8, 1.5]}, repair={"data.crop": [8, 1]}),
    Example("DS102", {"data.crop": "0x3"}, repair={"data.crop": "1x3"}),
    Example("DS102", {"data.crop": []}),
    Example("DS103", {"data.crop": "axb"}),
    Example("DS104", {"streaming.memory": "lots"}, repair=MEMORY),
    Example("DS105", {"mesh.samples": 0}, repair={"mesh.samples": 1}),
    Example("DS106", {"train.max_minutes": float("inf")}),
    Example("DS107", {"run.threads": 5000}, repair={"run.threads": 1024}),
    Example("DS108", {"train.output": ""}),
    Example("DS109", {"data.augment": ["flip", "flip"]}, repair={"data.augment": ["flip"]}),
    Example("DS110", {"model.name": "nets:mine", "model.pad": 1}, repair={"model.pad": 2}),
    Example("DS111", {"model.name": "nets:mine", "model.inputs": [3, 0]}),
    Example("DS112", {"model.dims": 4}, repair={"model.dims": 3}),
    Example("DS113", {"model.name": "nets:mine", "model.outputs": {"aux": 0}}),
    Example("DS114", {"pipeline.balance": [3, 0]}, repair={"pipeline.balance": [3, 1]}),
    Example("DS115", {"spatial.exchange_every": "often"}),
    Example("DS116", {"loss.class_weights": [1.0, -1.0]}),
    Example("DS117", {"loss.class_weights": [0.0, 0.0]}),
    Example("DS118", {"optim.rates": {"encoder": -0.1}}, repair={"optim.rates": {"encoder": 0}}),
    Example("DS119", {"optim.thaw": {"encoder": -1}}, repair={"optim.thaw": {"encoder": 0}}),
    Example("DS120", {"optim.clip": 0.0}, repair={"optim.clip": 0.1}),
    Example("DS121", {"train.resume": "newest"}, repair={"train.resume": "last"}),
    Example("DS122", {"predict.formats": []}),
    Example("DS123", {"patchgd.head": "mlp"}, repair={"patchgd.head": "nets:mlp"}),
    Example("DS124", {"patchgd.sampled": 1.5}, repair={"patchgd.sampled": 2.0}),
    Example("DS125", {**MEMORY, "streaming.scratch": "nowhere"}),
    Example(
        "DS126", {"data.augment_scale": [1.25, 0.8]}, repair={"data.augment_scale": [0.8, 1.25]}
    ),
    Example("DS126", {"data.augment_noise": [0, float("nan")]}),
    Example("DS126", {"data.augment_noise": 0.1}, repair={"data.augment_noise": [0, 0.1]}),
    Example("DS126", {"data.augment_noise": ["0", 1]}, repair={"data.augment_noise": (0, 1)}),
    Example("DS126", {"data.augment_rotate": [15]}, repair={"data.augment_rotate": [-15, 15]}),
    Example(
        "DS127",
        {"data.augment_elastic": [0, 16]},
        repair={"data.augment_elastic": [0, 16], "data.augment_smoothness": 40.0},
    ),
    Example("DS128", {"data.focus_weights": {"lake": 0.0}}, repair={"data.focus_weights": "equal"}),
    Example("DS128", {"data.focus_weights": {}}, repair={"data.focus_weights": None}),
    # Settings that contradict each other.
    Example("DS201", {"spatial.fuse_below": 8}, repair={"spatial.exchange_every": "1"}),
    Example("DS201", {"data.focus_share": 0.9}, repair={"data.focus_class": "lake"}),
    Example("DS201", {"data.augment_smoothness": 16.0}, repair={"data.augment_elastic": [0, 5]}),
    Example("DS201", {"data.augment_share": 0.2}, repair={"data.augment_blur": [0, 1]}),
    Example("DS201", {"data.context": "auto"}, repair={"data.crop": Size("8x8")}),
    Example("DS201", {"data.epoch_samples": 9}, repair={"data.crop": Size("8x8")}),
    Example("DS201", {"optim.decay_factor": 2.0}, repair={"optim.schedule": "linear"}),
    Example("DS201", {"optim.momentum": 0.5}, repair={"optim.name": "sgd"}),
    Example(
        "DS201",
        {"train.init_names": {"backbone.": "encoder."}},
        repair={"train.init": "a.safetensors"},
    ),
    Example("DS201", {"streaming.scratch": "memory"}, repair=MEMORY),
    Example(
        "DS201",
        {"train.patience": 5, "train.validate_every": 0},
        repair={"train.validate_every": 1},
    ),
    Example(
        "DS202",
        {"mesh.samples": 10, "train.accumulate": 1000, "data.images": 1000},
        repair={"mesh.samples": 1},
    ),
    Example("DS203", {"model.args": {"width": 8}}, repair={"model.name": "nets:mine"}),
    Example("DS204", {"model.inputs": [3, 1]}, repair={"model.name": "nets:mine"}),
    Example("DS204", {"model.outputs": {"aux": 1.0}}, repair={"model.name": "nets:mine"}),
    Example("DS205", {"pipeline.devices": ["cpu"]}, repair={"pipeline.placement": "devices"}),
    Example("DS206", {"pipeline.placement": "devices"}, repair={"pipeline.devices": ["cpu"]}),
    Example("DS207", {**DEVICES, "pipeline.balance": [3]}, repair={"pipeline.balance": [3, 4]}),
    Example("DS208", {**MEMORY, **TIME}, repair={"streaming.tiles": None}),
    Example(
        "DS209", {"patchgd.accumulate": 3, "patchgd.inner": 2}, repair={"patchgd.accumulate": 2}
    ),
    Example(
        "DS210",
        {"patchgd.patch": Size("8x8"), "patchgd.step": Size("9x8")},
        repair={"patchgd.step": Size("8x8")},
    ),
    Example("DS211", {"model.groups": 4}, repair={"model.norm": "group"}),
    Example("DS211", {"model.name": "demo", "model.groups": 4}, repair={"model.norm": "group"}),
    Example(
        "DS212",
        {"data.focus_class": "lake", "data.focus_weights": "equal"},
        repair={"data.focus_class": None},
    ),
    Example(
        "DS221",
        {"approximate.halo": 4, "spatial.exchange_every": "2"},
        repair={"spatial.exchange_every": "all"},
    ),
    Example(
        "DS222",
        {"approximate.norms": "window", "spatial.norm_scope": "step"},
        repair={"spatial.norm_scope": "group"},
    ),
    Example("DS223", {"spatial.frozen_norm": True}, repair={"model.norm": "batch"}),
    Example(
        "DS224",
        {**TIME, **DEVICES},
        repair={"pipeline.placement": "linear", "pipeline.devices": None},
    ),
    Example("DS225", {**MEMORY, "approximate.halo": 4}, repair={"approximate.halo": None}),
    Example(
        "DS226",
        {**MEMORY, "spatial.tiles_per_rank": Size("2x2")},
        repair={"spatial.tiles_per_rank": Size("1x1")},
    ),
    Example("DS227", {**TIME, "pipeline.schedule": "zb-h1"}, repair={"pipeline.schedule": "1f1b"}),
    Example(
        "DS228",
        {**DEVICES, "spatial.exchange_every": "1"},
        repair={"spatial.exchange_every": "all"},
    ),
    Example("DS229", {**DEVICES, "mesh.stages": 2}, repair={"mesh.stages": 1}),
    Example(
        "DS230", {**DEVICES, "pipeline.schedule": "zb-h1"}, repair={"pipeline.schedule": "gpipe"}
    ),
    Example(
        "DS231",
        {**DEVICES, "spatial.tiles_per_rank": Size("1x2")},
        repair={"spatial.tiles_per_rank": Size("1x1")},
    ),
    Example("DS232", {**DEVICES, "mesh.tiles": Size("1x2")}, repair={"model.norm": "none"}),
    Example("DS233", {**MEMORY, "pipeline.recompute": "always"}, repair={"streaming.memory": None}),
    # The text of a config file.
    Example(
        "DS234",
        lambda: check_auto(
            MeshConfig(layout="auto"),
            StreamingConfig(),
            ApproximateConfig(),
            PipelineConfig(balance=[3, 4]),
            SpatialConfig(),
        ),
        "`mesh.layout: auto`, `pipeline.balance: [3, 4]`",
    ),
    Example("DS235", {"model.pad": 8}, repair={"model.pad": None}),
    Example(
        "DS236", {**MEMORY, "spatial.messages": "nccl"}, repair={"spatial.messages": "transport"}
    ),
    Example(
        "DS237", {**DEVICES, "spatial.messages": "nccl"}, repair={"spatial.messages": "transport"}
    ),
    Example("DS301", reading("c.yaml", b"# nothing\n"), "a file with comments only"),
    Example("DS302", "model: {depth: 1"),
    Example("DS303", reading("c.yaml", b"model: \x01"), "a file with a control character"),
    Example(
        "DS304",
        lambda: settings_of({"model": {"depth": [[1]]}}, "manifest.json"),
        'a checkpoint with `{"model": {"depth": [[1]]}}`',
    ),
    Example(
        "DS305",
        lambda: settings_of({"model": [1]}, "manifest.json"),
        'a checkpoint with `{"model": [1]}`',
    ),
    Example(
        "DS306",
        lambda: check_value("--data.augment", "&a [*a]"),
        "the flag `--data.augment '&a [*a]'`",
    ),
    Example("DS307", reading("folder", special=os.mkdir), "a folder"),
    Example("DS307", reading("pipe", special=os.mkfifo), "a pipe"),
    Example("DS308", reading("nowhere.yaml"), "a file that does not exist"),
    Example("DS309", reading("c.yaml", b"#" * 300_000), "a file of 300 kB"),
    Example("DS310", reading("c.yaml", b"\x89PNG"), "a picture"),
    Example("DS311", "model: {depth: [[[[1]]]]}"),
    Example("DS312", "model: {name: !!python/name:os.system x}"),
    Example("DS313", "model: 5"),
    Example("DS313", "[model, mesh]"),
    Example("DS314", "{[model, mesh]: 1}"),
    Example("DS315", "model: {depth: 1, depth: 2}"),
    Example("DS315", "{model: {depth: 1}, model: {depth: 2}}"),
    Example("DS316", "modle: {depth: 1}"),
    Example("DS316", "network: {depth: 1}"),
    Example("DS316", "model: {dpth: 1}"),
    Example("DS316", "loss: {class_path: Dice}"),
    Example("DS316", "spatial: {scratch: /tmp}"),
    Example("DS316", "patchgd: {inner: 2}"),
    Example("DS316", "streaming: {memory: 4GB}", kind=PatchConfig),
    Example("DS316", "mesh: {stages: 2}", kind=PatchConfig),
    Example("DS317", "mesh: {tiles: {rows: 1}}"),
    Example("DS318", "model: {args: {width: {a: 1}}}"),
    # Settings that do not fit the data or the network.
    Example(
        "DS401",
        lambda: config({"mesh.tiles": Size("1x2")}).with_dims(3, "8x9x10"),
        "`mesh.tiles: 1x2` for volumes",
    ),
    Example(
        "DS402",
        lambda: check_settings(Config(), nn.ModuleDict({"norm1": VectorNorm(2)})),
        "`data.images: 1` and a network with a batch norm of vectors",
    ),
    Example(
        "DS403",
        lambda: check_norms(
            DEEP, {"large": (64, 64), "sliver": (24, 4)}, SpatialConfig(), ApproximateConfig(), 1
        ),
        "`model.depth: 5` and an image of 24x4 pixels",
    ),
    Example("DS404", labels(SMALL, of_images=True), "`model.name: unet` and labels of images"),
    Example("DS404", labels(VECTORS), "`model.name: nets:classifier` and labels of pixels"),
    Example("DS405", labels(SMALL, "mse"), "`loss.name: mse` and classes of pixels"),
    Example(
        "DS405",
        labels(VECTORS, of_images=True, classes="age"),
        "`loss.name: cross_entropy` and a number for each image",
    ),
    Example(
        "DS406",
        lambda: with_store(LossConfig(ignore_index=3), store()),
        "`loss.ignore_index: 3` and a store with the value 255",
    ),
    Example(
        "DS407",
        lambda: check_patience(store(), TrainConfig(patience=3)),
        "`train.patience: 3` and a store without the split `val`",
    ),
    Example(
        "DS408",
        lambda: context_of(CIRCULAR, DataConfig(crop=Size("8x8"), context="auto")),
        "`data.context: auto` and a convolution with circular padding",
    ),
    Example(
        "DS409",
        labels(VECTORS, of_images=True, data=DataConfig(crop=Size("8x8"), context=4)),
        "`data.context: 4` and labels of images",
    ),
)
NAMES = [f"{one.code} {one.shown()}" for one in EXAMPLES]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, so that no message has a path of this machine."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_a_message_ends_with_its_code(example, folder):
    text = example.message()
    assert text.endswith(f" ({example.code})") and "\n" not in text


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=name) for one, name in zip(EXAMPLES, NAMES) if one.repair is not None],
)
def test_repaired_settings_are_accepted(example):
    accept({**example.given, **example.repair})


def test_the_page_has_every_message(folder):
    """The rows of docs/refusals.md are the messages of the examples, word by word."""
    rows = "".join(
        f"| {one.code} | {escaped(one.message())} | {one.shown()} |\n" for one in EXAMPLES
    )
    head, rule, found = PAGE.read_text().partition("|---|---|---|\n")
    if os.environ.get("DISTSEG_TEST_REWRITE"):
        PAGE.write_text(head + rule + rows)
    else:
        assert found == rows, "see the docstring of this file for how the page is written anew"


def escaped(text: str) -> str:
    """Return a text as it is written in a table of Markdown."""
    return re.sub(r"[\\|*<`]", r"\\\g<0>", text)


def constants(path: Path) -> list[str]:
    """Return the codes in a source file."""
    return [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(r"DS\d{3}", str(node.value))
    ]


def test_each_code_stands_at_one_place_and_has_an_example():
    codes = [code for path in (ROOT / "distseg").rglob("*.py") for code in constants(path)]
    assert sorted(codes) == sorted({one.code for one in EXAMPLES})
    assert [one.code for one in EXAMPLES] == sorted(one.code for one in EXAMPLES)


@pytest.mark.parametrize("name", SOURCES)
def test_settings_are_refused_with_a_code_only(name):
    """No plain ValueError is raised where settings are checked."""
    raised = [
        ast.unparse(node.exc)
        for node in ast.walk(ast.parse((ROOT / "distseg" / name).read_text()))
        if isinstance(node, ast.Raise)
    ]
    assert raised and all(re.match(r"SettingError\(('DS\d{3}'|rule\.code), ", x) for x in raised)


@pytest.mark.parametrize("value", ["axb", "0x3", "x".join(["12", "ab"] * 200)], ids=len)
def test_a_flags_message_keeps_value_and_code(value):
    """The parser of the command line has the message of a size among words of its own."""
    with pytest.raises(ValueError, match=rf"--data\.crop: .*got '{value[:100]}.*\(DS10\d\) ") as e:
        parse(command_parser("train"), [f"--data.crop={value}"])
    assert len(str(e.value)) < 500


def test_a_refusal_can_be_sent_to_another_process():
    sent = pickle.loads(pickle.dumps(SettingError("DS120", "optim.clip is 0")))
    assert (sent.code, str(sent)) == ("DS120", "optim.clip is 0 (DS120)")
