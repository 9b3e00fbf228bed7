"""Windows one after another give the whole image's result, in the memory of one."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from distseg.extents import Extents
from distseg.geometry.receptive import receptive_field
from distseg.geometry.tile import Box, Place, tiles, window
from distseg.models.layers import Pop, Stash
from distseg.models.unet import unet
from distseg.predict import Predictor
from distseg.scene import Scene
from distseg.spatial.parallelize import parallelize
from distseg.spatial.stream import stream

SIZE = (61, 45)
CPU = torch.device("cpu")


def network(norm: str, dims: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = unet(depth=2, num_convs=1, base_channels=4, in_channels=2, out_channels=3, norm=norm, groups=2, dims=dims).double()
    for layer in model:
        if getattr(layer, "running_var", None) is not None:
            layer.running_mean.uniform_(-0.5, 0.5)
            layer.running_var.uniform_(0.5, 2)
    return model.eval()


def image(size=SIZE) -> torch.Tensor:
    return torch.randn(1, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1


def streamed(model: nn.Module, grid, x: torch.Tensor, scratch=None) -> torch.Tensor:
    """The tiles of a grid, streamed and put together."""
    size, reach = tuple(x.shape[2:]), receptive_field(model)
    tiled = parallelize(copy.deepcopy(model), reach).eval()
    places = [Place(size, t, window(t, size, reach), (0,), (0,)) for t in tiles(size, grid, reach.stride)]
    out = torch.full((1, 3, *size), torch.nan, dtype=x.dtype)
    for i, y in stream(tiled, places, lambda i: x[(..., *places[i].window.slices)], scratch):
        out[(..., *places[i].tile.slices)] = y
    return out


@pytest.mark.parametrize("norm", ["batch", "instance", "group", "none"])
@pytest.mark.parametrize("grid", [(1, 1), (3, 2), (16, 12)])
def test_the_whole_images_result(norm, grid):
    model, x = network(norm), image()
    torch.testing.assert_close(streamed(model, grid, x), model(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_volumes(norm):
    model, x = network(norm, dims=3), image((9, 13, 10))
    torch.testing.assert_close(streamed(model, (2, 1, 3), x), model(x), rtol=1e-10, atol=1e-12)


def test_nested_blocks_are_streamed_as_flat_ones():
    """A Sequential of Sequentials, as most people write it: norms inside blocks see the whole image too."""
    torch.manual_seed(0)
    block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.InstanceNorm2d(o), nn.ReLU())
    model = nn.Sequential(block(2, 4), Stash("a"), nn.MaxPool2d(2, ceil_mode=True), block(4, 4), nn.Upsample(scale_factor=2), Pop("a"), nn.Conv2d(8, 3, 1))
    model, x = model.double().eval(), image()
    torch.testing.assert_close(streamed(model, (3, 2), x), model(x), rtol=1e-10, atol=1e-12)


def test_activations_wait_in_the_scratch_folder_and_leave_it_clean(tmp_path):
    model, x = network("instance"), image()
    tiled = parallelize(copy.deepcopy(model), receptive_field(model)).eval()
    reach = tiled.reach
    places = [Place(SIZE, t, window(t, SIZE, reach), (0,), (0,)) for t in tiles(SIZE, (2, 2), reach.stride)]
    run = stream(tiled, places, lambda i: x[(..., *places[i].window.slices)], str(tmp_path))
    next(run)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4
    run.close()
    assert not list(tmp_path.iterdir())
    streamed(network("batch"), (2, 2), x, str(tmp_path / "is not needed where norms are fixed"))


def test_a_full_scratch_folder_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("No space left on device")

    monkeypatch.setattr("distseg.spatial.stream.save_file", full)
    with pytest.raises(OSError, match=f"scratch folder {tmp_path}.*No space left.*GiB free there.*predict.scratch"):
        streamed(network("instance"), (2, 2), image(), str(tmp_path))


class NotFlat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.InstanceNorm2d(3))

    def forward(self, x):
        return self.layers(x)


def test_live_norms_need_a_flat_model():
    with pytest.raises(ValueError, match="not a flat nn.Sequential can not be streamed.*use batch norm"):
        streamed(NotFlat().double(), (2, 2), image())


def predicted(comm, norm: str, tile: str, size=SIZE, channels_last=False) -> tuple[torch.Tensor, torch.Tensor]:
    """(Predictor's logits put together from all ranks, the plain model's)."""
    model, x = network(norm).float(), image(size).float()
    wanted = model(x)[0].detach()
    reach = receptive_field(model)
    tiled = parallelize(model.to(memory_format=torch.channels_last) if channels_last else model, reach)
    predictor = Predictor(tiled.train(), comm, CPU, nullcontext, Extents(tile), channels_last=channels_last)
    scene = Scene("a", size, lambda box: x[0][(slice(None), *box.slices)].numpy())
    mine = list(predictor(scene))
    assert tiled.training, "the mode it was in comes back"
    found, covered = np.full(wanted.shape, np.nan, np.float32), np.zeros(size, int)
    for part in comm.allgather(mine):
        for box, logits in part:
            assert all(n < max(4, t // 4 * 4) + 4 for n, t in zip(box.size, Extents(tile))), "as large as asked, to a cell of 4 pixels"
            found[(slice(None), *box.slices)] = logits
            covered[box.slices] += 1
    assert (covered == 1).all()
    return torch.from_numpy(found), wanted


@pytest.mark.parallel([1, 3])
@pytest.mark.parametrize("norm", ["batch", "instance", "group", "none"])
def test_the_predictor_over_ranks(comm, norm):
    for tile in ("32x20", "1024x1024"):  # the last: fewer tiles than ranks
        found, wanted = predicted(comm, norm, tile)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_the_predictor_in_channels_last(comm, norm):
    found, wanted = predicted(comm, norm, "20x20", channels_last=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parallel(2)
def test_one_predictor_for_images_of_different_sizes(comm):
    for size in ((5, 3), (61, 45), (8, 9), (97, 33)):
        found, wanted = predicted(comm, "instance", "16x16", size)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_tiles_of_a_predictor():
    from distseg.comm.collective import Alone

    model = network("batch").float()
    predictor = Predictor(parallelize(model, receptive_field(model)), Alone(), CPU, nullcontext, Extents("3x21"))
    assert predictor.tiles_of((5, 45)) == [Box((0, 0), (4, 16)), Box((0, 16), (4, 32)), Box((0, 32), (4, 45)), Box((4, 0), (5, 16)), Box((4, 16), (5, 32)), Box((4, 32), (5, 45))]


def test_a_skip_that_is_the_map_before_a_norm():
    """A pre-activation block: all wait in one file, as tensors of their own, also two skips of one map behind a convolution."""
    conv = lambda a, b: nn.Conv2d(a, b, 3, padding=1)
    model = nn.Sequential(conv(2, 4), Stash("r"), Stash("s"), conv(4, 4), Stash("t"), nn.InstanceNorm2d(4), conv(4, 4), Pop("t"), Pop("s"), Pop("r"), conv(16, 3)).double()
    x = image()
    torch.testing.assert_close(streamed(model, (2, 3), x), model(x), rtol=1e-10, atol=1e-12)
