"""What is exported gives the trained network's logits without distseg, on images as they are in files."""

import json

import onnx
import onnx.reference
import pytest
import torch
from made_store import random_store
from safetensors.torch import load_file
from test_cli import run
from test_finetune import Net
from torch import nn

import distseg
from distseg.comm.alone import Alone
from distseg.config.settings import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from distseg.training.loop import train
from distseg.training.run_config import Normalised

SIZES = ((1, 36, 64), (3, 48, 20))
NETWORKS = {
    "own": (ModelConfig("test_finetune:Net", args={"width": 3}), lambda: Net(2, 3, 3)),
    "batch": (ModelConfig(depth=2, base_channels=4, num_convs=1, norm="batch"), lambda: None),
    "instance": (ModelConfig(depth=2, base_channels=4, num_convs=1, dropout=0.2), lambda: None),
}


@pytest.fixture(
    scope="module",
    params=["own", *(pytest.param(name, marks=pytest.mark.slow) for name in ("batch", "instance"))],
)
def exported(request, tmp_path_factory):
    """The folder of a run, what is exported of it, and the trained module."""
    folder = tmp_path_factory.mktemp(request.param)
    random_store(folder / "store.h5", train=[(32, 48)] * 2, val=[(32, 32)])
    model, own = NETWORKS[request.param]
    train(
        Config(
            model=model,
            data=DataConfig(store=str(folder / "store.h5")),
            mesh=MeshConfig(reducer="mpi"),
            train=TrainConfig(epochs=1, output=str(folder / "run")),
        ),
        Alone(),
    )
    flags = [
        str(folder / "run"),
        "--output",
        str(folder / "out"),
        "--formats",
        "safetensors",
        "torch",
        "onnx",
    ]
    with pytest.raises(SystemExit) as end:
        distseg_main(
            ["export", *flags, *(["--model.name", model.name] if ":" in model.name else [])]
        )
    assert not end.value.code
    return folder / "out", distseg.load(folder / "run", own(), normalise=False)


def distseg_main(arguments):
    from distseg.cli.main import main

    main(arguments)


def wanted(model: nn.Module, facts: dict, image: torch.Tensor) -> torch.Tensor:
    """Normalised by hand."""
    mean, std = (torch.tensor(facts[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return model((image - mean) / std).detach()


def test_weights_have_the_modules_names(exported):
    folder, model = exported
    found = load_file(folder / "model.safetensors")
    assert found.keys() == model.state_dict().keys() and all(
        torch.equal(x, found[name]) for name, x in model.state_dict().items()
    )


def test_programs_give_the_modules_logits_at_any_size(exported):
    folder, model = exported
    facts = json.loads((folder / "export.json").read_text())
    program, session = (
        torch.export.load(folder / "model.pt2").module(),
        onnx.reference.ReferenceEvaluator(onnx.load(folder / "model.onnx")),
    )
    assert (
        facts["bands"] == 2
        and facts["classes"] == ["ocean", "land", "lake"]
        and all(n in (2, 4) for n in facts["multiple"])
    )
    for n, height, width in SIZES:
        image = torch.rand(n, 2, height, width, generator=torch.Generator().manual_seed(n)) * 200
        logits = wanted(model, facts, image)
        assert logits.shape == (n, 3, height, width)
        torch.testing.assert_close(program(image), logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            torch.from_numpy(session.run(None, {"image": image.numpy()})[0]),
            logits,
            rtol=1e-3,
            atol=1e-3,
        )


def test_a_package_that_is_missing_is_named(exported, monkeypatch, capsys):
    folder, _ = exported
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = ["--model.name", "test_finetune:Net"] if "own" in str(folder) else []
    code, _, err = run(
        capsys,
        "export",
        str(folder.parent / "run"),
        *flags,
        "--output",
        str(folder),
        "--formats",
        "onnx",
    )
    assert code == 2 and "format onnx needs the package onnx: pip install onnx onnxscript" in err


def test_code_has_to_be_named_again(exported, capsys):
    folder, _ = exported
    code, _, err = run(
        capsys,
        "export",
        str(folder.parent / "run"),
        "--output",
        str(folder / "new"),
        "--model.name",
        "os:system",
    )
    assert (
        code == 2
        and ("leave --model.name out" in err or "was trained with the network" in err)
        and not (folder / "new").exists()
    )


class Unfollowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def forward(self, x):
        return self.conv(x) * float(x.mean())


def test_what_pytorch_can_not_follow_is_said():
    from distseg.cli.export import _program

    with pytest.raises(
        ValueError, match="torch.export cannot follow this network .*--formats safetensors"
    ):
        _program(Normalised(Unfollowed(), [0.0], [1.0]), 1, (4, 4))
