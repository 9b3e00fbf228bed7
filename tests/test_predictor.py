"""Tiles one after another give the whole image's result, in the memory of one."""

import copy
import dataclasses
import gc
import itertools
import sys
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

import made_networks
import numpy as np
import pytest
import torch
from torch import nn

from distseg.comm.collective import Alone
from distseg.comm.memory_format import channels_last as last_format
from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.inference import predictor as predictor_module
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.inference.windows import Windows
from distseg.layers.graph import receptive_field
from distseg.models.capture.capture import as_network
from distseg.models.layers import Pop, Stash
from distseg.models.network import calls_of
from distseg.models.unet import unet
from distseg.models.zoo import build_model
from distseg.runtime.partition import Partition
from distseg.runtime.streaming import MicroBatchRun
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.tile import Box, TilePlacement, tiles, window

SIZE = (61, 45)
CPU = torch.device("cpu")


def network(norm: str, dims: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = unet(
        depth=2,
        num_convs=1,
        base_channels=4,
        in_channels=2,
        out_channels=3,
        norm=norm,
        groups=2,
        dims=dims,
    ).double()
    for layer in model:
        if getattr(layer, "running_var", None) is not None:
            layer.running_mean.uniform_(-0.5, 0.5)
            layer.running_var.uniform_(0.5, 2)
    return model.eval()


def image(size=SIZE) -> torch.Tensor:
    return (
        torch.randn(1, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        + 1
    )


def predictor_of(model: nn.Module, tile, comm=Alone(), reach=None, **settings) -> Predictor:
    last = settings.get("channels_last", False)
    tiled = parallelize(
        model.to(memory_format=last_format(len(Size(tile)) + 2)) if last else model,
        reach or receptive_field(model),
    )
    return Predictor(tiled.train(), comm, [CPU], nullcontext, Size(tile), **settings)


def scene_of(x: torch.Tensor) -> ImageSource:
    return ImageSource(
        "a", tuple(x.shape[2:]), lambda box: x[0][(slice(None), *box.slices)].numpy()
    )


def streamed(model: nn.Module, tile, x: torch.Tensor, **settings) -> torch.Tensor:
    """The tiles of an image, put together."""
    out = torch.full((1, 3, *x.shape[2:]), torch.nan, dtype=x.dtype)
    for box, y in predictor_of(copy.deepcopy(model), tile, **settings)(scene_of(x)):
        out[(..., *box.slices)] = torch.from_numpy(y)
    return out


@pytest.mark.covering(2)
@pytest.mark.parametrize("norm", ["batch", "instance", "group", "none"])
@pytest.mark.parametrize("tile", ["64x64", "21x23", "4x4"])
@pytest.mark.parametrize("scratch", ["memory", "folder"])
def test_the_whole_images_result(norm, tile, scratch, tmp_path):
    model, x = network(norm), image()
    torch.testing.assert_close(
        streamed(model, tile, x, scratch="memory" if scratch == "memory" else str(tmp_path)),
        model(x),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_volumes(norm):
    model, x = network(norm, dims=3), image((9, 13, 10))
    torch.testing.assert_close(streamed(model, "5x13x4", x), model(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm, exact", [("batch", True), ("batch", False), ("instance", True)])
def test_memory_does_not_grow_with_the_number_of_tiles(norm, exact, monkeypatch):
    """The boxes of one tile or a few exist at a time, also before the first result."""
    monkeypatch.setattr(predictor_module, "_PLANNED", 4)
    model, x = network(norm), image()
    predictor = predictor_of(copy.deepcopy(model), "4x8", exact=exact)
    out, alive, scene = torch.full((1, 3, *SIZE), torch.nan, dtype=x.dtype), [], scene_of(x)
    reads = itertools.count(1)

    def read(box):
        if next(reads) % 30 == 0:
            alive.append(boxes_alive() - before)
        return scene.read(box)

    before = boxes_alive()
    source = dataclasses.replace(scene, read=read)
    for number, (box, y) in enumerate(predictor(source)):
        out[(..., *box.slices)] = torch.from_numpy(y)
        if number % 30 == 1:
            alive.append(boxes_alive() - before)
    assert number == 16 * 6 - 1 and len(alive) == 7 and max(alive) < 150, alive
    torch.testing.assert_close(out, model(x), rtol=1e-10, atol=1e-12)


def test_prediction_does_not_import_what_only_a_backward_pass_needs(monkeypatch):
    """The module would import sympy, which takes 40 MB."""
    x = image().float()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
        model = build_model(ModelConfig(in_channels=2, out_channels=3, depth=1, base_channels=2))
        found = streamed(model.eval(), "16x16", x)
    torch.testing.assert_close(found, model(x))


def boxes_alive() -> int:
    return sum(type(found) is Box for found in gc.get_objects())


def test_volumes_in_single_precision():
    """By oneDNN's convolution itself, where PyTorch would take a slower one."""
    model, x = network("instance", dims=3).float(), image((9, 13, 10)).float()
    for last in (False, True):
        torch.testing.assert_close(
            streamed(model, "5x13x4", x, channels_last=last), model(x), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    "norm, size",
    [
        ("instance", (97, 131)),
        ("group", (97, 131)),
        ("instance", (17, 21, 26)),
        ("group", (17, 21, 26)),
    ],
)
def test_tiles_within_a_memory_wait_in_files(norm, size, tmp_path):
    model, x = network(norm, dims=len(size)), image(size)
    settings = dict(budget=300e3 if len(size) == 2 else 600e3, scratch=str(tmp_path))
    assert len(predictor_of(copy.deepcopy(model), size, **settings).tiles_of(size)) > 2
    torch.testing.assert_close(
        streamed(model, size, x, **settings), model(x), rtol=1e-12, atol=1e-12
    )


def test_nested_blocks_are_streamed_as_flat_ones():
    """A Sequential of Sequentials, as most people write it: norms inside blocks see the whole image too."""
    torch.manual_seed(0)

    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.InstanceNorm2d(o), nn.ReLU())

    model = nn.Sequential(
        block(2, 4),
        Stash("a"),
        nn.MaxPool2d(2, ceil_mode=True),
        block(4, 4),
        nn.Upsample(scale_factor=2),
        Pop("a"),
        nn.Conv2d(8, 3, 1),
    )
    model, x = model.double().eval(), image()
    torch.testing.assert_close(streamed(model, "21x23", x), model(x), rtol=1e-10, atol=1e-12)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "name",
    [
        "residuals",
        "pyramid",
        "dense",
        "squeezed",
        "excited",
        "split",
        "pooling",
        "convnext",
        "merged",
    ],
)
@pytest.mark.parametrize("settings", [dict(scratch="memory"), dict(budget=400e3)])
def test_networks_whose_layers_read_any_maps(name, settings):
    """Two norms on one map, maps that several segments read, joins of levels, means of the image and what is computed of them."""
    torch.manual_seed(0)
    model, x = getattr(made_networks, name)(3, 3).double().eval(), image((36, 32))[:, [0, 1, 0]]
    torch.testing.assert_close(
        streamed(as_network(model), "11x13", x, **settings), model(x), rtol=1e-10, atol=1e-12
    )


def test_maps_wait_in_the_scratch_folder_and_leave_it_clean(tmp_path, monkeypatch):
    from distseg.runtime import offload as scratch

    made, reserved = [], scratch._reserved
    monkeypatch.setattr(
        scratch,
        "_reserved",
        lambda size, folder: made.append((size, folder)) or reserved(size, folder),
    )
    tiles = predictor_of(network("instance"), "32x32", scratch=str(tmp_path))(scene_of(image()))
    next(tiles)
    assert (
        len(made) == 5
        and {folder for _, folder in made} == {str(tmp_path)}
        and not list(tmp_path.iterdir())
    ), "files without a name"
    tiles.close()
    made.clear()
    streamed(network("batch"), "32x32", image(), scratch=str(tmp_path))
    streamed(network("instance"), "32x32", image(), scratch="memory")
    assert not made


def test_maps_go_to_a_folder_where_memory_is_short(monkeypatch):
    from distseg.inference import predictor
    from distseg.runtime import offload as scratch

    made, reserved = [], scratch._reserved
    monkeypatch.setattr(
        scratch, "_reserved", lambda size, folder: made.append(folder) or reserved(size, folder)
    )
    streamed(network("instance"), "32x32", image())
    assert not made
    monkeypatch.setattr(predictor, "free_memory", lambda: 10_000)
    streamed(network("instance"), "32x32", image())
    assert set(made) == {tempfile.gettempdir()}


def test_a_full_scratch_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("distseg.runtime.offload.free_bytes", lambda folder: 10_000)
    with pytest.raises(
        OSError, match=f"scratch folder {tmp_path}, where 0.00 GB are free.*predict.scratch"
    ):
        streamed(network("instance"), "32x32", image(), scratch=str(tmp_path))


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_tiles_are_as_large_as_the_memory_allows(norm):
    model, x = network(norm), image((97, 131))
    counts = []
    for budget in (200e3, 1e6, 1e9):
        predictor = predictor_of(copy.deepcopy(model), "16x16", budget=budget)
        torch.testing.assert_close(
            streamed(model, "16x16", x, budget=budget), model(x), rtol=1e-10, atol=1e-12
        )
        counts.append(len(predictor.tiles_of((97, 131))))
    assert counts[0] > counts[1] > counts[2] == 1


class NotFlat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.InstanceNorm2d(3))

    def forward(self, x):
        return self.layers(x)


def test_what_is_not_known_is_predicted_in_one_piece():
    model = NotFlat().double().eval()
    assert list(predictor_of(copy.deepcopy(model), "32x32").tiles_of(SIZE)) == [Box.whole(SIZE)]
    torch.testing.assert_close(
        streamed(model, "32x32", image()), model(image()), rtol=1e-10, atol=1e-12
    )


def predicted(
    comm, norm: str, tile: str, size=SIZE, channels_last=False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Predictor's logits put together from all ranks, the plain model's)."""
    model, x = network(norm).float(), image(size).float()
    wanted = model(x)[0].detach()
    predictor = predictor_of(model, tile, comm, channels_last=channels_last)
    mine = list(predictor(scene_of(x)))
    assert predictor.model.training, "the mode it was in comes back"
    assert [box for box, _ in mine] == [
        predictor.tiles_of(size)[n] for n in predictor.deal(size)[comm.rank]
    ]
    found, covered = np.full(wanted.shape, np.nan, np.float32), np.zeros(size, int)
    for part in comm.allgather(mine):
        for box, logits in part:
            assert all(n < max(4, t // 4 * 4) + 4 for n, t in zip(box.size, Size(tile))), (
                "as large as asked, to a cell of 4 pixels"
            )
            found[(slice(None), *box.slices)] = logits
            covered[box.slices] += 1
    assert (covered == 1).all()
    return torch.from_numpy(found), wanted


@pytest.mark.parallel([1, 3])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["batch", "instance", "group", "none"])
def test_the_predictor_over_ranks(comm, norm):
    for tile in ("32x20", "1024x1024"):  # the last: fewer tiles than ranks
        found, wanted = predicted(comm, norm, tile)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["batch", "instance", "group", "none"])
def test_maps_keep_their_channels_last(norm, monkeypatch):
    """Through every layer and on every tile, as PyTorch's kernels see it, which go by the strides of a lone image too: else each of them copies."""
    monkeypatch.setattr("distseg.layers.norm._SMALL", 0)
    apart, layer = [], MicroBatchRun._layer

    def watched(walk, number, *more):
        y = layer(walk, number, *more)
        if not nn.functional.max_pool2d(y, 2).is_contiguous(memory_format=torch.channels_last):
            apart.append((number, y.stride()))
        return y

    monkeypatch.setattr(MicroBatchRun, "_layer", watched)
    x = image((96, 96)).float()
    list(predictor_of(network(norm).float(), "48x48", channels_last=True)(scene_of(x)))
    assert not apart


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


@pytest.mark.parallel(2)
def test_windows_that_go_through_stages_keep_their_numbers(comm):
    """Six windows, of which four are in the pipeline at once; the last stage has the outputs."""
    model, x = network("none"), image()
    y, cut = model(x), Partition.from_balance(calls_of(model), [5, len(model) - 5])
    tiled = parallelize(model, receptive_field(model)).eval()
    places = [
        TilePlacement(SIZE, tile, window(tile, SIZE, tiled.reach), (0,), (0,))
        for tile in tiles(SIZE, (3, 2), tiled.reach.stride)
    ]
    found = Windows(tiled, cut, comm, CPU, nullcontext)(
        places, lambda i: x[(..., *places[i].window.slices)]
    )
    wanted = {i: y[(..., *place.tile.slices)] for i, place in enumerate(places)}
    torch.testing.assert_close(dict(found), wanted if comm.rank else {})


def test_tiles_of_a_predictor():
    predictor = predictor_of(network("batch").float(), "3x21")
    assert list(predictor.tiles_of((5, 45))) == [
        Box((0, 0), (4, 16)),
        Box((0, 16), (4, 32)),
        Box((0, 32), (4, 45)),
        Box((4, 0), (5, 16)),
        Box((4, 16), (5, 32)),
        Box((4, 32), (5, 45)),
    ]


def test_the_layout_of_an_image_follows_its_blocks():
    predictor, size = predictor_of(network("instance"), (16, 16)), (32, 32)
    cuts = [[(0, 32), (0, 32)], [(0, 16, 32), (0, 32)], [(0, 32), (0, 16, 32)], None]
    assert [predictor.layout(size, borders).grid for borders in cuts] == [
        (1, 1), (2, 1), (1, 2), (1, 1)
    ]  # fmt: skip


def test_a_skip_that_is_the_map_before_a_norm():
    """A pre-activation block: all wait in one file, as tensors of their own, also two skips of one map behind a convolution."""

    def conv(a, b):
        return nn.Conv2d(a, b, 3, padding=1)

    model = nn.Sequential(
        conv(2, 4),
        Stash("r"),
        Stash("s"),
        conv(4, 4),
        Stash("t"),
        nn.InstanceNorm2d(4),
        conv(4, 4),
        Pop("t"),
        Pop("s"),
        Pop("r"),
        conv(16, 3),
    ).double()
    x = image()
    torch.testing.assert_close(streamed(model, "31x15", x), model(x), rtol=1e-10, atol=1e-12)


def dealt(norm: str, ranks: int, sizes, tile="16x16"):
    predictor = predictor_of(network(norm), tile)
    predictor.replicas = SimpleNamespace(size=ranks, rank=0)
    together, shares = predictor.deal_images(sizes)
    return together, [[(share.image, share.tiles) for share in mine] for mine in shares]


def test_tiles_that_do_not_depend_on_each_other_are_dealt_to_all_ranks_alike():
    together, shares = dealt("batch", 3, [(32, 32), (16, 16), (48, 16)])  # 4, 1 and 3 tiles
    assert together == 1
    assert shares == [[(0, [0, 1])], [(0, [2, 3]), (1, [0])], [(2, [0, 1, 2])]]
    assert dealt("batch", 4, [(16, 16)]) == (1, [[], [], [], [(0, [0])]])
    assert dealt("batch", 2, []) == (1, [[], []])


def test_images_whose_tiles_depend_on_each_other_are_dealt_to_groups_of_ranks():
    assert dealt("instance", 4, [(32, 32)] * 3) == (
        4,
        [[(0, None), (1, None), (2, None)]] * 4,
    )  # 4 tiles: work for all ranks
    assert dealt("instance", 4, [(32, 16)] * 3) == (
        2,
        [[(0, None), (2, None)]] * 2 + [[(1, None)]] * 2,
    )
    assert dealt("instance", 4, [(16, 16)] * 3) == (1, [[(0, None)], [(1, None)], [(2, None)], []])
    assert dealt("instance", 4, [(16, 16)]) == (
        4,
        [[(0, None)]] * 4,
    )  # one of them computes, the others have nothing to do
    assert dealt("instance", 5, [(32, 16)] * 9) == (
        2,
        [[(0, None), (2, None), (4, None), (6, None), (8, None)]] * 2
        + [[(1, None), (3, None), (5, None), (7, None)]] * 2
        + [[]],
    )


@pytest.mark.parametrize("tile", ["8x8", "16x20", "32x32"])
def test_tiles_that_lie_in_the_zeros_behind_an_image(tile):
    """Of a deep map that is cut finer than what was filled up."""
    torch.manual_seed(0)
    model = made_networks.filled_means(3, 2).double().eval()
    x = torch.randn(1, 3, 35, 41, dtype=torch.float64)
    wanted = model(x)[0].detach().numpy()
    tiled = parallelize(
        as_network(copy.deepcopy(model)), receptive_field(as_network(copy.deepcopy(model)))
    ).eval()
    found = np.full_like(wanted, np.nan)
    for box, logits in Predictor(tiled, Alone(), [CPU], nullcontext, Size(tile))(
        ImageSource("x", (35, 41), lambda box: x[0].numpy()[(slice(None), *box.slices)])
    ):
        found[(slice(None), *box.slices)] = logits
    assert abs(found - wanted).max() < 1e-12


@pytest.mark.parametrize(
    "norm, size",
    [
        ("instance", (4, 4)),
        ("group", (4, 4)),
        ("batch", (4, 4)),
        ("instance", (4, 5)),
        ("group", (2, 2)),
    ],
)
def test_an_image_too_small_for_a_norm_is_refused_before_it_is_computed(norm, size):
    """Behind two poolings an image of 4x4 pixels has one cell; a group has several channels there, batch norm needs none."""
    model, x = network(norm), image(size)
    predictor = predictor_of(copy.deepcopy(model), "64x64")
    if (norm, size) == ("instance", (4, 4)):
        with pytest.raises(
            ValueError,
            match="a norm needs at least 2 values per channel, but the feature map of this image has 1",
        ):
            predictor.check(size)
    else:
        predictor.check(size)
        torch.testing.assert_close(streamed(model, "64x64", x), model(x), rtol=1e-10, atol=1e-12)
