"""What a user gets wrong, and the words that must come back: what is wrong, both values, and the repair.

Every line of the table is `distseg verify` with these flags on one rank. Data has a table of its own.
"""

import re

import pytest
from torch import nn

from distseg.cli import main
from distseg.comm import reducer
from distseg.geometry.receptive import receptive_field
from distseg.models.unet import unet
from distseg.spatial.parallelize import parallelize

BASE = {"image": "29x43", "model.depth": "2", "model.num_convs": "1", "model.base_channels": "4"}
HERE = __name__


def pooling(in_channels=4, out_channels=2):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.AdaptiveAvgPool2d((29, 43)), nn.Conv2d(4, out_channels, 1))


def circular(in_channels=4, out_channels=2):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1, padding_mode="circular"), nn.Conv2d(4, out_channels, 1))


def layer_norm(in_channels=4, out_channels=2):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.LayerNorm([4, 29, 43]), nn.Conv2d(4, out_channels, 1))


def shared_norm(in_channels=4, out_channels=2):
    norm = nn.InstanceNorm2d(4)
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), norm, nn.Conv2d(4, 4, 3, padding=1), norm, nn.Conv2d(4, out_channels, 1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.body(x)


class Noise(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class HiddenNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def noisy(in_channels=4, out_channels=2):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), Noise(), nn.Conv2d(4, out_channels, 1))


def hiding(in_channels=4, out_channels=2):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), HiddenNorm(), nn.Conv2d(4, out_channels, 1))


def residual(in_channels=4, out_channels=2):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), Residual(), nn.Conv2d(4, out_channels, 1))


def nested(in_channels=4, out_channels=2):
    return Nested()


def own(function: str) -> dict:
    return {**{k: None for k in BASE if k.startswith("model")}, "model.name": f"{HERE}:{function}"}


TABLE = {
    "a mesh that the ranks do not fill": ({"mesh.tiles": "1x2"}, r"needs 2 ranks, but 1 is running: launch 2 \(mpirun -n 2 ...\)"),
    "a grid too fine": ({"spatial.tiles_per_rank": "9x2"}, "grid of 9x2 tiles is too fine for an image of 29x43 .* stride 4x4, so the largest grid that fits is 8x11"),
    "a grid of other dims": ({"spatial.tiles_per_rank": "1x1x2", "mesh.tiles": "1x1x1"}, r"image of 2 spatial dims \(29x43\) does not fit a grid of 3"),
    "pipelines": ({"mesh.stages": "2"}, "2.*stages|needs 2 ranks"),
    "no samples": ({"mesh.samples": "0"}, "mesh.samples is at least 1, got 0"),
    "an unknown model": ({"model.name": "resnet"}, "unknown model 'resnet': choose unet, .*package.module:function"),
    "a model that is not there": ({"model.name": "nowhere:model"}, "'nowhere:model' can not be imported"),
    "an unknown norm": ({"model.norm": "layer"}, "model.norm.*instance.*batch.*group.*none"),
    "dropout of everything": ({"model.dropout": "1"}, r"model.dropout is a probability in \[0, 1\), got 1"),
    "negative dropout": ({"model.dropout": "-0.1"}, "model.dropout is a probability"),
    "odd base_channels": ({"model.base_channels": "5"}, "model.base_channels is even .*, got 5"),
    "depth 0": ({"model.depth": "0"}, "model.depth is a whole number of at least 1, got 0"),
    "an unknown loss": ({"loss.name": "dicee"}, "loss.name: unknown loss 'dicee' in 'dicee': choose cross_entropy"),
    "the syntax of a sum": ({"loss.name": "half*dice"}, "'half' in 'half[*]dice' is no number: write for example 'cross_entropy [+] 0.5[*]dice'"),
    "cross-entropy of one output": ({"model.out_channels": "1"}, "cross_entropy needs at least 2 classes, but the model has 1 output: use binary_cross_entropy or dice"),
    "too few class weights": ({"loss.class_weights": "[1, 2]", "model.out_channels": "3"}, "class_weights has 2 numbers, but the model has 3 classes"),
    "label smoothing of more than all": ({"loss.label_smoothing": "1.5"}, "loss.label_smoothing .*1.5"),
    "frozen statistics that are not there": ({"spatial.frozen_norm": "true"}, r"enc0_norm0 \(instance norm\) has no running statistics to freeze: spatial.frozen_norm needs batch norm"),
    "a negative halo": ({"spatial.halo": "-4", "spatial.tiles_per_rank": "1x2"}, "spatial.halo .*-4"),
    "an exchange of nothing": ({"spatial.exchange_every": "0"}, "spatial.exchange_every is a whole number of layers from 1 on, level or all, got '0'"),
    "an exchange of something else": ({"spatial.exchange_every": "often"}, "spatial.exchange_every is .*got 'often'"),
    "a halo and an exchange": ({"spatial.exchange_every": "2", "spatial.halo": "4"}, "spatial.halo is 4, but with spatial.exchange_every 2 tiles have no halo"),
    "windows and an exchange": ({"spatial.exchange_every": "1", "spatial.norm_scope": "window"}, "norm_scope is window, but .* there are no windows"),
    "threads and an exchange": (
        {"spatial.exchange_every": "1", "pipeline.placement": "devices", "pipeline.devices": "[cpu, cpu]"},
        "spatial.exchange_every is 1, but with pipeline.placement devices .* set it to all, or put the stages on ranks",
    ),
    "a block in an exchange": ({**own("residual"), "spatial.exchange_every": "1"}, r"layer 1 \(Residual\) looks beyond a pixel and has no twin .* write it as layers"),
    "a module that is not flat in an exchange": ({**own("nested"), "spatial.exchange_every": "1"}, "only a flat nn.Sequential .* but this model is a Nested: flatten it"),
    "numbers drawn by a layer": (
        {**own("noisy"), "spatial.in_time": "recompute", "spatial.tiles_per_rank": "1x2"},
        r"layer 1 \(Noise\) draws random numbers, other ones each time a tile is computed: use nn.Dropout",
    ),
    "a norm inside a layer": (
        {**own("hiding"), "spatial.in_time": "spill", "spatial.tiles_per_rank": "1x2"},
        r"layer 1 \(HiddenNorm\) hides a BatchNorm2d, .*make it a layer of the flat nn.Sequential",
    ),
    "gradients clipped to less than nothing": ({"optim.clip": "-1"}, "optim.clip is a norm of gradients above 0, got -1"),
    "a warmup of more than all": ({"optim.warmup": "2"}, "optim.warmup is from 0 to 1, got 2"),
    "more crops than all": ({"data.focus_share": "50"}, "data.focus_share is from 0 to 1, got 50"),
    "no format": ({"predict.formats": "[]"}, "predict.formats is empty"),
    "no micro-batches": ({"train.accumulate": "0"}, "train.accumulate .*0"),
    "no images": ({"data.images": "0"}, "data.images .*0"),
    "one pixel a channel": ({"image": "4x4"}, "mid_norm0: a norm needs at least 2 values a channel, but .* has 1: take a larger image or crop, or a smaller model.depth"),
    "pooling of the whole image": (own("pooling"), "AdaptiveAvgPool2d|looks at the whole image|keeps the size"),
    "circular padding": (own("circular"), "circular padding joins opposite borders .*use zeros"),
    "layer norm": (own("layer_norm"), r"layer 1 \(LayerNorm\) looks at the whole image and has no distributed twin: replace it"),
    "one norm at two places": (own("shared_norm"), "layers 1 and 3 are one and the same InstanceNorm2d"),
    "nothing to verify on": ({"image": None}, "there are no images: give --image 97x131 for random ones, or --data.store PATH"),
    "a store that is not there": ({"image": None, "data.store": "/nowhere.h5"}, "/nowhere.h5"),
    "no learning": ({"optim.lr": "-1"}, "(?i)learning rate|optim.lr"),
}


def refused(capsys, flags: dict) -> str:
    arguments = [text for field, value in {**BASE, **flags}.items() if value is not None for text in (f"--{field}", value)]
    with pytest.raises(SystemExit) as end:
        main(["verify", *arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, ""), out
    assert err.startswith("distseg: error: ") and "Traceback" not in err, err
    return err


@pytest.mark.parallel(1)
@pytest.mark.parametrize("mistake", TABLE)
def test_a_mistake_is_named(comm, capsys, mistake):
    flags, words = TABLE[mistake]
    err = refused(capsys, flags)
    assert re.search(words, err), err


@pytest.mark.parallel(2)
def test_a_mistake_is_told_once_by_all_ranks_together(comm, capsys):
    with pytest.raises(SystemExit) as end:
        main(["verify", "--image", "29x43", "--mesh.tiles", "1x2", "--model.base_channels", "5"])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert err == ("distseg: error: model.base_channels is even (the decoder's first level has half of it), got 5\n" if comm.rank == 0 else "")


@pytest.mark.parallel(1)
def test_horovod_that_is_not_installed(comm, capsys, monkeypatch):
    monkeypatch.setattr(reducer, "horovod_works", lambda: False)
    assert "mesh.reducer is horovod, but Horovod with PyTorch is not installed: set it to mpi or auto" in refused(capsys, {"mesh.reducer": "horovod"})


@pytest.mark.parametrize("layer", [nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1), nn.LayerNorm(4), nn.LocalResponseNorm(2), nn.AlphaDropout()])
def test_layers_without_a_twin_are_named(layer):
    model = unet(depth=1, num_convs=1, base_channels=4)
    reach = receptive_field(model)
    model.mid_act0 = layer
    with pytest.raises(ValueError, match=rf"layer mid_act0 \({type(layer).__name__}\) looks at the whole image and has no distributed twin"):
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
