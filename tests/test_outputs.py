"""Networks of several outputs with a loss each, and of several inputs: exact in every way, and predicted by the first output."""

import copy
from dataclasses import replace

import made_outputs
import numpy as np
import pytest
import torch
from made_store import random_store
from test_exact import TOLERANCE, config
from test_images import predictor_of, scene_of, whole_heat

import distseg
from distseg.cli.export import export
from distseg.cli.load import load_predictor
from distseg.cli.main import main
from distseg.comm.alone import Alone
from distseg.config.settings import (
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    PredictConfig,
    SpatialConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.data.store.store import Store
from distseg.inference.image_source import store_image
from distseg.layers.loss import Loss
from distseg.models.capture.capture import as_network
from distseg.models.joined import joined
from distseg.models.zoo import plain_model
from distseg.tiling.tile import Box
from distseg.training.loop import train
from distseg.training.patchgd.heat import heat_of
from distseg.training.verify import verify

WAYS = {  # name: (ranks, settings)
    "whole": (1, dict(images=2)),
    "tiles": (1, dict(tiles_per_rank=(2, 2))),
    "exchange": (1, dict(tiles_per_rank=(2, 2), exchange_every="1")),
    "in time": (1, dict(streamed=(2, 3))),
    "samples": (2, dict(samples=2)),
    "tiles on ranks": (2, dict(tiles="1x2", exchange_every="2")),
    "stages": (2, dict(stages=2, accumulate=2)),
    "zero bubble": (2, dict(stages=2, accumulate=3, schedule="zb-h1")),
    "stages, in time": (2, dict(stages=2, streamed=(2, 1))),
}
NETWORKS = {  # name: (its ends, the ways it is tried in)
    "Deep": (
        dict(outputs={"0": 1.0, "1": 0.5, "2": 0.25}),
        ("tiles", "in time", "stages", "tiles on ranks"),
    ),
    "Dict": (
        dict(outputs={"out": 1.0, "aux": 0.4}),
        ("exchange", "in time", "zero bubble", "samples"),
    ),
    "Training": (dict(outputs={"1": 1.0, "0": 0.3}), ("tiles", "stages, in time")),
    "Stacked": (dict(outputs={"0": 1.0, "1": 0.5, "2": 2.0}), ("exchange", "in time")),
    "Quarter": (dict(outputs={"0": 1.0, "1": 0.5}), ("tiles", "in time")),
    "Classifier": (dict(outputs={"logits": 1.0, "aux_logits": 0.4}), ("exchange", "in time")),
    "Inputs": (dict(inputs=[3, 1]), ("exchange", "in time", "stages")),
    "Both": (
        dict(inputs=[3, 1], outputs={"0": 1.0, "1": 0.5}),
        ("tiles", "in time", "zero bubble"),
    ),
    "Attending": (dict(outputs={"out": 1.0, "aux": 0.4}), ("whole", "samples")),
}


def model_of(name: str, **more) -> ModelConfig:
    return ModelConfig(
        f"{made_outputs.__name__}:{name}",
        **{"in_channels": 4, "out_channels": 3, **NETWORKS[name][0], **more},
    )


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=4)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy + 0.5*dice"])
def test_exact(comm, name, loss):
    for way, (ranks, settings) in ((way, WAYS[way]) for way in NETWORKS[name][1]):
        if ranks != comm.size:
            continue
        if name == "Quarter":
            cut = "streamed" if "streamed" in settings else "tiles_per_rank"
            settings = {**settings, "tiles": "1x1x1", cut: (2, 2, 1)}
        plan = replace(config(**settings, loss=loss), model=model_of(name))
        report = verify(plan, comm, Size("8x16x8" if name == "Quarter" else "24x36"))
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE, way


def test_the_loss_is_a_weighted_sum():
    logits, labels = torch.randn(2, 6, 5, 7, dtype=torch.float64), torch.randint(0, 3, (2, 5, 7))
    plan = LossConfig("cross_entropy + dice")
    one, both = Loss(plan, 3), Loss(plan, 3, (1.0, 0.4))
    wanted = one.value(one.rows(logits[:, :3], labels)) + 0.4 * one.value(
        one.rows(logits[:, 3:], labels)
    )
    torch.testing.assert_close(both.value(both.rows(logits, labels)), wanted, rtol=1e-14, atol=0)
    assert (
        both.counts(labels).shape == both.rows(logits, labels).shape and both.linear == one.linear
    )


@pytest.mark.parametrize(
    "name, ends, words",
    [
        (
            "Dict",
            dict(outputs={"out": 1.0, "deep": 0.4}),
            "names deep, but the network returns a dict of aux, out, sizes, in which deep is no tensor",
        ),
        ("Dict", dict(outputs={"sizes": 1.0}), "names sizes, but .* in which sizes is a list"),
        ("Deep", dict(outputs={"out": 1.0}), "names out, .* a list of 0, 1, 2"),
        (
            "Deep",
            dict(outputs={"0": 1.0, "1": 0.4}, args={"aux_channels": 5}),
            "output 1 of the network has shape 5x256x256, but 0 has 3x256x256",
        ),
        (
            "Inputs",
            dict(inputs=None, outputs={"0": 1.0}),
            "missing 1 required positional argument|cannot be",
        ),
        (
            "Inputs",
            dict(inputs=[3, 2]),
            r"model.inputs is \[3, 2\], together 5 bands, but images have 4",
        ),
        ("Inputs", dict(inputs=[4], outputs={"0": 1}), "missing 1 required positional argument"),
    ],
)
def test_ends_that_are_not_there_are_named(name, ends, words):
    with pytest.raises(ValueError, match=words):
        verify(
            replace(config(tiles_per_rank=(1, 2)), model=model_of(name, **ends)),
            Alone(),
            Size("24x36"),
        )


def test_outputs_are_named_by_numbers_on_a_command_line(capsys):
    words = "--model.name made_outputs:Deep --model.in_channels 4 --model.out_channels 3 --image 24x36 --spatial.tiles_per_rank 1x2"
    with pytest.raises(SystemExit) as end:
        main(["verify", *words.split(), "--model.outputs", "{0: 1, 1: 0.4}"])
    assert end.value.code == 0 and "exact: largest relative error" in capsys.readouterr().out


def test_one_tensor_has_no_outputs_to_name():
    with pytest.raises(
        ValueError,
        match="model.outputs names 0, but the network returns one tensor in training: leave model.outputs out",
    ):
        plain_model(
            ModelConfig("made_weights:Resampled", in_channels=3, out_channels=2, outputs={"0": 1.0})
        )


def test_evaluation_has_the_first_output_alone():
    for name in ("Training", "Both"):
        model = plain_model(model_of(name))
        network, x = as_network(model), torch.randn(1, 4, 16, 24)
        assert model.train()(x).shape[1] == network.train()(x).shape[1] == 6
        assert model.eval()(x).shape[1] == 3
        torch.testing.assert_close(network.eval()(x), model(x))


def test_heat_is_that_of_the_first_output():
    torch.manual_seed(0)
    plain = made_outputs.Classifier(4, 3).double().eval()
    source = scene_of(torch.randn(1, 4, 32, 48, dtype=torch.float64))
    alone, both = (
        joined(copy.deepcopy(plain), outputs=names)
        for names in (("logits",), ("logits", "aux_logits"))
    )
    wanted, found = (
        whole_heat(heat_of(model, predictor_of(model)), source) for model in (alone, both)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)
    assert wanted.max() > 0


@pytest.mark.parametrize("pad", [None, 8])
def test_a_run_predicts_by_the_first_output(tmp_path, pad):
    random_store(tmp_path / "store.h5", train=[(32, 48)], val=[(32, 32)])
    model = model_of("Training", in_channels=None, out_channels=None, pad=pad)
    run, taken = str(tmp_path / "run"), PredictConfig(tile=Size((16, 16)))
    spatial = SpatialConfig(tiles_per_rank=Size("1x2"))
    train(
        Config(
            model=model,
            data=DataConfig(store=str(tmp_path / "store.h5")),
            train=TrainConfig(epochs=1, output=run),
            mesh=MeshConfig(reducer="mpi"),
            spatial=spatial,
            predict=taken,
        ),
        Alone(),
    )
    loaded = distseg.load(run, made_outputs.Training(2, 3))
    predictor, _ = load_predictor(
        run,
        Config(model=model, predict=taken, train=TrainConfig(precision="fp32")),
        Alone(),
        torch.device("cpu"),
    )
    source = store_image(Store(tmp_path / "store.h5"), "val0")
    whole = (
        loaded.network(torch.from_numpy(source.read(Box.whole(source.size))).unsqueeze(0))[0]
        .detach()
        .numpy()
    )
    assert whole.shape == (3, 32, 32)
    for box, logits in predictor(source):
        np.testing.assert_allclose(logits, whole[(..., *box.slices)], rtol=1e-4, atol=1e-5)
    export(run, model, str(tmp_path / "out"), ["torch"])
