"""The Python interface beside what users of PyTorch have: checkpoints, schedulers, a GradScaler, copies, a DeviceMesh, DDP."""

import copy
import io
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from made_transports import over
from mpirunner import transport
from test_api import ADAMW, CE, SGD, images, network
from test_transport import torchrun
from torch import nn

import distseg
from distseg.api import _axes_of

CRITERION = distseg.PixelLoss(CE)


def model_on(comm, seed: int = 0, **axes):
    torch.manual_seed(seed)
    mesh = distseg.init_mesh(**(axes or dict(tiles=(1, comm.size))), comm=comm)
    return distseg.distribute(network(nn.InstanceNorm2d), mesh)


def train(model, optimizers, steps, scheduler=None) -> list[float]:
    losses = []
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(model.backward(*images(step, 1), CRITERION).item())
        for optimizer in optimizers:
            optimizer.step()
        if scheduler:
            scheduler.step()
    return losses


def halves(model) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    encoder = [p for name, p in named.items() if name.startswith(("a.", "b."))]
    decoder = [p for name, p in named.items() if not name.startswith(("a.", "b."))]
    return [ADAMW(encoder), SGD(decoder)]


# Checkpoints


@pytest.mark.parallel([1, 2, 4])
def test_a_checkpoint_is_restored_bit_for_bit(comm, shared_path):
    """Weights, two optimizers, a scheduler, and the images that were seen."""
    model = model_on(comm)
    optimizers = halves(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)
    train(model, optimizers, range(3), scheduler)
    path = distseg.save(
        shared_path, model, optimizers, step=3, extra={"scheduler": scheduler.state_dict()}
    )
    assert path.name == "step-00000003" and (path / "manifest.json").exists()
    wanted = train(model, optimizers, range(3, 5), scheduler)
    other = model_on(comm, seed=1)
    fresh = halves(other)
    step, extra = distseg.restore(shared_path, other, fresh)
    after = torch.optim.lr_scheduler.StepLR(fresh[0], 2, 0.5)
    after.load_state_dict(extra["scheduler"])
    assert step == 3 and fresh[0].param_groups[0]["betas"] == (0.9, 0.999)
    assert train(other, fresh, range(3, 5), after) == wanted
    for ours, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(ours, theirs)
    assert other.images_seen == model.images_seen
    assert [g["lr"] for g in fresh[0].param_groups] == [g["lr"] for g in optimizers[0].param_groups]


@pytest.mark.parallel([2, 4])
@pytest.mark.covering(cases=2)
@pytest.mark.parametrize("stages_first", [True, False])
def test_a_checkpoint_is_restored_on_another_mesh(comm, shared_path, stages_first):
    axes = [dict(stages=2, tiles=(1, comm.size // 2)), dict(tiles=(1, comm.size))]
    one, other = (
        model_on(comm, seed, **a) for seed, a in enumerate(axes[:: 1 if stages_first else -1])
    )
    optimizer, fresh = ADAMW(one.parameters()), ADAMW(other.parameters())
    train(one, [optimizer], range(2))
    distseg.save(shared_path, one, optimizer, step=2)
    distseg.restore(shared_path, other, fresh)
    losses = [train(m, [o], range(2, 4)) for m, o in ((one, optimizer), (other, fresh))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parallel([1, 2, 4])
def test_a_full_disk_at_one_stage_is_raised_on_all_ranks(comm, shared_path, monkeypatch):
    """Let the last rank of the first pipeline fail to write its part, then to finish."""
    model = model_on(comm)
    optimizer = ADAMW(model.parameters())
    train(model, [optimizer], range(1))
    distseg.save(shared_path, model, optimizer, step=1)
    stages = model.mesh.shape.stages
    for function, stage in (("write_tensors", stages - 1), ("_put_in_place", 0)):

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            if model.mesh.pipeline.rank == stage:
                patch.setattr(f"distseg.training.checkpoint.saving.{function}", full)
            where = f"^stage {stage}: .*No space" if stages > 1 else "No space"
            with pytest.raises(ValueError, match=where):
                distseg.save(shared_path, model, optimizer, step=2)
        comm.Barrier()
        names = {p.name for p in (shared_path / "checkpoints").iterdir()}
        assert names == {"step-00000001", "last.json"}
    distseg.save(shared_path, model, optimizer, step=2)
    assert distseg.restore(shared_path, model, optimizer)[0] == 2


def test_what_does_not_fit_a_checkpoint_is_refused(tmp_path):
    model = model_on(distseg.comm.alone.Alone())
    optimizer = ADAMW(model.parameters())
    train(model, [optimizer], range(1))
    with pytest.raises(ValueError, match="extra cannot be saved .*Object of type Tensor"):
        distseg.save(tmp_path, model, optimizer, extra={"x": torch.ones(1)})
    with pytest.raises(ValueError, match=r"\(SGD\) has a parameter that is not of this model"):
        distseg.save(tmp_path, model, SGD([nn.Parameter(torch.ones(1))]))
    with pytest.raises(ValueError, match="has a parameter that an optimizer has already"):
        distseg.save(tmp_path, model, [optimizer, SGD(model.parameters())])
    assert not [*tmp_path.iterdir()], "nothing is written"
    with pytest.raises(ValueError, match="no checkpoint in"):
        distseg.restore(tmp_path, model)
    distseg.save(tmp_path, model, optimizer, step=1)
    with pytest.raises(ValueError, match="AdamW with 1 groups, but SGD with 1 groups are given"):
        distseg.restore(tmp_path, model, SGD(model.parameters()))
    other = distseg.distribute(network(nn.InstanceNorm2d, classes=3), model.mesh)
    with pytest.raises(ValueError, match="is of another model: head.weight is 4x6x1x1"):
        distseg.restore(tmp_path, other, ADAMW(other.parameters()))
    file = next((tmp_path / "checkpoints").glob("*/weights*"))
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="is damaged"):
        distseg.restore(tmp_path, model, optimizer)


def test_state_dicts_go_through_torch_distributed_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, other = (model_on(distseg.comm.alone.Alone(), seed) for seed in range(2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["model"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


SAVED_BY_TORCH = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
import distseg

def model(seed, **axes):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    return distseg.distribute(net, distseg.init_mesh(**axes))

dist.init_process_group("gloo")
staged, tiled = model(0, stages=2), model(1, tiles=(1, 2))
dcp.save({"model": staged.state_dict()}, checkpoint_id=sys.argv[1])
state = {"model": tiled.state_dict()}
dcp.load(state, checkpoint_id=sys.argv[1])
tiled.load_state_dict(state["model"])
wanted = staged.whole_state_dict()
assert all(torch.equal(t, wanted[n]) for n, t in tiled.state_dict().items())
print("equal")
dist.destroy_process_group()
"""


@pytest.mark.last
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_stages_save_their_parts_by_torch_distributed_checkpoint(tmp_path):
    assert torchrun(2, "-c", SAVED_BY_TORCH, tmp_path / "saved").stdout.count("equal") == 2


@pytest.mark.last
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_recipe_beside_ddp(ranks):
    recipe = Path(__file__).parents[1] / "docs/recipes/beside_ddp.py"
    assert re.search(r"loss 0\.\d+ error 0\.\d+", torchrun(ranks, recipe).stdout)


# Copies, schedulers, scaling


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("axis", ["tiles", "stages"])
def test_a_deep_copy_is_a_model_of_its_own(comm, axis):
    model = model_on(comm, **{axis: comm.size if axis == "stages" else (1, comm.size)})
    optimizer = ADAMW(model.parameters())
    train(model, [optimizer], range(1))
    twin = copy.deepcopy(model)
    theirs = ADAMW(twin.parameters())
    before = {name: t.clone() for name, t in twin.state_dict().items()}
    losses = train(model, [optimizer], range(1, 3))
    for name, t in twin.state_dict().items():
        assert torch.equal(t, before[name]), name
    x, _ = images(9, 1)
    assert not torch.equal(model.predict(x), twin.predict(x))
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()) | {"state": {}})
    assert train(twin, [theirs], range(1, 2))[0] == losses[0]


@pytest.mark.parallel([1, 2])
def test_an_average_of_the_weights(comm):
    model = model_on(comm)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = SGD(model.parameters())
    found = []
    for step in range(3):
        train(model, [optimizer], [step])
        average.update_parameters(model)
        found.append([p.detach().clone() for p in model.parameters()])
    for p, steps in zip(average.module.parameters(), zip(*found)):
        torch.testing.assert_close(p, torch.stack(steps).mean(0), rtol=1e-12, atol=1e-14)
    assert average.module.predict(images(0, 1)[0]).shape == (2, 4, 34, 46)


@pytest.mark.parallel([1, 2])
def test_what_a_distributed_model_is_not(comm):
    """A copy of connections in a file, a module to distribute, or a wrapper with the module's attributes."""
    mesh, module = distseg.init_mesh(samples=1, tiles=(1, comm.size), comm=comm), network()
    model = distseg.distribute(module, mesh)
    for save in (pickle.dumps, lambda found: torch.save(found, io.BytesIO())):
        with pytest.raises(ValueError, match="can be pickled: save model.whole_state_dict"):
            save(model)
    with pytest.raises(ValueError, match="distributed already: give your own module"):
        distseg.distribute(model, mesh)
    with pytest.raises(AttributeError, match="no attribute head: .* gave to distseg.distribute"):
        print(model.head)
    assert not hasattr(model, "head")
    assert module.head.weight is dict(model.named_parameters())["head.weight"]


@pytest.mark.parallel([1, 2])
def test_prediction_in_inference_mode_leaves_training_alone(comm):
    mesh, (x, y) = distseg.init_mesh(samples=1, tiles=(1, comm.size), comm=comm), images(0, 1)
    module = network()
    model, wanted = distseg.distribute(copy.deepcopy(module), mesh), module.eval()(x)
    with torch.inference_mode():
        found = model.predict(x.clone())
        tiles = list(model.predict_tiles(x[0].clone()))
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-11, atol=1e-12)
    for box, logits in tiles:
        torch.testing.assert_close(torch.from_numpy(logits), found[(0, slice(None), *box.slices)])
    loss = model.backward(x, y, nn.CrossEntropyLoss())
    assert float(loss) == pytest.approx(F.cross_entropy(module.train()(x), y).item(), rel=1e-12)


def test_a_copy_after_a_step_of_the_eager_form():
    model, (x, y) = distseg.distribute(network(), distseg.init_mesh()), images(0, 1)
    CRITERION(model(model.shard(x)), model.shard(y)).backward()
    found = copy.deepcopy(model)
    assert float(found.backward(x, y, CRITERION)) == float(model.backward(x, y, CRITERION))


@pytest.mark.parametrize(
    "dtype, precision, refused",
    [
        (torch.bfloat16, "fp32", True),
        (torch.float16, "bf16", True),
        (torch.bfloat16, "bf16", False),
        (torch.bfloat16, "fp64", False),
    ],
)
def test_an_autocast_of_another_precision_is_refused(dtype, precision, refused):
    """The precision of the model is chosen in one place; another would change the result silently."""
    kind = torch.float64 if precision == "fp64" else torch.float32
    (x, y), model = images(0, 1), distseg.distribute(network().to(kind), precision=precision)
    x, calls = x.to(kind), []
    calls.append(lambda: model.backward(x, y, nn.CrossEntropyLoss()).item())
    calls.append(lambda: model.eval().predict(x).sum().item())
    for call in calls:
        wanted = call()
        with torch.autocast("cpu", dtype=dtype):
            if refused:
                with pytest.raises(ValueError, match=f"autocast is on .* precision {precision}"):
                    call()
            else:
                assert call() == pytest.approx(wanted, rel=1e-12)


def test_names_of_a_wrapper_are_told_apart():
    model, plain = distseg.distribute(network()), network()
    with pytest.raises(ValueError, match="lacks .*: its names begin with 'module.'"):
        model.load_state_dict({f"module.{n}": t for n, t in plain.state_dict().items()})


class Backwards(nn.Module):
    """A net whose layers of equal shapes are made in another order than they are called in."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.after, self.before = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.after(self.second(self.before(self.first(x))))


@pytest.mark.parametrize("buffers", [False, True])
def test_an_average_has_the_names_and_the_order_of_the_module(buffers):
    plain = Backwards().double()
    model = distseg.distribute(copy.deepcopy(plain), distseg.init_mesh())
    ours, theirs = (
        torch.optim.swa_utils.AveragedModel(m, use_buffers=buffers) for m in (model, plain)
    )
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    with torch.no_grad():
        for m in (model, plain):
            for number, tensor in enumerate([*m.parameters(), *m.buffers()]):
                tensor.fill_(number)
    ours.update_parameters(model)
    theirs.update_parameters(plain)
    state, wanted = ours.state_dict(), theirs.state_dict()
    assert [*state] == [*wanted] and all(torch.equal(state[n], wanted[n]) for n in wanted)


@pytest.mark.parallel([1, 2])
def test_a_module_around_it_loads_its_state(comm):
    axes = dict(stages=2) if comm.size == 2 else dict()
    around = nn.ModuleDict({"net": model_on(comm, **axes), "own": nn.Linear(1, 1)})
    plain = nn.ModuleDict({"net": network(nn.InstanceNorm2d), "own": nn.Linear(1, 1)})
    wanted = {name: torch.full_like(t, n) for n, (name, t) in enumerate(plain.state_dict().items())}
    assert not any(around.load_state_dict(wanted))
    found = around["net"].whole_state_dict()
    assert all(torch.equal(t, wanted[f"net.{name}"]) for name, t in found.items())
    name = f"net.{next(iter(around['net'].state_dict()))}"
    wrong = {"net.more" if n == name else n: t for n, t in wanted.items()}
    assert around.load_state_dict(wrong, strict=False) == ([name], ["net.more"])
    with pytest.raises(ValueError, match="leave assign out"):
        around.load_state_dict(wanted, assign=True)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    "schedule",
    [
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=5),
        partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (step + 1)),
    ],
)
def test_schedulers_are_those_of_plain_pytorch(comm, schedule):
    model, plain = model_on(comm), network(nn.InstanceNorm2d)
    ours, theirs = SGD(model.parameters()), SGD(plain.parameters())
    our_schedule, their_schedule = schedule(ours), schedule(theirs)
    losses = train(model, [ours], range(4), our_schedule)
    wanted = []
    for step in range(4):
        x, y = images(step, 1)
        theirs.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        theirs.step()
        their_schedule.step()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-11)


class Spike(nn.Module):
    """A network whose gradient is infinite where a pixel of the image is large."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)).exp())


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("axis", ["tiles", "stages", "samples"])
def test_a_grad_scaler_scales_unscales_and_skips_on_all_ranks_alike(comm, axis):
    """The overflow is in one rank's tile or sample alone."""
    torch.manual_seed(0)
    mesh = distseg.init_mesh(**{axis: (1, comm.size) if axis == "tiles" else comm.size}, comm=comm)
    model = distseg.distribute(Spike().double(), mesh)
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    groups = mesh.shape.samples
    scales, moved = [], []
    for step in range(5):
        x, y = images(step, groups)
        if step == 1:
            x[0, :, 0, 0] = 1e4  # at the corner of the first image
        mine = slice(2 * mesh.sample, 2 * mesh.sample + 2)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(torch.zeros(()))  # makes the scale
        model.backward(x[mine], y[mine], CRITERION, scale=scaler.get_scale())
        scaler.unscale_(optimizer)
        if step == 0:
            unscaled = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            model.images_seen = 0
            model.backward(x[mine], y[mine], CRITERION)
            for p, g in zip(model.parameters(), unscaled):
                torch.testing.assert_close(g, p.grad, rtol=1e-12, atol=1e-16)
        scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(p, b) for p, b in zip(model.parameters(), before)))
        scales.append(scaler.get_scale())
    assert moved == [True, False, True, True, True]
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**10]
    assert len(set(map(str, comm.allgather((scales, moved))))) == 1


# Meshes of others


class Dims:
    def __init__(self, **sizes):
        self.mesh_dim_names, self.mesh = tuple(sizes), torch.zeros(*sizes.values())


@pytest.mark.parametrize(
    "sizes, axes",
    [
        (dict(samples=2, tiles_0=3, tiles_1=4, stages=5), (2, (3, 4), 5)),
        (dict(samples=2), (2, (1, 1), 1)),
        (dict(tiles=2, stages=2), (1, (1, 2), 2)),
        (dict(tiles_z=2, tiles_y=3, tiles_x=4), (1, (2, 3, 4), 1)),
    ],
)
def test_the_axes_of_a_device_mesh(sizes, axes):
    assert _axes_of(Dims(**sizes)) == axes


@pytest.mark.parametrize("names", [("dp",), ("stages", "samples"), ("samples", "stages", "tiles")])
def test_a_device_mesh_with_other_names_is_refused(names):
    with pytest.raises(ValueError, match="name them samples, tiles"):
        _axes_of(Dims(**dict.fromkeys(names, 1)))


@transport.needs_mpi
@pytest.mark.parallel(2)
def test_a_communicator_of_mpi4py_in_another_order(comm):
    other = comm.Split(0, -comm.rank)
    model = model_on(other, tiles=(1, 2))
    assert model.mesh.tile == (0, 1 - comm.rank)
    twin = model_on(over("torch", comm), tiles=(1, 2))
    losses = [train(m, [SGD(m.parameters())], range(2)) for m in (model, twin)]
    assert losses[0] == losses[1]


def test_the_page_names_what_is_tested_here():
    text = (Path(__file__).parents[1] / "docs/python.md").read_text()
    for name in ("distseg.save", "distseg.restore", "GradScaler", "DeviceMesh", "copy.deepcopy"):
        assert re.search(re.escape(name), text), name
