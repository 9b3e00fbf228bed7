"""What is begun with, what is frozen, what learns more slowly: arguments of one's own function, train.init, optim.rates, optim.thaw."""

from dataclasses import replace

import made_weights
import pytest
import torch
import torch.nn.functional as F
from made_store import random_store
from mpirunner.transport import NAME as TRANSPORT
from safetensors.torch import save_file
from test_exact import TOLERANCE, config
from torch import nn

import distseg
from distseg.comm.alone import Alone
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.zoo import build_model, plain_model
from distseg.runtime.optimizer import freeze, make_optimizer, of_part, set_learning_rate
from distseg.training.checkpoint.pretrained import of_bands, pretrained
from distseg.training.loop import train
from distseg.training.run import Run
from distseg.training.verify import verify


class Encoder(nn.Module):
    def __init__(self, bands, width):
        super().__init__()
        self.stem, self.norm, self.deep = (
            nn.Conv2d(bands, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, 2 * width, 3, padding=1),
        )

    def forward(self, x):
        first = F.relu(self.norm(self.stem(x)))
        return first, F.relu(self.deep(F.max_pool2d(first, 2)))


class Net(nn.Module):
    """As other packages name things: in_chans and classes."""

    def __init__(self, in_chans=3, classes=2, width=4, mode="nearest"):
        super().__init__()
        self.encoder, self.head, self.mode = (
            Encoder(in_chans, width),
            nn.Conv2d(3 * width, classes, 1),
            mode,
        )

    def forward(self, x):
        skip, deep = self.encoder(x)
        return self.head(
            torch.cat([skip, F.interpolate(deep, size=skip.shape[2:], mode=self.mode)], 1)
        )


NET = ModelConfig(f"{__name__}:Net", in_channels=3, out_channels=2)


def test_a_function_is_called_with_arguments_of_its_own():
    model = plain_model(ModelConfig(NET.name, args={"width": 6, "mode": "bilinear"}), 5, 3)
    assert (model.mode, model.encoder.stem.weight.shape, model.head.weight.shape) == (
        "bilinear",
        (6, 5, 3, 3),
        (3, 18, 1, 1),
    )
    assert plain_model(replace(NET, args={"in_chans": 3})).encoder.stem.in_channels == 3


def test_arguments_that_a_function_does_not_take_are_named():
    with pytest.raises(ValueError, match=r"is called with .*widht=6.*model.args"):
        plain_model(replace(NET, args={"widht": 6}))


@pytest.mark.parallel(4)
def test_a_step_with_frozen_and_slow_parts_is_exact(comm):
    plan = replace(
        config(tiles="1x2", stages=2),
        model=replace(NET, args={"width": 3}),
        optim=OptimConfig(
            "sgd", lr=0.1, rates={"encoder": 0.1, "encoder.stem": 0}, thaw={"head": 1}
        ),
    )
    report = verify(plan, comm, Size("32x48"))
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE
    if report:
        assert report["frozen"] == ["encoder.stem.weight", "encoder.stem.bias"]


def test_the_last_part_that_fits_holds():
    rates = {"encoder": 0.1, "encoder.layer*": 0.2, "encoder.layer2": 0}
    assert [
        of_part(rates, name, 1.0)
        for name in (
            "head.weight",
            "encoder.stem.weight",
            "encoder.layer1.0.weight",
            "encoder.layer2.0.weight",
            "encoder2.weight",
        )
    ] == [1.0, 0.1, 0.2, 0, 1.0]
    assert of_part(None, "a", 1.0) == 1.0


def test_parts_move_by_their_own_rates():
    names = ("fast.weight", "slow.weight", "late.weight")
    weights = {name: nn.Parameter(torch.ones(1)) for name in names}
    optimizer = make_optimizer(
        OptimConfig("sgd", lr=1.0, momentum=0.0, rates={"slow": 0.25}, thaw={"late": 2}), weights
    )
    moved = []
    for epoch in range(3):
        for w in weights.values():
            w.grad, w.data[:] = torch.ones(1), 1
        set_learning_rate(optimizer, 0.5, epoch)
        optimizer.step()
        moved.append([1 - w.item() for w in weights.values()])
    assert moved == [[0.5, 0.125, 0], [0.5, 0.125, 0], [0.5, 0.125, 0.5]]


def test_parts_that_are_not_there_are_named():
    with pytest.raises(
        ValueError,
        match="optim.rates names 'encoderr', but this network has no such part: its parameters begin with encoder, head",
    ):
        freeze(Net(), OptimConfig(rates={"encoderr": 0.1}))
    with pytest.raises(ValueError, match=r"optim\.rates has nan for a, .*\(DS118\)"):
        OptimConfig(rates={"a": float("nan")})


def test_names_are_those_of_the_users_module():
    """Where a captured network has others."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 2, 1))
    )
    network = as_network(model)
    freeze(network, OptimConfig(rates={"1.parametrizations": 0}))
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        "1.parametrizations.weight.original0",
        "1.parametrizations.weight.original1",
    ]


# weights to begin with


def saved(model: nn.Module, path, change=lambda tensors: None) -> str:
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    change(tensors)
    save_file(tensors, path)
    return str(path)


def loaded(path: str, model: nn.Module, renamed=None) -> tuple[dict, tuple[str, ...]]:
    """The module's tensors after its network took what is in a file, and what was told."""
    network = as_network(model)
    found = pretrained(path, network, renamed)
    found.load(network)
    return model.state_dict(), found.lines


def test_all_weights_of_a_file_are_taken(tmp_path):
    torch.manual_seed(1)
    source = Net()
    tensors, lines = loaded(saved(source, tmp_path / "a.safetensors"), Net())
    assert (
        all(torch.equal(tensors[name], x) for name, x in source.state_dict().items())
        and len(lines) == 1
        and lines[0].startswith("begins with 11 of its 11 tensors")
    )


class Siamese(nn.Module):
    """One encoder with a norm for both halves of the bands."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head((self.encoder(x[:, :2]) - self.encoder(x[:, 2:])).abs())


def test_layers_that_are_called_twice_are_loaded_once(tmp_path):
    torch.manual_seed(1)
    source = Siamese()
    source.encoder[1].running_mean.fill_(0.25)
    tensors, lines = loaded(saved(source, tmp_path / "a.safetensors"), Siamese())
    assert all(torch.equal(tensors[name], x) for name, x in source.state_dict().items())
    assert len(lines) == 1 and lines[0].startswith("begins with 9 of its 9 tensors"), lines


def test_an_encoder_alone_under_other_names(tmp_path):
    source, model = Encoder(3, 4), Net()
    before = model.head.weight.clone()
    tensors, lines = loaded(
        saved(source, tmp_path / "a.safetensors", lambda t: t.update(fc=torch.ones(2))),
        model,
        {"": "encoder."},
    )
    assert torch.equal(tensors["encoder.deep.weight"], source.deep.weight) and torch.equal(
        tensors["head.weight"], before
    )
    assert lines[1:] == (
        "no tensor in the file fits (initial values stay): head.weight, head.bias",
        "not used from the file: fc",
    )


def test_other_bands_and_classes(tmp_path):
    torch.manual_seed(2)
    source = Net()
    tensors, lines = loaded(saved(source, tmp_path / "a.safetensors"), Net(in_chans=4, classes=5))
    assert torch.equal(
        tensors["encoder.stem.weight"], of_bands(source.encoder.stem.weight.detach(), 4)
    )
    assert (
        "adapted: encoder.stem.weight from 3 bands to 4" in lines
        and "no tensor in the file fits (initial values stay): head.weight, head.bias" in lines
    )


def test_bands_of_streams_and_of_computed_weights(tmp_path):
    """Layers that read the image, or some of its bands, are adapted, and no others."""
    file = tmp_path / "w.safetensors"
    save_file({f"encoders.{n}.weight": torch.rand(4, 3, 3, 3) for n in range(2)}, file)
    model = as_network(made_weights.streams(3, 2))  # of two bands and one
    begun = pretrained(str(file), model)
    begun.load(model)
    assert (
        "adapted: encoders.0.weight from 3 bands to 2; encoders.1.weight from 3 bands to 1"
        in begun.lines
    )
    normed = "0.parametrizations.weight.original1"
    save_file({normed: torch.rand(6, 4, 3, 3)}, file)
    (said,) = [
        line
        for line in pretrained(str(file), as_network(made_weights.WeightNormed(3, 2))).lines
        if "adapted" in line
    ]
    assert said.startswith(f"adapted: {normed} from 4 bands to 3 (its weight is computed")
    save_file({"second.weight": torch.rand(12, 4, 3, 3)}, file)
    with pytest.raises(ValueError, match="belongs to another network: second.weight"):
        pretrained(
            str(file), as_network(made_weights.Deeper(8, 2))
        )  # whose second convolution has as many channels as the image


@pytest.mark.parametrize(
    "bands, wanted",
    [
        (1, [6.0]),
        (2, [1.5, 3.0]),
        (5, [0.6, 1.2, 1.8, 0.6, 1.2]),
        (6, [0.5, 1.0, 1.5, 0.5, 1.0, 1.5]),
    ],
)
def test_bands_are_repeated_and_scaled(bands, wanted):
    found = of_bands(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1), bands)
    torch.testing.assert_close(found, torch.tensor(wanted).view(1, bands, 1, 1))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.update({"encoder.deep.weight": torch.ones(8, 4, 5, 5)}),
            "belongs to another network: encoder.deep.weight is 8x4x5x5 in the file, and encoder.deep.weight is 8x4x3x3 here",
        ),
        (
            lambda t: t["head.weight"].view(-1)[:1].fill_(torch.nan),
            "has values in head.weight that are NaN or infinite",
        ),
        (
            lambda t: [t.pop(name) for name in list(t)] and t.update(other=torch.ones(1)),
            "has no weights of this network: its names are like other",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        loaded(saved(Net(), tmp_path / "a.safetensors", change), Net())


def test_pickles_and_damage_are_refused(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "a.pth")
    with pytest.raises(
        ValueError,
        match=r"a pickle .* may run code .* safetensors.torch.save_file\(torch.load\('a.pth', weights_only=True\), 'a.safetensors'\)",
    ):
        pretrained(str(tmp_path / "a.pth"), Net())
    (tmp_path / "b.safetensors").write_bytes(
        open(saved(Net(), tmp_path / "c.safetensors"), "rb").read()[:-8]
    )
    with pytest.raises(
        ValueError, match="train.init: .* damaged or cut off .*: copy the file again"
    ):
        pretrained(str(tmp_path / "b.safetensors"), Net())
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        pretrained(str(tmp_path / "nowhere.safetensors"), Net())


def plan(tmp_path, **train_settings) -> Config:
    store = tmp_path / "store.h5"
    if not store.exists():
        random_store(store, train=[(32, 48)] * 2, val=[(32, 32)])
    return Config(
        model=ModelConfig(f"{__name__}:Net"), data=DataConfig(store=str(store)), mesh=MeshConfig(reducer=TRANSPORT),
        train=TrainConfig(**{"epochs": 1, "output": str(tmp_path / "run"), **train_settings}),
    )  # fmt: skip


def test_a_run_begins_with_a_file_or_a_run(tmp_path):
    train(plan(tmp_path), Alone())
    trained = distseg.load(tmp_path / "run", Net(2, 3), normalise=False).state_dict()
    file = saved(
        distseg.load(tmp_path / "run", Net(2, 3), normalise=False), tmp_path / "a.safetensors"
    )
    for init in (file, str(tmp_path / "run")):
        begun = Run(plan(tmp_path, init=init, output=str(tmp_path / "next")), Alone())
        assert (
            all(torch.equal(x, trained[name]) for name, x in begun.model.state_dict().items())
            and f"begins with 11 of its 11 tensors from {init}" in begun.lines
        )
        begun._lock.close()
    # what goes on from a checkpoint does not begin again
    again = Run(plan(tmp_path, epochs=2, init="nowhere.safetensors", resume=True), Alone())
    assert all(torch.equal(x, trained[name]) for name, x in again.model.state_dict().items())


@pytest.mark.parallel(2)
def test_stages_take_their_layers(comm, tmp_path):
    folder = comm.bcast(str(tmp_path))
    torch.manual_seed(3)
    source = Net(2, 3)
    if comm.rank == 0:
        random_store(f"{folder}/store.h5", train=[(32, 48)] * 2)
        saved(source, f"{folder}/a.safetensors")
    comm.Barrier()
    settings = Config(
        model=ModelConfig(f"{__name__}:Net"), data=DataConfig(store=f"{folder}/store.h5"), mesh=MeshConfig(stages=2, reducer=TRANSPORT),
        train=TrainConfig(epochs=1, output=f"{folder}/run", init=f"{folder}/a.safetensors"),
    )  # fmt: skip
    run, wanted = Run(settings, comm), source.state_dict()
    found = {name: x for name, x in run.model.state_dict().items() if not x.is_meta}
    assert found and all(torch.equal(x, wanted[name]) for name, x in found.items())
    assert sum(comm.allgather(len(found))) >= len(wanted)


def test_a_frozen_part_stays_and_a_late_one_waits(tmp_path):
    before = {
        name: x.clone()
        for name, x in build_model(replace(NET, in_channels=2, out_channels=3)).state_dict().items()
    }
    settings = replace(
        plan(tmp_path),
        optim=OptimConfig("adamw", weight_decay=0.1, rates={"encoder.stem": 0}, thaw={"head": 5}),
    )
    train(settings, Alone())
    after = distseg.load(tmp_path / "run", Net(2, 3), normalise=False).state_dict()
    stayed = {name for name, x in after.items() if torch.equal(x, before[name])}
    assert stayed == {"encoder.stem.weight", "encoder.stem.bias", "head.weight", "head.bias"}
    resumed = Run(replace(settings, train=replace(settings.train, epochs=2, resume=True)), Alone())
    assert {len(group["params"]) for group in resumed.engine.optimizer.param_groups} == {2, 4}
    assert all(
        resumed.engine.optimizer.state[p]
        for group in resumed.engine.optimizer.param_groups
        for p in group["params"]
    )
