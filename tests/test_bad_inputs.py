"""What a user gets wrong, and the words that must come back: what is wrong, both values, and the repair.

Every line of the table is a command line, run in a folder with images, masks, a store and runs. It ends with exit code 2 and one message
of some words, and changes nothing in the folder.
"""

import json
import os
import re
import shutil
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from made_store import random_store
from PIL import Image
from torch import nn

from distseg.cli.main import main
from distseg.comm import reducer
from distseg.config.settings import Config, DataConfig, ModelConfig, TrainConfig
from distseg.config.sizes import Size
from distseg.layers.graph import receptive_field
from distseg.models.unet import unet
from distseg.runtime.swap_layers import parallelize
from distseg.training.checkpoint.files import digest_of, find
from distseg.training.loop import train

BASE = {"image": "29x43", "model.depth": "2", "model.num_convs": "1", "model.base_channels": "4"}
HERE = __name__


def pooling(in_channels=4, out_channels=2):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d((29, 43)),
        nn.Conv2d(4, out_channels, 1),
    )


def circular(in_channels=4, out_channels=2):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, out_channels, 1),
    )


def layer_norm(in_channels=4, out_channels=2):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1),
        nn.LayerNorm([4, 29, 43]),
        nn.Conv2d(4, out_channels, 1),
    )


class Attention(nn.Module):
    def forward(self, x):
        y = x.flatten(2)
        return x + (y @ (y.transpose(1, 2) @ y).softmax(-1)).view_as(x)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Turned(nn.Module):
    def forward(self, x):
        return x + x.mean((2, 3), keepdim=True) * len(x) if x.shape[2] > 300 else x


def _with(layer, in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1), layer, nn.Conv2d(4, out_channels, 1)
    )


def attending(in_channels=4, out_channels=2):
    return _with(Attention(), in_channels, out_channels)


def noisy(in_channels=4, out_channels=2):
    return _with(Noise(), in_channels, out_channels)


def turned(in_channels=4, out_channels=2):
    return _with(Turned(), in_channels, out_channels)


def own(function: str) -> dict:
    return {**{k: None for k in BASE if k.startswith("model")}, "model.name": f"{HERE}:{function}"}


def verify(**flags) -> list[str]:
    """``distseg verify`` with these flags over those of BASE; None leaves one out, and ``__`` is a dot."""
    flags = {name.replace("__", "."): value for name, value in flags.items()}
    return [
        "verify",
        *(
            text
            for name, value in {**BASE, **flags}.items()
            if value is not None
            for text in (f"--{name}", value)
        ),
    ]


def file(name: str) -> list[str]:
    """``distseg verify`` with a config file."""
    return ["verify", name, "--image", "29x43"]


SMALL = ["--model.depth", "1", "--model.num_convs", "1", "--model.base_channels", "4"]
TRAIN = ["train", "--data.store", "store.h5", "--train.output", "new", *SMALL]
FOLDER = ["prepare", "images", "new.h5", "--masks", "masks", "--classes", "a,b"]

CONFIGS = {
    "nothing.yaml": "",
    "list.yaml": "- model\n- mesh\n",
    "text.yaml": "just words\n",
    "tab.yaml": "model:\n\tdepth: 1\n",
    "open.yaml": "model: {depth: 1\n",
    "two.yaml": "model: {depth: 1}\n---\nmodel: {depth: 2}\n",
    "twice.yaml": "model:\n  depth: 1\n  depth: 2\n",
    "section-twice.yaml": "model: {depth: 1}\nmodel: {depth: 2}\n",
    "section.yaml": "modle:\n  depth: 1\n",
    "field.yaml": "model:\n  dpth: 1\n",
    "value.yaml": "model:\n  depth: deep\n",
    "null.yaml": "mesh:\n  samples: null\n",
    "list-for-number.yaml": "model:\n  depth: [1, 2]\n",
    "fields-for-number.yaml": "model:\n  depth: {a: 1}\n",
    "number-for-section.yaml": "model: 5\n",
    "tag.yaml": 'model:\n  name: !!python/object/apply:os.system ["touch pwned"]\n',
    "class.yaml": "model:\n  class_path: os.system\n",
    "laughs.yaml": "".join(
        f"l{k}: &l{k} [{', '.join([f'*l{k - 1}' if k else '1'] * 9)}]\n" for k in range(9)
    ),
    "itself.yaml": "model: &all\n  depth: *all\n",
    "quoted-laughs.yaml": 'loss:\n  class_weights: "&a [*a, *a]"\n',
    "deep.yaml": "model: " + "[" * 5000,
    "deep-value.yaml": f'loss:\n  class_weights: "{"[" * 5000}"\n',
    "digits.yaml": f"model:\n  depth: {'9' * 5000}\n",
    "nan.yaml": "optim:\n  lr: .nan\n",
    "large.yaml": "#" * 300000,
}
MODULES = {
    "nets.py": """
        from torch import nn
        value = 5
        def plain(in_channels=3, out_channels=2): return nn.Sequential(nn.Conv2d(in_channels, out_channels, 3, padding=1))
        def needs(width): return plain()
        def fails(**fields): raise KeyError("boom")
        def none(**fields): pass
        def leaves(**fields): raise SystemExit(0)
        def seven(**fields): return nn.Sequential(nn.Conv2d(7, 3, 3, padding=1))
        def two(**fields): return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1))
        def shrinks(**fields): return nn.Sequential(nn.Conv2d(3, 2, 3))
        def blind(**fields): return nn.Sequential(nn.Linear(3, 2))
        class Dict(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 2, 3, padding=1)
            def forward(self, x): return {"out": self.conv(x)}
        def dict_(**fields): return Dict()
        class Broken(Dict):
            def forward(self, x): return self.missing(x)
        def broken(**fields): return Broken()
        """,
    "wrong.py": "def net(:\n",
    "imports.py": "import a_package_that_is_nowhere\n",
    "leaves.py": "raise SystemExit(0)\n",
}
MANIFESTS = {  # of what the manifest's config is changed into
    "code": {"model.name": "os:system"},
    "class": {"model.class_path": "os.system"},
    "no-model": {"model": None},
    "no-name": {"model.name": 5},
    "deep": {"model.depth": "deep"},
    "nested": {"model.depth": [[1]]},
    "huge": {"model.depth": 10**30},
    "no-stages": {"mesh.stages": 0},
    "tile": {"predict.tile": "0x8"},
    "tile-of-one": {"predict.tile": "8"},
    "formats": {"predict.formats": ["exe"]},
    "pipe": {"data.store": "pipe"},
}

TABLE = {
    "no such command": (["trian"], "unknown command 'trian': choose prepare, init, check, train"),
    "a flag misspelt": (
        ["train", "--model.dpth", "2"],
        "--model.dpth 2: did you mean --model.depth[?]",
    ),
    "a flag of before": (
        ["train", "--spatial.in_time", "recompute"],
        "--spatial.in_time recompute: it is called streaming.memory .* or streaming.tiles now",
    ),
    "a value of before": (
        ["train", "--pipeline.placement", "v"],
        "--pipeline.placement takes one of 'linear', 'v-shaped', 'devices', got 'v': it is called v-shaped now",
    ),
    "a section for a flag": (
        ["train", "--model", "unet"],
        "--model is a section, which takes no value: give its fields, such as --model.name VALUE",
    ),
    "words for a number": (
        ["train", "--model.depth", "deep"],
        "--model.depth takes a whole number or null, got 'deep'",
    ),
    "nothing for a number": (
        ["train", "--model.depth", ""],
        "--model.depth takes a whole number or null, got ''",
    ),
    "a number for a list": (
        ["train", "--data.augment", "1"],
        r"--data.augment takes a list such as \[a, b\], got '1'",
    ),
    "a number for a range": (
        ["train", "--data.augment_scale", "1.2"],
        r"--data.augment_scale takes a range of two numbers \[from, to\] or null, got '1.2'",
    ),
    "a word in a range": (
        ["train", "--data.augment_scale", "[a, 2]"],
        r"--data.augment_scale takes a range of two numbers \[from, to\] or null, got .*'a', 2",
    ),
    "a word that is no choice": (
        ["train", "--data.augment", "[flop]"],
        "--data.augment takes one of 'flip', 'turn', 'colour', got 'flop'",
    ),
    "a flag without a value": (["train", "--model.depth"], "--model.depth: expected one argument"),
    "no boolean": (
        ["train", "--spatial.frozen_norm", "maybe"],
        "--spatial.frozen_norm takes true or false, got 'maybe'",
    ),
    "no size": (["train", "--data.crop", "axb"], r"--data\.crop: .*'axb' \(DS103\)"),
    "a value of thousands of digits": (
        ["train", "--model.depth", "9" * 5000],
        "--model.depth is a whole number of thousands of digits",
    ),
    "a value that refers to itself": (
        ["train", "--loss.class_weights", "&a [*a]"],
        r"--loss\.class_weights .*\(DS306\)",
    ),
    "a value nested without end": (
        ["train", "--data.augment", "[" * 50000],
        r"--data\.augment .*\(DS306\)",
    ),
    # config files
    "a config that is not there": (file("nowhere.yaml"), r"'nowhere\.yaml' .*\(DS308\)"),
    "a folder for a config": (file("images"), r"'images' is a folder.*\(DS307\)"),
    "a pipe for a config": (file("pipe"), r"'pipe' is a pipe.*\(DS307\)"),
    "a device for a config": (file("/dev/zero"), r"'/dev/zero' is a .*device.*\(DS307\)"),
    "a picture for a config": (file("images/a.png"), r"'images/a\.png' .*\(DS310\)"),
    "a name of two lines": (file("a\nb.yaml"), r"'a\\nb\.yaml' .*\(DS308\)"),
    "an empty config": (file("nothing.yaml"), r"nothing\.yaml .*\(DS301\)"),
    "a list for a config": (file("list.yaml"), r"list\.yaml, line 1: .*\(DS313\)"),
    "words for a config": (file("text.yaml"), r"text\.yaml, line 1: .*\(DS313\)"),
    "a tab": (file("tab.yaml"), r"tab\.yaml, line 2: .*cannot start any token.*\(DS302\)"),
    "a bracket left open": (file("open.yaml"), r"open\.yaml, line 2: .*\(DS302\)"),
    "two documents": (file("two.yaml"), r"two\.yaml, line 2: .*single document.*\(DS302\)"),
    "a field twice": (file("twice.yaml"), r"twice\.yaml, line 3: 'depth' .*line 2 .*\(DS315\)"),
    "a section twice": (
        file("section-twice.yaml"),
        r"section-twice\.yaml, line 2: 'model' .*line 1 .*\(DS315\)",
    ),
    "a section misspelt": (
        file("section.yaml"),
        r"section\.yaml, line 1: 'modle' .* model[?] \(DS316\)",
    ),
    "a field misspelt": (
        file("field.yaml"),
        r"field\.yaml, line 2: 'model\.dpth' .* model\.depth[?] \(DS316\)",
    ),
    "words for a number in a file": (
        file("value.yaml"),
        "value.yaml, line 2: model.depth takes a whole number or null, got 'deep'",
    ),
    "nothing where something must be": (
        file("null.yaml"),
        "null.yaml, line 2: mesh.samples takes a whole number, got 'None'",
    ),
    "a list for a number": (
        file("list-for-number.yaml"),
        r"list-for-number.yaml, line 2: model.depth takes a whole number or null, got '\[1, 2\]'",
    ),
    "fields for a number": (
        file("fields-for-number.yaml"),
        r"fields-for-number\.yaml, line 2: model\.depth .*\(DS317\)",
    ),
    "a number for a section": (
        file("number-for-section.yaml"),
        r"number-for-section\.yaml, line 1: a field of model .*\(DS313\)",
    ),
    "a tag that would run": (
        file("tag.yaml"),
        r"tag\.yaml, line 2: .*'tag:yaml\.org,2002:python/object/apply:os\.system' .*\(DS312\)",
    ),
    "a class to import": (
        file("class.yaml"),
        r"class\.yaml, line 2: 'model\.class_path' .* name, args, pad, depth.*\(DS316\)",
    ),
    "a billion laughs": (file("laughs.yaml"), r"laughs\.yaml, line 1: 'l0' .*\(DS316\)"),
    "a section that holds itself": (
        file("itself.yaml"),
        r"itself\.yaml, line 2: model\.depth .*\(DS317\)",
    ),
    "laughs in quotes": (file("quoted-laughs.yaml"), r"--loss\.class_weights .*\(DS306\)"),
    "a deep file": (file("deep.yaml"), r"deep\.yaml, line 1: .*\(DS311\)"),
    "a deep value": (file("deep-value.yaml"), r"class_weights (takes a list|.*\(DS306\))"),
    "digits in a file": (
        file("digits.yaml"),
        "digits.yaml, line 2: model.depth is a whole number of thousands of digits",
    ),
    "no number at all": (file("nan.yaml"), r"optim\.lr .*got nan \(DS105\)"),
    "a file too large": (file("large.yaml"), r"'large\.yaml' .*\(DS309\)"),
    # settings that cannot be
    "no threads": (["train", "--run.threads", "-1"], r"run\.threads .*got -1 \(DS107\)"),
    "a limit that is none": (
        ["train", "--run.timeout", ".nan"],
        r"run\.timeout .*got nan \(DS105\)",
    ),
    "an endless limit": (
        ["train", "--train.max_minutes", ".inf"],
        r"train\.max_minutes is inf.*\(DS106\)",
    ),
    "memory without a number": (["train", "--memory", "lots"], r"memory .*'lots' \(DS104\)"),
    "memory without end": (["train", "--memory", "9" * 400], r"memory .*9{400} \(DS104\)"),
    "an output of no name": (["train", "--train.output", ""], r"train\.output is ''.*\(DS108\)"),
    "images without number": (
        ["train", "--data.images", "1000000", "--train.accumulate", "1000000"],
        r"train\.accumulate 1000000 x data\.images 1000000 are 1000000000000 .*\(DS202\)",
    ),
    # settings without effect
    "class weights of dice": (
        verify(loss__name="dice", loss__class_weights="[1, 2, 1]"),
        r"loss.class_weights is \[1.0, 2.0, 1.0\], but no term of loss.name 'dice' uses it: add cross_entropy or focal",
    ),
    "class weights of binary cross-entropy": (
        verify(loss__name="binary_cross_entropy + dice", loss__class_weights="[1, 2, 1]"),
        "loss.class_weights is .*add cross_entropy or focal to loss.name, or leave",
    ),
    "label smoothing of focal": (
        verify(loss__name="focal", loss__label_smoothing="0.1"),
        "loss.label_smoothing is 0.1, but no term of loss.name 'focal' uses it: add cross_entropy",
    ),
    "gamma of cross-entropy": (
        verify(loss__gamma="3"),
        "loss.gamma is 3.0, but no term of loss.name 'cross_entropy' uses it: add focal",
    ),
    "smooth of cross-entropy": (
        verify(loss__smooth="3"),
        "loss.smooth is 3.0, but no term .*: add dice",
    ),
    "dice over nothing": (
        verify(loss__dice_over="batch"),
        "loss.dice_over is batch, but no term .*: add dice",
    ),
    "a term of no weight": (
        verify(loss__name="0*dice"),
        "the weight 0 of dice in '0[*]dice' is not above 0",
    ),
    "a term of negative weight": (
        verify(loss__name="cross_entropy + -1*dice"),
        "the weight -1 of dice in .* is not above 0",
    ),
    "momentum of Adam": (verify(optim__momentum="0.5"), r"optim\.momentum .*\(DS201\)"),
    "groups of instance norm": (verify(model__groups="2"), r"model\.groups .*\(DS211\)"),
    "tiles and memory": (
        verify(spatial__tiles_per_rank="2x2", streaming__memory="4GB"),
        r"spatial\.tiles_per_rank .*\(DS226\)",
    ),
    # verify
    "a mesh that the ranks do not fill": (
        verify(mesh__tiles="1x2"),
        r"needs 2 ranks, but 1 is running: launch 2 \(mpirun -n 2 ...",
    ),
    "a grid too fine": (
        verify(spatial__tiles_per_rank="9x2"),
        "grid of 9x2 tiles is too fine for an image of 29x43 .* stride 4x4, so the largest grid that fits is 8x11",
    ),
    "a grid of other dims": (
        verify(spatial__tiles_per_rank="1x1x2", mesh__tiles="1x1x1"),
        r"spatial\.tiles_per_rank is 1x1x2, .*\(29x43\).* as 1x1 \(DS401\)",
    ),
    "pipelines": (verify(mesh__stages="2"), "2.*stages|needs 2 ranks"),
    "no samples": (verify(mesh__samples="0"), r"mesh\.samples .*got 0 \(DS105\)"),
    "an unknown model": (
        verify(model__name="resnet"),
        "unknown model 'resnet': choose unet, .*package.module:function",
    ),
    "a model that is not there": (
        verify(model__name="nowhere:model"),
        "'nowhere:model' cannot be imported",
    ),
    "an unknown norm": (verify(model__norm="layer"), "model.norm.*instance.*batch.*group.*none"),
    "dropout of everything": (
        verify(model__dropout="1"),
        r"model.dropout must be a probability in \[0, 1\), got 1",
    ),
    "negative dropout": (verify(model__dropout="-0.1"), "model.dropout must be a probability"),
    "odd base_channels": (
        verify(model__base_channels="5"),
        "model.base_channels must be even .*, got 5",
    ),
    "depth 0": (
        verify(model__depth="0"),
        "model.depth must be a whole number of at least 1, got 0",
    ),
    "a depth beyond all": (verify(model__depth="99"), "model.depth must be at most 20, got 99"),
    "a width beyond all": (
        verify(model__depth="20"),
        "model.base_channels 4 with model.depth 20 makes 4194304 channels at the bottom",
    ),
    "an unknown loss": (
        verify(loss__name="dicee"),
        "loss.name: unknown loss 'dicee' in 'dicee': choose cross_entropy",
    ),
    "the syntax of a sum": (
        verify(loss__name="half*dice"),
        "'half' in 'half[*]dice' is not a number: write for example 'cross_entropy [+] 0.5[*]dice'",
    ),
    "cross-entropy of one output": (
        verify(model__out_channels="1"),
        "cross_entropy needs at least 2 classes, but the model has 1 output: use binary_cross_entropy or dice",
    ),
    "too few class weights": (
        verify(loss__class_weights="[1, 2]", model__out_channels="3"),
        "class_weights has 2 numbers, but the model has 3 classes",
    ),
    "label smoothing of more than all": (
        verify(loss__label_smoothing="1.5"),
        "loss.label_smoothing .*1.5",
    ),
    "frozen statistics that are not there": (
        verify(spatial__frozen_norm="true"),
        r"spatial\.frozen_norm .*enc0_norm0 .*\(DS223\)",
    ),
    "a negative halo": (
        verify(approximate__halo="-4", spatial__tiles_per_rank="1x2"),
        r"approximate\.halo .*got -4 \(DS105\)",
    ),
    "an exchange of nothing": (
        verify(spatial__exchange_every="0"),
        r"spatial\.exchange_every .*'0' \(DS115\)",
    ),
    "an exchange of a digit that is not a number": (
        verify(spatial__exchange_every="²"),
        r"spatial\.exchange_every .*'²' \(DS115\)",
    ),
    "a halo and an exchange": (
        verify(spatial__exchange_every="2", approximate__halo="4"),
        r"approximate\.halo is 4, .*spatial\.exchange_every 2 .*\(DS221\)",
    ),
    "windows and an exchange": (
        verify(spatial__exchange_every="1", approximate__norms="window"),
        r"approximate\.norms is window, .*\(DS221\)",
    ),
    "attention in an exchange": (
        verify(**own("attending"), spatial__exchange_every="1"),
        r"cannot be computed on parts of an image: |layer 1 \(Attention\) is not known to work pixel by pixel and has no distributed counterpart",
    ),
    "attention in tiles": (
        verify(**own("attending"), spatial__tiles_per_rank="1x2"),
        r"cannot be computed on parts of an image: \w+ in 1 \(test_bad_inputs.py, line \d+\) .*split samples only",
    ),
    "numbers drawn by a layer": (
        verify(**own("noisy"), streaming__tiles="1x2"),
        r"this network cannot be trained exactly: rand_like in 1 \(test_bad_inputs.py, line \d+\) draws random numbers.*use nn.Dropout",
    ),
    "different functions for different image sizes": (
        verify(**own("turned"), streaming__tiles="1x2"),
        "the network calls different functions for different image sizes",
    ),
    "a warmup of more than all": (verify(optim__warmup="2"), r"optim\.warmup .*got 2.* \(DS107\)"),
    "more crops than all": (
        verify(data__focus_share="50"),
        r"data\.focus_share .*got 50.* \(DS107\)",
    ),
    "no micro-batches": (verify(train__accumulate="0"), r"train\.accumulate .*got 0 \(DS105\)"),
    "no images": (verify(data__images="0"), r"data\.images .*got 0 \(DS105\)"),
    "one pixel a channel": (
        verify(image="4x4"),
        "mid_norm0: a norm needs at least 2 values per channel, but .* has 1: take a larger image or crop, or a smaller model.depth",
    ),
    "an image beyond memory": (
        verify(image="1000000x1000000"),
        r"a step of 1 images of 1000000x1000000 .* takes .* GB .*: give a smaller --image",
    ),
    "an image of other dims": (
        verify(image="29x43x5", model__dims="2"),
        r"image.* 29x43x5|29x43x5",
    ),
    "pooling of the whole image": (
        verify(**own("pooling"), spatial__tiles_per_rank="1x2"),
        "the network's result has the shape 2x3x29x43 for images of 192x320 pixels, but a segmentation network keeps the size, .*split samples only",
    ),
    "circular padding": (
        verify(**own("circular"), spatial__tiles_per_rank="1x2"),
        "circular padding joins opposite borders .*use zeros",
    ),
    "layer norm": (
        verify(**own("layer_norm"), spatial__tiles_per_rank="1x2"),
        r"layer 1 \(LayerNorm\) looks at the whole image and has no distributed counterpart: replace it",
    ),
    "nothing to verify on": (
        verify(image=None),
        "there are no images: give --image 97x131 for random ones, or --data.store PATH",
    ),
    "a tilt of plane images": (
        verify(data__augment_tilt="[-5, 5]"),
        r"data.augment_tilt is \[-5.0, 5.0\], but random images of --image have 2 dims .* leave",
    ),
    "a store that is not there": (verify(image=None, data__store="/nowhere.h5"), "/nowhere.h5"),
    "no learning": (verify(optim__lr="-1"), r"optim\.lr .*got -1.* \(DS105\)"),
    "no tolerance": (
        verify(tolerance=".nan"),
        "--tolerance, the largest relative error that passes, must be .*got nan",
    ),
    "a dump into a folder": (
        verify(dump="images"),
        "--dump is images, which is a folder: name a file in it",
    ),
    "a dump through a file": (
        verify(dump="words.txt/x"),
        "--dump is words.txt/x, but words.txt is a file",
    ),
    # a user's own network
    "a network nowhere": (
        ["models", "nowhere:net"],
        "'nowhere:net' cannot be imported: there is no module nowhere: start in the folder that holds it",
    ),
    "a network inside nowhere": (["models", "nets.deep:net"], "there is no module nets.deep"),
    "a network of wrong syntax": (
        ["models", "wrong:net"],
        "its module fails with SyntaxError: .*wrong.py, line 1",
    ),
    "a network that needs another package": (
        ["models", "imports:net"],
        "ModuleNotFoundError: No module named 'a_package_that_is_nowhere' .*imports.py, line 1.: fix it, or install what it needs",
    ),
    "a module that leaves": (
        ["models", "leaves:net"],
        "its module fails with SystemExit: 0 .*leaves.py, line 1",
    ),
    "a network that is none": (
        ["models", "nets:value"],
        "'nets:value' cannot be imported: value is a int, not a function, in .*nets.py: choose plain",
    ),
    "a function that is not there": (
        ["models", "nets:missing"],
        "there is no missing in .*nets.py: choose plain, needs",
    ),
    "a name of two colons": (
        ["models", "nets:a:b"],
        "model.name is 'nets:a:b', but your own function is written as package.module:function",
    ),
    "a function of other arguments": (
        ["models", "nets:needs"],
        r"'nets:needs' takes \(width\), but is called with no arguments",
    ),
    "a network without depth": (
        [
            "train",
            "--data.store",
            "store.h5",
            "--train.output",
            "new",
            "--model.name",
            "nets:plain",
            "--model.depth",
            "2",
        ],
        "'nets:plain' takes .*is called with depth=2.*leave out of the config what it does not take",
    ),
    "a function that fails": (
        ["models", "nets:fails"],
        "model 'nets:fails' cannot be built: KeyError: 'boom' .*nets.py, line 6",
    ),
    "a function that leaves": (["models", "nets:leaves"], "cannot be built: SystemExit: 0"),
    "a function of nothing": (
        ["models", "nets:none"],
        "'nets:none' returns a value of type NoneType, but it must return a torch.nn.Module",
    ),
    "a network of dicts": (
        ["models", "nets:dict_"],
        "the model returns a dict, but a segmentation network returns one tensor of logits",
    ),
    "a network that fails": (
        ["models", "nets:broken"],
        "AttributeError: 'Broken' object has no attribute 'missing' .*nets.py, line",
    ),
    "a network that shrinks": (
        ["models", "nets:shrinks"],
        "comes out as .*but a segmentation network keeps the size",
    ),
    "a network without convolutions": (
        ["models", "nets:blind"],
        "this model has no convolution layer",
    ),
    # plan
    "no stages": (
        ["plan", "--stages", "0"],
        "--stages must be a whole number from 1 to 1000000, got 0",
    ),
    "more stages than layers": (
        ["plan", "--model", "tiny", "--stages", "99"],
        r"of 29 layers cannot be cut into 99 stages \(--stages\): choose 1 to 29",
    ),
    "a tile of other dims": (
        ["plan", "--model", "tiny", "--tile", "8x8x8"],
        "--tile is 8x8x8, of 3 dims, but the model's images have 2",
    ),
    "a tile too small": (
        ["plan", "--model", "tiny", "--stages", "2", "--tile", "1"],
        r"model tiny cannot be planned on 1 windows of 1x1 pixels \(--tile, --batch\): ",
    ),
    "a tile too large": (
        ["plan", "--model", "tiny", "--stages", "2", "--tile", "99999999999"],
        "--tile is 99999999999x99999999999, more than",
    ),
    "an unknown device": (
        ["plan", "--model", "tiny", "--device", "tpu", "--stages", "2"],
        "unknown --device 'tpu': choose v100, cpu",
    ),
    "no schedule": (["plan", "--schedule", "chaos"], "invalid choice: 'chaos'"),
    # prepare
    "reference to an example": (
        ["prepare", "blue-marble", "new.h5", "--reference"],
        "--reference is for folders of images, but the source is blue-marble",
    ),
    "no classes": (FOLDER[:5], "prepare needs --classes, the names in the order of their labels"),
    "classes for another source": (
        ["prepare", "blue-marble", "new.h5", "--classes", "a,b"],
        "--classes is for folders of images, but the source is blue-marble",
    ),
    "a size for a folder": (
        [*FOLDER, "--size", "8x8"],
        "--size is for the sources gigapixel and ultramnist, not for images: leave --size out",
    ),
    "a size of no pixels": (
        ["prepare", "gigapixel", "new.h5", "--size", "0x8"],
        r"--size: .*'0x8' \(DS102\)",
    ),
    "values without masks": (
        ["prepare", "images", "new.h5", "--classes", "a,b", "--values", "255=1"],
        "--values 255=1 is about masks, but no masks are given: give --masks",
    ),
    "an attribute without masks": (
        ["prepare", "images", "new.h5", "--classes", "a,b", "--attribute", "kind"],
        "--attribute kind is about masks, but no masks are given: give --masks",
    ),
    "an attribute of masks without polygons": (
        [*FOLDER, "--attribute", "kind"],
        "--attribute is kind, .*is no vector file: leave --attribute out",
    ),
    "a raster file for all masks": (
        ["prepare", "images", "new.h5", "--classes", "a,b", "--masks", "images/a.png"],
        "--masks is the file images/a.png, but must be the folder of the masks, or one file of poly",
    ),
    "names of classes without an attribute": (
        [*FOLDER, "--values=lake=1"],
        "--values must be written as .*got 'lake=1'; names of classes .* need --attribute",
    ),
    "values of no form": (
        [*FOLDER, "--values", "255"],
        r"--values must be written as 255=1,128=2 \(mask value=label\), got '255'",
    ),
    "a value twice": (
        [*FOLDER, "--values=1=1,1=0"],
        "--values 1=1,1=0 gives the mask value 1 two labels, 1 and 0: leave one of them out",
    ),
    "a pipe for a store": (
        ["prepare", "images", "pipe", "--classes", "a,b", "--overwrite"],
        "pipe is a pipe or device, which no file may replace: choose another output",
    ),
    "an image for a store": (
        ["prepare", "images", "images/a.png", "--classes", "a,b", "--overwrite"],
        "the store images/a.png would replace images/a.png, from which it is made",
    ),
    "shares of no number": (
        [*FOLDER, "--split", "nan,nan,nan"],
        "--split must be three shares that add up to 1, .*got 'nan,nan,nan'",
    ),
    "a folder of images that is none": (
        ["prepare", "words.txt", "new.h5", "--classes", "a,b"],
        "words.txt",
    ),
    "a store that is a folder": (
        ["prepare", "images", "masks", "--classes", "a,b"],
        "the store is masks, which is a folder: name a file in it",
    ),
    "a store that is there": (
        ["prepare", "images", "store.h5", "--masks", "masks", "--classes", "a,b"],
        "store.h5 already exists",
    ),
    # train
    "no store": (
        ["train", *SMALL],
        "data.store is not set: name the HDF5 store that 'distseg prepare' wrote",
    ),
    "a store of words": ([*TRAIN, "--data.store", "words.txt"], "words.txt is not an HDF5 file"),
    "an output that is a file": (
        [*TRAIN, "--train.output", "words.txt"],
        "train.output is words.txt, but words.txt is a file",
    ),
    "an output in a file": (
        [*TRAIN, "--train.output", "words.txt/run"],
        "train.output is words.txt/run, but .*words.txt is a file, not a folder: give a path that does not contain this file",
    ),
    "another ignore value than the store's": (
        [*TRAIN, "--loss.ignore_index", "3"],
        r"loss\.ignore_index is 3, .*store\.h5 .*--ignore 3 \(DS406\)",
    ),
    "other bands than the store's": (
        [*TRAIN, "--model.in_channels", "5"],
        "model.in_channels is 5, but the data has 2",
    ),
    "no such class": ([*TRAIN, "--data.crop", "8x8", "--data.focus_class", "moon"], "moon"),
    "a crop of other dims": (
        [*TRAIN, "--data.crop", "8"],
        "data.crop is 8, but image .* has 2 dims",
    ),
    "a network of other bands": (
        [*TRAIN[:5], "--model.name", "nets:seven"],
        "model 'nets:seven' does not take images of 2 bands: .*: let it take the argument in_channels",
    ),
    "a network of other classes": (
        [*TRAIN[:5], "--model.name", "nets:two"],
        "model 'nets:two' returns 2 channels, but 3 are needed, one for each class: let it take the argument out_channels",
    ),
    "a network of other classes without data": (
        ["verify", "--image", "16x16", "--model.name", "nets:two", "--model.out_channels", "4"],
        "model 'nets:two' returns 2 channels, but 4 are needed",
    ),
    "a scratch folder nowhere": (
        [*TRAIN, "--memory", "4GB", "--streaming.scratch", "nowhere"],
        r"streaming\.scratch is nowhere, .*\(DS125\)",
    ),
    "no GPU": (
        [*TRAIN, "--run.device", "cuda"],
        "run.device is cuda, but this node shows no GPU to PyTorch: set run.device to cpu or auto",
    ),
    # runs of others
    "no run": (
        ["evaluate"],
        "give the folder of a run or of a checkpoint as the first argument: distseg evaluate RUN",
    ),
    "a run that is not there": (["evaluate", "nowhere"], "no checkpoint in nowhere: train first"),
    "a store for a run": (["predict", "store.h5"], "store.h5"),
    "code in a manifest": (
        ["evaluate", "with-code"],
        "with-code was trained with the network os:system: its manifest may come from anywhere, .* add --model.name os:system",
    ),
    "code in a manifest to predict": (
        ["predict", "with-code", "--output", "new"],
        "add --model.name os:system",
    ),
    "code other than the manifest's": (
        ["evaluate", "with-code", "--model.name", "nets:plain"],
        "trained with the network os:system, not nets:plain: .* add --model.name os:system",
    ),
    "code where the manifest has none": (
        ["evaluate", "run", "--model.name", "nets:plain"],
        "model.name is nets:plain, but run was trained with unet: leave --model.name out",
    ),
    "a class in a manifest": (
        ["evaluate", "with-class"],
        "with-class: the network in manifest.json has the setting class_path, which this version of distseg does not know",
    ),
    "a manifest without a network": (
        ["evaluate", "with-no-model"],
        "with-no-model: manifest.json names no network",
    ),
    "a manifest without a name": (
        ["evaluate", "with-no-name"],
        "with-no-name: manifest.json names no network",
    ),
    "a manifest of words": (
        ["evaluate", "with-deep"],
        "with-deep, config in manifest.json: model.depth takes a whole number or null, got 'deep'",
    ),
    "a nested manifest": (
        ["evaluate", "with-nested"],
        r"with-nested, config in manifest\.json: model\.depth .*\(DS304\)",
    ),
    "a manifest of digits": (["evaluate", "with-huge"], r"model\.depth .*got 10{30} \(DS107\)"),
    "a manifest of no stages": (["evaluate", "with-no-stages"], r"mesh\.stages .*got 0 \(DS105\)"),
    "a manifest's tile": (
        ["evaluate", "with-tile"],
        r"with-tile, config in manifest\.json: predict\.tile: .*'0x8' \(DS102\)",
    ),
    "a manifest's tile of other dims": (
        ["evaluate", "with-tile-of-one"],
        r"predict\.tile is 8, .*\(DS401\)",
    ),
    "a manifest's formats": (
        ["predict", "with-formats", "--output", "new"],
        "with-formats, config in manifest.json: predict.formats takes one of",
    ),
    "a manifest's pipe": (["evaluate", "with-pipe"], "pipe"),
    "another network than the run's": (
        ["evaluate", "run", "--model.depth", "3"],
        "model.depth is 3, but run was trained with 1: leave --model.depth out",
    ),
    "no such split": (["evaluate", "run", "--split", "holdout"], "no split 'holdout': choose"),
    "scores into a pipe": (
        ["evaluate", "run", "--output", "pipe"],
        "pipe is a pipe or device, which no file may replace: choose another output",
    ),
    "scores into a folder": (
        ["evaluate", "run", "--output", "images"],
        "--output is images, which is a folder",
    ),
    "a split of image files": (
        ["predict", "run", "--images", "images/a.png", "--split", "test", "--output", "new"],
        "--split test names images of the store, but --images names image files",
    ),
    "an image that is not there": (
        ["predict", "run", "--images", "nowhere.png", "--output", "new"],
        "nowhere.png",
    ),
    "words for an image": (
        ["predict", "run", "--images", "words.txt", "--output", "new"],
        "words.txt cannot be read as an image",
    ),
    "one format twice": (
        ["predict", "run", "--predict.formats", "[png, png]", "--output", "new"],
        r"predict\.formats .*png.*\(DS109\)",
    ),
    "stages for which there are no processes": (
        ["predict", "run", "--mesh.stages", "2", "--output", "new"],
        "mesh.stages is 2, which does not divide 1 process: start a multiple of 2 processes, or leave mesh.stages out",
    ),
    "scratch that is not there": (
        ["predict", "run", "--predict.scratch", "nowhere", "--output", "new"],
        "predict.scratch is nowhere, which is not a folder: make it, or name another",
    ),
    # plot and profile
    "curves of nothing": (
        ["plot", "curves", "nowhere"],
        "'nowhere' is no file: 'distseg plot curves' takes the folder of a run, or a log",
    ),
    "curves of a pipe": (["plot", "curves", "pipe"], "'pipe' is no file"),
    "curves of words": (["plot", "curves", "words.txt"], "words.txt holds no line of kind 'step'"),
    "curves of a part": (
        ["plot", "curves", "run", "--box", "1:2,3:4"],
        "--box 1:2,3:4 is for overlays, but curves are drawn: leave --box out, or plot overlay",
    ),
    "an overlay of no image": (
        ["plot", "overlay", "store.h5"],
        "an overlay needs the image: give --store",
    ),
    "an overlay of a store": (
        ["plot", "overlay", "other.h5", "--store", "store.h5"],
        "other.h5 is not a prediction .*: give the NAME.h5 that 'distseg predict' wrote",
    ),
    "one picture of two": (
        ["plot", "overlay", "store.h5", "other.h5", "--output", "new.png"],
        "--output new.png names one picture, but there are 2 predictions",
    ),
    "no steps to profile": (
        ["profile", "--image", "9x11", "--steps", "0", *SMALL],
        "--steps must be a whole number from 1 to 1000000, got 0",
    ),
    "a profile into a file": (
        ["profile", "--image", "9x11", "--output", "words.txt", *SMALL],
        "--output is words.txt, but words.txt is a file",
    ),
    "a calibration of no time": (
        ["calibrate", "--seconds", "0"],
        "--seconds must be a number above 0, such as 60, got 0.0",
    ),
    "a profile of no images": (["profile", *SMALL], "there are no images: give --image"),
    # bench
    "a bench of what is not there": (
        ["bench", "strnog"],
        "distseg bench has no 'strnog': choose strong, weak, .*Did you mean strong",
    ),
    "a bench of no images": (["bench", "strong", *SMALL], "there are no images: give --image"),
    "a bench of no repeats": (
        ["bench", "halo", "--repeats", "0"],
        "--repeats must be a whole number from 1 to 1000000, got 0",
    ),
    "a bench of reading without a store": (
        ["bench", "io"],
        "bench io reads the crops of a store, but there is none: give --data.store PATH",
    ),
    "a store whose images should grow": (
        ["bench", "weak", "--data.store", "store.h5", *SMALL],
        "the images of a store have their sizes: give --image 512x512 for random images, or --axis",
    ),
    "a pipeline of a wrong schedule": (
        ["bench", "pipeline", "--schedules", "1f1b,gpip"],
        "--schedules has 'gpip': choose gpipe, 1f1b, zb-h1, .*Did you mean gpipe",
    ),
    "a pipeline of one rank": (
        ["bench", "pipeline", "--image", "16x16", *SMALL],
        "a pipeline needs two stages or more, but 1 rank",
    ),
    "halos exchanged at odd layers": (
        ["bench", "halo", "--every", "all,odd"],
        "exchange_every .*odd",
    ),
    "halos exchanged twice alike": (
        ["bench", "halo", "--every", "all,all"],
        "--every is 'all,all': give distinct words, joined by commas",
    ),
    "a bench into a file": (
        ["bench", "memory", "--output", "words.txt"],
        "--output is words.txt, but words.txt is a file",
    ),
    "results that are not there": (
        ["bench", "compare", "nowhere.json", "words.txt"],
        "nowhere.json",
    ),
    "a result of words": (
        ["bench", "compare", "words.txt", "words.txt"],
        "words.txt is not whole JSON .* measure again by distseg bench, or name another file",
    ),
    "a report on no folder": (
        ["bench", "report", "nowhere"],
        "nowhere is not a folder: give the folder of results, the --output of distseg bench",
    ),
    "a report on no results": (
        ["bench", "report", "images"],
        r"images has no result \(\*.json\): measure first, such as by distseg bench strong",
    ),
    "a bench on no machine": (
        ["bench", "strong", "--image", "16x16", "--machine", "a1000", *SMALL],
        "a1000.*Did you mean a100",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all that the table names."""
    from textwrap import dedent

    from distseg.comm.launch import world

    folder = tmp_path_factory.mktemp("place")
    draw = np.random.default_rng(0)
    for kind, shape, most in (("images", (20, 28, 2), 256), ("masks", (20, 28), 2)):
        (folder / kind).mkdir()
        for name in "abc":
            pixels = draw.integers(0, most, shape).astype(np.uint8)
            Image.fromarray(
                pixels if kind == "masks" else np.concatenate([pixels, pixels[..., :1]], 2)
            ).save(folder / kind / f"{name}.png")
    for name, text in {
        **CONFIGS,
        **{name: dedent(text) for name, text in MODULES.items()},
        "words.txt": "words\n",
    }.items():
        (folder / name).write_text(text)
    os.mkfifo(folder / "pipe")
    random_store(folder / "store.h5", train=[(20, 28)], val=[(20, 28)], test=[(20, 28)])
    shutil.copy(folder / "store.h5", folder / "other.h5")
    config = Config(
        model=ModelConfig(depth=1, num_convs=1, base_channels=4),
        data=DataConfig(store="store.h5", crop=Size("8x8"), epoch_samples=1),
        train=TrainConfig(epochs=1, validate_every=0, loggers=[], output="run"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(config, world())
        for name, changes in MANIFESTS.items():
            shutil.copytree(find("run"), f"with-{name}")
            _change(Path(f"with-{name}/manifest.json"), changes)
    return folder


def _change(path: Path, changes: dict) -> None:
    manifest = json.loads(path.read_text())
    for setting, value in changes.items():
        section, _, field = setting.partition(".")
        if field:
            manifest["config"][section][field] = value
        else:
            del manifest["config"][section]
    path.write_text(
        json.dumps({**manifest, "digest": digest_of(manifest)})
    )  # whoever changes it can do that as well


def contents(folder: Path) -> dict[str, str]:
    """A digest of each file, and the names of all."""
    files = {
        str(p.relative_to(folder)): p for p in folder.rglob("*") if "__pycache__" not in p.parts
    }
    return {
        name: sha256(p.read_bytes()).hexdigest() if p.is_file() else "" for name, p in files.items()
    }


def refused(capfd, arguments: list[str]) -> str:
    """The message of a command that is refused as it should be."""
    began = time.process_time()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    seconds = time.process_time() - began
    out, err = capfd.readouterr()
    assert (end.value.code, out) == (2, ""), (out, err)
    assert err.startswith("distseg: error: ") and "Traceback" not in err, err
    assert err.count("\n") == 1 and len(err) < 1000, err
    assert seconds < 10, f"{seconds:.1f} s of processor time"
    return err


@pytest.mark.parallel(1)
@pytest.mark.parametrize("mistake", TABLE)
def test_a_mistake_is_named_and_nothing_is_damaged(comm, capfd, monkeypatch, place, mistake):
    arguments, words = TABLE[mistake]
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = contents(place)
    err = refused(capfd, arguments)
    assert re.search(words, err), err
    assert contents(place) == before


def test_the_table_is_long_enough():
    assert len(TABLE) >= 180


@pytest.mark.parallel(1)
def test_what_stands_beside_the_mistakes_is_right(comm, capfd, monkeypatch, place):
    """The commands of the table are not refused for another reason."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for arguments in (
        ["models", "nets:plain"],
        ["plan", "--model", "tiny", "--stages", "2", "--tile", "16"],
        verify(),
        ["evaluate", "run"],
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert not end.value.code, (arguments, capfd.readouterr().err)


@pytest.mark.parallel(2)
def test_a_mistake_is_told_once_by_all_ranks_together(comm, capsys):
    with pytest.raises(SystemExit) as end:
        main(["verify", "--image", "29x43", "--mesh.tiles", "1x2", "--model.base_channels", "5"])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert err == (
        "distseg: error: model.base_channels must be even (the decoder's first level has half of it), got 5\n"
        if comm.rank == 0
        else ""
    )


@pytest.mark.parallel(1)
def test_horovod_that_is_not_installed(comm, capfd, monkeypatch):
    monkeypatch.setattr(reducer, "horovod_works", lambda: False)
    assert (
        "mesh.reducer is horovod, but Horovod with PyTorch is not installed: set it to mpi or auto"
        in refused(capfd, verify(mesh__reducer="horovod"))
    )


@pytest.mark.parametrize(
    "layer",
    [
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveMaxPool2d(1),
        nn.LayerNorm(4),
        nn.LocalResponseNorm(2),
        nn.AlphaDropout(),
    ],
)
def test_layers_without_a_twin_are_named(layer):
    model = unet(depth=1, num_convs=1, base_channels=4)
    reach = receptive_field(model)
    model.mid_act0 = layer
    with pytest.raises(
        ValueError,
        match=rf"layer mid_act0 \({type(layer).__name__}\) looks at the whole image and has no distributed counterpart",
    ):
        parallelize(model, reach)


def test_a_dropout_called_at_two_strides_is_refused():
    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.drop = nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.5)

        def forward(self, x):
            y = self.drop(nn.functional.max_pool2d(self.drop(self.conv(x)), 2))
            return nn.functional.interpolate(y, scale_factor=2.0)

    model = Reused()
    with pytest.raises(ValueError, match="drop is called on feature maps of different strides"):
        parallelize(model, receptive_field(model))
