"""One optimizer step: in pieces, in micro-batches, in parts of an image: the same gradient, and statistics counted once."""

import copy

import pytest
import torch
from torch import nn

from distseg.comm.collective import Alone
from distseg.comm.waits import Ranks, Waits
from distseg.config.settings import LossConfig
from distseg.data.sampler import Rows
from distseg.layers.context import Context
from distseg.layers.conv import weights_apart
from distseg.layers.graph import receptive_field
from distseg.layers.loss import Loss
from distseg.models.layers import Pop, Stash, skip_store
from distseg.models.unet import unet
from distseg.runtime.partition import Partition
from distseg.runtime.pipeline import Pipeline
from distseg.runtime.schedule import splits
from distseg.runtime.stage import Stage
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.tile import TilePlacement, tiles, window
from distseg.tiling.tile_batch import TileBatch
from distseg.training.step import GradientStep, LossHead, StageRunner

SIZE = (21, 27)


def model_of(norm: str):
    torch.manual_seed(0)
    model = unet(
        depth=1,
        num_convs=1,
        base_channels=4,
        in_channels=2,
        out_channels=3,
        norm=norm,
        dropout=0.2,
        groups=2,
    ).double()
    return model


def images(count: int):
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(count, 2, *SIZE, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 3, (count, *SIZE), generator=draw)
    labels[
        torch.rand(labels.shape, generator=draw) < torch.linspace(0, 0.9, count).view(-1, 1, 1)
    ] = 255
    return pixels, labels


def pieces(numbers, grid, reach) -> list[TileBatch]:
    """The windows of a grid of tiles, each of the images with these numbers."""
    pixels, labels = images(4)
    found = []
    for t in tiles(SIZE, grid, reach.stride):
        w = window(t, SIZE, reach)

        def cut(x, box):
            return x[numbers][(..., *box.slices)]

        found.append(
            TileBatch(
                cut(pixels, w),
                cut(labels, t),
                TilePlacement(SIZE, t, w, tuple(range(len(numbers))), tuple(numbers)),
            )
        )
    return found


def step_of(
    tiled, name: str, rows: Rows, replicas, schedule: str = "1f1b", waits: Waits = Waits()
) -> GradientStep:
    """A pipeline of one stage on this rank."""
    loss, partition = Loss(LossConfig(name), 3), Partition.whole()
    head = LossHead(loss, rows, replicas)
    pipeline = Pipeline(partition, [Stage(0, tiled, None, [], [], head)], Ranks(Alone(), waits))
    return GradientStep(
        StageRunner(pipeline, schedule, tiled.has_active_norms), head, loss, tiled.context
    )


def step(
    norm, loss, micro_batches, grid=(1, 1), frozen=False, schedule="1f1b", waits: Waits = Waits()
):
    """(loss, gradients, model) of a step over the given sample numbers."""
    model = copy.deepcopy(model_of(norm))
    reach = receptive_field(model)
    tiled = parallelize(
        model, reach, Context(around=weights_apart(waits) if splits(schedule) else skip_store)
    ).train()
    if frozen:
        tiled.freeze_norms()
    rows = Rows(1, 0, len(micro_batches), len(micro_batches[0]))
    value = step_of(tiled, loss, rows, Alone(), schedule, waits)(
        [pieces(numbers, grid, reach) for numbers in micro_batches]
    )
    return value, {name: p.grad for name, p in model.named_parameters()}, tiled


def same(found, wanted) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-12 * gradient.norm(), name


def test_weights_wait_for_their_action():
    """All that a backward pass puts off is there when its action comes, and gone when that ends; with nothing put off the step is the same."""
    due, waits = {}, Waits()
    done = waits.finish

    def finish(action: str | None) -> None:
        due[action] = [piece.action for piece in waits._pieces]
        done(action)
        assert action not in [piece.action for piece in waits._pieces]

    wanted = step("instance", "cross_entropy", [[0], [1]])
    same(step("instance", "cross_entropy", [[0], [1]], schedule="zb-h1"), wanted)
    waits.finish = finish
    with waits.putting_off():
        found = step("instance", "cross_entropy", [[0], [1]], schedule="zb-h1", waits=waits)
        assert not waits._pieces
    same(found, wanted)
    convolutions = sum(
        isinstance(layer, nn.modules.conv._ConvNd) for layer in model_of("instance").modules()
    )
    assert due.pop(None) == []  # before a pass
    assert due == {"W0,0": ["W0,0"] * convolutions, "W1,0": ["W1,0"] * convolutions}


LOSSES = ["cross_entropy", "dice", "focal + 0.5*dice"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("norm", ["instance", "none"])
@pytest.mark.parametrize("micro_batches", [[[0], [1], [2], [3]], [[0, 1], [2, 3]]])
def test_accumulation_is_the_same_as_at_once(norm, loss, micro_batches):
    same(step(norm, loss, micro_batches), step(norm, loss, [[0, 1, 2, 3]]))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "norm, frozen",
    [("instance", False), ("group", False), ("batch", False), ("batch", True), ("none", False)],
)
def test_several_pieces_are_the_same_as_the_whole(norm, loss, frozen):
    same(
        step(norm, loss, [[0, 1], [2, 3]], grid=(2, 3), frozen=frozen),
        step(norm, loss, [[0, 1], [2, 3]], frozen=frozen),
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_statistics_are_counted_once(loss):
    """Dice needs a forward pass before the real one: it must leave no trace."""
    one, many = (
        step("batch", name, [[0, 1], [2, 3]], grid=(1, 2))[2] for name in ("cross_entropy", loss)
    )
    assert [len(n.seen[0]) for n in many.norms] == [2] * len(many.norms)
    for tiled in (one, many):
        tiled.commit_statistics()
    for a, b in zip(one.norms, many.norms):
        assert torch.equal(a.running_mean, b.running_mean) and torch.equal(
            a.running_var, b.running_var
        )
        assert (b.num_batches_tracked, b.running_mean.any()) == (1, True)
    assert many.context.tracking


def nested_of(norm: str):
    """Blocks in blocks, as most people write it."""
    torch.manual_seed(0)

    def block(i, o):
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1, bias=False),
            nn.Sequential(
                nn.InstanceNorm2d(o) if norm == "instance" else nn.BatchNorm2d(o), nn.ReLU()
            ),
        )

    return nn.Sequential(
        block(2, 4),
        Stash("a"),
        nn.MaxPool2d(2, ceil_mode=True),
        block(4, 4),
        nn.Upsample(scale_factor=2),
        Pop("a"),
        nn.Conv2d(8, 3, 1),
    ).double()


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_norms_inside_blocks_see_all_pieces_too(norm, monkeypatch):
    monkeypatch.setattr(f"{__name__}.model_of", nested_of)
    same(step(norm, "cross_entropy", [[0, 1]], grid=(2, 3)), step(norm, "cross_entropy", [[0, 1]]))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.InstanceNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x))


def test_norms_hidden_in_other_modules_do_not_take_several_pieces(monkeypatch):
    monkeypatch.setattr(f"{__name__}.model_of", lambda norm: nn.Sequential(Block()).double())
    step("instance", "cross_entropy", [[0, 1]])
    with pytest.raises(
        ValueError,
        match="holds 6 windows of one micro-batch, but this model has norms that use the statistics of the current images",
    ):
        step("instance", "cross_entropy", [[0, 1]], grid=(2, 3))


def test_rows_of_the_step_are_dealt_micro_batch_by_micro_batch():
    """2 groups x 2 micro-batches x 3 images."""
    table = [[[Rows(2, g, 2, 3).row(m, i) for i in range(3)] for m in range(2)] for g in range(2)]
    assert table == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
    assert Rows(2, 0, 2, 3).total == 12


@pytest.mark.parallel(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_two_sample_groups_are_one_step(comm, loss):
    model = model_of("instance")
    reach = receptive_field(model)
    tiled = parallelize(model, reach, Context()).train()
    mine = [[0, 1], [2, 3]][comm.rank]
    run = step_of(tiled, loss, Rows(2, comm.rank, 1, 2), comm)
    value = run([pieces(mine, (1, 1), reach)])
    gradients = {
        name: torch.from_numpy(comm.allreduce(p.grad.numpy()))
        for name, p in model.named_parameters()
    }
    same((value, gradients), step("instance", loss, [[0, 1, 2, 3]]))


@pytest.mark.parametrize("loss", ["cross_entropy", "dice"])
def test_a_step_of_ignored_pixels_has_loss_and_gradient_0(loss, monkeypatch):
    nothing = images(4)[0], torch.full((4, *SIZE), 255)
    monkeypatch.setattr(f"{__name__}.images", lambda count: nothing)
    value, gradients, _ = step("instance", loss, [[0], [1]])
    assert value == 0 and not any(g.any() for g in gradients.values())
